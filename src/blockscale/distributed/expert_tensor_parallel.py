"""Experts that are cut along their hidden units (expert tensor parallel), with sharded tokens before and after.

A rank has its tokens and its hidden units of every expert:

    x [T/ranks, K], gate_up [E, 2H/ranks, K], down [E, D, H/ranks] -> y [T/ranks, D]

Tokens are gathered, in their dtype or as codes. A rank sums the rows of a token by gate weight before results travel,
so y costs one reduce-scatter of [T, D], whatever the number of experts of a token. Hidden activations, their gradients
and weight gradients are those of one process, since a shard holds whole blocks; y and the gradients of x and of the
gate weights are sums over ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..autograd.activation import Activation
from ..autograd.dtensor import check_shards, zeros_with_gradient
from ..autograd.grouped import check_combined, check_expert_mlp, check_experts, grouped_swiglu_mlp
from ..autograd.linear import check_quantized, check_unquantized
from ..autograd.mlp import check_pairs, fused_mlp
from ..autograd.operands import Pair, matrix
from ..autograd.recipe import Recipe, get_recipe
from ..grouped import Routing
from .collectives import ranks_of
from .compiling import eager_before_2_13
from .dispatch import Payload, check_payload
from .divided_experts import LowCall
from .expert_all_gather import all_gather_experts, works_of
from .expert_plan import check_low, operands_of_rows
from .overlap.choice import Overlap, link_for
from .overlap.decision import Work
from .overlap.expert_sharing import ExpertSharing
from .tensor_parallel import refuse_stochastic_mlp
from .token_exchange import ShardedTokens, over_hidden_units
from .tokens import tokens_of


@eager_before_2_13
def grouped_swiglu_parallel(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    routing: Routing,
    gate_weights: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    recipe: str | Recipe = "fp8_blockwise",
    token_dim: int = 0,
    payload: Payload = "bf16",
    overlap: Overlap = "auto",
    weight_operands: tuple[Pair | None, Pair | None] = (None, None),
) -> Tensor:
    """y [.., D] of this rank's tokens x [.., K]: `grouped_swiglu_mlp` of experts whose hidden units are cut.

    gate_up_weight: [E, 2H/ranks, K], the gates of this rank's hidden units, then their ups; its bias [E, 2H/ranks]
    alike.  down_weight: [E, D, H/ranks].  down_bias: [E, D], whole.  routing, gate_weights: of this rank's tokens, as
    `route` returns them.  token_dim: axis of x along which the tokens of the ranks lie.
    payload: "bf16": tokens travel in their dtype, and weight gradients have the bits of one process; "low": as codes,
    from which wgrad's columns are made, with 8-bit elements and power-of-two scales.  The gradient of y travels in its
    dtype: every slot of a token has its own gate weight, so as codes it would be as many rows as slots.
    overlap: see `column_parallel`; a recipe quantizes all products then, without tensor scales, or none.
    All ranks pass equal shapes and options.
    """
    chosen, ranks = get_recipe(recipe), ranks_of(group)
    tokens = tokens_of(x, "token_dim", token_dim, 1)
    check_payload(payload)
    check_experts(matrix(x), gate_up_weight, routing)
    check_expert_mlp(gate_up_weight, down_weight)
    check_combined(gate_weights, routing)
    check_pairs((None, None), weight_operands)
    refuse_stochastic_mlp(chosen, "experts that are")
    for weight, bias in ((gate_up_weight, gate_up_bias), (down_weight, down_bias)):
        (check_quantized if chosen.is_quantized else check_unquantized)(x, weight, bias)
    features, hidden = down_weight.shape[1:]
    check_shards("down_weight", (features, hidden * ranks.size), (features, hidden), chosen)
    if payload == "low":
        check_low(chosen)
    weights = gate_up_weight, down_weight
    biases = gate_up_bias, down_bias if down_bias is None or ranks.rank == 0 else zeros_with_gradient(down_bias)
    call = LowCall(weights, biases, chosen, weight_operands)

    def works() -> tuple[Work, ...]:
        sizes = x.shape[:-1].numel() * ranks.size, gate_weights.shape[-1], ranks.size
        return works_of(*sizes, chosen, (tuple(gate_up_weight.shape), tuple(down_weight.shape)))

    link = link_for(overlap, x, ranks, works)
    if link is not None:
        sharing = ExpertSharing(ranks, tokens, range(routing.experts), link)
        return all_gather_experts(x, routing, gate_weights, call, sharing, low=payload == "low")

    def run(all_x: Tensor, messages: Tensor | None, whole: Routing, gates: Tensor) -> Tensor:
        if messages is not None:
            return multiply_messages(all_x, messages, whole, gates, call)
        return grouped_swiglu_mlp(
            all_x, *weights, whole, *biases, chosen, weight_operands=weight_operands, gate_weights=gates
        )

    sharded = ShardedTokens(ranks, tokens)
    return over_hidden_units(x, routing, gate_weights, sharded, chosen if payload == "low" else None, run)


def multiply_messages(x: Tensor, messages: Tensor, routing: Routing, gate_weights: Tensor, call: LowCall) -> Tensor:
    """Tokens [T, D] of messages of tokens that were gathered.  x: takes their gradient; no value of it is read."""
    weights, biases, recipe, operands = call
    saves = torch.is_grad_enabled() and weights[0].requires_grad
    pair = operands_of_rows(messages, routing, recipe, x, "fprop_x", "wgrad_x" if saves else None)
    shared = Activation(x, (recipe, pair))
    return fused_mlp(shared, weights, biases, recipe, (None, None), operands, routing, gate_weights)
