"""`TitanRecipeModule`: base class of torchtitan's layers with a recipe.

They are built from a config on the meta device, sharded for tensor parallelism, and filled later. A shard holds whole
blocks, which is checked as soon as the number of shards is known. The tick of stochastic rounding is the optimizer's
own step count: a resumed run continues exactly, and checkpoints stay those of the plain model.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torchtitan.components.optimizer import OptimizersContainer

from ...autograd.dtensor import check_shards, shard_shape
from ...autograd.recipe import Recipe, get_recipe
from ...errors import refuse
from ...nn.recipe_module import RecipeModule

# not "step": torchtitan puts every model under FSDP2 and replays passes, so no cast outlives them
WEIGHT_CASTS = ("forward", "twice")
_STOCHASTIC: weakref.WeakSet[TitanRecipeModule] = weakref.WeakSet()
_HOOKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def training_recipe(recipe: str | Recipe, weight_cast: str | None = None) -> Recipe:
    """The recipe of a torchtitan run; raises if torchtitan cannot run it.  weight_cast: replaces the recipe's own."""
    chosen = get_recipe(recipe)
    if weight_cast is not None and weight_cast != chosen.weight_cast:
        chosen = chosen.replace(name=chosen.name, weight_cast=weight_cast)
    if chosen.until or chosen.since:
        refuse(
            f"until={dict(chosen.until)} and since={chosen.since} in torchtitan",
            "torchtitan does not pass the step to layers",
            "leave it out, or resume with another recipe at that step",
        )
    if chosen.weight_cast not in WEIGHT_CASTS:
        refuse(
            f"weight_cast={chosen.weight_cast!r} in torchtitan",
            "it puts every model under FSDP2, which gathers weights or their codes anew for each pass, and replays the "
            "passes as CUDA graphs, which would repeat or skip the cast of the step that was recorded",
            "use 'forward' (fastest) or 'twice' (no operand is saved for backward)",
        )
    return chosen


class TitanRecipeModule(RecipeModule):
    """A layer of torchtitan with a recipe; comes before torchtitan's class among the bases."""

    def init_recipe(self, recipe: str | Recipe, name: str) -> None:
        """Apply the recipe of the config."""
        self.apply_recipe(training_recipe(recipe), name=name)
        if self.recipe.stochastic:
            _STOCHASTIC.add(self)
            _register_step_hook()

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters as torchtitan does, and check that shards hold whole blocks."""
        whole = {name: tuple(each.shape) for name, each in self.named_parameters(recurse=False)}
        # hidden from torchtitan, which needs a placement for every buffer; it is the same on all ranks
        rng, self.rng = self.rng, None
        super().parallelize(parallel_dims)  # pyright: ignore[reportAttributeAccessIssue]
        self.rng = rng
        for name, shape in whole.items():
            parameter = self.get_parameter(name)
            shard = shard_shape(parameter) if isinstance(parameter, DTensor) else tuple(parameter.shape)
            check_shards(f"{self.name}.{name}" if self.name else name, shape, shard, self.recipe)


@functools.cache
def _register_step_hook() -> None:
    """Register the step hook of all optimizers, once."""
    register_optimizer_step_post_hook(_advance)


def _advance(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Step hook: set the ticks, also after a checkpoint is loaded (its first step may only allocate state)."""
    if isinstance(optimizer, OptimizersContainer):  # its inner optimizers step
        return
    if optimizer not in _HOOKED:
        _HOOKED.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_set_ticks)
    _set_ticks(optimizer)


def _set_ticks(optimizer: Optimizer) -> None:
    """Set the ticks of the layers that this optimizer steps to its count of steps."""
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for layer in list(_STOCHASTIC):
        weight = next((each for each in layer.parameters(recurse=False) if id(each) in stepped), None)
        if weight is None or layer.rng is None:
            continue
        count = optimizer.state[weight].get("step")
        with torch.no_grad():
            if count is None:
                layer.rng[1].add_(1)
            else:
                layer.rng[1].copy_(torch.as_tensor(count), non_blocking=True)
