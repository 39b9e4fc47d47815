"""Pool seeds of one comparison that were run at different times, without running the first seeds again.

Verdicts are computed from stored rows alone, by the rule of a comparison. Rows do not hold the whole config: the caller
has to ensure that runs of the same model, length, text and arms also had the same options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..bench.trainings import Convergence, Points
from ..errors import OptionError, message
from .comparison import BASELINE, NOTHING_CONVERTED, NULL
from .statistics import Gap, Length, judge, noise_of, paired

Arms = dict[str, Convergence]


@dataclass(frozen=True)
class Pooled:
    """Pooled rows.  lines: of all seeds, for arms that both sides have.  left_out: the other arms, as text."""

    lines: list[Convergence]
    left_out: list[str]


def pool(fresh: Sequence[Convergence], kept: Sequence[Convergence]) -> Pooled:
    """Pool each comparison of `fresh` with the one of `kept` that has the same setting and other seeds; of several the
    one with most seeds. Only arms that both have are pooled."""
    stored = _comparisons(kept)
    pairs = [(_partner(arms, stored), arms) for arms in _comparisons(fresh)]
    return Pooled(
        [line for first, second in pairs for line in _together(first, second)],
        [reasons for first, second in pairs for reasons in _left_out(first, second)],
    )


def _comparisons(lines: Sequence[Convergence]) -> list[Arms]:
    groups: dict[tuple[Any, ...], Arms] = {}
    for line in lines:
        groups.setdefault((line.setting, *line.seeds), {})[line.arm] = line
    return list(groups.values())


def _partner(arms: Arms, stored: Sequence[Arms]) -> Arms:
    mine = next(iter(arms.values()))
    fit = [
        other
        for other in stored
        if all(line.setting == mine.setting and not {*line.seeds} & {*mine.seeds} for line in other.values())
        and all(_same(other.get(name), arms.get(name)) for name in (BASELINE, NULL))
    ]
    if not fit:
        raise OptionError(
            message(
                f"seeds {mine.seeds} of {mine.model}, {mine.steps} steps, have no stored seeds to pool with",
                rule="the same model, length, text, null run and GPU with other seeds is stored",
                fix="leave --pool out to store them by themselves",
            )
        )
    return max(fit, key=lambda other: len(other[BASELINE].seeds))


def _same(one: Convergence | None, other: Convergence | None) -> bool:
    """Whether two rows belong to the same arm: equal description, budget and share of FLOPs."""
    if one is None or other is None:
        return False
    return (one.says, one.budget, one.flop_share) == (other.says, other.budget, other.flop_share)


def _together(first: Arms, second: Arms) -> list[Convergence]:
    """Rows of all seeds, with new gaps and verdicts."""
    arms = {name: _joined(line, second[name]) for name, line in first.items() if _same(line, second.get(name))}
    null = _gap(arms[NULL], arms[BASELINE])
    return [_judged(line, _gap(line, arms[BASELINE]), noise_of(null)) for line in arms.values()]


def _left_out(first: Arms, second: Arms) -> list[str]:
    """Sentences on the arms that are not pooled, with the reason."""
    base, fresh = first[BASELINE], second[BASELINE]
    title, kept, new = f"{base.model}, {base.steps} steps", _named(base.seeds), _named(fresh.seeds)
    reasons: list[str] = []
    for name in dict.fromkeys([*first, *second]):
        if name not in second:
            reasons.append(f"{title}: {name} was not run with {new}; its stored row of {kept} stays unchanged")
        elif name not in first:
            reasons.append(f"{title}: {name} has no stored row of {kept}; its new runs, {new}, are not stored")
        elif not _same(first[name], second[name]):
            differs = "other formats, another budget or another share of FLOPs"
            reasons.append(f"{title}: {name} of {new} has {differs} than that of {kept}, and is not stored")
    return reasons


def _named(seeds: Sequence[int]) -> str:
    """
    >>> _named([0]), _named([1, 2])
    ('seed 0', 'seeds 1, 2')
    """
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _joined(one: Convergence, other: Convergence) -> Convergence:
    seeds = {seed: (line, place) for line in (one, other) for place, seed in enumerate(line.seeds)}
    ordered = [seeds[seed] for seed in sorted(seeds)]
    origins = [line.where for line in (one, other)]
    both = {key: "; ".join(dict.fromkeys(str(each.get(key)) for each in origins)) for key in ("command", "commit")}
    memory = [line.peak_memory for line in (one, other) if line.peak_memory is not None]
    return replace(
        one,
        seeds=sorted(seeds),
        losses=[line.losses[place] for line, place in ordered],
        curves=[line.curves[place] for line, place in ordered],
        along=_mean(one, other),
        # runs of different times and machines: their speeds are not comparable
        tokens_per_second=None,
        shares={},
        peak_memory=max(memory, default=None),
        where=max(origins, key=lambda each: str(each.get("utc"))) | both,
    )


def _mean(one: Convergence, other: Convergence) -> Points:
    """Mean gap of all seeds at each step that both rows have."""
    gaps, (mine, theirs) = {int(step): gap for step, gap in other.along}, (len(one.seeds), len(other.seeds))
    return [
        [step, round((gap * mine + gaps[int(step)] * theirs) / (mine + theirs), 6)]
        for step, gap in one.along
        if int(step) in gaps
    ]


def _gap(line: Convergence, base: Convergence) -> Gap:
    """Paired gap of a row; a run that failed has an infinite loss, as in a comparison."""
    ends = [[float("inf") if loss is None else loss for loss in each.losses] for each in (line, base)]
    return paired(*ends)


def _judged(line: Convergence, gap: Gap, noise: float) -> Convergence:
    verdict = None
    if line.budget is not None:
        shared_steps = max(line.branch_at, line.since)
        length = Length(line.steps, sum(step > shared_steps for step, _ in line.along), shared_steps)
        verdict = judge(gap, noise, line.budget, length) if line.flop_share else NOTHING_CONVERTED
    finite = gap.is_finite
    return replace(
        line,
        gap=gap.mean if finite else None,
        error=gap.error if finite else None,
        noise=noise if noise == noise else None,
        verdict="" if verdict is None else verdict.kind,
        why="" if verdict is None else verdict.why,
    )
