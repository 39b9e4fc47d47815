"""`BlockScaledLinear`: torchtitan's linear layer with its products in the formats of a recipe.

Parameters, initialisation and sharding are the parent's; checkpoints do not change. Under tensor parallelism weights
and activations are DTensors, and every rank casts and multiplies its own shards (`autograd/dtensor.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.common.linear import Linear

from ... import nn
from ...autograd.activation import Activation
from ...autograd.dtensor import unchanged_until_backward
from ...autograd.recipe import Recipe
from ...distributed import column_parallel, gather_activation, row_parallel
from ...distributed.expert_plan import reason_against_low
from ...distributed.overlap.choice import Overlap
from ...distributed.styles import local_part
from ...distributed.tokens import Wgrad
from .recipe_module import TitanRecipeModule

# attribute of an input that one of its layers has gathered: whether for a backward, and the activation
_GATHERED = "_blockscale_gathered"


class BlockScaledLinear(TitanRecipeModule, nn.Linear, Linear):
    """y = x @ weight.mT + bias, trained by a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """recipe: a name or a `Recipe`.  name: of the layer in its model, for stochastic rounding.  cut: "column" or
        "row" if the layer communicates itself under tensor parallelism (`tensor_parallel.py`).  overlap: beside its
        product."""

        recipe: str | Recipe = "fp8_blockwise"
        name: str = ""
        cut: str | None = None
        overlap: Overlap = "auto"

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.init_recipe(config.recipe, config.name)
        self.cut = config.cut
        self.overlap: Overlap = config.overlap

    def forward(self, input: Tensor | Activation) -> Tensor:
        """[..., in_features] -> [..., out_features]. If it is cut: from the tokens of a sequence shard to columns of
        all tokens, or back."""
        if self.cut is None or not isinstance(self.weight, DTensor):
            return nn.Linear.forward(self, input)
        assert isinstance(input, DTensor)
        return self._column(input) if self.cut == "column" else self._row(input)

    def _column(self, x: DTensor) -> Tensor:
        mesh, parts = self._parts()
        # layers with the same input gather it once
        saves, shared = getattr(x, _GATHERED, (None, None))
        if shared is None or saves != torch.is_grad_enabled():
            local = x.to_local(grad_placements=x.placements)
            options: dict[str, Any] = {"wgrad": self._wgrad, "overlap": self.overlap}
            shared = gather_activation(local, self.recipe_now, group=mesh, gather_dim=1, **options)
            setattr(x, _GATHERED, (torch.is_grad_enabled(), shared))
        y = column_parallel(shared, **parts)
        return DTensor.from_local(unchanged_until_backward(y, self.weight), mesh, [Shard(2)], run_check=False)

    def _row(self, x: DTensor) -> Tensor:
        mesh, parts = self._parts()
        local = x.to_local(grad_placements=x.placements)
        y = row_parallel(local, **parts, scatter_dim=1, wgrad=self._wgrad, overlap=self.overlap)
        return DTensor.from_local(unchanged_until_backward(y, self.weight), mesh, [Shard(1)], run_check=False)

    def _parts(self) -> tuple[DeviceMesh, dict[str, Any]]:
        """The mesh that cuts the layer, and what both kinds of calls take."""
        weight, bias = self.weight, getattr(self, "bias", None)
        assert isinstance(weight, DTensor)
        rounding, operands = self.call_state()
        parts = {"weight": local_part(weight), "bias": None if bias is None else local_part(bias)}
        options = {"group": weight.device_mesh, "recipe": self.recipe_now, "rounding": rounding}
        return weight.device_mesh, parts | options | {"weight_operands": operands}

    @property
    def _wgrad(self) -> Wgrad:
        """Columns from rows where those keep their values: half the bytes."""
        return "owner" if reason_against_low(self.recipe) else "requantized"
