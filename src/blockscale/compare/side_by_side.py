"""Runs in worker processes, several at a time or one after the other.

Small models leave most of a GPU idle while the host launches their kernels, so several concurrent runs finish sooner
than one by one; their speeds are then not comparable. A worker process also frees all of its memory when it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import ProcessError, message, option, option_writer, write_options

T = TypeVar("T")
# in a worker process: set while it runs a task
_busy = threading.Event()
# seconds for a run to save after its parent process has ended
_GRACE = 120


def side_by_side(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int, *, fresh: bool = False
) -> list[T]:
    """Result of `function(*task)` for each task, in their order; `jobs` run at a time.

    fresh: each task has its own process. Functions and tasks are pickled; processes are spawned, since CUDA does not
    survive a fork.
    """
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        jobs, spawn, _start_worker, (os.getpid(), option_writer()), max_tasks_per_child=1 if fresh else None
    )
    waiting, running, found = list(enumerate(tasks))[::-1], dict[Future[T], int](), dict[int, T]()
    with _sigterm_as_sigint():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:  # queued tasks could not be cancelled, so none are queued
                    place, task = waiting.pop()
                    running[pool.submit(_call, function, task)] = place
                for each in wait(running, return_when=FIRST_COMPLETED).done:
                    found[running.pop(each)] = each.result()
        except BrokenProcessPool as error:
            rule = "the system kills a process when memory runs out; others crash, or belong to a script that starts "
            rule += 'them outside of if __name__ == "__main__"'
            fix = f"pass fewer {option('jobs')}, or read its output; run again: finished runs are kept"
            what = "the process of a run ended without a message"
            raise ProcessError(message(what, rule=rule, fix=fix)) from error
        finally:  # after an error or Ctrl-C running tasks finish, and no other starts
            pool.shutdown()
    return [found[place] for place in range(len(tasks))]


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a process pool that loses an idle process hangs
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


def _call(function: Callable[..., T], task: tuple[Any, ...]) -> T:
    """Run a task in the worker, with Ctrl-C enabled."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _busy.set()
    try:
        return function(*task)
    finally:
        _busy.clear()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
