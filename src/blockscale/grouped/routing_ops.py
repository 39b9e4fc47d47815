"""The operators of routing, by torch: a sort, and moves of rows that sum in a fixed order. No atomics, no host syncs.

Sums are in fp32 (fp64 for fp64), slot by slot: the weighted row is rounded, then added. Results are rounded once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import replay
from ..casts.sharding import whole
from ..errors import ShapeError, message
from ..formats.layout import cuts_evenly
from ..library import Cut, define_op

_BY_TORCH = "rows that are moved by torch"


def _fake_sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    made = experts.new_empty((experts.numel(),), dtype=torch.int32)
    return experts.new_empty((count,), dtype=torch.int32), made, torch.empty_like(experts, dtype=torch.int32)


@define_op(fake=_fake_sort_by_expert, sharding=whole)
def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ends of the experts [count], the token of each sorted row [T * k] and the sorted row of each slot [T, k]."""
    replay.refuse(_BY_TORCH)
    _check_range(experts, count)
    slots = experts.shape[1]
    # a radix sort takes a pass for each byte of its keys
    keys, order = torch.sort(experts.reshape(-1).to(torch.int16), stable=True)
    known = torch.arange(count, dtype=torch.int16, device=experts.device)
    offs = torch.searchsorted(keys, known, right=True, out_int32=True)
    place = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    rows = torch.empty_like(place).scatter_(0, order, place)
    return offs, (order // slots).to(torch.int32), rows.view(experts.shape)


def _check_range(experts: Tensor, count: int) -> None:
    """Only on the CPU: on a GPU looking would make the host wait."""
    if experts.device.type != "cpu" or experts.numel() == 0:
        return
    low, high = int(experts.min()), int(experts.max())
    if low < 0 or high > count:
        raise ShapeError(
            message(
                f"experts from {low} to {high} for {count} of them",
                rule=f"experts are counted from 0, and {count} means none",
                fix="pass scores.topk(k).indices",
            )
        )


def _columns(parts: int, x: Tensor, *rest: object, **named: object) -> Iterator[Cut]:
    """Rows are moved whole, so columns may be cut."""
    if cuts_evenly(x.shape[1], parts):
        yield Cut({"x": 1}, (1,))


def _fake_permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    return x.new_empty((tokens.shape[0], x.shape[1]))


@define_op(fake=_fake_permute_rows, sharding=_columns)
def permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """Row x[tokens[i]] for each sorted row i, times its weight of [T, k] where there are weights."""
    replay.refuse(_BY_TORCH)
    gathered = x.index_select(0, tokens)
    if weights is None:
        return gathered
    wide = _wide(x.dtype)
    factor = torch.empty(tokens.shape[0], dtype=wide, device=x.device)
    factor.scatter_(0, rows.reshape(-1).to(torch.int64), weights.reshape(-1).to(wide))
    return (gathered.to(wide) * factor[:, None]).to(x.dtype)


def _fake_combine_rows(x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    return x.new_empty((rows.shape[0], x.shape[1]))


@define_op(fake=_fake_combine_rows, sharding=_columns)
def combine_rows(x: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """The sum over j of x[rows[:, j]], times weights[:, j] where there are weights, slot after slot."""
    replay.refuse(_BY_TORCH)
    wide = _wide(x.dtype)
    total: Tensor | None = None
    for slot in range(rows.shape[1]):
        term = x.index_select(0, rows[:, slot]).to(wide)
        if weights is not None:
            term = term * weights[:, slot, None].to(wide)
        total = term if total is None else total + term
    assert total is not None, "a token has at least one slot"
    return total.to(x.dtype)


def _fake_combine_dots(x: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    return grad.new_empty(rows.shape, dtype=_wide(grad.dtype))


@define_op(fake=_fake_combine_dots, sharding=whole)
def combine_dots(x: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the weights of `combine_rows`: x[rows[t, j]] . grad[t], as [T, k]."""
    replay.refuse(_BY_TORCH)
    wide = _wide(grad.dtype)
    held = grad.to(wide)
    dots = [(x.index_select(0, rows[:, slot]).to(wide) * held).sum(-1) for slot in range(rows.shape[1])]
    return torch.stack(dots, dim=-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are in."""
    return torch.promote_types(dtype, torch.float32)
