"""Benchmarks: every row is checked before it is timed, and every published figure is a stored row.

`suites` list the cases; `harness` checks and times one case by `timing`; `store` and `trainings` keep rows as JSON
lines. `gemms`, `grouped`, `layers` and `expert_layers` make operands, layers and peers, and judge results; `rooflines`
measures ceilings. `benchmarks/report` of the repository makes tables and pictures of stored rows.
"""
