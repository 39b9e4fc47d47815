"""Rows of each expert: balanced, by Zipf's law as from an unbalanced router, or all on one expert."""

from __future__ import annotations

import random
from typing import Literal

Load = Literal["balanced", "zipf", "worst"]
LOADS: tuple[Load, ...] = ("balanced", "zipf", "worst")
EXPONENT = 1.2


def sizes(rows: int, experts: int, load: Load = "balanced", most: int | None = None) -> tuple[int, ...]:
    """Rows of every expert.

    zipf: the expert of rank r has a share of r^-1.2, but at most `most` rows, the number of tokens, since a token goes
    to an expert once. The excess goes to the others by their shares; ranks are assigned to experts at random.  worst:
    the middle expert has all rows.

    >>> sizes(10, 4), sizes(10, 4, "worst")
    ((3, 3, 2, 2), (0, 0, 10, 0))
    >>> sorted(sizes(100, 4, "zipf"), reverse=True), sorted(sizes(100, 4, "zipf", most=40), reverse=True)
    ([53, 23, 14, 10], [40, 30, 18, 12])
    """
    if load == "worst":
        return tuple(rows if index == experts // 2 else 0 for index in range(experts))
    if load == "balanced":
        return tuple(rows // experts + (index < rows % experts) for index in range(experts))
    found = _zipf(rows, experts, rows if most is None else most)
    random.Random(0).shuffle(found)
    return tuple(found)


def _zipf(rows: int, experts: int, most: int) -> list[int]:
    """Rows by rank."""
    assert rows <= experts * most, "more rows than experts may take"
    shares = [rank**-EXPONENT for rank in range(1, experts + 1)]
    full, rest, whole = 0, rows, sum(shares)
    while full < experts and shares[full] * rest > most * whole:
        full, rest, whole = full + 1, rest - most, whole - shares[full]
    found = [most] * full + [int(share * rest / whole) for share in shares[full:]]
    # rounding down leaves less than one row for each expert
    for rank in range(full, full + rows - sum(found)):
        found[rank] += 1
    return found
