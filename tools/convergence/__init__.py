"""Does training in low precision reach the loss of bf16? Paired runs, a null run, and faults that must be found.

    data.py     bytes of Python's standard library, split by file
    model.py    a small byte-level GPT, and a regression for quick tests
    arms.py     what is compared: recipes, the baseline, the null, and faults put into the reference cast
    gates.py    what finds a fault before a run does: bytes, one product, the first gradient
    trainer.py  one run: paired by its seed, resumable
    report.py   gaps with their errors, verdicts
    picture.py  loss and gap over steps

`make convergence` runs it all; docs/convergence.md has the protocol and what came out.
"""
