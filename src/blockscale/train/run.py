"""`Run`: state of a training run, with methods to make a step, evaluate, save and resume; the loop calls them.

A step: for every microbatch the sequences, forward, backward and the next tick of stochastic rounding; then AdamW with
the clipped gradient, one cast of attached weights, and balancing of experts. A step never synchronizes with the device.
After a loss or gradient that is not finite, AdamW skips all updates on the device. The weights are then still those
before it when the loop reads the loss, so that the fault can be located.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..autograd import Recipe, attach, get_recipe, refresh_weights_
from ..autograd.dtensor import local
from ..autograd.recipe import PRODUCTS
from ..autograd.weights import shared_weights
from ..diagnostics.filters import load_filter
from ..distributed.world import ALONE, World
from ..errors import CheckpointError, NonFiniteError, option, refuse
from ..hardware import default_device, gpu_name, named_device
from ..models.non_finite import locate
from ..models.transformer import Block, Transformer, flops_per_token
from ..nn import advance_, quantize_, set_step_
from ..nn.convert import FilterFn
from ..roofline import machine_of, nominal
from . import checkpoint, faults
from .checks import check_fits
from .config import RecipeConfig, RunConfig, changes, to_dict
from .data import load
from .micro import CapturedMicrobatch, Microbatch, compile_, forget_compiled
from .records import Evaluation, Hooks, Speed, StepRecord, TrainResult
from .schedule import divisor, make_optimizer, norm_of, rate_at

if TYPE_CHECKING:
    from ..models.sharding import ShardReport


class Run:
    """State of a run, passed to hooks.

    model, optimizer, symbols: live objects.  step: completed steps.  report: of the conversion.  history, evaluations,
    speeds: so far.  changed: options that differ from those of the resumed checkpoint, as text.  A hook may set
    `wants_stop`: the run then saves and ends after the current step.
    """

    def __init__(
        self,
        config: RunConfig,
        hooks: Sequence[Hooks] = (),
        filter_fn: FilterFn | None = None,
        world: World = ALONE,
    ) -> None:
        self.config, self.hooks, self.world = config, tuple(hooks), world
        if config.compile != "none":
            forget_compiled()
        self.device = default_device() if config.device is None else named_device(config.device)
        self.recipe = recipe_of(config.recipe)
        if config.compile != "none" and config.recompute == "selective":
            self.recipe = self.recipe.recomputed()
        world.from_first(lambda: load(config.data) and None)  # tokenized once
        self.symbols = load(config.data)
        check_fits(config, self.symbols.vocabulary, self.device)
        self.model = self._build()
        first, last = config.recipe.keep_first, config.recipe.keep_last
        if filter_fn is None and config.recipe.keep_file is not None:
            filter_fn = load_filter(config.recipe.keep_file, self.model, self.recipe)
        self.report = quantize_(self.model, self.recipe, filter_fn, keep_first=first, keep_last=last, seed=config.seed)
        self.sharding: ShardReport | None = None
        if world.size > 1:
            from ..models.sharding import shard_

            self.sharding = shard_(self.model, config.ranks, world, self.recipe)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        kind = CapturedMicrobatch if config.cuda_graph else Microbatch
        self.microbatch = kind(self.model, config.accumulate)
        self.parameters = sum(each.numel() for each in self.model.parameters())
        self.flops_per_token = flops_per_token(config.model, config.data.sequence)
        machine = machine_of(gpu_name(self.device))
        self.peak_rate = nominal(machine).bf16 * world.size if machine else None

        self.step = 0
        self.history: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self.speeds: list[Speed] = []
        self.wants_stop = self._stop_agreed = False
        self.saved: Path | None = None
        self.broke_at: StepRecord | None = None
        self.changed: list[str] = []
        # 1 after a loss or gradient that is not finite: AdamW then skips its updates
        self.broken = torch.zeros((), device=self.device)
        self._unread: list[tuple[int, float, Tensor, Tensor, Tensor | None]] = []
        self._resume()
        self.tick(self.step, 0)
        set_step_(self.model, self.step)
        if shared_weights(self.model):
            attach(self.optimizer, self.model)
        if config.compile != "none":
            compile_(self.model, config.compile)

    def _build(self) -> Transformer:
        config = self.config
        dtype: torch.dtype = getattr(torch, config.parameters)
        model = Transformer.build(config.model, config.data.sequence, device=self.device, dtype=dtype, seed=config.seed)
        model.loss_chunks = config.loss_chunks
        for block in model.layers:
            assert isinstance(block, Block)
            block.recompute = config.recompute
        return model

    @property
    def flop_share(self) -> float:
        """Share of the linear FLOPs of all steps in low precision: quantized GEMMs of converted layers, from step
        `since` on."""
        low = sum(getattr(self.recipe, name) is not None for name in PRODUCTS)
        steps = max(0, self.config.steps - self.recipe.since) / self.config.steps
        return self.report.flop_share * steps * (low / len(PRODUCTS) if low else 1.0)

    def notify(self, call: Callable[[Hooks], None]) -> None:
        """Call all hooks in order."""
        for hook in self.hooks:
            call(hook)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """One optimizer step, without synchronization."""
        config, model = self.config, self.model
        set_step_(model, self.step)
        if self.step == self.recipe.since > 0:  # weight casts are stale or missing
            refresh_weights_(model)
        for micro in range(config.accumulate):
            self.microbatch(self.pieces(self.step, micro))
            self.tick(self.step, micro + 1)
        self.notify(lambda hook: hook.after_backward(self))
        norm = norm_of([local(each.grad) for each in model.parameters() if each.grad is not None])
        loss, stops = self.microbatch.loss.clone(), None
        if self.world.size > 1:  # no parameter is replicated: squares of shards add up
            squares, loss, stops = norm.square(), loss / self.world.size, torch.full_like(loss, float(self.wants_stop))
            self.world.sum_(squares, loss, stops)
            norm = squares.sqrt()
        self.optimizer.grad_scale = divisor(norm, config.optimizer.clip)  # pyright: ignore[reportAttributeAccessIssue]
        self.broken.copy_(torch.maximum(self.broken, (~(loss.isfinite() & norm.isfinite())).float()))
        rate = rate_at(self.step, config.steps, config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.found_inf = self.broken  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        self._balance()
        self.microbatch.clear()
        self.step += 1
        self._unread.append((self.step, rate, loss, norm, stops))

    def tick(self, step: int, micro: int) -> None:
        """Set the tick of stochastic rounding, as in one process in which each rank's share is a microbatch."""
        micros = step * self.config.accumulate + micro
        advance_(self.model, None if self.world.size == 1 and micro else micros * self.world.size + self.world.rank)

    @property
    def stops(self) -> bool:
        """Whether the run ends after the current step. Ranks agree on it when they read losses."""
        return self.wants_stop if self.world.size == 1 else self._stop_agreed

    def pieces(self, step: int, micro: int) -> Tensor:
        """This rank's sequences of a training microbatch, copied asynchronously to the device."""
        config = self.config
        return self._to_device(
            self.symbols.batch(config.seed, step, micro, config.batch, config.accumulate, config.data.sequence)
        )

    def held_out(self, place: int) -> Tensor:
        """This rank's sequences of an evaluation batch, copied asynchronously to the device."""
        config = self.config
        return self._to_device(self.symbols.validation(place, config.eval_batches, config.batch, config.data.sequence))

    def _to_device(self, batch: Tensor) -> Tensor:
        batch = self.world.share(batch)
        if self.device.type != "cuda":
            return batch.to(self.device)
        return batch.pin_memory().to(self.device, non_blocking=True)

    def _balance(self) -> None:
        experts = self.config.model.experts
        self.world.sum_(*(moe.load for moe in self.model.mixtures() if moe.load is not None))
        for moe in self.model.mixtures():
            assert experts is not None
            assert moe.balance is not None
            before = moe.balance.clone()
            moe.update_balance_(experts.balance_rate)
            moe.balance.copy_(torch.where(self.broken > 0, before, moe.balance))

    def read(self) -> list[StepRecord]:
        """Records of the steps since the last call, added to the history. The only call that synchronizes with the
        device. A step with a loss or gradient that is not finite becomes `broke_at`; it and later steps are dropped."""
        if not self._unread:
            return []
        steps, rates, *values = zip(*self._unread, strict=True)
        self._unread.clear()
        losses, norms, *stops = torch.stack([torch.stack(each) for each in values if each[0] is not None]).tolist()
        self._stop_agreed |= any(map(any, stops))
        records = [StepRecord(*each) for each in zip(steps, losses, norms, rates, strict=True)]
        for place, record in enumerate(records):
            if not (math.isfinite(record.loss) and math.isfinite(record.norm)):
                self.broke_at, records = record, records[:place]
                break
        self.history += records
        return records

    def non_finite_error(self, record: StepRecord) -> NonFiniteError:
        """Error that locates the fault: replays the step with the same weights and stochastic rounding."""
        config, step = self.config, record.step - 1
        set_step_(self.model, step)
        refresh_weights_(self.model)
        batches = [self.pieces(step, micro) for micro in range(config.accumulate)]
        self.tick(step, 0)
        what = f"loss {record.loss:.4f}, norm of the gradient {record.norm}"
        return faults.not_finite(record.step, what, locate(self.model, batches, self.world), config)

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite. Includes the last update, which no loss covers. Synchronizes."""
        mine = torch.stack([local(each).detach().isfinite().all() for each in self.model.parameters()]).all()
        return all(self.world.gather(bool(mine)))

    def non_finite_update_error(self, what: str) -> NonFiniteError:
        """Error that locates the fault after an update that made weights or the evaluation not finite."""
        place = locate(self.model, [self.held_out(place) for place in range(self.config.eval_batches)], self.world)
        return faults.not_finite(self.step, what, place, self.config, is_updated=True)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Loss on held-out text, in the precision of the recipe."""
        config, total = self.config, torch.zeros((), device=self.device)
        for place in range(config.eval_batches):
            total += self.model.loss(self.held_out(place))
        self.world.sum_(total)
        loss = float(total) / max(1, config.eval_batches * self.world.size)
        found = Evaluation(self.step, loss, loss / math.log(2) / max(1e-9, self.symbols.bytes_per_symbol))
        self.evaluations.append(found)
        return found

    # ---- checkpoints and the end -------------------------------------------------------------------------------------

    @property
    def checkpoint_name(self) -> str:
        """Folder name of the current step's checkpoint."""
        return checkpoint.name_of(self.step)

    def save(self) -> Path:
        """Write a checkpoint of the current step."""
        config = self.config
        assert config.folder is not None
        assert not self._unread, "losses are checked before weights are saved"
        tensors = checkpoint.tensors_of(self.model, self.optimizer)
        about = {
            "config": to_dict(config),
            "data_hash": self.symbols.hash,
            "tensors": sorted(tensors),
            "history": [astuple(each) for each in self.history],
            "evaluations": [astuple(each) for each in self.evaluations],
            "ranks": self.world.size,
        }
        self.saved = checkpoint.save(config.folder, self.step, tensors, about, config.keep, self.world)
        return self.saved

    def _resume(self) -> None:
        """Load the last checkpoint of the folder if `resume` is set, or another run's checkpoint (`start`)."""
        folder, resume = self.config.folder, self.config.resume
        self.saved = self.world.from_first(lambda: checkpoint.checkpoint_to_resume(folder, resume=resume))
        found = self.saved or self.config.start
        if found is None:
            return
        about = checkpoint.load(found, checkpoint.tensors_of(self.model, self.optimizer), self.config, self.world)
        if about["data_hash"] != self.symbols.hash:
            what = f"{found} was trained on text {about['data_hash']}, this is {self.symbols.hash}"
            rule, fix = "a run resumes with the same text", "name the same data source and tokenizer, or another folder"
            refuse(what, rule, fix, error=CheckpointError)
        if about["step"] > self.config.steps or (about["step"] == self.config.steps and self.saved is None):
            rule = "a run has steps left after the checkpoint it starts from"
            fix = f"pass {option('steps', about['step'] + 1)} or more, or an earlier checkpoint"
            refuse(f"{found} for a run of {self.config.steps} steps", rule, fix, error=CheckpointError)
        self.step, self.changed = about["step"], changes(about["config"], to_dict(self.config))
        if (before := about.get("ranks", 1)) != self.world.size:
            self.changed.append(f"ranks {before} -> {self.world.size}")
        self.history = [StepRecord(*each) for each in about["history"]]
        self.evaluations = [Evaluation(*each) for each in about["evaluations"]]

    def result(self, stopped: Literal["done", "interrupted"]) -> TrainResult:
        """Result of the run so far."""
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
            self.flop_share,
            stopped,
            self.saved,
            str(self.report),
        )


def recipe_of(config: RecipeConfig) -> Recipe:
    """Recipe of a config."""
    recipe = get_recipe(config.name)
    if config.weights is not None:
        recipe = recipe.with_weights(config.weights)
    return recipe.replace(name=recipe.name, weight_cast=config.weight_cast, since=config.since * recipe.is_quantized)
