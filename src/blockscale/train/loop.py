"""Training loop: `train(config)` runs one config to its end; a process may call it any number of times.

It decides when a run logs, evaluates, saves and is traced, and times the steps alone. Results are read back from the
device only when it logs.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic

from .. import env
from ..distributed.world import World, join
from ..errors import option, refuse
from ..hardware import default_device, named_device
from ..models import export
from ..nn.convert import FilterFn
from . import faults
from .breakdown import breakdown
from .checks import check, check_ranks, refuse_if
from .config import RunConfig, changes, to_dict
from .files import folder_lock
from .numerics import NumericsLog
from .records import Hooks, Speed, StepRecord, TrainResult
from .run import Run

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# the module has a property that type checkers do not know
_memory: Any = deterministic
# seconds within which repeated signals count as one: a process group may deliver Ctrl-C twice
_SAME_SIGNAL = 2.0
# steps before a trace: compilation, autotuning and call recording are over
_SETTLED = 3


def train(config: RunConfig, *, hooks: Sequence[Hooks] = (), filter_fn: FilterFn | None = None) -> TrainResult:
    """Run a config to its end.

    hooks: callbacks, see `Hooks`.  filter_fn: chooses the layers that follow the recipe, as for `quantize_`.

    >>> from blockscale.train import get_preset, replace
    >>> result = train(replace(get_preset("tiny"), steps=2, eval_batches=1))
    >>> result.steps, result.loss < 6
    (2, True)
    """
    try:
        with _closing(hooks):
            check(config)
            kind = (default_device() if config.device is None else named_device(config.device)).type
            with join(kind, config.ranks.timeout) as world, ExitStack() as stack:
                _check_same_config(config, world)
                world.from_first(lambda: stack.enter_context(folder_lock(config.folder)))
                mine = stack.enter_context(_closing(_own_hooks(config)))
                stack.enter_context(as_configured(config))
                run = Run(config, [*hooks, *mine], filter_fn, world)
                with _interruptible(run):
                    return _Loop(run).run_all()
    except (MemoryError, RuntimeError) as error:
        if not faults.is_out_of_memory(error):
            raise
        raise faults.out_of_memory(config, error) from error
    except (ConnectionError, TimeoutError):  # no disk error; includes BrokenPipeError of the terminal output
        raise
    except OSError as error:
        raise faults.file_error(config, error) from error


def _check_same_config(config: RunConfig, world: World) -> None:
    """Raise on all ranks if their configs differ."""
    if world.size == 1:
        return
    check_ranks(config, world.size)
    configs = world.gather(to_dict(config))
    for rank, other in enumerate(configs):
        what = f"rank {rank} differs from rank 0: {'; '.join(changes(configs[0], other))}"
        refuse_if(changes(configs[0], other), what, "all ranks run one config", "start all with the same options")


def _own_hooks(config: RunConfig) -> list[Hooks]:
    """Hooks that the config itself asks for."""
    if config.numerics_every < 1 or config.folder is None:
        return []
    return [NumericsLog(config.folder, config.numerics_every)]


@contextmanager
def as_configured(config: RunConfig) -> Generator[None]:
    """Context with the attention backend of a config, and with torch's deterministic algorithms if it asks for them;
    our kernels always repeat."""
    attention = nullcontext() if config.attention == "auto" else sdpa_kernel(_BACKENDS[config.attention])
    before = torch.are_deterministic_algorithms_enabled(), _memory.fill_uninitialized_memory
    if config.deterministic:
        env.suggest_to_others("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it for cuBLAS GEMMs
        torch.use_deterministic_algorithms(True)
        _memory.fill_uninitialized_memory = False  # no kernel reads uninitialized memory, so filling it is wasted time
    try:
        with attention:
            yield
    finally:
        if config.deterministic:
            torch.use_deterministic_algorithms(before[0])
            _memory.fill_uninitialized_memory = before[1]


class _Loop:
    """A run and the clock of its steps."""

    def __init__(self, run: Run) -> None:
        self.run, self.config = run, run.config
        self.began, self.timed_from = 0.0, 0
        self.restart_clock()

    def run_all(self) -> TrainResult:
        """All steps, evaluations and checkpoints."""
        run, config = self.run, self.config
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)
        first = max(run.step, run.recipe.since)
        if config.profile and run.saved is None and config.steps - first <= _SETTLED:
            what = f"{option('profile', config.profile)} of {config.steps - first} steps"
            rule = f"a trace begins after {_SETTLED} steps, when compilation and autotuning are over"
            fix = f"pass {option('steps', first + _SETTLED + config.profile)} or more"
            refuse(what, rule, fix)
        if config.export is not None:  # fails now rather than after training
            config.export.mkdir(parents=True, exist_ok=True)
        run.notify(lambda hook: hook.on_start(run))
        if config.start is not None and run.saved is None:  # the recipe on weights that it did not train
            self.evaluate()
        self.restart_clock()
        while run.step < config.steps and not run.stops:
            before = run.step
            run.notify(lambda hook: hook.before_step(run))
            if config.profile and before == first + _SETTLED:
                self.trace(config.profile)
            else:
                run.advance()
            self.after_steps(before)
        self.log()
        is_done = run.step == config.steps  # complete, even if a stop was requested in the last step
        if is_done and (not run.evaluations or run.evaluations[-1].step != run.step):
            self.evaluate()
        if config.folder is not None and (run.saved is None or run.saved.name != run.checkpoint_name):
            self.save()
        result = run.result("done" if is_done else "interrupted")
        if config.export is not None and result.stopped == "done":
            self.check_weights()
            self.export(config.export)
        run.notify(lambda hook: hook.on_end(run, result))
        return result

    def after_steps(self, before: int) -> None:
        """Log, evaluate and save if due, after one step or several traced ones."""
        run, config = self.run, self.config

        def is_due(every: int) -> bool:
            return every > 0 and run.step // every > before // every

        if is_due(config.log_every) or before == 0:
            self.log()
        if is_due(config.eval_every):
            self.log()
            self.evaluate()
        if is_due(config.save_every):
            self.log()
            self.save()

    def log(self) -> None:
        """Read back the steps since the last call; raise if one of them is not finite."""
        records = self.run.read()
        if records:
            self.report_steps(records)
        if self.run.broke_at is not None:
            raise self.run.non_finite_error(self.run.broke_at)

    def report_steps(self, records: list[StepRecord]) -> None:
        """Pass step records to the hooks, with the speed since the last report."""
        run, config = self.run, self.config
        steps = run.step - self.timed_from
        if steps:
            seconds = max(1e-9, (time.perf_counter() - self.began) / steps)
            rate = config.tokens_per_step / seconds
            mfu = None if run.peak_rate is None else rate * run.flops_per_token / run.peak_rate
            run.speeds.append(Speed(run.step, rate, seconds, mfu))
        speed = run.speeds[-1] if run.speeds else Speed(run.step, 0.0, 0.0)
        run.notify(lambda hook: hook.on_log(run, records, speed))
        self.restart_clock()

    def evaluate(self) -> None:
        """Evaluate on held-out text, unless `eval_batches` is 0; not timed."""
        if not self.config.eval_batches:
            return
        found = self.run.evaluate()
        if not math.isfinite(found.loss):
            raise self.run.non_finite_update_error(f"validation loss {found.loss}")
        self.run.notify(lambda hook: hook.on_evaluation(self.run, found))
        self.restart_clock()

    def save(self) -> None:
        """Write a checkpoint; not timed."""
        self.check_weights()
        path = self.run.save()
        self.run.notify(lambda hook: hook.on_save(self.run, path))
        self.restart_clock()

    def export(self, folder: Path) -> None:
        """Write the weights as safetensors; over ranks the first one gathers them all."""
        run, whole = self.run, self.run.model
        if run.world.size > 1:
            from ..models.sharding import whole_copy

            whole = whole_copy(run.model, run.world)
        run.world.from_first(lambda: whole and export(whole, folder) and None)

    def check_weights(self) -> None:
        """Raise if a weight is not finite, before weights are saved or exported."""
        if not self.run.is_finite:
            raise self.run.non_finite_update_error("weights that are not finite after its update")

    def trace(self, steps: int) -> None:
        """Run steps under the profiler, not timed, and store a trace for Perfetto in the folder of the run."""
        run, folder = self.run, self.config.folder
        assert folder is not None
        self.log()

        def work() -> None:
            for _ in range(min(steps, self.config.steps - run.step)):
                run.advance()

        if run.world.is_first:
            breakdown(work, folder / f"trace-{run.step:08d}.json.gz")
        else:
            work()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start timing with the next step, after the device is idle."""
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)
        self.began, self.timed_from = time.perf_counter(), self.run.step


@contextmanager
def _closing(hooks: Sequence[Hooks]) -> Generator[Sequence[Hooks]]:
    """Context that closes all hooks at its end. After another error, errors of closing files are suppressed: written
    lines are on disk already."""
    try:
        yield hooks
    except BaseException:
        for each in hooks:
            with suppress(OSError):
                each.close()
        raise
    with ExitStack() as last:
        for each in hooks:
            last.callback(each.close)


@contextmanager
def _interruptible(run: Run) -> Generator[None]:
    """Context in which Ctrl-C and SIGTERM end the run after the current step. A second signal, more than _SAME_SIGNAL
    seconds later, ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[float] = []

    def stop(number: int, frame: object) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > _SAME_SIGNAL:
            raise KeyboardInterrupt
        run.wants_stop = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
