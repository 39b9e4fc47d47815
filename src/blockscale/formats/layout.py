"""Memory layout of codes and scales, and padded starts of groups: pure arithmetic and byte copies.

An operand is [..., rows, K] with its scales along K, the last axis. Scale layouts:

    plain     [rows, blocks] row-major; 2-D scales as their tile grid
    mn_major  [rows, blocks] seen through a [blocks, align(rows, 4)] buffer: rows contiguous, what TMA and cuBLAS read
    grid      128x128 tiles [row tiles, blocks], each row padded to 4 blocks
    blocked   the vendor library's 32x4x4 swizzle: 512-byte tiles of 128 rows x 4 blocks; flat

Pads are zero bytes. Every layout converts to plain and back without loss. `blocked` repeats the scale of a 2-D block in
its rows, and in each 32 of its K where it is longer, so that it holds what a format with 1-D blocks would store.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import env
from ..errors import ShapeError, refuse
from .spec import Format

CODE_ROW_BYTES = 16
GROUP_ALIGN = 128
_BLOCKED_ROWS, _BLOCKED_COLS = 128, 4


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The multiple of b at or above a."""
    return ceil_div(a, b) * b


# codes


def code_bytes(spec: Format, length: int) -> int:
    """Bytes that hold `length` codes of a row, tail included, without the pad."""
    return ceil_div(length, spec.codes_per_byte)


def code_row_bytes(spec: Format, length: int) -> int:
    """Bytes from one row of codes to the next: a multiple of 16, as TMA wants, the pad being zero codes."""
    return round_up(code_bytes(spec, length), CODE_ROW_BYTES)


# scales


def scale_counts(spec: Format, rows: int, length: int) -> tuple[int, int]:
    """(row tiles, blocks along the scaled axis) of an operand [rows, length]; tails count as full blocks."""
    return ceil_div(rows, spec.block[0]), ceil_div(length, spec.block[1])


def blocked_columns(spec: Format, length: int) -> int:
    """Scales per row in the blocked layout, without the pad."""
    return ceil_div(length, spec.granule)


def scale_buffer_shape(spec: Format, rows: int, length: int, layout: str) -> tuple[int, ...]:
    """Shape of the contiguous buffer behind the scales of one [rows, length] operand."""
    tiles, blocks = scale_counts(spec, rows, length)
    if layout == "mn_major":
        return (blocks, round_up(tiles, 4))
    if layout == "grid":
        return (tiles, round_up(blocks, 4))
    if layout == "blocked":
        return (round_up(rows, _BLOCKED_ROWS) * round_up(blocked_columns(spec, length), _BLOCKED_COLS),)
    return (tiles, blocks)


def scale_view(
    spec: Format, buffer: Tensor, rows: int, length: int, layout: str, *, transposed: bool = False
) -> Tensor:
    """View of the scale buffer as the operand's `scale`.  transposed: for an operand with axis=-2.

    A view costs microseconds, so none is transposed twice.
    """
    if layout == "blocked":
        return buffer
    if layout == "mn_major":
        buffer = shorten(buffer, ceil_div(rows, spec.block[0]))
        return buffer if transposed else buffer.mT
    if layout == "grid":
        buffer = shorten(buffer, ceil_div(length, spec.block[1]))
    return buffer.mT if transposed else buffer


def shorten(x: Tensor, length: int) -> Tensor:
    """The first `length` along the last axis. A slice costs microseconds, so a full-length one is skipped."""
    return x if x.shape[-1] == length else x[..., :length]


def scale_view_shape(spec: Format, rows: int, length: int, layout: str) -> tuple[int, ...]:
    """The shape that `scale_view` has."""
    if layout == "blocked":
        return scale_buffer_shape(spec, rows, length, layout)
    return scale_counts(spec, rows, length)


def pack_scale(spec: Format, plain: Tensor, rows: int, length: int, layout: str) -> Tensor:
    """plain [..., row tiles, blocks] -> the contiguous buffer of `layout`."""
    tiles, blocks = scale_counts(spec, rows, length)
    # bytes, because torch cannot pad float8_e8m0fnu
    raw = plain.view(torch.uint8) if plain.element_size() == 1 else plain
    if layout == "mn_major":
        raw = pad(raw.mT, (0, -tiles % 4)) if tiles % 4 else raw.mT
    elif layout == "grid":
        raw = pad(raw, (0, -blocks % 4)) if blocks % 4 else raw
    elif layout == "blocked":
        raw = _swizzle(_repeated(spec, raw, rows, blocked_columns(spec, length)) if spec.is_2d else raw)
    # not contiguous(): that keeps the odd strides of an axis of size 1
    return raw.clone(memory_format=torch.contiguous_format).view(plain.dtype)


def is_plain(layout: str, blocks: int) -> bool:
    """Whether this layout has the bytes of plain scales with so many blocks in a row."""
    return layout == "plain" or (layout == "grid" and blocks % 4 == 0)


def unpack_scale(spec: Format, scale: Tensor, rows: int, length: int, layout: str) -> Tensor:
    """The scale tensor of an operand in any layout -> plain [..., row tiles, blocks]."""
    if layout != "blocked":
        return scale
    repeated = _unswizzle(scale.view(torch.uint8), rows, blocked_columns(spec, length)).view(scale.dtype)
    return repeated[..., :: spec.block[0], :: spec.block[1] // spec.granule]


def _repeated(spec: Format, plain: Tensor, rows: int, columns: int) -> Tensor:
    """The scales of 2-D blocks as a format with 1-D blocks would have them: [..., rows, columns]."""
    per_row = plain.repeat_interleave(spec.block[0], dim=-2)[..., :rows, :]
    return per_row.repeat_interleave(spec.block[1] // spec.granule, dim=-1)[..., :columns]


def _swizzle(plain: Tensor) -> Tensor:
    """uint8 [..., R, C] -> flat [..., pad128(R) * pad4(C)]; (r, c) of a tile goes to (r % 32)*16 + (r // 32)*4 + c."""
    padded = pad(plain, (0, -plain.shape[-1] % _BLOCKED_COLS, 0, -plain.shape[-2] % _BLOCKED_ROWS))
    tiles = padded.unflatten(-1, (padded.shape[-1] // 4, 4)).unflatten(-3, (padded.shape[-2] // 128, 4, 32))
    # [..., row tile, quarter, r % 32, column tile, c] -> [..., row tile, column tile, r % 32, quarter, c]
    order = (*range(tiles.dim() - 5), -5, -2, -3, -4, -1)
    return tiles.permute(order).flatten(-5)


def _unswizzle(flat: Tensor, rows: int, cols: int) -> Tensor:
    tiles = flat.unflatten(-1, (ceil_div(rows, 128), ceil_div(cols, 4), 32, 4, 4))
    order = (*range(tiles.dim() - 5), -5, -2, -3, -4, -1)
    return tiles.permute(order).flatten(-2).flatten(-4, -2)[..., :rows, :cols]


# sharding: whether the buffers of equal shards of an operand are equal shards of its buffers, byte for byte


def cuts_evenly(size: int, parts: int, unit: int = 1) -> bool:
    """Whether `size` splits into `parts` equal shards, each a multiple of `unit`."""
    return size > 0 and size % (parts * unit) == 0


def cuts_rows(spec: Format, rows: int, layout: str, parts: int) -> bool:
    """Whether an operand can be sharded along its rows: no shard splits a block or pads its scales."""
    pads = {"mn_major": 4 * spec.block[0], "blocked": _BLOCKED_ROWS}
    return cuts_evenly(rows, parts, pads.get(layout, spec.block[0]))


def cuts_length(spec: Format, length: int, layout: str, parts: int) -> bool:
    """Whether an operand can be sharded along its scaled axis: no shard splits a block or pads its codes.

    Not with `blocked`: there the scales of a shard are not contiguous.
    """
    along = spec.block[1] * (4 if layout == "grid" else 1)
    unit = max(along, CODE_ROW_BYTES * spec.codes_per_byte)  # both are powers of two
    return layout != "blocked" and cuts_evenly(length, parts, unit)


# groups


def check_group_ends(offs: Tensor | None, rows: int, starts: Tensor | None = None) -> None:
    """Raise unless ends ascend within the rows and, with starts, groups do not overlap.

    On the CPU only: on a GPU the check would synchronize. With BLOCKSCALE_CHECK=1 the device checks asynchronously, and
    a violation stops the process (`torch._assert_async`).
    """
    if offs is None or offs.shape[0] == 0 or offs.is_meta:
        return
    rule = "group ends are inclusive, never descend, and lie within the rows"
    rule += "" if starts is None else "; a group starts where the one before it ends, or later, and ends no earlier"
    if offs.device.type != "cpu":
        if env.flag("BLOCKSCALE_CHECK"):
            found = _are_in_order(offs, rows, starts)
            torch._assert_async(found, rule)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif not _are_in_order(offs, rows, starts):
        given = f"offs is {offs.tolist()}" + ("" if starts is None else f" and starts is {starts.tolist()}")
        fix = "pass sizes.cumsum(0).to(torch.int32)" if starts is None else "pass starts + counts as offs"
        refuse(f"{given} for {rows} rows", rule, fix, error=ShapeError)


def _are_in_order(offs: Tensor, rows: int, starts: Tensor | None) -> Tensor:
    """bool tensor on their device: 0 <= first start <= first end <= next start <= ... <= rows."""
    order = offs if starts is None else torch.stack((starts, offs), 1).flatten()
    return (order[1:] >= order[:-1]).all() & (order[0] >= 0) & (order[-1] <= rows)


def padded_length(rows: int, groups: int) -> int:
    """Length of a k-grouped operand: every group starts at a multiple of 128; enough for any group sizes."""
    return round_up(rows + (GROUP_ALIGN - 1) * groups, GROUP_ALIGN)


def padded_ends(offs: Tensor) -> Tensor:
    """Inclusive ends of groups in the source (int [G]) -> ends of the padded groups, each a multiple of 128 (int64).

    >>> padded_ends(torch.tensor([5, 5, 300], dtype=torch.int32)).tolist()
    [128, 128, 512]
    """
    ends = offs.to(torch.int64)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return ((sizes + GROUP_ALIGN - 1) // GROUP_ALIGN * GROUP_ALIGN).cumsum(0)


def locate(positions: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Group of each position and its offset from the group's start; past the last end the group is G."""
    group = torch.searchsorted(ends, positions, right=True)
    starts = torch.cat((ends.new_zeros(1), ends))
    return group, positions - starts[group]
