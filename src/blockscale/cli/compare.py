"""`blockscale compare`: convergence and speed of a model by several recipes. Paired runs, a table, an HTML page."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .. import env
from ..train.checks import check_seeds
from ..train.presets import get_preset
from . import arguments
from .train import DEFAULT, HIDDEN, ArmRecipe, RunOptions, check_run, parse

if TYPE_CHECKING:
    from rich.console import Console

    from ..compare.comparison import Comparison


@dataclass(frozen=True)
class Options(RunOptions):
    """A run with the options of the comparison, which sets the recipe's name and the folders."""

    recipe: ArmRecipe = field(default_factory=ArmRecipe)
    seed: int = 0
    """First seed, of initial weights, data order and stochastic rounding; the others count up from it."""
    folder: Annotated[Path | None, HIDDEN] = field(default=None, init=False)
    resume: Annotated[bool, HIDDEN] = field(default=False, init=False)
    profile: Annotated[int, HIDDEN] = field(default=0, init=False)
    numerics_every: Annotated[int, HIDDEN] = field(default=0, init=False)
    tensorboard: Annotated[bool, HIDDEN] = field(default=False, init=False)
    export: Annotated[Path | None, HIDDEN] = field(default=None, init=False)
    recipes: tuple[str, ...] = ("fp8_blockwise", "mxfp8", "nvfp4")
    """Recipes, separated by commas or spaces; bf16 and the null run (bf16, another reduction order) are always run."""
    seeds: int = 1
    """Paired seeds; confidence intervals need two or more."""
    out: Path = Path("out/compare")
    """Folder of the runs and of the page; finished runs in it are not repeated."""
    branch_at: int = 0
    """Step at which the runs of a seed branch off a common bf16 run, so that early noise is shared; 0: at the start."""
    budget: float | None = None
    """Largest accepted gap in percent; None: 0.25 for 8 and 6 bits, 2 for 4 bits."""
    jobs: int = 1
    """Parallel runs, each in its own process: for models too small to fill a GPU. Speeds are not shown then."""
    commit: str | None = None
    """Commit to record if the source is not a git checkout."""
    control: bool = False
    """Add a control arm, MXFP8 with a fault in its casts; its verdict must be worse, or faults go unnoticed."""
    require_verdict: bool = False
    """Exit with status 3 if a recipe has no verdict (undecided, too short to tell) and none is worse."""


STATUSES = (
    "Exit status: 0 if no recipe is worse, 1 if one is worse or diverged, 2 if nothing could be run, 3 with "
    "--require-verdict if one is undecided or too short to tell, 130 if interrupted."
)


def main(words: list[str]) -> int:
    """Parse a preset, changes to it and the options of the comparison, and run it."""
    return run(parse(words, "compare", "Train a preset by several recipes, in pairs.", Options.of, STATUSES))


def run(options: Options | None = None) -> int:
    """Run the missing runs, show the table, write the page; returns the exit status described in `STATUSES`."""
    options = options or Options.of(get_preset(DEFAULT))
    recipes, budget = _checked(options), options.budget
    env.suggest_to_others("KINETO_LOG_LEVEL", "99")  # silences the log of torch's profiler
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..compare.comparison import compare
        from ..compare.report import write

    began = time.perf_counter()
    total = options.seeds * (len({*recipes, "bf16", "null"}) + bool(options.branch_at) + options.control)
    with _Progress(console, total) as shown:
        found = compare(
            options.config,
            recipes,
            range(options.seed, options.seed + options.seeds),
            out=options.out,
            budget=None if budget is None else budget / 100,
            hooks=shown.hooks,
            jobs=options.jobs,
            commit=options.commit,
            branch_at=options.branch_at,
            control=options.control,
        )
    _show(console, found)
    page = write(found, options.out / "report.html")
    console.print(f"wrote {page} in {time.perf_counter() - began:.0f} s", highlight=False)
    return status(found, options.require_verdict)


def status(found: Comparison, require_verdict: bool) -> int:
    """Exit status from the verdicts of the recipes."""
    verdicts = found.verdicts().values()
    if any(each.is_bad for each in verdicts):
        return 1
    return 3 if require_verdict and not all(each.is_good for each in verdicts) else 0


_COLOURS = {"good": "green", "bad": "red", "open": "yellow", "short": "cyan"}


def _checked(options: Options) -> list[str]:
    """The recipes; raises for options that cannot be compared, before torch is imported."""
    check_run(options.config)
    recipes = arguments.recipes(options.recipes)
    if options.require_verdict and not {*recipes} - {"bf16"}:
        rule = "bf16 is the baseline, and has no verdict"
        fix = "name a recipe, such as --recipes mxfp8, or leave --require-verdict out"
        arguments.refuse(f"--require-verdict with --recipes {' '.join(recipes)}", rule, fix)
    check_seeds(options.seed, options.seeds)
    arguments.at_least(1, options.jobs, "--jobs", "at least one run at a time")
    arguments.at_least(1, options.eval_batches, "--eval-batches", "losses on held-out text are compared")
    arguments.at_least(0, options.branch_at, "--branch-at", "runs branch after that step; 0: at the start")
    if options.branch_at and options.branch_at >= options.steps:
        rule, fix = "runs branch before the last step", f"pass --branch-at {options.steps - 1} or less"
        arguments.refuse(f"--branch-at {options.branch_at} of {options.steps} steps", rule, fix)
    if options.budget is not None and not 0 < options.budget < 100:
        arguments.refuse(f"--budget {options.budget:g}", "it is a percentage of the loss", "pass --budget 0.25")
    arguments.check_writable(options.out, "--out", is_folder=True)
    return recipes


class _Progress:
    """One progress bar for all steps of all runs; plain lines without a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn())
        self.console, self.total, self.begun = console, total, 0
        self.bar = Progress(*columns, console=console, transient=True)
        self.task: Any = None

    def __enter__(self) -> _Progress:
        self.bar.start()
        self.task = self.bar.add_task("running", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def hooks(self, arm: Any, seed: int) -> list[Any]:
        """Hooks that update the bar for the next run."""
        from ..compare.side_by_side import Lines
        from ..train.records import Hooks

        progress, self.begun = self, self.begun + 1
        place, name = self.begun, f"run {self.begun} of {self.total}: {arm.name}, seed {seed}"

        class Watch(Hooks):
            def before_step(self, run: Any) -> None:
                steps = run.config.steps
                done = (place - 1) * steps + run.step
                progress.bar.update(progress.task, completed=done, total=progress.total * steps, description=name)

            def on_end(self, run: Any, result: Any) -> None:
                said = f"loss {result.loss:.4f}" if result.evaluations else f"{result.steps} steps"
                progress.console.print(f"{name}: {said}", highlight=False)

        return [Watch(), *([] if self.console.is_terminal else [Lines(name)])]


def _show(console: Console, found: Comparison) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..compare.report import head, summary, table

    shown = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for name in head(found):
        is_text = name in ("recipe", "verdict")
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=name != "verdict")
    for arm, (name, said, *figures) in zip(found.arms, table(found), strict=True):
        verdict = found.verdict(arm)
        shown.add_row(name, f"[{_COLOURS[verdict.tone]}]{said}[/]" if verdict else "", *figures)
    console.print(shown)
    for line in summary(found):
        console.print(line, highlight=False)
