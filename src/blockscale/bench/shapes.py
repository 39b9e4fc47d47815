"""Shapes of the suites: tokens by features of known models, the GEMMs of their layers, and rows of each expert."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from ..errors import check_name

Shape = tuple[int, ...]
Product = tuple[int, int, int]  # (M, N, K) of a [M, K] @ b [N, K].mT

# 4096 tokens of a micro-batch and 16384 of a step; 7168 features as in DeepSeek-V3, 8192 as in the 70B Llamas
SMALL: Shape = (4096, 7168)
MAIN: Shape = (16384, 8192)
LARGE: tuple[Shape, ...] = ((16384, 7168), MAIN, (32768, 8192))

# weights of E experts, out by in features, as in Llama 4
EXPERT: Shape = (8192, 5120)
EXPERT_COUNTS = (1, 4, 16, 64)

# tokens by hidden features of a SwiGLU MLP, as in DeepSeek-V3's dense layers
GATED: Shape = (16384, 18432)

# large enough for every block, small enough for a CPU
TINY: Shape = (256, 512)
TINY_EXPERT: Shape = (256, 128)
TINY_PRODUCT: Product = (16, 256, 256)

# GEMMs that fill a GPU: square ones, DeepSeek-V3's layers, short and long K, and one with many tokens
LARGE_PRODUCTS: tuple[Product, ...] = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 7168, 18432),
    (4096, 18432, 7168),
    (4096, 4096, 7168),
    (4096, 24576, 1536),
    (4096, 7168, 2048),
    (16384, 8192, 5120),
)
SQUARE: Product = (8192, 8192, 8192)
LONG: Product = (4096, 7168, 18432)

# tokens of a decoding step, and (N, K) of DeepSeek-V3's weights
FEW_ROWS = (1, 16, 64, 128)
DECODED: tuple[tuple[int, int], ...] = (
    (7168, 18432), (18432, 7168), (7168, 16384), (24576, 1536), (7168, 2048), (2112, 7168)
)  # fmt: skip

# (K, N) of the linear layers: attention first, then the dense feed-forward part, if a model has one
MODELS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "DeepSeek-V3 671B": ((7168, 2112), (1536, 24576), (512, 32768), (16384, 7168), (7168, 18432), (18432, 7168)),
    "DeepSeek 16B": ((2048, 3072), (2048, 576), (512, 4096), (2048, 2048), (2048, 10944), (10944, 2048)),
    "Llama3 8B": ((4096, 6144), (4096, 4096), (4096, 14336), (14336, 4096)),
    "Llama3 70B": ((8192, 10240), (8192, 8192), (8192, 28672), (28672, 8192)),
    "Qwen3": ((2048, 5120), (4096, 2048), (4096, 9216), (8192, 4096)),
    "Qwen3 32B": ((5120, 10240), (8192, 5120), (5120, 25600), (25600, 5120)),
    "gpt-oss": ((2880, 5120), (4096, 2880)),
}
MODEL_ROWS = (1, 16, 128, 4096, 16384)


class Mixture(NamedTuple):
    """A layer of experts: their number, experts per token, and the sizes of one expert."""

    experts: int
    top_k: int
    features: int
    hidden: int


MIXTURES: Mapping[str, Mixture] = {
    "DeepSeek-V3 671B": Mixture(256, 8, 7168, 2048),
    "DeepSeek 16B": Mixture(64, 6, 2048, 1408),
    "Llama-4 Scout": Mixture(16, 1, 5120, 8192),
    "Qwen3 235B-A22B": Mixture(128, 8, 4096, 1536),
    "Qwen3 30B-A3B": Mixture(128, 8, 2048, 768),
    "gpt-oss 20B": Mixture(32, 4, 2880, 2880),
    "gpt-oss 120B": Mixture(128, 4, 2880, 2880),
}


class ExpertModel(NamedTuple):
    """A model with experts.  layers: of them, all equal."""

    mixture: Mixture
    layers: int


# models whose experts are timed and modelled with overlap, and tokens of all ranks
OVERLAP_MODELS: Mapping[str, ExpertModel] = {
    "Mixtral 8x7B": ExpertModel(Mixture(8, 2, 4096, 14336), 32),
    "Qwen1.5-MoE-A2.7B": ExpertModel(Mixture(60, 4, 2048, 1408), 24),
}
OVERLAP_TOKENS = 8192


def expert_products(mixture: Mixture, tokens: int) -> tuple[Product, Product]:
    """(tokens, N, K) of layer 0, whose gate and up share a gather, and of layer 1, of a whole mixture.

    >>> expert_products(OVERLAP_MODELS["Mixtral 8x7B"].mixture, 8192)
    ((8192, 28672, 4096), (8192, 4096, 14336))
    """
    return (tokens, 2 * mixture.hidden, mixture.features), (tokens, mixture.features, mixture.hidden)


# rows of each expert: equal, by Zipf's law as from an unbalanced router, or all on one
Load = Literal["balanced", "zipf", "worst"]
LOADS: tuple[Load, ...] = ("balanced", "zipf", "worst")
EXPONENT = 1.2


def model_name(text: str, models: Iterable[str] = tuple(MODELS), kind: str = "model") -> str:
    """Full name of a model from an abbreviation or an unambiguous prefix.  models: known names.  kind: word for them in
    the error.

    >>> model_name("llama3-8b"), model_name("deepseek-v3"), model_name("qwen3-30b", MIXTURES)
    ('Llama3 8B', 'DeepSeek-V3 671B', 'Qwen3 30B-A3B')
    """
    names = tuple(models)

    def plain(name: str) -> str:
        return "".join(letter for letter in name.lower() if letter.isalnum())

    known = {plain(name): name for name in names}
    begun = [name for key, name in known.items() if plain(text) and key.startswith(plain(text))]
    found = known.get(plain(text)) or (begun[0] if len(begun) == 1 else None)
    if found is None:
        check_name(text, ["-".join(name.lower().split()) for name in names], kind)
    return found or text


def mlps(layers: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(features, hidden) of the MLPs among (K, N) layers: those that widen and have a transposed counterpart.

    >>> mlps(MODELS["Llama3 8B"])
    [(4096, 14336)]
    """
    every = list(layers)
    return [(k, n) for k, n in every if n > k and (n, k) in every]


def numel(shape: Shape) -> int:
    """Elements of a tensor of that shape."""
    return math.prod(shape)


def text(shape: Shape) -> str:
    """A shape as text.

    >>> text((4, 8192, 5120))
    '4x8192x5120'
    """
    return "x".join(str(size) for size in shape)


def group_sizes(rows: int, experts: int, load: Load = "balanced", most: int | None = None) -> tuple[int, ...]:
    """Rows of every expert.

    zipf: the expert of rank r has a share of r^-1.2, but at most `most` rows, the number of tokens, since a token goes
    to an expert once. The excess goes to the others by their shares; ranks are assigned to experts at random.  worst:
    the middle expert has all rows.

    >>> group_sizes(10, 4), group_sizes(10, 4, "worst")
    ((3, 3, 2, 2), (0, 0, 10, 0))
    >>> sorted(group_sizes(100, 4, "zipf")), sorted(group_sizes(100, 4, "zipf", most=40))
    ([10, 14, 23, 53], [12, 18, 30, 40])
    """
    if load == "worst":
        return tuple(rows if index == experts // 2 else 0 for index in range(experts))
    if load == "balanced":
        return tuple(rows // experts + (index < rows % experts) for index in range(experts))
    found = _zipf(rows, experts, rows if most is None else most)
    random.Random(0).shuffle(found)
    return tuple(found)


def _zipf(rows: int, experts: int, most: int) -> list[int]:
    """Rows by rank."""
    assert rows <= experts * most, "more rows than experts may take"
    shares = [rank**-EXPONENT for rank in range(1, experts + 1)]
    full, rest, whole = 0, rows, sum(shares)
    while full < experts and shares[full] * rest > most * whole:
        full, rest, whole = full + 1, rest - most, whole - shares[full]
    found = [most] * full + [int(share * rest / whole) for share in shares[full:]]
    # rounding down leaves less than one row for each expert
    for rank in range(full, full + rows - sum(found)):
        found[rank] += 1
    return found
