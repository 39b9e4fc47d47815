"""Layers that train by a recipe, and the conversion of models to them."""

from .linear import Linear

__all__ = ["Linear"]
