"""Experts of other libraries whose weights FSDP2 gathers as codes, beside FSDP2 that gathers weights; see `gathered`.

Transformers' are stand-ins with its parameters and signature. torchtitan's are its own class: see `titan_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blockscale as bs
from blockscale.distributed import gather_low_
from blockscale.distributed.gathered import CodedWeight
from blockscale.nn.adapters import AdaptedExperts
from support.fully_sharded import THOROUGH, adamw, difference, gradients, train
from support.gathered_training import second_dimension, whole_state

DIM, TOP = 64, 2


class PackedExperts(nn.Module):
    """As Mixtral keeps them in Transformers 5."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, DIM) / 8)
        self.down_proj = nn.Parameter(torch.randn(experts, DIM, hidden) / 8)
        self.act_fn: Any = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError


class GptOssExperts(nn.Module):
    """As gpt-oss keeps them: [E, in, out], with biases."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, DIM, 2 * hidden) / 8)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, DIM) / 8)
        self.down_proj_bias = nn.Parameter(torch.randn(experts, DIM))
        self.alpha, self.limit = 1.702, 7.0

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError


class RoutedBlock(nn.Module):
    """A router and experts of Transformers."""

    def __init__(self, experts: nn.Module, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, count, bias=False), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        return x + self.experts(x, chosen, weights)


def adapted(kind: Any, recipe: bs.Recipe, experts: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(RoutedBlock(kind(experts, hidden), experts) for _ in range(2)))
    bs.quantize_(model, recipe, lambda module, name: "experts" in name)
    assert all(isinstance(block.experts, AdaptedExperts) for block in model)
    return model


def titan(recipe: bs.Recipe, experts: int, hidden: int) -> nn.Module:
    """A linear layer and experts of torchtitan; the last expert has no rows."""
    from blockscale.integrations.torchtitan import BlockScaledExperts, BlockScaledLinear

    class Block(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.linear = BlockScaledLinear.Config(in_features=DIM, out_features=DIM, recipe=recipe, name=name).build()
            config = BlockScaledExperts.Config(
                dim=DIM, hidden_dim=hidden, num_experts=experts, recipe=recipe, name=name
            )
            self.experts = config.build()

        def forward(self, x: Tensor) -> Tensor:
            counts = torch.tensor([len(x) - 2 * (experts - 2)] + (experts - 2) * [2] + [0])
            return x + self.experts(self.linear(x), counts)

    torch.manual_seed(0)
    model = nn.Sequential(Block("first"), Block("second"))
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    return model


def beside_plain_fsdp(
    make: Callable[..., nn.Module],
    *,
    name: str = "fp8_blockwise",
    weight_cast: str = "forward",
    experts: int = 5,
    hidden: int = 96,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Gradients and weights of two steps beside FSDP2 that gathers the weights.  decoded: weights of which a layer took
    the values, which it then casts as any tensor."""
    recipe = bs.get_recipe(name)
    models = [make(recipe.replace(weight_cast=each), experts, hidden) for each in ("forward", weight_cast)]
    report = gather_low_(models[1])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    optimizers = []
    for model in models:
        for block in model:
            fully_shard(block, mp_policy=policy, **options)
        fully_shard(model, mp_policy=policy)
        optimizers.append(adamw(model))
    if weight_cast == "step":
        bs.attach(optimizers[1], models[1])
    grads, decoded = 0.0, list[Any]()
    CodedWeight.decoded, values = lambda self: decoded.append(self.shape) or values(self), CodedWeight.decoded
    for step in range(2):
        for model in models:
            train(model, 1, step)
        grads = max(grads, difference(gradients(models[1]), gradients(models[0])))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    CodedWeight.decoded = values
    found = {"grads": grads, "weights": difference(whole_state(models[1]), whole_state(models[0]))}
    return found | {"formats": list(report.formats), "others": report.others, "decoded": len(decoded)}


def titan_report(name: str, hidden: int) -> dict[str, str]:
    """Reasons: gates that split a block, and NVFP4, whose tensor scales would be those of gates and ups together."""
    return gather_low_(titan(bs.get_recipe(name), 4, hidden)).others


def packed_experts(*args: Any) -> nn.Module:
    return adapted(PackedExperts, *args)


def transposed_experts(*args: Any) -> nn.Module:
    return adapted(GptOssExperts, *args)


def expert_cases() -> Iterator[tuple[Callable[..., nn.Module], dict[str, Any]]]:
    yield packed_experts, {}
    yield packed_experts, {"weight_cast": "step", "shard_placement_fn": second_dimension}
    yield transposed_experts, {"shard_placement_fn": second_dimension}
    if THOROUGH:
        yield transposed_experts, {"weight_cast": "step", "name": "nvfp4", "experts": 4}


def titan_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Run by titan_ranks.py, which has imported torchtitan."""
    yield "experts", beside_plain_fsdp(titan, hidden=128, dtype=torch.bfloat16)
    if THOROUGH:
        yield "experts 96 rows", beside_plain_fsdp(titan, hidden=96)
        yield "experts nvfp4", beside_plain_fsdp(titan, hidden=128, name="nvfp4", experts=4)
    yield "report nvfp4", titan_report("nvfp4", 128)
    yield "report 96 rows", titan_report("fp8_blockwise", 96)
