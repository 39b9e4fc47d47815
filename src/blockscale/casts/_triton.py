"""Triton casts, sm_80 and newer: one kernel over tiles of the operand, writing codes and scales as products read them.

A program loads a [BR, BL] tile of the operand (rows by scaled axis; transposed in registers when the scaled axis is the
source's second to last), reduces each block's maximum as an integer, and writes codes, pads and scales. NVFP4 without a
supplied maximum reads the tensor once more before. Offsets are 64-bit. What is not here yet is refused with a reason.
"""

# pyright: basic, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import ceil_div, code_row_bytes, round_up, scale_buffer_shape, scale_counts
from ..registry import Request, kernel
from ._device import encode_factor, encode_signed, fp8_scale, magnitude_bits, mx_scale, nvfp4_scale

Buffers = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _cast_kernel(
    x_ptr, data_ptr, scale_ptr, global_ptr, amax_ptr,
    R, L, stride_e, stride_r, stride_l, row_bytes, data_e, scale_e, scale_rows, scale_blocks, pad_rows, pad_blocks,
    FAMILY: tl.constexpr, RULE: tl.constexpr, LAYOUT: tl.constexpr, SATFINITE: tl.constexpr, GROUPED: tl.constexpr,
    EBITS: tl.constexpr, MBITS: tl.constexpr, BIAS: tl.constexpr, EMAX: tl.constexpr, MAX_BITS: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, PER_BYTE: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    pid_l, pid_r, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = pid_r * BR + tl.arange(0, BR)
    l = pid_l * BL + tl.arange(0, BL)
    inside = (r[:, None] < R) & (l[None, :] < L)  # [BR, BL]
    base = x_ptr + e * stride_e
    if TRANSPOSED:
        # load with rows along the fast axis, then turn the tile in registers
        offsets = l[:, None].to(tl.int64) * stride_l + r[None, :].to(tl.int64) * stride_r
        x = tl.trans(tl.load(base + offsets, mask=(l[:, None] < L) & (r[None, :] < R), other=0.0))
    else:
        offsets = r[:, None].to(tl.int64) * stride_r + l[None, :].to(tl.int64) * stride_l
        x = tl.load(base + offsets, mask=inside, other=0.0)
    x = x.to(tl.float32)
    NR: tl.constexpr = BR // BLOCK_R
    NL: tl.constexpr = BL // BLOCK_L
    amax = tl.max(tl.reshape(magnitude_bits(x), (BR, NL, BLOCK_L)), axis=2)  # [BR, NL]
    if BLOCK_R > 1:
        amax = tl.max(tl.reshape(amax, (NR, BLOCK_R, NL)), axis=1)  # [NR, NL]
    if FAMILY == "mx":
        scale, factor = mx_scale(amax, RULE, EMAX, MBITS, MAX_BITS & 0x7FFFFF, SATFINITE)
    elif FAMILY == "fp8":
        scale, factor = fp8_scale(amax, RULE)
    else:
        top = (tl.load(amax_ptr + (e if GROUPED else 0)) & 0x7FFFFFFF) + tl.zeros((1,), tl.int32)
        tensor_decode, tensor_encode = encode_factor(top, 2688.0)
        scale, factor = nvfp4_scale(amax, tensor_decode[None, :], tensor_encode[None, :], RULE)
        if (pid_l == 0) & (pid_r == 0) & ((e == 0) | GROUPED):
            tl.store(global_ptr + e + tl.arange(0, 1), tensor_decode)
    spread = tl.broadcast_to(factor[:, None, :, None], (NR, BLOCK_R, NL, BLOCK_L))
    v = x * tl.reshape(spread, (BR, BL))
    if HARDWARE:
        code = v.to(tl.float8e4nv if MBITS == 3 else tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        code = encode_signed(v, EBITS, MBITS, BIAS, MAX_BITS, NAN_CODE)
    code = tl.where(inside, code, 0)
    if PER_BYTE == 2:
        low, high = tl.split(tl.reshape(code, (BR, BL // 2, 2)))
        code = low | (high << 4)
    byte = pid_l * (BL // PER_BYTE) + tl.arange(0, BL // PER_BYTE)
    where = data_ptr + e * data_e + r[:, None].to(tl.int64) * row_bytes + byte[None, :]
    tl.store(where, code.to(tl.uint8), mask=(r[:, None] < R) & (byte[None, :] < row_bytes))

    tile = pid_r * NR + tl.arange(0, NR)
    block = pid_l * NL + tl.arange(0, NL)
    real = (tile[:, None] < scale_rows) & (block[None, :] < scale_blocks)
    t, b = tile[:, None].to(tl.int64), block[None, :].to(tl.int64)
    if LAYOUT == "mn_major":
        where_scale = b * pad_rows + t
    elif LAYOUT == "blocked":
        where_scale = 512 * ((t // 128) * (pad_blocks // 4) + b // 4) + (t % 32) * 16 + ((t % 128) // 32) * 4 + b % 4
    else:
        where_scale = t * pad_blocks + b
    stored = tl.where(real, scale, 0).to(scale_ptr.dtype.element_ty)
    padded = (tile[:, None] < pad_rows) & (block[None, :] < pad_blocks)
    tl.store(scale_ptr + e * scale_e + where_scale, stored, mask=padded)


@triton.jit
def _amax_kernel(
    x_ptr, amax_ptr, R, L, stride_e, stride_r, stride_l, GROUPED: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr
):
    pid_l, pid_r, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = (pid_r * BR + tl.arange(0, BR)).to(tl.int64)
    l = (pid_l * BL + tl.arange(0, BL)).to(tl.int64)
    mask = (r[:, None] < R) & (l[None, :] < L)
    x = tl.load(x_ptr + e * stride_e + r[:, None] * stride_r + l[None, :] * stride_l, mask=mask, other=0.0)
    tl.atomic_max(amax_ptr + (e if GROUPED else 0), tl.max(tl.max(magnitude_bits(x.to(tl.float32)), axis=1), axis=0))


# Under TRITON_INTERPRET=1 kernels run in numpy on the CPU; its fp8 casts do not round, so codes are made by integers.
INTERPRETED = not isinstance(_cast_kernel, triton.runtime.JITFunction)


# tiles of 32 rows on an axis of the grid that holds 65535
_MOST_ROWS = 65535 * 32 - 128


def _reject(request: Request) -> str | None:
    missing = request.options & {"offs", "stochastic", "hadamard"}
    if missing:
        return f"has no {' and '.join(sorted(missing))} yet"
    if 0 in request.shape:
        return "takes no empty tensors"
    if "large_batch" in request.options:
        return "takes at most 65535 matrices"
    if max(request.shape) > _MOST_ROWS:
        return f"takes at most {_MOST_ROWS} rows, these are {max(request.shape)}"
    if "blocked" in request.layouts and request.formats[0] == "nvfp4_16x16":
        return "does not repeat 16x16 scales for the blocked layout yet"
    return None


def _tile(plan: CastPlan) -> tuple[int, int]:
    """Rows and length of a program's tile: whole blocks, about 8192 values."""
    across, along = plan.spec.block
    return max(across, 32), max(along, 256 if across == 1 else 128)


@kernel(
    "cast", "triton", devices=("cuda", "cpu") if INTERPRETED else ("cuda",), sm=(80, 999), priority=50, reject=_reject
)
def quantize(
    x: Tensor,
    plan: CastPlan,
    axis: int,
    out: Buffers,
    *,
    state: Tensor | None = None,
    amax: Tensor | None = None,
    offs: Tensor | None = None,
) -> None:
    """Triton: one read, codes and scales in place"""
    spec, element = plan.spec, plan.spec.element
    matrices = x.reshape(-1, x.shape[-2], x.shape[-1])
    stride_e, stride_m, stride_k = matrices.stride()
    rows, length = x.shape[-3 - axis], x.shape[axis]
    stride_r, stride_l = (stride_m, stride_k) if axis == -1 else (stride_k, stride_m)
    tiles, blocks = scale_counts(spec, rows, length)
    pad_rows, pad_blocks = _padded_scales(plan, rows, length)
    row_bytes = code_row_bytes(spec, length)
    br, bl = _tile(plan)
    grid = (
        max(ceil_div(row_bytes * spec.codes_per_byte, bl), ceil_div(pad_blocks * spec.block[1], bl)),
        max(ceil_div(rows, br), ceil_div(pad_rows * spec.block[0], br)),
        matrices.shape[0],
    )
    data, scale = out[0].view(torch.uint8), out[1]
    scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    grouped = plan.grouped_amax or (amax is not None and amax.dim() == 1)
    top = _tensor_amax(matrices, amax, grouped=grouped) if spec.family == "nvfp4" else data
    major = torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)
    _cast_kernel[grid](
        matrices, data, scale, out[2], top,
        rows, length, stride_e, stride_r, stride_l, row_bytes, rows * row_bytes, scale.numel() // matrices.shape[0],
        tiles, blocks, pad_rows, pad_blocks,
        FAMILY=spec.family, RULE=plan.rule, LAYOUT=plan.layout, SATFINITE=plan.satfinite, GROUPED=grouped,
        EBITS=element.ebits, MBITS=element.mbits, BIAS=element.bias, EMAX=element.emax, MAX_BITS=element.max_bits,
        NAN_CODE=element.nan_code, HARDWARE=major >= (8, 9) and element.bits == 8, PER_BYTE=spec.codes_per_byte,
        TRANSPOSED=stride_r < stride_l, BLOCK_R=spec.block[0], BLOCK_L=spec.block[1], BR=br, BL=bl,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _padded_scales(plan: CastPlan, rows: int, length: int) -> tuple[int, int]:
    """Row tiles and blocks of the scale buffer, pads included."""
    tiles, blocks = scale_counts(plan.spec, rows, length)
    if plan.layout == "mn_major":
        return round_up(tiles, 4), blocks
    if plan.layout == "blocked":
        return round_up(rows, 128), round_up(blocks, 4)
    return tiles, scale_buffer_shape(plan.spec, rows, length, plan.layout)[1]


def _tensor_amax(matrices: Tensor, amax: Tensor | None, *, grouped: bool) -> Tensor:
    """int32 patterns of the tensor's maximum, or of each matrix's: supplied, or from one more read."""
    if amax is not None:
        return amax.view(torch.int32)
    count, rows, columns = matrices.shape
    top = torch.zeros(count if grouped else 1, dtype=torch.int32, device=matrices.device)
    grid = (ceil_div(columns, 256), ceil_div(rows, 32), count)
    _amax_kernel[grid](matrices, top, rows, columns, *matrices.stride(), GROUPED=grouped, BR=32, BL=256, num_warps=4)
    return top


@kernel(
    "cast_both",
    "triton",
    devices=("cuda", "cpu") if INTERPRETED else ("cuda",),
    sm=(80, 999),
    priority=50,
    reject=_reject,
)
def quantize_both(
    x: Tensor,
    plans: tuple[CastPlan, CastPlan],
    outs: tuple[Buffers, Buffers],
    colsum: Tensor | None,
    *,
    states: tuple[Tensor | None, Tensor | None] = (None, None),
    amaxes: tuple[Tensor | None, Tensor | None] = (None, None),
    offs: Tensor | None = None,
) -> None:
    """Triton: one launch, and one read, per operand"""
    for axis, plan, out, amax in zip((-1, -2), plans, outs, amaxes, strict=True):
        quantize(x, plan, axis, out, amax=amax)
    if colsum is not None:
        colsum.copy_(x.sum(-2, dtype=torch.float64))
