"""`compare`: the same model, text and seeds by several recipes, in pairs, and bf16 once more as the null.

Every run of a seed starts from the same weights and sees the same pieces in the same order; only the recipe differs.
The null differs from bf16 in nothing but the order in which sums are taken, see `null_of`. Each run has a folder with
one file of JSON lines, which is all that tables and the page are made from: a comparison that was interrupted goes on
with the runs that are missing, and one that is repeated with more seeds or recipes runs those alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..autograd import Recipe, get_recipe, refresh_weights_
from ..diagnostics.layers import layer_numerics
from ..errors import NonFiniteError, OptionError, message
from ..hardware import describe
from .breakdown import breakdown
from .config import RunConfig, fingerprint
from .loop import train
from .metrics import JsonLines
from .records import Hooks, TrainResult
from .run import Run
from .statistics import Gap, Verdict, judge, noise_of, paired, wander

BASELINE, NULL = "bf16", "null"
# accepted relative gaps by the bits of a recipe's narrowest element
BUDGETS = {8: 0.0025, 6: 0.0025, 4: 0.02}


@dataclass(frozen=True)
class Arm:
    """One line of the table.  says: what it is.  budget: the largest gap that is accepted."""

    name: str
    says: str
    config: RunConfig
    budget: float | None = None


@dataclass
class Stored:
    """One run, as its file tells it.  about: of the line "run".  end: of the last line, empty where the run is not
    done.  where: machine and versions.  shares: of a step's time.  layers: numerics.  failed: why it ended early."""

    about: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: dict[int, float] = field(default_factory=dict[int, float])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    end: dict[str, Any] = field(default_factory=dict[str, Any])
    where: dict[str, Any] = field(default_factory=dict[str, Any])
    shares: dict[str, float] = field(default_factory=dict[str, float])
    layers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failed: str = ""

    @property
    def is_done(self) -> bool:
        return bool(self.failed) or self.end.get("stopped") == "done"

    @property
    def loss(self) -> float:
        """Of held-out text at the end; infinite where the run broke down."""
        return float("inf") if self.failed else float(self.end["loss"])


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison.  runs: by arm, one for each seed, in the order of `seeds`."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: dict[str, tuple[Stored, ...]]

    def gap(self, name: str) -> Gap:
        """To the baseline, in pairs."""
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
        """What the null says that a gap may be by chance."""
        return noise_of(self.gap(NULL), [gap for _, gap in self.along(NULL)])

    def verdict(self, arm: Arm) -> Verdict | None:
        """On a recipe; None for the baseline and the null."""
        if arm.budget is None:
            return None
        strayed = wander([gap for _, gap in self.along(arm.name)])
        return judge(self.gap(arm.name), self.noise, arm.budget, strayed)

    def tokens_per_second(self, name: str) -> float:
        """The best of its seeds: what disturbs a machine only slows it down."""
        return max(float(run.end.get("tokens_per_second", 0.0)) for run in self.runs[name])

    @property
    def is_on_gpu(self) -> bool:
        return str(self.runs[BASELINE][0].where.get("device", "")).startswith("cuda")


def null_of(config: RunConfig) -> tuple[RunConfig, str]:
    """The baseline with sums in another order, and what that is. The pieces of each step stay the same.

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


def arms_of(config: RunConfig, recipes: Sequence[str], budget: float | None = None) -> tuple[Arm, ...]:
    """The baseline, the null and the recipes, each once.  budget: for every recipe; None: by its bits."""
    null, says = null_of(config)
    arms = [
        Arm(BASELINE, "what the others are compared with", _by(config, BASELINE)),
        Arm(NULL, says, null),
    ]
    for name in dict.fromkeys(recipes):
        if name != BASELINE:
            recipe = get_recipe(name)
            arms.append(Arm(name, str(recipe), _by(config, name), BUDGETS[_bits(recipe)] if budget is None else budget))
    return tuple(arms)


def _by(config: RunConfig, name: str) -> RunConfig:
    return replace(config, recipe=replace(config.recipe, name=name))


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
) -> Comparison:
    """Run what is not there yet, and read all of it.

    recipes: names; bf16 and the null are always run.  seeds: how many, or which.  out: where runs are kept.  budget:
    the relative gap that is accepted, such as 0.0025.  hooks: who watches a run, made for each.
    """
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:
        raise OptionError(
            message(f"seeds={seeds!r}", rule="a comparison has at least one seed", fix="pass seeds=1 or more")
        )
    arms = arms_of(config, recipes, budget)
    runs: dict[str, list[Stored]] = {arm.name: [] for arm in arms}
    for seed in chosen:  # seed by seed, so that an interrupted comparison has whole pairs
        for arm in arms:
            runs[arm.name].append(_run(arm, seed, out, hooks(arm, seed), looks=seed == chosen[0]))
    texts = {run.about["data_hash"] for each in runs.values() for run in each}
    if len(texts) > 1:
        raise OptionError(
            message(
                f"{out} has runs of different text: {', '.join(sorted(texts))}",
                rule="runs are compared on the same text",
                fix="name another folder, or delete this one",
            )
        )
    return Comparison(arms, chosen, {name: tuple(each) for name, each in runs.items()})


def _run(arm: Arm, seed: int, out: Path, hooks: Sequence[Hooks], *, looks: bool) -> Stored:
    """One run, from its file or now.  looks: measure layers and shares of time at its end.

    With `save_every` a run that was cut off goes on from its last checkpoint.
    """
    config = replace(arm.config, seed=seed, folder=None, resume=False)
    folder = out / "runs" / f"{arm.name}-seed{seed}-{fingerprint(config)}"
    found = read(folder / "metrics.jsonl")
    if found.is_done:
        return found
    _mend(folder / "metrics.jsonl")
    if config.save_every:
        config = replace(config, folder=folder, resume=True)
    try:
        if train(config, hooks=[RunLog(folder, looks=looks), *hooks]).stopped == "interrupted":
            raise KeyboardInterrupt
    except NonFiniteError as error:
        RunLog(folder).fail(str(error))
    return read(folder / "metrics.jsonl")


class RunLog(JsonLines):
    """The metrics of a run, and what a comparison shows besides: machine, versions, shares of time, numerics."""

    def __init__(self, folder: Path, *, looks: bool = True) -> None:
        super().__init__(folder)
        self.looks = looks

    def on_start(self, run: Run) -> None:
        """Where it runs."""
        super().on_start(run)
        versions = {name: _version(name) for name in ("blockscale", "torch", "triton")}
        self._write("where", **describe(run.device), **versions, python=platform.python_version())

    def on_end(self, run: Run, result: TrainResult) -> None:
        """What is measured on the trained model; one step more than the run had, which nobody keeps."""
        if self.looks and result.stopped == "done":
            refresh_weights_(run.model)
            batch = run.pieces(0, 0)
            found = layer_numerics(run.model, lambda: run.model.loss(batch))
            self._write("layers", layers=[asdict(each) for each in found])
            self._write("shares", **breakdown(run.advance))
        super().on_end(run, result)

    def fail(self, why: str) -> None:
        """A run that broke down is a result, and is not run again."""
        self._write("failed", why=why)
        self.close()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _mend(path: Path) -> None:
    """Drop a last line that was cut off in the middle, so that the next one stands by itself."""
    if path.exists() and not (text := path.read_text()).endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])


def read(path: Path) -> Stored:
    """A run from its file; empty where there is none. A line that was cut off is the last one, and does not count."""
    found = Stored()
    if not path.exists():
        return found
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        _take(found, row.pop("kind"), row)
    return found


def _take(found: Stored, kind: str, row: dict[str, Any]) -> None:
    match kind:
        case "run":  # again, or going on: what came after that step is run anew
            found.about, found.end, found.failed = row, {}, ""
            for kept in (found.losses, found.evaluations):
                for step in [step for step in kept if step > row["step"]]:
                    del kept[step]
        case "step":
            found.losses[row["step"]] = row["loss"]
        case "evaluation":
            found.evaluations[row["step"]] = row["loss"]
        case "where":
            found.where = row
        case "shares":
            found.shares = row
        case "layers":
            found.layers = row["layers"]
        case "failed":
            found.failed = row["why"]
        case "end":
            found.end = row
        case _:
            pass


__all__ = ["BASELINE", "NULL", "Arm", "Comparison", "RunLog", "Stored", "arms_of", "compare", "null_of", "read"]
