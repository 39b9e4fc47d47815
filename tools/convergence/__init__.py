"""Does training in low precision reach the loss of bf16? Paired runs, a null run, and faults that must be detected.

    data.py     bytes of Python's standard library, split by file
    model.py    a small byte-level GPT, and a regression for quick tests
    arms.py     recipes, the baseline, the null run (fp32 GEMMs), and faults injected into the reference cast
    gates.py    checks without training: bytes, one GEMM, the first gradient
    trainer.py  one run: paired by its seed, resumable
    report.py   gaps with standard errors, verdicts
    picture.py  loss and gap over steps

`make convergence` runs all of it; docs/convergence.md has the protocol and the results.
"""
