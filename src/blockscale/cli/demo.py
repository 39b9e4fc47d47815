"""`blockscale demo`: quantization error of every format on the tensors of a small trained model, and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from torch import Tensor

    from ..diagnostics.demo_tensors import Samples


@dataclass(frozen=True)
class Row:
    """Quantization error of one format on one tensor."""

    format: str
    tensor: str
    bits: float
    sqnr_db: float
    clipped: float
    underflow: float
    backend: str
    why: str


def run(out: Path = Path("out/demo.png"), steps: int = 100) -> int:
    """Train a tiny model for a few seconds, cast its weight, activation and gradient to every format, and show bits per
    value, signal to noise, clipped and underflowed share, and the backend of the cast.

    Args:
        out: File of the picture.
        steps: Training steps of the tiny model.
    """
    from rich.progress import track

    arguments.check_picture(out, "--out")
    arguments.at_least(1, steps, "--steps", "gradients come from a training step")
    console = arguments.plain_console()
    with console.status("importing torch ..."):
        from ..diagnostics.demo_tensors import train_samples
        from ..formats import FORMATS
    samples = train_samples(
        steps, track=lambda items: track(items, "training a tiny model on Python's own source", console=console)
    )
    console.print(
        f"loss {samples.first_loss:.2f} -> {samples.last_loss:.2f} in {steps} steps; "
        "'outlier' is its activation ('act') with 16 channels made 20-60 times larger, as large models grow them"
    )
    cases = [(name, tensor) for name in FORMATS for tensor in samples.tensors]
    rows = [_measure(samples, name, tensor) for name, tensor in track(cases, "casting", console=console)]
    _show(console, rows)
    draw(rows, samples.tensors, out)
    console.print(f"wrote {out}  (next: blockscale doctor, blockscale formats, blockscale explain gemm)")
    return 0


def _measure(samples: Samples, name: str, tensor: str) -> Row:
    from .. import explain, quantize
    from ..diagnostics import measure
    from ..hardware import default_device

    x = samples.tensors[tensor].to(default_device())
    q = quantize(x, name)
    found, taken = measure(x, q), explain("cast", x, name).taken
    assert taken is not None
    shares = (found.sqnr_db.item(), found.clipped.item(), found.underflow.item())
    return Row(name, tensor, q.spec.bits_per_value, *shares, taken.backend, taken.summary)


def _show(console: Console, rows: list[Row]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="SQNR in dB, and the largest share of values clipped or lost to underflow",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0),
    )
    tensors = list(dict.fromkeys(row.tensor for row in rows))
    table.add_column("format", no_wrap=True)
    for heading in ("bits", *tensors, "clipped", "underflow"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in dict.fromkeys(row.format for row in rows):
        own = [row for row in rows if row.format == name]
        clipped, underflow = max(row.clipped for row in own), max(row.underflow for row in own)
        sqnr = [f"{row.sqnr_db:.1f}" for row in own]
        table.add_row(name, f"{own[0].bits:.4g}", *sqnr, f"{clipped:.2%}", f"{underflow:.2%}", own[0].backend)
    console.print(table)
    for backend, why in dict.fromkeys((row.backend, row.why) for row in rows):
        console.print(f"[dim]backend {backend}: {why} (blockscale explain cast shows why it is taken)[/]")


def draw(rows: list[Row], tensors: dict[str, Tensor], path: Path) -> None:
    """Left: SQNR of each format. Right: distribution of values relative to the amax of their block, with the underflow
    limit of each element."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (noise, spread) = pyplot.subplots(1, 2, figsize=(12.5, 4.8), layout="constrained")
    _draw_noise(noise, rows)
    _draw_spread(spread, tensors)
    for axes in (noise, spread):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_noise(axes: Axes, rows: list[Row]) -> None:
    formats = list(dict.fromkeys(row.format for row in rows))
    tensors = list(dict.fromkeys(row.tensor for row in rows))
    width = 0.8 / len(tensors)
    for index, tensor in enumerate(tensors):
        heights = [row.sqnr_db for row in rows if row.tensor == tensor]
        positions = [position + (index - (len(tensors) - 1) / 2) * width for position in range(len(formats))]
        axes.bar(positions, heights, width * 0.92, label=tensor)
    bits = {row.format: row.bits for row in rows}
    labels = [f"{name} ({bits[name]:.3g})" for name in formats]
    axes.set_xticks(range(len(formats)), labels, rotation=30, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_ylabel("signal to quantisation noise, dB")
    axes.set_ylim(0, 46)
    axes.legend(frameon=False, ncols=len(tensors), loc="upper center", fontsize=9)
    axes.set_title("what each format keeps (bits per value)")


def _draw_spread(axes: Axes, tensors: dict[str, Tensor]) -> None:
    from ..formats import ELEMENTS

    for name, tensor in tensors.items():
        blocks = tensor.float().abs().unflatten(-1, (-1, 32))
        ratio = (blocks / blocks.amax(-1, keepdim=True)).flatten()
        octaves = ratio[ratio > 0].log2().clamp(min=-20)
        axes.hist(octaves.numpy(), bins=80, range=(-20, 0), density=True, histtype="step", linewidth=1.4, label=name)
    top = axes.get_ylim()[1]
    for element in ELEMENTS.values():
        floor = element.emin - element.mbits - 1 - element.emax
        if floor > -20:
            axes.axvline(floor, color="0.35", linewidth=0.9, linestyle=":")
            axes.text(floor, top * 1.01, element.name.upper(), ha="center", fontsize=8, color="0.25")
    axes.set_xlabel("octaves below the largest value of a block of 32   (left of a dotted line: lost)")
    axes.set_ylabel("density of values")
    axes.set_xticks(range(-20, 1, 4))
    axes.legend(loc="upper left", fontsize=9, framealpha=1, edgecolor="none")
    axes.set_title("why they differ", pad=16)
