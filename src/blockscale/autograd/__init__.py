"""Recipes, and the differentiable functions that train with them. All other packages are without autograd."""

from .activation import Activation, activation
from .grouped import grouped_linear, grouped_swiglu_mlp
from .linear import linear
from .mlp import swiglu_mlp
from .recipe import RECIPES, Operand, Product, Recipe, get_recipe
from .routing import combine, permute, route
from .weights import attach, invalidate, refresh_weights_

__all__ = [
    "RECIPES",
    "Activation",
    "Operand",
    "Product",
    "Recipe",
    "activation",
    "attach",
    "combine",
    "get_recipe",
    "grouped_linear",
    "grouped_swiglu_mlp",
    "invalidate",
    "linear",
    "permute",
    "refresh_weights_",
    "route",
    "swiglu_mlp",
]
