"""`compare`: paired runs of one model, text and seed by several recipes, with a null run.

All runs of a seed start from the same weights and see the same sequences in the same order; only the recipe differs.
The null run is bf16 with another reduction order, see `null_of`. Each run has a folder with one file of JSON lines, the
only source of tables and page. An interrupted comparison resumes with the missing runs; a repetition with more seeds or
recipes runs only the new ones. Runs may share their first steps, see `branch`. A control arm with a known fault may run
beside them, see `control`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..autograd import Recipe
from ..errors import OptionError, message, option
from ..train.checkpoint import read_about
from ..train.checks import check_apart, check_seeds
from ..train.config import RunConfig
from ..train.data import load
from ..train.records import Hooks
from ..train.run import recipe_of
from .branch import BASELINE, trunk, trunk_of
from .control import CONTROL, CONTROL_RECIPE, SAYS, broken_casts
from .side_by_side import Lines, side_by_side
from .statistics import Gap, Length, Verdict, drift_of, judge, noise_of, paired
from .stored import MEASUREMENTS, METRICS, Stored, folder_of, read, run_or_read

T = TypeVar("T")
NULL = "null"
_SINGLE_RUN_OPTIONS = ("folder", "export", "tensorboard", "numerics_every", "profile", "resume")
NOTHING_CONVERTED = Verdict("undecided", "no layer was converted: it is bf16 (see keep_first and keep_last)")
# accepted relative gap, by the bits of a recipe's narrowest element
BUDGETS = {8: 0.0025, 6: 0.0025, 4: 0.02}


@dataclass(frozen=True)
class Arm:
    """An arm of a comparison.  says: description, stored in rows and compared when seeds are pooled.  budget: largest
    accepted gap; None: the arm has no verdict."""

    name: str
    says: str
    budget: float | None = None

    @property
    def is_recipe(self) -> bool:
        """Whether the arm is a recipe under test: neither bf16, nor the null run, nor the control."""
        return self.budget is not None and self.name != CONTROL


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison.  runs: by arm, one for each seed, in the order of `seeds`.  out: their folder."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: dict[str, tuple[Stored, ...]]
    out: Path | None = None

    def gap(self, name: str) -> Gap:
        """Paired relative gap of an arm's final losses to the baseline's."""
        mine, base = ([run.loss for run in self.runs[each]] for each in (name, BASELINE))
        return paired(mine, base)

    def along(self, name: str) -> list[tuple[int, float]]:
        """Mean gap on held-out text at every evaluation that all runs have."""
        pairs = list(zip(self.runs[name], self.runs[BASELINE], strict=True))
        steps = set.intersection(*({*mine.evaluations} & {*base.evaluations} for mine, base in pairs))
        return [
            (step, sum(a.evaluations[step] / b.evaluations[step] - 1 for a, b in pairs) / len(pairs))
            for step in sorted(steps)
        ]

    @property
    def noise(self) -> float:
        """Largest gap that chance explains, from the null run; see `noise_of`."""
        return noise_of(self.gap(NULL), [gap for _, gap in self.along(NULL)])

    def verdict(self, arm: Arm) -> Verdict | None:
        """Verdict on an arm; None for the baseline and the null run."""
        if arm.budget is None:
            return None
        if not self.runs[arm.name][0].about.get("flop_share", 1.0):
            return NOTHING_CONVERTED
        drift = drift_of([gap for _, gap in self.along(arm.name)])
        return judge(self.gap(arm.name), self.noise, arm.budget, self.length(arm.name), drift)

    def verdicts(self) -> dict[str, Verdict]:
        """Verdicts by recipe, without the control."""
        found = {arm.name: self.verdict(arm) for arm in self.arms if arm.is_recipe}
        return {name: verdict for name, verdict in found.items() if verdict is not None}

    def length(self, name: str) -> Length:
        """Steps and evaluations of an arm, and the steps that it shares with the baseline."""
        shared_steps = max(self.branch_at, self.since)
        steps = int(self.runs[BASELINE][0].about["config"]["steps"])
        return Length(steps, sum(step > shared_steps for step, _ in self.along(name)), shared_steps)

    def tokens_per_second(self, name: str) -> float:
        """Highest speed among an arm's seeds: disturbances only slow a machine down."""
        return max(float(run.end.get("tokens_per_second", 0.0)) for run in self.runs[name])

    @property
    def branch_at(self) -> int:
        """Last step that all runs of a seed share; 0: they differ from the first step."""
        return int(self.runs[BASELINE][0].arm.get("branch_at", 0))

    @property
    def since(self) -> int:
        """First step at which recipes are in low precision."""
        return int(self.runs[BASELINE][0].about.get("config", {}).get("recipe", {}).get("since", 0))

    @property
    def is_timed(self) -> bool:
        """Whether each run had the machine to itself, so that speeds are comparable."""
        return all(run.arm.get("jobs", 1) == 1 for runs in self.runs.values() for run in runs)

    @property
    def is_on_gpu(self) -> bool:
        return str(self.runs[BASELINE][0].where.get("device", "")).startswith("cuda")


def null_of(config: RunConfig) -> tuple[RunConfig, str]:
    """Config and description of the null run: bf16 with another reduction order. Each step sees the same sequences.

    >>> from .presets import get_preset
    >>> null_of(get_preset("125m"))[1]
    'bf16 with each microbatch of 32 sequences in 2 parts of 16, whose gradients are added'
    """
    config = replace(config, recipe=replace(config.recipe, name=BASELINE))
    batch, accumulate = config.batch, config.accumulate
    parts = next((each for each in range(2, batch + 1) if batch % each == 0), 1)
    if parts > 1:
        says = f"each microbatch of {batch} sequences in {parts} parts of {batch // parts}, whose gradients are added"
        split = {"batch": batch // parts, "accumulate": accumulate * parts, "eval_batches": config.eval_batches * parts}
        return replace(config, **split), f"bf16 with {says}"
    chunks = 2 * config.loss_chunks
    says = f"bf16 with the loss of {config.data.sequence} symbols in {chunks} pieces, whose gradients are added"
    return replace(config, loss_chunks=chunks), says


def arms_of(
    config: RunConfig, recipes: Sequence[str], budget: float | None = None, *, control: bool = False
) -> tuple[Arm, ...]:
    """Baseline, null run, each recipe once, and the control.  budget: for every recipe; None: from its bits."""
    arms = [Arm(BASELINE, "what the others are compared with"), Arm(NULL, null_of(config)[1])]
    for name in dict.fromkeys(recipes):
        if name != BASELINE:
            recipe = recipe_of(replace(config.recipe, name=name))
            arms.append(Arm(name, str(recipe), BUDGETS[_bits(recipe)] if budget is None else budget))
    if control:
        arms.append(Arm(CONTROL, SAYS, BUDGETS[8] if budget is None else budget))
    return tuple(arms)


def config_of(name: str, config: RunConfig) -> RunConfig:
    """Config of an arm's runs."""
    if name == NULL:
        return null_of(config)[0]
    return replace(config, recipe=replace(config.recipe, name=CONTROL_RECIPE if name == CONTROL else name))


def _bits(recipe: Recipe) -> int:
    formats = [each for each in recipe.formats().values() if each is not None]
    return 4 if any("fp4" in each for each in formats) else 6 if any("fp6" in each for each in formats) else 8


def compare(
    config: RunConfig,
    recipes: Sequence[str],
    seeds: int | Sequence[int] = 1,
    *,
    out: Path,
    budget: float | None = None,
    hooks: Callable[[Arm, int], Sequence[Hooks]] = lambda arm, seed: (),
    jobs: int = 1,
    commit: str | None = None,
    branch_at: int = 0,
    control: bool = False,
) -> Comparison:
    """Train the missing runs, and read all of them.

    recipes: names; bf16 and the null run are always included.  seeds: how many, or which.  out: folder of the runs.
    budget: accepted relative gap, such as 0.0025.  hooks: factory of the hooks of a run; unused with several jobs.
    jobs: concurrent runs, each in its own process; speeds are then not comparable.  commit: recorded if there is no
    git.  branch_at: steps of bf16 that all runs of a seed share; with `config.start` they start from that checkpoint.
    control: adds an arm with a fault that must come out as worse.
    """
    if isinstance(seeds, int) and seeds > 0:
        check_seeds(0, seeds)
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:
        raise OptionError(
            message(
                option("seeds", repr(seeds)),
                rule="a comparison has at least one seed",
                fix=f"pass {option('seeds', 1)} or more",
            )
        )
    _check_shared(config, out)
    _check_branch(config, chosen, branch_at)
    arms = arms_of(config, recipes, budget, control=control)
    starts = dict.fromkeys(chosen, config.start)
    if branch_at:
        starts |= {seed: trunk_of(replace(config, seed=seed), branch_at, out) for seed in chosen}
    # seed by seed, so that an interrupted comparison has complete pairs
    pairs = [(arm, seed) for seed in chosen for arm in arms]
    configs = [replace(config_of(arm.name, config), seed=seed, start=starts[seed]) for arm, seed in pairs]
    kept = [read(folder_of(arm.name, each, out) / METRICS) for (arm, _), each in zip(pairs, configs, strict=True)]
    _check_text(config, kept, out)
    if branch_at:
        needed = sorted({seed for (_, seed), run in zip(pairs, kept, strict=True) if not run.is_done})
        trunks = [(replace(config, seed=seed), branch_at, out) for seed in needed]
        shared = replace(arms[0], name=f"{BASELINE} up to step {branch_at}")
        for _ in _each(trunk, trunks, jobs, lambda place: hooks(shared, needed[place])):
            pass
    elif config.start is not None:
        branch_at = read_about(config.start)["step"]
    facts = {"jobs": jobs} | ({"branch_at": branch_at} if branch_at else {})
    tasks = [
        (arm, each, out, facts, MEASUREMENTS if seed == chosen[0] else (), commit)
        for (arm, seed), each in zip(pairs, configs, strict=True)
    ]
    found = dict(_each(_run, tasks, jobs, lambda place: hooks(*pairs[place])))
    runs: dict[str, list[Stored]] = {arm.name: [] for arm in arms}
    for place, (arm, _) in enumerate(pairs):
        runs[arm.name].append(found[place])
    _check_same(out, [run for each in runs.values() for run in each])
    return Comparison(arms, chosen, {name: tuple(each) for name, each in runs.items()}, out)


def _check_text(config: RunConfig, kept: Sequence[Stored], out: Path) -> None:
    """Raise, before any training, if finished runs used another text than the missing runs would."""
    done = [run for run in kept if run.is_done]
    _check_same(out, done, [load(config.data).hash] if done and len(done) < len(kept) else [])


def _check_same(out: Path, runs: Sequence[Stored], more: Sequence[str] = ()) -> None:
    texts = {*(run.about["data_hash"] for run in runs if "data_hash" in run.about), *more}
    if len(texts) > 1:
        raise OptionError(
            message(
                f"{out} has runs of different text: {', '.join(sorted(texts))}",
                rule="runs are compared on the same text",
                fix="name another folder, or delete this one",
            )
        )


def _check_shared(config: RunConfig, out: Path) -> None:
    """Raise for options that runs of a comparison cannot share, and for missing ones that they need."""
    check_apart(config, out)
    for name in _SINGLE_RUN_OPTIONS:
        if getattr(config, name):
            raise OptionError(
                message(
                    f"compare with {option(name, getattr(config, name))}",
                    rule="each run of a comparison has a folder of its own below out, with its metrics alone",
                    fix=f"leave {option(name)} out, or pass it to train",
                )
            )
    if not config.eval_batches:
        raise OptionError(
            message(
                f"compare with {option('eval_batches', 0)}",
                rule="losses on held-out text are compared",
                fix=f"pass {option('eval_batches', 1)} or more",
            )
        )


def _check_branch(config: RunConfig, seeds: Sequence[int], branch_at: int) -> None:
    def refuse(what: str, rule: str, fix: str) -> NoReturn:
        raise OptionError(message(what, rule=rule, fix=fix))

    at, since, start = option("branch_at", branch_at), config.recipe.since, config.start
    if branch_at and not 0 < branch_at < config.steps:
        rule = "runs share at least one step, and differ before the last"
        refuse(f"{at} of {config.steps} steps", rule, f"pass 1 to {config.steps - 1}, or 0")
    if since and branch_at:
        rule = "recipes begin where runs branch, or at a step of runs that differ from step 0"
        refuse(f"{at} and {option('recipe.since', since)}", rule, "leave one of them out")
    if start is not None and branch_at:
        rule = "runs start from one checkpoint"
        refuse(f"{at} and {option('start', start)}", rule, "leave one of them out")
    if start is not None and len(seeds) > 1:
        rule = "a checkpoint belongs to one seed"
        fix = f"pass {option('branch_at')}, which makes one for each seed"
        refuse(f"{option('start', start)} for {len(seeds)} seeds", rule, fix)


def _each(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, hooks: Callable[[int], Sequence[Hooks]]
) -> Iterator[tuple[int, T]]:
    """(index, result) of each task: in this process with hooks, or `jobs` at a time in worker processes."""
    if jobs > 1:
        yield from side_by_side(function, tasks, jobs)
    else:
        for place, task in enumerate(tasks):
            yield place, function(*task, hooks(place))


def _run(
    arm: Arm,
    config: RunConfig,
    out: Path,
    facts: dict[str, Any],
    measurements: Sequence[str],
    commit: str | None,
    hooks: Sequence[Hooks] | None = None,
) -> Stored:
    """One run, read from its file or trained now.  hooks: None in a worker process, which prints plain lines."""
    facts = {"name": arm.name, "says": arm.says, "budget": arm.budget, **facts}
    watching = [Lines(f"{arm.name}, seed {config.seed}")] if hooks is None else hooks
    with broken_casts() if arm.name == CONTROL else nullcontext():
        return run_or_read(arm.name, config, out, watching, arm=facts, measurements=measurements, commit=commit)


__all__ = ["BASELINE", "CONTROL", "NULL", "Arm", "Comparison", "arms_of", "compare", "config_of", "null_of"]
