"""Triton fused casts: the cast kernel with another source, and RMSNorm, whose rows must be whole before they are cast.

SwiGLU and its backward compute their tile from the loaded ones, rounded to the input's type as the unfused pair does; a
permutation gathers the rows that it loads. The rounding code is that of the plain casts.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..registry import Request, kernel
from ._device_fused import rstd as row_rstd
from ._tiles import load_pairs, values
from ._triton import DEVICES, WORDS, Buffers, Output, Source, as_words, in_pairs, launch, power_of_two, reject

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
    if request.shape[-1] % 256:
        return f"needs a hidden size that is a multiple of 128, this is {request.shape[-1] // 2}"
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
    """Triton: one read, both operands of both gradients"""
    row, col = (Output(*parts) for parts in zip(plans, outs, states[:2], amaxes[:2], strict=True))
    launch(Source("swiglu_backward", gate_up, gate_up.shape[-1], grad), row, col, offs=offs)
    if hidden is not None and hidden_out is not None:
        swiglu(gate_up, hidden, -2, hidden_out, state=states[2], amax=amaxes[2], offs=offs)


@kernel("permute_both", "triton", devices=DEVICES, sm=(80, 999), priority=50, reject=reject)
def permute_both(
    x: Tensor,
    indices: Tensor,
    plans: Plans,
    outs: Outs,
    *,
    states: Optionals = (None, None),
    amaxes: Optionals = (None, None),
    offs: Tensor,
) -> None:
    """Triton: one gathered read, both operands"""
    row, col = (Output(*parts) for parts in zip(plans, outs, states, amaxes, strict=True))
    launch(Source("plain", x, x.shape[-1], index=indices), row, col, offs=offs)


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------

_LONGEST_ROW = 32768  # a row is summed in the registers of one program


@triton.jit
def _rstd_kernel(
    x_ptr, rstd_ptr, M, K, stride_e, stride_m, stride_k, share, eps,
    MODE: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """1 / sqrt(mean of squares + eps) of R rows: pairs first, as the contract's tree has it."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid * R + tl.arange(0, R)[:, None]
    offsets = (row // M) * stride_e + (row % M) * stride_m
    w = tl.arange(0, N // 2)[None, :]
    a, b = load_pairs(x_ptr, offsets, w, row >= 0, K, stride_k, MODE, False)
    lo, hi = values(a, b, MODE)
    factor = row_rstd(lo, hi, share, eps, R, N // 2)
    tl.store(rstd_ptr + pid * R + tl.arange(0, R), factor)


def _launch_rstd(x: Tensor, eps: float, out: Tensor) -> None:
    count, rows, columns = x.shape
    mode = WORDS[x.dtype] if in_pairs(x) else "any"
    steps = [step if mode == "any" else step // 2 for step in x.stride()[:2]]
    size = power_of_two(max(columns, 2))
    _rstd_kernel[(count * rows,)](
        as_words(x, mode), out, rows, columns, *steps, x.stride(2), 1.0 / columns, eps, MODE=mode, R=1, N=size,
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
        return launch(Source("rmsnorm_rows", x, x.shape[-1], rstd, weight, eps=eps), output, None)
    _launch_rstd(_matrices(x), eps, rstd)
    launch(Source("rmsnorm", x, x.shape[-1], rstd, weight), output, None)


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
    launch(Source("rmsnorm", x, x.shape[-1], rstd, weight), row, col, offs=offs)
