"""Benchmarks: every row is checked before it is timed, and every figure that is published is a stored row.

timing and telemetry measure, harness checks and measures one case, suites list the cases, peers are what others would
write, store keeps rows as JSON lines, report turns them into tables and a picture. Of products, `products` holds the
operands and the exact result, `product_peers` the other ways to it, `ceilings` what the machine reaches at best.
"""
