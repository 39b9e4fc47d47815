"""`blockscale speed`: tokens per second, memory and breakdown of the step time of a model with several recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .. import env
from ..train.config import Compile, WeightCast
from . import arguments
from .train import ArmRecipe, RunOptions, check_run, hides, parse, refuse_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ..bench.trainings import Throughput

# of the table
WIDTH = 180
# columns of a dry run on a CPU: names, milliseconds a step, spread
_CPU_COLUMNS = 5
CPU_SPEED = (
    "Speed needs a GPU: a CPU emulates low precision, so speedups, memory and shares of time are not shown. These "
    "times are a dry run: they show that the command works."
)


@dataclass(frozen=True)
@hides("since")
class SpeedRecipe(ArmRecipe):
    """Precision of the linear layers from the first step on, for every recipe; see docs/recipes.md."""


@dataclass(frozen=True)
@hides(
    "steps log_every eval_every eval_batches folder save_every "
    "keep resume start profile numerics_every tensorboard export"
)
class Options(RunOptions):
    """A run with the options of the timing, which sets steps, evaluations, reports and checkpoints."""

    recipe: SpeedRecipe = field(default_factory=SpeedRecipe)
    recipes: tuple[str, ...] = ("fp8_blockwise",)
    """Recipes, separated by commas or spaces; bf16 is always timed."""
    compiles: tuple[Compile, ...] = ()
    """Compile modes, separated by commas or spaces; default: that of the run."""
    weight_casts: tuple[WeightCast, ...] = ()
    """When to cast weights, separated by commas or spaces; default: that of the run."""
    warm_up: int = 5
    """Untimed warm-up steps: compilation and autotuning."""
    timed: int = 15
    """Timed steps."""
    out: Path = Path("out/speed")
    """Folder of the runs; finished runs in it are not repeated."""
    rows: Path | None = None
    """File to store a row for each arm in, such as training-h200.jsonl; rows of the same key are replaced."""
    commit: str | None = None
    """Commit to record if the source is not a git checkout."""


def main(words: list[str]) -> int:
    """Parse a preset, changes to it and the options of the timing, and run it."""
    return run(parse(words, "speed", "Time steps of a preset by several recipes.", Options.of))


def run(options: Options) -> int:
    """Time the missing arms and show the table; returns 1 if an arm failed."""
    recipes = arguments.recipes(options.recipes)
    arguments.at_least(1, options.warm_up, "--warm-up", "the first step compiles")
    arguments.at_least(2, options.timed, "--timed", "a spread needs two steps")
    refuse_ranks("speed")
    check_run(options.config)
    arguments.check_writable(options.out, "--out", is_folder=True)
    arguments.check_writable(options.rows, "--rows")
    env.suggest_to_others("KINETO_LOG_LEVEL", "99")  # silences the log of torch's profiler
    console = arguments.wide_console(WIDTH)
    with console.status("importing torch ..."):
        from ..bench import trainings
        from ..compare.throughput import arms_of, measure

    if options.rows is not None:
        trainings.read(options.rows)  # a file of another kind is refused before any work

    arms = arms_of(options.config, recipes, *map(_unique, (options.compiles, options.weight_casts)))
    console.print(f"{options.name}: {len(arms)} arms, {options.warm_up} + {options.timed} steps each", highlight=False)
    rows = measure(arms, out=options.out, warm_up=options.warm_up, timed=options.timed, commit=options.commit)
    _show(console, rows)
    if options.rows is not None:
        trainings.write(options.rows, rows)
        console.print(f"stored {len(rows)} rows in {options.rows}", highlight=False)
    return 1 if any(row.failed for row in rows) else 0


def _unique(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _show(console: Console, rows: Sequence[Throughput]) -> None:
    from ..bench.trainings import HEAD, cells

    is_on_gpu = str(rows[0].where.get("device", "")).startswith("cuda")
    shown = len(HEAD) if is_on_gpu else _CPU_COLUMNS
    table = arguments.table("", HEAD[:shown], HEAD[1:])
    for row in rows:
        table.add_row(*cells(row, rows)[:shown])
    console.print(table)
    for row in rows:
        if row.failed:
            console.print(f"{row.recipe}, compile {row.compile}: {row.failed}", highlight=False)
    if not is_on_gpu:
        console.print(CPU_SPEED)
