"""`blockscale compare`: convergence and speed of a model by several recipes. Paired runs, a table, an HTML page."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .. import env
from ..train.checks import check_comparison, check_seeds
from . import arguments
from .train import ArmRecipe, RunOptions, check_run, hides, parse, refuse_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from ..compare.comparison import Comparison


@dataclass(frozen=True)
@hides("folder resume profile numerics_every tensorboard export")
class Options(RunOptions):
    """A run with the options of the comparison, which sets the recipe's name and the folders."""

    recipe: ArmRecipe = field(default_factory=ArmRecipe)
    seed: int = 0
    """First seed, of initial weights, data order and stochastic rounding; the others count up from it."""
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
    rows: Path | None = None
    """File to store a row for each arm in, such as training-h200.jsonl; rows of the same key are replaced."""
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


def run(options: Options) -> int:
    """Run the missing runs, show the table, write the page; returns the exit status described in `STATUSES`."""
    recipes, budget = _checked(options), options.budget
    env.suggest_to_others("KINETO_LOG_LEVEL", "99")  # silences the log of torch's profiler
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..bench import trainings
        from ..compare.comparison import compare
        from ..compare.page import write
        from ..compare.rows import rows_of
        from ..train.view import Lines

    if options.rows is not None:
        trainings.read(options.rows)  # a file of another kind is refused before any work

    began = time.perf_counter()
    found = compare(
        options.config,
        recipes,
        range(options.seed, options.seed + options.seeds),
        out=options.out,
        budget=None if budget is None else budget / 100,
        hooks=lambda title: [Lines(title)],
        jobs=options.jobs,
        commit=options.commit,
        branch_at=options.branch_at,
        control=options.control,
    )
    _show(console, found)
    page = write(found, options.out / "report.html")
    console.print(f"wrote {page} in {time.perf_counter() - began:.0f} s", highlight=False)
    if options.rows is not None:
        trainings.write(options.rows, rows_of(found))
        console.print(f"stored {len(found.arms)} rows in {options.rows}", highlight=False)
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
    refuse_ranks("compare")
    check_run(options.config)
    recipes = arguments.recipes(options.recipes)
    if options.require_verdict and not {*recipes} - {"bf16"}:
        rule = "bf16 is the baseline, and has no verdict"
        fix = "name a recipe, such as --recipes mxfp8, or leave --require-verdict out"
        arguments.refuse(f"--require-verdict with --recipes {' '.join(recipes)}", rule, fix)
    check_seeds(options.seed, options.seeds)
    arguments.at_least(1, options.jobs, "--jobs", "at least one run at a time")
    check_comparison(options.config, range(options.seeds), options.branch_at, options.out)
    if options.budget is not None and not 0 < options.budget < 100:
        arguments.refuse(f"--budget {options.budget:g}", "it is a percentage of the loss", "pass --budget 0.25")
    arguments.check_writable(options.out, "--out", is_folder=True)
    arguments.check_writable(options.rows, "--rows")
    return recipes


def _show(console: Console, found: Comparison) -> None:
    from ..compare.report import summary, table

    rows = table(found)
    shown = arguments.table("", rows[0], {*rows[0]} - {"recipe", "verdict"})
    shown.columns[list(rows[0]).index("verdict")].no_wrap = False
    for arm, row in zip(found.arms, rows, strict=True):
        verdict = found.verdict(arm)
        colour = {"verdict": f"[{_COLOURS[verdict.tone]}]{row['verdict']}[/]"} if verdict else {}
        shown.add_row(*(row | colour).values())
    console.print(shown)
    for line in summary(found):
        console.print(line, highlight=False)
