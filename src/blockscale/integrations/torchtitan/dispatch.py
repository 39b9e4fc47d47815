"""`BlockScaledRoutedExperts`: torchtitan's routed experts whose rows travel by our dispatchers.

torchtitan's own seam is a token dispatcher: `dispatch` returns rows, `combine` takes rows, and experts lie between.
Rows in 16 bits fit it. Codes have no gradients, so with payload "low" both exchanges and the experts are one function,
and its place is the module around all three. Reordering and weighting of rows stay torchtitan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.override import derive
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from ...autograd.recipe import Recipe
from ...autograd.routing import permute
from ...distributed.dispatch import PAYLOADS, AllToAll, Dispatcher, ExpertPlace
from ...distributed.divided_experts import DividedExperts, LowCall, check_fused
from ...distributed.expert_plan import check_low
from ...errors import check_name, refuse
from ...grouped import Routing, sort_by_expert
from .experts import BlockScaledExperts, RecipeExperts

Dispatch = str | Callable[[DeviceMesh], Dispatcher]


class BlockScaledRoutedExperts(DividedExperts, RoutedExperts):
    """Routed experts with a recipe, and with a dispatcher of ours under expert parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """dispatch: "bf16" or "low", the payload of `AllToAll`, or a function from the mesh of expert parallel ranks to
        a dispatcher."""

        dispatch: Dispatch = "bf16"

    def __init__(self, config: Config) -> None:
        RoutedExperts.__init__(self, config)
        self.dispatch = config.dispatch
        self.is_divided = False

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard as torchtitan does, and make the dispatcher if experts are divided among ranks."""
        super().parallelize(parallel_dims)
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        if mesh is None:
            return
        made = self.dispatch
        self.dispatcher = made(mesh) if callable(made) else AllToAll(made)  # pyright: ignore[reportArgumentType]
        self.place = ExpertPlace(self.inner_experts.num_experts, mesh.get_local_rank(), mesh.size(), mesh.get_group())
        if self.dispatcher.payload == "low":
            _check_low(self.inner_experts.recipe, type(self.inner_experts))
        self.is_divided = True

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Tokens [B, L, D] of this rank, gate weights and expert numbers [B, L, k] -> tokens [B, L, D]. Collective."""
        if not self.is_divided:
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        x, chosen = x_BLD.flatten(0, 1), topk_expert_ids_BLK.flatten(0, 1)
        routing = sort_by_expert(chosen, self.place.experts)
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens, scores = order // chosen.shape[1], topk_scores_BLK.flatten()[order]
        if self.dispatcher.payload == "low":
            weights = self.inner_experts.weights()
            call = LowCall(weights, (None, None), self.inner_experts.recipe_now, (None, None))
            rows = self.over_ranks_low(x.bfloat16(), routing, None, call).type_as(x)
        else:
            rows = self.rows_over_ranks(x[tokens], self.exchange(x, routing, None), self._run)
        metadata = LocalDispatchMetadata(token_indices_experts_sorted_N=tokens, topk_scores_experts_sorted_N=scores)
        return LocalTokenDispatcher.combine(self.token_dispatcher, rows, metadata, x).view(x_BLD.shape)

    def _run(self, arrived: Tensor, routing: Routing) -> Tensor:
        """Received rows and their routing to this rank's experts -> rows sorted by expert."""
        with maybe_set_sparse_mesh():
            return self.inner_experts(permute(arrived, routing), routing.load())


def use_dispatch(model_config: Any, dispatch: Dispatch, recipe: Recipe) -> None:
    """Replace the routed experts of a model's config, whose experts are converted already, in place."""
    if not callable(dispatch):
        check_name(dispatch, PAYLOADS, "dispatch")
    found = 0
    for fqn, config, parent, attribute in model_config.traverse(RoutedExperts.Config):
        experts = type(config.inner_experts)._owner
        if not issubclass(experts, RecipeExperts):
            continue
        if dispatch == "low":
            _check_low(recipe, experts)
        if type(config.token_dispatcher)._owner not in (AllToAllTokenDispatcher, LocalTokenDispatcher):
            refuse(
                f"dispatch={dispatch!r} beside {type(config.token_dispatcher).__qualname__} at {fqn}",
                "rows travel by one dispatcher",
                "build the model with moe_comm_backend='standard', or leave dispatch out",
            )
        setattr(parent, attribute, derive(config, BlockScaledRoutedExperts.Config, dispatch=dispatch))
        found += 1
    if not found:
        refuse(
            f"dispatch={dispatch!r} for a model without converted experts",
            "a dispatcher carries the rows of experts with a recipe",
            "leave dispatch out, or convert experts: fqns and skip choose them",
        )


def _check_low(recipe: Recipe, experts: type[Any]) -> None:
    check_low(recipe)
    check_fused(fused=issubclass(experts, BlockScaledExperts))
