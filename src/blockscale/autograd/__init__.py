"""Autograd, once: recipes, and the functions that train with them. Everything below knows nothing of gradients."""

from .recipe import RECIPES, Operand, Product, Recipe, get_recipe

__all__ = ["RECIPES", "Operand", "Product", "Recipe", "get_recipe"]
