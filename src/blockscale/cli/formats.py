"""`blockscale formats`: the ten formats, their value grids, and their quantization error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

Errors = dict[str, dict[str, float]]  # format -> tensor -> SQNR in dB


def run(plot: Path | None = None, errors: bool = False) -> int:
    """Show the ten formats: element grid, block, scale, rules and storage.

    With --errors, also cast tensors with the distributions of weights, activations, outlier channels and gradients to
    every format, and show signal to noise, clipped and underflowed share, and the backend of the cast.

    Args:
        plot: Also draw the value grids, and with --errors the signal to noise, to this file (.png, .svg or .pdf).
        errors: Measure the quantization error of each format.
    """
    arguments.check_picture(plot, "--plot")
    console = arguments.plain_console()
    for made in (_formats_table(), _options_table(), _grid_table()):
        console.print(made)
    measured = _measure(console) if errors else {}
    if plot is not None:
        draw(plot, measured)
        console.print(f"wrote {plot}")
    return 0


def _formats_table() -> Table:
    from ..formats import FORMATS

    made = arguments.table(
        "formats (bits per value, with scales)", ("format", "element", "block", "scale", "bits"), padding=0
    )
    for spec in FORMATS.values():
        scale = {"mx": "E8M0", "nvfp4": "E4M3 and fp32", "fp8": "fp32"}[spec.family]
        block = f"{spec.block[0]}x{spec.block[1]}"
        made.add_row(spec.name, spec.element.name.upper(), block, scale, f"{spec.bits_per_value:.4g}")
    return made


def _options_table() -> Table:
    from ..formats import FORMATS

    made = arguments.table("their scales (defaults first)", ("format", "scale rules", "scale layouts"), padding=0)
    for spec in FORMATS.values():
        rules = [spec.default_rule(), *(rule for rule in spec.rules if rule != spec.default_rule())]
        made.add_row(spec.name, " ".join(rules), " ".join(spec.layouts))
    return made


def _grid_table() -> Table:
    from ..formats import ELEMENTS, grid

    headings = ("elem", "bits", "largest", "normal from", "smallest", "values", "grid (non-negative)")
    made = arguments.table("elements", headings, padding=0)
    for element in ELEMENTS.values():
        values = [f"{value:.3g}" if value < 1 else f"{value:g}" for value in grid(element)]
        shown = values if len(values) <= 8 else [*values[:2], "...", *values[-2:]]
        limits = (f"{element.max_normal:g}", f"2^{element.emin}", f"2^{element.emin - element.mbits}")
        made.add_row(element.name.upper(), str(element.bits), *limits, str(len(values)), " ".join(shown))
    return made


def _measure(console: Console) -> Errors:
    """Cast tensors with the distributions of a model to each format, and print the errors; returns the SQNR in dB."""
    with console.status("importing torch ..."):
        from .. import explain, quantize
        from ..diagnostics import measure
        from ..formats import FORMATS

    tensors, numbers = _samples(), ("clipped", "underflow")
    title = "SQNR in dB, and the largest share of values clipped or lost to underflow"
    made = arguments.table(title, ("format", *tensors, *numbers, "backend"), (*tensors, *numbers), padding=0)
    found, backends = Errors(), dict[str, str]()
    for name in FORMATS:
        quality = {tensor: measure(x, quantize(x, name)) for tensor, x in tensors.items()}
        found[name] = {tensor: each.sqnr_db.item() for tensor, each in quality.items()}
        clipped, underflow = (max(getattr(each, share).item() for each in quality.values()) for share in numbers)
        taken = explain("cast", tensors["weight"], name).taken
        assert taken is not None
        backends[taken.backend] = taken.summary
        sqnr = (f"{value:.1f}" for value in found[name].values())
        made.add_row(name, *sqnr, f"{clipped:.2%}", f"{underflow:.2%}", taken.backend)
    console.print(made)
    console.print(
        "weight: Gaussian. hidden: SwiGLU of Gaussians. outlier: hidden, with 16 of 384 channels 20 to 60 times "
        "larger, as large models grow them. gradient: heavy tails (Student's t, 3 degrees of freedom)"
    )
    for backend, why in backends.items():
        console.print(f"[dim]backend {backend}: {why} (blockscale explain cast shows why it is taken)[/]")
    return found


def _samples() -> dict[str, Tensor]:
    """Tensors [512, 384] in bf16 with the distributions that a model has, on the default device."""
    import torch

    from ..hardware import default_device

    generator = torch.Generator().manual_seed(0)
    weight, gate, up, *squares = torch.randn(6, 512, 384, generator=generator)
    hidden, outlier = torch.nn.functional.silu(gate) * up, torch.ones(384)
    outlier[torch.randperm(384, generator=generator)[:16]] = 20 + 40 * torch.rand(16, generator=generator)
    gradient = weight.roll(1, 0) / torch.stack(squares).square().mean(0).sqrt()
    tensors = {"weight": weight, "hidden": hidden, "outlier": hidden * outlier, "gradient": gradient}
    return {name: tensor.bfloat16().to(default_device()) for name, tensor in tensors.items()}


def draw(path: Path, errors: Errors) -> None:
    """Draw the value grids of the five elements, each scaled to a largest value of 1; and the SQNR of each format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ..formats import ELEMENTS, grid

    panels = 3 if errors else 2
    size = (5.5 * panels, 3.6)
    figure, (linear, logarithmic, *noise) = pyplot.subplots(1, panels, figsize=size, layout="constrained")
    for row, element in enumerate(ELEMENTS.values()):
        values = [value / element.max_normal for value in grid(element)]
        for axes, shown in ((linear, values), (logarithmic, [value for value in values if value > 0])):
            axes.vlines(shown, row - 0.32, row + 0.32, color="#1f77b4", linewidth=0.9)
    linear.set_yticks(range(len(ELEMENTS)), [f"{e.name.upper()}  ({e.bits} bits)" for e in ELEMENTS.values()])
    logarithmic.set_yticks([])
    linear.set_xlabel("value / largest value")
    logarithmic.set_xlabel("value / largest value, octaves")
    logarithmic.set_xscale("log", base=2)
    for axes in (linear, logarithmic):
        axes.invert_yaxis()
        axes.set_title("what a block can express before it is scaled", fontsize=9)
    for axes in noise:
        _draw_noise(axes, errors)
    for axes in (linear, logarithmic, *noise):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_noise(axes: Axes, errors: Errors) -> None:
    """SQNR of each format, a bar for each tensor."""
    tensors = list(next(iter(errors.values())))
    width = 0.8 / len(tensors)
    for index, tensor in enumerate(tensors):
        places = [place + (index - (len(tensors) - 1) / 2) * width for place in range(len(errors))]
        axes.bar(places, [found[tensor] for found in errors.values()], width * 0.92, label=tensor)
    axes.set_xticks(range(len(errors)), list(errors), rotation=30, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_ylabel("signal to quantization noise, dB")
    axes.legend(frameon=False, ncols=len(tensors), fontsize=8)
