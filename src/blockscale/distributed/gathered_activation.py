"""`gather_activation`: tokens of all ranks, cast and gathered once for several column-parallel layers (q, k and v).

The layers' gradients of all tokens add up on every rank, and one reduce-scatter sums them over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..autograd.activation import Activation
from ..autograd.dtensor import check_tensor_scales
from ..autograd.operands import Casts, NeedsGrad, Pair, matrix
from ..autograd.recipe import Recipe, get_recipe
from ..autograd.transforms import check_transforms
from ..casts.checks import check_source
from ..errors import ShardingError, check_name, refuse
from .agreement import check_same_call
from .collectives import Ranks, gather_operand, gather_values, ranks_of
from .parallel_plans import plain, requantized
from .token_exchange import ShardedTokens, gathered
from .tokens import WGRADS, Wgrad, check_columns, tokens_of, with_size


@dataclass(frozen=True, eq=False)
class GatheredActivation(Activation):
    """Tokens of all ranks and their operands, made by `gather_activation`.  ranks: whose tokens they are.  source: has
    their shape and takes their gradient; it is NaN and takes no memory where layers read operands alone."""

    ranks: Ranks | None = None

    def operands(self, recipe: Recipe) -> NoReturn:
        """Refuse layers that are not cut: each rank's gradient would be summed as if it were a part."""
        refuse(
            f"an activation of all ranks' tokens {tuple(self.shape)} for a layer that is not column-parallel",
            rule="its gradient is summed over ranks, which holds for layers whose outputs are cut",
            fix="pass the tensor itself",
            error=ShardingError,
        )

    def operands_for(self, recipe: Recipe, ranks: Ranks) -> Pair | None:
        """Operands for a column-parallel layer of these ranks; None if the layer has to cast the source."""
        if ranks != self.ranks:
            refuse(
                f"an activation of the tokens of {self.ranks} for a layer that is cut over {ranks}",
                rule="a layer multiplies the tokens of the ranks that share it",
                fix="gather the activation over the layer's group",
                error=ShardingError,
            )
        pair = super().operands(recipe)
        reads_operands = recipe.saves == "operand" and recipe.operand("wgrad_x") is not None
        if pair is not None and pair[1] is None and reads_operands and torch.is_grad_enabled():
            refuse(
                "an activation that was gathered without gradients, for a layer that needs them",
                rule="the column operand of x is gathered with its rows",
                fix="call gather_activation where gradients are enabled",
                error=ShardingError,
            )
        return pair


def gather_activation(
    x: Tensor,
    recipe: str | Recipe = "fp8_blockwise",
    *,
    group: dist.ProcessGroup | DeviceMesh,
    gather_dim: int = 0,
    wgrad: Wgrad = "owner",
) -> GatheredActivation:
    """Cast this rank's tokens x [.., K] and gather them once, for all column-parallel layers that take them.

    gather_dim, wgrad: as for `column_parallel`, which uses those of the activation. Columns of all tokens are gathered,
    or cast from rows, here and not in the backward: they are saved for it. Layers with an unquantized product of x, and
    recipes that save the source, gather x in its dtype.

    The gradients of the layers add up in the dtype of x before they are summed over ranks.
    """
    chosen, ranks = get_recipe(recipe), ranks_of(group)
    check_name(wgrad, WGRADS, "source of columns")
    tokens = tokens_of(x, "gather_dim", gather_dim, 1)
    check_source(x, "x")
    check_transforms(x)
    check_tensor_scales("a gathered activation", chosen)
    saves = torch.is_grad_enabled()
    check_columns(chosen, ("fprop_x", "wgrad_x"), tokens, wgrad, NeedsGrad(False, saves, False))
    facts = tuple(x.shape), x.dtype, chosen.name, gather_dim, wgrad, saves and x.requires_grad
    check_same_call(ranks, x.device, "gather_activation", *facts, saves)
    sharded, mine = ShardedTokens(ranks, tokens), matrix(x)
    shape = (*with_size(x, gather_dim, x.shape[gather_dim] * ranks.size), x.shape[-1])
    casts, roles = Casts(chosen), ("fprop_x", "wgrad_x")
    if chosen.saves == "source" or any(chosen.operand(role) is None for role in roles):
        values = gather_values(mine.detach(), tokens, ranks).wait()
        source = gathered(mine, values, sharded).view(shape)
        pair = casts.input(matrix(source.detach()), save=saves) if chosen.is_quantized else None
        return GatheredActivation(source, (chosen, pair), ranks=ranks)
    requantizes = wgrad == "requantized"
    row, col = plain(casts).input(mine.detach(), save=saves and not requantizes)
    assert row is not None
    rows = gather_operand(row.operand, tokens, ranks, along=False)
    columns = None if col is None else gather_operand(col.operand, tokens, ranks, along=True)
    cast, col_cast = (casts.quantized_spec(role, x) for role in roles)
    x_row, x_col = rows.wait(cast.plan.layout), None
    if columns is not None:
        x_col = columns.wait(col_cast.plan.layout)
    elif saves and requantizes:
        x_col = requantized(x_row, col_cast)
    source = gathered(mine, None, sharded).view(shape)
    return GatheredActivation(source, (chosen, (x_row, x_col)), ranks=ranks)
