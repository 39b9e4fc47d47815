"""Which layers should stay unquantized for a given loss budget, and what that costs in speed.

Two things are predicted for each layer, from measured numerics:

    gap       increase of the loss by its forward noise, relative to the loss (`LayerNumerics.damage`)
    gradient  noise of its dgrad and wgrad over the energy of the whole model's gradient: its share of that energy,
              times the noise-to-signal ratio of both products

Both add up over layers, whose noises are independent. Layers stay unquantized until both sums are within their budgets
(`layer_selection.py` picks them so that little speed is lost). These are estimates for a ranking: docs/diagnostics.md
lists what they leave out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import option, refuse
from ..nn import ConversionReport
from ..nn.convert import FilterFn
from ..nn.report import MACHINE, TOKENS, Skipped
from .filters import KIND, ByName
from .layer_selection import NOT_FINITE, select_unquantized
from .layers import LayerNumerics, Numerics

# share of the loss; the bound for FP8 recipes
BUDGET = 0.0025
# noise over the energy of the gradient; training is reported to stall at a third (Chmiel et al. 2025, arXiv:2505.19115)
GRADIENT_BUDGET = 0.1
# samples that count at most, of the later half: early samples say little about a trained model
LAST = 8


@dataclass(frozen=True)
class Ranked:
    """One layer.

    gap, gradient: see above.  kept: whether it should stay unquantized.  says: its noisiest product, as text.  wins:
    seconds per step that quantizing it saves, by the roofline.
    """

    layer: str
    gap: float
    gradient: float
    kept: bool
    says: str
    wins: float = 0.0


@dataclass(frozen=True)
class Advice:
    """Which layers to quantize.

    ranked: measured layers, worst first.  low: layers to convert; `filter_fn` accepts them.  gaps, gradients, speedups:
    with all layers quantized, and as advised; speedups are those of all linear layers over bf16, by the roofline.
    unmeasured: converted layers without a measurement; gaps and gradients exclude them.  unmeasured_share: their share
    of the converted FLOPs.  others: linear layers that were never converted.
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
    unmeasured_share: float = 0.0
    others: tuple[str, ...] = ()

    @property
    def keep(self) -> tuple[str, ...]:
        """Layers that should stay unquantized, worst first."""
        return tuple(each.layer for each in self.ranked if each.kept)

    @property
    def filter_fn(self) -> FilterFn:
        """The filter to pass to `quantize_`."""
        return ByName(self.low)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"kind": KIND, **asdict(self), "keep": list(self.keep)}

    def save(self, path: str | Path) -> None:
        """Write the file that `load_filter` and `blockscale train --keep-file` read."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def advise(
    report: ConversionReport,
    samples: Sequence[Numerics],
    *,
    budget: float = BUDGET,
    gradient_budget: float = GRADIENT_BUDGET,
    keep_unmeasured: bool = False,
    tokens: int = TOKENS,
    machine: str = MACHINE,
) -> Advice:
    """Advice for a converted model, from numerics measured on it.

    report: of its conversion.  samples: the mean of the later half counts, at most the last eight, for the layers of
    the last sample.  budget: accepted relative gap of the loss.  gradient_budget: accepted noise over the gradient's
    energy.  keep_unmeasured: layers without a measurement stay unquantized.  tokens, machine: the size and GPU that
    speed is predicted for.

    >>> import torch, blockscale as bs
    >>> from blockscale.diagnostics import sample
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    >>> report = bs.quantize_(model, "mxfp8", filter_fn=lambda module, name: True)
    >>> x, target = torch.randn(64, 64), torch.randint(64, (64,))
    >>> found = sample(model, lambda: torch.nn.functional.cross_entropy(model(x), target)).read()
    >>> advise(report, [found], budget=1.0).keep
    ()
    """
    _check(report, budget, gradient_budget, samples, tokens)
    counting = _counting(samples)
    last, names = {each.layer: each for each in samples[-1].layers}, {each.name for each in report.converted}
    measured = [name for name, each in last.items() if name in names and each.damage is not None]
    every = _figures(counting)
    figures, won = {name: every[name] for name in measured}, report.seconds_saved(tokens, machine)
    kept = select_unquantized(figures, (budget, gradient_budget), won)
    budgets = (budget, gradient_budget)
    order = sorted(figures, key=lambda name: -sum(figures[name][at] / budgets[at] for at in (0, 1)))
    ranked = tuple(Ranked(name, *figures[name], name in kept, worst(last[name]), won[name]) for name in order)
    unmeasured = tuple(each.name for each in report.converted if each.name not in figures)
    advised = _without(report, kept | {*unmeasured} if keep_unmeasured else kept)
    speedups = (report.predicted_speedup(tokens, machine).linears, advised.predicted_speedup(tokens, machine).linears)
    sums = [
        (math.fsum(each[at] for each in figures.values()), math.fsum(figures[name][at] for name in {*figures} - kept))
        for at in (0, 1)
    ]
    return Advice(
        report.recipe.name,
        budget,
        gradient_budget,
        ranked,
        tuple(each.name for each in advised.converted),
        sums[0],
        sums[1],
        speedups,
        unmeasured,
        1.0 - _without(report, unmeasured).flop_share / report.flop_share if unmeasured else 0.0,
        tuple(each.name for each in report.skipped),
    )


def worst(layer: LayerNumerics) -> str:
    """The product of a layer with the most noise, and the shares of clipped and underflowed values, as text."""
    products = {name: value for name in ("fprop", "dgrad", "wgrad") if (value := getattr(layer, name)) is not None}
    words = [f"{name} {products[name]:.1f} dB" for name in sorted(products, key=lambda name: products[name])[:1]]
    words += [f"{value:.1%} {what}" for what in ("clipped", "underflow") if (value := getattr(layer, what)) > 0.01]
    seen = [(each.fprop, at) for at, each in enumerate(layer.experts) if each.fprop is not None]
    words += [f"worst expert {min(seen)[1]}: fprop {min(seen)[0]:.1f} dB"] if seen else []
    return ", ".join(words)


def _counting(samples: Sequence[Numerics]) -> Sequence[Numerics]:
    return samples[-min(LAST, (len(samples) + 1) // 2) :]


def _figures(samples: Sequence[Numerics]) -> dict[str, tuple[float, float]]:
    """Mean gap and gradient of each layer over samples."""
    found: dict[str, list[tuple[float, float]]] = {}
    for each in samples:
        total = sum(layer.gradient**2 for layer in each.layers if math.isfinite(layer.gradient))
        for layer in each.layers:
            if layer.damage is not None:
                share = layer.gradient**2 / total if total else 0.0
                gradient = share * (_ratio(layer.dgrad) + _ratio(layer.wgrad)) if share else 0.0
                found.setdefault(layer.layer, []).append((_finite(layer.damage / each.loss), _finite(gradient)))
    return {
        name: (fmean(gap for gap, _ in values), fmean(noise for _, noise in values)) for name, values in found.items()
    }


def _ratio(decibels: float | None) -> float:
    """Noise-to-signal ratio of energies."""
    return 0.0 if decibels is None else 10 ** (-decibels / 10)


def _finite(value: float) -> float:
    """The value, at most NOT_FINITE, which also stands for NaN and infinity: such a layer is the worst."""
    return min(value, NOT_FINITE) if math.isfinite(value) else NOT_FINITE


def _without(report: ConversionReport, kept: Collection[str]) -> ConversionReport:
    """The report of a conversion that skips these layers."""
    low = tuple(each for each in report.converted if each.name not in kept)
    stay = tuple(Skipped(each.name, "advised", *each[1:4], *each[5:]) for each in report.converted if each.name in kept)
    return replace(report, converted=low, skipped=(*report.skipped, *stay))


def _check(
    report: ConversionReport, budget: float, gradient_budget: float, samples: Sequence[Numerics], tokens: int
) -> None:
    for name, value in (("budget", budget), ("gradient_budget", gradient_budget)):
        if not 0 < value < math.inf:
            refuse(f"{name}={value}", "it is a share above zero", f"pass {name}=0.01")
    if tokens < 1:
        refuse(f"tokens={tokens}", "speed is that of one token at least", "pass 4096")
    if not samples or not samples[-1].layers:
        refuse(
            "no measured layer",
            "advice is about quantized layers, and all of these stay unquantized",
            "take a recipe other than bf16, and values that leave it some blocks of "
            f"{option('keep_first')} and {option('keep_last')}",
        )
    known = {each.name for each in (*report.converted, *report.skipped)}
    foreign = next((each.layer for each in samples[-1].layers if each.layer not in known), None)
    if foreign is not None:
        refuse(
            f"a sample of {foreign}, which the report does not have",
            "report and samples are of one model",
            "pass what quantize_ returned for the model that was sampled",
        )
    loss = next((each.loss for each in _counting(samples) if not 0 < each.loss < math.inf), None)
    if loss is not None:
        refuse(
            f"a sample with a loss of {loss}",
            "a budget is a share of the loss, which is above zero and finite",
            "take samples of a loss such as the cross entropy",
        )
