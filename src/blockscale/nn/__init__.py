"""Layers that train by a recipe, and the conversion of models to them."""

from .linear import Linear
from .mlp import SwiGLU

__all__ = ["Linear", "SwiGLU"]
