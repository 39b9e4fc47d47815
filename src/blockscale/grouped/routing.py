"""Token routing of MoE layers: indices of the permutation by expert and of its inverse, without gradients.

Tokens [T, D] become T * k rows, one for each expert that a token was sent to, sorted by expert. The sort is stable, so
an expert's rows are in the order of their tokens, and results are bitwise reproducible. No host sync, and no shape
depends on a value. There is no capacity factor: no token is dropped and none is padded. The differentiable functions
are in `autograd/routing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import DtypeError, ShapeError, message
from ..formats.checks import check_int, check_tensor
from . import routing_ops


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
        return x if self.tokens is None else routing_ops.permute_rows(x, *self.permutation, None)

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
    return Routing(*routing_ops.sort_by_expert(experts, count))


def _check_experts(experts: Tensor, count: int) -> None:
    if not isinstance(experts, Tensor) or experts.dtype not in (torch.int32, torch.int64):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = experts.dtype if isinstance(experts, Tensor) else type(experts).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "the experts of a token are numbers in an int32 or int64 tensor"
        raise DtypeError(message(f"experts is {what}", rule=rule, fix="pass scores.topk(k).indices"))
    check_tensor(experts, "experts", "routings")
    if experts.dim() != 2 or experts.shape[1] == 0:
        raise ShapeError(
            message(
                f"experts has shape {tuple(experts.shape)}",
                rule="it is [T, k]: k experts for each of T tokens, k of 1 or more",
                fix="pass experts.view(-1, k)",
            )
        )
    rule = "count is the size of the router's output: at least one expert, and no more than 32767"
    check_int(count, "count", rule, least=1, most=(1 << 15) - 1)
