"""Benchmarks: every row is checked before it is timed, and every published figure is a stored row.

`suites` list the cases; `harness` checks and times one case by `timing`; `store` and `trainings` keep rows as JSON
lines. `gemms`, `grouped`, `layers` and `expert_layers` make operands, layers and peers, and judge results; `rooflines`
measures ceilings. `benchmarks/report` of the repository makes tables and pictures of stored rows.
"""

# peers of each suite that has some; here, so that they are known without torch
_LAYER_PEERS = frozenset({"bf16", "casts", "torchao", "torchao compiled", "rowwise", "compile"})
PEERS: dict[str, frozenset[str]] = {
    "casts": frozenset({"eager", "compile", "torchao"}),
    "gemm": frozenset({"rows", "bf16", "rowwise", "torchao"}),
    "linear": _LAYER_PEERS,
    "mlp": _LAYER_PEERS,
    "moe": frozenset({"rows", "bf16", "rowwise", "casts", "torchao"}),
}
# peers of layers that are compiled; `rowwise` needs `compile` too
COMPILING = frozenset({"compile", "torchao compiled"})
SUITES = (*PEERS, "dispatch")
