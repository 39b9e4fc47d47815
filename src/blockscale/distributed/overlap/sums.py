"""Sum of the parts of all ranks on a GPU: one pass that reads each part once and writes the rounded sum.

Adding one part after the other would read and write an fp32 total for each rank, five times the bytes with 8 ranks.
"""

# Type checkers do not know Triton: a constexpr stands for its value.
# pyright: basic, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...casts._device import round_to_bf16
from ...launch import launch
from ...library import empty

_BLOCK = 1024


@triton.jit
def _sum_kernel(
    parts_ptr, own_ptr, poison_ptr, out_ptr, size,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        start = own_ptr if source == RANK else parts_ptr + source * size.to(tl.int64)
        part = tl.load(start + at, mask=at < size).to(tl.float32)
        total = part if source == 0 else total + part  # 0 + (-0) would lose the sign
    total += tl.load(poison_ptr)
    if INTERPRETED and out_ptr.dtype.element_ty == tl.bfloat16:  # whose cast to bf16 does not round
        total = round_to_bf16(total)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


INTERPRETED = not isinstance(_sum_kernel, triton.runtime.JITFunction)


def sum_parts(parts: Tensor, own: Tensor, rank: int, poison: Tensor) -> Tensor:
    """Sum over ranks [rows, N] of parts [ranks, rows, N], added in the order of ranks in fp32, with `own` in place of
    this rank's.  poison: fp32, added to the sum: -0.0, which changes no bit, or NaN."""
    out = empty(own.shape, parts.dtype, own.device)
    size = out.numel()
    rest = size, rank, len(parts), _BLOCK, INTERPRETED
    launch(_sum_kernel, (-(-size // _BLOCK),), (parts, own, poison, out), rest, num_warps=4)
    return out
