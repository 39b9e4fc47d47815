"""Token routing of MoE layers: indices of the permutation by expert and of its inverse, without gradients.

Tokens [T, D] become T * k rows, one for each expert that a token was sent to, sorted by expert. The sort is stable, so
an expert's rows are in the order of their tokens, and results are bitwise reproducible. No atomics, no
host sync, and no shape depends on a value. There is no capacity factor: no token is dropped and none is padded. Sums
are in fp32 (fp64 for fp64), slot by slot: the weighted row is rounded, then added. Results are rounded once. The
differentiable functions are in `autograd/routing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import DtypeError, ShapeError, refuse
from ..formats.checks import check_int, check_tensor
from ..formats.layout import cuts_evenly
from ..hardware import capability, current_cuda_device
from ..library import Sharding, define_op, empty
from ..registry import Request, select

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Routing:
    """Groups of rows by expert, and the permutation of tokens that sorts them.

    offs: int32 [E], inclusive end offsets of the experts among the sorted rows.  tokens: int32 [T * k], token of each
    sorted row.  rows: int32 [T, k], the sorted row of each slot of each token, the inverse of `tokens`. Both are None
    for rows that are sorted already.

    >>> routing = sort_by_expert(torch.tensor([[2], [0], [2]]), 3)
    >>> routing.load().tolist()
    [1, 0, 2]
    """

    offs: Tensor
    tokens: Tensor | None = None
    rows: Tensor | None = None

    @property
    def experts(self) -> int:
        return self.offs.shape[0]

    @property
    def permutation(self) -> tuple[Tensor, Tensor]:
        """tokens and rows of a routing that has them."""
        assert self.tokens is not None
        assert self.rows is not None
        return self.tokens, self.rows

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.offs, self.tokens, self.rows

    def permuted(self, x: Tensor) -> Tensor:
        """The rows of tokens [T, K] sorted by expert [M, K]; rows that are sorted already as they are."""
        return x if self.tokens is None else permute_rows(x, *self.permutation, None)

    def load(self) -> Tensor:
        """Rows of each expert, int32 [E]."""
        return torch.diff(self.offs, prepend=self.offs.new_zeros(1))


def as_routing(routing: Routing | Tensor) -> Routing:
    """A routing, also from the ends `offs` of rows that are sorted already."""
    return routing if isinstance(routing, Routing) else Routing(routing)


def _flatten(routing: Routing) -> tuple[list[Tensor], None]:
    return [routing.offs] if routing.tokens is None else [routing.offs, *routing.permutation], None


pytree.register_pytree_node(
    Routing,
    _flatten,  # pyright: ignore[reportArgumentType]
    lambda leaves, _: Routing(*leaves),
    serialized_type_name="blockscale.Routing",
)


def sort_by_expert(experts: Tensor, count: int) -> Routing:
    """Routing of tokens to their chosen experts.  experts: int32 or int64 [T, k], from 0 to `count`.

    The value `count` means no expert: such rows come after all groups, and grouped GEMMs give zeros for them.

    >>> routing = sort_by_expert(torch.tensor([[2, 0], [2, 1], [0, 2]]), 4)
    >>> routing.offs.tolist(), routing.tokens.tolist()
    ([2, 3, 6, 6], [0, 2, 1, 0, 1, 2])
    >>> routing.rows.tolist()
    [[3, 0], [4, 2], [1, 5]]
    """
    _check_experts(experts, count)
    return _sort(experts, count)


def _check_experts(experts: Tensor, count: int) -> None:
    if not isinstance(experts, Tensor) or experts.dtype not in (torch.int32, torch.int64):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = experts.dtype if isinstance(experts, Tensor) else type(experts).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "the experts of a token are numbers in an int32 or int64 tensor"
        refuse(f"experts is {what}", rule, fix="pass scores.topk(k).indices", error=DtypeError)
    check_tensor(experts, "experts", "routings")
    if experts.dim() != 2 or experts.shape[1] == 0:
        rule, fix = "it is [T, k]: k experts for each of T tokens, k of 1 or more", "pass experts.view(-1, k)"
        refuse(f"experts has shape {tuple(experts.shape)}", rule, fix, error=ShapeError)
    rule = "count is the size of the router's output: at least one expert, and no more than 32767"
    check_int(count, "count", rule, least=1, most=(1 << 15) - 1)


def _allocate_sorted(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    made = experts.new_empty((experts.numel(),), dtype=torch.int32)
    return experts.new_empty((count,), dtype=torch.int32), made, torch.empty_like(experts, dtype=torch.int32)


@define_op("sort_by_expert", fake=_allocate_sorted, wrap=lambda made, *args: Routing(*made))
def _sort(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
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
        rule, fix = f"experts are counted from 0, and {count} means none", "pass scores.topk(k).indices"
        refuse(f"experts from {low} to {high} for {count} of them", rule, fix, error=ShapeError)


# ---- permute and combine ---------------------------------------------------------------------------------------------


def rows_request(op: str, x: Tensor, rows: Tensor | None, *others: Tensor) -> Request:
    """Registry request of a row permutation: shape and dtype of its input.  rows: [T, k]."""
    flags = {
        "strided": any(each.stride(1) != 1 for each in (x, *others)),
        "many_slots": rows is not None and rows.shape[1] > 16,
    }
    options = frozenset(name for name, on in flags.items() if on)
    return Request(op, capability(x.device), (), (x.shape[0], x.shape[1]), x.dtype, (), options)


def _columns(parts: int, x: Tensor, *rest: object) -> Iterator[Sharding]:
    """Shardings along the columns: rows are moved as a whole."""
    if cuts_evenly(x.shape[1], parts):
        yield Sharding({"x": 1}, (1,))


def _allocate_permuted(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    return empty((tokens.shape[0], x.shape[1]), x.dtype, x.device)


@define_op(fake=_allocate_permuted, sharding=_columns)
def permute_rows(x: Tensor, tokens: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    """Row x[tokens[i]] for each sorted row i, times its gate weight if there are gate_weights [T, k]."""
    out = _allocate_permuted(x, tokens, rows, gate_weights)
    kernel = select(rows_request("permute_rows", x, rows))
    with current_cuda_device(x.device):
        kernel.launch(x, tokens.contiguous(), rows.contiguous(), gate_weights, out)
    return out


def _allocate_combined(x: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    return empty((rows.shape[0], x.shape[1]), x.dtype, x.device)


@define_op(fake=_allocate_combined, sharding=_columns)
def combine_rows(x: Tensor, rows: Tensor, gate_weights: Tensor | None) -> Tensor:
    """Sum over j of x[rows[:, j]], times gate_weights[:, j] if there are gate_weights, slot after slot."""
    out = _allocate_combined(x, rows, gate_weights)
    kernel = select(rows_request("combine_rows", x, rows))
    with current_cuda_device(x.device):
        kernel.launch(x, rows.contiguous(), gate_weights, out)
    return out


def _allocate_dots(x: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return empty(rows.shape, dtype, x.device)


@define_op(fake=_allocate_dots)
def combine_dots(x: Tensor, grad: Tensor, rows: Tensor) -> Tensor:
    """Gradient of the gate_weights of `combine_rows`: x[rows[t, j]] . grad[t], [T, k]."""
    out = _allocate_dots(x, grad, rows)
    kernel = select(rows_request("combine_dots", x, rows, grad))
    with current_cuda_device(x.device):
        kernel.launch(x, grad, rows.contiguous(), out)
    return out


def place_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write rows of tokens to out [M, n] in place: out[rows[t, j]] = x[t, j].  x: [T, n] if all slots of a token have
    the same row, else [T, k, n].  rows: int32 [T, k], all different."""
    word = _widest_word(x, out)
    x, out = x.view(word), out.view(word)
    kernel = select(rows_request("place_rows", x if x.dim() == 2 else x[:, 0], rows))
    with current_cuda_device(x.device):
        kernel.launch(x, rows.contiguous(), out)


def _widest_word(*tensors: Tensor) -> torch.dtype:
    """Integers that rows of these tensors of one dtype consist of; wider ones take fewer accesses."""
    size = tensors[0].element_size()
    if any(each.stride(-1) != 1 for each in tensors):
        return _WORDS[size]
    steps = (step for each in tensors for step in (each.shape[-1], each.storage_offset(), *each.stride()[:-1]))
    whole = math.gcd(8, *(step * size for step in steps))
    return _WORDS[max(whole, size)]


def clear_rows(x: Tensor, offs: Tensor) -> None:
    """Zero the rows of no group in place: those from offs[-1] on, which stays on the device."""
    kernel = select(rows_request("clear_rows", x, None))
    with current_cuda_device(x.device):
        kernel.launch(x, offs)
