"""`Linear`: torch's layer with its products in the formats of a recipe.

A subclass of `torch.nn.Linear` with the same parameters, `state_dict` and initialisation, so `isinstance` checks hold.
Parameters stay in high precision. Conversion changes a module's class and nothing else (`convert.py`), so references of
hooks, optimizers, tied weights and compiled callers stay valid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd.activation import Activation
from ..autograd.dtensor import DTensor, check_not_packed, check_shards, shard_shape
from ..autograd.linear import linear
from ..autograd.recipe import Recipe
from ..formats.checks import check_flag, check_place, check_sizes
from .recipe_module import RecipeModule


class Linear(RecipeModule, torch.nn.Linear):
    """y = x @ weight.mT + bias, trained by a recipe.

    recipe: a name or a `Recipe`.  name: of the layer in its model, such as "layers.0.mlp.down_proj"; it selects the
    stream of stochastic rounding, which needs it.  rng: seed and tick (`rng_state`), shared by the layers of a model.

    >>> layer = Linear(256, 512, bias=False, recipe="mxfp8")
    >>> layer(torch.randn(2, 3, 256)).shape
    torch.Size([2, 3, 512])
    >>> layer
    Linear(in_features=256, out_features=512, bias=False, recipe=mxfp8)
    """

    # whether rows of the weight are all gates, then all ups (`SwiGLU.gate_up`)
    is_packed: bool = False

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
        check_sizes(in_features=in_features, out_features=out_features)
        check_flag(bias, "bias")
        check_place(device, dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.apply_recipe(recipe, name=name, rng=rng)

    def forward(self, input: Tensor | Activation) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        rounding, operands = self.call_state()
        return linear(input, self.weight, self.bias, self.recipe_now, rounding=rounding, weight_operands=operands)

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Raise unless shards hold whole blocks, and a packed parameter is not sharded along its rows."""
        if self.is_packed:
            check_not_packed(where, parameter)
        check_shards(where, tuple(parameter.shape), shard_shape(parameter), recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
