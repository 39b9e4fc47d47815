"""Runs in worker processes, several at a time or one after the other, and their progress as lines.

Small models leave most of a GPU idle while the host launches their kernels, so several concurrent runs finish sooner
than one by one; their speeds are then not comparable. A worker process also frees all of its memory when it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import ProcessError, message, option, option_writer, write_options
from ..train.records import Evaluation, Hooks, Speed, StepRecord
from ..train.run import Run

T = TypeVar("T")
# in a worker process: set while it runs a task
_busy = threading.Event()
# seconds for a run to save after its parent process has ended
_GRACE = 120


def side_by_side(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, *, fresh: bool = False
) -> Iterator[tuple[int, T]]:
    """(index, result of `function(*task)`) of each task as it finishes, `jobs` at a time.

    fresh: each task has its own process. Functions and tasks are pickled; processes are spawned, since CUDA does not
    survive a fork.
    """
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        jobs, spawn, _start_worker, (os.getpid(), option_writer()), max_tasks_per_child=1 if fresh else None
    )
    waiting, running = list(enumerate(tasks))[::-1], dict[Future[T], int]()
    with _sigterm_as_sigint():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:  # queued tasks could not be cancelled, so none are queued
                    place, task = waiting.pop()
                    running[pool.submit(_call, function, task)] = place
                for each in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(each), each.result()
        except BrokenProcessPool as error:
            raise ProcessError(
                message(
                    "the process of a run ended without a message",
                    rule="the system kills a process when memory runs out; others crash, or belong to a script that "
                    'starts them outside of if __name__ == "__main__"',
                    fix=f"pass fewer {option('jobs')}, or read its output; run again: finished runs are kept",
                )
            ) from error
        finally:  # after an error or Ctrl-C running tasks finish, and no other starts
            pool.shutdown()


@contextmanager
def _sigterm_as_sigint() -> Generator[None]:
    """Context in which SIGTERM acts as Ctrl-C in all processes. A terminal sends Ctrl-C to every process of the group;
    SIGTERM arrives in this one only and is forwarded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        for each in multiprocessing.active_children():
            if each.pid is not None:
                os.kill(each.pid, signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_worker(parent: int, writer: Callable[..., str]) -> None:
    """Initialize a worker process: it writes options in errors as its parent does, and ends with its parent."""
    write_options(writer)
    _ignore_sigint()
    threading.Thread(target=_exit_after_parent, args=(parent,), daemon=True).start()


def _exit_after_parent(parent: int) -> None:
    """End this worker when its parent has ended: it would wait for tasks for ever. A running task may save first."""
    while os.getppid() == parent:
        time.sleep(1)
    if _busy.is_set():
        os.kill(os.getpid(), signal.SIGINT)
    end = time.monotonic() + _GRACE
    while _busy.is_set() and time.monotonic() < end:
        time.sleep(1)
    os._exit(1)


def _ignore_sigint() -> None:
    """Ignore Ctrl-C while the worker is idle: a process pool that loses an idle process hangs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(function: Callable[..., T], task: tuple[Any, ...]) -> T:
    """Run a task in the worker, with Ctrl-C enabled."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _busy.set()
    try:
        return function(*task)
    finally:
        _busy.clear()
        _ignore_sigint()


class Lines(Hooks):
    """Progress as plain lines, for output without a terminal; tokens/s on a GPU only.  every: steps between lines; 0:
    a line with each evaluation."""

    def __init__(self, name: str, every: int = 0) -> None:
        self.name, self.every = name, every
        self.speed = 0.0

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """Print a line if one is due."""
        self.speed = speed.tokens_per_second
        due = [each for each in records if self.every and (each.step == 1 or each.step % self.every == 0)]
        if due:
            self._say(run, f"{1e3 * speed.step_seconds:,.0f} ms a step")

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Print the loss on held-out text."""
        if not self.every:
            self._say(run, f"loss {evaluation.loss:.4f}")

    def _say(self, run: Run, what: str) -> None:
        steps = f"step {run.step} of {run.config.steps}"
        speed = f", {self.speed:,.0f} tokens/s" if run.device.type == "cuda" else ""
        sys.stdout.write(f"{self.name}: {steps}, {what}{speed}\n")
        sys.stdout.flush()
