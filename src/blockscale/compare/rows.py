"""Rows of a comparison for a results file: thinned curves, gaps, verdicts, speeds, machine and versions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..bench.trainings import Convergence, Points
from .comparison import Arm, Comparison

# points of a stored curve
MOST = 150
# fields of the line "run" and their values for a run that failed before it
_OF_THE_RUN: dict[str, Any] = {"parameters": 0, "flop_share": 0.0, "data_hash": ""}


def rows_of(found: Comparison) -> list[Convergence]:
    """One row for each arm."""
    return [_row(found, arm) for arm in found.arms]


def _row(found: Comparison, arm: Arm) -> Convergence:
    runs = found.runs[arm.name]
    first, gap, verdict = runs[0], found.gap(arm.name), found.verdict(arm)
    config = first.about["config"]
    return Convergence(
        model=config["name"],
        arm=arm.name,
        says=arm.says,
        seeds=list(found.seeds),
        steps=config["steps"],
        tokens_per_step=config["batch"] * config["accumulate"] * config["data"]["sequence"],
        losses=[_finite(run.loss) for run in runs],
        gap=gap.mean if gap.is_finite else None,
        error=gap.error if gap.is_finite else None,
        noise=_finite(found.noise),
        budget=arm.budget,
        verdict="" if verdict is None else verdict.kind,
        why="" if verdict is None else verdict.why,
        curves=[thin(smooth(sorted(run.losses.items()))) for run in runs],
        along=thin(found.along(arm.name)),
        tokens_per_second=found.tokens_per_second(arm.name) if found.is_timed and gap.is_finite else None,
        peak_memory=found.peak_memory(arm.name),
        shares=first.shares if found.is_timed else {},
        where=first.where,
        branch_at=found.branch_at,
        since=found.since,
        **{name: first.about.get(name, default) for name, default in _OF_THE_RUN.items()},
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def smooth(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Running mean over a fortieth of the run, thinned to at most some 400 points."""
    reach, values = max(1, len(points) // 40), [y for _, y in points]
    means = [statistics.fmean(values[max(0, at - reach + 1) : at + 1]) for at in range(len(points))]
    return [(float(x), y) for (x, _), y in zip(points, means, strict=True)][:: max(1, len(points) // 400)]


def thin(points: Sequence[tuple[float, float]], most: int = MOST) -> Points:
    """At most `most` points, evenly spaced, including the first and the last.

    >>> thin([(step, 0.5) for step in range(1, 11)], 4)
    [[1, 0.5], [4, 0.5], [7, 0.5], [10, 0.5]]
    """
    last = len(points) - 1
    places = sorted({round(each * last / (most - 1)) for each in range(most)}) if last >= most else range(last + 1)
    return [[points[place][0], round(points[place][1], 6)] for place in places]
