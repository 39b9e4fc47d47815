"""Rows of the roofline: for each layer and recipe the lower bound of the time, speedups by two rooflines, measured."""

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
    """Cost function of a linear layer, of an MLP, or of experts; tokens of experts are the rows of all of them."""
    return functools.partial(swiglu_cost, experts=experts) if what == "experts" else COSTS[what]


@dataclass(frozen=True)
class Roofs:
    """Ceilings of a machine.  main: measured if available, else the specification.  nominal: the specification; None if
    it is main or unknown."""

    main: Ceilings
    nominal: Ceilings | None = None


@dataclass(frozen=True)
class RoofRow:
    """One layer and recipe.  cost: by the main ceilings.  roof, nominal: predicted speedups.  us, measured: measured
    time and speedup."""

    layer: Layer
    recipe: str
    cost: LinearCost
    roof: float
    nominal: float | None
    us: float | None = None
    measured: float | None = None

    @property
    def share(self) -> float | None:
        """Measured speedup as a share of the main prediction."""
        return None if self.measured is None else self.measured / self.roof

    @property
    def nominal_share(self) -> float | None:
        """Measured speedup as a share of the nominal prediction."""
        return None if self.measured is None or self.nominal is None else self.measured / self.nominal

    @property
    def casting(self) -> float:
        """Share of the predicted time in steps without FLOPs, such as casts."""
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
    """Rows of each layer: bf16 first, then the recipes.  seen: measured times."""
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
    """Notes on GEMMs of a recipe that this architecture does not run on matching tensor cores."""
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
