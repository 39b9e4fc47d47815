"""Tuned plans of the Hopper GEMM: plans that were timed on a GPU and beat the model's. They take precedence over it.

`blockscale tune` writes them, one JSON-lines file per kind of GPU (name and SM count). The files in `plans/` are
shipped; the user's own come first. A file is read once, at the first GEMM on such a GPU.

A line is valid only on the GPU that it names, and only if `heuristics` still considers its plan for its problem:
nothing else is ever launched. Invalid lines are logged once.

A plan serves every problem with the same candidates as the timed one (`same_plans`): M up to 16, or up to the same
multiple of 64, and K up to the same multiple of 128. Between tuned problems the model chooses.

Cost: one lookup of the problem, as in the model, and one of the environment variable: 0.25 us per call on a slow CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import env
from ..errors import message, refuse
from ..formats.layout import round_up
from ..registry import log
from .heuristics import BLOCK, SUBTILE_M, Plan, Problem, Tile, candidates
from .heuristics import choose as by_model

SETTING = "BLOCKSCALE_TUNED"
OFF = "off"
SHIPPED = Path(__file__).with_name("plans")
_FEW_ROWS = 16  # rows in one TMA load of a for small M (`heuristics.fitted`)


@dataclass(frozen=True)
class Entry:
    """A timed plan, with the facts needed to reproduce it.

    us, model_us: medians of this plan and of the model's, timed interleaved.  spread_us: quartiles of `us`.
    """

    problem: Problem
    plan: Plan
    us: float
    spread_us: tuple[float, float]
    model_us: float
    gpu: str
    triton: str
    ptxas: str
    blockscale: str
    commit: str | None
    utc: str

    @property
    def line(self) -> str:
        """The stored JSON line."""
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plan = self.plan._asdict() | {"tile": self.plan.tile._asdict()}
        return json.dumps(rest | {"problem": dataclasses.asdict(self.problem), "plan": plan})


class Choice(NamedTuple):
    """A plan, its microseconds, and its tuned entry; None if the model chose it."""

    plan: Plan
    us: float
    entry: Entry | None

    @property
    def origin(self) -> str:
        """Origin of the plan, as text for users."""
        entry = self.entry
        if entry is None:
            return "by the model, which is fitted to one H200"
        times = f"{entry.us:,.1f} µs at M = {entry.problem.m}, the model's plan {entry.model_us:,.1f}"
        return f"tuned on this GPU ({entry.utc[:10]}, triton {entry.triton}, {entry.ptxas}: {times})"


def choose(problem: Problem, gpu: str) -> Choice:
    """Plan to launch on a GPU of this name: the tuned one, else the model's.

    >>> choose(Problem(16, 7168, 2048, b_1x128=False, fp32_out=False, sms=132), "").origin
    'by the model, which is fitted to one H200'
    """
    return _choose(problem, gpu, env.get(SETTING))


@functools.lru_cache(maxsize=8192)
def _choose(problem: Problem, gpu: str, setting: str) -> Choice:
    entry = entries(gpu, problem.sms, setting).get(same_plans(problem)) if gpu else None
    return Choice(*by_model(problem), None) if entry is None else Choice(entry.plan, entry.us, entry)


def same_plans(problem: Problem) -> Problem:
    """Key of tuned entries: the largest problem with the same candidates as this one.

    >>> same_plans(Problem(100, 512, 4000, b_1x128=False, fp32_out=False, sms=132))
    Problem(m=128, n=512, k=4096, b_1x128=False, fp32_out=False, sms=132, accumulate=False)
    """
    m = _FEW_ROWS if problem.m <= _FEW_ROWS else round_up(problem.m, SUBTILE_M)
    return dataclasses.replace(problem, m=m, k=round_up(problem.k, BLOCK))


# ---- files -----------------------------------------------------------------------------------------------------------


def file_name(gpu: str, sms: int) -> str:
    """Name of the file of a kind of GPU.

    >>> file_name("NVIDIA H200", 132)
    'nvidia-h200-132.jsonl'
    """
    return f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{sms}.jsonl"


def own_file(gpu: str, sms: int) -> Path:
    """File of the plans that this user tuned."""
    setting = env.get(SETTING)
    if setting == OFF:
        rule = "it names the folder of tuned plans, and off disables them"
        refuse(f"{SETTING}={OFF}", rule, "unset it, or name a file to write")
    return _own_folder(setting) / file_name(gpu, sms)


def _own_folder(setting: str) -> Path:
    return Path(setting).expanduser() if setting else env.cache_folder("tuned")


@functools.lru_cache(maxsize=64)
def entries(gpu: str, sms: int, setting: str) -> Mapping[Problem, Entry]:
    """Valid entries on such a GPU, by `same_plans`; the user's own override the shipped ones."""
    found: dict[Problem, Entry] = {}
    if setting != OFF:
        for folder in (SHIPPED, _own_folder(setting)):
            found |= read(folder / file_name(gpu, sms), gpu, sms)
    return found


def forget() -> None:
    """Clear the caches: the files are read again at the next GEMM."""
    entries.cache_clear()
    _choose.cache_clear()


def read(path: Path, gpu: str, sms: int) -> dict[Problem, Entry]:
    """Entries of a file that are valid on such a GPU; the others are logged once."""
    found: dict[Problem, Entry] = {}
    ignored: list[str] = []
    for number, line in _lines(path, ignored):
        try:
            entry = _checked(_parse(line), gpu, sms)
        except ValueError as error:
            ignored.append(f"line {number} {error}")
        else:
            found[same_plans(entry.problem)] = entry
    if ignored:
        rule = "a tuned plan is for this GPU, and the library still considers it for its problem"
        fix = f"delete what is named, tune again (blockscale tune), or set {SETTING}={OFF}"
        more = f" and {len(ignored) - 1} more" if len(ignored) > 1 else ""
        log.warning("ignored: %s", message(f"{path}: {ignored[0]}{more}", rule=rule, fix=fix))
    return found


def store(path: Path, fresh: Iterable[Entry]) -> None:
    """Write entries to a file, each replacing the one of the same problem and GPU. All other lines stay. The file is
    replaced atomically."""
    added = {(entry.gpu, same_plans(entry.problem)): entry.line for entry in fresh}
    kept = [line for _, line in _lines(path, []) if _key(line) not in added]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text("".join(f"{line}\n" for line in (*kept, *added.values())))
    os.replace(new, path)
    forget()


def _lines(path: Path, ignored: list[str]) -> list[tuple[int, str]]:
    """Numbered lines without blank ones; empty if there is no file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        ignored.append(f"cannot be read ({error})")
        return []
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _key(line: str) -> tuple[str, Problem] | None:
    """GPU and `same_plans` of a line; None if the line is not an entry."""
    try:
        entry = _parse(line)
    except ValueError:
        return None
    return entry.gpu, same_plans(entry.problem)


def _parse(line: str) -> Entry:
    """Entry of a line; raises ValueError with the reason if it is not valid."""
    try:
        fields: dict[str, Any] = json.loads(line)
        problem, plan = Problem(**fields["problem"]), fields["plan"]
        plan = Plan(**plan | {"tile": Tile(**plan["tile"])})
        us, low, high, model_us = map(float, (fields["us"], *fields["spread_us"], fields["model_us"]))
        gpu, triton, ptxas, version, utc = (
            str(fields[name]) for name in ("gpu", "triton", "ptxas", "blockscale", "utc")
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"is not an entry ({type(error).__name__}: {error})") from None
    sizes = (problem.m, problem.n, problem.k, problem.sms)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"has sizes {sizes}, which are not all positive integers")
    if not all(0 < time < math.inf for time in (us, model_us)):
        raise ValueError(f"has times {us} and {model_us}, which are not both positive")
    return Entry(problem, plan, us, (low, high), model_us, gpu, triton, ptxas, version, fields.get("commit"), utc)


def _checked(entry: Entry, gpu: str, sms: int) -> Entry:
    """The entry if it is valid on such a GPU, with the library's own plan object; else raises ValueError."""
    count = entry.problem.sms
    if (entry.gpu, count) != (gpu, sms):
        raise ValueError(f"is for {entry.gpu} with {count} SMs, and this is {gpu} with {sms}")
    for plan, _ in candidates(entry.problem):
        if plan == entry.plan:
            return dataclasses.replace(entry, plan=plan)
    raise ValueError(f"has {entry.plan}, which is not considered for {entry.problem}")
