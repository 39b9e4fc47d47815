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
from .collectives import Ranks, gather_values, ranks_of
from .overlap.choice import Overlap, link_for
from .overlap.products import PendingRows
from .overlap.sharing import Sharing
from .parallel_plans import plain
from .shared_tokens import SharedTokens
from .token_exchange import ShardedTokens, gathered
from .tokens import WGRADS, Wgrad, check_columns, tokens_of, with_size


@dataclass(frozen=True, eq=False)
class GatheredActivation(Activation):
    """Tokens of all ranks and their operands, made by `gather_activation`.  ranks: whose tokens they are.  source: has
    their shape and takes their gradient; it is NaN and takes no memory where no layer reads its values.  arriving:
    tokens that arrive beside a product; the pair is then None."""

    ranks: Ranks | None = None
    arriving: SharedTokens | None = None

    def operands(self, recipe: Recipe) -> NoReturn:
        """Refuse layers that are not cut: each rank's gradient would be summed as if it were a part."""
        refuse(
            f"an activation of all ranks' tokens {tuple(self.shape)} for a layer that is not column-parallel",
            rule="its gradient is summed over ranks, which holds for layers whose outputs are cut",
            fix="pass the tensor itself",
            error=ShardingError,
        )

    def operands_for(self, recipe: Recipe, ranks: Ranks) -> Pair | None:
        """Operands for a column-parallel layer of these ranks; None if the layer has to cast the source, or if tokens
        are arriving."""
        if ranks != self.ranks:
            refuse(
                f"an activation of the tokens of {self.ranks} for a layer that is cut over {ranks}",
                rule="a layer multiplies the tokens of the ranks that share it",
                fix="gather the activation over the layer's group",
                error=ShardingError,
            )
        pair = super().operands(recipe)
        lacks = self.arriving.lacks_columns if self.arriving is not None else pair is not None and pair[1] is None
        reads_operands = recipe.saves == "operand" and recipe.operand("wgrad_x") is not None
        if lacks and reads_operands and torch.is_grad_enabled():
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
    overlap: Overlap = "auto",
) -> GatheredActivation:
    """Cast this rank's tokens x [.., K] and gather them once, for all column-parallel layers that take them.

    gather_dim, wgrad: as for `column_parallel`, which uses those of the activation. Columns of all tokens are gathered,
    or cast from rows, here and not in the backward: they are saved for it. Layers with an unquantized product of x, and
    recipes that save the source, gather x in its dtype.
    overlap: tokens arrive beside the product of the first layer that takes them; see `column_parallel`. The recipe
    saves operands, or quantizes nothing.

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
    check_same_call(ranks, x.device, "gather_activation", *facts, saves, overlap)
    sharded, mine = ShardedTokens(ranks, tokens), matrix(x)
    shape = (*with_size(x, gather_dim, x.shape[gather_dim] * ranks.size), x.shape[-1])
    casts, roles, link = Casts(chosen), ("fprop_x", "wgrad_x"), link_for(overlap, x, ranks)
    sharing = Sharing(ranks, tokens, wgrad == "requantized" and chosen.is_quantized, link)
    if chosen.saves == "source" or any(chosen.operand(role) is None for role in roles):
        if link is not None:
            if chosen.is_quantized:
                refuse(
                    f'overlap="on" for an activation with recipe {chosen.name!r}, which needs values and operands of x',
                    rule="tokens arrive as one or the other",
                    fix='use a recipe that saves operands and quantizes fprop and wgrad, or overlap="off"',
                    error=ShardingError,
                )
            rows = PendingRows.start(None, mine.detach(), x.dtype, tokens.outer, link)
            source, (values,) = gathered(mine, None, sharded).view(shape), rows.gathering.whole
            arriving = SharedTokens(rows, None, None, requantizes=False, values=values)
            return GatheredActivation(source, (chosen, None), ranks=ranks, arriving=arriving)
        values = gather_values(mine.detach(), tokens, ranks).wait()
        source = gathered(mine, values, sharded).view(shape)
        pair = casts.input(matrix(source.detach()), save=saves) if chosen.is_quantized else None
        return GatheredActivation(source, (chosen, pair), ranks=ranks)
    requantizes = saves and sharing.requantizes
    row, col = plain(casts).input(mine.detach(), save=saves and not requantizes)
    pending = sharing.gather(row, mine, x.dtype)
    columns = None if col is None else sharing.gather(col, mine, x.dtype, along=True)
    row_cast, col_cast = (casts.quantized_spec(role, x) for role in roles)
    tokens_of_all = SharedTokens(pending, columns, (row_cast, col_cast), requantizes=requantizes)
    source = gathered(mine, None, sharded).view(shape)
    if link is not None:
        return GatheredActivation(source, (chosen, None), ranks=ranks, arriving=tokens_of_all)
    return GatheredActivation(source, (chosen, tokens_of_all.wait()), ranks=ranks)
