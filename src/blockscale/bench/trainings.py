"""Results of training runs as JSON lines: one per arm of a comparison, one per measured throughput.

`train.publish` makes them from run folders. Tables and pictures are made from these lines alone. A line replaces the
stored line of the same key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OptionError, message

Points = list[list[float]]


@dataclass(frozen=True)
class Convergence:
    """One arm of a comparison, all seeds.

    says: the arm in words.  losses: final loss on held-out text, by seed; None if a run diverged.  gap, error: relative
    to bf16, mean of the pairs and half of its interval of 95 %.  noise: largest gap that the null run (bf16, another
    reduction order) shows by chance.  curves: training loss, smoothed and thinned, by seed.  along: [step, mean gap on
    held-out text].  tokens_per_second, shares: None and empty if runs shared the GPU.  branch_at: step up to which all
    runs of a seed are one bf16 run; 0: none.  since: step from which recipes use low precision.
    """

    model: str
    arm: str
    says: str
    seeds: list[int]
    steps: int
    tokens_per_step: int
    parameters: int
    flop_share: float
    data_hash: str
    losses: list[float | None]
    gap: float | None
    error: float | None
    noise: float | None
    budget: float | None
    verdict: str
    why: str
    curves: list[Points]
    along: Points
    tokens_per_second: float | None
    peak_memory: int | None
    shares: dict[str, float]
    where: dict[str, Any]
    branch_at: int = 0
    since: int = 0
    kind: str = "convergence"

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of a line: a stored line of the same key is replaced."""
        return self.kind, self.arm, *self.setting, len(self.seeds)

    @property
    def setting(self) -> tuple[Any, ...]:
        """Common fields of runs that are compared with each other, except their seeds."""
        size = (self.steps, self.branch_at, self.since, self.tokens_per_step, self.parameters)
        return self.model, *size, self.data_hash, self.where.get("gpu")


@dataclass(frozen=True)
class Throughput:
    """Time and memory of a training step: one recipe, one setting of compile and weight_cast.

    converted: number of parameters in low precision.  step_ms, spread_ms: median and quartiles of timed steps; None if
    the run failed.  warm_up: untimed steps before.  peak_memory: bytes.  longest: kernels and their shares of the step.
    kernel_ms: sum over all kernels of a step.  captured: microbatches run as CUDA graphs.  failed: error of a failed
    run.
    """

    model: str
    recipe: str
    compile: str
    weight_cast: str
    layers: int
    sequence: int
    batch: int
    accumulate: int
    recompute: str
    parameters: int
    converted: int
    flop_share: float
    warm_up: int
    timed: int
    step_ms: float | None
    spread_ms: list[float] | None
    tokens_per_second: float | None
    peak_memory: int | None
    shares: dict[str, float] = field(default_factory=dict[str, float])
    longest: dict[str, float] = field(default_factory=dict[str, float])
    kernel_ms: float | None = None
    captured: bool = False
    failed: str = ""
    where: dict[str, Any] = field(default_factory=dict[str, Any])
    kind: str = "throughput"

    @property
    def setting(self) -> tuple[Any, ...]:
        """Common fields of runs that are compared with each other."""
        size = (self.layers, self.sequence, self.batch, self.accumulate, self.recompute)
        return self.model, self.compile, self.captured, *size, self.where.get("gpu")

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of a line: a stored line of the same key is replaced."""
        return self.kind, self.recipe, self.weight_cast, *self.setting


Training = Convergence | Throughput
_KINDS: dict[str, type[Training]] = {"convergence": Convergence, "throughput": Throughput}


def read(path: Path) -> list[Training]:
    """Lines of a file, in its order; empty if the file does not exist."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [_KINDS[row["kind"]](**row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        rule, fix = "a file of trainings has what `blockscale collect` writes", "name another file"
        raise OptionError(message(f"{path} has other lines ({error})", rule=rule, fix=fix)) from None


def write(path: Path, rows: Iterable[Training]) -> None:
    """Store lines: a line replaces the line of the same key, others are appended. The file is replaced atomically."""
    merged = {row.key: row for row in [*read(path), *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(json.dumps(asdict(row)) + "\n" for row in merged.values()))
    os.replace(fresh, path)


def load(folder: Path) -> list[Training]:
    """All stored lines."""
    return [row for path in sorted(folder.glob("training-*.jsonl")) for row in read(path)]


def convergences(rows: Sequence[Training]) -> list[Convergence]:
    """Lines of comparisons."""
    return [row for row in rows if isinstance(row, Convergence)]


def throughputs(rows: Sequence[Training]) -> list[Throughput]:
    """Lines of throughput."""
    return [row for row in rows if isinstance(row, Throughput)]
