"""Recipes: which format each operand of a layer's three products has, as plain data.

    fprop  Y  = X  @ W.mT   contracts input features
    dgrad  dX = dY @ W      contracts output features
    wgrad  dW = dY.mT @ X   contracts tokens

A product that is None is unquantized. Named recipes are in `RECIPES`; `Recipe.replace` makes others. docs/recipes.md
has the reasons for the choices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import check_name, refuse
from ..formats.cast_spec import CastSpec
from ..formats.checks import check_flag, check_int, check_text, in_words
from ..formats.spec import check_pair, get_format
from ..formats.stochastic import ROLES, Stochastic
from ..names import PRODUCTS as PRODUCTS
from ..names import spared_products

WeightCast = Literal["forward", "twice", "step"]
WEIGHT_CASTS: tuple[WeightCast, ...] = ("forward", "twice", "step")


@dataclass(frozen=True)
class Operand:
    """Cast options of one operand.

    format: one of the ten names.  scale_rule: None takes the format's default.  stochastic: stochastic rounding,
    which is unbiased; gradients only.  hadamard: True or a sign mask, the same for both operands of a product.
    """

    format: str
    scale_rule: str | None = None
    stochastic: bool = False
    hadamard: bool | int = False

    def spec(
        self, role: str, rounding: Stochastic | None, layout: str | None = None, *, grouped: bool = False
    ) -> CastSpec:
        """The cast of this operand for a role.  rounding: of a layer with stochastic rounding.  grouped: for experts,
        each of which has its own tensor scale where the format has one, so that no expert depends on another."""
        chosen = rounding if self.stochastic and rounding is not None else "nearest"
        amax = "group" if grouped and get_format(self.format).family == "nvfp4" else "tensor"
        return CastSpec(self.format, self.scale_rule, chosen, self.hadamard, role, amax, scale_layout=layout)

    def __str__(self) -> str:
        words = [self.format, self.scale_rule or get_format(self.format).default_rule(stochastic=self.stochastic)]
        words += ["hadamard"] if self.hadamard is not False else []
        words += ["stochastic"] if self.stochastic else []
        return " ".join(words)


# role -> product and side of its operand: 0 for a, 1 for b
PLACES = {role: (role.partition("_")[0], side % 2) for side, role in enumerate(ROLES)}


@dataclass(frozen=True)
class Product:
    """The two operands of a product.  a: X in fprop, dY in dgrad and wgrad.  b: W in fprop and dgrad, X in wgrad."""

    a: Operand
    b: Operand

    def __str__(self) -> str:
        return f"{self.a} @ {self.b}"


@dataclass(frozen=True)
class Recipe:
    """Formats of a layer's three products, and what is saved for backward.

    fprop, dgrad, wgrad: None is unquantized.  until: optimizer step from which on a product is unquantized, such as
    {"fprop": 8000}.  since: step before which all products are unquantized, such as the end of a warm-up; see `at`.
    saves: what of an input is saved for backward: "operand" (wgrad's 8-bit or 4-bit operand, cast in the forward from
    the same read) or "source" (the input itself, cast in the backward: for inputs that are in memory anyway).
    weight_cast: "forward" (both operands of the weight are cast in the forward, dgrad's is saved), "twice" (one is cast
    in the forward, one in the backward, none is saved) or "step" (once per optimizer step, see docs/weights.md).

    is_quantized: whether any product is quantized.  stochastic: whether any operand has stochastic rounding, so that a
    layer needs a name and a state.

    >>> print(get_recipe("fp8_blockwise").fprop)
    fp8_1x128 fp32 @ fp8_128x128 fp32
    """

    name: str
    fprop: Product | None = None
    dgrad: Product | None = None
    wgrad: Product | None = None
    until: Mapping[str, int] = field(default_factory=dict)
    saves: Literal["operand", "source"] = "operand"
    weight_cast: WeightCast = "forward"
    since: int = 0
    # computed once: every call of a layer reads them, and compiled code cannot compute them
    is_quantized: bool = field(init=False, repr=False, compare=False)
    stochastic: bool = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_text(self.name, "name", "mine")
        for name in PRODUCTS:
            product = getattr(self, name)
            if product is not None:
                _check_product(name, product)
        _check_until(self.until)
        object.__setattr__(self, "until", dict(self.until))  # a copy: the caller may change its own
        _check_since(self.since)
        check_name(self.saves, ("operand", "source"), "saved input")
        check_name(self.weight_cast, WEIGHT_CASTS, "weight cast")
        products = (self.fprop, self.dgrad, self.wgrad)
        operands = [operand for operand in map(self.operand, ROLES) if operand is not None]
        fields = (self.name, *products, tuple(sorted(self.until.items())), self.saves, self.weight_cast, self.since)
        object.__setattr__(self, "is_quantized", bool(operands))
        object.__setattr__(self, "stochastic", any(operand.stochastic for operand in operands))
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # constructed anew when unpickled: hashes of strings differ between processes
        return Recipe, tuple(getattr(self, each.name) for each in dataclasses.fields(self) if each.init)

    def operand(self, role: str) -> Operand | None:
        """The operand of a role, such as "dgrad_dy"; None if its product is unquantized."""
        if not isinstance(role, str) or role not in PLACES:  # pyright: ignore[reportUnnecessaryIsInstance]
            check_name(role, ROLES, "role")
        name, side = PLACES[role]
        product: Product | None = getattr(self, name)
        return None if product is None else product.b if side else product.a

    def formats(self) -> dict[str, str | None]:
        """The format of each role, None if unquantized.

        >>> get_recipe("mxfp8_wgrad_bf16").formats()["wgrad_x"] is None
        True
        """
        operands = ((role, self.operand(role)) for role in ROLES)
        return {role: None if operand is None else operand.format for role, operand in operands}

    def at(self, step: int) -> Recipe:
        """The recipe at an optimizer step: without the products that `since` or `until` leave unquantized there.

        >>> recipe = get_recipe("nvfp4").replace(until={"fprop": 100}, since=10)
        >>> [recipe.at(step).fprop is None for step in (9, 10, 99, 100)]
        [True, False, False, True]
        """
        check_int(step, "step", "steps are counted from 0")
        ends = dict.fromkeys(PRODUCTS, 0) if step < self.since else self.until
        over = {name: None for name, end in ends.items() if step >= end and getattr(self, name) is not None}
        return dataclasses.replace(self, **over) if over else self

    def replace(self, **changes: Any) -> Recipe:
        """The same recipe with other fields. Without a new name, "*" is appended to the old one."""
        known = [each.name for each in dataclasses.fields(self) if each.init]
        for name in changes:
            check_name(name, known, "field of a recipe")
        return dataclasses.replace(self, **({"name": f"{self.name}*"} | changes))

    def with_weights(self, format: str) -> Recipe:
        """The same recipe with weights in another format, such as mxfp8_e4m3_128x128, which Hopper multiplies natively.

        >>> get_recipe("mxfp8").with_weights("mxfp8_e4m3_128x128").name
        'mxfp8, weights mxfp8_e4m3_128x128'
        """
        get_format(format)
        changed = {
            name: Product(product.a, Operand(format))
            for name, product in (("fprop", self.fprop), ("dgrad", self.dgrad))
            if product is not None
        }
        return self.replace(name=f"{self.name}, weights {format}", **changed)

    def recomputed(self) -> Recipe:
        """The same recipe, bit by bit, for compiled layers under selective recomputation: each operand of an input or a
        weight is cast where it is multiplied. A compiler cannot drop one result of a cast with two: both operands would
        be cast in the forward, and both again in the backward.

        >>> found = get_recipe("fp8_blockwise").recomputed()
        >>> found.name, found.saves, found.weight_cast
        ('fp8_blockwise', 'source', 'twice')
        """
        weight_cast = "twice" if self.weight_cast == "forward" else self.weight_cast
        return self.replace(name=self.name, saves="source", weight_cast=weight_cast)

    def __str__(self) -> str:
        products = (f"{name} {getattr(self, name) or 'unquantized'}" for name in PRODUCTS)
        return f"{self.name}: {'; '.join(products)}{f'; from step {self.since} on' if self.since else ''}"


def _check_until(until: object) -> None:
    if not isinstance(until, Mapping):
        rule = "it maps a product to the step from which on it is unquantized"
        refuse(f"until={in_words(until)}", rule, fix="pass a mapping such as {'fprop': 8000}")
    for name, step in until.items():
        check_name(name, PRODUCTS, "product")
        if not isinstance(step, int) or step < 0:
            rule = "a product changes at a step, counted from 0"
            refuse(f"until={{{name!r}: {step!r}}}", rule, fix="pass an int of 0 or more")


def _check_since(since: object) -> None:
    if not isinstance(since, int) or isinstance(since, bool) or since < 0:
        rule = "quantization begins at a step, counted from 0"
        refuse(f"since={in_words(since)}", rule, fix="pass an int of 0 or more")


def _check_product(name: str, product: Product) -> None:
    if not isinstance(product, Product):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "a product has two operands, or is None and unquantized"
        fix = "pass Product(Operand(format), Operand(format))"
        refuse(f"{name}={in_words(product)}", rule, fix)
    a, b = product.a, product.b
    for operand in (a, b):
        if not isinstance(operand, Operand):  # pyright: ignore[reportUnnecessaryIsInstance]
            rule, fix = "an operand says how it is cast", "pass Product(Operand(format), Operand(format))"
            refuse(f"{name} with an operand that is {in_words(operand)}", rule, fix)
        check_flag(operand.stochastic, "stochastic")
        operand.spec("fprop_x", None).plan()  # raises for options that the format lacks
    check_pair(a.format, b.format)
    if a.hadamard != b.hadamard:
        refuse(
            f"{name} with hadamard={a.hadamard} and {b.hadamard}",
            rule="a rotation cancels only when both operands have the same one",
            fix="give both operands the same hadamard option",
        )
    roles = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[name]
    for operand, what in zip((a, b), roles, strict=True):
        if operand.stochastic and what != "dy":
            refuse(
                f"stochastic rounding of {name}'s {what}",
                rule="stochastic rounding is for gradients: on activations and weights it makes training diverge",
                fix="round gradients stochastically, and activations and weights to nearest",
            )
        if get_format(operand.format).is_2d and what != "w":
            refuse(
                f"{operand.format} for {name}'s {what}",
                rule="2-D blocks are for weights: a block over several tokens would share one scale among them",
                fix="use the format with 1-D blocks",
            )


def _dgrad_as_fprop(name: str, fprop: Product, wgrad: Product | None) -> Recipe:
    """A recipe whose dgrad has the formats of fprop, the gradient in place of the activation."""
    return Recipe(name, fprop, fprop, wgrad)


_FP8, _FP8_WEIGHT = Operand("fp8_1x128"), Operand("fp8_128x128")
_FP8_POW2, _FP8_POW2_WEIGHT = Operand("fp8_1x128", "pow2"), Operand("fp8_128x128", "pow2")
_MXFP8, _MXFP8_WEIGHT = Operand("mxfp8_e4m3"), Operand("mxfp8_e4m3_128x128")
_MXFP6 = Operand("mxfp6_e2m3")
_MXFP4 = Operand("mxfp4")
_NVFP4, _NVFP4_WEIGHT = Operand("nvfp4"), Operand("nvfp4_16x16")

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16"),
        _dgrad_as_fprop("fp8_blockwise", Product(_FP8, _FP8_WEIGHT), Product(_FP8, _FP8)),
        _dgrad_as_fprop("fp8_blockwise_pow2", Product(_FP8_POW2, _FP8_POW2_WEIGHT), Product(_FP8_POW2, _FP8_POW2)),
        _dgrad_as_fprop("mxfp8", Product(_MXFP8, _MXFP8), Product(_MXFP8, _MXFP8)),
        _dgrad_as_fprop("mxfp8_128x128", Product(_MXFP8, _MXFP8_WEIGHT), Product(_MXFP8, _MXFP8)),
        _dgrad_as_fprop("mxfp8_wgrad_bf16", Product(_MXFP8, _MXFP8), None),
        _dgrad_as_fprop("mxfp6", Product(_MXFP6, _MXFP6), Product(_MXFP6, _MXFP6)),
        Recipe(
            "mxfp4",
            fprop=Product(_MXFP4, _MXFP4),
            dgrad=Product(Operand("mxfp4", stochastic=True), _MXFP4),
            wgrad=Product(Operand("mxfp4", stochastic=True, hadamard=True), Operand("mxfp4", hadamard=True)),
        ),
        Recipe(
            "nvfp4",
            fprop=Product(_NVFP4, _NVFP4_WEIGHT),
            dgrad=Product(Operand("nvfp4", "up", stochastic=True), _NVFP4_WEIGHT),
            wgrad=Product(Operand("nvfp4", "up", stochastic=True, hadamard=True), Operand("nvfp4", hadamard=True)),
        ),
    )
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name; a `Recipe` is returned as it is. A name may be followed by products to leave unquantized, such
    as `fp8_blockwise_wgrad_bf16`: comparing the two shows which product costs loss.

    >>> get_recipe("nvfp4").stochastic
    True
    >>> get_recipe("fp8_blockwise_fprop_dgrad_bf16").formats()["fprop_x"] is None
    True
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and (found := RECIPES.get(recipe) or _with_unquantized(recipe)):  # pyright: ignore[reportUnnecessaryIsInstance]
        return found
    check_name(recipe, RECIPES, "recipe")
    return RECIPES[recipe]


@functools.cache
def _with_unquantized(name: str) -> Recipe | None:
    """The recipe of a name that is followed by unquantized products; None for other names, or if all three follow."""
    found = spared_products(name, RECIPES)
    if found is None:
        return None
    recipe, spared = found
    return RECIPES[recipe].replace(name=name, **dict.fromkeys(spared))
