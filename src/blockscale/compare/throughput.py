"""Throughput of training steps: one model by several recipes, compiled or not, with each time of casting weights.

Each arm runs in its own process, one after the other: large models do not fit a GPU twice, and an arm that fails, for
example out of memory, does not affect the others. The first steps, with compilation and autotuning, are not timed; of
the others the median and the quartiles are reported. Losses are meaningless here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..autograd import get_recipe
from ..bench.trainings import Throughput
from ..errors import option
from ..train.checks import refuse_if
from ..train.config import RunConfig
from ..train.view import Lines
from .comparison import BASELINE
from .side_by_side import side_by_side
from .stored import Stored, run_or_read


def arms_of(
    config: RunConfig, recipes: Sequence[str], compiles: Sequence[str] = (), weight_casts: Sequence[str] = ()
) -> list[RunConfig]:
    """Configs of the baseline and each recipe, for every `compiles` and, except for the baseline, every `weight_casts`;
    the config's own values if none are given."""
    for name in recipes:
        get_recipe(name)
    arms: list[RunConfig] = []
    for how in compiles or [config.compile]:
        for name in dict.fromkeys([BASELINE, *recipes]):
            casts = ["forward"] if name == BASELINE else weight_casts or [config.recipe.weight_cast]
            for cast in casts:
                recipe = replace(config.recipe, name=name, weight_cast=cast)  # pyright: ignore[reportArgumentType]
                arms.append(replace(config, recipe=recipe, compile=how))  # pyright: ignore[reportArgumentType]
    return arms


def measure(
    arms: Sequence[RunConfig], *, out: Path, warm_up: int = 5, timed: int = 15, commit: str | None = None
) -> list[Throughput]:
    """Run the missing arms, and read all of them.

    warm_up, timed: steps.  out: folder of the runs.  commit: recorded if there is no git.
    """
    what = f"{option('warm_up', warm_up)}, {option('timed', timed)}"
    rule = "the first step compiles, and quartiles need two timed steps"
    refuse_if(warm_up < 1 or timed < 2, what, rule, f"pass {option('warm_up', 5)} and {option('timed', 15)}")
    tasks = [(_timed(config, warm_up + timed), out, warm_up, commit) for config in arms]
    return [throughput_of(run) for run in side_by_side(_run, tasks, 1, fresh=True)]


def _timed(config: RunConfig, steps: int) -> RunConfig:
    """The config with every step logged, and no evaluations, checkpoints or traces."""
    nothing = {"eval_every": 0, "eval_batches": 0, "save_every": 0, "profile": 0, "numerics_every": 0}
    recipe = replace(config.recipe, since=0)
    return replace(config, steps=steps, recipe=recipe, log_every=1, export=None, tensorboard=False, **nothing)


def _run(config: RunConfig, out: Path, warm_up: int, commit: str | None) -> Stored:
    label = f"{config.recipe.name}-{config.compile}-{config.recipe.weight_cast}"
    arm, hooks, results = {"measures": "throughput", "warm_up": warm_up}, [Lines(label)], (Exception,)
    return run_or_read(label, config, out, hooks, arm=arm, measurements=("shares",), commit=commit, results=results)


def throughput_of(run: Stored) -> Throughput:
    """Throughput row of one run."""
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
        warm_up=warm_up,
        timed=len(seconds),
        step_ms=None if step is None else 1e3 * step,
        spread_ms=None if step is None else [1e3 * low, 1e3 * high],
        tokens_per_second=None if step is None else tokens / step,
        peak_memory=run.end.get("peak_memory"),
        captured=config.get("cuda_graph", False),
        **{name: config[name] for name in ("batch", "accumulate", "recompute")},
        **{name: run.about.get(name, 0) for name in ("parameters", "converted", "flop_share")},
        **{name: getattr(run, name) for name in ("shares", "longest", "kernel_ms", "failed", "where")},
    )
