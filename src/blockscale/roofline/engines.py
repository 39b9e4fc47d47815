"""Tensor cores that a product of two formats runs on, for each architecture, as a table.

A machine without tensor cores for a format decodes both operands to bf16 in memory and multiplies those (`upcast`).
That is exact, but moves more bytes and saves only memory over bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..formats.spec import check_pair, get_format
from .ceilings import Architecture, Units


@dataclass(frozen=True)
class Engine:
    """units: tensor-core dtype whose rate counts.  upcast: operands are decoded to bf16 first.  note: for the user."""

    units: Units
    upcast: bool = False
    note: str = ""


BF16, FP8, FP4 = Engine("bf16"), Engine("fp8"), Engine("fp4")
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
    "ada": _row(FP8, _UPCAST),
    "hopper": _row(FP8, _UPCAST, mxfp8_2d=_SCALED_OUTSIDE),
    # its f8f6f4 instructions run at the rate of eight bits
    "blackwell": _row(FP8, FP8, mxfp4=FP4, nvfp4=FP4),
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
        return BF16
    return ENGINES[architecture][kind(a, b)]
