"""`RecipeModule`: base class of layers with a recipe.

It holds the recipe and that of the present step, the name and the state of stochastic rounding, and casts of weights
that are shared by the microbatches of a step. None of it is part of a `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from ..autograd.dtensor import DTensor, local, refuse_experts
from ..autograd.operands import Pair
from ..autograd.recipe import Recipe, get_recipe
from ..autograd.weights import SharedWeight
from ..errors import refuse
from ..formats.checks import check_text, in_words, is_dense
from ..formats.stochastic import Stochastic, module_name, rng_state

DEFAULT_SEED = 0


class RecipeModule(torch.nn.Module):
    """A layer with a recipe."""

    # parameters that products multiply
    WEIGHTS: ClassVar[tuple[str, ...]] = ("weight",)
    # attributes set by `apply_recipe`, besides the buffer rng
    RECIPE_ATTRIBUTES: ClassVar[tuple[str, ...]] = ("recipe", "recipe_now", "name", "seed", "shared_weight")
    # attributes of the plain module that `apply_recipe` overwrote; None for a layer that was not converted
    was_plain: dict[str, Any] | None = None
    plain_class: type[torch.nn.Module]
    recipe: Recipe
    recipe_now: Recipe
    name: str
    seed: int
    shared_weight: SharedWeight | None
    rng: Tensor | None

    def apply_recipe(
        self, recipe: str | Recipe, *, name: str = "", rng: Tensor | None = None, seed: int = DEFAULT_SEED
    ) -> None:
        """Set the recipe. Shared casts are dropped.

        seed: of the rng state, if none is passed, and again when the layer leaves the meta device.
        """
        check_text(name, "name", "layers.0.mlp.down_proj")
        check_rng(rng)
        chosen, plain = get_recipe(recipe), module_name(name)
        if chosen.stochastic and not plain:
            refuse(
                f"recipe {chosen.name!r} for a layer without a name",
                "it rounds stochastically, and the name of a layer selects its random stream",
                "pass name='layers.0.mlp.down_proj', or convert a model with quantize_, which names its layers",
            )
        self.recipe, self.recipe_now = chosen, chosen.at(0)
        self.name, self.seed = plain, seed
        self._share(chosen.weight_cast == "step" and chosen.is_quantized)
        if chosen.stochastic and rng is None:
            rng = rng_state(seed, device=next(self.parameters()).device)
        self.register_buffer("rng", rng if chosen.stochastic else None, persistent=False)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Register a parameter; raises for a DTensor, as torch's parallel styles pass, that the layer cannot take."""
        if isinstance(param, DTensor) and not isinstance(self._parameters.get(name), DTensor):
            recipe = getattr(self, "recipe", None)
            if isinstance(recipe, Recipe) and recipe.is_quantized:
                self.check_sharding(f"{self.name or type(self).__name__}.{name}", param, recipe)
                self._share(next(self._shared(), None) is not None)  # casts of the unsharded weight are dropped
        super().register_parameter(name, param)

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Raise if this kind of layer cannot compute with a parameter sharded like this."""
        refuse_experts(where, parameter)

    def _share(self, shares: bool) -> None:
        before: SharedWeight | None = getattr(self, "shared_weight", None)
        if shares and before is not None and before.takes_shards:
            before.invalidate()
        else:
            self.shared_weight = SharedWeight() if shares else None

    def _shared(self) -> Iterator[SharedWeight]:
        if self.shared_weight is not None:
            yield self.shared_weight

    def shared_cast(self, parameter: str) -> SharedWeight | None:
        """The cast of a weight that a step shares, if it does."""
        return self.shared_weight

    def share_through(self, parameter: str, shared: SharedWeight) -> None:
        """Share the casts of a weight in another way."""
        self.shared_weight = shared

    def reason_against_codes(self, parameter: str) -> str | None:
        """Why codes cannot take the place of a parameter's values; None if they can."""
        return None if parameter in self.WEIGHTS else f"parameters of {type(self).__name__} are not supported"

    def call_state(self) -> tuple[Stochastic | None, Pair | None]:
        """State of a call made now besides parameters: stochastic rounding, and shared casts of the weight."""
        shared = self.shared_weight
        return self.rounding(), None if shared is None else shared.operands(self.weight, self.recipe_now)  # pyright: ignore[reportArgumentType]

    def rounding(self, part: str = "") -> Stochastic | None:
        """Stochastic rounding of a call made now; None if the recipe has none.  part: one of several weights."""
        if not self.recipe_now.stochastic or self.rng is None:
            return None
        return Stochastic(local(self.rng), f"{self.name}.{part}" if part else self.name)

    @classmethod
    def convert(cls, module: torch.nn.Module) -> Self:
        """Change the class of a plain module, in place. Call `apply_recipe` on it next."""
        overwritten = {name: vars(module)[name] for name in cls.RECIPE_ATTRIBUTES if name in vars(module)}
        plain = type(module)
        module.__class__ = cls
        assert isinstance(module, cls)
        module.was_plain, module.plain_class = overwritten, plain
        return module

    def restore(self) -> None:
        """Change a converted module back to its plain class, and remove our attributes."""
        assert self.was_plain is not None
        overwritten, plain = self.was_plain, self.plain_class
        for name in ("was_plain", "plain_class", *self.RECIPE_ATTRIBUTES):
            vars(self).pop(name, None)
        del self.rng
        vars(self).update(overwritten)
        self.__class__ = plain  # pyright: ignore[reportAttributeAccessIssue]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.rng
        result = super()._apply(fn, recurse)
        if before is not None and before.is_meta and self.rng is not None and not self.rng.is_meta:
            local(self.rng).copy_(rng_state(self.seed))  # a tensor from the meta device has no values
        for shared in self._shared():
            shared.invalidate()
        return result

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        super()._load_from_state_dict(*args, **named)
        for shared in self._shared():
            shared.invalidate()


class SeveralWeights(RecipeModule):
    """A layer with a recipe and several weights.  stores_transposed: its parameters are [.., in, out]."""

    RECIPE_ATTRIBUTES: ClassVar[tuple[str, ...]] = (*RecipeModule.RECIPE_ATTRIBUTES, "shared_weights")
    shared_weights: dict[str, SharedWeight]

    @property
    def stores_transposed(self) -> bool:
        return False

    def _share(self, shares: bool) -> None:
        before: dict[str, SharedWeight] = getattr(self, "shared_weights", {})
        if shares and any(each.takes_shards for each in before.values()):
            for each in before.values():
                each.invalidate()
        else:
            turned = self.stores_transposed
            self.shared_weights = {name: SharedWeight(transposed=turned) for name in self.WEIGHTS} if shares else {}

    def _shared(self) -> Iterator[SharedWeight]:
        return iter(self.shared_weights.values())

    def shared_cast(self, parameter: str) -> SharedWeight | None:
        return self.shared_weights.get(parameter)

    def share_through(self, parameter: str, shared: SharedWeight) -> None:
        self.shared_weights[parameter] = shared


def check_rng(rng: object) -> None:
    """Raise unless rng is None or an int64 tensor [2], the state of stochastic rounding."""
    if rng is None or (is_dense(rng) and rng.dtype == torch.int64 and rng.shape == (2,)):  # pyright: ignore[reportAttributeAccessIssue]
        return
    refuse(
        f"rng is {in_words(rng)}",
        "the rng state is an int64 tensor of shape [2]: seed and tick",
        "make it with blockscale.rng_state(seed, tick, device), or leave it out",
    )
