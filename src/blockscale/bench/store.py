"""Results as JSON lines: one row per case, with machine, versions, commit and command to repeat it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import OptionError, message
from ..gemm import _ptxas
from ..hardware import describe

# backends whose times differ by less than this share are ties
TIE = 0.03
# start of the names of peers that are other backends of the registry
ROW = "row "
# least SQNR of a product that is rounded to bf16, which has 56 dB
BF16_DB = 54.0
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Where:
    """Machine, versions and command of a run; the same for all of its rows."""

    gpu: str
    torch: str
    triton: str | None
    python: str
    blockscale: str
    torchao: str | None
    assembler: str | None  # codespell:ignore assembler (key of stored rows)
    commit: str | None
    dirty: bool | None
    command: str
    utc: str


@dataclass(frozen=True)
class Row:
    """One case. Times are microseconds per call. A wrong kernel has none; wrong_bytes or problem describes the fault.

    dtype: input of a cast, output of a GEMM.  spread_us: quartiles over rounds.  bytes: least bytes that must move.
    bound_us: least time under the measured ceilings of this machine.  sqnr_db: of a GEMM, against the exact product of
    its operands.  peers: {name: {us, ratio, tflop_s, sqnr_db, note}}; ratio is the time of the peer over ours.
    details: further figures of a suite by name (benchmarks/linear.md).
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
    # fields that casts lack; older rows have none of them
    tflop_s: float | None = None
    bound_us: float | None = None
    percent_of_bound: float | None = None
    sqnr_db: float | None = None
    problem: str = ""
    details: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def fault(self) -> str:
        """Fault of the kernel, or ""."""
        return self.problem or (f"{self.wrong_bytes} bytes" if self.wrong_bytes else "")

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity of a row: a stored row of the same key is replaced."""
        return self.suite, self.case, str(self.where.get("gpu"))


T = TypeVar("T")


def read(path: Path) -> list[Row]:
    """Rows of a file, in its order; empty if the file does not exist."""
    return read_lines(path, lambda fields: Row(**fields), "a file of results has a row of the benchmarks in each line")


def write(path: Path, rows: Iterable[Row]) -> None:
    """Store rows: a row replaces the row of the same key, others are appended."""
    write_lines(path, [*read(path), *rows])


def read_lines(path: Path, parse: Callable[[dict[str, Any]], T], rule: str) -> list[T]:
    """Parsed JSON lines of a file.  rule: what such a file has, for the error."""
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [parse(json.loads(line)) for line in lines if line.strip()]
    except (KeyError, TypeError, ValueError) as error:
        raise OptionError(message(f"{path} has other lines ({error})", rule=rule, fix="name another file")) from None


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write dataclasses that have a `key` as JSON lines, the last of each key. The file is replaced atomically."""
    kept = {row.key: row for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in kept.values()))
    os.replace(fresh, path)


def where(device: torch.device, version: str, commit: str | None = None) -> Where:
    """Facts about this run.  commit: recorded if the source is no git checkout."""
    found, dirty = _git_state() if commit is None else (commit, None)
    return Where(
        gpu=describe(device)["name"],
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        blockscale=version,
        torchao=_version("torchao"),
        assembler=_ptxas_of(device),  # codespell:ignore assembler
        commit=found,
        dirty=dirty,
        command=command_line(sys.argv),
        utc=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _ptxas_of(device: torch.device) -> str | None:
    """Label of the ptxas that compiles the Hopper GEMMs on this machine."""
    try:
        return _ptxas.choice().label if device.type == "cuda" else None
    except OptionError:  # the forced ptxas does not work: the GEMMs raise the error
        return None


def command_line(words: Sequence[str]) -> str:
    """The command without local folders, and without options for output files and the commit.

    >>> command_line(["/somewhere/blockscale/__main__.py", "bench", "casts", "--json", "where.jsonl", "/some/rows"])
    'blockscale bench casts rows'
    """
    after = [False, *(word in _LEFT_OUT for word in words[1:])]
    shown = [word for word, skip in zip(words[1:], after, strict=False) if not skip and word not in _LEFT_OUT]
    return " ".join(["blockscale", *(Path(word).name if word.startswith("/") else word for word in shown)])


_LEFT_OUT = ("--json", "--out", "--commit")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of the source and whether it has local changes; (None, None) without git, or if the source is no checkout
    of its own."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if not (_ROOT / ".git").exists():
        return None, None
    try:
        return git("rev-parse", "--short", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


# ---- cells of tables -------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 1) -> str:
    """The value with thousands separators, or a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def peer(row: Row, name: str) -> str:
    """Time of the peer over ours, with a star if its result differs from ours."""
    cell = row.peers.get(name, {})
    if "ratio" not in cell:
        return "-"
    return f"{cell['ratio']:.2f}x" + ("*" if "differs" in cell.get("note", "") else "")


def beside(row: Row, name: str) -> str:
    """Time of a peer over ours, and its SQNR where that is below the SQNR of rounding to bf16."""
    accuracy = row.peers.get(name, {}).get("sqnr_db")
    worse = accuracy is not None and not accuracy >= BF16_DB
    return peer(row, name) + (f", {accuracy:.0f} dB" if worse else "")


def best_other(row: Row) -> tuple[str, float] | None:
    """Fastest other backend of the registry with a correct result, and its time over ours."""
    able = {
        name.removeprefix(ROW): float(cell["ratio"])
        for name, cell in row.peers.items()
        if name.startswith(ROW) and "ratio" in cell and "differs" not in cell.get("note", "")
    }
    return min(able.items(), key=lambda item: item[1]) if able else None


def misplaced(row: Row) -> str:
    """Backend that is faster than the selected one by more than `TIE`, or "".

    Always "" on a CPU, where backends are not selected by speed.
    """
    other = best_other(row)
    return other[0] if other is not None and other[1] < 1 - TIE and row.method != "cpu" else ""


def shown_peers(rows: Sequence[Row]) -> list[str]:
    """Peers that were timed in at least one row, in the order of the rows."""
    return list(dict.fromkeys(name for row in rows for name, cell in row.peers.items() if "us" in cell))
