"""`doctor`: is this installation sound, what will run here, and does it compute right?

Facts (versions, device, settings), the matrix of operation x format with the backend that serves it and why, and a
self-check: the reference against bytes worked out by hand, every other selected backend against the reference. About
two seconds on a laptop. On a GPU some two hundred kernels may have to be compiled, so several processes share the work;
a process that dies, for instance after an illegal address, fails its own check and not the report.
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
from ..errors import OptionError, refuse
from ..formats.checks import check_int, in_words
from ..formats.spec import FORMATS
from ..gemm import _ptxas
from ..hardware import default_device, describe, named_device
from ..registry import force_backends, forced_backends
from .selfcheck import PARTS, Check, Choice, Samples, known_bytes, move_checks, move_choices

# longest time of a check with compiled kernels: on an H200 all checks took 1.5 s, and 33 s with an empty cache
_COMPILING_SECONDS = 2.5
Task = tuple[str, str]  # a check in a format: key of `PARTS`, and the format's name
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
    """Describe this machine and check its kernels against the reference.

    workers: processes to use if kernels have to be compiled. More than one needs a main module that can be imported
    again: start a script under `if __name__ == "__main__"`.  on_check: called with the name of each finished check.

    >>> doctor("cpu").ok
    True
    """
    check_int(workers, "workers", "it is a number of processes", least=1)
    if on_check is not None and not callable(on_check):
        rule, fix = "it is called with the name of each finished check", "pass a function of one text, such as print"
        refuse(f"on_check is {in_words(on_check)}", rule, fix)
    where = default_device() if device is None else named_device(device)
    started = time.perf_counter()
    found = dict[Task, Sequence[Choice | Check]]()
    tasks = [(part, name) for name in FORMATS for part in PARTS]
    for task, results in _run(tasks, where, workers):
        found[task] = results
        if on_check is not None:
            on_check(" of ".join(task))
    results = [result for task in tasks for result in found[task]]
    samples = Samples(where)
    choices = [result for result in results if isinstance(result, Choice)] + move_choices(samples)
    checks = known_bytes(where) + [result for result in results if isinstance(result, Check)] + move_checks(samples)
    for name in env.undeclared():
        checks.append(Check(f"setting {name}", False, "is not a setting of this library: a typo?"))
    facts = describe(where)
    try:
        facts["Hopper's ptxas"] = str(_ptxas.choice())
    except OptionError as error:  # BLOCKSCALE_PTXAS names one that cannot be used
        checks.append(Check("Hopper's ptxas", False, str(error)))
    seconds = time.perf_counter() - started
    return DoctorReport(_versions(), facts, env.current(), env.undeclared(), choices, checks, seconds)


def check_count() -> int:
    """Number of times that `doctor` calls `on_check`."""
    return len(FORMATS) * len(PARTS)


def _run(tasks: Sequence[Task], device: torch.device, workers: int) -> Iterator[tuple[Task, Sequence[Choice | Check]]]:
    """Each task with its results, as they finish: in this process, and in workers after the first slow one."""
    samples, waiting, slow = Samples(device), list(tasks), False
    while waiting and not (slow and workers > 1):
        task = waiting.pop(0)
        started = time.perf_counter()
        yield task, PARTS[task[0]](task[1], samples)
        slow = time.perf_counter() - started > _COMPILING_SECONDS
    if waiting:
        yield from _run_in_workers(waiting, device, workers)


def _run_in_workers(
    tasks: Sequence[Task], device: torch.device, workers: int
) -> Iterator[tuple[Task, Sequence[Choice | Check]]]:
    # not forked: a fork would break a CUDA context and torch's threads
    context, forced = get_context("spawn"), forced_backends()
    with ProcessPoolExecutor(min(workers, len(tasks)), context, force_backends, (forced,)) as pool:
        pending = {pool.submit(_run_one, task, str(device)): task for task in tasks}
        for done in as_completed(pending):
            task = pending[done]
            try:
                yield task, done.result()
            except BrokenProcessPool as error:
                yield task, [Check(" of ".join(task), False, f"the process died before it answered: {error}")]


def _run_one(task: Task, device: str) -> Sequence[Choice | Check]:
    return PARTS[task[0]](task[1], Samples(torch.device(device)))


def _versions() -> dict[str, str]:
    found = {"blockscale": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__  # with the build, which the metadata may lack
    found["cuda"] = torch.version.cuda or "not in this torch"
    return found
