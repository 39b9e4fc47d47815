"""Grouped GEMMs through PyTorch: exact upcast, then `F.grouped_mm` with fp32 sums. No host sync.

MX and NVFP4 only: a code times its block scale is exact in bf16 (docs/numerics.md). torch has no grouped GEMM for FP8
blockwise. Weight-only GEMMs take every format on a CPU, where they go group by group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.decoding import decode_blocks
from ..formats.layout import locate, padded_ends
from ..formats.spec import BF16_EXACT_PAIRS, FORMATS, WEIGHT_ONLY_PAIRS
from ..formats.tensor import BlockScaled
from ..gemm._torch import decoded_product
from ..gemm.ops import exact_bf16, finish
from ..registry import Request, kernel
from .ops import Inputs
from .routing import clear_rows
from .slices import group_matrix, group_spans
from .weight_only import WeightOnlyInputs


def _reject(request: Request) -> str | None:
    m, n, k, groups = request.shape
    if 0 in (m, n, k, groups):
        return "takes no empty operands"
    if "starts" in request.options:
        return "takes contiguous groups, without rows between them"
    if request.capability.device == "cuda":
        return _reject_cuda(request)
    return f"needs K in multiples of 4, not {k}" if request.op == "m_grouped" and k % 4 else None


def _reject_cuda(request: Request) -> str | None:
    """Reason to reject on CUDA: `F.grouped_mm` returns bf16 there, so a later epilogue would round a second time."""
    if request.capability.sm < 80:
        return "needs sm_80"
    if FORMATS[request.formats[1]].family != "mx":
        return "rounds to bf16 before a tensor scale could be applied"
    if request.dtype != torch.bfloat16 or request.options & {"bias", "accumulate"}:
        return "gives bf16 on CUDA, without bias or accumulation"
    _, n, k, _ = request.shape
    strides = (k,) if request.op == "m_grouped" else (k, n)
    if any(stride % 8 for stride in strides):
        return f"needs strides in multiples of 16 bytes, these are {strides} values"
    return None


@kernel("m_grouped", "torch", devices=("cpu", "cuda"), formats=BF16_EXACT_PAIRS, priority=10, reject=_reject)
def m_grouped(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """exact upcast, then F.grouped_mm"""
    a, b, offs, _, bias = inputs
    group, _ = locate(torch.arange(a.rows, device=a.device), offs.to(torch.int64))
    inside = (group < offs.shape[0])[:, None]
    group = group.clamp(max=offs.shape[0] - 1)
    product = _grouped_mm(a, b, offs)
    for q in (a, b):
        if q.global_scale is not None:
            product = product * (q.global_scale[group][:, None] if q.global_scale.dim() else q.global_scale)
    # `F.grouped_mm` leaves rows of no group undefined
    product = torch.where(inside, product, 0.0)
    if bias is not None:
        product = product + torch.where(inside, bias.float()[group], 0.0)
    finish(product, out, None, accumulate=accumulate)


@kernel("k_grouped", "torch", devices=("cpu", "cuda"), formats=BF16_EXACT_PAIRS, priority=10, reject=_reject)
def k_grouped(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
    """exact upcast, then F.grouped_mm over padded groups"""
    a, b, offs, _, _ = inputs
    product = _grouped_mm(a, b, padded_ends(offs).to(torch.int32))
    for q in (a, b):
        if q.global_scale is not None:
            product = product * (q.global_scale[:, None, None] if q.global_scale.dim() else q.global_scale)
    finish(product, out, None, accumulate=accumulate)


@kernel(
    "m_grouped",
    "torch",
    devices=("cpu",),
    formats=WEIGHT_ONLY_PAIRS,
    layouts=dict.fromkeys(FORMATS, "plain"),
    priority=10,
)
def weight_only_cpu(inputs: WeightOnlyInputs, out: Tensor, *, accumulate: bool) -> None:
    """weights of groups with rows decoded, then an fp32 GEMM for each such group"""
    assert not accumulate
    x, w, offs, starts, bias = inputs
    end = 0
    for group, (start, end) in enumerate(group_spans(offs, starts)):
        if end > start:
            product = decoded_product(x[start:end], group_matrix(w, group))
            finish(product, out[start:end], None if bias is None else bias[group], accumulate=False)
    if starts is None:
        out[end:] = 0


@kernel(
    "m_grouped",
    "torch",
    formats=[("bf16", name) for name, spec in FORMATS.items() if spec.family == "mx"],
    priority=10,
    reject=_reject,
)
def weight_only_cuda(inputs: WeightOnlyInputs, out: Tensor, *, accumulate: bool) -> None:
    """exact upcast of the weights, then F.grouped_mm"""
    assert not accumulate
    x = inputs.a
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    out.copy_(functional.grouped_mm(x, exact_bf16(inputs.b).mT, offs=inputs.offs))
    clear_rows(out, inputs.offs)  # `F.grouped_mm` leaves rows of no group undefined


def _grouped_mm(a: BlockScaled, b: BlockScaled, offs: Tensor) -> Tensor:
    """Grouped GEMM with fp32 sums of operands that are exact in bf16; bf16 output on CUDA, fp32 on the CPU."""
    decode = exact_bf16 if a.data.is_cuda else decode_blocks
    return functional.grouped_mm(decode(a), decode(b).mT, offs=offs)
