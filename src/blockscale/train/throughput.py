"""What a recipe wins: steps of the same model by several recipes, compiled or not, with weights cast at several times.

Each arm runs in a process of its own, one after the other: large models do not fit a GPU twice, and an arm that fails,
out of memory for instance, says so and leaves the others alone. The first steps, which hold compilation and autotuning,
do not count; of the others the median counts, and quartiles say how far they spread. Losses mean nothing here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from ..autograd import get_recipe
from ..bench.trainings import Throughput
from ..errors import OptionError, check_name, message, option
from .compare import BASELINE
from .config import Compile, RunConfig, WeightCast
from .side_by_side import Lines, side_by_side
from .stored import Stored, run_or_read

# what files of such runs say that they measure
MEASURES = "throughput"


def arms_of(
    config: RunConfig, recipes: Sequence[str], compiles: Sequence[str] = (), weight_casts: Sequence[str] = ()
) -> list[RunConfig]:
    """The baseline and the recipes, each by every way to compile and, but for the baseline, to cast weights; those of
    the config where none are named."""
    for name in recipes:
        get_recipe(name)
    for names, known, what in ((compiles, Compile, "compile"), (weight_casts, WeightCast, "weight_cast")):
        for name in names:
            check_name(name, get_args(known), what)
    arms: list[RunConfig] = []
    for how in compiles or [config.compile]:
        for name in dict.fromkeys([BASELINE, *recipes]):
            casts = ["forward"] if name == BASELINE else weight_casts or [config.recipe.weight_cast]
            for cast in casts:
                recipe = replace(config.recipe, name=name, weight_cast=cast)  # pyright: ignore[reportArgumentType]
                arms.append(replace(config, recipe=recipe, compile=how))  # pyright: ignore[reportArgumentType]
    return arms


def measure(
    arms: Sequence[RunConfig],
    *,
    out: Path,
    warm_up: int = 5,
    timed: int = 15,
    commit: str | None = None,
    told: Callable[[Throughput], None] = lambda row: None,
) -> list[Throughput]:
    """Run what is not there yet, and read all of it.

    warm_up, timed: steps.  out: where runs are kept.  commit: to record without git.  told: called with each row as it
    is there.
    """
    if warm_up < 1 or timed < 2:
        raise OptionError(
            message(
                f"{option('warm_up', warm_up)}, {option('timed', timed)}",
                rule="the first step compiles, and a spread takes two",
                fix=f"pass {option('warm_up', 5)} and {option('timed', 15)}",
            )
        )
    tasks = [(_timed(config, warm_up + timed), out, warm_up, commit) for config in arms]
    found: dict[int, Throughput] = {}
    for place, run in side_by_side(_run, tasks, 1, fresh=True):
        found[place] = throughput_of(run)
        told(found[place])
    return [found[place] for place in range(len(arms))]


def _timed(config: RunConfig, steps: int) -> RunConfig:
    """Every step is told, and there is nothing but steps."""
    nothing = {"eval_every": 0, "eval_batches": 0, "save_every": 0, "profile": 0, "numerics_every": 0}
    recipe = replace(config.recipe, since=0)
    return replace(config, steps=steps, recipe=recipe, log_every=1, export=None, tensorboard=False, **nothing)


def _run(config: RunConfig, out: Path, warm_up: int, commit: str | None) -> Stored:
    label = f"{config.recipe.name}-{config.compile}-{config.recipe.weight_cast}"
    return run_or_read(
        label,
        config,
        out,
        [Lines(label, every=5)],
        arm={"measures": MEASURES, "warm_up": warm_up},
        looks=("shares",),
        commit=commit,
        results=(Exception,),
    )


def throughput_of(run: Stored) -> Throughput:
    """The figures of one run."""
    config, warm_up = run.about["config"], run.arm["warm_up"]
    seconds = [each for step, each in sorted(run.seconds.items()) if step > warm_up]
    is_good = not run.failed and len(seconds) > 1
    tokens = config["batch"] * config["accumulate"] * config["data"]["sequence"]
    step = statistics.median(seconds) if is_good else None
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if is_good else (0.0, 0.0, 0.0)
    return Throughput(
        model=config["name"],
        recipe=config["recipe"]["name"],
        compile=config["compile"],
        weight_cast=config["recipe"]["weight_cast"],
        layers=config["model"]["layers"],
        sequence=config["data"]["sequence"],
        batch=config["batch"],
        accumulate=config["accumulate"],
        recompute=config["recompute"],
        parameters=run.about.get("parameters", 0),
        converted=run.about.get("converted", 0),
        flop_share=run.about.get("flop_share", 0.0),
        warm_up=warm_up,
        timed=len(seconds),
        step_ms=None if step is None else 1e3 * step,
        spread_ms=None if step is None else [1e3 * low, 1e3 * high],
        tokens_per_second=None if step is None else tokens / step,
        peak_memory=run.end.get("peak_memory"),
        shares=run.shares,
        longest=run.longest,
        kernel_ms=run.kernel_ms,
        captured=config.get("cuda_graph", False),
        failed=run.failed,
        where=run.where,
    )
