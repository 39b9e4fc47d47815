"""Results of training runs as JSON lines: one per arm of a comparison, one per measured throughput.

`compare.rows` makes them from run folders. Tables and pictures are made from these lines alone. A line replaces the
stored line of the same key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .store import read_lines, write_lines

BASELINE = "bf16"
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
    rule = "a file of trainings has what `--rows` of compare and speed writes"
    return read_lines(path, lambda fields: _KINDS[fields["kind"]](**fields), rule)


def write(path: Path, rows: Iterable[Training]) -> None:
    """Store lines: a line replaces the line of the same key, others are appended."""
    write_lines(path, [*read(path), *rows])


def load(folder: Path) -> list[Training]:
    """All stored lines."""
    return [row for path in sorted(folder.glob("training-*.jsonl")) for row in read(path)]


def convergences(rows: Sequence[Training]) -> list[Convergence]:
    """Lines of comparisons."""
    return [row for row in rows if isinstance(row, Convergence)]


def throughputs(rows: Sequence[Training]) -> list[Throughput]:
    """Lines of throughput."""
    return [row for row in rows if isinstance(row, Throughput)]


# ---- table of throughput ---------------------------------------------------------------------------------------------

HEAD = (
    "recipe", "compile", "weights cast", "ms per step", "spread", "tokens/s", "speedup", "peak memory", "over bf16",
    "GPU busy", "products", "casts", "attention", "other",
)  # fmt: skip


def baseline(row: Throughput, rows: Sequence[Throughput]) -> Throughput | None:
    """bf16 in the same setting; None if it did not run."""
    alike = (other for other in rows if other.recipe == BASELINE and other.setting == row.setting)
    return next((other for other in alike if not other.failed), None)


def speedup(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Tokens per second over those of bf16."""
    base = baseline(row, rows)
    mine, theirs = row.tokens_per_second, base and base.tokens_per_second
    return mine / theirs if mine and theirs else None


def memory_ratio(row: Throughput, rows: Sequence[Throughput]) -> float | None:
    """Peak memory over that of bf16."""
    base = baseline(row, rows)
    mine, theirs = row.peak_memory, base and base.peak_memory
    return mine / theirs if mine and theirs else None


def cells(row: Throughput, rows: Sequence[Throughput]) -> list[str]:
    """Cells of a table line, as in `HEAD`."""
    cast = "-" if row.recipe == BASELINE else row.weight_cast
    names = [row.recipe, f"{row.compile}, captured" if row.captured else row.compile, cast]
    if row.step_ms is None or row.spread_ms is None or row.tokens_per_second is None:
        return [*names, "failed", *["-"] * (len(HEAD) - 4)]
    spread = f"{100 * (row.spread_ms[1] - row.spread_ms[0]) / row.step_ms:.1f} %"
    won, memory = speedup(row, rows), memory_ratio(row, rows)
    figures = [f"{row.step_ms:,.1f}", spread, f"{row.tokens_per_second:,.0f}", "-" if won is None else f"{won:.2f}x"]
    shares = [f"{100 * row.shares[kind]:.1f} %" if kind in row.shares else "-" for kind in HEAD[-4:]]
    busy = "-" if row.kernel_ms is None else f"{min(100.0, 100 * row.kernel_ms / row.step_ms):.0f} %"
    return [*names, *figures, gib(row.peak_memory), "-" if memory is None else f"{memory:.2f}x", busy, *shares]


def gib(value: int | None) -> str:
    """Bytes in GiB."""
    return "-" if value is None else f"{value / 2**30:.1f} GiB"
