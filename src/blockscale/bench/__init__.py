"""Benchmarks: every row is checked before it is timed, and every published figure is a stored row.

timing and telemetry measure, harness checks and measures one case, suites list the cases, peers are other
implementations, store keeps rows as JSON lines, report turns them into tables and a picture. For GEMMs, `products`
holds the operands and the exact result, `product_peers` other implementations, `ceilings` measured peak rates.
"""
