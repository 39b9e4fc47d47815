"""Weights of a fused layer that come in parts: joined where no byte changes, else kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..autograd.linear import output_dtype
from ..autograd.operands import matrix
from ..formats.storage import operand_of
from ..formats.tensor import BlockScaled, as_bytes
from ..nn.mlp import is_plain
from .frozen_layer import shaped
from .linear import QuantizedLinear


class SplitLinear(nn.Module):
    """A linear layer whose output features are those of several layers, side by side.  parts: by name, each from the
    same input features. Frozen layers with the same cast share it.

    >>> split = SplitLinear({"q": nn.Linear(64, 32), "k": QuantizedLinear(64, 16, weights="nvfp4")})
    >>> split(torch.randn(2, 3, 64)).shape
    torch.Size([2, 3, 48])
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., sum of out_features]."""
        frozen = [part for part in self.parts.values() if isinstance(part, QuantizedLinear)]
        first = frozen[0] if frozen else None
        if len(frozen) < len(self.parts) or first is None or first.activations is None or not _share(frozen):
            return torch.cat([part(input) for part in self.parts.values()], dim=-1)
        first.check_input(input)
        x = first.cast(matrix(input))
        return shaped(torch.cat([part.multiply(x, output_dtype(input)) for part in frozen], dim=-1), input)


def _share(parts: Sequence[QuantizedLinear]) -> bool:
    """Whether one cast of an input is that of all parts."""
    return all(part.recipe == parts[0].recipe and is_plain(part, QuantizedLinear) for part in parts)


def reason_against_joining(parts: Sequence[Tensor | BlockScaled]) -> str | None:
    """Why rows of several weights [N, K] make no single weight of the same bytes; None if they do."""
    kinds = dict.fromkeys(part.format if isinstance(part, BlockScaled) else str(part.dtype)[6:] for part in parts)
    if len(kinds) > 1:
        return f"they are {', '.join(kinds)}"
    operands = [part for part in parts if isinstance(part, BlockScaled)]
    if not operands:
        return None
    tile = operands[0].spec.block[0]
    if any(part.shape[0] % tile for part in operands[:-1]):
        return f"rows {', '.join(str(part.shape[0]) for part in operands)} end within blocks of {tile} rows"
    factors = [part.global_scale for part in operands if part.global_scale is not None]
    if any(not torch.equal(each, factors[0]) for each in factors):
        return "their tensor scales differ"
    return None


def join_rows(parts: Sequence[BlockScaled]) -> BlockScaled:
    """One weight of the rows of several that `reason_against_joining` finds no reason against."""
    first, rows = parts[0], sum(part.shape[0] for part in parts)
    if len(parts) == 1:
        return first
    codes = torch.cat([as_bytes(part.data) for part in parts])
    scale = torch.cat([as_bytes(part.plain_scale()) for part in parts])
    return operand_of(first.spec, codes, scale, first.global_scale, (rows, first.shape[1]))
