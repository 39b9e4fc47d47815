"""Results as JSON lines: one row per case, with everything that one needs to believe or repeat it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError, message
from ..gemm import _ptxas
from ..hardware import describe

REGRESSION = 0.03
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Where:
    """The machine, the versions and the command of a run: the same for all of its rows."""

    gpu: str
    torch: str
    triton: str | None
    python: str
    blockscale: str
    torchao: str | None
    assembler: str | None
    commit: str | None
    dirty: bool | None
    command: str
    utc: str


@dataclass(frozen=True)
class Row:
    """One case. Times are microseconds per call; a wrong kernel has none, and wrong_bytes or problem says how wrong it
    is.

    dtype: of a cast's input, of a product's output.  spread_us: quartiles over rounds.  bytes: the fewest that must
    move.  bound_us: the least time that this machine's own ceilings allow.  sqnr_db: of a product, against the exact
    product of its operands.  peers: {name: {us, ratio, tflop_s, sqnr_db, note}}, the ratio being theirs to ours.
    details: what a suite has to say besides, figures by name (docs/benchmarks.md).
    """

    suite: str
    group: str
    case: str
    format: str
    axis: str
    shape: list[int]
    dtype: str
    backend: str
    checked: str
    wrong_bytes: int
    us: float | None = None
    spread_us: list[float] | None = None
    bytes: int | None = None
    gb_s: float | None = None
    copy_gb_s: float | None = None
    percent_of_copy: float | None = None
    peers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    method: str | None = None
    rounds: int | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    where: dict[str, Any] = field(default_factory=dict[str, Any])
    # what casts lack; rows that were stored before products existed have none of it
    tflop_s: float | None = None
    bound_us: float | None = None
    percent_of_bound: float | None = None
    sqnr_db: float | None = None
    problem: str = ""
    details: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def fault(self) -> str:
        """What is wrong with the kernel, or nothing."""
        return self.problem or (f"{self.wrong_bytes} bytes" if self.wrong_bytes else "")

    @property
    def key(self) -> tuple[str, str, str]:
        """What a row replaces when it is stored again."""
        return self.suite, self.case, str(self.where.get("gpu"))


@dataclass(frozen=True)
class Change:
    """A row against the same row of an older run: new time over old."""

    case: str
    old_us: float
    new_us: float

    @property
    def ratio(self) -> float:
        return self.new_us / self.old_us

    @property
    def regressed(self) -> bool:
        return self.ratio > 1 + REGRESSION


def read(path: Path) -> list[Row]:
    """The rows of a file, in its order; nothing when there is no such file."""
    if not path.exists():
        return []
    try:
        return [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    except (TypeError, ValueError) as error:
        rule, fix = "a file of results has a row of the benchmarks in each line", "name another file"
        raise OptionError(message(f"{path} has other lines ({error})", rule=rule, fix=fix)) from None


def write(path: Path, rows: Iterable[Row]) -> None:
    """Store rows: those of the same key are replaced in place, others appended. The file changes all at once."""
    merged = {row.key: row for row in read(path)}
    merged |= {row.key: row for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in merged.values()))
    os.replace(fresh, path)


def compare(new: Sequence[Row], old: Sequence[Row]) -> list[Change]:
    """Rows that both runs timed, in the order of the new one."""
    before = {(row.suite, row.case): row.us for row in old}
    changes: list[Change] = []
    for row in new:
        past = before.get((row.suite, row.case))
        if past and row.us:
            changes.append(Change(row.case, past, row.us))
    return changes


def where(device: torch.device, version: str, commit: str | None = None) -> Where:
    """Facts about this run. commit: what to record where the source is no git checkout."""
    found, dirty = _git_state() if commit is None else (commit, None)
    return Where(
        gpu=describe(device)["name"],
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        blockscale=version,
        torchao=_version("torchao"),
        assembler=_assembler_of(device),
        commit=found,
        dirty=dirty,
        command=command_line(sys.argv),
        utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _assembler_of(device: torch.device) -> str | None:
    """What makes machine code of Hopper's products here."""
    try:
        return _ptxas.choice().label if device.type == "cuda" else None
    except OptionError:  # one is demanded that cannot: the products will say so
        return None


def command_line(words: Sequence[str]) -> str:
    """The command without folders of somebody's machine, and without what says where results go and of which commit.

    >>> command_line(["/somewhere/blockscale/__main__.py", "bench", "casts", "--json", "where.jsonl", "/some/rows"])
    'blockscale bench casts rows'
    """
    after = [False, *(word in _NOT_TOLD for word in words[1:])]
    told = [word for word, skip in zip(words[1:], after, strict=False) if not skip and word not in _NOT_TOLD]
    return " ".join(["blockscale", *(Path(word).name if word.startswith("/") else word for word in told)])


_NOT_TOLD = ("--json", "--out", "--commit")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of the source and whether it was changed since; (None, None) without git or outside of a checkout, be it
    inside of somebody else's."""
    if not (_ROOT / ".git").exists():
        return None, None
    try:
        head, changed = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.strip(), bool(changed.strip())


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
