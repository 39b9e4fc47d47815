"""`blockscale collect`: what compare and speed left in folders, as the few lines that a repository keeps."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path("benchmarks/results/training-h200.jsonl")


def run(folder: Path = Path("out"), /, json: Path | None = None, pool: bool = False) -> int:
    """Read finished runs of comparisons and of throughput, and store their figures; nothing is run. Status 1 if there
    are none. `blockscale bench report` makes tables and the picture of them.

    Args:
        folder: What compare or speed wrote (--out), or a folder of such folders.
        json: File to store lines in; a line replaces that of the same model, recipe and length on the same GPU.
            By default benchmarks/results/training-h200.jsonl, which takes runs of GPUs only.
        pool: Put seeds together with those that the file has of the same model, length and text, and store all of them
            as one comparison, of the arms that both have; for runs with the same options at another time.
    """
    from .arguments import check_writable, plain_console, refuse

    if not folder.is_dir():
        fix = "blockscale compare tiny, which writes out/compare; or name the folder of its --out"
        refuse(f"no folder {folder}", "it is what compare or speed wrote (--out)", fix)
    check_writable(json, "--json")
    console = plain_console()
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
    of_gpus = [line for line in found.lines if not str(line.where.get("device")).startswith("cpu")]
    lines = found.lines if json else of_gpus
    if len(lines) < len(found.lines):
        of_cpus = len(found.lines) - len(lines)
        console.print(f"left out: {of_cpus} lines of runs on a CPU (--json FILE stores them)", highlight=False)
    if not lines:
        return 1
    file = json or RESULTS
    if pool:
        pooled = together(convergences(lines), convergences(read(file)))
        for each in pooled.left_out:
            console.print(f"left out: {each}", highlight=False)
        lines = [*pooled.lines, *throughputs(lines)]
    write(file, lines)
    console.print(f"stored {len(lines)} lines in {file}", highlight=False)
    return 0
