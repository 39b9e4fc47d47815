"""Errors of a run with advice: the layer where a NaN or infinity first appeared, and what to change if memory runs out.

The loop only detects that a loss or a gradient is not finite; the optimizer skips such steps on the device, so the
weights are still those before it. `locate` runs the batch again with hooks on every layer that check inputs, outputs
and gradients. Layers are then called one by one, not fused, so last bits may differ.
"""

from __future__ import annotations

import errno
import functools
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, NonFiniteError, OutOfMemoryError, message, option
from ..models import Transformer
from ..nn import GroupedLinear, advance_
from . import checkpoint
from .config import RunConfig

_STOPPED = {
    False: "training stops before such a step changes a weight; weights are those before it",
    True: "weights that are not finite are neither trained on, saved nor exported",
}
# attribute in which torch keeps the result of `Module.compile`
_CALL = "_compiled_call_impl"
# disk full, quota exceeded, file too large
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch's message if CPU memory runs out: a plain RuntimeError
_CPU_IS_FULL = "DefaultCPUAllocator: not enough memory"


@dataclass
class Place:
    """Origin of the first value that is not finite.  op: fprop, dgrad or wgrad of a linear layer, else in words."""

    layer: str
    op: str


def locate(model: Transformer, pieces: list[Tensor]) -> Place | None:
    """The first layer and op with finite inputs and a result that is not finite; None if all is finite now."""
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return Place(name, "the weight itself")
    with _uncompiled(model):
        for batch in pieces:
            found = _check_batch(model, batch, len(pieces))
            advance_(model)
            if found:
                return found[0]
    return None


def _check_batch(model: Transformer, batch: Tensor, batches: int) -> list[Place]:
    """Forward and backward of one microbatch with hooks; places in the order in which they were found."""
    found: list[Place] = []
    _drop_gradients(model)
    with ExitStack() as stack:
        _hook_layers(model, found, stack)
        loss = model.loss(batch)
        if not found and not _finite(loss):
            found.append(Place("loss", "the cross entropy"))
        if not found:
            with warnings.catch_warnings(action="ignore"):  # torch warns about hooks on layers without input gradient
                (loss / batches).backward()
    found += _bad_weight_gradients(model)
    _drop_gradients(model)
    return found


def _drop_gradients(model: Transformer) -> None:
    """Drop gradients, also `main_grad`, which wgrad would accumulate into: the replay checks new ones."""
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _uncompiled(model: Transformer) -> Generator[None]:
    """Context without compiled code, so that hooks see every layer."""
    calls = [(module, getattr(module, _CALL)) for module in model.modules()]
    entropy = vars(model).pop("entropy", None)
    for module, _ in calls:
        setattr(module, _CALL, None)
    try:
        yield
    finally:
        for module, call in calls:
            setattr(module, _CALL, call)
        if entropy is not None:
            model.entropy = entropy


def _hook_layers(model: nn.Module, found: list[Place], stack: ExitStack) -> None:
    """Add forward and backward checks to every leaf module and every linear layer."""
    for name, module in model.named_modules():
        if not _is_linear(module) and any(True for _ in module.children()):
            continue
        forward = module.register_forward_hook(functools.partial(_check_forward, name, found))
        backward = module.register_full_backward_hook(functools.partial(_check_backward, name, found))
        stack.callback(forward.remove)
        stack.callback(backward.remove)


def _check_forward(name: str, found: list[Place], module: nn.Module, inputs: Any, output: Any) -> None:
    """Forward hook of a layer: record it if it is the first with an output that is not finite."""
    if not found and not _finite(output):
        made = "fprop" if _is_linear(module) else "its forward"
        found.append(Place(name, made if _finite(inputs) else "its input, from the layer before it"))


def _check_backward(name: str, found: list[Place], module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    """Backward hook of a layer: record it if it is the first with a gradient that is not finite."""
    if found:
        return
    if not _finite(grad_output):
        found.append(Place(name, "the gradient of its output, from the layer after it"))
    elif not _finite(grad_input):
        found.append(Place(name, "dgrad" if _is_linear(module) else "its backward"))


def _bad_weight_gradients(model: nn.Module) -> list[Place]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            layer = name.removesuffix(".weight")
            return [Place(layer, "wgrad" if parameter.dim() >= 2 else "the gradient of its parameter")]
    return []


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | GroupedLinear)


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    return all(_finite(each) for each in value) if isinstance(value, tuple | list) else True


def not_finite(
    step: int, what: str, place: Place | None, config: RunConfig, *, is_updated: bool = False
) -> NonFiniteError:
    """Error of a step with a loss or gradient that is not finite.  is_updated: the weights after the step are not."""
    where = f"first in {place.layer}, {place.op}" if place else "gone when the batch was replayed layer by layer"
    advice = [f"a lower {option('optimizer.rate')} or a longer {option('optimizer.warmup')}"]
    if config.recipe.name != "bf16":
        advice.append(f"{option('recipe.name', 'bf16')}, which shows whether low precision is the cause")
    if not config.optimizer.clip:
        advice.append(option("optimizer.clip", 1.0))
    what = f"step {step} of {config.name} by {config.recipe.name}: {what}; {where}"
    last = _last_checkpoint(config)
    saved = f", and the last checkpoint is {last}" if last else ""
    return NonFiniteError(message(what, rule=f"{_STOPPED[is_updated]}{saved}", fix=f"try {', or '.join(advice)}"))


def _last_checkpoint(config: RunConfig) -> Path | None:
    return None if config.folder is None else checkpoint.latest(config.folder)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on a GPU, on a CPU or in Python."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_IS_FULL in str(error)


def out_of_memory(config: RunConfig, error: Exception) -> OutOfMemoryError:
    """Out-of-memory error with the options that would help and are not set yet, most effective first."""
    advice: list[str] = []
    if config.recompute != "full":
        is_some = config.recompute == "selective"
        advice.append(option("recompute", "full") if is_some else f"{option('recompute', 'selective')}, or full")
    if config.batch > 1:
        half = f"{option('batch', config.batch // 2)} with {option('accumulate', config.accumulate * 2)}"
        advice.append(f"{half}, the same tokens per step")
    if config.model.vocabulary > 32768 and config.loss_chunks < 16:
        advice.append(option("loss_chunks", max(8, 2 * config.loss_chunks)))
    if config.recipe.weight_cast == "step" and config.recipe.name != "bf16":
        advice.append(f"{option('recipe.weight_cast', 'twice')}, which saves 2 bytes per parameter")
    if config.parameters == "float32":
        advice.append(f"{option('parameters', 'bfloat16')}, which halves weights, gradients and Adam's moments")
    if config.model.layers > 1:
        advice.append(option("model.layers", config.model.layers // 2))
    advice = advice or [f"a smaller {option('model.dim')}, {option('model.hidden')} or {option('data.sequence')}"]
    first = str(error).partition("\n")[0].partition(". GPU")[0] or "not enough memory"
    first = first[max(0, first.find(_CPU_IS_FULL)) :]  # without the location in torch's source
    what = f"{config.name} with {config.batch} x {config.data.sequence} tokens in a microbatch: {first}"
    rule = "weights, gradients, Adam's moments and tensors saved for backward have to fit into memory together"
    fix = f"try {'; '.join(advice)}"
    return OutOfMemoryError(message(what, rule=rule, fix=fix))


def file_error(config: RunConfig, error: OSError) -> CheckpointError:
    """Error for a file that a run could not read or write: text, metrics, a trace, an exported model. Checkpoints raise
    their own errors."""
    last = _last_checkpoint(config)
    mend = "free some space or name another folder" if error.errno in _FULL else "check its path and permissions"
    again = f"resume from {last} with {option('resume', True)}" if last else "start again"
    rule, fix = "a run reads text, and writes metrics, traces and exported weights", f"{mend}, then {again}"
    return CheckpointError(message(f"{config.name} stopped at a file: {error}", rule=rule, fix=fix))
