"""A checkpoint in another layout or format; every weight is labelled kept, re-expressed, rounded or left out.

kept          the same bytes under the names of the target
re-expressed  other bytes, the same values: rows in other places, scales in another form, or a wider format
rounded       other values; only with allow_rounding
left out      the target has no place for it, for example a scale of activations
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, check_name, option, refuse
from ..formats.spec import FORMATS
from ..formats.tensor import BlockScaled
from .checkpoint import CONFIG, SHARD_BYTES, Checkpoint, Writer, open
from .experts import Item, is_fused, items
from .files import copy_beside, dtype_name
from .layouts import Layout, get_layout
from .layouts.compressed_tensors import divisor
from .layouts.modelopt import QUANT_CONFIG
from .reexpress import PLAIN_FORMATS, cast_plain, reexpress

KEPT, REEXPRESSED, ROUNDED, LEFT_OUT = "kept", "re-expressed", "rounded", "left out"
LABELS = (KEPT, REEXPRESSED, ROUNDED, LEFT_OUT)
# components of names of weights that stay unquantized when a format is asked for
_KEPT_PARTS = ("embed", "lm_head", "norm", "router")
_KEPT_MODULES = (
    "gate", "shared_expert_gate", "ffn_gate_inp", "token_embd", "output", "head", "score", "classifier", "wte", "wpe",
)  # fmt: skip


class Converted(NamedTuple):
    """A weight of a conversion.  before, after: its format, or dtype if it is plain.  why: what changed."""

    name: str
    label: str
    before: str
    after: str
    why: str


@dataclass
class ConvertReport:
    """What became of every weight and file of a conversion."""

    source: str
    layout: str
    rows: list[Converted] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    files_left_out: list[str] = field(default_factory=list)

    def count(self, label: str) -> int:
        """Number of weights with a label."""
        return sum(row.label == label for row in self.rows)

    def __str__(self) -> str:
        kinds = Counter((row.label, row.before, row.after, row.why) for row in self.rows)
        lines = [f"{self.source} -> {self.layout}: {len(self.rows)} weights in {len(self.files)} files"]
        for label in LABELS:
            for (_, before, after, why), count in sorted((key, n) for key, n in kinds.items() if key[0] == label):
                change = before if before == after else f"{before} -> {after}"
                lines.append(f"  {label:<12} {count:>6}  {change}" + (f"  ({why})" if why else ""))
        if self.files_left_out:
            lines.append(f"  files left out: {', '.join(self.files_left_out)}")
        return "\n".join(lines)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    layout: str,
    *,
    format: str | None = None,
    allow_rounding: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ConvertReport:
    """Write a checkpoint in another layout, or in another format. CheckpointError if a weight would have to be rounded.

    format: of quantized weights; theirs if not given, or one of the layout's that holds their values exactly. With
    allow_rounding, unquantized weights of linear layers are cast to it, too. `bf16` decodes.  progress: called with the
    bytes done and their total.

    >>> import tempfile, blockscale as bs
    >>> from blockscale import checkpoints
    >>> source, target = (tempfile.mkdtemp() for _ in range(2))
    >>> q = bs.quantize(torch.randn(128, 128), "mxfp4")
    >>> _ = checkpoints.write(source, [("up.weight", q)], "compressed_tensors")
    >>> print(convert(source, target, "deepseek", format="fp8_128x128"))
    compressed_tensors -> deepseek: 1 weights in 1 files
      re-expressed      1  mxfp4 -> fp8_128x128
    """
    found, to = open(source), get_layout(layout)
    if format is not None:
        check_name(format, (*FORMATS, *PLAIN_FORMATS), "format")
        if format in FORMATS and format not in to.formats:
            rule = f"{to.name} holds {', '.join(to.formats) or 'plain tensors'}"
            refuse(f"format {format!r} in layout {to.name!r}", rule, "name another format or layout", CheckpointError)
    report = ConvertReport(found.layout, to.name)
    unread, done = {name: entry.nbytes for name, entry in found.entries.items()}, 0
    total = sum(unread.values())
    with Writer(Path(target), to, shard_bytes) as writer:
        for item in items(found.entries, found.__getitem__, found.layout, to.name):
            report.rows.append(_convert(item, found, to, writer, format, allow_rounding))
            done += sum(unread.pop(name, 0) for name in item.sources)
            if progress is not None:
                progress(done, total)
        same = found.layout == to.name and all(row.label == KEPT for row in report.rows)
        config = found.config if found.path.is_dir() else {}
        report.files = writer.finish(config, config.get("quantization_config") if same else None)
    if found.path.is_dir():
        report.files_left_out = copy_beside(found.path, Path(target), {CONFIG, *(() if same else (QUANT_CONFIG,))})
    return report


def _convert(
    item: Item, found: Checkpoint, to: Layout, writer: Writer, format: str | None, allow_rounding: bool
) -> Converted:
    """Write one weight, and say what became of it."""
    entry = found.entries[item.sources[0]]
    activation = _activation_scale(item, found, to, format)
    if activation is not None:
        name, value, row = activation
        if name is not None:
            writer.add(name, value)
        return row
    value = item.make()
    # unquantized experts of gpt-oss in one tensor have inputs first; those that were merged here have outputs first
    of_gpt_oss = "gpt_oss" in (found.layout, to.name, found.config.get("model_type"))
    has_inputs_first = is_fused(item.name) and of_gpt_oss
    if isinstance(value, Tensor):
        before, turned = dtype_name(value.dtype), has_inputs_first and not item.moved
        if format in FORMATS and allow_rounding and _is_linear(item.name, value):
            q = cast_plain(value.mT.contiguous() if turned else value, format)
            if to.holds(item.name, q):
                writer.add(item.name, q)
                return Converted(item.name, ROUNDED, before, format, "")
        name = _cache_scale(item.name, found.layout, to.name)
        writer.add(name, value.mT if has_inputs_first and item.moved else value)
        return Converted(name, REEXPRESSED if item.moved else KEPT, before, before, "")
    if format in (None, value.format) and not item.moved and found.layout == to.name:
        writer.add(item.name, value, found.raw(item.name))
        return Converted(item.name, KEPT, value.format, value.format, "")
    made, exact = _in_format(item.name, value, to, format)
    why = ""
    if allow_rounding and isinstance(made, BlockScaled) and to.name == "compressed_tensors":
        made, moved = _with_divisor(item.name, made)
        exact, why = exact and not moved, "tensor scale moved by one unit in the last place" if moved else ""
    if isinstance(made, Tensor) and has_inputs_first:
        made = made.mT
    after = made.format if isinstance(made, BlockScaled) else dtype_name(made.dtype)
    if not exact and not allow_rounding:
        refuse(
            f"{item.name} is {value.format} {value.shape}, which {after} holds only rounded",
            rule="a conversion keeps values",
            fix=f"pass {option('allow_rounding', True)}, or name another format",
            error=CheckpointError,
        )
    tensors = writer.add(item.name, made)
    if not exact:
        return Converted(item.name, ROUNDED, entry.format or value.format, after, why)
    kept = not item.moved and _same_bytes(tensors, found.raw(item.name))
    return Converted(item.name, KEPT if kept else REEXPRESSED, value.format, after, "")


def _in_format(name: str, q: BlockScaled, to: Layout, format: str | None) -> tuple[Tensor | BlockScaled, bool]:
    """A weight in the format that was asked for, or in one of the layout's that holds it exactly."""
    if format is not None or q.format in to.formats:
        return reexpress(q, format or q.format)
    if to.name == "unquantized":
        return reexpress(q, "bf16")
    for each in to.formats:
        made, exact = reexpress(q, each)
        if exact:
            return made, True
    refuse(
        f"{name} is {q.format} {q.shape}, which no format of {to.name} holds exactly",
        rule=f"{to.name} holds {', '.join(to.formats)}",
        fix=f"pass {option('format', to.formats[0])} and {option('allow_rounding', True)}, or name another layout",
        error=CheckpointError,
    )


def _with_divisor(name: str, q: BlockScaled) -> tuple[BlockScaled, bool]:
    """A weight whose tensor scale is the reciprocal of an fp32 number, and whether it was moved there."""
    if q.global_scale is None or q.global_scale.numel() != 1:
        return q, False
    try:
        divisor(name, q.global_scale)
    except CheckpointError:
        moved = replace(q, global_scale=1 / (1 / q.global_scale))
        divisor(name, 1 / (1 / q.global_scale))  # a scale too small for a divisor stays refused
        return moved, True
    return q, False


def _cache_scale(name: str, layout: str, target: str) -> str:
    """Name of the scale of a layer's keys or values, which modelopt has in the modules that make them."""
    for each in "kv":
        outer, inner = f".{each}_scale", f".{each}_proj.{each}_scale"
        if layout == "modelopt" != target and name.endswith(inner):
            return name.removesuffix(inner) + outer
        if target == "modelopt" != layout and name.endswith(outer) and not name.endswith(inner):
            return name.removesuffix(outer) + inner
    return name


# end of the name of the scale of a module's activations in W4A4 checkpoints; whether it divides
_OF_ACTIVATIONS = {
    "compressed_tensors": (".input_global_scale", True),
    "modelopt": (".input_scale", False),
    "blockscale": (".input_scale", False),
}


def _activation_scale(
    item: Item, found: Checkpoint, to: Layout, format: str | None
) -> tuple[str | None, Tensor, Converted] | None:
    """The scale of a module's activations: its new name, or None if it is left out, its value, and what to report. None
    if the weight is another, or stays as it is."""
    end, divided = _OF_ACTIVATIONS.get(found.layout, (None, False))
    if end is None or not item.name.endswith(end):
        return None
    value, module = found[item.name], item.name.removesuffix(end)
    assert isinstance(value, Tensor)
    weight, before = found.entries.get(f"{module}.weight"), dtype_name(value.dtype)
    keeps_format = weight is not None and format in (None, weight.format)
    if to.name not in _OF_ACTIVATIONS or not keeps_format:
        return None, value, Converted(item.name, LEFT_OUT, before, before, "activations are scaled as they come")
    end, divides = _OF_ACTIVATIONS[to.name]
    if divides == divided:
        return None
    made = 1 / value
    if value.numel() != 1 or not bool(made.isfinite() & (made != 0)):
        what = f"{item.name} is {tuple(value.shape)} {value.flatten()[:4].tolist()}"
        refuse(what, "it scales activations by one number", "convert to another layout", error=CheckpointError)
    name, made = module + end, made.reshape([1] if divides else [])
    return name, made, Converted(name, REEXPRESSED, before, before, "the nearest reciprocal")


def _is_linear(name: str, value: Tensor) -> bool:
    """Whether a plain weight is that of a linear layer that formats are for: no embedding, head, norm or router."""
    *above, last = name.split(".")
    if not value.is_floating_point() or not value.numel():
        return False
    if is_fused(name):
        return value.dim() == 3
    if value.dim() != 2 or last != "weight" or not above or above[-1] in _KEPT_MODULES:
        return False
    return not any(word in part for part in above for word in _KEPT_PARTS)


def _same_bytes(made: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> bool:
    """Whether two weights have the same bytes, whatever their names, dtypes and shapes are."""
    one, other = (sorted(map(_raw, tensors.values()), key=len) for tensors in (made, stored))
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _raw(tensor: Tensor) -> Tensor:
    """Bytes of a tensor. Axes of size 1 may have any stride, which a view of bytes does not take."""
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
