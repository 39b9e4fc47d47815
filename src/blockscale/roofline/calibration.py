"""Published times of overlapped products beside the model of `overlap.py`: a calibration, not a validation.

18 rows of the Flux performance report (8 L20 over PCIe, 8 H800 over NVLink; torch's time is the collective, then the
product), and 9 rows of Triton's AG+GEMM on 8 H100 from symm-mem-recipes. For Flux, `FITTED` is the point of `GRID` with
the least mean error over a machine's rows. So the errors to trust are those of a row that is left out, predicted by the
constants that fit the others best, and those of `UNFITTED`, round figures that were fitted to no row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .ceilings import nominal
from .overlap import Operation, gathers, overlapped_seconds, work

RANKS = 8
# rows of the fuller of two EP ranks over the mean, by (experts, topk): simulated with the random gates of Flux's bench
IMBALANCE = {(32, 4): 1.087, (8, 2): 1.157}


@dataclass(frozen=True)
class PublishedRow:
    """One published case.  m, n, k: global sizes.  overlapped: seconds.  serial: seconds of torch, None if not
    published.  product: seconds of the product alone, None if not published."""

    machine: str
    op: Operation
    m: int
    n: int
    k: int
    tp: int
    ep: int
    experts: int
    topk: int
    overlapped: float
    serial: float | None = None
    product: float | None = None

    @property
    def work(self) -> tuple[float, float]:
        """FLOPs of the fullest rank, and bytes over its link."""
        flops, wire = work(self.op, self.m, self.n, self.k, tp=self.tp, ep=self.ep, topk=self.topk)
        return flops * (IMBALANCE[self.experts, self.topk] if self.ep > 1 else 1), wire


# (tp, ep, experts, topk): milliseconds of layer 0 by Flux and torch, of layer 1 by Flux and torch
_MIXTURES: Mapping[str, Mapping[tuple[int, int, int, int], tuple[float, float, float, float]]] = {
    "l20": {
        (8, 1, 32, 4): (7.813, 26.792, 7.976, 42.092),
        (4, 2, 32, 4): (8.727, 26.911, 8.445, 34.850),
        (8, 1, 8, 2): (5.901, 19.734, 6.744, 28.046),
        (4, 2, 8, 2): (6.155, 21.680, 7.009, 25.118),
    },
    "h800": {
        (8, 1, 32, 4): (1.146, 4.702, 1.863, 10.452),
        (4, 2, 32, 4): (1.335, 4.069, 1.685, 6.672),
        (8, 1, 8, 2): (0.657, 2.124, 1.019, 4.561),
        (4, 2, 8, 2): (0.955, 2.284, 0.981, 3.254),
    },
}


def _flux_rows() -> tuple[PublishedRow, ...]:
    dense = (RANKS, 1, 1, 1)
    rows = [
        PublishedRow("l20", "all_gather_mm", 4096, 49152, 12288, *dense, 5.903e-3, 16.946e-3, 5.316e-3),
        PublishedRow("l20", "mm_reduce_scatter", 4096, 12288, 49152, *dense, 5.730e-3, 17.664e-3, 5.389e-3),
    ]
    for machine, cases in _MIXTURES.items():
        for case, (first, torch_first, second, torch_second) in cases.items():
            sizes = (8192, 8192, 8192, *case)
            rows.append(PublishedRow(machine, "all_gather_grouped_mm", *sizes, first / 1e3, torch_first / 1e3))
            rows.append(PublishedRow(machine, "grouped_mm_reduce_scatter", *sizes, second / 1e3, torch_second / 1e3))
    return tuple(rows)


FLUX_ROWS = _flux_rows()
# n is eight times that of a rank; (product, overlapped) in µs for M = 4096, 8192, 16384
TRITON_ROWS = tuple(
    PublishedRow("h100", "all_gather_mm", m, RANKS * n, k, RANKS, 1, 1, 1, overlapped / 1e6, product=product / 1e6)
    for n, k, times in (
        (1792, 4096, ((125, 213), (236, 318), (434, 514))),
        (3584, 8192, ((483, 543), (849, 948), (1655, 1846))),
        (6656, 16384, ((1595, 1776), (2953, 3243), (5948, 6538))),
    )
    for m, (product, overlapped) in zip((4096, 8192, 16384), times, strict=True)
)


class Constants(NamedTuple):
    """Constants of one machine with the kernels of its rows.

    gather, scatter: bytes per second of the link.  layer0, layer1: grouped product's share of the specified bf16 rate;
    they absorb padding and the schedule.  setup: seconds.  slowdown: of the product beside copies.  slices: chunks of
    the grouped scatter; other operations have one for each rank.
    """

    gather: float
    scatter: float
    layer0: float
    layer1: float
    setup: float
    slowdown: float
    slices: int

    def predict(self, row: PublishedRow) -> tuple[float, float, float]:
        """Seconds of the product alone, of the communication alone, and overlapped."""
        flops, wire = row.work
        share, link = (self.layer0, self.gather) if gathers(row.op) else (self.layer1, self.scatter)
        product = row.product or flops / (nominal(row.machine).bf16 * share)
        chunks = self.slices if row.op == "grouped_mm_reduce_scatter" else RANKS
        total, _ = overlapped_seconds(row.op, product, wire / link, chunks, self.setup, self.slowdown)
        return product, wire / link, total


FITTED: Mapping[str, Constants] = {
    "l20": Constants(21e9, 21e9, 0.6, 0.7, 50e-6, 0.02, 4),
    "h800": Constants(195e9, 160e9, 0.55, 0.45, 150e-6, 0.06, 8),
    # by hand, to round figures; its rows have the seconds of the product
    "h100": Constants(300e9, 300e9, 1.0, 1.0, 60e-6, 0.08, 8),
}
UNFITTED: Mapping[str, Constants] = {
    "l20": Constants(22e9, 22e9, 0.85, 0.85, 100e-6, 0.0, 4),
    "h800": Constants(180e9, 180e9, 0.65, 0.65, 50e-6, 0.0, 8),
}
# (gather, scatter) in GB/s, layer0, layer1, setup in µs, slowdown, slices; PCIe has one rate for both directions
_Axes = tuple[Sequence[tuple[float, float]], Sequence[float], Sequence[float], Sequence[float], Sequence[float], int]
GRID: Mapping[str, _Axes] = {
    "l20": (
        [(rate, rate) for rate in (19, 20, 21, 22, 23, 24)],
        (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9), (0.6, 0.7, 0.8, 0.9), (50, 100, 200, 300), (0.02, 0.06, 0.1), 4,
    ),
    "h800": (
        list(itertools.product((170, 180, 190, 195), (120, 160, 180))),
        (0.45, 0.5, 0.55, 0.6, 0.65, 0.7), (0.28, 0.32, 0.36, 0.4, 0.45, 0.5), (30, 50, 100, 150), (0.02, 0.06, 0.1), 8,
    ),
}  # fmt: skip


def mean_error(errors: Iterable[float]) -> float:
    """Mean of the absolute errors."""
    found = [abs(error) for error in errors]
    return sum(found) / len(found)


def fit(machine: str) -> tuple[Constants, list[float]]:
    """Constants of the grid with the least mean error over the rows of a machine, and the error of each row under the
    constants that are best on the others. About a quarter of a second."""
    rows = [row for row in FLUX_ROWS if row.machine == machine]
    links, layer0, layer1, setups, slowdowns, slices = GRID[machine]
    points: list[tuple[float, Constants, list[float]]] = []
    for (gather, out), first, second, setup, slowdown in itertools.product(links, layer0, layer1, setups, slowdowns):
        constants = Constants(gather * 1e9, out * 1e9, first, second, setup / 1e6, slowdown, slices)
        errors = [constants.predict(row)[2] / row.overlapped - 1 for row in rows]
        points.append((sum(map(abs, errors)), constants, errors))
    _, best, _ = min(points, key=lambda point: point[0])
    left_out = [min(points, key=lambda p: p[0] - abs(p[2][at]))[2][at] for at in range(len(rows))]
    return best, left_out


class Calibrated(NamedTuple):
    """A published row with the model's seconds.  errors: relative, by fitted, left-out and unfitted constants."""

    row: PublishedRow
    product: float
    communication: float
    modelled: float
    errors: tuple[float, float, float]


def calibrate() -> list[Calibrated]:
    """All 18 rows of Flux with the model's times and errors."""
    found: list[Calibrated] = []
    for machine in GRID:
        constants = FITTED[machine]
        rows = (row for row in FLUX_ROWS if row.machine == machine)
        for row, left_out in zip(rows, fit(machine)[1], strict=True):
            product, communication, modelled = constants.predict(row)
            unfitted = UNFITTED[machine].predict(row)[2]
            errors = (modelled / row.overlapped - 1, left_out, unfitted / row.overlapped - 1)
            found.append(Calibrated(row, product, communication, modelled, errors))
    return found
