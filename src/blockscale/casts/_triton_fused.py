"""Triton fused casts: the cast kernel with another source, and RMSNorm, whose rows must be whole before they are cast.

SwiGLU and its backward compute their tile from the loaded ones, rounded to the input's type as the unfused pair does; a
permutation gathers the rows that it loads, or, where only rows are cast, copies rows of codes and scales after the
cast. The rounding code is that of the plain casts.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import CODE_ROW_BYTES, ceil_div, round_up, scale_buffer_shape
from ..library import empty
from ..registry import Request, kernel
from ._device_fused import rstd as row_rstd
from ._source import WORDS, Source, as_words, dense, in_pairs, power_of_two
from ._tiles import Even, load_pairs, values
from ._triton import DEVICES, Buffers, Output, launch, reject, takes_third
from .ops import is_far

Plans = tuple[CastPlan, CastPlan]
Outs = tuple[Buffers, Buffers]
Optionals = tuple[Tensor | None, Tensor | None]


def _matrices(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-2], x.shape[-1])


def _halves(gate_up: Tensor) -> Source:
    return Source("swiglu", gate_up, gate_up.shape[-1] // 2)


@kernel("swiglu", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def swiglu(
    gate_up: Tensor,
    plan: CastPlan,
    axis: int,
    out: Buffers,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
    offs: Tensor | None = None,
) -> None:
    """Triton: one read, codes and scales in place"""
    output = Output(plan, out, state, amax)
    launch(_halves(gate_up), output if axis == -1 else None, output if axis == -2 else None, offs=offs)


@kernel("swiglu_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def swiglu_both(
    gate_up: Tensor,
    plans: Plans,
    outs: Outs,
    *,
    states: Optionals = (None, None),
    amaxes: Optionals = (None, None),
    offs: Tensor | None = None,
) -> None:
    """Triton: one read, both operands"""
    row, col = (Output(*parts) for parts in zip(plans, outs, states, amaxes, strict=True))
    launch(_halves(gate_up), row, col, offs=offs)


def _reject_backward(request: Request) -> str | None:
    if request.shape[-1] % 4:
        return f"needs an even hidden size, this is {request.shape[-1] // 2}"
    return reject(request)


@kernel("swiglu_backward_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=_reject_backward)
def swiglu_backward_both(
    grad: Tensor,
    gate_up: Tensor,
    plans: Plans,
    outs: Outs,
    hidden: CastPlan | None,
    hidden_out: Buffers | None,
    *,
    states: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    amaxes: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    offs: Tensor | None = None,
) -> None:
    """Triton: one read, both operands of both gradients, and the third where it is of the same format"""
    row, col = (Output(*parts) for parts in zip(plans, outs, states[:2], amaxes[:2], strict=True))
    if is_far(grad.shape, grad.stride()):  # the table was asked about gate_up
        grad = grad.contiguous()
    # where a tile holds the end of gates and the start of ups, each tile is made by itself: sources are read twice
    name = "swiglu_backward_any" if gate_up.shape[-1] % 256 else "swiglu_backward"
    source = Source(name, gate_up, gate_up.shape[-1], grad)
    third = None
    if hidden is not None and hidden_out is not None and takes_third(source, plans, hidden):
        third = Output(hidden, hidden_out, states[2], amaxes[2])
    launch(source, row, col, offs=offs, third=third)
    if hidden is not None and hidden_out is not None and third is None:
        swiglu(gate_up, hidden, -2, hidden_out, state=states[2], amax=amaxes[2], offs=offs)


@kernel("permute_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def permute_both(
    x: Tensor,
    indices: Tensor,
    weights: Tensor | None,
    plans: Plans,
    outs: Outs,
    *,
    states: Optionals = (None, None),
    amaxes: Optionals = (None, None),
    offs: Tensor,
) -> None:
    """Triton: one gathered read, both operands"""
    row, col = (Output(*parts) for parts in zip(plans, outs, states, amaxes, strict=True))
    name = "plain" if weights is None else "weighted"
    launch(Source(name, x, x.shape[-1], y=dense(weights), indices=dense(indices)), row, col, offs=offs)


@kernel("permute_columns", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def permute_columns(
    x: Tensor,
    indices: Tensor,
    plan: CastPlan,
    out: Buffers,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
    offs: Tensor,
) -> None:
    """Triton: one gathered read, codes and scales in place"""
    source = Source("plain", x, x.shape[-1], indices=dense(indices))
    launch(source, None, Output(plan, out, state, amax), offs=offs)


# ---- one cast, then copies of rows -----------------------------------------------------------------------------------


@triton.jit
def _scale_offset(row, column, pitch, LAYOUT: tl.constexpr):
    """Where the scales of a row lie; in the blocked layout a column is a word of four, a pitch the words of a row."""
    if LAYOUT == "blocked":
        return ((row // 128) * pitch + column) * 128 + (row % 32) * 4 + (row % 128) // 32
    elif LAYOUT == "mn_major":
        return column * pitch + row
    else:
        return row * pitch + column


@triton.jit
def _copy_codes(index_ptr, data_ptr, out_ptr, P, units, pm, pk, R: tl.constexpr, W: tl.constexpr):
    """A tile [R, W] of words of codes, `units` of 16 bytes a row."""
    p = pm.to(tl.int64) * R + tl.arange(0, R)
    w = pk * W + tl.arange(0, W)
    source = tl.load(index_ptr + p, mask=p < P, other=-1).to(tl.int64) + 1
    ok = (p < P)[:, None] & (w < units * 4)[None, :]
    # a factor of 4 that the compiler sees: rows start at multiples of 16 bytes
    words = tl.load(data_ptr + (source * units * 4)[:, None] + w[None, :], mask=ok)
    tl.store(out_ptr + (p * units * 4)[:, None] + w[None, :], words, mask=ok)


@triton.jit
def _copy_scales(
    index_ptr, scale_ptr, out_ptr, P, columns, covered, pitch, out_pitch, pm, pk,
    FROM: tl.constexpr, TO: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile [R, C] of scales; up to `covered` rows, since layouts have pads, which are zeros."""
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
    """Row p of codes and scales is row index[p] + 1 of the source: its row 0 stands for -1, the row of zeros.

    The first programs copy codes, the others scales.
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
def permute(x: Tensor, indices: Tensor, plan: CastPlan, out: Buffers, *, amax: Tensor | None = None) -> None:
    """Triton: one cast, then copies of its rows"""
    spec, rows, positions = plan.spec, x.shape[0] + 1, indices.shape[0]
    # the blocked layout keeps four scales in a word, and so does its source; else rows of scales are read as they lie
    layout = "blocked" if plan.layout == "blocked" else "plain"
    length = plan.stored_length(x.shape[1])
    data = empty((rows, out[0].shape[1]), spec.data_dtype, x.device)
    scale = empty(scale_buffer_shape(spec, rows, length, layout), spec.scale_dtype, x.device)
    # The row of zeros goes through the cast, because its codes are not always 0: a maximum of NaN poisons it too.
    source = Source("plain", x, x.shape[1], indices=torch.arange(-1, x.shape[0], dtype=torch.int32, device=x.device))
    launch(source, Output(replace(plan, layout=layout), (data, scale, out[2]), None, amax), None)
    if positions == 0:
        return
    blocks = ceil_div(length, spec.block[1])
    wide = layout == "blocked" or scale.dtype == torch.float32 or blocks % 4 == 0
    columns = blocks if scale.dtype == torch.float32 or not wide else ceil_div(blocks, 4)
    covered = {"blocked": round_up(positions, 128), "mn_major": round_up(positions, 4)}.get(plan.layout, positions)
    words, out_words = (buffer.view(torch.uint8).view(torch.int32) for buffer in (data, out[0]))
    scales, out_scales = (buffer.view(torch.int32 if wide else torch.uint8) for buffer in (scale, out[1]))
    units = words.shape[1] * 4 // CODE_ROW_BYTES
    width = min(1024, power_of_two(words.shape[1]))
    tile_rows, scale_width = 8192 // width, min(16, power_of_two(columns))
    tiles_k, scale_tiles_k = ceil_div(words.shape[1], width), ceil_div(columns, scale_width)
    code_tiles = ceil_div(positions, tile_rows) * tiles_k
    gather_kernel[(code_tiles + ceil_div(covered, 128) * scale_tiles_k,)](
        dense(indices), words, scales, out_words, out_scales,
        positions, units, columns, covered, columns, covered if plan.layout == "mn_major" else columns,
        tiles_k, code_tiles, scale_tiles_k,
        FROM=layout, TO=plan.layout, R=tile_rows, W=width, C=scale_width, num_warps=4,
    )  # fmt: skip


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------

_LONGEST_ROW = 32768  # a row is summed in the registers of one program


@triton.jit
def _rstd_kernel(
    x_ptr, rstd_ptr, M, K, stride_e, stride_m, stride_k, share, eps,
    MODE: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """1 / sqrt(mean of squares + eps) of R rows: pairs first, as the contract's tree has it."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid * R + tl.arange(0, R)[:, None]
    offsets = (row // M) * stride_e + (row % M) * stride_m
    w = tl.arange(0, N // 2)[None, :]
    a, b = load_pairs(x_ptr, offsets, w, row >= 0, K, stride_k, MODE, EVEN)
    lo, hi = values(a, b, MODE)
    factor = row_rstd(lo, hi, share, eps, R, N // 2)
    tl.store(rstd_ptr + pid * R + tl.arange(0, R), factor)


def _launch_rstd(x: Tensor, eps: float, out: Tensor) -> None:
    count, rows, columns = x.shape
    mode = WORDS[x.dtype] if in_pairs(x) else "any"
    steps = [step if mode == "any" else step // 2 for step in x.stride()[:2]]
    size = power_of_two(max(columns, 2))
    _rstd_kernel[(count * rows,)](
        as_words(x, mode), out, rows, columns, *steps, x.stride(2), 1.0 / columns, eps,
        MODE=mode, EVEN=Even(True, size == columns), R=1, N=size,
        num_warps=8 if size > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def _reject_rmsnorm(request: Request) -> str | None:
    if request.shape[-1] > _LONGEST_ROW:
        return f"takes rows of at most {_LONGEST_ROW} values, these have {request.shape[-1]}"
    return reject(request)


@kernel("rmsnorm", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=_reject_rmsnorm)
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    plan: CastPlan,
    out: Buffers,
    rstd: Tensor,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
) -> None:
    """Triton: one read where a block lies in a row and no maximum comes first, else two"""
    output = Output(plan, out, state, amax)
    if plan.spec.block[0] == 1 and (plan.spec.family != "nvfp4" or amax is not None):
        return launch(Source("rmsnorm_rows", x, x.shape[-1], rstd, dense(weight), eps=eps), output, None)
    _launch_rstd(_matrices(x), eps, rstd)
    launch(Source("rmsnorm", x, x.shape[-1], rstd, dense(weight)), output, None)


@kernel("rmsnorm_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=_reject_rmsnorm)
def rmsnorm_both(
    x: Tensor,
    weight: Tensor,
    eps: float,
    plans: Plans,
    outs: Outs,
    rstd: Tensor,
    *,
    states: Optionals = (None, None),
    amaxes: Optionals = (None, None),
    offs: Tensor | None = None,
) -> None:
    """Triton: rstd in one read, both operands in a second"""
    _launch_rstd(_matrices(x), eps, rstd)
    row, col = (Output(*parts) for parts in zip(plans, outs, states, amaxes, strict=True))
    launch(Source("rmsnorm", x, x.shape[-1], rstd, dense(weight)), row, col, offs=offs)
