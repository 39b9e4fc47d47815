"""Errors of a run with advice: the layer where a NaN or infinity first appeared, and what to change if memory runs out.

The loop only detects that a loss or a gradient is not finite; the optimizer skips such steps on the device, so the
weights are still those before it. `locate` runs the batch again with hooks on every layer that check inputs, outputs
and gradients. Layers are then called one by one, not fused, so last bits may differ.
"""

from __future__ import annotations

import errno
from pathlib import Path

import torch

from ..errors import CheckpointError, NonFiniteError, OutOfMemoryError, message, option
from ..models.non_finite import Place
from . import checkpoint
from .config import RunConfig

_STOPPED = {
    False: "training stops before such a step changes a weight; weights are those before it",
    True: "weights that are not finite are neither trained on, saved nor exported",
}
# disk full, quota exceeded, file too large
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch's message if CPU memory runs out: a plain RuntimeError
_CPU_IS_FULL = "DefaultCPUAllocator: not enough memory"


def not_finite(
    step: int, what: str, place: Place | None, config: RunConfig, *, is_updated: bool = False
) -> NonFiniteError:
    """Error of a step with a loss or gradient that is not finite.  is_updated: the weights after the step are not."""
    where = f"first in {place.layer}, {place.op}" if place else "gone when the batch was replayed layer by layer"
    where += "" if place is None or place.rank is None else f", on rank {place.rank}"
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
