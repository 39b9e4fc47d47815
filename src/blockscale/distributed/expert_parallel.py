"""`expert_parallel_`: a mixture of experts whose experts are divided among ranks.

Every rank routes its own tokens. A dispatcher (`dispatch.py`) takes their rows to the ranks of their experts, and the
results back, where they are combined. An expert has its rows in the order of all ranks' tokens, so results, gradients
of tokens and of gate weights are bitwise those of one process with the tokens of all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from ..autograd.dtensor import unchanged
from ..autograd.grouped import check_combined
from ..autograd.mlp import fused_mlp
from ..autograd.recipe import Recipe
from ..autograd.routing import combine, permute
from ..errors import ShapeError, ShardingError, refuse
from ..formats.checks import check_tensor, in_words
from ..formats.stochastic import Stochastic
from ..grouped import Routing, as_routing
from ..nn.experts import GroupedExperts, GroupedLinear
from ..nn.moe import MoE
from .dispatch import AllToAll, CallFacts, Dispatcher, Exchange, ExpertPlace
from .expert_plan import ExpertParallelPlan, check_low


def expert_parallel_(moe: MoE, mesh: DeviceMesh, dispatcher: Dispatcher | None = None) -> MoE:
    """Divide the experts of a layer among the ranks of a mesh of one dimension, in place. Collective.

    dispatcher: how rows travel; `AllToAll()` by default, in the dtype of the tokens.

    Every rank keeps the values of its own experts. Their parameters become DTensors, sharded along the experts, so that
    DCP saves the whole and loads it on any number of ranks. Router and shared expert stay as they are. Each rank calls
    the layer with tokens of its own, of any number. A gradient of experts is the sum over the tokens of all ranks: it
    needs no reduction, but the division that data parallel averages by. Call it before the optimizer is made.
    """
    chosen = AllToAll() if dispatcher is None else dispatcher
    _check_layer(moe, mesh, chosen)
    experts = moe.experts
    place = ExpertPlace(experts.gate_up.experts, mesh.get_local_rank(), mesh.size(), mesh.get_group())
    _check_same(experts, chosen, place)
    if chosen.payload == "low":
        check_low(experts.gate_up.recipe)
        check_low(experts.down.recipe)
    for layer in (experts.gate_up, experts.down):
        _keep_own(layer, mesh, place)
    experts.__class__ = ParallelExperts
    assert isinstance(experts, ParallelExperts)
    experts.place, experts.dispatcher = place, chosen
    return moe


class OwnGroupedLinear(GroupedLinear):
    """`GroupedLinear` of a rank's own experts. Its parameters are DTensors [E, ...], sharded along the experts."""

    place: ExpertPlace

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Any recipe: no block lies in two experts."""

    def own_parameters(self) -> tuple[Tensor, Tensor | None]:
        if getattr(self.weight, "main_grad", None) is not None:
            refuse(
                "weight.main_grad of a weight that is a DTensor",
                rule="gradients of sharded weights go to weight.grad",
                fix="delete weight.main_grad",
            )
        return _own(self.weight), None if self.bias is None else _own(self.bias)

    def rounding(self, part: str = "") -> Stochastic | None:
        """Random words are counted by expert, in the whole: the words of one process."""
        found = super().rounding(part)
        first = self.place.span().start
        return None if found is None else Stochastic(found.state, found.name, found.origin, first)


class ParallelExperts(GroupedExperts):
    """`GroupedExperts` of which every rank has its own, and to which rows come from all ranks."""

    place: ExpertPlace
    dispatcher: Dispatcher

    def forward(self, x: Tensor, routing: Tensor | Routing, gate_weights: Tensor | None = None) -> Tensor:
        """Tokens [T, dim] of this rank and their routing to all experts -> rows [T * k, dim] sorted by expert, or with
        gate weights [T, k] tokens [T, dim]. Collective, and so is its backward."""
        routed = as_routing(routing)
        self._check_tokens(x, routed)
        check_combined(gate_weights, routed)
        if self.dispatcher.payload == "low":
            rows = self._forward_low(x, routed, gate_weights)
            return self._watch(rows)
        exchange = self._exchange(x, routed, gate_weights)
        rows = _ToExperts.apply(permute(x, routed), exchange)
        rows = super().forward(rows, exchange.routing)  # pyright: ignore[reportArgumentType]
        rows = _ToTokens.apply(combine(rows, exchange.routing), exchange)
        assert isinstance(rows, Tensor)
        rows = self._watch(rows)
        return rows if gate_weights is None else combine(rows, routed, gate_weights)

    def _forward_low(self, x: Tensor, routing: Routing, gate_weights: Tensor | None) -> Tensor:
        """The forward of payload "low": one function, since codes have no gradients of their own."""
        first, second = self.gate_up, self.down
        check_low(first.recipe)
        if not self.is_fused or first.recipe != second.recipe:
            refuse(
                'payload="low" for experts with hooks, with a forward of their own or with two recipes',
                rule="what travels as codes goes through both layers in one function",
                fix='remove hooks and set one recipe, or use payload="bf16"',
            )
        exchange = self._exchange(x, routing, gate_weights)
        (weight, bias), (other_weight, other_bias) = first.own_parameters(), second.own_parameters()
        (_, operands), (_, other_operands) = first.call_state(), second.call_state()
        return fused_mlp(
            x,
            (weight, other_weight),
            (bias, other_bias),
            first.recipe_now,
            (None, None),
            (operands, other_operands),
            routing,
            gate_weights,
            functools.partial(ExpertParallelPlan, exchange, self.place),
        )

    def _watch(self, y: Tensor) -> Tensor:
        """y, whose backward raises if a parameter has changed since."""
        if not y.requires_grad or torch.compiler.is_compiling():
            return y
        return unchanged(y, *(each for each in self.parameters() if isinstance(each, DTensor)))

    def _exchange(self, x: Tensor, routing: Routing, gate_weights: Tensor | None) -> Exchange:
        return self.dispatcher.exchange(routing, self.place, self._facts(x, routing, gate_weights))

    def _facts(self, x: Tensor, routing: Routing, gate_weights: Tensor | None) -> CallFacts:
        _, rows = routing.permutation
        grads = torch.is_grad_enabled()
        needed = (
            grads and x.requires_grad,
            *(grads and each.requires_grad for each in self.parameters()),
            grads and gate_weights is not None and gate_weights.requires_grad,
        )
        return CallFacts(x.shape[1], rows.shape[1], str(x.dtype).removeprefix("torch."), needed)

    def _check_tokens(self, x: Tensor, routing: Routing) -> None:
        check_tensor(x, "x", "layers")
        if routing.tokens is None or routing.rows is None:
            refuse(
                "the ends of sorted rows for experts of several ranks",
                rule="rows travel by the experts of their tokens, and only a routing has them",
                fix="pass the routing that route or sort_by_expert returned, with tokens in place of rows",
            )
        features = self.gate_up.in_features
        if x.dim() != 2 or x.shape[1] != features or x.shape[0] != routing.rows.shape[0]:
            refuse(
                f"x {tuple(x.shape)} for a routing of {routing.rows.shape[0]} tokens to experts of {features} features",
                rule="x has a row for each token: [T, features]",
                fix="pass the tokens that were routed",
                error=ShapeError,
            )
        if routing.experts != self.place.experts:
            refuse(
                f"a routing to {routing.experts} experts for {self.place.experts} of all ranks",
                rule="tokens are routed to the experts of all ranks",
                fix="route with the scores of all experts",
                error=ShapeError,
            )


class _ToExperts(torch.autograd.Function):
    """Rows to the ranks of their experts; the backward brings gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_experts(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.to_tokens(grad), None


class _ToTokens(torch.autograd.Function):
    """Rows back to the ranks of their tokens; the backward takes gradients to the experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_tokens(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.to_experts(grad), None


def _own(parameter: Tensor) -> Tensor:
    """This rank's shard."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _keep_own(layer: GroupedLinear, mesh: DeviceMesh, place: ExpertPlace) -> None:
    """Replace the parameters of all experts by DTensors whose shard is this rank's, with the values it has."""
    layer.__class__ = OwnGroupedLinear
    assert isinstance(layer, OwnGroupedLinear)
    layer.place, span = place, place.span()
    for name, whole in list(layer.named_parameters(recurse=False)):
        own = whole.detach()[span.start : span.stop].clone()
        sharded = DTensor.from_local(
            own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
        )
        layer.register_parameter(name, Parameter(sharded, requires_grad=whole.requires_grad))


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_layer(moe: object, mesh: object, dispatcher: object) -> None:
    """Raise unless a layer can be divided, for reasons that all ranks have alike."""
    if not isinstance(moe, MoE):
        refuse(
            f"expert_parallel_ of {in_words(moe)}",
            rule="it divides the experts of a blockscale.nn.MoE",
            fix="call it on each MoE of the model",
        )
    if type(moe.experts) is not GroupedExperts or any(isinstance(each, DTensor) for each in moe.parameters()):
        refuse(
            f"expert_parallel_ of experts that are {type(moe.experts).__name__} with "
            f"{'sharded' if any(isinstance(each, DTensor) for each in moe.parameters()) else 'plain'} parameters",
            rule="whole experts are divided, once",
            fix="call it before fully_shard or any other sharding, and once",
            error=ShardingError,
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        refuse(
            f"a mesh that is {mesh if isinstance(mesh, DeviceMesh) else in_words(mesh)}",
            rule="experts are divided along a mesh of one dimension",
            fix='pass init_device_mesh("cuda", (ranks,)), or a dimension of a larger one: mesh["ep"]',
            error=ShardingError,
        )
    if not callable(getattr(dispatcher, "exchange", None)):
        refuse(
            f"dispatcher is {in_words(dispatcher)}",
            rule="a dispatcher makes the exchange of a call",
            fix="pass AllToAll(), FixedCapacity(rows) or None",
        )


def _check_same(experts: GroupedExperts, dispatcher: Dispatcher, place: ExpertPlace) -> None:
    """Raise on all ranks unless they divide the same layer in the same way. Collective."""
    mine = {name: str((tuple(each.shape), each.dtype, each.requires_grad)) for name, each in experts.named_parameters()}
    mine |= {"the recipe of gate_up": str(experts.gate_up.recipe), "the recipe of down": str(experts.down.recipe)}
    mine |= {"the dispatcher": dispatcher.describe()}
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
