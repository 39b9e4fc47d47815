"""Autograd, once: recipes, and the functions that train with them. Everything below knows nothing of gradients."""

from .activation import Activation, activation
from .linear import linear
from .mlp import swiglu_mlp
from .recipe import RECIPES, Operand, Product, Recipe, get_recipe
from .weights import attach, invalidate, refresh_weights_

__all__ = [
    "RECIPES",
    "Activation",
    "Operand",
    "Product",
    "Recipe",
    "activation",
    "attach",
    "get_recipe",
    "invalidate",
    "linear",
    "refresh_weights_",
    "swiglu_mlp",
]
