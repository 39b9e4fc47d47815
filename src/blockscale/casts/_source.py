"""Arguments of a cast kernel that the host computes: its source, its tile, and the config of each operand.

docs/design/casts.md has the measurements behind the tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import round_up


class Source(NamedTuple):
    """Input of a cast kernel: source `name` as in `_kernels.py`, x [..., rows, ...], and columns of the cast tensor.

    y, z: further inputs of that source.  indices: rows to gather, -1 for a row of zeros.  eps: of RMSNorm.
    """

    name: str
    x: Tensor
    columns: int
    y: Tensor | None = None
    z: Tensor | None = None
    indices: Tensor | None = None
    eps: float = 0.0

    @property
    def matrices(self) -> Tensor:
        return self.x.reshape(self.x.shape[:-2].numel(), self.x.shape[-2], self.x.shape[-1])

    @property
    def rows(self) -> int:
        return self.x.shape[-2] if self.indices is None else self.indices.shape[0]

    @property
    def has_row_factors(self) -> bool:
        """Whether y holds one factor per row instead of a matrix like x."""
        return self.name in ("rmsnorm", "rmsnorm_rows", "weighted")

    @property
    def grid_columns(self) -> int:
        """Columns that the grid covers: SwiGLU's backward writes two tiles per CTA, so half of the result."""
        return self.columns // 2 if self.name == "swiglu_backward" else self.columns

    @property
    def mode(self) -> str:
        """Load mode: "bf16", "fp16", "fp32" if every pair is one aligned word, else "any" (value by value)."""
        tensors = [self.matrices] if self.y is None or self.has_row_factors else [self.matrices, self._y()]
        if self.columns % (4 if self.name.startswith("swiglu_backward") else 2):
            return "any"
        return PACKED_MODES[self.x.dtype] if all(map(is_pair_aligned, tensors)) else "any"

    @property
    def reg_mode(self) -> str:
        """Register form of a tile: the load mode, except "any" for values computed from an fp32 source."""
        return "any" if self.mode == "fp32" and self.name != "plain" else self.mode

    def arguments(self) -> tuple[Tensor | None, ...]:
        """x, y, z and indices as kernel arguments."""
        y = None if self.y is None else self._y() if self.has_row_factors else as_packed(self._y(), self.mode)
        z = self.z
        if z is not None and z.dtype == self.x.dtype and self.mode in ("bf16", "fp16") and is_pair_aligned(z):
            z = as_packed(z, self.mode)
        return as_packed(self.matrices, self.mode), y, z, self.indices

    def steps(self) -> tuple[int, ...]:
        """Strides of x and y in packed words, or in elements if the mode is "any"."""
        divisor = 1 if self.mode == "any" else 2
        y = (0, 0, 0) if self.y is None or self.has_row_factors else self._y().stride()
        x = self.matrices.stride()
        return x[0] // divisor, x[1] // divisor, x[2], y[0] // divisor, y[1] // divisor, y[2]

    def _y(self) -> Tensor:
        assert self.y is not None
        return self.y if self.has_row_factors else self.y.reshape(self.y.shape[:-2].numel(), *self.y.shape[-2:])


def plain(x: Tensor) -> Source:
    """A tensor [..., M, K] as it is."""
    return Source("plain", x, x.shape[-1])


def dense(vector: Tensor | None) -> Tensor | None:
    """Contiguous vector, for arguments that kernels read without a stride: offs, amax, norm weight, indices."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


PACKED_MODES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def is_pair_aligned(x: Tensor) -> bool:
    """Whether every pair of neighbours along the last axis is one aligned word."""
    even = x.shape[-1] % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1])
    return even and x.stride(-1) == 1 and x.data_ptr() % (2 * x.element_size()) == 0


class Tile(NamedTuple):
    """Tile of one CTA: MQ groups of J rows by BK columns, `warps` warps; see `_tiles.py`.

    registers: limit per thread (maxnreg), so that three CTAs fit on an SM.  down: rasterise tiles down the rows, so
    that neighbouring CTAs write neighbouring bytes of a column operand; otherwise along the columns.  narrow: a thread
    loads two pairs of a row instead of four, so that it holds all J rows of a rotation (64 values) by itself."""

    J: int
    MQ: int
    BK: int
    warps: int
    registers: int | None = None
    down: bool = False
    narrow: bool = False


def tile_shape(row: CastPlan | None, col: CastPlan | None, *, sm: int, source: Source, full_tiles: bool) -> Tile:
    """Tile of a cast.  sm: compute capability.  full_tiles: tiles cover the source exactly, and there are no groups.

    Measured on an H200 (docs/design/casts.md); ahead-of-time tests allow only the spills listed in tests/aot/cases.py.
    """
    plans = [plan for plan in (row, col) if plan is not None]
    if source.name == "rmsnorm_rows":
        assert row is not None
        width = max(power_of_two(source.columns), 4 * row.spec.block[1])  # some layouts store four scales together
        return Tile(1, max(1, 8192 // width), width, max(4, width // 2048))
    light = source.reg_mode in ("bf16", "fp16") and all(plan.stream is None and plan.hadamard is None for plan in plans)
    four_bits = any(plan.spec.codes_per_byte == 2 for plan in plans)
    # integer encoding takes registers that cvt instructions do not
    has_cvt = sm >= 89 and all(plan.spec.element.name in ("e4m3", "e5m2") for plan in plans)
    is_sm90 = sm == 90  # register limits pay off only where they were measured
    if col is None:
        assert row is not None
        if row.spec.block[0] == 128:
            return Tile(1, 128, 128, 4 if light else 8)
        # the widest tile among those with the least padding
        width = min((1024, 512, 256, 128), key=lambda width: (round_up(source.grid_columns, width), -width))
        rows = max(row.spec.block[0], (8 if light else 4) * 1024 // width)
        return Tile(1, rows, width, 4 if light or rows * width <= 8192 else 8)
    if row is None and four_bits and source.reg_mode in ("bf16", "fp16") and not light:
        cap_registers = sm == 90 and col.stream is not None and not source.name.startswith("swiglu_backward")
        return Tile(16, 4, 128, 4, 168 if cap_registers else None, down=True, narrow=True)
    if source.name == "swiglu_backward_any":  # three inputs, and columns that wrap are not known to be contiguous
        if four_bits:  # eight rows fill a 32-bit word of codes
            return Tile(16, 8, 128, 16)
        return Tile(4, 32, 128, 8 if light and has_cvt else 16)
    if any(plan.stream is not None for plan in plans):  # random words take registers
        return Tile(8, 16, 128, 16)
    if row is None:
        if source.reg_mode == "any":
            return Tile(8, 16, 128, 16)
        if full_tiles and 128 not in col.spec.block and not four_bits:
            return Tile(16, 16, 64, 4)
        if light and not four_bits:
            return Tile(8, 16, 128, 4 if has_cvt else 8, down=128 in col.spec.block)
        wide = source.reg_mode == "fp32" or (col.hadamard is not None and sm >= 100)
        return Tile(16, 8, 128, 8 if wide else 4, down=True)
    if four_bits:
        return Tile(16, 8, 128, 16 if source.reg_mode == "any" else 4 if light else 8)
    if not (light and has_cvt):
        return Tile(4, 32, 128, 8 if source.reg_mode == "fp32" and not has_cvt and sm < 100 else 16)
    if not full_tiles:
        if source.columns % 8:  # rows not aligned to 16 bytes: narrow loads, an address for each
            return Tile(4, 32, 128, 8)
        if source.name == "swiglu_backward":  # three inputs, two tiles: hundreds of spills with 168 registers
            return Tile(4, 32, 128, 8, 128) if is_sm90 else Tile(4, 32, 128, 16)
        # a third CTA per SM is worth a few spills; fp16 spills too many
        cap_registers = is_sm90 and (source.reg_mode == "bf16" or source.indices is not None)
        return Tile(8, 16, 128, 4, 168 if cap_registers else None)
    if source.name != "plain" and all(plan.spec.family == "fp8" for plan in plans):
        return Tile(4, 32, 128, 8, 128) if is_sm90 else Tile(4, 32, 128, 16)
    if source.name == "swiglu" and all(plan.spec.family == "mx" and not plan.spec.is_2d for plan in plans):
        return Tile(4, 16, 128, 4, 96 if is_sm90 else None)
    return Tile(8, 16, 128, 4, 168 if source.name != "swiglu_backward" and sm >= 90 else None)


def power_of_two(n: int) -> int:
    """Smallest power of two at or above n >= 1."""
    return 1 << (n - 1).bit_length()


def as_packed(x: Tensor, mode: str) -> Tensor:
    """x viewed as packed words, one per pair (int64 for fp32, else int32)."""
    return x if mode == "any" else x.view(torch.int64 if mode == "fp32" else torch.int32)


class Even(NamedTuple):
    """Whether tiles cover rows and columns exactly, so that accesses need no mask."""

    rows: bool
    columns: bool


class OperandConfig(NamedTuple):
    """Compile-time description of one operand."""

    family: str
    rule: str
    layout: str
    satfinite: bool
    ebits: int
    mbits: int
    bias: int
    emax: int
    max_bits: int
    nan_code: int
    code_bits: int  # bits from one code to the next: 4 or 8
    scale_bytes: bool
    across: int  # rows of a block
    along: int  # length of a block
    repeats: int  # copies of its scale along K in the blocked layout
    hardware: str  # element name if inline PTX encodes it, else ""
    fast: bool  # inline PTX may be used
    sm_89: bool  # PTX has cvt to E4M3 and max.xorsign.abs
    hadamard: int  # size of a rotated group, or 0
    mask: int  # sign mask of the rotation
    stochastic: bool
    grouped: bool  # one tensor scale per group or per matrix
    shared_philox: bool  # four neighbours in a row share one Philox call


def operand_config(plan: CastPlan, sm: int, *, grouped: bool, shared_philox: bool = False) -> OperandConfig:
    """Compile-time part of a plan.  sm: compute capability, 0 for the interpreter."""
    spec, element = plan.spec, plan.spec.element
    short = {"e4m3": 89, "e5m2": 89, "e2m1": 80}.get(element.name, 999)
    hardware = element.name if sm >= short and plan.stream is None else ""
    return OperandConfig(
        spec.family, plan.rule, plan.layout, plan.satfinite,
        element.ebits, element.mbits, element.bias, element.emax, element.max_bits, element.nan_code,
        8 // spec.codes_per_byte, spec.scale_dtype.itemsize == 1, *spec.block, spec.block[1] // spec.granule,
        hardware, sm > 0, sm >= 89,
        0 if plan.hadamard is None else spec.hadamard, _signed(plan.hadamard or 0), plan.stream is not None, grouped,
        shared_philox and plan.stream is not None,
    )  # fmt: skip


def _signed(mask: int) -> int:
    """32-bit mask as an int32 with the same bits."""
    return mask - (1 << 32) if mask >> 31 else mask
