"""`all_gather_mm` and `mm_reduce_scatter`: products of operands that ranks share, without autograd.

Layers with gradients are `column_parallel`, `row_parallel` and `swiglu_parallel`, which run the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...autograd.linear import check_linear
from ...autograd.linear_plan import fprop
from ...errors import ShapeError, ShardingError, refuse
from ...formats.tensor import BlockScaled
from ...gemm.ops import check_bias, check_dense, check_output, multiply
from ..agreement import check_same_call
from ..collectives import Tokens, ranks_of
from .choice import Overlap, link_for
from .decision import Work, payload_of_formats
from .link import Link
from .products import Times
from .sharing import Sharing

Matrix = Tensor | BlockScaled


@torch.no_grad()
def all_gather_mm(
    a: Matrix,
    *weights: Matrix,
    group: dist.ProcessGroup | DeviceMesh,
    biases: Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    overlap: Overlap = "auto",
) -> tuple[list[Tensor], Matrix]:
    """Products [M, N] of the rows of all ranks with each weight [N, K], and the gathered rows [M, K].

    a: this rank's rows [M/ranks, K], as many on every rank: an operand with plain scales, whose codes travel, or a
    tensor, whose values travel and which is multiplied as it is.  weights: this rank's, of the same kind; one gather
    serves all, such as q, k and v.  biases: [N] of each weight or None.  overlap: see `column_parallel`.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> (q, k), rows = all_gather_mm(torch.ones(2, 4), torch.ones(3, 4), torch.ones(5, 4), group=dist.group.WORLD)
    >>> q.shape, k.shape, rows.shape
    (torch.Size([2, 3]), torch.Size([2, 5]), torch.Size([2, 4]))
    >>> dist.destroy_process_group()
    """
    ranks, biases = ranks_of(group), biases or [None] * len(weights)
    _check(a, weights, biases, out_dtype)
    (operand, values), tokens = _split(a), Tokens(1, a.shape[0])
    check_same_call(ranks, a.device, "all_gather_mm", *map(_facts, (a, *weights)), out_dtype, overlap)

    def works() -> tuple[Work, ...]:
        columns = sum(weight.shape[0] for weight in weights) * ranks.size
        return (Work("all_gather_mm", a.shape[0] * ranks.size, columns, a.shape[1], payload_between(a, weights[0])),)

    sharing = Sharing(ranks, tokens, False, link_for(overlap, values, ranks, works))
    pending = sharing.gather(operand, values, values.dtype)
    products = [_times(w, bias, out_dtype) for w, bias in zip(weights, biases, strict=True)]
    results, operand, values = pending.multiply(products, "plain", out_dtype)
    gathered = values if operand is None else operand
    assert gathered is not None
    return results, gathered


@torch.no_grad()
def mm_reduce_scatter(
    a: Matrix,
    weight: Matrix,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    out_dtype: torch.dtype = torch.bfloat16,
    overlap: Overlap = "auto",
) -> Tensor:
    """Rows [M/ranks, N] of this rank of the sum over ranks of a [M, K] @ weight [N, K].mT.

    a, weight: this rank's features, both operands or both tensors; M is a multiple of the number of ranks.  out_dtype:
    of the parts, which travel in it, and of the sum.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mm_reduce_scatter(torch.ones(2, 4), torch.ones(1, 4), group=dist.group.WORLD)
    tensor([[4.],
            [4.]], dtype=torch.bfloat16)
    >>> dist.destroy_process_group()
    """
    ranks, rows = ranks_of(group), a.shape[0]
    _check(a, (weight,), (None,), out_dtype)
    if rows % ranks.size:
        refuse(
            f"{rows} rows for {ranks.size} ranks",
            rule="all ranks have as many rows of a sum",
            fix=f"pad the rows to a multiple of {ranks.size}",
            error=ShapeError,
        )
    check_same_call(ranks, a.device, "mm_reduce_scatter", _facts(a), _facts(weight), out_dtype, overlap)
    tokens = Tokens(1, rows // ranks.size)
    operand, values = _split(a)

    def works() -> tuple[Work, ...]:
        features = a.shape[1] * ranks.size
        return (Work("mm_reduce_scatter", rows, weight.shape[0], features, payload_between(a, weight)),)

    sharing = Sharing(ranks, tokens, False, link_for(overlap, values, ranks, works))
    return sharing.product_sum(_times(weight, None, out_dtype), operand, values, out_dtype).wait()


def check(group: dist.ProcessGroup | DeviceMesh) -> None:
    """Wait for this rank's GPUs, and raise if a wait of an overlapped call of the group has failed there.

    The next overlapped call raises it, too. Sums after a failed wait are NaN, and rows are not those of the ranks: call
    this before weights are saved.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> check(dist.group.WORLD)
    >>> dist.destroy_process_group()
    """
    for device, link in Link.all_of(ranks_of(group)).items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        link.check()


def _times(weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Times:
    """The product of rows with a weight [N, K]."""

    def product(operand: BlockScaled | None, values: Tensor | None, out: Tensor | None) -> Tensor:
        if operand is not None:
            assert isinstance(weight, BlockScaled)
            return multiply(operand, weight, dtype, bias, out=out)
        assert values is not None
        assert isinstance(weight, Tensor)
        return fprop(values, weight, bias, None, None, dtype, out=out)

    return Times(product, weight.shape[0])


def _split(a: Matrix) -> tuple[BlockScaled | None, Tensor]:
    """The operand that travels, if it is one, and a tensor of its device with its rows."""
    return (a, a.data) if isinstance(a, BlockScaled) else (None, a)


def payload_between(*operands: Matrix) -> str | None:
    """The model's name for a row operand and a weight."""
    return payload_of_formats(*(each.format if isinstance(each, BlockScaled) else None for each in operands))


def _facts(a: Matrix) -> tuple[object, ...]:
    """What collectives and products of a matrix depend on."""
    kind = (a.format, a.scale_layout) if isinstance(a, BlockScaled) else (a.dtype,)
    return *a.shape, *kind


def _check(a: Matrix, weights: Sequence[Matrix], biases: Sequence[Tensor | None], dtype: torch.dtype) -> None:
    """Raise unless the products exist and rows of a can travel."""
    check_output(dtype)
    if len(a.shape) != 2:
        refuse(f"a {tuple(a.shape)}", "a has rows [M, K]", "view it as a matrix", error=ShapeError)
    if not weights:
        refuse("no weight", "rows are gathered for a product", "pass weights [N, K]")
    if len(biases) != len(weights):
        refuse(f"{len(biases)} biases for {len(weights)} weights", "every weight has a bias or None", "pass None")
    if not isinstance(a, BlockScaled):
        for weight in weights:
            if isinstance(weight, BlockScaled):
                refuse(f"a tensor {tuple(a.shape)} times {weight}", "both are operands or both tensors", "cast a")
            check_linear(a, weight)
        return
    check_travels(a)
    for weight, bias in zip(weights, biases, strict=True):
        if not isinstance(weight, BlockScaled):
            refuse(f"{a} times a tensor {tuple(weight.shape)}", "both are operands or both tensors", "cast the weight")
        check_dense(a, weight)
        check_bias(bias, (weight.rows,), a.device)


def check_travels(a: BlockScaled) -> None:
    """Raise unless rows of an operand can travel."""
    if a.scale_layout != "plain" or a.global_scale is not None or a.axis != -1 or a.spec.is_2d:
        refuse(
            f"a is {a}",
            rule="rows travel with their own scales: plain ones, along the last axis, without a tensor scale",
            fix='cast rows with a 1-D format such as fp8_1x128 or mxfp8_e4m3 and scale_layout="plain"',
            error=ShardingError,
        )
