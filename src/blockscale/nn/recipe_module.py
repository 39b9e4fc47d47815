"""`RecipeModule`: what layers that train by a recipe have in common, whatever they multiply.

Its recipe and the one of the present step, the name and the state that stochastic rounding draws by, and casts of its
weights that a step's microbatches share. None of it is part of a `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..autograd.dtensor import DTensor, local, refuse_experts
from ..autograd.operands import Pair
from ..autograd.recipe import Recipe, get_recipe
from ..autograd.weights import SharedWeight
from ..errors import OptionError, message
from ..formats.checks import check_text, in_words, is_dense
from ..formats.stochastic import Stochastic, module_name, rng_state

DEFAULT_SEED = 0


class RecipeModule(torch.nn.Module):
    """A layer with a weight that follows a recipe."""

    # the attributes that `apply_recipe` sets beside the buffer rng
    FOLLOWED: ClassVar[tuple[str, ...]] = ("recipe", "recipe_now", "name", "seed", "shared_weight")
    # what a plain module had under the names that `apply_recipe` takes; None for a layer that was made as one of ours
    was_plain: dict[str, Any] | None = None
    recipe: Recipe
    recipe_now: Recipe
    name: str
    seed: int
    shared_weight: SharedWeight | None
    rng: Tensor | None

    def apply_recipe(
        self, recipe: str | Recipe, *, name: str = "", rng: Tensor | None = None, seed: int = DEFAULT_SEED
    ) -> None:
        """Train by this recipe from now on. Casts that were shared are dropped.

        seed: what rng is made from where none is given, and again when the layer leaves the meta device.
        """
        check_text(name, "name", "layers.0.mlp.down_proj")
        check_rng(rng)
        chosen, plain = get_recipe(recipe), module_name(name)
        if chosen.stochastic and not plain:
            raise OptionError(
                message(
                    f"recipe {chosen.name!r} for a layer without a name",
                    rule="it rounds stochastically, and layers draw by their names",
                    fix="pass name='layers.0.mlp.down_proj', or convert a model with quantize_, which names its layers",
                )
            )
        self.recipe, self.recipe_now = chosen, chosen.at(0)
        self.name, self.seed = plain, seed
        self._share(chosen.weight_cast == "step" and chosen.is_quantized)
        if chosen.stochastic and rng is None:
            rng = rng_state(seed, device=next(self.parameters()).device)
        self.register_buffer("rng", rng if chosen.stochastic else None, persistent=False)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Take a parameter. torch's parallel styles register DTensors, so that what cannot be computed raises there."""
        if isinstance(param, DTensor) and not isinstance(self._parameters.get(name), DTensor):
            recipe = getattr(self, "recipe", None)
            if isinstance(recipe, Recipe) and recipe.is_quantized:
                self.check_sharding(f"{self.name or type(self).__name__}.{name}", param, recipe)
                self._share(self.shared_weight is not None)  # casts of the unsharded weight are dropped
        super().register_parameter(name, param)

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Raise for a parameter that is sharded as this kind of layer cannot compute it by that recipe."""
        refuse_experts(where, parameter)

    def _share(self, shares: bool) -> None:
        self.shared_weight = SharedWeight() if shares else None

    def _shared(self) -> Iterator[SharedWeight]:
        if self.shared_weight is not None:
            yield self.shared_weight

    def given(self) -> tuple[Stochastic | None, Pair | None]:
        """What a call made now takes besides parameters: what it draws from, and shared casts of the weight."""
        recipe, shared = self.recipe_now, self.shared_weight
        rounding = Stochastic(local(self.rng), self.name) if recipe.stochastic and self.rng is not None else None
        return rounding, None if shared is None else shared.operands(self.weight, recipe)  # pyright: ignore[reportArgumentType]

    @classmethod
    def adopt(cls, module: torch.nn.Module) -> None:
        """Make a plain module one of ours, in place; it has to `apply_recipe` a recipe then."""
        kept = {name: vars(module)[name] for name in cls.FOLLOWED if name in vars(module)}
        module.__class__ = cls
        assert isinstance(module, cls)
        module.was_plain = kept

    def release(self, plain: type[torch.nn.Module]) -> None:
        """Make a converted module its plain class again, with nothing of ours left."""
        assert self.was_plain is not None
        kept = self.was_plain
        for name in ("was_plain", *self.FOLLOWED):
            vars(self).pop(name, None)
        del self.rng
        vars(self).update(kept)
        self.__class__ = plain  # pyright: ignore[reportAttributeAccessIssue]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.rng
        result = super()._apply(fn, recurse)
        if before is not None and before.is_meta and self.rng is not None and not self.rng.is_meta:
            local(self.rng).copy_(rng_state(self.seed))  # what came off the meta device has no values
        for shared in self._shared():
            shared.invalidate()
        return result

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        super()._load_from_state_dict(*args, **named)
        for shared in self._shared():
            shared.invalidate()


def check_rng(rng: object) -> None:
    """Raise unless it is a state of stochastic rounding, or None."""
    if rng is None or (is_dense(rng) and rng.dtype == torch.int64 and rng.shape == (2,)):  # pyright: ignore[reportAttributeAccessIssue]
        return
    raise OptionError(
        message(
            f"rng is {in_words(rng)}",
            rule="seed and tick are one int64 tensor of shape [2]",
            fix="make it with blockscale.rng_state(seed, tick, device), or leave it out",
        )
    )
