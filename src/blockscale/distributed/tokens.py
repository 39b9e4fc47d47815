"""Tokens that are sharded over ranks: where they lie, and whether their column operands can be gathered."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from ..autograd.operands import NeedsGrad
from ..autograd.recipe import Recipe
from ..casts.requantize import keeps_values
from ..errors import AxisError, OptionError, ShapeError, ShardingError, refuse
from ..formats.checks import in_words
from ..formats.spec import get_format
from .collectives import Tokens

Wgrad = Literal["owner", "requantized"]
WGRADS: tuple[Wgrad, ...] = ("owner", "requantized")


def with_size(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """Leading axes of x [.., K], one of them with another size."""
    return (*x.shape[:dim], size, *x.shape[dim + 1 : -1])


def tokens_of(x: Tensor, name: str, dim: int, parts: int) -> Tokens:
    """Tokens of a rank, of x [.., K] that has those of `parts` ranks."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not 0 <= dim < x.dim() - 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"{name}={in_words(dim)} for x {tuple(x.shape)}",
            rule="tokens lie along an axis before the last, counted from the front",
            fix=f"pass 0 to {x.dim() - 2}" if x.dim() > 1 else "pass x with rows",
            error=AxisError,
        )
    if x.shape[dim] % parts or not x.numel():
        refuse(
            f"x {tuple(x.shape)} with {x.shape[dim]} tokens along axis {dim} for {parts} ranks",
            rule="all ranks have as many tokens, and at least one",
            fix=f"pad the axis to a multiple of {parts}",
            error=ShapeError,
        )
    return Tokens(math.prod(x.shape[:dim]), math.prod(x.shape[dim:-1]) // parts)


def check_columns(recipe: Recipe, roles: tuple[str, str], tokens: Tokens, wgrad: Wgrad, needs: NeedsGrad) -> None:
    """Raise unless column operands of tokens can be gathered in whole blocks, or cast from rows.  roles: of the rows
    that travel, and of the columns."""
    row, column = (recipe.operand(role) for role in roles)
    if wgrad == "requantized" and recipe.is_quantized:
        kept = row is not None and column is not None and (recipe.saves == "operand" or roles[0] != "fprop_x")
        for each in (row, column):
            kept = kept and each is not None and not each.stochastic and keeps_values(each.format, each.scale_rule)
        if not kept:
            refuse(
                f'wgrad="requantized" for recipe {recipe.name!r} with {roles[0]} {row}, {roles[1]} {column} and '
                f"saves={recipe.saves!r}",
                rule="rows keep their values as columns with 8-bit elements, power-of-two scales that clip nothing and "
                "rounding to nearest, and the rows of an input are saved as an operand",
                fix='use wgrad="owner", or a recipe such as mxfp8',
                error=OptionError,
            )
    elif needs.weight and column is not None:
        block = get_format(column.format).block[1]
        if tokens.inner % block:
            refuse(
                f"{tokens.inner} contiguous tokens a rank for recipe {recipe.name!r}",
                rule=f"{column.format} has a scale for every {block} tokens of a column, and a rank has whole blocks",
                fix=f"pad the sequence so that a rank has a multiple of {block} tokens, or use wgrad='requantized' "
                "with a recipe whose scales are powers of two",
                error=ShardingError,
            )
