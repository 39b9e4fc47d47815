"""Run folders condensed to stored rows: thinned curves, gaps, verdicts, speeds, machine and versions.

Nothing is trained: runs that are missing or unfinished are named and left out, so that the results of an interrupted
machine can be published. The null run is bf16 with another reduction order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bench.trainings import Convergence, Points, Training
from .comparison import BASELINE, NULL, Arm, Comparison
from .report import smooth
from .stored import METRICS, RUNS, Stored, read
from .throughput import MEASURES, throughput_of

# points of a stored curve
MOST = 150
# config fields that may differ between the runs of one comparison
_MAY_DIFFER = ("seed", "batch", "accumulate", "eval_batches", "loss_chunks", "folder", "resume", "start")


@dataclass
class Published:
    """Result of `publish`.  lines: rows to store.  left_out: runs without a row, as text with the reason."""

    lines: list[Training] = field(default_factory=list[Training])
    left_out: list[str] = field(default_factory=list[str])


def publish(folder: Path) -> Published:
    """Rows of all comparisons and throughputs below a folder."""
    found = Published()
    groups: dict[str, list[Stored]] = {}
    for path in sorted(folder.rglob(f"{RUNS}/*/{METRICS}")):
        run = read(path)
        if not run.is_done or not run.about:
            found.left_out.append(f"{path.parent.name}: not done, {len(run.losses)} steps")
        elif run.arm.get("measures") == MEASURES:
            found.lines.append(throughput_of(run))
        elif "name" in run.arm:
            key = f"{path.parents[2]} {_shared(run.about['config'])} {run.arm.get('branch_at', 0)}"
            groups.setdefault(key, []).append(run)
        else:
            found.left_out.append(f"{path.parent.name}: its record has no arm")
    for runs in groups.values():
        _compare(runs, found)
    return found


def _shared(config: dict[str, Any]) -> str:
    """Key that all runs of one comparison share; the null run splits the same sequences into other microbatches."""
    recipe = {key: value for key, value in config["recipe"].items() if key != "name"}
    trained, validated = config["batch"] * config["accumulate"], config["batch"] * config["eval_batches"]
    rest = {key: value for key, value in config.items() if key not in _MAY_DIFFER}
    return json.dumps(rest | {"recipe": recipe, "trained": trained, "validated": validated}, sort_keys=True)


def _compare(runs: Sequence[Stored], found: Published) -> None:
    """Add rows for the seeds that both bf16 and the null run have, and the arms that have all of these seeds."""
    title = f"{runs[0].about['config']['name']}, {runs[0].about['config']['steps']} steps"
    by_arm: dict[str, dict[int, Stored]] = {}
    for run in runs:
        mine, seed = by_arm.setdefault(run.arm["name"], {}), run.about["config"]["seed"]
        if seed in mine:
            found.left_out.append(f"{title}: {run.arm['name']}, seed {seed} is there twice")
            return
        mine[seed] = run
    seeds = sorted({*by_arm.get(BASELINE, {})} & {*by_arm.get(NULL, {})})
    if not seeds:
        found.left_out.append(f"{title}: no seed has both bf16 and the null run")
        return
    if len({run.about["data_hash"] for run in runs}) > 1:
        found.left_out.append(f"{title}: runs of different text")
        return
    whole = [name for name, mine in by_arm.items() if {*seeds} <= {*mine}]
    found.left_out += [
        f"{title}: {name}, seeds {', '.join(str(seed) for seed in seeds if seed not in mine)} are missing"
        for name, mine in by_arm.items()
        if name not in whole
    ]
    ordered = [BASELINE, NULL, *sorted(name for name in whole if name not in (BASELINE, NULL))]
    facts = {name: by_arm[name][seeds[0]].arm for name in ordered}
    arms = tuple(Arm(name, facts[name]["says"], facts[name]["budget"]) for name in ordered)
    compared = Comparison(arms, tuple(seeds), {name: tuple(by_arm[name][each] for each in seeds) for name in ordered})
    found.lines += [_line(compared, arm) for arm in arms]


def _line(found: Comparison, arm: Arm) -> Convergence:
    runs = found.runs[arm.name]
    first, gap, verdict = runs[0], found.gap(arm.name), found.verdict(arm)
    config = first.about["config"]
    memory = [run.end["peak_memory"] for run in runs if run.end.get("peak_memory") is not None]
    is_timed = found.is_timed and gap.is_finite
    return Convergence(
        model=config["name"],
        arm=arm.name,
        says=arm.says,
        seeds=list(found.seeds),
        steps=config["steps"],
        tokens_per_step=config["batch"] * config["accumulate"] * config["data"]["sequence"],
        parameters=first.about["parameters"],
        flop_share=first.about["flop_share"],
        data_hash=first.about["data_hash"],
        losses=[_number(run.loss) for run in runs],
        gap=_number(gap.mean) if gap.is_finite else None,
        error=gap.error if gap.is_finite else None,
        noise=_number(found.noise),
        budget=arm.budget,
        verdict="" if verdict is None else verdict.kind,
        why="" if verdict is None else verdict.why,
        curves=[thin(smooth(sorted(run.losses.items()))) for run in runs],
        along=thin(found.along(arm.name)),
        tokens_per_second=found.tokens_per_second(arm.name) if is_timed else None,
        peak_memory=max(memory, default=None),
        shares=first.shares if found.is_timed else {},
        where=first.where,
        branch_at=found.branch_at,
        since=config["recipe"].get("since", 0),
    )


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def thin(points: Sequence[tuple[float, float]], most: int = MOST) -> Points:
    """At most `most` points, evenly spaced, including the first and the last.

    >>> thin([(step, 0.5) for step in range(1, 11)], 4)
    [[1, 0.5], [4, 0.5], [7, 0.5], [10, 0.5]]
    """
    last = len(points) - 1
    places = sorted({round(each * last / (most - 1)) for each in range(most)}) if last >= most else range(last + 1)
    return [[points[place][0], round(points[place][1], 6)] for place in places]
