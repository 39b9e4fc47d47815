"""`Linear`: torch's layer with its products in the formats of a recipe.

A subclass of `torch.nn.Linear` with the same parameters, `state_dict` and initialisation: what knows that class knows
this one. Parameters stay in high precision. Conversion changes a module's class and nothing else (`convert.py`), so
hooks, optimizers, tied weights and compiled callers keep what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..autograd.activation import Activation
from ..autograd.linear import linear
from ..autograd.operands import Pair
from ..autograd.recipe import Recipe, get_recipe
from ..autograd.weights import SharedWeight
from ..errors import OptionError, message
from ..formats.stochastic import Stochastic, module_name, rng_state

DEFAULT_SEED = 0
# the attributes that `follow` sets beside the buffer rng
_FOLLOWED = ("recipe", "recipe_now", "name", "seed", "shared_weight")


class Linear(torch.nn.Linear):
    """y = x @ weight.mT + bias, trained by a recipe.

    recipe: a name or a `Recipe`.  name: where the layer is in its model, such as "layers.0.mlp.down_proj"; recipes that
    round stochastically draw by it, and need it.  rng: seed and tick (`rng_state`), shared by the layers of a model.

    >>> layer = Linear(256, 512, bias=False, recipe="mxfp8")
    >>> layer(torch.randn(2, 3, 256)).shape
    torch.Size([2, 3, 512])
    >>> layer
    Linear(in_features=256, out_features=512, bias=False, recipe=mxfp8)
    """

    # what a plain module had under the names that `follow` takes; None for a layer that was made as one of ours
    was_plain: dict[str, Any] | None = None
    recipe: Recipe
    recipe_now: Recipe
    name: str
    seed: int
    shared_weight: SharedWeight | None
    rng: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "fp8_blockwise",
        name: str = "",
        rng: Tensor | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.follow(recipe, name=name, rng=rng)

    def follow(
        self, recipe: str | Recipe, *, name: str = "", rng: Tensor | None = None, seed: int = DEFAULT_SEED
    ) -> None:
        """Train by this recipe from now on. Casts that were shared are dropped.

        seed: what rng is made from where none is given, and again when the layer leaves the meta device.
        """
        chosen, plain = get_recipe(recipe), module_name(name)
        if chosen.draws and not plain:
            raise OptionError(
                message(
                    f"recipe {chosen.name!r} for a layer without a name",
                    rule="it rounds stochastically, and layers draw by their names",
                    fix="pass name='layers.0.mlp.down_proj', or convert a model with quantize_, which names its layers",
                )
            )
        self.recipe = self.recipe_now = chosen
        self.name, self.seed = plain, seed
        self.shared_weight = SharedWeight() if chosen.weight_cast == "step" and chosen.is_low else None
        if chosen.draws and rng is None:
            rng = rng_state(seed, device=self.weight.device)
        self.register_buffer("rng", rng if chosen.draws else None, persistent=False)

    @classmethod
    def convert(cls, module: torch.nn.Linear) -> Linear:
        """Make a plain module one of ours, in place; it has to `follow` a recipe then."""
        kept = {name: vars(module)[name] for name in _FOLLOWED if name in vars(module)}
        module.__class__ = cls
        assert isinstance(module, cls)
        module.was_plain = kept
        return module

    def restore(self) -> None:
        """Make a converted module torch's own again, with nothing of ours left."""
        assert self.was_plain is not None
        kept = self.was_plain
        for name in ("was_plain", *_FOLLOWED):
            vars(self).pop(name, None)
        del self.rng
        vars(self).update(kept)
        self.__class__ = torch.nn.Linear  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: Tensor | Activation) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        rounding, operands = self.given()
        return linear(input, self.weight, self.bias, self.recipe_now, rounding=rounding, weight_operands=operands)

    def given(self) -> tuple[Stochastic | None, Pair | None]:
        """What a call made now takes besides parameters: what it draws from, and shared casts of the weight."""
        recipe, shared = self.recipe_now, self.shared_weight
        rounding = Stochastic(self.rng, self.name) if recipe.draws and self.rng is not None else None
        return rounding, None if shared is None else shared.operands(self.weight, recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.rng
        result = super()._apply(fn, recurse)
        if before is not None and before.is_meta and self.rng is not None and not self.rng.is_meta:
            self.rng.copy_(rng_state(self.seed))  # what came off the meta device has no values
        if self.shared_weight is not None:
            self.shared_weight.invalidate()
        return result

    def _load_from_state_dict(self, *args: Any, **named: Any) -> None:
        super()._load_from_state_dict(*args, **named)
        if self.shared_weight is not None:
            self.shared_weight.invalidate()
