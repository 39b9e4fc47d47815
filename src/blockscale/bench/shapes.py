"""The shapes that suites run on: tokens by features of models that people train."""

from __future__ import annotations

import math

Shape = tuple[int, ...]

# 4096 tokens of a micro-batch and 16384 of a step; 7168 features as in DeepSeek-V3, 8192 as in the 70B Llamas
SMALL: Shape = (4096, 7168)
MAIN: Shape = (16384, 8192)
LARGE: tuple[Shape, ...] = ((16384, 7168), MAIN, (32768, 8192))

# weights of E experts, out by in features, as in Llama 4
EXPERT: Shape = (8192, 5120)
EXPERT_COUNTS = (1, 4, 16, 64)

# tokens by the width of one half of a gated unit, as in DeepSeek-V3's dense layers
GATED: Shape = (16384, 18432)

# large enough for every block, small enough for a CPU
TINY: Shape = (256, 512)
TINY_EXPERT: Shape = (256, 128)


def numel(shape: Shape) -> int:
    """Elements of a tensor of that shape."""
    return math.prod(shape)


def text(shape: Shape) -> str:
    """A shape as people write it.

    >>> text((4, 8192, 5120))
    '4x8192x5120'
    """
    return "x".join(str(size) for size in shape)
