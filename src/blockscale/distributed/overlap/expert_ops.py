"""`all_gather_grouped_mm` and `grouped_mm_reduce_scatter`: layers 0 and 1 of a mixture, without autograd.

Layers with gradients are `grouped_swiglu_parallel`, `ExpertTensorParallel` and `expert_parallel_`, which run the same
steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...autograd.grouped import check_combined
from ...autograd.linear import check_unquantized
from ...autograd.linear_plan import fprop
from ...errors import ShapeError, ShardingError, refuse
from ...formats.cast_spec import CastPlan
from ...formats.checks import in_words
from ...formats.tensor import BlockScaled
from ...gemm.ops import check_bias, check_output
from ...grouped import Routing, check_grouped
from ...grouped.ops import wanted_layouts
from ...grouped.routing import clear_rows, combine_rows
from ...library import empty
from ..agreement import check_same_call
from ..collectives import Tokens, ranks_of
from ..wire import pack_rows
from .choice import Overlap, link_for
from .decision import Work, expert_work
from .expert_rows import ExpertRows, PlacedRows, RowsOfTokens, ValuesProduct, multiply_rows
from .expert_sharing import ExpertSharing, PendingTokens, experts_of
from .ops import Matrix, check_travels, payload_between
from .sharing import PendingSum


class GatheredRows(NamedTuple):
    """Rows of this rank's experts for the tokens of all ranks.

    rows: [M, K] sorted by expert, an operand or values.  routing: of all tokens [T] to this rank's experts; slots of
    other ranks' experts go to none.  gate_weights: [T, k].  experts: of all ranks.
    """

    rows: Matrix
    routing: Routing
    gate_weights: Tensor
    experts: int


@torch.no_grad()
def all_gather_grouped_mm(
    a: Matrix,
    *weights: Matrix,
    routing: Routing,
    gate_weights: Tensor,
    group: dist.ProcessGroup | DeviceMesh,
    experts: range | None = None,
    biases: Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    overlap: Overlap = "auto",
) -> tuple[list[Tensor], GatheredRows]:
    """Products [M, N] of the tokens of all ranks with each weight [E, N, K] of this rank's experts, sorted by expert.

    a: this rank's tokens [t, K], as many on every rank: an operand with plain scales, whose codes travel, or a tensor.
    weights: of the same kind; one gather serves all.  routing, gate_weights: of this rank's tokens to the experts of
    all ranks, as `route` returns them.  experts: of this rank, by default all of them, of which it has hidden units.
    biases: [E, N] of each weight or None. M is T * k for the T tokens of all ranks; rows of other ranks' experts come
    last, and are zero.

    >>> import blockscale as bs, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> routing, gates = bs.route(torch.tensor([[0.1, 0.7, 0.2], [0.6, 0.3, 0.1]]), 2)
    >>> options = {"routing": routing, "gate_weights": gates, "group": dist.group.WORLD}
    >>> (h,), found = all_gather_grouped_mm(torch.ones(2, 8), torch.ones(3, 16, 8), **options)
    >>> h.shape, grouped_mm_reduce_scatter(h, torch.ones(3, 8, 16).bfloat16(), found, group=dist.group.WORLD).shape
    (torch.Size([4, 16]), torch.Size([2, 8]))
    >>> dist.destroy_process_group()
    """
    ranks, biases = ranks_of(group), biases or [None] * len(weights)
    check_output(out_dtype)
    if len(a.shape) != 2 or routing.rows is None or routing.rows.shape[0] != a.shape[0]:
        refuse(
            f"a {tuple(a.shape)} for a routing of {0 if routing.rows is None else routing.rows.shape[0]} tokens",
            rule="a has a row for each token that was routed: [t, K]",
            fix="pass the tokens and the routing that route returned for them",
            error=ShapeError,
        )
    check_combined(gate_weights, routing)
    mine = range(routing.experts) if experts is None else experts
    if not isinstance(mine, range):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(f"experts={in_words(mine)}", "a rank has experts in order", f"pass a part of range({routing.experts})")
    if not mine or mine.step != 1 or mine.start < 0 or mine.stop > routing.experts:
        refuse(
            f"experts={mine} of {routing.experts}",
            rule="a rank has one expert or more, of those that tokens are routed to, in order",
            fix=f"pass a part of range({routing.experts})",
            error=ShardingError,
        )
    if not weights or len(biases) != len(weights):
        refuse(f"{len(biases)} biases for {len(weights)} weights", "tokens are gathered for weights", "pass both")
    for weight, bias in zip(weights, biases, strict=True):
        _check_weight(a, weight, bias, len(mine), a.shape[1])
    cut = len(mine) == routing.experts
    facts = tuple(a.shape), routing.experts, gate_weights.shape[1], gate_weights.dtype, _kind(a), overlap, cut
    check_same_call(ranks, a.device, "all_gather_grouped_mm", *facts)
    if isinstance(a, BlockScaled):
        check_travels(a)
    values = a.data if isinstance(a, BlockScaled) else a

    def works() -> tuple[Work, ...]:
        weight = len(mine), sum(weight.shape[1] for weight in weights), a.shape[1]
        tokens, payload = a.shape[0] * ranks.size, payload_between(a, weights[0])
        return (expert_work("all_gather_grouped_mm", weight, tokens, gate_weights.shape[1], ranks.size, payload),)

    link = link_for(overlap, values, ranks, works if cut else tuple)
    sharing = ExpertSharing(ranks, Tokens(1, a.shape[0]), mine, link)
    slots = sharing.route(experts_of(routing), gate_weights)
    tokens = sharing.gather(messages_of(a))
    rows, gates = slots.wait()
    results, placed = multiply_arrivals(tokens, rows, a, weights, biases, out_dtype)
    return results, GatheredRows(placed, rows.routing, gates, routing.experts)


@torch.no_grad()
def grouped_mm_reduce_scatter(
    a: Matrix,
    weight: Matrix,
    gathered: GatheredRows,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    overlap: Overlap = "auto",
) -> Tensor:
    """Tokens [t, N] of this rank: the sum over ranks and experts of a [M, K] @ weight [E, N, K].mT, times gate weights.

    a: rows of this rank's experts or hidden units, sorted as `all_gather_grouped_mm` sorts them: an operand or a
    tensor, as weight is.  gathered: returned by it.  bias: [E, N], which one of the ranks adds that share an expert.
    out_dtype: of the parts, which travel in it, and of the sum.
    """
    ranks, (_, routing, gates, experts) = ranks_of(group), gathered
    check_output(out_dtype)
    tokens, slots = gates.shape
    if tokens % ranks.size or tuple(a.shape[:-1]) != (tokens * slots,):
        refuse(
            f"a {tuple(a.shape)} for {tokens} tokens of {ranks.size} ranks with {slots} experts each",
            rule="a has a row for each slot of each token",
            fix="pass rows made from what all_gather_grouped_mm returned",
            error=ShapeError,
        )
    _check_weight(a, weight, bias, routing.experts, a.shape[1])
    cut = routing.experts == experts
    facts = tuple(a.shape), weight.shape[1], _kind(a), out_dtype, overlap, cut
    check_same_call(ranks, a.device, "grouped_mm_reduce_scatter", *facts)
    of = Tokens(1, tokens // ranks.size)
    values = a.data if isinstance(a, BlockScaled) else a

    def works() -> tuple[Work, ...]:
        shape, payload = (experts, *weight.shape[1:]), payload_between(a, weight)
        return (expert_work("grouped_mm_reduce_scatter", shape, tokens, slots, ranks.size, payload),)

    link = link_for(overlap, values, ranks, works if cut else tuple)
    sharing = ExpertSharing(ranks, of, range(routing.experts), link)
    return sum_combined(sharing, ExpertRows.of(routing, of, ranks.size), gates, a, weight, bias, out_dtype).wait()


def messages_of(a: Matrix) -> Tensor:
    """Rows [t, n] that travel: messages of an operand's rows, or values."""
    return pack_rows(a) if isinstance(a, BlockScaled) else a


def multiply_arrivals(
    tokens: PendingTokens,
    rows: ExpertRows,
    a: Matrix,
    weights: Sequence[Matrix],
    biases: Sequence[Tensor | None],
    out_dtype: torch.dtype,
) -> tuple[list[Tensor], Matrix]:
    """Products [M, N] of all tokens' rows with each weight [E, N, K], made as tokens arrive, and the rows [M, K].

    a: this rank's tokens, whose messages are on their way.
    """
    plan, dtype = None, a.dtype if isinstance(a, Tensor) else a.data.dtype
    if isinstance(a, BlockScaled):
        assert isinstance(weights[0], BlockScaled)
        layout, _ = wanted_layouts(
            "m_grouped", a.format, weights[0].format, a.device
        )  # placed there, and not converted
        plan = CastPlan(a.format, a.spec.default_rule(), layout or "plain", a.hadamard)
    placed = PlacedRows(rows.routing.permutation[0].shape[0], a.shape[1], plan, dtype, a.device)
    results = [cleared_rows(rows, weight.shape[1], out_dtype, a.device) for weight in weights]
    products = [grouped_product(weight, bias, out_dtype) for weight, bias in zip(weights, biases, strict=True)]
    columns, width = sum(weight.shape[1] for weight in weights), a.shape[1] * dtype.itemsize
    for at in tokens.arrivals(rows, rows.part(columns, a.shape[1], width, plan is not None)):
        placed.place(at, tokens.values()[at.tokens])
        for product, bias, result in zip(products, biases, results, strict=True):
            multiply_rows(placed.operand(), product, at, result, bias)
    return results, placed.operand()


def sum_combined(
    sharing: ExpertSharing,
    rows: ExpertRows,
    gate_weights: Tensor,
    a: Matrix,
    weight: Matrix,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> PendingSum:
    """Start the sum over ranks of a [M, K] @ weight [E, N, K].mT, combined by token with gate weights [T, k]."""
    product = grouped_product(weight, bias, out_dtype)
    results = cleared_rows(rows, weight.shape[1], out_dtype, a.device)

    def part(at: RowsOfTokens) -> Tensor:
        multiply_rows(a, product, at, results, bias)
        return combine_rows(results, at.rows, gate_weights[at.tokens])

    columns, width = weight.shape[1], weight.shape[1] * out_dtype.itemsize
    return sharing.sum(rows, rows.part(columns, a.shape[1], width, isinstance(a, BlockScaled)), out_dtype, part)


def grouped_product(weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> BlockScaled | ValuesProduct:
    """A weight as `multiply_rows` takes it."""
    if isinstance(weight, BlockScaled):
        return weight
    return functools.partial(_values_product, weight, bias, dtype)


def _values_product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, a: Tensor, routing: Routing) -> Tensor:
    return fprop(a, weight, bias, None, None, dtype, routing)


def cleared_rows(rows: ExpertRows, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows [M, columns] for products; those of no expert, which no product writes, are zero."""
    made = empty((rows.routing.permutation[0].shape[0], columns), dtype, device)
    clear_rows(made, rows.routing.offs)
    return made


def _kind(a: Matrix) -> object:
    return (a.format, a.scale_layout) if isinstance(a, BlockScaled) else a.dtype


def _check_weight(a: Matrix, weight: Matrix, bias: Tensor | None, experts: int, features: int) -> None:
    """Raise unless rows times a weight [E, N, K], plus a bias [E, N], is a product."""
    if isinstance(a, BlockScaled) != isinstance(weight, BlockScaled):
        kinds = ["an operand" if isinstance(each, BlockScaled) else "a tensor" for each in (a, weight)]
        refuse(" times ".join(kinds), rule="both are operands or both tensors", fix="cast the other one")
    if len(weight.shape) != 3 or weight.shape[0] != experts or weight.shape[2] != features:
        refuse(
            f"weight {tuple(weight.shape)} for {experts} experts of {features} features",
            rule="it is [E, N, K]: a matrix for each expert of this rank",
            fix="pass this rank's experts",
            error=ShapeError,
        )
    if isinstance(a, BlockScaled) and isinstance(weight, BlockScaled):
        check_grouped(a, weight, torch.zeros(experts, dtype=torch.int32, device=a.device))
        check_bias(bias, tuple(weight.shape[:2]), a.device)
    elif isinstance(a, Tensor) and isinstance(weight, Tensor):
        check_unquantized(a, weight, bias)
