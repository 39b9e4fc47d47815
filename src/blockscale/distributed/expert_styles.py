"""`ExpertTensorParallel`: the style for `parallelize_module` that cuts experts along their hidden units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import Parameter

from ..autograd.dtensor import check_shards, shard_shape, unchanged_until_backward, zeros_with_gradient
from ..autograd.grouped import check_combined
from ..autograd.operands import matrix
from ..autograd.recipe import Recipe
from ..errors import ShardingError, check_name, refuse
from ..formats.checks import in_words
from ..grouped import Routing, as_routing
from ..nn.experts import GroupedExperts, GroupedLinear
from ..nn.moe import MoE
from .collectives import Ranks, Tokens, ranks_of
from .compiling import eager_before_2_13
from .dispatch import Payload, check_payload
from .divided_experts import LowCall, check_fused, check_routed
from .expert_all_gather import layer_by_all_gather, works_of
from .expert_plan import check_low
from .expert_tensor_parallel import multiply_messages
from .overlap.choice import OVERLAPS, Overlap, link_for
from .overlap.decision import Work
from .overlap.expert_sharing import ExpertSharing
from .styles import SwiGLUParallel, check_one_dimension, local_part
from .tensor_parallel import refuse_stochastic_mlp
from .token_exchange import ShardedTokens, over_hidden_units
from .tokens import tokens_of


class CutExperts(NamedTuple):
    """How experts are cut.  sequence_dim: axis of activations along which tokens are sharded.  payload: of gathered
    tokens, see `grouped_swiglu_parallel`.  ranks: that have parts of the same experts."""

    sequence_dim: int
    payload: Payload
    ranks: Ranks
    overlap: Overlap


class CutGroupedLinear(GroupedLinear):
    """A layer of experts that are cut along their hidden units: `gate_up` [E, 2, H, K] and its bias [E, 2, H], sharded
    along H, or `down` [E, D, H] sharded along H, whose bias [E, D] all ranks have."""

    cut: CutExperts

    def check_sharding(self, where: str, parameter: DTensor, recipe: Recipe) -> None:
        """Raise unless shards hold whole blocks: [2, H, K], [2, H] or [D, H] of each expert. No block lies in two."""
        if parameter.dim() > 2:
            check_shards(where, tuple(parameter.shape[-2:]), shard_shape(parameter)[-2:], recipe)

    def own_parameters(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = local_part(self.weight), None if self.bias is None else local_part(self.bias)
        if weight.dim() == 4:
            return weight.flatten(1, 2), None if bias is None else bias.flatten(1, 2)
        return weight, bias if bias is None or self.cut.ranks.rank == 0 else zeros_with_gradient(bias)


class TensorParallelExperts(GroupedExperts):
    """`GroupedExperts` whose hidden units are cut: tokens of this rank in and out. Made by `ExpertTensorParallel`."""

    cut: CutExperts

    @eager_before_2_13
    def forward(self, x: Tensor, routing: Tensor | Routing, gate_weights: Tensor | None = None) -> Tensor:
        """Tokens [.., dim] of this rank with their routing and gate weights -> [.., dim]. Collective, and so is its
        backward."""
        sequence_dim, payload, ranks, overlap = self.cut
        first, second, routed = self.gate_up, self.down, as_routing(routing)
        if gate_weights is None:
            refuse(
                "experts that are cut along their hidden units, without gate weights",
                rule="partial results are summed by token before they travel, and a sum needs its gate weights",
                fix="pass the gate weights that route returned",
            )
        tokens = tokens_of(x, "sequence_dim", sequence_dim if x.dim() > 2 else 0, 1)
        check_routed(matrix(x), routed, first.in_features, first.experts)
        check_combined(gate_weights, routed)
        everyone, all_tokens, mine = self.sharers(tokens)
        sizes = x.shape[:-1].numel() * everyone.size, gate_weights.shape[-1], everyone.size
        if (link := link_for(overlap, x, everyone, lambda: self.works(*sizes))) is not None:
            sharing = ExpertSharing(everyone, all_tokens, mine, link)
            return layer_by_all_gather(self, x, routed, gate_weights, sharing, low=payload == "low")
        recipe = None
        if payload == "low":
            check_low(first.recipe)
            check_fused(fused=self.is_fused and first.recipe == second.recipe)
            recipe = first.recipe_now
        return over_hidden_units(x, routed, gate_weights, ShardedTokens(ranks, tokens), recipe, self.multiply)

    def sharers(self, tokens: Tokens) -> tuple[Ranks, Tokens, range]:
        """Ranks whose tokens an overlapped call gathers, where this rank's lie among them, and this rank's experts."""
        return self.cut.ranks, tokens, range(self.gate_up.experts)

    def works(self, tokens: int, topk: int, ranks: int) -> tuple[Work, ...]:
        """What overlap="auto" weighs: both layers, if they can overlap.  tokens: of all ranks."""
        first, second = self.gate_up, self.down
        if not self.is_fused or first.recipe != second.recipe:
            return ()
        hidden = first.out_features // 2 // ranks
        shapes = (first.experts, 2 * hidden, first.in_features), (first.experts, second.out_features, hidden)
        return works_of(tokens, topk, ranks, first.recipe_now, shapes)

    def multiply(self, x: Tensor, messages: Tensor | None, routing: Routing, gate_weights: Tensor | None) -> Tensor:
        """This rank's part of the results for tokens x [T, dim] of all ranks.  messages: of tokens that were cast."""
        first, second = self.gate_up, self.down
        if messages is None:
            y = super().forward(x, routing, gate_weights)
        else:
            assert gate_weights is not None
            (weight, bias), (other_weight, other_bias) = first.own_parameters(), second.own_parameters()
            operands = first.call_state()[1], second.call_state()[1]
            call = LowCall((weight, other_weight), (bias, other_bias), first.recipe_now, operands)
            y = multiply_messages(x, messages, routing, gate_weights, call)
        return unchanged_until_backward(y, first.weight, second.weight)


class TensorParallelMoE(MoE):
    """`MoE` whose experts are cut along their hidden units: tokens of this rank in and out."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., dim] -> [.., dim]."""
        self._check_input(x)
        routing, gate_weights = self.route(matrix(x))
        y = self.experts(x, routing, gate_weights)
        return y if self.shared is None else y + self.shared(x)


class ExpertTensorParallel(ParallelStyle):
    """Cut the experts of a `blockscale.nn.MoE`, or a `GroupedExperts`, along their hidden units: tokens of this rank in
    and out.

    sequence_dim: axis of x along which the tokens of the ranks lie, 1 for [B, S, K]; tokens [T, K] lie along axis 0.
    payload: of gathered tokens, see `grouped_swiglu_parallel`.  overlap: see `column_parallel`, of the shared expert,
    too.

    Of an `MoE` the router sees this rank's tokens, and the gradient of its weight is summed over ranks by DTensor; the
    shared expert becomes `SwiGLUParallel`, whose columns are requantized with payload="low".
    `gate_up.weight` [E, 2H, K] becomes a DTensor [E, 2, H, K] sharded along H (its bias [E, 2, H]): checkpoints have
    that shape.
    """

    def __init__(self, *, sequence_dim: int = 1, payload: Payload = "bf16", overlap: Overlap = "auto") -> None:
        super().__init__()
        check_payload(payload)
        check_name(overlap, OVERLAPS, "overlap")
        self.sequence_dim: int = sequence_dim
        self.payload: Payload = payload
        self.overlap: Overlap = overlap

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        check_one_dimension(type(self).__name__, device_mesh)
        experts = module.experts if type(module) is MoE else module
        if type(experts) is not GroupedExperts:
            refuse(
                f"ExpertTensorParallel for {in_words(module)}",
                rule="it cuts a blockscale.nn.MoE, or a GroupedExperts, whose experts are not cut or divided yet",
                fix="use expert_parallel_ for experts of Transformers",
                error=ShardingError,
            )
        cut = CutExperts(self.sequence_dim, self.payload, ranks_of(device_mesh), self.overlap)
        for layer, name, whole, placement in cut_experts_(experts, cut):
            made = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
            layer.register_parameter(name, Parameter(made, layer.get_parameter(name).requires_grad))
        experts.__class__ = TensorParallelExperts
        if isinstance(module, MoE):
            cut_rest_(module, device_mesh, cut)
        return module


def cut_experts_(experts: GroupedExperts, cut: CutExperts) -> Iterator[tuple[CutGroupedLinear, str, Tensor, Placement]]:
    """Change the classes of both layers, and yield each parameter with its name, in the shape that is cut, and how.
    Raises first, if it cannot be cut."""
    for layer in (experts.gate_up, experts.down):
        refuse_stochastic_mlp(layer.recipe, "experts that are")
        if cut.payload == "low":
            check_low(layer.recipe)
    setattr(experts, "cut", cut)  # noqa: B010
    for layer in (experts.down, experts.gate_up):  # down first: its shards show whether they hold whole blocks
        is_packed = layer is experts.gate_up
        layer.__class__ = CutGroupedLinear
        assert isinstance(layer, CutGroupedLinear)
        layer.cut = cut
        for name, param in list(layer.named_parameters(recurse=False)):
            whole = param.detach().unflatten(1, (2, -1)) if is_packed else param.detach()
            yield layer, name, whole, Shard(2) if is_packed or name == "weight" else Replicate()


def cut_rest_(moe: MoE, mesh: DeviceMesh, cut: CutExperts) -> None:
    """Parallelise router and shared expert of a layer whose experts are cut."""
    SequenceParallel(sequence_dim=0, use_local_output=True)._apply(moe.router, mesh)  # pyright: ignore[reportPrivateUsage]
    if moe.shared is not None:
        wgrad = "requantized" if cut.payload == "low" else "owner"
        SwiGLUParallel(sequence_dim=cut.sequence_dim, wgrad=wgrad, overlap=cut.overlap)._apply(moe.shared, mesh)  # pyright: ignore[reportPrivateUsage]
    moe.__class__ = TensorParallelMoE
