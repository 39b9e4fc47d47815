"""The models: Llama's dense transformer and DeepSeek-V3's with experts, from one config.

Everything is built unquantized, from layers that can follow a recipe; `quantize_` then changes only the recipe, so runs
by different recipes start from the same weights and have the same `state_dict`. The residual stream is bf16; parameters
have the dtype of the config, and GEMMs read them as bf16 or as codes. No forward synchronizes with the host or branches
on values, so a step can be captured.

`Transformer.build` makes the modules on the meta device and fills them on their device, parameter by parameter, by the
seed and the parameter's name.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ..nn import GroupedLinear, MoE, SwiGLU
from .attention import Attention, LatentAttention, RMSNorm, linear, rotary_table
from .cache import LayerCache
from .config import ModelConfig, Recompute
from .recompute import selective

STREAM = torch.bfloat16
# standard deviation of a weight times the square root of its inputs: GPT-2 has 0.55 at 768 features, DeepSeek-V3 0.51
# at 7168
INIT = 0.5
# Standard deviation of the embedding: 1, as after a norm. With 0.02 the first blocks add ten times the stream's values,
# the first gradients have a norm of 50 to 70, and two runs that differ in rounding alone diverge by step 15
# (docs/design/training.md).
EMBEDDING_INIT = 1.0


class Block(nn.Module):
    """Pre-norm block: attention, then an MLP or experts, each added to the residual stream."""

    def __init__(self, config: ModelConfig, place: int) -> None:
        super().__init__()
        experts = config.experts
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config) if config.latent is None else LatentAttention(config, config.latent)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp: SwiGLU | MoE
        if experts is None or place < experts.dense_layers:
            self.mlp = SwiGLU(config.dim, config.hidden, recipe="bf16")
        else:
            self.mlp = MoE(
                dim=config.dim,
                hidden=experts.hidden,
                experts=experts.count,
                top_k=experts.top_k,
                shared=experts.shared,
                scoring=experts.scoring,
                normalize=experts.normalize,
                scale=experts.scale,
                balance=experts.balance_rate > 0,
                recipe="bf16",
            )
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, table: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[B, T, dim] -> [B, T, dim].  cache: keys and values of earlier symbols, without gradients."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.body(x, table, cache)
        named: dict[str, Any] = {"context_fn": selective} if self.recompute == "selective" else {}
        # nothing here uses torch's generators, and reading their state would end a capture
        y: Any = checkpoint(self.body, x, table, use_reentrant=False, preserve_rng_state=False, **named)
        return y

    def body(self, x: Tensor, table: Tensor, cache: LayerCache | None = None) -> Tensor:
        """The block without recomputation, [B, T, dim] -> [B, T, dim]."""
        x = x + self.attention(self.attention_norm(x), table, cache)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Symbols [B, T] to the mean loss of the next ones (`loss`), or to logits (`forward`)."""

    table: Tensor

    def __init__(self, config: ModelConfig, sequence: int) -> None:
        super().__init__()
        self.config, self.sequence = config, sequence
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config, place) for place in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = linear(config.dim, config.vocabulary)
        self.register_buffer("table", self._table("meta"), persistent=False)
        self.loss_chunks = 1
        self.tie()

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        sequence: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Transformer:
        """A model with initialized weights; on the meta device without values.

        >>> model = Transformer.build(ModelConfig(), 128, device="meta")
        >>> sum(parameter.numel() for parameter in model.parameters())
        558208
        """
        with torch.device("meta"):
            model = cls(config, sequence).to(dtype)
        if torch.device(device).type == "meta":
            return model
        model.to_empty(device=device)
        model.tie()
        model.fill(seed)
        return model

    def tie(self) -> None:
        """Make embedding and head one parameter, if the config ties them."""
        if self.config.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Initialize all parameters and buffers, each a function of the seed, its name and the device type."""
        outer = {f"{name}.weight" for name, _ in self._residual_outputs()}
        shrink = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1)
                continue
            generator = torch.Generator(parameter.device).manual_seed(_seed_of(seed, name))
            embeds = name == "embedding.weight" and not self.config.tied
            std = EMBEDDING_INIT if embeds else INIT / math.sqrt(parameter.shape[-1])
            parameter.normal_(0, std * (shrink if name in outer else 1), generator=generator)
        for module in self.modules():
            if isinstance(module, MoE) and module.balance is not None and module.load is not None:
                module.balance.zero_()
                module.load.zero_()
        self.table = self._table(self.embedding.weight.device)

    def _table(self, device: torch.device | str) -> Tensor:
        latent, config = self.config.latent, self.config
        width = config.head_width if latent is None else latent.rope_dim
        return rotary_table(self.sequence, width, config.rope_theta, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Rotations stay fp32 if parameters are converted to another dtype."""
        table = self.table
        result = super()._apply(fn, recurse)
        if self.table.dtype != table.dtype:
            self.table = table.to(self.table.device)
        return result

    def _residual_outputs(self) -> Iterator[tuple[str, nn.Module]]:
        """Layers that write to the residual stream; their initial weights shrink with the number of layers."""
        for name, module in self.named_modules():
            # latent attention has a `down` that reads the stream
            writes = name.endswith((".out", ".down")) and not name.endswith("attention.down")
            if writes and isinstance(module, nn.Linear | GroupedLinear):
                yield name, module

    def stream(self, symbols: Tensor, caches: Sequence[LayerCache] | None = None) -> Tensor:
        """Normed residual stream after the last block, [B, T, dim]: the input of the head.

        caches: of each layer, by `Cache.extend`, for symbols that follow others; no gradients then.
        """
        x = self.embedding(symbols).to(STREAM)
        table = self.table[:, : symbols.shape[1]] if caches is None else self.table[:, caches[0].positions]
        for place, block in enumerate(self.layers):
            x = block(x, table) if caches is None else block(x, table, caches[place])
        return self.norm(x)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of the symbols that follow."""
        return self.head(self.stream(symbols))

    def loss(self, pieces: Tensor) -> Tensor:
        """Mean cross entropy in nats of the last T symbols of pieces [B, T + 1], fp32."""
        rows, targets = self.stream(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()
        if self.loss_chunks == 1:
            return self.entropy(rows, targets) / targets.numel()
        total = rows.new_zeros((), dtype=torch.float32)
        for part, aims in zip(rows.chunk(self.loss_chunks), targets.chunk(self.loss_chunks), strict=True):
            # logits of one chunk at a time, recomputed in the backward
            total = total + checkpoint(self.entropy, part, aims, use_reentrant=False, preserve_rng_state=False)
        return total / targets.numel()

    def entropy(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Summed cross entropy of rows [M, dim], fp32."""
        return functional.cross_entropy(self.head(rows).float(), targets, reduction="sum")

    def mixtures(self) -> Iterator[MoE]:
        """MoE layers with a balancing bias."""
        return (each for each in self.modules() if isinstance(each, MoE) and each.balance is not None)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7])


@functools.cache
def flops_per_token(config: ModelConfig, sequence: int) -> float:
    """FLOPs of forward and backward per token, as torch counts operators; attention unmasked, no recomputation.

    >>> flops_per_token(ModelConfig(), 128) > 6 * 500_000
    True
    """
    head = _count(replace(config, layers=0), sequence)
    experts = config.experts
    dense = config.layers if experts is None else min(experts.dense_layers, config.layers)
    kinds = [(dense, replace(config, layers=1, experts=None))]
    if experts is not None:
        kinds.append((config.layers - dense, replace(config, layers=1, experts=replace(experts, dense_layers=0))))
    # blocks of a kind have equal FLOPs: one of each is counted
    return (head + sum(times * (_count(kind, sequence) - head) for times, kind in kinds)) / sequence


def _count(config: ModelConfig, sequence: int) -> int:
    model = Transformer.build(config, sequence, device="meta", dtype=STREAM)
    pieces = torch.zeros(1, sequence + 1, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(pieces).backward()
    return counter.get_total_flops()
