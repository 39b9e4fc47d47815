"""`blockscale convert-checkpoint`: a checkpoint in another layout or format; every weight is kept or said to change."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from . import arguments


def run(
    source: Path,
    target: Path,
    /,
    layout: str = "blockscale",
    format: str | None = None,
    allow_rounding: bool = False,
    json: bool = False,
) -> int:
    """Write a checkpoint in another layout, and say of every weight whether it was kept, re-expressed exactly, rounded
    or left out. A weight that would have to be rounded is an error without --allow-rounding.

    Args:
        source: Folder of safetensors files, or a GGUF file.
        target: New folder.
        layout: blockscale, deepseek, gpt_oss, compressed_tensors, modelopt or unquantized.
        format: Format of the weights, or bf16; theirs if not given, or one that holds their values exactly.
        allow_rounding: Round weights that the format does not hold exactly, and cast unquantized linear layers to it.
        json: Print one JSON object for each weight.
    """
    arguments.check_writable(target, "TARGET", is_folder=True)
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from .. import checkpoints

    with console.status("reading headers ...") as status:

        def progress(done: int, total: int) -> None:
            status.update(f"{done / 1e9:,.1f} of {total / 1e9:,.1f} GB")

        report = checkpoints.convert(
            source, target, layout, format=format, allow_rounding=allow_rounding, progress=progress
        )
    if json:
        for row in report.rows:
            print(json_module.dumps(row._asdict()))
    else:
        console.print(str(report), highlight=False, markup=False)
    return 0
