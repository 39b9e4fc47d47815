"""The ten formats: element grid, block shape, scale type, scale rules and storage, as plain data.

Everything else in the library looks formats up here by name; a format is added here only. Sizes: a format stores
`element bits + scale bits / block size` per value (mxfp8: 8.25, nvfp4: 4.5, fp8_1x128: 8.25 bits).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from ..errors import check_name, refuse
from ..names import LEGAL_PAIRS as LEGAL_PAIRS
from ..names import PLAIN_NAMES
from ..names import check_pair as check_pair


@dataclass(frozen=True)
class Element:
    """A tiny float: sign, `ebits` of exponent, `mbits` of mantissa, from the top bit down.

    `nan_code` is the code written under a NaN scale; elements without a NaN write their largest value there.
    """

    name: str
    ebits: int
    mbits: int
    bias: int
    max_normal: float
    nan_code: int
    has_nan: bool = False
    has_inf: bool = False

    @property
    def bits(self) -> int:
        return 1 + self.ebits + self.mbits

    @property
    def emax(self) -> int:
        """Exponent of the largest value."""
        return (self.max_bits >> 23) - 127

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (self.emin - self.mbits)

    @property
    def max_bits(self) -> int:
        """fp32 pattern of the largest value."""
        return struct.unpack("<I", struct.pack("<f", self.max_normal))[0]

    @property
    def max_mantissa(self) -> int:
        """fp32 mantissa field of the largest value: what the rceil rule compares with."""
        return self.max_bits & 0x7FFFFF


E4M3 = Element("e4m3", 4, 3, 7, 448.0, 0x7F, has_nan=True)
E5M2 = Element("e5m2", 5, 2, 15, 57344.0, 0x7F, has_nan=True, has_inf=True)
E2M3 = Element("e2m3", 2, 3, 1, 7.5, 0x1F)
E3M2 = Element("e3m2", 3, 2, 3, 28.0, 0x1F)
E2M1 = Element("e2m1", 2, 1, 1, 6.0, 0x7)
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M3, E3M2, E2M1)}

MX_RULES = ("rceil", "floor", "ceil", "even")
NVFP4_RULES = ("nearest", "up")
FP8_RULES = ("fp32", "pow2")


@dataclass(frozen=True)
class Format:
    """A block-scaled format. `block` is (across, along) the scaled axis; the first rule and layout are the defaults.

    family: mx (one power of two per block), nvfp4 (E4M3 per block and one fp32 per tensor), fp8 (fp32 per block).
    """

    name: str
    family: str
    element: Element
    block: tuple[int, int]
    scale_dtype: torch.dtype
    data_dtype: torch.dtype
    rules: tuple[str, ...]
    layouts: tuple[str, ...]
    hadamard: int = 0

    @property
    def is_2d(self) -> bool:
        """Whether a block spans several rows, so that codes and scales can be transposed exactly."""
        return self.block[0] > 1

    @property
    def granule(self) -> int:
        """Values along the scaled axis per scale of the family's 1-D formats, which is what the hardware reads.

        Where a 2-D block is longer, the blocked layout and products see its scale repeated.
        """
        return {"mx": 32, "nvfp4": 16, "fp8": 128}[self.family]

    @property
    def codes_per_byte(self) -> int:
        return 2 if self.element.bits == 4 else 1

    @property
    def bits_per_value(self) -> float:
        """Information per value: element bits plus the block's share of its scale."""
        scale_bits = 8 * self.scale_dtype.itemsize
        return self.element.bits + scale_bits / (self.block[0] * self.block[1])

    def default_rule(self, *, stochastic: bool = False) -> str:
        """Scale rule if none is named. With stochastic rounding mxfp4 rounds its scale up, so that nothing clips."""
        if self.name == "mxfp4":
            return "rceil" if stochastic else "even"
        return self.rules[0]

    @property
    def default_layout(self) -> str:
        return self.layouts[0]


def _mx(
    name: str, element: Element, dtype: torch.dtype, *, block: tuple[int, int] = (1, 32), hadamard: int = 0
) -> Format:
    layouts = ("plain", "blocked")
    return Format(name, "mx", element, block, torch.float8_e8m0fnu, dtype, MX_RULES, layouts, hadamard)


def _nvfp4(name: str, rows: int) -> Format:
    dtypes = (torch.float8_e4m3fn, torch.float4_e2m1fn_x2)
    return Format(name, "nvfp4", E2M1, (rows, 16), *dtypes, NVFP4_RULES, ("plain", "blocked"), hadamard=16)


def _fp8(name: str, rows: int, layout: str) -> Format:
    dtypes = (torch.float32, torch.float8_e4m3fn)
    return Format(name, "fp8", E4M3, (rows, 128), *dtypes, FP8_RULES, (layout, "plain"))


FORMATS: dict[str, Format] = {
    spec.name: spec
    for spec in (
        _mx("mxfp8_e4m3", E4M3, torch.float8_e4m3fn),
        _mx("mxfp8_e5m2", E5M2, torch.float8_e5m2),
        _mx("mxfp8_e4m3_128x128", E4M3, torch.float8_e4m3fn, block=(128, 128)),
        _mx("mxfp6_e2m3", E2M3, torch.uint8),
        _mx("mxfp6_e3m2", E3M2, torch.uint8),
        _mx("mxfp4", E2M1, torch.float4_e2m1fn_x2, hadamard=32),
        _nvfp4("nvfp4", 1),
        _nvfp4("nvfp4_16x16", 16),
        _fp8("fp8_1x128", 1, "mn_major"),
        _fp8("fp8_128x128", 128, "grid"),
    )
}


def get_format(name: str) -> Format:
    """Look a format up by name.

    >>> get_format("nvfp4").bits_per_value
    4.5
    """
    if not isinstance(name, str) or name not in FORMATS:  # pyright: ignore[reportUnnecessaryIsInstance]
        check_name(name, FORMATS, "format")
    return FORMATS[name]


def check_rule(spec: Format, rule: str) -> None:
    """Raise unless `rule` is a scale rule of this format."""
    if isinstance(rule, str) and rule in spec.rules:  # pyright: ignore[reportUnnecessaryIsInstance]
        return
    check_name(rule, (*MX_RULES, *NVFP4_RULES, *FP8_RULES), "scale rule")
    refuse(
        f"scale rule {rule!r} does not exist for {spec.name}",
        f"{spec.name} takes {' or '.join(spec.rules)}",
        f"use scale_rule={spec.default_rule()!r} or leave it out",
    )


def check_layout(spec: Format, layout: str) -> None:
    """Raise unless `layout` is a scale layout of this format."""
    if isinstance(layout, str) and layout in spec.layouts:  # pyright: ignore[reportUnnecessaryIsInstance]
        return
    check_name(layout, ("plain", "mn_major", "grid", "blocked"), "scale layout")
    refuse(
        f"scale layout {layout!r} does not exist for {spec.name}",
        f"{spec.name} scales are stored as {' or '.join(spec.layouts)}",
        f"use scale_layout={spec.default_layout!r} or leave it out",
    )


# a code times its block scale is exact in bf16 (docs/numerics.md), which FP8 with fp32 scales is not
BF16_EXACT_PAIRS = tuple(sorted(pair for pair in LEGAL_PAIRS if FORMATS[pair[0]].family != "fp8"))


# what a weight-only product takes as its left operand, and the pairs that its kernels are registered with
PLAIN_DTYPES = dict(zip(PLAIN_NAMES, (torch.bfloat16, torch.float16, torch.float32), strict=True))
WEIGHT_ONLY_PAIRS = tuple((plain, name) for plain in PLAIN_NAMES for name in FORMATS)


def partners_of(name: str) -> list[str]:
    """Formats with 1-D blocks that a product combines with this one, on either side.

    >>> partners_of("fp8_128x128"), partners_of("nvfp4")
    (['fp8_1x128'], ['nvfp4'])
    """
    return [each for each, spec in FORMATS.items() if not spec.is_2d and (each, name) in LEGAL_PAIRS]
