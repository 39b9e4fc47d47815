"""Measured ceilings of this machine: memory bandwidth by a copy or a sum, FLOP/s by the vendor's GEMMs.

A GEMM takes at least the longer of its memory time and its compute time. Both rates are measured at the start of a
benchmark: data sheets give clocks that no machine sustains.
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
    """Measured rates.  gb_s: memory bandwidth.  tflop_s: of the tensor cores, `bf16` and, if there are FP8 tensor
    cores, `fp8`.  copy_gb_s: bandwidth of a copy, which reads and writes equal parts."""

    gb_s: float
    tflop_s: Mapping[str, float]
    copy_gb_s: float | None = None

    def bound_us(self, flops: int, moved: int, units: str) -> float:
        """Lower bound in µs: the longer of compute time on those units (bf16's if they do not exist) and memory time.

        >>> Ceilings(4000.0, {"bf16": 700.0}).bound_us(1_400_000_000, 4_000_000, "fp8")
        2.0
        """
        rate = self.tflop_s.get(units, self.tflop_s["bf16"])
        return max(flops / rate / 1e6, moved / self.gb_s / 1e3)


def find(device: torch.device, *, rounds: int = 5, seconds: float = 0.004) -> Ceilings:
    """Measure the ceilings in turns; takes less than a second on a GPU. Tiny shapes on a CPU."""
    large = device.type == "cuda"
    shape, product = (MAIN, SQUARE) if large else (TINY, TINY_PRODUCT)
    source = random(shape, device)
    target = torch.empty_like(source)
    operands = make_operands(product, ("fp8_1x128", "fp8_128x128"), device, accumulate=False)

    def ready(call: Callable[[], object]) -> Slice:
        return prepare([call], device, seconds=seconds)

    # larger than L2, so that one input set is enough
    slices = {"copy": ready(lambda: target.copy_(source)), "sum": ready(lambda: source.sum(dtype=torch.float32))}
    slices["bf16"] = ready(lambda: plain(operands))
    with contextlib.suppress(RuntimeError, NotImplementedError):  # no FP8 tensor cores, or no such GEMM in this torch
        slices["fp8"] = ready(lambda: rowwise(operands, fast=True))
    us = {name: timing.us for name, timing in measure(slices, rounds=rounds).items()}
    bytes_once = 2 * numel(shape)
    copy_gb_s = 2 * bytes_once / us["copy"] / 1e3
    gb_s = max(copy_gb_s, bytes_once / us["sum"] / 1e3)
    rates = {name: 2 * numel(product) / us[name] / 1e6 for name in ("bf16", "fp8") if name in us}
    return Ceilings(gb_s, rates, copy_gb_s)


def measure_roof(device: torch.device) -> roofs.Ceilings:
    """Measured ceilings of this machine for the roofline model; raises without a GPU of sm_80 or newer."""
    architecture = roofs.architecture_of(capability(device).sm)
    if architecture is None:
        rule = "ceilings are measured on a GPU of sm_80 or newer"
        fix = "run it there, or leave --measure out and name a machine: --machine h200"
        raise DeviceError(message(f"device {str(device)!r}", rule=rule, fix=fix))
    return as_roof(find(device, rounds=11, seconds=0.02), gpu_name(device), architecture)


def as_roof(found: Ceilings, gpu: str, architecture: roofs.Architecture) -> roofs.Ceilings:
    """Ceilings of `find` for the roofline model. FP4 is not measured: its rate is FP8's times the ratio of the two in
    the specification.

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
