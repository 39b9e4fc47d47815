"""Keys and values of earlier symbols, in buffers of fixed storage, so that a step of generation can be captured.

Positions live on the device: a sequence of the batch has a length of its own, and no shape depends on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..hardware import for_products
from .config import ModelConfig


class LayerCache(NamedTuple):
    """Cache of one layer in one call.  keys, values: [B, H_kv, length, width].  positions: of the new symbols, int64
    [B, T].  is_empty: whether there are no earlier symbols."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    is_empty: bool

    def store(self, k: Tensor, v: Tensor) -> None:
        """Write new keys and values [B, T, H_kv, width] to their positions."""
        rows = torch.arange(len(k), device=k.device)[:, None]
        # autocast may have projected them in another dtype
        self.keys[rows, :, self.positions] = k.to(self.keys.dtype)
        self.values[rows, :, self.positions] = v.to(self.values.dtype)

    def attend(self, q: Tensor) -> Tensor:
        """Attention of queries [B, T, H, width] to keys at their position and before -> [B, T, H, width].

        Queries that share a key head are rows of one attention, so that no key is repeated. What lies behind a
        sequence's last symbol is masked, and overwritten by the next ones.
        """
        grouped = q.unflatten(2, (self.keys.shape[1], -1)).transpose(1, 2)  # [B, H_kv, T, queries, width]
        count, queries = grouped.shape[2:4]
        seen = torch.arange(self.keys.shape[2], device=q.device) <= self.positions[..., None]
        seen = seen[:, None, :, None].expand(-1, -1, -1, queries, -1).flatten(2, 3)
        operands = for_products(grouped.flatten(2, 3).to(self.keys.dtype), self.keys, self.values)
        y = functional.scaled_dot_product_attention(*operands, attn_mask=seen)
        return y.unflatten(2, (count, queries)).transpose(1, 2).flatten(2, 3).to(q.dtype)


class Cache:
    """Keys and values of all layers of a transformer.  ends: symbols of each sequence, int64 [B], on the device.

    `extend` gives the layers' caches for a call; the caller adds to `ends` afterwards.
    """

    def __init__(
        self, config: ModelConfig, batch: int, length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        heads, widths = config.kv_heads, (config.head_width, config.head_width)
        if config.latent is not None:  # decoded, one for each head; attention pads values to the width of keys
            width = config.latent.nope_dim + config.latent.rope_dim
            heads, widths = config.heads, (width, max(width, config.latent.value_dim))
        self.keys, self.values = (
            torch.zeros(config.layers, batch, heads, length, width, device=device, dtype=dtype) for width in widths
        )
        self.ends = torch.zeros(batch, device=device, dtype=torch.int64)

    def extend(self, count: int, *, is_empty: bool) -> list[LayerCache]:
        """The cache of each layer for a call with the next `count` symbols of every sequence."""
        positions = self.ends[:, None] + torch.arange(count, device=self.ends.device)
        layers = zip(self.keys.unbind(), self.values.unbind(), strict=True)
        return [LayerCache(keys, values, positions, is_empty) for keys, values in layers]

    def clear(self) -> None:
        """Forget all symbols. Zeros are written: a value that is not finite would outlive its mask."""
        for each in (self.keys, self.values, self.ends):
            each.zero_()
