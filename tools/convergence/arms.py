"""Arms of the comparison: the baseline, the null run (fp32 GEMMs), the recipes, and faults that some gate has to find.

A fault is injected in one place, the reference cast: its rounding or its scales are replaced while the arm runs. Layer,
recipe and GEMMs are the library's own. A faulty rounding is given as the random word of every element, since stochastic
rounding goes up iff the word is below the fraction times 2^32:

    0xFFFFFFFF  never: toward zero          0x00000000  always: away from zero
    0x7FFFFFFF  from a half on: ties away   any other word: a stuck random generator
"""

from __future__ import annotations

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
from blockscale.nn import Linear

from .model import Edge, MakeLinear

BASELINE, NULL = "bf16", "null"


@dataclass(frozen=True)
class Fault:
    """A fault of the cast.  found_by: gate that must find it.  nearest, stochastic: word that replaces rounding to
    nearest, or the random words of stochastic rounding.  axis: scales are written in the order of the other axis."""

    found_by: str
    nearest: int | None = None
    stochastic: int | None = None
    axis: bool = False


@dataclass(frozen=True)
class Arm:
    """One arm.  recipe: None for unquantized layers of the harness.  bound: largest gap to bf16 that passes."""

    name: str
    says: str
    recipe: Recipe | None = None
    bound: float | None = None
    fault: Fault | None = None

    @property
    def bits(self) -> int:
        """Bits of an element; gates are looser for 4."""
        product = None if self.recipe is None else self.recipe.wgrad
        return 16 if product is None else 4 if "fp4" in product.a.format else 8

    def make_linear(self, rng: Tensor) -> MakeLinear:
        """Factory of this arm's layers.  rng: seed and tick, shared by all layers."""

        def make(inputs: int, outputs: int, name: str) -> nn.Module:
            if self.recipe is None:
                layer = HighPrecision(inputs, outputs, torch.float32 if self.name == NULL else torch.bfloat16)
            else:
                layer = Linear(inputs, outputs, bias=False, recipe=self.recipe, name=name, rng=rng)
            return Edge(layer, rounds=self.name != NULL)

        return make

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context with the fault injected, if any; casts then use the reference backend."""
        if self.fault is None:
            yield
            return
        names = ("encode", "pack_scale")
        real = {name: getattr(_reference, name) for name in names}
        fault = self.fault

        def encode(v: Tensor, element: Any, words: Tensor | None = None) -> Tensor:
            word = fault.nearest if words is None else fault.stochastic
            return real["encode"](v, element, words if word is None else torch.full_like(v, word, dtype=torch.int64))

        def pack_scale(spec: Any, scale: Tensor, *rest: Any) -> Tensor:
            return real["pack_scale"](spec, scale.mT.reshape(scale.shape) if fault.axis else scale, *rest)

        try:
            _reference.encode, _reference.pack_scale = encode, pack_scale
            with bs.use_backend(cast="reference", cast_both="reference"):
                yield
        finally:
            for name in names:
                setattr(_reference, name, real[name])


class HighPrecision(nn.Linear):
    """Layer of the baseline and the null run: operands rounded to a dtype, fp32 accumulation, on every device."""

    def __init__(self, inputs: int, outputs: int, operands: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.operands = operands

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return functional.linear(input, self.weight.to(self.operands).to(input.dtype))


def _arms() -> Iterator[Arm]:
    yield Arm(BASELINE, "bf16 products: what the others are compared with")
    yield Arm(NULL, "fp32 products and no rounding between layers: what a difference that means nothing looks like")
    yield Arm("mxfp8", "all three products", get_recipe("mxfp8"), bound=0.004)
    yield Arm("fp8_blockwise", "all three products", get_recipe("fp8_blockwise"), bound=0.008)
    yield Arm("nvfp4", "all three products", get_recipe("nvfp4"), bound=0.03)
    yield Arm("mxfp4", "all three products", get_recipe("mxfp4"), bound=0.05)
    backward = get_recipe("nvfp4").replace(name="nvfp4_backward", fprop=None)
    yield Arm("nvfp4_backward", "forward in bf16: most of the gap should go", backward, bound=0.03)

    mxfp8, mxfp4 = get_recipe("mxfp8"), get_recipe("mxfp4")
    floor = Operand("mxfp8_e4m3", "floor")
    floored = mxfp8.replace(name="floor", **dict.fromkeys(("fprop", "dgrad", "wgrad"), Product(floor, floor)))
    yield Arm("wrong_axis", "mxfp8, scales in the order of the other axis", mxfp8, 0.004, Fault("gradient", axis=True))
    yield Arm("truncation", "mxfp8, toward zero", mxfp8, 0.004, Fault("gradient", nearest=0xFFFFFFFF))
    yield Arm("ties_away", "mxfp8, ties away from zero", mxfp8, 0.004, Fault("bytes", nearest=0x7FFFFFFF))
    yield Arm("floor", "mxfp8, scales that let the largest values clip", floored, 0.004, Fault("product"))
    yield Arm("word_zero", "mxfp4, every random word is 0", mxfp4, 0.05, Fault("gradient", stochastic=0))
    yield Arm("word_stuck", "mxfp4, every random word is the first", mxfp4, 0.05, Fault("bytes", stochastic=0x6627E8D5))


ARMS = {arm.name: arm for arm in _arms()}
FAULTS = tuple(name for name, arm in ARMS.items() if arm.fault is not None)
HONEST = tuple(name for name in ARMS if name not in FAULTS)
