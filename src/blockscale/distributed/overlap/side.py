"""The side stream: copies that run beside products, one after the other, and are waited for one by one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class CopyThread:
    """Side stream of a CPU rank: a thread that runs copies in the order in which they were given."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="blockscale-copies")

    def run(self, copy: Callable[[], None]) -> Future[None]:
        """Start a copy, after those before it."""
        inference = torch.is_inference_mode_enabled()

        def task() -> None:
            # modes belong to a thread, and tensors of inference mode are written in it alone
            with torch.inference_mode(inference), torch.no_grad():
                copy()

        return self._pool.submit(task)

    def join(self, copy: Future[None]) -> None:
        """Wait for a copy; its error is raised here."""
        copy.result()
