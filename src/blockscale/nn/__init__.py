"""Layers that train by a recipe, and the conversion of models to them."""

from .convert import advance_, quantize_, set_step_, unquantize_
from .linear import Linear
from .mlp import SwiGLU
from .report import ConversionReport

__all__ = ["ConversionReport", "Linear", "SwiGLU", "advance_", "quantize_", "set_step_", "unquantize_"]
