"""Sizes of a transformer as frozen dataclasses. Imports no torch: the command line reads them to print its help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
Gather = Literal["low", "high"]
Payload = Literal["bf16", "low"]


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values are projected from one latent."""

    kv_rank: int = 512
    """Width of the latent of keys and values."""
    q_rank: int = 0
    """Width of the latent of queries; 0: queries are projected directly."""
    nope_dim: int = 128
    """Features of a head's query and key without a position."""
    rope_dim: int = 64
    """Features of a head's query and key with a position; all heads share the key's."""
    value_dim: int = 128
    """Features of a head's value."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP, as in DeepSeek-V3 (arXiv:2412.19437)."""

    count: int = 64
    """Experts of a layer."""
    top_k: int = 6
    """Experts that a token goes to."""
    hidden: int = 1408
    """Hidden units of an expert."""
    shared: int = 2816
    """Hidden units of the shared expert, which every token uses; 0: none."""
    dense_layers: int = 1
    """Layers at the start that have an ordinary MLP."""
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function that makes scores from the router's logits."""
    normalize: bool = True
    """Whether the gate weights of a token's experts add up to one."""
    scale: float = 1.0
    """Factor of the gate weights."""
    balance_rate: float = 1e-3
    """Update step of the bias that balances the experts' load; 0: no bias."""


@dataclass(frozen=True)
class ModelConfig:
    """A transformer: Llama's with `latent` and `experts` left out, DeepSeek-V3's with both."""

    dim: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Heads of queries."""
    kv_heads: int = 2
    """Heads of keys and values; ignored by latent attention."""
    hidden: int = 192
    """Hidden units of the MLP."""
    vocabulary: int = 256
    """Number of symbols: 256 for bytes, at least the tokenizer's number of tokens."""
    head_dim: int = 0
    """Features of a head; 0: dim / heads."""
    rope_theta: float = 10000.0
    """Base of the rotary positions."""
    norm_eps: float = 1e-5
    """Added to the mean square within RMS norms."""
    qk_norm: bool = False
    """Whether queries and keys are normed, head by head."""
    tied: bool = False
    """Whether embedding and output head share one weight."""
    latent: LatentConfig | None = None
    """Latent attention in place of grouped queries."""
    experts: ExpertsConfig | None = None
    """A mixture of experts in place of the MLP."""

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.head_dim or self.dim // self.heads


@dataclass(frozen=True)
class RanksConfig:
    """How ranks that torchrun started divide a model; without torchrun nothing of it is used."""

    gather: Gather = "low"
    """What FSDP2 gathers of a weight. low: its codes, where its format allows it. high: the dtype of parameters."""
    experts: int = 1
    """Ranks among which the experts of a layer are divided; the other factor of all ranks shards each expert."""
    payload: Payload = "bf16"
    """How tokens travel to experts of other ranks. bf16: 16 bits. low: codes and scales."""
    timeout: float = 600.0
    """Seconds that a rank waits for the others; then all ranks end with an error."""
