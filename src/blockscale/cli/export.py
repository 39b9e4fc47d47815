"""`blockscale export`: weights of a training run as a checkpoint, with the bytes of training."""

from __future__ import annotations

from pathlib import Path

from . import arguments


def run(run: Path, target: Path, /, layout: str = "blockscale", format: str | None = None) -> int:
    """Write the weights of a run as safetensors with Hugging Face's names. Layers that the run converted are cast as
    its forward casts them; the others keep their dtype. Dense models only.

    Args:
        run: Folder of a run, from blockscale train --folder; its last checkpoint is taken. Or a step-* folder in it.
        target: New folder.
        layout: blockscale, deepseek, compressed_tensors, modelopt or unquantized.
        format: Format of the converted layers, or bf16; default: that of the run's recipe.
    """
    arguments.check_writable(target, "TARGET", is_folder=True)
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..train.export import export_run

    with console.status("casting weights ..."):
        done = export_run(run, target, layout, format)
    kinds: dict[str, int] = {}
    for _, kind, _ in done.weights:
        kinds[kind] = kinds.get(kind, 0) + 1
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    size = sum(path.stat().st_size for path in done.files)
    console.print(
        f"{done.checkpoint} -> {target}: {layout}, {text}, {size / 1e6:,.1f} MB", highlight=False, markup=False
    )
    return 0
