"""`expert_parallel_`: a mixture of experts whose experts are divided among ranks.

Every rank routes its own tokens. A dispatcher (`dispatch.py`) takes their rows to the ranks of their experts, and the
results back, where they are combined. An expert has its rows in the order of all ranks' tokens, so results, gradients
of tokens and of gate weights are bitwise those of one process with the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from ..autograd.grouped import check_combined
from ..autograd.recipe import Recipe
from ..errors import ShardingError, check_name, refuse
from ..formats.checks import in_words
from ..formats.stochastic import Stochastic
from ..grouped import Routing, as_routing
from ..nn.adapters import AdaptedExperts, expert_sizes
from ..nn.experts import GroupedExperts, GroupedLinear
from ..nn.moe import MoE
from ..nn.recipe_module import RecipeModule
from .collectives import Ranks, Tokens, ranks_of
from .compiling import eager_before_2_13
from .dispatch import AllToAll, Dispatcher, ExpertPlace
from .divided_experts import DividedExperts, LowCall, check_fused, check_routed, own, rounding_of_own
from .expert_all_gather import layer_by_all_gather
from .expert_plan import check_low
from .expert_styles import CutExperts, TensorParallelExperts, cut_experts_, cut_rest_
from .overlap.choice import OVERLAPS, Overlap, link_for
from .overlap.decision import Work
from .overlap.expert_sharing import ExpertSharing

Divisible = TypeVar("Divisible", MoE, AdaptedExperts)


def expert_parallel_(
    moe: Divisible,
    mesh: DeviceMesh,
    dispatcher: Dispatcher | None = None,
    *,
    sequence_dim: int = 1,
    overlap: Overlap = "auto",
) -> Divisible:
    """Divide the experts of a layer among the ranks of a mesh, in place. Collective.

    moe: an `nn.MoE`, or experts of Transformers that `quantize_` has converted.  dispatcher: how rows travel;
    `AllToAll()` by default, in the dtype of the tokens.
    mesh: of one dimension; or of two with names, such as mesh["ep", "tp"]: experts of an `nn.MoE` are then divided
    along the first, and the layer is cut along the second as `ExpertTensorParallel` does, with the dispatcher's
    payload. Tokens are sharded along both, along the second within `sequence_dim` of x.
    overlap: "on", of an `nn.MoE`: the tokens of all ranks of the mesh are gathered in the dispatcher's payload, beside
    products, in place of its exchange, and results are summed over all ranks, which have equal numbers of tokens.
    "auto" is the exchange, so far; see `column_parallel`.

    Every rank keeps the values of its own experts. Their parameters become DTensors, sharded along the experts, so that
    DCP saves the whole and loads it on any number of ranks. Router and shared expert stay as they are. Each rank calls
    the layer with tokens of its own, of any number. A gradient of experts is the sum over the tokens of all ranks: it
    needs no reduction, but the division that data parallel averages by. Call it before the optimizer is made.
    """
    chosen = AllToAll() if dispatcher is None else dispatcher
    experts = _check_layer(moe, mesh, chosen)
    _check_overlap(overlap, experts, mesh.size(0))
    whole = next(experts.parameters()).shape[0]
    place = ExpertPlace(whole, mesh.get_local_rank(0), mesh.size(0), mesh.get_group(0))
    layers = [experts] if isinstance(experts, AdaptedExperts) else [experts.gate_up, experts.down]
    _check_same(experts, [each.recipe for each in layers], chosen, place)
    for layer in layers:
        if chosen.payload == "low":
            check_low(layer.recipe)
    if chosen.payload == "low" and isinstance(experts, AdaptedExperts):
        check_fused(fused=experts.is_swiglu)
    if mesh.ndim == 2:
        assert isinstance(moe, MoE)
        _keep_own_cut(moe, mesh, place, CutExperts(sequence_dim, chosen.payload, ranks_of(mesh.get_group(1)), overlap))
        layers = []
    for layer in layers:
        if isinstance(layer, GroupedLinear):
            layer.__class__ = OwnGroupedLinear
        else:
            layer.__class__ = ParallelAdaptedExperts
        _keep_own(layer, mesh, place)
    if isinstance(experts, GroupedExperts):
        experts.__class__ = ParallelExperts if mesh.ndim == 1 else CutParallelExperts
        assert isinstance(experts, ParallelExperts)
        if overlap == "on":
            everyone = mesh if mesh.ndim == 1 else mesh._flatten()  # pyright: ignore[reportPrivateUsage]
            experts.everyone = ranks_of(everyone)
    assert isinstance(experts, DividedExperts)
    experts.place, experts.dispatcher = place, chosen
    return moe


class OwnGroupedLinear(GroupedLinear):
    """`GroupedLinear` of a rank's own experts. Its parameters are DTensors [E, ...], sharded along the experts."""

    place: ExpertPlace

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Any recipe: no block lies in two experts."""

    def own_parameters(self) -> tuple[Tensor, Tensor | None]:
        return own(self.weight), None if self.bias is None else own(self.bias)

    def rounding(self, part: str = "") -> Stochastic | None:
        return rounding_of_own(super().rounding(part), self.place)


class ParallelExperts(DividedExperts, GroupedExperts):
    """`GroupedExperts` that are divided among ranks.  everyone: ranks whose tokens overlapped calls gather; None
    if rows travel by a dispatcher."""

    everyone: Ranks | None = None

    @eager_before_2_13
    def forward(self, x: Tensor, routing: Tensor | Routing, gate_weights: Tensor | None = None) -> Tensor:
        """Tokens [T, dim] of this rank and their routing to all experts -> rows [T * k, dim] sorted by expert, or with
        gate weights [T, k] tokens [T, dim]. Collective, and so is its backward."""
        routed = as_routing(routing)
        check_routed(x, routed, self.gate_up.in_features, self.place.experts)
        check_combined(gate_weights, routed)
        if self.everyone is None:
            return self.multiply(x, None, routed, gate_weights)
        if gate_weights is None:
            refuse(
                'overlap="on" for experts without gate weights',
                rule="results are summed by token before they travel, and a sum needs its gate weights",
                fix='pass the gate weights that route returned, or use overlap="off"',
            )
        link = link_for("on", x, self.everyone)
        sharing = ExpertSharing(self.everyone, Tokens(1, x.shape[0]), self.place.span(), link)
        return layer_by_all_gather(self, x, routed, gate_weights, sharing, low=self.dispatcher.payload == "low")

    def multiply(self, x: Tensor, messages: Tensor | None, routing: Routing, gate_weights: Tensor | None) -> Tensor:
        """The result for tokens x [T, dim].  messages: of tokens that were cast already, else None. Collective."""
        first, second = self.gate_up, self.down
        if self.dispatcher.payload != "low":
            return self.over_ranks(x, routing, gate_weights, super().forward)
        check_low(first.recipe)
        check_fused(fused=self.is_fused and first.recipe == second.recipe)
        (weight, bias), (other_weight, other_bias) = first.own_parameters(), second.own_parameters()
        operands = first.call_state()[1], second.call_state()[1]
        call = LowCall((weight, other_weight), (bias, other_bias), first.recipe_now, operands)
        return self.over_ranks_low(x, routing, gate_weights, call, messages)


class CutParallelExperts(TensorParallelExperts, ParallelExperts):
    """`GroupedExperts` that are divided among ranks and cut along their hidden units. Tokens are gathered along the
    second dimension of the mesh, and every rank sends their rows along the first."""

    def sharers(self, tokens: Tokens) -> tuple[Ranks, Tokens, range]:
        """All ranks of both dimensions; the tokens of each are one run."""
        return self.everyone or self.cut.ranks, Tokens(1, tokens.outer * tokens.inner), self.place.span()

    def works(self, tokens: int, topk: int, ranks: int) -> tuple[Work, ...]:
        """None: overlap="auto" is the exchange."""
        return ()

    def multiply(self, x: Tensor, messages: Tensor | None, routing: Routing, gate_weights: Tensor | None) -> Tensor:
        """This rank's part of the results for tokens x [T, dim] of the ranks that it shares experts with."""
        return ParallelExperts.multiply(self, x, messages, routing, gate_weights)


class ParallelAdaptedExperts(DividedExperts, AdaptedExperts):
    """Transformers' experts with a recipe that are divided among ranks."""

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Any recipe: no block lies in two experts."""

    def own_parameter(self, name: str) -> Tensor:
        return own(self.get_parameter(name))

    def rounding(self, part: str = "") -> Stochastic | None:
        return rounding_of_own(super().rounding(part), self.place)

    @eager_before_2_13
    def run(self, tokens: Tensor, routing: Routing, gate_weights: Tensor | None) -> Tensor:
        check_routed(tokens, routing, expert_sizes(self)[0][2], self.place.experts)
        if self.dispatcher.payload != "low":
            own_run = super().run
            return self.over_ranks(tokens, routing, gate_weights, lambda rows, found: own_run(rows, found, None))
        check_low(self.recipe)
        check_fused(fused=self.is_swiglu)
        (weight, bias, _, operands), (other_weight, other_bias, _, other_operands) = self.call_states()
        call = LowCall((weight, other_weight), (bias, other_bias), self.recipe_now, (operands, other_operands))
        return self.over_ranks_low(tokens, routing, gate_weights, call)


def _keep_own(layer: RecipeModule, mesh: DeviceMesh, place: ExpertPlace) -> None:
    """Replace the parameters of all experts by DTensors whose shard is this rank's, with the values it has."""
    assert isinstance(layer, OwnGroupedLinear | ParallelAdaptedExperts)
    layer.place, span = place, place.span()
    for name, whole in list(layer.named_parameters(recurse=False)):
        mine = whole.detach()[span.start : span.stop].clone()
        sharded = DTensor.from_local(
            mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
        )
        layer.register_parameter(name, Parameter(sharded, requires_grad=whole.requires_grad))


def _keep_own_cut(moe: MoE, mesh: DeviceMesh, place: ExpertPlace, cut: CutExperts) -> None:
    """As `_keep_own`, of hidden units of this rank's experts, on a mesh of two dimensions."""
    span = place.span()
    for layer, name, whole, placement in cut_experts_(moe.experts, cut):
        mine = whole[span.start : span.stop]
        if placement.is_shard():
            mine = mine.chunk(cut.ranks.size, 2)[cut.ranks.rank]
        sharded = DTensor.from_local(
            mine.clone(), mesh, [Shard(0), placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        layer.register_parameter(name, Parameter(sharded, requires_grad=layer.get_parameter(name).requires_grad))
    assert mesh.mesh_dim_names is not None
    cut_rest_(moe, mesh[mesh.mesh_dim_names[1]], cut)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_layer(moe: object, mesh: object, dispatcher: object) -> GroupedExperts | AdaptedExperts:
    """The experts of a layer. Raises unless they can be divided, for reasons that all ranks have alike."""
    if not isinstance(moe, MoE | AdaptedExperts):
        refuse(
            f"expert_parallel_ of {in_words(moe)}",
            rule="it divides the experts of a blockscale.nn.MoE, or experts of Transformers that quantize_ converted",
            fix="call it on each MoE of the model; convert experts of Transformers with quantize_ first",
        )
    experts = moe.experts if isinstance(moe, MoE) else moe
    is_sharded = any(isinstance(each, DTensor) for each in experts.parameters())
    if type(experts) not in (GroupedExperts, AdaptedExperts) or is_sharded:
        refuse(
            f"expert_parallel_ of experts that are {type(experts).__name__} with "
            f"{'sharded' if is_sharded else 'plain'} parameters",
            rule="whole experts are divided, once",
            fix="call it before fully_shard or any other sharding, and once",
            error=ShardingError,
        )
    both = isinstance(mesh, DeviceMesh) and mesh.ndim == 2 and mesh.mesh_dim_names and type(moe) is MoE
    if not isinstance(mesh, DeviceMesh) or (mesh.ndim != 1 and not both):
        refuse(
            f"{type(moe).__name__} on a mesh that is {mesh if isinstance(mesh, DeviceMesh) else in_words(mesh)}",
            rule="experts are divided along one dimension, and those of a whole nn.MoE also cut along another that has "
            "a name",
            fix='pass init_device_mesh("cuda", (ranks,)), or dimensions of a larger one: mesh["ep"], mesh["ep", "tp"]',
            error=ShardingError,
        )
    if not callable(getattr(dispatcher, "exchange", None)):
        refuse(
            f"dispatcher is {in_words(dispatcher)}",
            rule="a dispatcher makes the exchange of a call",
            fix="pass AllToAll(), FixedCapacity(rows) or None",
        )
    return experts


def _check_overlap(overlap: Overlap, experts: torch.nn.Module, ranks: int) -> None:
    """Raise unless experts can be overlapped, if that is asked for.  ranks: that divide them."""
    check_name(overlap, OVERLAPS, "overlap")
    if overlap != "on":
        return
    if not isinstance(experts, GroupedExperts):
        refuse(
            f'overlap="on" for {type(experts).__name__}',
            rule="tokens of all ranks are gathered for the experts of a blockscale.nn.MoE",
            fix='use overlap="off" for experts of Transformers',
        )
    if (whole := experts.gate_up.experts) % ranks:
        refuse(
            f'overlap="on" for {whole} experts on {ranks} ranks',
            rule="every rank has as many experts, so that all have as much to multiply",
            fix=f'use a multiple of {ranks} experts, or overlap="off"',
            error=ShardingError,
        )


def _check_same(
    experts: torch.nn.Module, recipes: Sequence[Recipe], dispatcher: Dispatcher, place: ExpertPlace
) -> None:
    """Raise on all ranks unless they divide the same layer in the same way. Collective."""
    mine = {name: str((tuple(each.shape), each.dtype, each.requires_grad)) for name, each in experts.named_parameters()}
    mine |= {"the recipes": "; ".join(map(str, recipes)), "the dispatcher": dispatcher.describe()}
    found: list[Any] = [None] * place.ranks
    dist.all_gather_object(found, mine, group=place.group)
    for name in sorted({name for each in found for name in each}):
        values = [each.get(name) for each in found]
        if len({*values}) > 1:
            refuse(
                f"ranks differ in {name}: {'; '.join(map(str, dict.fromkeys(values)))}",
                rule="every rank divides the same experts, with the same recipe and dispatcher",
                fix="build the layer on every rank with the same options",
                error=ShardingError,
            )
