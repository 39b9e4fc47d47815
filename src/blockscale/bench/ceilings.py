"""What this machine reaches on its own: bytes by a copy or a sum, FLOPs by the vendor's plain products.

A product cannot take less than the longer of its two floors. Both are measured at the start of a run, not looked up:
data sheets give clocks and power limits that no machine holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import DeviceError, message
from ..hardware import capability, gpu_name
from ..roofline import ceilings as roofs
from .harness import random
from .product_peers import plain, rowwise
from .products import make_operands
from .shapes import MAIN, SQUARE, TINY, TINY_PRODUCT, numel
from .timing import Slice, measure, prepare


@dataclass(frozen=True)
class Ceilings:
    """gb_s: of memory.  tflop_s: of the matrix units, `bf16` and, where there are such units, `fp8`.  copy_gb_s: of
    memory that is read and written in equal parts."""

    gb_s: float
    tflop_s: Mapping[str, float]
    copy_gb_s: float | None = None

    def bound_us(self, flops: int, moved: int, units: str) -> float:
        """The longer of the time for the FLOPs on those units, or bf16's where they do not exist, and for the bytes.

        >>> Ceilings(4000.0, {"bf16": 700.0}).bound_us(1_400_000_000, 4_000_000, "fp8")
        2.0
        """
        rate = self.tflop_s.get(units, self.tflop_s["bf16"])
        return max(flops / rate / 1e6, moved / self.gb_s / 1e3)


def find(device: torch.device, *, rounds: int = 5, seconds: float = 0.004) -> Ceilings:
    """Measure them, in turns; less than a second on a GPU, a formality elsewhere."""
    large = device.type == "cuda"
    shape, product = (MAIN, SQUARE) if large else (TINY, TINY_PRODUCT)
    source = random(shape, device)
    target = torch.empty_like(source)
    operands = make_operands(product, ("fp8_1x128", "fp8_128x128"), device, accumulate=False)

    def ready(call: Callable[[], object]) -> Slice:
        return prepare([call], device, seconds=seconds)

    # large enough that one set does not stay in the cache
    slices = {"copy": ready(lambda: target.copy_(source)), "sum": ready(lambda: source.sum(dtype=torch.float32))}
    slices["bf16"] = ready(lambda: plain(operands))
    with contextlib.suppress(RuntimeError, NotImplementedError):  # no such units, or no such product in this torch
        slices["fp8"] = ready(lambda: rowwise(operands, fast=True))
    us = {name: timing.us for name, timing in measure(slices, rounds=rounds).items()}
    bytes_once = 2 * numel(shape)
    copy_gb_s = 2 * bytes_once / us["copy"] / 1e3
    gb_s = max(copy_gb_s, bytes_once / us["sum"] / 1e3)
    rates = {name: 2 * numel(product) / us[name] / 1e6 for name in ("bf16", "fp8") if name in us}
    return Ceilings(gb_s, rates, copy_gb_s)


def measure_roof(device: torch.device) -> roofs.Ceilings:
    """The same as the roof of a layer on this machine; an error where there is no GPU with matrix units for bf16."""
    architecture = roofs.architecture_of(capability(device).sm)
    if architecture is None:
        rule = "ceilings are measured on a GPU of sm_80 or newer"
        fix = "run it there, or leave --measure out and name a machine: --machine h200"
        raise DeviceError(message(f"device {str(device)!r}", rule=rule, fix=fix))
    return as_roof(find(device, rounds=11, seconds=0.02), gpu_name(device), architecture)


def as_roof(found: Ceilings, gpu: str, architecture: roofs.Architecture) -> roofs.Ceilings:
    """What `find` found, for the model. Nothing here multiplies FP4: its rate is FP8's times what the specifications
    of the two are apart.

    >>> as_roof(Ceilings(4000.0, {"bf16": 700.0, "fp8": 1400.0}), "NVIDIA H200", "hopper").fp8
    1400000000000000.0
    """
    bf16, fp8 = found.tflop_s["bf16"] * 1e12, found.tflop_s.get("fp8")
    fp8 = None if fp8 is None else fp8 * 1e12
    machine, fp4, source = (
        roofs.machine_of(gpu),
        None,
        "measured here: copy or sum, and the vendor's products at 8192^3",
    )
    sheet = None if machine is None else roofs.NOMINAL[machine]
    if sheet is not None and sheet.fp4 is not None and sheet.fp8 is not None and fp8 is not None:
        fp4, source = fp8 * sheet.fp4 / sheet.fp8, f"{source}; fp4 from fp8 by the specification"
    return roofs.Ceilings(gpu, architecture, found.gb_s * 1e9, bf16, fp8, fp4, source, measured=True)
