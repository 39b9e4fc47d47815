"""Ceilings of machines: memory bandwidth and tensor-core FLOP/s, measured or from specifications; and the tensor cores
that a product of two formats runs on.

`MEASURED` ceilings come from a run on the machine: a copy, and the vendor's plain products at 8192^3. `NOMINAL` ones
are data sheets: dense rates without sparsity, at clocks and power that no machine sustains; `source` says if no page of
the vendor could be read.

A machine without tensor cores for a format decodes both operands to bf16 in memory and multiplies those (`upcast`).
That is exact, but moves more bytes and saves only memory over bf16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import check_name, refuse
from ..formats.spec import check_pair, get_format

Architecture = Literal["ampere", "ada", "hopper", "blackwell"]
Units = Literal["bf16", "fp8", "fp4"]
# (lowest compute capability, its tensor cores)
_ARCHITECTURES: tuple[tuple[int, Architecture], ...] = ((100, "blackwell"), (90, "hopper"), (89, "ada"), (80, "ampere"))


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of one machine.

    bandwidth: bytes per second.  bf16, fp8, fp4: dense FLOP/s, None without such tensor cores.  source: origin of the
    figures.  measured: by a run on such a machine, not from a data sheet.

    >>> MEASURED["h200"].rate("fp8") / MEASURED["h200"].rate("bf16") > 2
    True
    """

    name: str
    architecture: Architecture
    bandwidth: float
    bf16: float
    fp8: float | None
    fp4: float | None
    source: str
    measured: bool = False

    def rate(self, units: Units) -> float:
        """FLOP/s of those tensor cores; raises if the machine has none."""
        found: float | None = getattr(self, units)
        if found is None:
            rule = f"{self.architecture} has units for {', '.join(self.units)}"
            refuse(f"{units} units of {self.name}", rule, fix="take the rate of one of those")
        return found

    @property
    def units(self) -> tuple[Units, ...]:
        """Tensor-core dtypes of the machine, slowest first."""
        every: tuple[Units, ...] = ("bf16", "fp8", "fp4")
        return tuple(name for name in every if getattr(self, name) is not None)

    @property
    def kind(self) -> str:
        return "measured" if self.measured else "nominal"

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {self.rate(name) / 1e12:,.0f} TFLOP/s" for name in self.units)
        return f"{self.name} {self.kind}: {self.bandwidth / 1e12:.3g} TB/s, {rates}"


def _nominal(
    name: str,
    architecture: Architecture,
    tb_s: float,
    tflop_s: tuple[float, float | None, float | None],
    source: str,
) -> Ceilings:
    bf16, fp8, fp4 = (None if rate is None else rate * 1e12 for rate in tflop_s)
    assert bf16 is not None
    return Ceilings(name, architecture, tb_s * 1e12, bf16, fp8, fp4, source)


# Dense rates; vendors print twice as much, "with sparsity". A source names the vendor's page first, then the page that
# the figures were read from.
NOMINAL: Mapping[str, Ceilings] = {
    "a100": _nominal(
        "A100 SXM 80 GB", "ampere", 2.039, (312, None, None),
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf, read in https://glennklockwood.com/garden/processors/A100",
    ),
    "h100": _nominal(
        "H100 SXM", "hopper", 3.35, (989.4, 1978.9, None),
        "https://www.nvidia.com/en-us/data-center/h100/, read in https://glennklockwood.com/garden/processors/h100",
    ),
    "h800": _nominal(
        "H800 SXM", "hopper", 3.35, (989.4, 1978.9, None),
        "not verified: no page of the vendor was found; the H100's figures, as "
        "https://www.philisun.com/technical-analysis/"
        "nvidia-h800-vs-h100-a-technical-deep-dive-into-politically-defined-ai-chips/ says (NVLink and FP64 differ)",
    ),
    "h200": _nominal(
        "H200 SXM", "hopper", 4.8, (989.4, 1978.9, None),
        "https://www.nvidia.com/en-us/data-center/h200/, read in "
        "https://github.com/stas00/ml-engineering/blob/master/insights/when-to-upgrade-gpus/README.md",
    ),
    "b200": _nominal(
        "B200 SXM", "blackwell", 8.0, (2250, 4500, 9000),
        "https://www.nvidia.com/en-us/data-center/hgx/, read in https://glennklockwood.com/garden/processors/B200 "
        "(at 1,000 W)",
    ),
    "gb200": _nominal(
        "one GPU of a GB200", "blackwell", 8.0, (2500, 5000, 10000),
        "https://www.nvidia.com/en-us/data-center/gb200-nvl72/, read in "
        "https://glennklockwood.com/garden/processors/B200 (at 1,200 W; half of a superchip)",
    ),
    "l20": _nominal(
        "L20", "ada", 0.864, (119.5, 239, None),
        "no page of the vendor was found; a seller's list as printed by https://www.tomshardware.com/pc-components/gpus/"
        "new-nvidia-ai-gpus-designed-to-get-around-us-export-bans-come-to-china-h20-l20-and-l2-to-fill-void-left-by-"
        "restricted-models",
    ),
    "rtx5090": _nominal(
        "RTX 5090", "blackwell", 1.792, (209.5, 419, 1676),
        "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf, sums "
        "in fp32,, read in https://main-horse.github.io/posts/5090-mm-perf, where more than that was measured",
    ),
}  # fmt: skip

# One run each: copies of 16384x8192; bf16 and rowwise FP8 products with fast accumulation, in rows of 1x128 @ 128x128.
MEASURED: Mapping[str, Ceilings] = {
    "h200": Ceilings(
        "H200", "hopper", 4.2e12, 681.6e12, 1397.4e12, None,
        "benchmarks/results/casts-h200.jsonl (commit 3a7a2a0) and gemm-h200.jsonl (commit cb11969)",
        measured=True,
    )
}  # fmt: skip


def nominal(machine: str) -> Ceilings:
    """The specification of a machine by its short name.

    >>> print(nominal("h200"))
    H200 SXM nominal: 4.8 TB/s, bf16 989 TFLOP/s, fp8 1,979 TFLOP/s
    """
    check_name(machine, NOMINAL, "machine")
    return NOMINAL[machine]


def measured(machine: str) -> Ceilings | None:
    """Measured ceilings of a machine, None if there are none.

    >>> measured("b200") is None
    True
    """
    check_name(machine, NOMINAL, "machine")
    return MEASURED.get(machine)


def machine_of(gpu: str) -> str | None:
    """Short name of the machine for a driver's GPU name; None if it is not in the table.

    >>> machine_of("NVIDIA H200"), machine_of("NVIDIA GeForce RTX 5090"), machine_of("NVIDIA GB200"), machine_of("T4")
    ('h200', 'rtx5090', 'gb200', None)
    """
    plain = re.sub("[^a-z0-9]", "", gpu.lower())
    found = [name for name in NOMINAL if name in plain]
    return max(found, key=len) if found else None


def architecture_of(sm: int) -> Architecture | None:
    """Tensor-core architecture of a compute capability, None before sm_80.

    >>> architecture_of(90), architecture_of(120), architecture_of(75)
    ('hopper', 'blackwell', None)
    """
    return next((name for least, name in _ARCHITECTURES if sm >= least), None)


# ---- tensor cores ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """units: tensor-core dtype whose rate counts.  upcast: operands are decoded to bf16 first.  note: for the user."""

    units: Units
    upcast: bool = False
    note: str = ""


_BF16, _FP8, _FP4 = Engine("bf16"), Engine("fp8"), Engine("fp4")
_UPCAST = Engine("bf16", upcast=True, note="no units for it: decoded to bf16, which saves no time")
_NO_FP8 = Engine("bf16", upcast=True, note="no FP8 units: not sensible, fp32 scales do not even decode exactly")
# FP8 tensor cores, scales applied outside of them for every 32 values: measured at bf16's rate (benchmarks/gemm.md)
_SCALED_OUTSIDE = Engine("bf16", note="in FP8 units, scaled outside of them, which halves their rate")

_MX_AND_NVFP4 = ("mxfp8", "mxfp8_2d", "mxfp6", "mxfp4", "nvfp4")


def _row(fp8: Engine, others: Engine, **known: Engine) -> Mapping[str, Engine]:
    return {"fp8": fp8, **dict.fromkeys(_MX_AND_NVFP4, others), **known}


# architecture -> kind of product (see `kind`) -> engine
ENGINES: Mapping[Architecture, Mapping[str, Engine]] = {
    "ampere": _row(_NO_FP8, _UPCAST),
    "ada": _row(_FP8, _UPCAST),
    "hopper": _row(_FP8, _UPCAST, mxfp8_2d=_SCALED_OUTSIDE),
    # its f8f6f4 instructions run at the rate of eight bits
    "blackwell": _row(_FP8, _FP8, mxfp4=_FP4, nvfp4=_FP4),
}


def kind(a: str, b: str) -> str:
    """Kind of a product of two formats: the family and, for MX, the wider element; `2d` for square weight blocks.

    >>> kind("mxfp4", "mxfp8_e5m2"), kind("mxfp8_e4m3", "mxfp8_e4m3_128x128"), kind("fp8_1x128", "fp8_128x128")
    ('mxfp8', 'mxfp8_2d', 'fp8')
    """
    check_pair(a, b)
    first, second = get_format(a), get_format(b)
    if first.family != "mx":
        return first.family
    bits = max(first.element.bits, second.element.bits)
    square = second.is_2d and first.element.bits == 8
    return f"mxfp{bits}" + ("_2d" if square else "")


def engine_for(architecture: Architecture, a: str | None, b: str | None) -> Engine:
    """The engine of a product of two formats; None is unquantized.

    >>> engine_for("hopper", "fp8_1x128", "fp8_128x128").units
    'fp8'
    >>> engine_for("hopper", "nvfp4", "nvfp4_16x16").upcast, engine_for("blackwell", "nvfp4", "nvfp4_16x16").units
    (True, 'fp4')
    """
    if a is None or b is None:
        return _BF16
    return ENGINES[architecture][kind(a, b)]
