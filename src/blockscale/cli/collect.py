"""`blockscale collect`: the results of compare and speed as JSON lines for the repository."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path("benchmarks/results/training-h200.jsonl")


def run(folder: Path = Path("out"), /, json: Path | None = None, pool: bool = False) -> int:
    """Read finished runs of compare and speed and store their figures; runs nothing. Exit status 1 if there are none.
    `blockscale bench report` makes the tables and the picture from them.

    Args:
        folder: Output folder of compare or speed (--out), or a folder of such folders.
        json: File to store lines in; a line replaces the one of the same model, recipe and length on the same GPU.
            By default benchmarks/results/training-h200.jsonl, which takes only GPU runs.
        pool: Merge the seeds with those of the same model, length and text in the file into one comparison of the
            common arms; for later runs with the same options.
    """
    from .arguments import check_writable, plain_console, refuse

    if not folder.is_dir():
        fix = "blockscale compare tiny, which writes out/compare; or name the folder of its --out"
        refuse(f"no folder {folder}", "it is the output folder of compare or speed (--out)", fix)
    check_writable(json, "--json")
    console = plain_console()
    with console.status("importing torch ..."):
        from ..bench.trainings import convergences, read, throughputs, write
        from ..compare.pool import pool as pool_seeds
        from ..compare.publish import publish

    found = publish(folder)
    for each in found.left_out:
        console.print(f"left out: {each}", highlight=False)
    if not found.lines:
        console.print(f"no finished comparison or throughput in {folder}", highlight=False)
        return 1
    gpu_lines = [line for line in found.lines if not str(line.where.get("device")).startswith("cpu")]
    lines = found.lines if json else gpu_lines
    if len(lines) < len(found.lines):
        cpu_lines = len(found.lines) - len(lines)
        console.print(f"left out: {cpu_lines} lines of runs on a CPU (--json FILE stores them)", highlight=False)
    if not lines:
        return 1
    file = json or RESULTS
    if pool:
        pooled = pool_seeds(convergences(lines), convergences(read(file)))
        for each in pooled.left_out:
            console.print(f"left out: {each}", highlight=False)
        lines = [*pooled.lines, *throughputs(lines)]
    write(file, lines)
    console.print(f"stored {len(lines)} lines in {file}", highlight=False)
    return 0
