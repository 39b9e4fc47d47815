"""Operators of token routing: sort by expert (torch), permute, combine. No atomics, no host syncs.

Sums are in fp32 (fp64 for fp64), slot by slot: the weighted row is rounded, then added. Results are rounded once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..casts.sharding import replicated
from ..errors import ShapeError, message
from ..formats.layout import cuts_evenly
from ..hardware import capability, current_cuda_device
from ..library import Sharding, define_op, empty
from ..registry import Request, select


def _fake_sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    made = experts.new_empty((experts.numel(),), dtype=torch.int32)
    return experts.new_empty((count,), dtype=torch.int32), made, torch.empty_like(experts, dtype=torch.int32)


@define_op(fake=_fake_sort_by_expert, sharding=replicated)
def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """End offsets of the experts [count], token of each sorted row [T * k], sorted row of each slot [T, k]."""
    _check_range(experts, count)
    slots = experts.shape[1]
    # a radix sort takes a pass for each byte of its keys
    keys, order = torch.sort(experts.reshape(-1).to(torch.int16), stable=True)
    known = torch.arange(count, dtype=torch.int16, device=experts.device)
    offs = torch.searchsorted(keys, known, right=True, out_int32=True)
    position = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    rows = torch.empty_like(position).scatter_(0, order, position)
    return offs, (order // slots).to(torch.int32), rows.view(experts.shape)


def _check_range(experts: Tensor, count: int) -> None:
    """Raise if an expert is out of range. Only on the CPU: on a GPU it would sync with the host."""
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


# permute and combine


def rows_request(op: str, x: Tensor, rows: Tensor | None, *others: Tensor) -> Request:
    """Registry request of a row permutation: shape and dtype of its input.  rows: [T, k]."""
    flags = {
        "strided": any(each.stride(1) != 1 for each in (x, *others)),
        "many_slots": rows is not None and rows.shape[1] > 16,
    }
    options = frozenset(name for name, on in flags.items() if on)
    return Request(op, capability(x.device), (), (x.shape[0], x.shape[1]), x.dtype, (), options)


def _columns(parts: int, x: Tensor, *rest: object, **named: object) -> Iterator[Sharding]:
    """Shardings along the columns: rows are moved as a whole."""
    if cuts_evenly(x.shape[1], parts):
        yield Sharding({"x": 1}, (1,))


def _fake_permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    return empty((tokens.shape[0], x.shape[1]), x.dtype, x.device)


@define_op(fake=_fake_permute_rows, sharding=_columns)
def permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    """Row x[tokens[i]] for each sorted row i, times its gate weight if there are gate_weights [T, k]."""
    out = _fake_permute_rows(x, tokens, rows, gate_weights)
    kernel = select(rows_request("permute_rows", x, rows))
    with current_cuda_device(x.device):
        kernel.launch(x, tokens.contiguous(), rows.contiguous(), gate_weights, out)
    return out


def _fake_combine_rows(x: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    return empty((rows.shape[0], x.shape[1]), x.dtype, x.device)


@define_op(fake=_fake_combine_rows, sharding=_columns)
def combine_rows(x: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    """Sum over j of x[rows[:, j]], times gate_weights[:, j] if there are gate_weights, slot after slot."""
    out = _fake_combine_rows(x, rows, gate_weights)
    kernel = select(rows_request("combine_rows", x, rows))
    with current_cuda_device(x.device):
        kernel.launch(x, rows.contiguous(), gate_weights, out)
    return out


def _fake_combine_dots(x: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    return empty(rows.shape, torch.promote_types(grad.dtype, torch.float32), x.device)


@define_op(fake=_fake_combine_dots, sharding=replicated)
def combine_dots(x: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    """Gradient of the gate_weights of `combine_rows`: x[rows[t, j]] . grad[t], [T, k]."""
    out = _fake_combine_dots(x, grad, rows)
    kernel = select(rows_request("combine_dots", x, rows, grad))
    with current_cuda_device(x.device):
        kernel.launch(x, grad, rows.contiguous(), out)
    return out


def clear_rows(x: Tensor, offs: Tensor) -> None:
    """Zero the rows of no group in place: those from offs[-1] on, which stays on the device."""
    kernel = select(rows_request("clear_rows", x, None))
    with current_cuda_device(x.device):
        kernel.launch(x, offs)
