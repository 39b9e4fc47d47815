"""Pages, goals and pictures of this repository, made from the rows in benchmarks/results: `make report`.

A page per suite: casts, gemm, layers (linear, mlp), moe, speed and training (steps and loss). `headline` has the table
of the README, `index` the list of all goals. Not part of the wheel.
"""
