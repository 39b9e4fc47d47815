"""How many ranks' rows share a product: few launches, or rows that are multiplied as soon as they are there.

Every launch leaves the last wave of tiles half empty in the mean, and reads the weight. A chunk of several ranks saves
such waves, and waits for the last of their rows. `best` weighs both; a rank decides for itself, since chunks change no
byte that is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from ...roofline.overlap import overlap_machine

# rows and columns of a tile; tiles of an H200 at a time
_TILE, _SMS = 128, 132
# seconds of a launch, and what rows may come later than over an idle link: waiting for them costs more than a launch
_LAUNCH, _LATER = 5e-6, 1.2


class Part(NamedTuple):
    """One rank's rows of a product.  rows, columns, features: its sizes; rows of all experts together.  sent: bytes
    that the rank sends or gets for them.  low: whether operands are multiplied, of 8 bits or less.  experts: of the
    product; 0 if it is dense."""

    rows: int
    columns: int
    features: int
    sent: int
    low: bool
    experts: int = 0

    def tiles(self, ranks: int) -> float:
        """Tiles of a product of the rows of that many ranks, in the mean."""
        across, rows = -(-self.columns // _TILE), self.rows * ranks
        down = rows / _TILE + self.experts / 2 if self.experts else -(-rows // _TILE)
        return down * across


@functools.lru_cache(4096)
def chunks(machine: str, link: str | None, ranks: int, part: Part) -> tuple[int, ...]:
    """Numbers of ranks whose rows share a product, in the order of arrival of a gather.  machine, link: names for the
    model.

    Sums are gathers backwards: the product of the last chunk is not sent, as that of the first needs nothing to come.

    >>> chunks("h200", None, 8, Part(512, 6144, 12288, 512 * 12288, low=True))
    (2, 6)
    >>> chunks("h200", "pcie5", 8, Part(1024, 9856, 12288, 1024 * 12288, low=True))
    (1, 1, 1, 1, 1, 1, 1, 1)
    """
    found = overlap_machine(machine, link)
    return best(ranks, _LATER * part.sent / found.link.bandwidth, _seconds(machine, part))


@functools.lru_cache(4096)
def stretch_of(machine: str, link: str | None, ranks: int, part: Part) -> float:
    """Time of the product in those chunks over that of one launch.

    >>> mixture = Part(4096, 1024, 8192, 1024 * 8192 * 2, low=False, experts=32)
    >>> [round(stretch_of("h200", link, 8, mixture), 2) for link in (None, "pcie5")]
    [1.18, 1.64]
    """
    product = _seconds(machine, part)
    return sum(map(product, chunks(machine, link, ranks, part))) / product(ranks)


def _seconds(machine: str, part: Part) -> Callable[[int], float]:
    """Seconds of a product of the rows of a number of ranks."""
    found = overlap_machine(machine)
    rate = found.fp8 if part.low and found.fp8 is not None else found.bf16
    wave = 2.0 * _TILE * _TILE * part.features * _SMS / rate.value
    weight = max(1, part.experts) * part.columns * part.features * (1 if part.low else 2) / found.ceilings.bandwidth

    def product(count: int) -> float:
        return _LAUNCH + max((part.tiles(count) / _SMS + 0.5) * wave, weight)

    return product


def best(ranks: int, step: float, product: Callable[[int], float]) -> tuple[int, ...]:
    """Numbers of ranks in each chunk whose last product ends first.  step: seconds between arrivals, of which the first
    is at 0.  product: seconds of a product of the rows of that many ranks.

    >>> best(4, 1.0, lambda count: 0.5 * count)  # rows come late
    (1, 1, 1, 1)
    >>> best(4, 0.1, lambda count: 1.0 + count)  # products are slow
    (4,)
    """
    ends, firsts = [0.0], [0]
    for last in range(1, ranks + 1):
        end, first = min((max(ends[first], (last - 1) * step) + product(last - first), first) for first in range(last))
        ends.append(end)
        firsts.append(first)
    found: list[int] = []
    while ranks:
        found.append(ranks - firsts[ranks])
        ranks = firsts[ranks]
    return tuple(reversed(found))
