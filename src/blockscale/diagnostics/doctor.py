"""`doctor`: is this installation sound, what will run here, and does it compute right?

Facts (versions, device, settings), the matrix of operation x format with the backend that serves it and why, and a
self-check: the reference against bytes worked out by hand, every other chosen backend against the reference. About two
seconds on a laptop. On a GPU whose kernels are not compiled yet there are some two hundred to compile, so several
processes share the work then; one that dies, as after a wrong address, costs its look and not the report.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch

from .. import __version__, env
from ..errors import OptionError, message
from ..formats.checks import check_int, in_words
from ..formats.spec import FORMATS
from ..gemm import _ptxas
from ..hardware import default_device, describe, named_device
from ..registry import force_backends, forced_backends
from .selfcheck import PARTS, Check, Choice, Samples, compiles_a_cast, known_bytes, move_checks, move_choices

# what a look takes at most whose kernels are compiled: on an H200 all of them took 1.5 s, and 33 with an empty cache
_COMPILING_SECONDS = 2.5
PACKAGES = ("torch", "triton", "numpy", "rich", "tyro", "matplotlib", "safetensors")


@dataclass(frozen=True)
class DoctorReport:
    """Everything `doctor` found; `ok` is False when a check failed or a setting is unknown."""

    versions: dict[str, str]
    device: dict[str, str]
    settings: dict[str, str]
    unknown_settings: list[str]
    choices: list[Choice]
    checks: list[Check]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{name} {version}" for name, version in self.versions.items()]
        lines += [f"{name}: {fact}" for name, fact in self.device.items()]
        lines += [f"{c.operation:20s} {c.format:18s} {c.backend:10s} {c.reason}" for c in self.choices]
        lines += [f"{'ok  ' if c.passed else 'FAIL'} {c.name}: {c.detail}" for c in self.checks]
        return "\n".join(lines)


def doctor(
    device: torch.device | str | None = None,
    *,
    workers: int = 1,
    on_check: Callable[[str], None] | None = None,
) -> DoctorReport:
    """Look at this machine and check it against the reference.

    workers: processes that look side by side where kernels have to be compiled. More than one needs a program that can
    be imported again, which a script is if it starts under `if __name__ == "__main__"`.  on_check: told what was looked
    at, each time.

    >>> doctor("cpu").ok
    True
    """
    check_int(workers, "workers", "it is a number of processes", least=1)
    if on_check is not None and not callable(on_check):
        rule, fix = "it is told what was looked at", "pass a function of one text, such as print"
        raise OptionError(message(f"on_check is {in_words(on_check)}", rule=rule, fix=fix))
    where = default_device() if device is None else named_device(device)
    started = time.perf_counter()
    found = dict[_Look, Sequence[Choice | Check]]()
    looks = [_Look(part, name) for name in FORMATS for part in PARTS]
    for look, results in _answers(looks, where, workers):
        found[look] = results
        if on_check is not None:
            on_check(str(look))
    results = [result for look in looks for result in found[look]]
    samples = Samples(where)
    choices = [result for result in results if isinstance(result, Choice)] + move_choices(samples)
    checks = known_bytes(where) + [result for result in results if isinstance(result, Check)] + move_checks(samples)
    for name in env.undeclared():
        checks.append(Check(f"setting {name}", False, "is not a setting of this library: a typo?"))
    facts = describe(where)
    try:
        facts["Hopper's assembler"] = str(_ptxas.choice())
    except OptionError as error:  # one was demanded that cannot
        checks.append(Check("Hopper's assembler", False, str(error)))
    seconds = time.perf_counter() - started
    return DoctorReport(_versions(), facts, env.current(), env.undeclared(), choices, checks, seconds)


@dataclass(frozen=True)
class _Look:
    """One part of the work: what is looked at in one format."""

    part: str
    format: str

    def __str__(self) -> str:
        return f"{self.part} of {self.format}"


def check_count() -> int:
    """How often `doctor` calls `on_check`."""
    return len(FORMATS) * len(PARTS)


def _answers(
    looks: Sequence[_Look], device: torch.device, workers: int
) -> Iterator[tuple[_Look, Sequence[Choice | Check]]]:
    """Each look and what it found, as they are done: here, or by processes where kernels have to be compiled."""
    samples, waiting = Samples(device), list(looks)
    slow = workers > 1 and compiles_a_cast(samples)
    while waiting and not (slow and workers > 1):
        look = waiting.pop(0)
        started = time.perf_counter()
        yield look, PARTS[look.part](look.format, samples)
        slow = time.perf_counter() - started > _COMPILING_SECONDS
    if waiting:
        yield from _answers_of_processes(waiting, device, workers)


def _answers_of_processes(
    looks: Sequence[_Look], device: torch.device, workers: int
) -> Iterator[tuple[_Look, Sequence[Choice | Check]]]:
    # not forked: a fork would break a CUDA context, and threads of torch's
    context, demands = get_context("spawn"), forced_backends()
    with ProcessPoolExecutor(min(workers, len(looks)), context, force_backends, (demands,)) as pool:
        pending = {pool.submit(_look_alone, look, str(device)): look for look in looks}
        for done in as_completed(pending):
            look = pending[done]
            try:
                yield look, done.result()
            except BrokenProcessPool as error:
                yield look, [Check(str(look), False, f"the process died before it answered: {error}")]


def _look_alone(look: _Look, device: str) -> Sequence[Choice | Check]:
    return PARTS[look.part](look.format, Samples(torch.device(device)))


def _versions() -> dict[str, str]:
    found = {"blockscale": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__  # names the build, which the metadata may not
    found["cuda"] = torch.version.cuda or "not in this torch"
    return found
