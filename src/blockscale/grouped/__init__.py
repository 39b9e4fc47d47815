"""Grouped GEMMs for mixture-of-experts layers: one call over groups of tokens, with group sizes on the device only.

Operands of rank 2 and 3 make an m-grouped GEMM (fprop, dgrad): rows of `a` times the matrix of their group. Two of rank
2 make a k-grouped GEMM (wgrad): tokens are contracted group by group. Any group sizes: empty, one row, unaligned.
Groups of rows are contiguous, or start at `starts`, as in decoding with a fixed capacity per expert.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..casts.checks import check_group_count, check_offs
from ..errors import DtypeError, ShapeError, refuse
from ..formats.checks import in_words, is_dense
from ..formats.spec import partners_of
from ..formats.tensor import BlockScaled
from ..gemm.ops import check_accumulator, check_bias, check_contraction, check_operands, check_output
from ..gemm.weight_only import check_no_accumulator, check_weight_only
from . import _reference as _reference  # registers its kernels
from . import _torch as _torch
from . import unquantized as unquantized
from .ops import multiply_grouped
from .routing import Routing, as_routing, sort_by_expert
from .weight_only import weight_only_grouped_mm

with contextlib.suppress(ImportError):  # CPU builds of torch come without triton; nothing needs it
    from . import _blackwell as _blackwell
    from . import _hopper as _hopper
    from . import _hopper_mx as _hopper_mx
    from . import _hopper_upcast as _hopper_upcast
    from . import _triton as _triton
    from . import _triton_rows as _triton_rows

__all__ = ["Routing", "as_routing", "check_grouped", "scaled_grouped_mm", "sort_by_expert"]


def scaled_grouped_mm(
    a: Tensor | BlockScaled,
    b: BlockScaled,
    offs: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: Tensor | None = None,
    accumulate: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """m-grouped: a [M, K], b [E, N, K] -> [M, N]; k-grouped: a [N, M], b [K, M] -> [G, N, K], M summed by group.

    offs: inclusive end offsets of the groups (int32, on the device), before any padding. k-grouped operands are cast
    with `quantize(x, format, axis=-2, offs=offs)` and passed as `.mT`. Rows after the last group give zero.
    a: BlockScaled, or, m-grouped, a plain bf16, fp16 or fp32 tensor, which is not rounded, as in `scaled_mm`.
    bias: [E, N], m-grouped only.  accumulate: fp32 or bf16 accumulator; `accumulate += product`, as in `scaled_mm`, and
    it is returned.
    starts: first row of each group (int32, on the device), m-grouped only, for groups that are not contiguous: group g
    is rows starts[g] to offs[g]. Other rows of `a` are ignored. Other rows of the result are not written: they are
    undefined, or unchanged with `accumulate`.

    >>> import blockscale as bs
    >>> offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    >>> x = bs.quantize(torch.ones(5, 64), "mxfp8_e4m3")
    >>> w = bs.quantize(torch.ones(3, 4, 64), "mxfp8_e4m3")
    >>> scaled_grouped_mm(x, w, offs).shape
    torch.Size([5, 4])

    A capacity of 4 rows for each of 2 experts, which have 1 and 3:

    >>> x, w = (bs.quantize(torch.ones(*shape, 64), "mxfp8_e4m3") for shape in ((2 * 4,), (2, 16)))
    >>> starts, counts = (torch.tensor(rows, dtype=torch.int32) for rows in ([0, 4], [1, 3]))
    >>> scaled_grouped_mm(x, w, starts + counts, starts=starts).unflatten(0, (2, 4))[1, 2, 0].item()
    64.0
    """
    if isinstance(a, Tensor):
        check_weight_only_grouped(a, b, offs, starts)
        check_no_accumulator(accumulate)
        check_output(out_dtype)
        check_bias(bias, (b.shape[0], b.rows), a.device)
        return weight_only_grouped_mm(a, b, offs, starts, bias, out_dtype)
    shape = check_grouped(a, b, offs, starts)
    if accumulate is not None:
        check_accumulator(accumulate, bias, shape, a.device)
        return multiply_grouped(a, b, offs, out_dtype, None, accumulate, starts)
    check_output(out_dtype)
    if bias is not None:
        if len(b.shape) != 3:
            refuse("bias in a k-grouped product", "weight gradients have no bias", "leave it out")
        check_bias(bias, (b.shape[0], b.rows), a.device)
    return multiply_grouped(a, b, offs, out_dtype, bias, None, starts)


def check_grouped(a: BlockScaled, b: BlockScaled, offs: Tensor, starts: Tensor | None = None) -> tuple[int, ...]:
    """Shape of the result; raises unless `scaled_grouped_mm` takes these operands."""
    if isinstance(b, BlockScaled) and len(b.shape) == 3:  # pyright: ignore[reportUnnecessaryIsInstance]
        return _check_m_grouped(a, b, offs, starts)
    shape = _check_k_grouped(a, b, offs)
    if starts is not None:
        rule, fix = "the cast of the operands sets where the tokens of a group start", "leave it out"
        refuse("starts in a k-grouped product", rule, fix)
    return shape


def _check_m_grouped(a: BlockScaled, b: BlockScaled, offs: Tensor, starts: Tensor | None) -> tuple[int, ...]:
    # before the formats are compared: their advice would ignore that rows are grouped
    if isinstance(a, BlockScaled) and a.spec.is_2d:  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "a 2-D block of rows would span groups"
        fix = f"cast a with 1-D blocks: {' or '.join(partners_of(b.format))}"
        refuse(f"a is {a}", rule, fix)
    check_operands(a, b, ranks=(2, 3))
    check_contraction(a, b)
    _check_groups(b, offs, starts)
    check_group_count(a, offs, "a")
    if a.group_align:
        refuse(f"a is {a}", "an m-grouped product takes rows as they are", "cast a with axis=-1")
    return (a.rows, b.rows)


def check_weight_only_grouped(x: Tensor, w: BlockScaled, offs: Tensor, starts: Tensor | None = None) -> None:
    """Raise unless `scaled_grouped_mm` takes these operands, the first a plain tensor."""
    check_weight_only(x, w, rank=3)
    _check_groups(w, offs, starts)


def _check_groups(b: BlockScaled, offs: Tensor, starts: Tensor | None) -> None:
    """Raise unless the groups fit the matrices of b."""
    check_offs(offs, b.device, 2, required=True)
    if offs.shape[0] != b.shape[0]:
        rule = "one group per matrix of b, empty groups included"
        fix = "repeat the previous end for a group without rows"
        refuse(f"{offs.shape[0]} group ends for {b.shape[0]} matrices", rule, fix, error=ShapeError)
    _check_starts(starts, offs)
    check_group_count(b, offs, "b")


def _check_starts(starts: Tensor | None, offs: Tensor) -> None:
    if starts is None:
        return
    if not isinstance(starts, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = "pass torch.tensor(starts, dtype=torch.int32)"
        refuse(f"starts is a {type(starts).__name__}", rule="starts are an int32 tensor", fix=fix, error=DtypeError)
    sound = is_dense(starts) and starts.dtype == torch.int32 and starts.shape == offs.shape
    if not sound or starts.device != offs.device:
        rule = f"starts are an int32 vector on {offs.device}, one for each of the {offs.shape[0]} groups"
        fix = "pass capacity * torch.arange(groups, dtype=torch.int32, device=offs.device)"
        refuse(f"starts is {in_words(starts)} on {starts.device}", rule, fix, error=ShapeError)


def _check_k_grouped(a: BlockScaled, b: BlockScaled, offs: Tensor) -> tuple[int, ...]:
    check_operands(a, b, ranks=(2, 2))
    check_contraction(a, b)
    check_offs(offs, a.device, 2, required=True)
    for name, q in (("a", a), ("b", b)):
        if not q.group_align:
            rule = f"each of the {offs.shape[0]} groups of a k-grouped operand starts a block of its own"
            fix = f"cast it with blockscale.quantize(x, {q.format!r}, axis=-2, offs=offs) and pass .mT"
            refuse(f"{name} is {q}", rule, fix)
    for name, q in (("a", a), ("b", b)):
        check_group_count(q, offs, name)
    return (offs.shape[0], a.rows, b.rows)
