"""Which layers to leave unquantized so that two sums stay within their budgets, at little cost in speed.

Two greedy orders are tried: most noise first, and most noise per second that the layer loses in bf16. In both results,
layers that turn out not to be needed are quantized again, those that save most time first. The result that loses less
time is returned. It may not be optimal, which would need a search over all subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import fsum

# stands for NaN and infinite figures: such a layer always stays unquantized
NOT_FINITE = 1e9
# differences below 1 ns are ties
_LEAST_SECONDS = 1e-9

Figures = Mapping[str, tuple[float, float]]


def select_unquantized(figures: Figures, budgets: tuple[float, float], won: Mapping[str, float]) -> set[str]:
    """Names of the layers to leave unquantized.

    figures: each layer's terms of both sums, if quantized.  won: seconds that quantizing each layer saves.

    >>> figures = {"large": (0.0011, 0.0), "a": (0.0010, 0.0), "b": (0.0010, 0.0)}
    >>> sorted(select_unquantized(figures, (0.0012, 0.1), {"large": 1e-3, "a": 1e-5, "b": 1e-5}))
    ['a', 'b']
    """
    broken = {name for name, each in figures.items() if max(each) >= NOT_FINITE}
    rest = {name: each for name, each in figures.items() if name not in broken}

    def noise(name: str, over: Collection[int]) -> float:
        return sum(rest[name][at] / budgets[at] for at in over)

    def noise_per_second(name: str, over: Collection[int]) -> float:
        return noise(name, over) / max(won[name], _LEAST_SECONDS)

    found = [_needed(_kept(rest, budgets, score), rest, budgets, won) for score in (noise, noise_per_second)]
    return broken | min(found, key=lambda each: (sum(won[name] for name in each), len(each)))


def _kept(
    figures: Figures, budgets: tuple[float, float], score: Callable[[str, Collection[int]], float]
) -> dict[str, None]:
    """Layers to leave unquantized, in greedy order, until both sums are within their budgets."""
    sums = [fsum(each[at] for each in figures.values()) for at in (0, 1)]
    orders: dict[tuple[int, ...], list[str]] = {}
    kept: dict[str, None] = {}
    while over := tuple(at for at in (0, 1) if sums[at] > budgets[at]):
        if over not in orders:
            orders[over] = sorted(figures, key=lambda name: score(name, over))
        while orders[over] and orders[over][-1] in kept:
            orders[over].pop()
        if not orders[over]:  # the rest of the sums is rounding error
            break
        name = orders[over].pop()
        kept[name] = None
        sums = [value - figures[name][at] for at, value in enumerate(sums)]
    return kept


def _needed(
    kept: Collection[str], figures: Figures, budgets: tuple[float, float], won: Mapping[str, float]
) -> set[str]:
    """The layers that must stay unquantized: without those that fit the budgets quantized and save time."""
    needed = {*kept}
    sums = [fsum(figures[name][at] for name in figures if name not in needed) for at in (0, 1)]
    for name in sorted(needed, key=lambda each: -won[each]):
        after = [value + figures[name][at] for at, value in enumerate(sums)]
        if won[name] > 0 and all(value <= budget for value, budget in zip(after, budgets, strict=True)):
            needed.remove(name)
            sums = after
    return needed
