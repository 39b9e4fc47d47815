"""What went wrong, in words that help: where a NaN first was, and what to change when memory runs out.

The loop only notices that a loss or a gradient was no number, and holds the weights as they were then (the optimizer
skips such steps on the device). `locate` replays the batch with a look at every layer: its input, its output, the
gradients that come in and go out. Layers are called one by one for that, not fused, so last bits may differ.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, NonFiniteError, OutOfMemoryError, message, option
from ..nn import GroupedLinear, advance_
from . import checkpoint
from .config import RunConfig
from .model import Transformer

_STOPPED = {
    False: "training stops before such a step changes a weight; weights are those before it",
    True: "what is no number is neither trained on, saved nor exported",
}
# where torch keeps what `Module.compile` made
_CALL = "_compiled_call_impl"
# no room on a disk, or for this user
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# what torch says on a CPU, where it has no error of its own for it
_CPU_IS_FULL = "DefaultCPUAllocator: not enough memory"


@dataclass
class Place:
    """Where something that is no number first came up.  product: fprop, dgrad or wgrad of a linear layer, else what."""

    layer: str
    product: str


def locate(model: Transformer, pieces: list[Tensor]) -> Place | None:
    """The first layer and product whose inputs are finite and whose result is not; None if all is finite now."""
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return Place(name, "the weight itself")
    with _plainly_called(model):
        for batch in pieces:
            found = _look_at(model, batch, len(pieces))
            advance_(model)
            if found:
                return found[0]
    return None


def _look_at(model: Transformer, batch: Tensor, batches: int) -> list[Place]:
    """Forward and backward of one of a step's batches; what was found first comes first."""
    found: list[Place] = []
    _forget_gradients(model)
    with ExitStack() as stack:
        _watch(model, found, stack)
        loss = model.loss(batch)
        if not found and not _finite(loss):
            found.append(Place("loss", "the cross entropy"))
        if not found:
            with warnings.catch_warnings(action="ignore"):  # of hooks on layers whose input has no gradient
                (loss / batches).backward()
    found += _bad_weight_gradients(model)
    _forget_gradients(model)
    return found


def _forget_gradients(model: Transformer) -> None:
    """Also those that products would add to: the replay looks for new ones."""
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _plainly_called(model: Transformer) -> Generator[None]:
    """Within it nothing is compiled: hooks see every layer."""
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


def _watch(model: nn.Module, found: list[Place], stack: ExitStack) -> None:
    """Look at every leaf, and at every linear layer, forward and backward."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | GroupedLinear) and any(True for _ in module.children()):
            continue
        for handle in (
            module.register_forward_hook(_forward_look(name, found)),
            module.register_full_backward_hook(_backward_look(name, found)),
        ):
            stack.callback(handle.remove)


def _forward_look(name: str, found: list[Place]) -> Callable[..., None]:
    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _finite(output):
            made = "fprop" if _is_linear(module) else "its forward"
            found.append(Place(name, made if _finite(inputs) else "its input, made by what precedes it"))

    return look


def _backward_look(name: str, found: list[Place]) -> Callable[..., None]:
    def look(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        if found:
            return
        if not _finite(grad_output):
            found.append(Place(name, "the gradient of its result, made by what follows it"))
        elif not _finite(grad_input):
            found.append(Place(name, "dgrad" if _is_linear(module) else "its backward"))

    return look


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
    """The error of a step whose loss or gradient is no number; is_updated: or whose weights are none after it."""
    where = f"first in {place.layer}, {place.product}" if place else "gone when the batch was replayed layer by layer"
    advice = [f"a lower {option('optimizer.rate')} or a longer {option('optimizer.warmup')}"]
    if config.recipe.name != "bf16":
        advice.append(f"{option('recipe.name', 'bf16')}, which tells whether low precision is the cause")
    if not config.optimizer.clip:
        advice.append(option("optimizer.clip", 1.0))
    return NonFiniteError(
        message(
            f"step {step} of {config.name} by {config.recipe.name}: {what}; {where}",
            rule=f"{_STOPPED[is_updated]}{_saved(config)}",
            fix=f"try {', or '.join(advice)}",
        )
    )


def _saved(config: RunConfig) -> str:
    last = None if config.folder is None else checkpoint.latest(config.folder)
    return f", and the last checkpoint is {last}" if last else ""


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on a GPU, on a CPU or in Python."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_IS_FULL in str(error)


def out_of_memory(config: RunConfig, error: Exception) -> OutOfMemoryError:
    """What to change, of what has not been changed yet, most effective first."""
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
    first = first[max(0, first.find(_CPU_IS_FULL)) :]  # not where in torch's source that is
    return OutOfMemoryError(
        message(
            f"{config.name} with {config.batch} x {config.data.sequence} tokens in a microbatch: {first}",
            rule="weights, gradients, Adam's moments and what waits for the backward have to fit into memory together",
            fix=f"try {'; '.join(advice)}",
        )
    )


def of_a_file(config: RunConfig, error: OSError) -> CheckpointError:
    """Of a file that a run could not read or write: text, metrics, a trace, an exported model. Checkpoints have errors
    of their own, and one that is complete stays."""
    last = None if config.folder is None else checkpoint.latest(config.folder)
    mend = "free some space or name another folder" if error.errno in _FULL else "check that it is there, and yours"
    again = f"go on from {last} with {option('resume', True)}" if last else "start again"
    return CheckpointError(
        message(
            f"{config.name} stopped at a file: {error}",
            rule="text is read, and metrics, traces and exported weights are written, while a run is under way",
            fix=f"{mend}, then {again}",
        )
    )
