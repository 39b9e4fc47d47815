"""`compare`: paired runs of one model, text and seed by several recipes, with a null run.

All runs of a seed start from the same weights and see the same sequences in the same order; only the recipe differs.
The null run is bf16 with another reduction order, see `null_of`. Each run has a folder with one file of JSON lines, the
only source of tables, page and rows. An interrupted comparison resumes with the missing runs; a repetition with more
seeds or recipes runs only the new ones. A control arm with a known fault may run beside them, see `control`.

Runs may branch from one bf16 checkpoint (`branch_at`): two runs of the same precision diverge in their first few
hundred steps (docs/design/training.md), so runs with a shared start resolve smaller differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..autograd import Recipe
from ..train import checkpoint
from ..train.checks import check_comparison, check_seeds, refuse_if
from ..train.config import RunConfig, fingerprint
from ..train.data import load
from ..train.loop import train
from ..train.records import Hooks, StopAfter
from ..train.run import recipe_of
from ..train.view import Lines
from .control import CONTROL, CONTROL_RECIPE, SAYS, broken_casts
from .side_by_side import side_by_side
from .statistics import Gap, Length, Verdict, drift_of, judge, noise_of, paired
from .stored import MEASUREMENTS, METRICS, Stored, folder_of, read, run_or_read

T = TypeVar("T")
BASELINE, NULL, TRUNKS = "bf16", "null", "trunks"
NOTHING_CONVERTED = Verdict("undecided", "no layer was converted: it is bf16 (see keep_first and keep_last)")
# accepted relative gap, by the bits of a recipe's narrowest element
BUDGETS = {8: 0.0025, 6: 0.0025, 4: 0.02}


@dataclass(frozen=True)
class Arm:
    """An arm of a comparison.  says: description, stored in rows.  budget: largest accepted gap; None: no verdict."""

    name: str
    says: str
    budget: float | None = None

    @property
    def is_recipe(self) -> bool:
        """Whether the arm is a recipe under test: neither bf16, nor the null run, nor the control."""
        return self.budget is not None and self.name != CONTROL


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison.  runs: by arm, one for each seed, in the order of `seeds`."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: dict[str, tuple[Stored, ...]]

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
        judged = ((arm.name, self.verdict(arm)) for arm in self.arms if arm.is_recipe)
        return {name: verdict for name, verdict in judged if verdict is not None}

    def length(self, name: str) -> Length:
        """Steps and evaluations of an arm, and the steps that it shares with the baseline."""
        shared_steps = max(self.branch_at, self.since)
        steps = int(self.runs[BASELINE][0].about["config"]["steps"])
        return Length(steps, sum(step > shared_steps for step, _ in self.along(name)), shared_steps)

    def tokens_per_second(self, name: str) -> float:
        """Highest speed among an arm's seeds: disturbances only slow a machine down."""
        return max(float(run.end.get("tokens_per_second", 0.0)) for run in self.runs[name])

    def peak_memory(self, name: str) -> int | None:
        """Most bytes among an arm's seeds; None on a CPU."""
        known = [run.end["peak_memory"] for run in self.runs[name] if run.end.get("peak_memory") is not None]
        return max(known, default=None)

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

    >>> from blockscale.train import get_preset
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
    says = f"the loss of {config.data.sequence} symbols in {chunks} pieces, whose gradients are added"
    return replace(config, loss_chunks=chunks), f"bf16 with {says}"


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
    formats = str([*recipe.formats().values()])
    return 4 if "fp4" in formats else 6 if "fp6" in formats else 8


def compare(
    config: RunConfig,
    recipes: Sequence[str],
    seeds: int | Sequence[int] = 1,
    *,
    out: Path,
    budget: float | None = None,
    hooks: Callable[[str], Sequence[Hooks]] = lambda title: (),
    jobs: int = 1,
    commit: str | None = None,
    branch_at: int = 0,
    control: bool = False,
) -> Comparison:
    """Train the missing runs, and read all of them.

    recipes: names; bf16 and the null run are always included.  seeds: how many, or which.  out: folder of the runs.
    budget: accepted relative gap, such as 0.0025.  hooks: hooks of a run from its title; plain lines with several jobs.
    jobs: concurrent runs, each in its own process; speeds are then not comparable.  commit: recorded if there is no
    git.  branch_at: steps of bf16 that all runs of a seed share; with `config.start` they start from that checkpoint.
    control: adds an arm with a fault that must come out as worse.
    """
    if isinstance(seeds, int) and seeds > 0:
        check_seeds(0, seeds)
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    check_comparison(config, chosen, branch_at, out)
    arms = arms_of(config, recipes, budget, control=control)
    # seed by seed, so that an interrupted comparison has complete pairs
    plan = [(arm, _config_of_seed(arm.name, config, seed, branch_at, out)) for seed in chosen for arm in arms]
    runs = [read(folder_of(arm.name, its, out) / METRICS) for arm, its in plan]
    missing = [place for place, run in enumerate(runs) if not run.is_done]
    done = [run for run in runs if run.is_done]
    # finished runs are compared with the text that the missing ones would read, before any training
    _check_text(out, done, [load(config.data).hash] if done and missing else [])
    if branch_at:
        seeds_left = sorted({plan[place][1].seed for place in missing})
        trunks = {f"{BASELINE} up to step {branch_at}, seed {seed}": replace(config, seed=seed) for seed in seeds_left}
        _all(trunk, {title: (its, branch_at, out) for title, its in trunks.items()}, jobs, hooks)
    elif config.start is not None:
        branch_at = checkpoint.read_about(config.start)["step"]
    facts = {"jobs": jobs} | ({"branch_at": branch_at} if branch_at else {})
    tasks: dict[str, tuple[Any, ...]] = {}
    for count, (arm, its) in enumerate((plan[place] for place in missing), 1):
        title = f"run {count} of {len(missing)}: {arm.name}, seed {its.seed}"
        tasks[title] = (arm, its, out, facts, MEASUREMENTS if its.seed == chosen[0] else (), commit)
    for place, run in zip(missing, _all(_run, tasks, jobs, hooks), strict=True):
        runs[place] = run
    _check_text(out, runs)
    by_arm = {arm.name: tuple(run for (its, _), run in zip(plan, runs, strict=True) if its is arm) for arm in arms}
    return Comparison(arms, chosen, by_arm)


def _config_of_seed(name: str, config: RunConfig, seed: int, branch_at: int, out: Path) -> RunConfig:
    start = _trunk_of(replace(config, seed=seed), branch_at, out) if branch_at else config.start
    return replace(config_of(name, config), seed=seed, start=start)


def _check_text(out: Path, runs: Sequence[Stored], more: Sequence[str] = ()) -> None:
    texts = {*(run.about["data_hash"] for run in runs if "data_hash" in run.about), *more}
    what = f"{out} has runs of different text: {', '.join(sorted(texts))}"
    refuse_if(len(texts) > 1, what, "runs are compared on the same text", "name another folder, or delete this one")


def _all(
    function: Callable[..., T],
    tasks: Mapping[str, tuple[Any, ...]],
    jobs: int,
    hooks: Callable[[str], Sequence[Hooks]],
) -> list[T]:
    """Results of tasks by title: one by one in this process with hooks, or `jobs` at a time in worker processes."""
    if jobs == 1:
        return [function(*task, hooks(title)) for title, task in tasks.items()]
    return side_by_side(function, [(*task, [Lines(title)]) for title, task in tasks.items()], jobs)


def _run(
    arm: Arm,
    config: RunConfig,
    out: Path,
    facts: dict[str, Any],
    measurements: Sequence[str],
    commit: str | None,
    hooks: Sequence[Hooks],
) -> Stored:
    facts = {"name": arm.name, "says": arm.says, "budget": arm.budget, **facts}
    with broken_casts() if arm.name == CONTROL else nullcontext():
        return run_or_read(arm.name, config, out, hooks, arm=facts, measurements=measurements, commit=commit)


def _trunk_of(config: RunConfig, step: int, out: Path) -> Path:
    """Path of the checkpoint that `trunk` writes."""
    folder = out / TRUNKS / f"step{step}-seed{config.seed}-{fingerprint(_bf16(config))}"
    return folder / checkpoint.name_of(step)


def _bf16(config: RunConfig) -> RunConfig:
    return replace(config, recipe=replace(config.recipe, name=BASELINE), folder=None, resume=False)


def trunk(config: RunConfig, step: int, out: Path, hooks: Sequence[Hooks] = ()) -> Path:
    """bf16 checkpoint of a step that the runs of every recipe start from; trained if it does not exist.

    config: the whole run, whose learning-rate schedule applies.  out: folder of the comparison.
    """
    made = _trunk_of(config, step, out)
    if not made.exists():
        train(replace(_bf16(config), folder=made.parent, resume=True), hooks=[StopAfter(step), *hooks])
        if not made.exists():
            raise KeyboardInterrupt
    return made
