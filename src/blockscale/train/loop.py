"""The training loop: `train(config)` runs one config to its end, as often as one likes in a process.

A step: for every microbatch pieces, forward, backward and the next draws of stochastic rounding; then the gradient is
clipped, AdamW steps, attached weights are cast once, and experts are balanced. Nothing is read back from the device
until the loop logs. A loss or gradient that is no number stops every later update on the device, so that the weights
are still those before it when the loop looks, and the place where it began can be found.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import nn as bs_nn
from ..autograd import Recipe, attach, get_recipe, refresh_weights_
from ..errors import CheckpointError, OptionError, message
from ..hardware import default_device, gpu_name, named_device
from ..nn.convert import FilterFn
from ..roofline import machine_of, nominal
from . import checkpoint, faults
from .config import RecipeConfig, RunConfig, check, to_dict
from .data import Symbols, load
from .hugging_face import export
from .micro import CapturedMicrobatch, Microbatch, compile_
from .model import Transformer, flops_per_token
from .profiling import traced
from .records import Evaluation, Hooks, Speed, StepRecord, TrainResult
from .schedule import clip_, make_optimizer, rate_at

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# before a trace begins: compilation, autotuning and recordings are over
_SETTLED = 3


def train(config: RunConfig, *, hooks: Sequence[Hooks] = (), filter_fn: FilterFn | None = None) -> TrainResult:
    """Run a config to its end.

    hooks: who is told, see `Hooks`.  filter_fn: which layers follow the recipe, as for `quantize_`.

    >>> from blockscale.train import get_preset, replace
    >>> result = train(replace(get_preset("tiny"), steps=2, eval_batches=1))
    >>> result.steps, result.loss < 6
    (2, True)
    """
    check(config)
    try:
        run = Run(config, hooks, filter_fn)
        with _attention(config), _interruptible(run):
            return run.to_the_end()
    except torch.OutOfMemoryError as error:
        raise faults.out_of_memory(config, error) from error
    finally:
        for each in hooks:
            each.close()


class Run:
    """A run that is under way: what hooks are given.

    model, optimizer, symbols: live.  step: how many are done.  report: of the conversion.  wants_stop: set it, and the
    run saves and ends after the present step.
    """

    def __init__(self, config: RunConfig, hooks: Sequence[Hooks] = (), filter_fn: FilterFn | None = None) -> None:
        self.config, self.hooks = config, tuple(hooks)
        self.device = default_device() if config.device is None else named_device(config.device)
        self.recipe = recipe_of(config.recipe)
        self.symbols = load(config.data)
        _check_fits(config, self.symbols, self.device)
        dtype = getattr(torch, config.parameters)
        self.model = Transformer.build(
            config.model, config.data.sequence, device=self.device, dtype=dtype, seed=config.seed
        )
        self.model.loss_chunks = config.loss_chunks
        for block in self.model.layers:
            block.recompute = config.recompute
        chosen = config.recipe
        self.report = bs_nn.quantize_(
            self.model,
            self.recipe,
            filter_fn,
            keep_first=chosen.keep_first,
            keep_last=chosen.keep_last,
            seed=config.seed,
        )
        self.optimizer = make_optimizer(self.model, config.optimizer)
        kind = CapturedMicrobatch if config.cuda_graph else Microbatch
        self.microbatch = kind(self.model, config.accumulate)
        self.flops_per_token = flops_per_token(config.model, config.data.sequence)
        self.parameters = sum(each.numel() for each in self.model.parameters())
        machine = machine_of(gpu_name(self.device))
        self.peak_rate = nominal(machine).bf16 if machine else None

        self.step = 0
        self.history: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self.speeds: list[Speed] = []
        self.cast_share: float | None = None
        self.wants_stop = False
        self.saved: Path | None = None
        # 1 once a loss or gradient was no number: AdamW then leaves weights and moments as they are
        self.broken = torch.zeros((), device=self.device)
        self._unread: list[tuple[int, float, Tensor, Tensor]] = []
        self._clock, self._clock_step = 0.0, 0
        self._resume()
        attach(self.optimizer, self.model)
        if config.compile != "none":
            torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
            compile_(self.model, config.compile)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def to_the_end(self) -> TrainResult:
        """All steps, evaluations and checkpoints."""
        config = self.config
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._tell(lambda hook: hook.on_start(self))
        self._restart_clock()
        first = self.step
        while self.step < config.steps and not self.wants_stop:
            self._tell(lambda hook: hook.before_step(self))
            if config.profile and self.step == first + _SETTLED:
                self._traced_steps()
            else:
                self.advance()
            self._after_step()
        if self._unread:
            self._log()
        if not self.wants_stop and (not self.evaluations or self.evaluations[-1].step != self.step):
            self._evaluate()
        if config.folder is not None and (self.saved is None or not self.saved.name.endswith(f"{self.step:08d}")):
            self.save()
        result = self.result("interrupted" if self.step < config.steps else "done")
        if config.export is not None and result.stopped == "done":
            export(self.model, config.export)
        self._tell(lambda hook: hook.on_end(self, result))
        return result

    def advance(self) -> None:
        """One optimizer step. Waits for nothing."""
        config, model = self.config, self.model
        bs_nn.set_step_(model, self.step)
        self.microbatch.loss.zero_()
        for micro in range(config.accumulate):
            self.microbatch(self.pieces(self.step, micro))
            bs_nn.advance_(model)
        self._tell(lambda hook: hook.after_backward(self))
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norm = clip_(gradients, config.optimizer.clip)
        loss = self.microbatch.loss.clone()
        self.broken.copy_(torch.maximum(self.broken, (~(loss.isfinite() & norm.isfinite())).float()))
        rate = rate_at(self.step, config.steps, config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.found_inf = self.broken  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        self._balance()
        if config.cuda_graph:
            torch._foreach_zero_(gradients)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        else:
            self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._unread.append((self.step, rate, loss, norm))

    def pieces(self, step: int, micro: int) -> Tensor:
        """What a microbatch trains on, on its way to the device."""
        config = self.config
        batch = self.symbols.batch(config.seed, step, micro, config.batch, config.accumulate, config.data.sequence)
        return self._sent(batch)

    def _sent(self, batch: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return batch.to(self.device)
        return batch.pin_memory().to(self.device, non_blocking=True)

    def _balance(self) -> None:
        experts = self.config.model.experts
        for moe in self.model.mixtures():
            assert experts is not None
            assert moe.balance is not None
            before = moe.balance.clone()
            moe.update_balance_(experts.balance_rate)
            moe.balance.copy_(torch.where(self.broken > 0, before, moe.balance))

    def _after_step(self) -> None:
        config = self.config
        last = self.step == config.steps or self.wants_stop
        if self.step % config.log_every == 0 or last or self.step == 1:
            self._log()
        if config.eval_every and self.step % config.eval_every == 0:
            self._evaluate()
        if config.save_every and self.step % config.save_every == 0:
            self.save()

    # ---- what is read back -------------------------------------------------------------------------------------------

    def _log(self) -> None:
        """Read what has gathered on the device: the only place where the loop waits for it."""
        steps, rates, losses, norms = zip(*self._unread, strict=True)
        self._unread.clear()
        values = torch.stack([torch.stack(losses), torch.stack(norms)]).tolist()
        records = [StepRecord(*each) for each in zip(steps, *values, rates, strict=True)]
        for record in records:
            if not (abs(record.loss) < float("inf") and abs(record.norm) < float("inf")):
                self._stop_at(record)
        now = time.perf_counter()
        seconds = max(1e-9, (now - self._clock) / max(1, self.step - self._clock_step))
        rate = self.config.tokens_per_step / seconds
        mfu = None if self.peak_rate is None else rate * self.flops_per_token / self.peak_rate
        speed = Speed(self.step, rate, seconds, mfu, self.cast_share)
        self.history += records
        self.speeds.append(speed)
        self._tell(lambda hook: hook.on_log(self, records, speed))
        self._restart_clock()

    def _stop_at(self, record: StepRecord) -> None:
        """Replay the step that went wrong, with the weights and draws that it had, and say where."""
        config, step = self.config, record.step - 1
        what = (
            f"loss {record.loss}"
            if record.loss != record.loss or abs(record.loss) == float("inf")
            else (f"loss {record.loss:.4f}, norm of the gradient {record.norm}")
        )
        refresh_weights_(self.model)
        batches = [self.pieces(step, micro) for micro in range(config.accumulate)]
        bs_nn.advance_(self.model, tick=step * config.accumulate)
        raise faults.not_finite(record.step, what, faults.locate(self.model, batches), config)

    @torch.no_grad()
    def _evaluate(self) -> None:
        config, total = self.config, torch.zeros((), device=self.device)
        for place in range(config.eval_batches):
            pieces = self.symbols.validation(place, config.eval_batches, config.batch, config.data.sequence)
            total += self.model.loss(self._sent(pieces))
        loss = float(total) / max(1, config.eval_batches)
        bits = loss / 0.6931471805599453 / max(1e-9, self.symbols.bytes_per_symbol)
        found = Evaluation(self.step, loss, bits)
        self.evaluations.append(found)
        self._tell(lambda hook: hook.on_evaluation(self, found))
        self._restart_clock()

    def _traced_steps(self) -> None:
        """A few steps under the profiler, whose trace Perfetto opens; they are not timed."""
        config = self.config
        assert config.folder is not None
        if self._unread:
            self._log()

        def work() -> None:
            for _ in range(min(config.profile, config.steps - self.step)):
                self.advance()

        self.cast_share = traced(work, config.folder / f"trace-{self.step:08d}.json.gz")
        self._restart_clock()

    def _restart_clock(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._clock, self._clock_step = time.perf_counter(), self.step

    # ---- checkpoints and the end -------------------------------------------------------------------------------------

    def save(self) -> Path:
        """A checkpoint of the present step."""
        config = self.config
        assert config.folder is not None
        if self._unread:
            self._log()  # what is no number is never saved
        tensors = checkpoint.tensors_of(self.model, self.optimizer)
        about = {
            "config": to_dict(config),
            "data_hash": self.symbols.hash,
            "tensors": sorted(tensors),
            "history": [list(asdict(each).values()) for each in self.history],
            "evaluations": [list(asdict(each).values()) for each in self.evaluations],
        }
        self.saved = checkpoint.save(config.folder, self.step, tensors, about, config.keep)
        saved = self.saved
        self._tell(lambda hook: hook.on_save(self, saved))
        self._restart_clock()
        return saved

    def _resume(self) -> None:
        """Go on from the last checkpoint, if that is wanted and there is one."""
        folder = self.config.folder
        if folder is None:
            return
        last = checkpoint.latest(folder)
        if not self.config.resume:
            if last is not None:
                raise CheckpointError(
                    message(
                        f"{folder} has {last.name} already",
                        rule="a new run does not write over another",
                        fix="pass resume=True to go on with it, or another folder",
                    )
                )
            return
        checkpoint.remove_leftovers(folder)
        if last is None:
            return
        about = checkpoint.load(last, checkpoint.tensors_of(self.model, self.optimizer), self.config)
        if about["data_hash"] != self.symbols.hash:
            raise CheckpointError(
                message(
                    f"{last} was trained on text {about['data_hash']}, this is {self.symbols.hash}",
                    rule="a run goes on with the text that it began with",
                    fix="name the same data source and tokenizer, or another folder",
                )
            )
        self.step, self.saved = about["step"], last
        self.history = [StepRecord(*each) for each in about["history"]]
        self.evaluations = [Evaluation(*each) for each in about["evaluations"]]
        bs_nn.advance_(self.model, tick=self.step * self.config.accumulate)

    def result(self, stopped: Literal["done", "interrupted"]) -> TrainResult:
        """What the run has come to."""
        is_gpu = self.device.type == "cuda"
        return TrainResult(
            self.config,
            tuple(self.history),
            tuple(self.evaluations),
            tuple(self.speeds),
            torch.cuda.max_memory_allocated(self.device) if is_gpu else None,
            self.symbols.hash,
            self.parameters,
            self.flops_per_token,
            self.report.flop_share,
            stopped,
            self.saved,
            str(self.report),
        )

    def _tell(self, call: Callable[[Hooks], None]) -> None:
        for hook in self.hooks:
            call(hook)


def recipe_of(config: RecipeConfig) -> Recipe:
    """The recipe that a config names."""
    recipe = get_recipe(config.name)
    if config.weights is not None:
        recipe = recipe.with_weights(config.weights)
    return recipe.replace(name=recipe.name, weight_cast=config.weight_cast)


def _check_fits(config: RunConfig, symbols: Symbols, device: torch.device) -> None:
    if symbols.vocabulary > config.model.vocabulary:
        raise OptionError(
            message(
                f"model.vocabulary={config.model.vocabulary} for {symbols.vocabulary} symbols",
                rule="the model knows every symbol of its text",
                fix=f"pass model.vocabulary={-(-symbols.vocabulary // 128) * 128}",
            )
        )
    if config.cuda_graph and device.type != "cuda":
        raise OptionError(
            message(
                f"cuda_graph on {device}",
                rule="a CUDA graph is captured on a GPU",
                fix="leave cuda_graph out",
            )
        )


def _attention(config: RunConfig) -> AbstractContextManager[Any]:
    return nullcontext() if config.attention == "auto" else sdpa_kernel(_BACKENDS[config.attention])


@contextmanager
def _interruptible(run: Run) -> Generator[None]:
    """Within it Ctrl-C and SIGTERM end the run after the present step; a second Ctrl-C ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if run.wants_stop:
            raise KeyboardInterrupt
        run.wants_stop = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Run", "recipe_of", "replace", "train"]
