"""Rows of the roofline: for each layer and recipe the least time, the speedup under two roofs, and the measured one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..autograd.recipe import Recipe, get_recipe
from ..roofline import BF16, Ceilings, LinearCost, Use, engine_for, linear_cost, speedup, swiglu_cost
from ..roofline.advice import CostOf
from .linears import BASELINE, Layer, Measured

COSTS: Mapping[str, CostOf] = {"linear": linear_cost, "mlp": swiglu_cost}


def cost_of(what: str, experts: int = 1) -> CostOf:
    """The cost of a linear layer, of an MLP, or of so many experts, whose tokens are the rows of all of them."""
    return functools.partial(swiglu_cost, experts=experts) if what == "experts" else COSTS[what]


@dataclass(frozen=True)
class Roofs:
    """main: what speaks; the measured one where there is one.  nominal: the specification, None if that is main or
    not known."""

    main: Ceilings
    nominal: Ceilings | None = None


@dataclass(frozen=True)
class RoofRow:
    """cost: under the main roof.  roof, nominal: predicted speedups.  us, measured: time and speedup that were seen."""

    layer: Layer
    recipe: str
    cost: LinearCost
    roof: float
    nominal: float | None
    us: float | None = None
    measured: float | None = None

    @property
    def share(self) -> float | None:
        """Of the main roof's speedup."""
        return None if self.measured is None else self.measured / self.roof

    @property
    def nominal_share(self) -> float | None:
        """Of the nominal roof's speedup."""
        return None if self.measured is None or self.nominal is None else self.measured / self.nominal

    @property
    def casting(self) -> float:
        """The share of the time in steps that multiply nothing."""
        return sum(step.seconds for step in self.cost.steps if not step.flops) / self.cost.seconds


def rows_of(
    layers: Sequence[Layer],
    tokens: int,
    recipes: Sequence[Recipe],
    roofs: Roofs,
    use: Use,
    cost: CostOf = linear_cost,
    seen: Iterable[Measured] = (),
) -> list[RoofRow]:
    """bf16 first, then the recipes, for each layer."""
    times = {(row.layer, row.recipe): row.us for row in seen if row.fits(tokens, use)}

    def predicted(layer: Layer, recipe: Recipe, roof: Ceilings) -> float:
        low, high = (cost(tokens, *layer, formats, roof, use) for formats in (recipe.formats(), BF16))
        return speedup(low, high)

    found: list[RoofRow] = []
    for layer in layers:
        for recipe in (get_recipe(BASELINE), *recipes):
            us, baseline = times.get((layer, recipe.name)), times.get((layer, BASELINE))
            found.append(
                RoofRow(
                    layer,
                    recipe.name,
                    cost(tokens, *layer, recipe.formats(), roofs.main, use),
                    predicted(layer, recipe, roofs.main),
                    None if roofs.nominal is None else predicted(layer, recipe, roofs.nominal),
                    us,
                    None if us is None or baseline is None else baseline / us,
                )
            )
    return found


def notes_of(recipes: Iterable[Recipe], ceilings: Ceilings) -> list[str]:
    """What the machine does with each recipe's products where that is not what one hopes for."""
    pairs = {"fprop": ("fprop_x", "fprop_w"), "dgrad": ("dgrad_dy", "dgrad_w"), "wgrad": ("wgrad_dy", "wgrad_x")}
    found: list[str] = []
    for recipe in recipes:
        formats = recipe.formats()
        said: dict[str, list[str]] = {}
        for product, (a, b) in pairs.items():
            note = engine_for(ceilings.architecture, formats[a], formats[b]).note
            if note:
                said.setdefault(note, []).append(product)
        for note, products in said.items():
            which = "" if len(products) == len(pairs) else f" {' and '.join(products)}"
            found.append(f"{recipe.name}{which} on {ceilings.architecture.capitalize()}: {note}")
    return found
