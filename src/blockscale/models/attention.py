"""Attention: grouped queries with rotary positions (Llama), and latent attention (DeepSeek-V2 and V3).

Projections that read the same input are one layer (`qkv`, `down`), so that the input is cast once for one GEMM, as for
gate and up in an MLP. Attention itself is torch's `scaled_dot_product_attention`, in the dtype of the residual stream,
whatever the recipe. Positions rotate pairs (i, i + width / 2) of features, as in Hugging Face's Llama, so that weights
can be exchanged without permutation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..hardware import for_products
from ..nn import Linear
from .cache import LayerCache
from .config import LatentConfig, ModelConfig


def linear(inputs: int, outputs: int) -> Linear:
    """An unquantized projection without bias; `quantize_` applies the recipe later."""
    return Linear(inputs, outputs, bias=False, recipe="bf16")


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 within the operator; the weight is rounded to x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_table(length: int, width: int, theta: float, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines of all positions, fp32 [2, length, width / 2], computed in fp64."""
    rates = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angles = torch.arange(length, device=device, dtype=torch.float64)[:, None] * rates
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary positions applied to x [B, T, H, width]; table [2, T, width / 2], or [2, B, T, width / 2] where sequences
    are at different positions. Computed in fp32, rounded once."""
    cosine, sine = (each.unsqueeze(-2) for each in table)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache | None = None) -> Tensor:
    """Causal attention of [B, T, H, width] each; k and v may have fewer heads.  cache: stores k and v, and has those of
    earlier symbols. Without earlier symbols the operator is that of training."""
    if cache is not None:
        cache.store(k, v)
        if not cache.is_empty:
            return cache.attend(q)
    dtype, grouped = q.dtype, q.shape[2] != k.shape[2]
    q, k, v = (each.transpose(1, 2) for each in for_products(q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return y.transpose(1, 2).to(dtype)


class Attention(nn.Module):
    """Grouped-query attention: `heads` query heads share `kv_heads` key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.head_width
        self.qkv = linear(config.dim, (self.heads + 2 * self.kv_heads) * self.width)
        self.out = linear(self.heads * self.width, config.dim)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.width, config.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; table: of `rotary_table`, for T positions."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.width)).split(counts, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(rotate(q, table), rotate(k, table), v, cache).flatten(-2))


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are projected from one latent of `kv_rank` features.

    All heads share one rotary key. One GEMM, `down`, computes the query (or its latent, with `q_rank`), the latent of
    keys and values, and the rotary key.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig) -> None:
        super().__init__()
        self.heads, self.latent = config.heads, latent
        self.query_width = latent.nope_dim + latent.rope_dim
        queries = self.heads * self.query_width
        self.down = linear(config.dim, (latent.q_rank or queries) + latent.kv_rank + latent.rope_dim)
        self.q_norm = RMSNorm(latent.q_rank, config.norm_eps) if latent.q_rank else None
        self.q_up = linear(latent.q_rank, queries) if latent.q_rank else None
        self.kv_norm = RMSNorm(latent.kv_rank, config.norm_eps)
        self.kv_up = linear(latent.kv_rank, self.heads * (latent.nope_dim + latent.value_dim))
        self.out = linear(self.heads * latent.value_dim, config.dim)

    def forward(self, x: Tensor, table: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; table: of `rotary_table`, for T positions."""
        sizes, heads = self.latent, self.heads
        parts = (self.down.out_features - sizes.kv_rank - sizes.rope_dim, sizes.kv_rank, sizes.rope_dim)
        q, narrow, k_rope = self.down(x).split(parts, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q_nope, q_rope = q.unflatten(-1, (heads, -1)).split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(narrow)).unflatten(-1, (heads, -1))
        k_nope, v = kv.split((sizes.nope_dim, sizes.value_dim), dim=-1)
        k_rope = rotate(k_rope[:, :, None], table).expand(-1, -1, heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, table)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        # torch's fused attentions need one head width for q, k and v; on meta, where FLOPs are counted, no padding
        wider = 0 if v.is_meta else max(0, self.query_width - sizes.value_dim)
        padded = functional.pad(v, (0, wider)) if wider else v
        return self.out(attend(q, k, padded, cache)[..., : sizes.value_dim].flatten(-2))
