"""`blockscale formats`: the ten formats, their value grids, and their quantization error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor


def run(errors: bool = False) -> int:
    """Show the ten formats: element grid, block, scale, rules and storage.

    With --errors, also cast tensors with the distributions of weights, activations, outlier channels and gradients to
    every format, and show signal to noise, clipped and underflowed share, and the backend of the cast.

    Args:
        errors: Measure the quantization error of each format.
    """
    console = arguments.plain_console()
    for made in (_formats_table(), _options_table(), _grid_table()):
        console.print(made)
    if errors:
        _measure(console)
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


def _measure(console: Console) -> None:
    """Cast tensors with the distributions of a model to each format, and print the errors."""
    with console.status("importing torch ..."):
        from .. import explain, quantize
        from ..diagnostics import measure
        from ..formats import FORMATS

    tensors, numbers = _samples(), ("clipped", "underflow")
    title = "SQNR in dB, and the largest share of values clipped or lost to underflow"
    made = arguments.table(title, ("format", *tensors, *numbers, "backend"), (*tensors, *numbers), padding=0)
    backends = dict[str, str]()
    for name in FORMATS:
        quality = {tensor: measure(x, quantize(x, name)) for tensor, x in tensors.items()}
        clipped, underflow = (max(getattr(each, share).item() for each in quality.values()) for share in numbers)
        taken = explain("cast", tensors["weight"], name).taken
        assert taken is not None
        backends[taken.backend] = taken.summary
        sqnr = (f"{each.sqnr_db.item():.1f}" for each in quality.values())
        made.add_row(name, *sqnr, f"{clipped:.2%}", f"{underflow:.2%}", taken.backend)
    console.print(made)
    console.print(
        "weight: Gaussian. hidden: SwiGLU of Gaussians. outlier: hidden, with 16 of 384 channels 20 to 60 times "
        "larger, as large models grow them. gradient: heavy tails (Student's t, 3 degrees of freedom)"
    )
    for backend, why in backends.items():
        console.print(f"[dim]backend {backend}: {why} (blockscale explain cast shows why it is taken)[/]")


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
