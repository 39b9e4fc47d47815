"""Which layers to keep in high precision so that two sums stay within their budgets, at little cost in speed.

Two orders are tried: who does most harm first, and who does most harm for the seconds that keeping it costs. Of both,
layers that turn out not to be needed go back, the dearest first; the cheaper of the two results is taken. No promise of
the least there is, which would be a search over all subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import fsum

# figures of a layer that are no numbers count as much: it is kept, whatever that costs
NO_NUMBER = 1e9
# below so many seconds who wins little is as good as who wins less
_LEAST_SECONDS = 1e-9

Figures = Mapping[str, tuple[float, float]]


def choose(figures: Figures, budgets: tuple[float, float], won: Mapping[str, float]) -> set[str]:
    """The layers to keep.  figures: what each adds to both sums in low precision.  won: seconds that it wins there.

    >>> figures = {"large": (0.0011, 0.0), "a": (0.0010, 0.0), "b": (0.0010, 0.0)}
    >>> sorted(choose(figures, (0.0012, 0.1), {"large": 1e-3, "a": 1e-5, "b": 1e-5}))
    ['a', 'b']
    """
    lost = {name for name, each in figures.items() if max(each) >= NO_NUMBER}
    rest = {name: each for name, each in figures.items() if name not in lost}

    def harm(name: str, over: Collection[int]) -> float:
        return sum(rest[name][at] / budgets[at] for at in over)

    def harm_by_cost(name: str, over: Collection[int]) -> float:
        return harm(name, over) / max(won[name], _LEAST_SECONDS)

    found = [_needed(_kept(rest, budgets, score), rest, budgets, won) for score in (harm, harm_by_cost)]
    return lost | min(found, key=lambda each: (sum(won[name] for name in each), len(each)))


def _kept(
    figures: Figures, budgets: tuple[float, float], score: Callable[[str, Collection[int]], float]
) -> dict[str, None]:
    """Layers in the order in which they are kept until no sum is over its budget."""
    sums = [fsum(each[at] for each in figures.values()) for at in (0, 1)]
    orders: dict[tuple[int, ...], list[str]] = {}
    kept: dict[str, None] = {}
    while over := tuple(at for at in (0, 1) if sums[at] > budgets[at]):
        if over not in orders:
            orders[over] = sorted(figures, key=lambda name: score(name, over))
        while orders[over] and orders[over][-1] in kept:
            orders[over].pop()
        if not orders[over]:  # what is left of the sums is rounding
            break
        name = orders[over].pop()
        kept[name] = None
        sums = [value - figures[name][at] for at, value in enumerate(sums)]
    return kept


def _needed(
    kept: Collection[str], figures: Figures, budgets: tuple[float, float], won: Mapping[str, float]
) -> set[str]:
    """Without those that can go back, and win something there."""
    needed = {*kept}
    sums = [fsum(figures[name][at] for name in figures if name not in needed) for at in (0, 1)]
    for name in sorted(needed, key=lambda each: -won[each]):
        after = [value + figures[name][at] for at, value in enumerate(sums)]
        if won[name] > 0 and all(value <= budget for value, budget in zip(after, budgets, strict=True)):
            needed.remove(name)
            sums = after
    return needed
