"""`blockscale collect`: what compare and speed left in folders, as the few lines that a repository keeps."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path("benchmarks/results/training-h200.jsonl")


def run(folder: Path = Path("out"), /, json: Path = RESULTS, pool: bool = False) -> int:
    """Read finished runs of comparisons and of throughput, and store their figures; nothing is run. Status 1 if there
    are none. `blockscale bench report` makes tables and the picture of them.

    Args:
        folder: What compare or speed wrote (--out), or a folder of such folders.
        json: File to store lines in; a line replaces that of the same model, recipe and length on the same GPU.
        pool: Put seeds together with those that the file has of the same model, length and text, and store all of them
            as one comparison, of the arms that both have; for runs with the same options at another time.
    """
    from rich.console import Console

    console = Console()
    with console.status("importing torch ..."):
        from ..bench.trainings import convergences, read, throughputs, write
        from ..train.pool import pool as together
        from ..train.publish import publish

    found = publish(folder)
    for each in found.left_out:
        console.print(f"left out: {each}", highlight=False)
    if not found.lines:
        console.print(f"no finished comparison or throughput in {folder}", highlight=False)
        return 1
    lines = found.lines
    if pool:
        pooled = together(convergences(lines), convergences(read(json)))
        for each in pooled.left_out:
            console.print(f"left out: {each}", highlight=False)
        lines = [*pooled.lines, *throughputs(lines)]
    write(json, lines)
    console.print(f"stored {len(lines)} lines in {json}", highlight=False)
    return 0
