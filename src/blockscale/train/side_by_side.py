"""Runs in processes of their own, several at a time or one after the other, and what they say meanwhile.

Small models leave most of a GPU idle while the host launches their kernels, so that several runs together end sooner
than one by one; their speeds then mean nothing. A process of its own also gives back all of its memory.
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
from .records import Evaluation, Hooks, Speed, StepRecord
from .run import Run

T = TypeVar("T")
# in a process of its own: whether it has work
_busy = threading.Event()
# seconds that a run has to save in, whose parent is gone
_GRACE = 120


def side_by_side(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, *, fresh: bool = False
) -> Iterator[tuple[int, T]]:
    """(place of the task, result of `function(*task)`) as they are done, `jobs` at a time.

    fresh: each task has a process to itself. Functions and tasks are pickled; a process starts anew and imports all
    that it needs, since CUDA does not survive a fork.
    """
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        jobs, spawn, _begin, (os.getpid(), option_writer()), max_tasks_per_child=1 if fresh else None
    )
    waiting, running = list(enumerate(tasks))[::-1], dict[Future[T], int]()
    with _told_to_end():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:  # none ahead of time: what is queued could not be called back
                    place, task = waiting.pop()
                    running[pool.submit(_call, function, task)] = place
                for each in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(each), each.result()
        except BrokenProcessPool as error:
            raise ProcessError(
                message(
                    "the process of a run ended without a word",
                    rule="the system kills one when memory runs out; others crash, or belong to a script that begins "
                    'them outside of if __name__ == "__main__"',
                    fix=f"pass fewer {option('jobs')}, or see what it printed; run again: what is done stays",
                )
            ) from error
        finally:  # after an error or Ctrl-C those that run come to their end, and no other begins
            pool.shutdown()


@contextmanager
def _told_to_end() -> Generator[None]:
    """Within it SIGTERM is Ctrl-C for all processes: a terminal tells each of them, who sends SIGTERM this one."""
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


def _begin(parent: int, writer: Callable[..., str]) -> None:
    """In a new process, before any work: its errors are written as its parent writes them."""
    write_options(writer)
    _deaf()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A process whose parent was killed would wait for work for ever: it ends, and a run that is under way saves."""
    while os.getppid() == parent:
        time.sleep(1)
    if _busy.is_set():
        os.kill(os.getpid(), signal.SIGINT)
    end = time.monotonic() + _GRACE
    while _busy.is_set() and time.monotonic() < end:
        time.sleep(1)
    os._exit(1)


def _deaf() -> None:
    """Ctrl-C reaches every process. One that waits for work must not end by it: a pool hangs that lost a process so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _call(function: Callable[..., T], task: tuple[Any, ...]) -> T:
    """In the other process: while it works, Ctrl-C counts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _busy.set()
    try:
        return function(*task)
    finally:
        _busy.clear()
        _deaf()


class Lines(Hooks):
    """Progress as plain lines, for files, pipes and processes without a terminal; tokens/s on a GPU alone.  every:
    steps between them; 0: with each evaluation."""

    def __init__(self, name: str, every: int = 0) -> None:
        self.name, self.every = name, every
        self.speed = 0.0

    def on_log(self, run: Run, records: list[StepRecord], speed: Speed) -> None:
        """A line for the last step that is due."""
        self.speed = speed.tokens_per_second
        due = [each for each in records if self.every and (each.step == 1 or each.step % self.every == 0)]
        if due:
            self._say(run, f"{1e3 * speed.step_seconds:,.0f} ms a step")

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """A line with the loss on held-out text."""
        if not self.every:
            self._say(run, f"loss {evaluation.loss:.4f}")

    def _say(self, run: Run, what: str) -> None:
        steps = f"step {run.step} of {run.config.steps}"
        speed = f", {self.speed:,.0f} tokens/s" if run.device.type == "cuda" else ""
        sys.stdout.write(f"{self.name}: {steps}, {what}{speed}\n")
        sys.stdout.flush()
