"""Triton fused casts: the cast kernel with another source, a row gather of codes and scales, and RMSNorm's rstd.

SwiGLU and its backward compute their tile from the loaded ones, rounded to the input's dtype as the unfused pair does.
A permutation gathers rows as it loads them; for the row operand alone it gathers rows of codes and scales after one
cast. The rounding code is that of the plain casts.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.cast_spec import Cast
from ..formats.layout import CODE_ROW_BYTES, ceil_div, round_up, scale_buffer_shape
from ..launch import launch, note_persistent_buffer
from ..library import empty
from ..registry import Request, kernel
from ._device_fused import rstd as row_rstd
from ._source import PACKED_MODES, Even, Source, as_packed, dense, is_pair_aligned, power_of_two
from ._tiles import load_pairs, to_fp32
from ._triton import DEVICES, Buffers, Output, fuses_hidden, launch_cast, reject
from .ops import is_far

Casts = Sequence[Cast]
Outs = Sequence[Buffers]


def _matrices(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-2], x.shape[-1])


def _swiglu_source(gate_up: Tensor) -> Source:
    return Source("swiglu", gate_up, gate_up.shape[-1] // 2)


@kernel("swiglu", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def swiglu(gate_up: Tensor, cast: Cast, axis: int, out: Buffers, offs: Tensor | None) -> None:
    """Triton: one read, codes and scales in place"""
    output = Output(*cast, out)
    launch_cast(_swiglu_source(gate_up), output if axis == -1 else None, output if axis == -2 else None, offs=offs)


@kernel("swiglu_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def swiglu_both(gate_up: Tensor, casts: Casts, outs: Outs, offs: Tensor | None) -> None:
    """Triton: one read, both operands"""
    row, col = (Output(*cast, out) for cast, out in zip(casts, outs, strict=True))
    launch_cast(_swiglu_source(gate_up), row, col, offs=offs)


def _reject_backward(request: Request) -> str | None:
    if request.shape[-1] % 4:
        return f"needs an even hidden size, this is {request.shape[-1] // 2}"
    return reject(request)


@kernel("swiglu_backward_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=_reject_backward)
def swiglu_backward_both(grad: Tensor, gate_up: Tensor, casts: Casts, outs: Outs, offs: Tensor | None) -> None:
    """Triton: one read, both operands of both gradients, and the activation's if it has the same format"""
    row, col, *rest = (Output(*cast, out) for cast, out in zip(casts, outs, strict=True))
    hidden = rest[0] if rest else None
    if is_far(grad.shape, grad.stride()):  # the registry has only checked gate_up
        grad = grad.contiguous()
    # if a tile would span gates and ups, each tile is computed on its own and inputs are read twice
    name = "swiglu_backward_any" if gate_up.shape[-1] % 256 else "swiglu_backward"
    source = Source(name, gate_up, gate_up.shape[-1], grad)
    fused = hidden is not None and fuses_hidden(source, (row.plan, col.plan), hidden.plan)
    launch_cast(source, row, col, offs=offs, hidden=hidden if fused else None)
    if hidden is not None and not fused:
        launch_cast(_swiglu_source(gate_up), None, hidden, offs=offs)


@kernel("permute_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def permute_both(
    x: Tensor, indices: Tensor, gate_weights: Tensor | None, casts: Casts, outs: Outs, offs: Tensor
) -> None:
    """Triton: one gathered read, both operands"""
    row, col = (Output(*cast, out) for cast, out in zip(casts, outs, strict=True))
    name = "plain" if gate_weights is None else "weighted"
    launch_cast(Source(name, x, x.shape[-1], y=dense(gate_weights), indices=dense(indices)), row, col, offs=offs)


@kernel("permute_columns", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def permute_columns(x: Tensor, indices: Tensor, cast: Cast, out: Buffers, offs: Tensor) -> None:
    """Triton: one gathered read, codes and scales in place"""
    source = Source("plain", x, x.shape[-1], indices=dense(indices))
    launch_cast(source, None, Output(*cast, out), offs=offs)


# ---- one cast, then a row gather -------------------------------------------------------------------------------------


@triton.jit
def _scale_offset(row, column, pitch, LAYOUT: tl.constexpr):
    """Offset of a row's scales; in the blocked layout a column is a word of four scales, and pitch is words per row."""
    if LAYOUT == "blocked":
        return ((row // 128) * pitch + column) * 128 + (row % 32) * 4 + (row % 128) // 32
    elif LAYOUT == "mn_major":
        return column * pitch + row
    else:
        return row * pitch + column


@triton.jit
def _copy_codes(index_ptr, data_ptr, out_ptr, P, units, pm, pk, R: tl.constexpr, W: tl.constexpr):
    """Gather a tile [R, W] of 32-bit words of codes; rows have `units` of 16 bytes."""
    p = pm.to(tl.int64) * R + tl.arange(0, R)
    w = pk * W + tl.arange(0, W)
    source = tl.load(index_ptr + p, mask=p < P, other=-1).to(tl.int64) + 1
    ok = (p < P)[:, None] & (w < units * 4)[None, :]
    # an explicit factor of 4, so that the compiler knows that rows are 16-byte aligned
    words = tl.load(data_ptr + (source * units * 4)[:, None] + w[None, :], mask=ok)
    tl.store(out_ptr + (p * units * 4)[:, None] + w[None, :], words, mask=ok)


@triton.jit
def _copy_scales(
    index_ptr, scale_ptr, out_ptr, P, columns, covered, pitch, out_pitch, pm, pk,
    FROM: tl.constexpr, TO: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gather a tile [R, C] of scales; rows up to `covered` include the pads of the layout, which are zeros."""
    p = pm.to(tl.int64) * R + tl.arange(0, R)[:, None]
    c = pk * C + tl.arange(0, C)[None, :]
    source = tl.load(index_ptr + p, mask=p < P, other=-1).to(tl.int64) + 1
    at = _scale_offset(source, c, pitch, FROM)
    scales = tl.load(scale_ptr + at, mask=(p < P) & (c < columns), other=0)
    tl.store(out_ptr + _scale_offset(p, c, out_pitch, TO), scales, mask=(p < covered) & (c < columns))


@triton.jit(do_not_specialize=["P", "covered", "tiles_k", "code_tiles", "scale_tiles_k"])
def gather_kernel(
    index_ptr, data_ptr, scale_ptr, out_data_ptr, out_scale_ptr,
    P, units, columns, covered, pitch, out_pitch, tiles_k, code_tiles, scale_tiles_k,
    FROM: tl.constexpr, TO: tl.constexpr, R: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gather codes and scales: row p is row index[p] + 1 of the source. Source row 0 is the row of zeros, index -1.

    The first `code_tiles` programs copy codes, the others scales.
    """
    pid = tl.program_id(0)
    if pid < code_tiles:
        _copy_codes(index_ptr, data_ptr, out_data_ptr, P, units, pid // tiles_k, pid % tiles_k, R, W)
    else:
        tile = pid - code_tiles
        _copy_scales(
            index_ptr, scale_ptr, out_scale_ptr, P, columns, covered, pitch, out_pitch,
            tile // scale_tiles_k, tile % scale_tiles_k, FROM, TO, 128, C,
        )  # fmt: skip


@kernel("permute", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def permute(x: Tensor, indices: Tensor, cast: Cast, out: Buffers) -> None:
    """Triton: one cast, then a row gather"""
    plan, spec, rows, positions = cast.plan, cast.plan.spec, x.shape[0] + 1, indices.shape[0]
    # the blocked layout stores four scales in a word, and so does its source; else scales are gathered from "plain"
    layout = "blocked" if plan.layout == "blocked" else "plain"
    length = plan.stored_length(x.shape[1])
    data = empty((rows, out[0].shape[1]), spec.data_dtype, x.device)
    scale = empty(scale_buffer_shape(spec, rows, length, layout), spec.scale_dtype, x.device)
    # The row of zeros goes through the cast too, because its codes are not always 0: a NaN amax poisons it.
    source = Source("plain", x, x.shape[1], indices=_numbers(power_of_two(rows), x.device)[:rows])
    launch_cast(source, Output(replace(plan, layout=layout), None, cast.amax, (data, scale, out[2])), None)
    if positions == 0:
        return
    blocks = ceil_div(length, spec.block[1])
    scale_words = layout == "blocked" or scale.dtype == torch.float32 or blocks % 4 == 0
    columns = blocks if scale.dtype == torch.float32 or not scale_words else ceil_div(blocks, 4)
    covered = {"blocked": round_up(positions, 128), "mn_major": round_up(positions, 4)}.get(plan.layout, positions)
    words, out_words = (buffer.view(torch.uint8).view(torch.int32) for buffer in (data, out[0]))
    scales, out_scales = (buffer.view(torch.int32 if scale_words else torch.uint8) for buffer in (scale, out[1]))
    units = words.shape[1] * 4 // CODE_ROW_BYTES
    width = min(1024, power_of_two(words.shape[1]))
    tile_rows, scale_width = 8192 // width, min(16, power_of_two(columns))
    tiles_k, scale_tiles_k = ceil_div(words.shape[1], width), ceil_div(columns, scale_width)
    code_tiles = ceil_div(positions, tile_rows) * tiles_k
    launch(
        gather_kernel, (code_tiles + ceil_div(covered, 128) * scale_tiles_k,),
        (dense(indices), words, scales, out_words, out_scales),
        (
            positions, units, columns, covered, columns, covered if plan.layout == "mn_major" else columns,
            tiles_k, code_tiles, scale_tiles_k, layout, plan.layout, tile_rows, width, scale_width,
        ),
        num_warps=4,
    )  # fmt: skip


_NUMBERS: dict[tuple[int, torch.device, int], Tensor] = {}


def _numbers(count: int, device: torch.device) -> Tensor:
    """-1, 0, 1, ... as int32 [count], made once for each size and stream: another stream would not wait for it."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _NUMBERS.get((count, device, stream))
    if found is None:
        found = torch.arange(-1, count - 1, dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # its values exist after a replay only
            return found
        _NUMBERS[count, device, stream] = found
    note_persistent_buffer(found, functools.partial(_numbers, count, device))
    return found


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------

_MAX_COLUMNS = 32768  # one CTA sums a row in its registers


@triton.jit
def _rstd_kernel(
    x_ptr, rstd_ptr, M, K, stride_e, stride_m, stride_k, inv_columns, eps,
    MODE: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """rstd = 1 / sqrt(mean of squares + eps) of R rows, summed by the pairwise tree of docs/numerics.md."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid * R + tl.arange(0, R)[:, None]
    offsets = (row // M) * stride_e + (row % M) * stride_m
    w = tl.arange(0, N // 2)[None, :]
    a, b = load_pairs(x_ptr, offsets, w, row >= 0, K, stride_k, MODE, EVEN)
    lo, hi = to_fp32(a, b, MODE)
    factor = row_rstd(lo, hi, inv_columns, eps, R, N // 2)
    tl.store(rstd_ptr + pid * R + tl.arange(0, R), factor)


def _launch_rstd(x: Tensor, eps: float, out: Tensor) -> None:
    count, rows, columns = x.shape
    mode = PACKED_MODES[x.dtype] if is_pair_aligned(x) else "any"
    steps = [step if mode == "any" else step // 2 for step in x.stride()[:2]]
    size = power_of_two(max(columns, 2))
    launch(
        _rstd_kernel, (count * rows,), (as_packed(x, mode), out),
        (rows, columns, *steps, x.stride(2), 1.0 / columns, eps, mode, Even(True, size == columns), 1, size),
        num_warps=8 if size > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def _reject_rmsnorm(request: Request) -> str | None:
    if request.shape[-1] > _MAX_COLUMNS:
        return f"takes rows of at most {_MAX_COLUMNS} values, these have {request.shape[-1]}"
    return reject(request)


@kernel("rmsnorm", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=_reject_rmsnorm)
def rmsnorm(x: Tensor, weight: Tensor, eps: float, cast: Cast, out: Buffers, rstd: Tensor) -> None:
    """Triton: one read for 1-D blocks without a tensor amax to compute, else two"""
    output, spec = Output(*cast, out), cast.plan.spec
    if spec.block[0] == 1 and (spec.family != "nvfp4" or cast.amax is not None):
        return launch_cast(Source("rmsnorm_rows", x, x.shape[-1], rstd, dense(weight), eps=eps), output, None)
    _launch_rstd(_matrices(x), eps, rstd)
    launch_cast(Source("rmsnorm", x, x.shape[-1], rstd, dense(weight)), output, None)


@kernel("rmsnorm_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=_reject_rmsnorm)
def rmsnorm_both(
    x: Tensor, weight: Tensor, eps: float, casts: Casts, outs: Outs, rstd: Tensor, offs: Tensor | None
) -> None:
    """Triton: rstd in one read, both operands in a second"""
    _launch_rstd(_matrices(x), eps, rstd)
    row, col = (Output(*cast, out) for cast, out in zip(casts, outs, strict=True))
    launch_cast(Source("rmsnorm", x, x.shape[-1], rstd, dense(weight)), row, col, offs=offs)
