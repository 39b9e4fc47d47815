"""The side stream: copies that run beside products, one after the other, and are waited for one by one."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

Task = tuple[Callable[[], None], "Future[None]"]


class CopyThread:
    """Side stream of a CPU rank: a thread that runs copies in the order in which they were given.

    It ends with this object, and a process does not wait for it at its end: a copy may wait for a rank that is gone.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._tasks,), name="blockscale-copies", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def run(self, copy: Callable[[], None], uses: Sequence[Tensor] = ()) -> Future[None]:
        """Start a copy, after those before it."""
        inference, done = torch.is_inference_mode_enabled(), Future[None]()

        def task() -> None:
            # modes belong to a thread, and tensors of inference mode are written in it alone
            with torch.inference_mode(inference), torch.no_grad():
                copy()

        self._tasks.put((task, done))
        return done

    def join(self, copy: Future[None]) -> None:
        """Wait for a copy; its error is raised here."""
        copy.result()


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    while (found := tasks.get()) is not None:
        task, done = found
        try:
            task()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del found, task, done  # tensors of a copy are not kept until the next one
