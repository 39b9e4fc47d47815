"""Which layers should stay in high precision for a given loss budget, and what that costs in speed.

Two things are predicted for each layer, from measured numerics:

    gap       the loss that its forward noise costs, relative to the loss (`LayerNumerics.damage`)
    gradient  noise of its dgrad and wgrad over the energy of the whole model's gradient: its share of that energy,
              times the noise-to-signal ratio of both products

Both add up over layers, whose noises are independent. While a sum is over its budget the layer with the most of what
is over it is kept in high precision. Guesses for a ranking, not promises: docs/diagnostics.md says what they leave out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from ..errors import OptionError, message
from ..formats.stochastic import module_name
from ..nn import ConversionReport
from ..nn.convert import ROOT, FilterFn
from ..nn.report import MACHINE, TOKENS, Skipped
from .layers import LayerNumerics, Numerics

# of the loss: what FP8 recipes are held to
BUDGET = 0.0025
# noise over the energy of the gradient; training is reported to stall at a third (Chmiel et al. 2025, arXiv:2505.19115)
GRADIENT_BUDGET = 0.1
# samples of a run that count: early ones say little about a trained model
LAST = 8
KIND = "blockscale advice"


@dataclass(frozen=True)
class Ranked:
    """One layer.  gap, gradient: see above.  kept: whether it should stay in high precision.  says: the worst of it."""

    layer: str
    gap: float
    gradient: float
    kept: bool
    says: str


@dataclass(frozen=True)
class Advice:
    """What to do.

    ranked: measured layers, worst first.  low: layers to convert, which `filter_fn` says yes to.  gaps, gradients,
    speedups: with all layers in low precision, and as advised; speedups are those of all linear layers over bf16's, by
    the roofline.  unmeasured: layers that nothing is known of; they stay as they are.
    """

    recipe: str
    budget: float
    gradient_budget: float
    ranked: tuple[Ranked, ...]
    low: tuple[str, ...]
    gaps: tuple[float, float]
    gradients: tuple[float, float]
    speedups: tuple[float, float]
    unmeasured: tuple[str, ...] = ()

    @property
    def keep(self) -> tuple[str, ...]:
        """Layers that should stay in high precision, worst first."""
        return tuple(each.layer for each in self.ranked if each.kept)

    @property
    def filter_fn(self) -> FilterFn:
        """For `quantize_`."""
        return _Filter(self.low)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"kind": KIND, **asdict(self), "keep": list(self.keep)}

    def save(self, path: str | Path) -> None:
        """For `load_filter`, and for `blockscale train --keep-file`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


@dataclass(frozen=True)
class _Filter:
    """Converts layers by name; of experts that are several weights all or none."""

    low: tuple[str, ...]

    def __call__(self, module: nn.Module, name: str) -> bool:
        place = name or ROOT
        return any(each == place or each.startswith(f"{place}.") for each in self.low)


def load_filter(path: str | Path, model: nn.Module | None = None) -> FilterFn:
    """The filter of an advice that was saved: `quantize_(model, recipe, filter_fn=load_filter("advice.json"))`.

    model: raise where it has none of some layer that the advice names; it was given for another model then.
    """
    place = Path(path)
    try:
        row = json.loads(place.read_text())
        if row["kind"] != KIND:
            raise KeyError(row["kind"])
        found = _Filter(tuple(row["low"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            message(
                f"{place}: {type(error).__name__}: {error}",
                rule="a filter is read from a file that blockscale advise wrote",
                fix="blockscale advise out/run --out advice.json",
            )
        ) from error
    if model is not None:
        _check_names(place, [*row["low"], *row.get("keep", ())], model)
    return found


def _check_names(path: Path, names: Sequence[str], model: nn.Module) -> None:
    """Layers are modules, or weights of modules."""
    named = (name for each in (model.named_modules(), model.named_parameters()) for name, _ in each)
    there = {module_name(name) or ROOT for name in named}
    missing = [name for name in names if name not in there]
    if missing:
        raise OptionError(
            message(
                f"{path} names {missing[0]}, and {len(missing) - 1} more that this model does not have",
                rule="advice is for the model that was measured",
                fix="blockscale advise for this one",
            )
        )


def advise(
    report: ConversionReport,
    samples: Sequence[Numerics],
    *,
    budget: float = BUDGET,
    gradient_budget: float = GRADIENT_BUDGET,
    tokens: int = TOKENS,
    machine: str = MACHINE,
) -> Advice:
    """Advice for a model that was converted as the report says, from numerics that were measured on it.

    samples: the last ones count, in the mean, for the layers that the very last one has.  budget: accepted relative gap
    of the loss.  gradient_budget: accepted noise over the gradient's energy.  tokens, machine: what speed is predicted
    for.

    >>> import torch, blockscale as bs
    >>> from blockscale.diagnostics import sample
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    >>> report = bs.quantize_(model, "mxfp8", filter_fn=lambda module, name: True)
    >>> x, target = torch.randn(64, 64), torch.randint(64, (64,))
    >>> found = sample(model, lambda: torch.nn.functional.cross_entropy(model(x), target)).read()
    >>> advise(report, [found], budget=1.0).keep
    ()
    """
    _check(budget, gradient_budget, samples)
    last = {each.layer: each for each in samples[-1].layers}
    figures = {name: each for name, each in _figures(samples[-LAST:]).items() if name in last}
    budgets = (budget, gradient_budget)
    kept: list[str] = []
    while True:
        left = [name for name in figures if name not in kept]
        over = [at for at in (0, 1) if sum(figures[name][at] for name in left) > budgets[at]]
        if not over:
            break
        kept.append(max(left, key=lambda name: sum(figures[name][at] / budgets[at] for at in over)))
    order = sorted(figures, key=lambda name: -sum(figures[name][at] / budgets[at] for at in (0, 1)))
    ranked = tuple(Ranked(name, *figures[name], name in kept, worst(last[name])) for name in order)
    advised = _without(report, kept)
    speedups = (report.predicted_speedup(tokens, machine).linears, advised.predicted_speedup(tokens, machine).linears)
    sums = [(sum(each[at] for each in figures.values()), sum(figures[name][at] for name in left)) for at in (0, 1)]
    low = tuple(each.name for each in advised.converted)
    unmeasured = tuple(name for name in low if name not in figures)
    return Advice(report.recipe.name, budget, gradient_budget, ranked, low, sums[0], sums[1], speedups, unmeasured)


def worst(layer: LayerNumerics) -> str:
    """The product of a layer with the most noise, and what is lost outright."""
    products = {name: value for name in ("fprop", "dgrad", "wgrad") if (value := getattr(layer, name)) is not None}
    words = [f"{name} {products[name]:.1f} dB" for name in sorted(products, key=lambda name: products[name])[:1]]
    words += [f"{value:.1%} {what}" for what in ("clipped", "underflow") if (value := getattr(layer, what)) > 0.01]
    seen = [(each.fprop, at) for at, each in enumerate(layer.experts) if each.fprop is not None]
    words += [f"worst expert {min(seen)[1]}: fprop {min(seen)[0]:.1f} dB"] if seen else []
    return ", ".join(words)


def _figures(samples: Sequence[Numerics]) -> dict[str, tuple[float, float]]:
    """gap and gradient of each layer, in the mean over samples."""
    found: dict[str, list[tuple[float, float]]] = {}
    for each in samples:
        total = sum(layer.gradient**2 for layer in each.layers)
        for layer in each.layers:
            gradient = layer.gradient**2 / total * (_ratio(layer.dgrad) + _ratio(layer.wgrad)) if total else 0.0
            gap = layer.damage / each.loss if each.loss > 0 else 0.0
            found.setdefault(layer.layer, []).append((_number(gap), _number(gradient)))
    return {
        name: (fmean(gap for gap, _ in values), fmean(noise for _, noise in values)) for name, values in found.items()
    }


def _ratio(decibels: float | None) -> float:
    """Energy of noise over that of the signal."""
    return 0.0 if decibels is None else 10 ** (-decibels / 10)


def _number(value: float) -> float:
    """A layer whose figures are no number is the worst there is."""
    return value if math.isfinite(value) else 1e9


def _without(report: ConversionReport, kept: Sequence[str]) -> ConversionReport:
    """What a conversion would report that leaves these layers as they are."""
    low = tuple(each for each in report.converted if each.name not in kept)
    stay = tuple(
        Skipped(each.name, "advised", *each[1:4], each.experts, each.active)
        for each in report.converted
        if each.name in kept
    )
    return replace(report, converted=low, skipped=(*report.skipped, *stay))


def _check(budget: float, gradient_budget: float, samples: Sequence[Numerics]) -> None:
    for name, value in (("budget", budget), ("gradient_budget", gradient_budget)):
        if not 0 < value < math.inf:
            raise OptionError(message(f"{name}={value}", rule="it is a share above zero", fix=f"pass {name}=0.01"))
    if not samples or not samples[-1].layers:
        raise OptionError(
            message(
                "no measured layer",
                rule="advice is about layers in low precision, and all of these stay in high precision",
                fix="take a recipe other than bf16, and keep_first and keep_last that leave it some blocks",
            )
        )
    loss = next((each.loss for each in samples[-LAST:] if not each.loss > 0), None)
    if loss is not None:
        raise OptionError(
            message(
                f"a sample with a loss of {loss}",
                rule="a budget is a share of the loss, which is above zero",
                fix="take samples of a loss such as the cross entropy",
            )
        )
