"""Layers with a recipe, and the conversion of models to them."""

from .convert import advance_, quantize_, set_step_, unquantize_
from .experts import GroupedExperts, GroupedLinear
from .linear import Linear
from .mlp import SwiGLU
from .moe import MoE
from .report import ConversionReport

__all__ = [
    "ConversionReport",
    "GroupedExperts",
    "GroupedLinear",
    "Linear",
    "MoE",
    "SwiGLU",
    "advance_",
    "quantize_",
    "set_step_",
    "unquantize_",
]
