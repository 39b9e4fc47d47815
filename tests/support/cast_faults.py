"""Faults injected into the reference cast, and the gates that find them without training a model.

A fault replaces the rounding or the scales of the reference cast; layers, recipes and GEMMs are the library's own. A
faulty rounding is given as the random word of every element, since stochastic rounding goes up iff the word is below
the fraction times 2^32:

    0xFFFFFFFF  never: toward zero          0x00000000  always: away from zero
    0x7FFFFFFF  from a half on: ties away   any other word: a stuck random generator

Gates:

    bytes     exact values, ties and stochastic rounding of docs/numerics.md, cast and decoded: equal or not
    product   one GEMM of data with outlier channels, against fp64: decibels
    gradient  of the first batch of a small transformer, against bf16's: cosine and ratio of norms
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import blockscale as bs
from blockscale.autograd import Operand, Product, Recipe, get_recipe
from blockscale.casts import _reference
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import Stochastic, rng_state
from blockscale.models import ModelConfig, Transformer
from blockscale.nn import Linear
from blockscale.train import DataConfig
from blockscale.train.data import load

MODEL, SEQUENCE = ModelConfig(dim=64, layers=2, heads=4, kv_heads=4, hidden=192), 32
# least cosine of gradients by bits of an element, and the range of the ratio of their norms
COSINE, NORMS = {8: 0.998, 4: 0.975}, (0.9, 1.15)
# half a decibel below the SQNR of the format on the data of `outliers_db`
OUTLIERS_DB = {"mxfp8_e4m3": 28.1, "fp8_1x128": 30.3, "nvfp4": 17.2, "mxfp4": 14.5}
# values of one block and their rounded values, by bits of an element
TIES = {
    8: ((448.0, 17.0, 19.0, 1.02), (448.0, 16.0, 20.0, 1.0)),
    4: ((6.0, 2.5, 3.5, 0.7), (6.0, 2.0, 4.0, 0.5)),
}


@dataclass(frozen=True)
class Arm:
    """A recipe with or without a fault.  nearest, stochastic: word that replaces rounding to nearest, or the random
    words of stochastic rounding.  axis: scales are written in the order of the other axis."""

    recipe: Recipe
    nearest: int | None = None
    stochastic: int | None = None
    axis: bool = False

    @property
    def bits(self) -> int:
        """Bits of an element of wgrad."""
        assert self.recipe.wgrad is not None
        return 4 if "fp4" in self.recipe.wgrad.a.format else 8


def _floored() -> Recipe:
    """MXFP8 with scales that let the largest values of a block clip."""
    floor = Operand("mxfp8_e4m3", "floor")
    return get_recipe("mxfp8").replace(
        name="floor", **dict.fromkeys(("fprop", "dgrad", "wgrad"), Product(floor, floor))
    )


RECIPES = {
    **{name: Arm(get_recipe(name)) for name in ("mxfp8", "fp8_blockwise", "nvfp4", "mxfp4")},
    "nvfp4_backward": Arm(get_recipe("nvfp4").replace(name="nvfp4_backward", fprop=None)),
}
FAULTS = {
    "wrong_axis": Arm(get_recipe("mxfp8"), axis=True),
    "truncation": Arm(get_recipe("mxfp8"), nearest=0xFFFFFFFF),
    "ties_away": Arm(get_recipe("mxfp8"), nearest=0x7FFFFFFF),
    "floor": Arm(_floored()),
    "word_zero": Arm(get_recipe("mxfp4"), stochastic=0),
    "word_stuck": Arm(get_recipe("mxfp4"), stochastic=0x6627E8D5),
}


@contextmanager
def injected(arm: Arm) -> Iterator[None]:
    """Context with the fault of an arm; casts then use the reference backend."""
    real_encode, real_pack = _reference.encode, _reference.pack_scale

    def encode(v: Tensor, element: Any, words: Tensor | None = None) -> Tensor:
        word = arm.nearest if words is None else arm.stochastic
        return real_encode(v, element, words if word is None else torch.full_like(v, word, dtype=torch.int64))

    def pack_scale(spec: Any, scale: Tensor, *rest: Any) -> Tensor:
        return real_pack(spec, scale.mT.reshape(scale.shape) if arm.axis else scale, *rest)

    try:
        _reference.encode, _reference.pack_scale = encode, pack_scale
        with bs.use_backend(cast="reference", cast_both="reference"):
            yield
    finally:
        _reference.encode, _reference.pack_scale = real_encode, real_pack


def found_by(arm: Arm) -> set[str]:
    """Names of the gates that reject an arm; a NaN is rejected."""
    product = arm.recipe.fprop
    cosine, norms = first_gradient(arm)
    with injected(arm):
        bytes_are_right = all(torch.equal(*pair) for pair in (_nearest(arm), _stochastic()))
        is_exact = product is None or outliers_db(arm.recipe) >= OUTLIERS_DB[product.a.format]
    passed = {
        "bytes": bytes_are_right,
        "product": is_exact,
        "gradient": cosine >= COSINE[arm.bits] and NORMS[0] <= norms <= NORMS[1],
    }
    return {gate for gate, has_passed in passed.items() if not has_passed}


def first_gradient(arm: Arm) -> tuple[float, float]:
    """Cosine to bf16's gradient on the first batch, and ratio of norms, over all matrices of the blocks."""
    mine, theirs = _gradient(arm), _baseline()
    return float(functional.cosine_similarity(mine, theirs, dim=0)), float(mine.norm() / theirs.norm())


@functools.cache
def _baseline() -> Tensor:
    return _gradient(None)


def _gradient(arm: Arm | None) -> Tensor:
    model = Transformer.build(MODEL, SEQUENCE)
    batch = load(DataConfig(sequence=SEQUENCE)).batch(0, 0, 0, 4, 1, SEQUENCE)
    if arm is None:
        model.loss(batch).backward()
    else:
        bs.quantize_(model, arm.recipe, lambda module, name: name.startswith("layers."), keep_first=0, keep_last=0)
        with injected(arm):
            model.loss(batch).backward()
    gradients = [each.grad for each in model.layers.parameters() if each.dim() == 2]
    return torch.cat([each.flatten().double() for each in gradients if each is not None])


def outliers_db(recipe: Recipe) -> float:
    """SQNR in dB of fprop of 256x2048 and 256x2048, with 16 channels 20 to 60 times as large as the rest."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, 2048, generator=generator) for _ in range(2))
    x[:, torch.randperm(2048, generator=generator)[:16]] *= 20 + 40 * torch.rand(16, generator=generator)
    layer = Linear(2048, 256, bias=False, recipe=recipe, name="outliers", rng=rng_state(0))
    layer.weight.data.copy_(w)
    with torch.no_grad():
        return float(sqnr_db(x.double() @ w.double().mT, layer(x).double()))


def _nearest(arm: Arm) -> tuple[Tensor, Tensor]:
    """Decoded and expected values of ties and values between, in four blocks with different scales."""
    operand = arm.recipe.operand("dgrad_w")
    assert operand is not None
    # a block's largest value is the element's largest, so that scales are exact; NVFP4's scales reach 448 = 7 * 64
    given, expected = TIES[arm.bits]
    scales = torch.tensor([[1.0, 4.0], [16.0, 64.0]]) * (7 if operand.format.startswith("nvfp4") else 1)
    scales = scales.repeat_interleave(128, 1).repeat_interleave(128, 0)
    x, y = (scales * torch.tensor(values).repeat(256, 64) for values in (given, expected))
    return bs.dequantize(bs.quantize(x, operand.format, scale_rule=operand.scale_rule)).float(), y


def _stochastic() -> tuple[Tensor, Tensor]:
    """Decoded and expected values of the worked example of stochastic rounding in docs/numerics.md."""
    rounding = Stochastic(rng_state(0x0123456789ABCDEF, 7), "model.layers.0.mlp.down_proj")
    x, y = torch.zeros(1, 32), torch.zeros(1, 32)
    x[0, :6], x[0, 31] = torch.tensor([2.75, 2.75, 2.75, 2.75, 0.3, -0.3]), 6.0
    y[0, :6], y[0, 31] = torch.tensor([3.0, 3.0, 2.0, 3.0, 0.5, -0.5]), 6.0
    spec = bs.CastSpec("mxfp4", "rceil", rounding, role="dgrad_dy")
    return bs.dequantize(bs.quantize_both(x, spec, "mxfp4")[0]).float(), y


WIDTH, HIDDEN, NOISE = 64, 128, 0.3


def regress(recipe: Recipe | str, steps: int, parts: int = 1) -> float:
    """Squared error on held-out pairs of a two-layer student that fits a noisy teacher of the same shape. The noise is
    the lowest possible loss, so relative gaps are meaningful.  parts: of each batch, whose gradients are added."""
    rng = rng_state(0)
    torch.manual_seed(0)
    student = nn.Sequential(
        Linear(WIDTH, HIDDEN, bias=False, recipe=recipe, name="first", rng=rng),
        nn.GELU(),
        Linear(HIDDEN, WIDTH, bias=False, recipe=recipe, name="second", rng=rng),
    )
    optimizer = torch.optim.Adam(student.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        for x, y in zip(*(each.chunk(parts) for each in _pairs(step)), strict=True):
            (functional.mse_loss(student(x.bfloat16()).float(), y) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        rng[1] += 1
    with torch.no_grad():
        held_out = [_pairs((1 << 40) + place) for place in range(4)]
        return sum(float(functional.mse_loss(student(x.bfloat16()).float(), y)) for x, y in held_out) / 4


def _pairs(seed: int) -> tuple[Tensor, Tensor]:
    """256 inputs and noisy outputs of the teacher, a function of the seed."""
    generator, teacher = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(0)
    x, noise = (torch.randn(256, WIDTH, generator=generator) for _ in range(2))
    first = torch.randn(WIDTH, HIDDEN, generator=teacher) / WIDTH**0.5
    second = torch.randn(HIDDEN, WIDTH, generator=teacher) / HIDDEN**0.5
    return x, functional.gelu(x @ first) @ second + NOISE * noise
