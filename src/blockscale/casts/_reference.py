"""Reference casts in torch, exact, on any device: every other backend is compared with them byte for byte.

Written for clarity: each step of docs/numerics.md is one statement. Cost: about a dozen passes over the data, 30 with
stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats.cast_spec import Cast, CastPlan
from ..formats.decoding import decode_operand, group_values
from ..formats.elements import encode
from ..formats.hadamard import rotate, rotate_back
from ..formats.layout import code_row_bytes, locate, pack_scale, padded_ends, scale_buffer_shape
from ..formats.packing import pack_fp4, unpack_fp4
from ..formats.scales import fp8_scale, magnitude_bits, mx_scale, nvfp4_block_scale, nvfp4_tensor_scale, supplied_amax
from ..formats.spec import Format
from ..formats.stochastic import random_words
from ..formats.tensor import BlockScaled
from ..library import empty
from ..registry import kernel
from . import activation

Buffers = tuple[Tensor, Tensor, Tensor | None]
Casts = Sequence[Cast]
Outs = Sequence[Buffers]


@dataclass(frozen=True)
class _Rows:
    """Group and index of each source row; with groups, the index counts from the group's start."""

    index: Tensor
    group: Tensor | None

    @staticmethod
    def of(x: Tensor, offs: Tensor | None) -> _Rows:
        """Rows of [..., M, K]; leading dimensions are flattened into rows unless there are groups."""
        lead, rows = x.shape[:-2], x.shape[-2]
        position = torch.arange(lead.numel() * rows, device=x.device).view(*lead, rows)
        if offs is None:
            return _Rows(position, None)
        group, index = locate(position, offs.to(torch.int64))
        return _Rows(index, group)


def _pad_groups(x: Tensor, offs: Tensor, length: int) -> tuple[Tensor, _Rows]:
    """[M, K] -> [length, K] with every group of rows starting at a multiple of 128 and zeros in between."""
    ends = offs.to(torch.int64)
    starts = torch.cat((ends.new_zeros(1), ends))
    group, index = locate(torch.arange(length, device=x.device), padded_ends(offs))
    source = starts[group] + index
    valid = source < torch.cat((ends, ends.new_zeros(1)))[group]
    if x.shape[0] == 0:
        return x.new_zeros(length, x.shape[1]), _Rows(index, group)
    gathered = x[torch.where(valid, source, 0)]
    return torch.where(valid[:, None], gathered, 0.0), _Rows(index, group)


@kernel("cast", "reference", devices=(), priority=-100)
def quantize(x: Tensor, cast: Cast, axis: int, out: Buffers, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    plan, state, amax = cast
    spec = plan.spec
    source = x.float()
    if offs is not None and axis == -2:
        source, rows = _pad_groups(source, offs, out[0].shape[-1] * spec.codes_per_byte)
    else:
        rows = _Rows.of(source, offs)
    operand = (source if axis == -1 else source.mT).contiguous()
    if plan.hadamard is not None:
        operand = rotate(operand, spec.hadamard, plan.hadamard)
    blocks = _to_blocks(operand, spec)
    block_amax = magnitude_bits(blocks).amax((-3, -1))
    scale, factor, global_scale = _scales(operand, block_amax, plan, axis, amax, rows, offs)
    scaled = _from_blocks(blocks * factor[..., :, None, :, None], operand.shape)
    random = None if state is None else _random_bits(operand, plan, axis, rows, state, x.shape[-1])
    codes = encode(scaled, spec.element, random)
    out[0].copy_(_to_code_rows(codes, spec))
    out[1].copy_(pack_scale(spec, scale, operand.shape[-2], operand.shape[-1], plan.layout))
    if global_scale is not None and out[2] is not None:
        out[2].copy_(global_scale)


@kernel("cast_both", "reference", devices=(), priority=-100)
def quantize_both(x: Tensor, casts: Casts, outs: Outs, colsum: Tensor | None, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    for axis, cast, out in zip((-1, -2), casts, outs, strict=True):
        quantize(x, cast, axis, out, offs)
    if colsum is not None:
        _column_sums(x, offs, colsum)


@kernel("dequantize", "reference", devices=(), priority=-100)
def dequantize(q: BlockScaled, out: Tensor, *, offs: Tensor | None = None) -> None:
    """exact torch reference, any device"""
    values = decode_operand(q, offs)
    logical = q.shape[q.axis]
    if q.group_align and offs is not None:
        values = values if q.hadamard is None else rotate_back(values, q.spec.hadamard, q.hadamard)
        values = _unpad_groups(values, offs, logical)
    elif q.hadamard is not None:
        values = rotate_back(values, q.spec.hadamard, q.hadamard)[..., :logical]
    out.copy_(values if q.axis == -1 else values.mT)
    out.masked_fill_(out.isnan(), torch.nan)  # canonical NaN: a GPU's conversions to bf16 and fp16 write another


def _to_blocks(operand: Tensor, spec: Format) -> Tensor:
    """[..., R, L] -> [..., row tiles, rows of a block, blocks, length of a block], zero padded at the tails."""
    across, along = spec.block
    padded = pad(operand, (0, -operand.shape[-1] % along, 0, -operand.shape[-2] % across))
    tiles = padded.unflatten(-1, (padded.shape[-1] // along, along))
    return tiles.unflatten(-3, (padded.shape[-2] // across, across))


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]].contiguous()


def _scales(
    operand: Tensor,
    block_amax: Tensor,
    plan: CastPlan,
    axis: int,
    amax: Tensor | None,
    rows: _Rows,
    offs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stored scales [..., row tiles, blocks], encode factors of the same shape, and NVFP4's tensor scale."""
    spec = plan.spec
    if spec.family == "mx":
        byte, factor = mx_scale(block_amax, spec.element, plan.rule, satfinite=plan.satfinite)
        return byte.view(spec.scale_dtype), factor, None
    if spec.family == "fp8":
        return *fp8_scale(block_amax, plan.rule), None
    tensor_amax = _tensor_amax(block_amax, plan, axis, rows, offs) if amax is None else supplied_amax(amax)
    global_scale, encode_factor = nvfp4_tensor_scale(tensor_amax)
    pair = tuple(group_values(t, block_amax, spec, rows.group, axis) for t in (global_scale, encode_factor))
    byte, factor = nvfp4_block_scale(block_amax, (pair[0], pair[1]), plan.rule)
    return byte.view(spec.scale_dtype), factor, global_scale


def _tensor_amax(block_amax: Tensor, plan: CastPlan, axis: int, rows: _Rows, offs: Tensor | None) -> Tensor:
    """amax bit pattern of the tensor [], or of each group [G]; rows outside all groups do not count."""
    if block_amax.numel() == 0:
        groups = block_amax.shape[0] if offs is None else offs.shape[0]
        return block_amax.new_zeros((groups,) if plan.grouped_amax else ())
    if offs is None:
        return block_amax.flatten(1).amax(1) if plan.grouped_amax else block_amax.max()
    assert rows.group is not None
    # one amax per row (axis=-1) or per block of tokens (axis=-2, where groups start at block boundaries)
    per_item = block_amax.amax(1) if axis == -1 else block_amax.amax(0)
    group = rows.group if axis == -1 else rows.group[:: plan.spec.block[1]]
    amax = per_item.new_zeros(offs.shape[0] + 1)
    amax = amax.scatter_reduce(0, group, per_item, "amax")[:-1]
    return amax if plan.grouped_amax else pad(amax, (0, 1)).max()  # padded with a zero, for offs of length 0


def _random_bits(operand: Tensor, plan: CastPlan, axis: int, rows: _Rows, state: Tensor, columns: int) -> Tensor:
    """One random word per element of the operand, by its position in the full source tensor."""
    assert plan.stream is not None
    first_row, first_column, all_columns = plan.origin or (0, 0, columns)
    row, group = rows.index, rows.group
    if axis == -2 and group is None:
        # a rotated tail reaches past the last row
        tail = torch.arange(operand.shape[-1] - row.shape[-1], device=row.device) + row[..., -1:] + 1
        row = torch.cat((row, tail), dim=-1)
    column = torch.arange(operand.shape[-1 if axis == -1 else -2], device=row.device) + first_column
    index = (row + first_row)[..., :, None] * all_columns + column
    group_index = 0 if group is None else (group + plan.first_group)[:, None]
    random = random_words(index, state, plan.stream, group_index)
    return random if axis == -1 else random.mT


def _to_code_rows(codes: Tensor, spec: Format) -> Tensor:
    """uint8 codes [..., R, L] -> rows of bytes, zero padded to 16, in the format's dtype."""
    packed = pack_fp4(codes) if spec.codes_per_byte == 2 else codes
    padded = pad(packed, (0, code_row_bytes(spec, codes.shape[-1]) - packed.shape[-1]))
    return padded.view(spec.data_dtype)


def _column_sums(x: Tensor, offs: Tensor | None, out: Tensor) -> None:
    """Sums over rows, or over the rows of each group, in fp64 and rounded once: order matters only past 53 bits."""
    if offs is None:
        out.copy_(x.double().sum(-2))
        return
    group, _ = locate(torch.arange(x.shape[0], device=x.device), offs.to(torch.int64))
    total = torch.zeros(offs.shape[0] + 1, x.shape[1], dtype=torch.float64, device=x.device)
    out.copy_(total.index_add(0, group, x.double())[:-1])


def _unpad_groups(values: Tensor, offs: Tensor, rows: int) -> Tensor:
    """[K, padded length] -> [K, rows]: groups at their unpadded positions; rows outside all groups are zero."""
    ends = padded_ends(offs)
    starts = torch.cat((ends.new_zeros(1), ends))
    group, index = locate(torch.arange(rows, device=values.device), offs.to(torch.int64))
    inside = group < offs.shape[0]
    return torch.where(inside, values[:, torch.where(inside, starts[group] + index, 0)], 0.0)


# ---- fused casts: the cast of a tensor that `activation.py` specifies; not faster than the unfused pair --------------


@kernel("swiglu", "reference", devices=(), priority=-100)
def swiglu(gate_up: Tensor, cast: Cast, axis: int, out: Buffers, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    quantize(activation.swiglu(gate_up), cast, axis, out, offs)


@kernel("swiglu_both", "reference", devices=(), priority=-100)
def swiglu_both(gate_up: Tensor, casts: Casts, outs: Outs, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    quantize_both(activation.swiglu(gate_up), casts, outs, None, offs)


@kernel("swiglu_backward_both", "reference", devices=(), priority=-100)
def swiglu_backward_both(grad: Tensor, gate_up: Tensor, casts: Casts, outs: Outs, offs: Tensor | None) -> None:
    """exact torch reference, any device"""
    quantize_both(activation.swiglu_backward(grad, gate_up), casts[:2], outs[:2], None, offs)
    for cast, out in zip(casts[2:], outs[2:], strict=True):
        swiglu(gate_up, cast, -2, out, offs)


@kernel("rmsnorm", "reference", devices=(), priority=-100)
def rmsnorm(x: Tensor, weight: Tensor, eps: float, cast: Cast, out: Buffers, rstd: Tensor) -> None:
    """exact torch reference, any device"""
    y, factor = activation.rmsnorm(x, weight, eps)
    rstd.copy_(factor)
    quantize(y, cast, -1, out, None)


@kernel("rmsnorm_both", "reference", devices=(), priority=-100)
def rmsnorm_both(
    x: Tensor, weight: Tensor, eps: float, casts: Casts, outs: Outs, rstd: Tensor, offs: Tensor | None
) -> None:
    """exact torch reference, any device"""
    y, factor = activation.rmsnorm(x, weight, eps)
    rstd.copy_(factor)
    quantize_both(y, casts, outs, None, offs)


@kernel("permute_both", "reference", devices=(), priority=-100)
def permute_both(
    x: Tensor, indices: Tensor, gate_weights: Tensor | None, casts: Casts, outs: Outs, offs: Tensor
) -> None:
    """exact torch reference, any device"""
    quantize_both(activation.gather_rows(x, indices, gate_weights), casts, outs, None, offs)


@kernel("permute_columns", "reference", devices=(), priority=-100)
def permute_columns(x: Tensor, indices: Tensor, cast: Cast, out: Buffers, offs: Tensor) -> None:
    """exact torch reference, any device"""
    quantize(activation.gather_rows(x, indices), cast, -2, out, offs)


@kernel("permute", "reference", devices=(), priority=-100)
def permute(x: Tensor, indices: Tensor, cast: Cast, out: Buffers) -> None:
    """exact torch reference, any device"""
    plan, spec = cast.plan, cast.plan.spec
    source = activation.with_zero_row(x)  # a row of zeros does not change the amax
    length = plan.stored_length(x.shape[1])
    data = empty((source.shape[0], out[0].shape[1]), spec.data_dtype, x.device)
    shape = scale_buffer_shape(spec, source.shape[0], length, "plain")
    scale = empty(shape, spec.scale_dtype, x.device)
    quantize(source, cast._replace(plan=replace(plan, layout="plain")), -1, (data, scale, out[2]), None)
    rows = activation.zero_row_for_padding(indices, x.shape[0])
    out[0].copy_(_take(data, rows))
    out[1].copy_(pack_scale(spec, _take(scale, rows), indices.shape[0], length, plan.layout))


def _take(buffer: Tensor, rows: Tensor) -> Tensor:
    """Gathered rows of codes or scales; one-byte dtypes as uint8, since torch does not index all of them."""
    raw = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer
    return raw.index_select(0, rows).view(buffer.dtype)


@kernel("transpose_codes", "reference", devices=(), priority=-100)
def transpose_codes(codes: Tensor, out: Tensor, length: int, bits: int) -> None:
    """exact torch reference, any device"""
    turned = pack_fp4(unpack_fp4(codes, length).mT) if bits == 4 else codes[..., :length].mT
    out.copy_(pad(turned, (0, out.shape[-1] - turned.shape[-1])))
