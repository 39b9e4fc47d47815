"""What a layout is: which stored tensors are one quantized weight, and how a weight is stored.

A weight's entry is found from names, dtypes and shapes alone. Patterns of a config (`targets`, `ignore`) are not read:
a weight is quantized if its scales are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import CheckpointError, refuse
from ...formats.layout import ceil_div, code_bytes, scale_counts
from ...formats.packing import unpack_fp6
from ...formats.scales import e8m0_decode
from ...formats.spec import Format, get_format
from ...formats.storage import operand_of
from ...formats.tensor import BlockScaled
from ..files import Stored, damaged

# dtypes of bytes whose meaning the layout tells
BYTES = ("U8", "I8")
E8M0 = (*BYTES, "F8_E8M0")
FP4 = (*BYTES, "F4")
FP32 = ("F32", "BF16", "F16")
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Entry:
    """A weight of a checkpoint.

    format: None for a plain tensor.  shape: of its values.  parts: stored names by role (`data`, `scale`,
    `global_scale`).  dtype: of a plain tensor, the header's name.  divides: the global scale divides values.
    """

    name: str
    format: str | None
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    dtype: str = ""
    divides: bool = False
    nbytes: int = 0


@dataclass
class Written:
    """Weights of a folder, as a layout describes them in its config.

    formats, shapes: by name; None: plain.  rules: scale rules of those in FP8 blocks (`pow2`, `fp32`).  is_tied: the
    head is the embedding, and is not stored.
    """

    formats: dict[str, str | None] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rules: set[str] = field(default_factory=set)
    is_tied: bool = False

    @property
    def held(self) -> list[str]:
        """Formats of quantized weights, sorted."""
        return sorted({each for each in self.formats.values() if each is not None})

    @property
    def scales_cache(self) -> bool:
        """Whether there are scales of a cache of keys and values in FP8."""
        return any(name.endswith(".k_scale") for name in self.formats)

    def modules(self, *formats: str | None) -> list[str]:
        """Modules whose weights have one of these formats: weights of two or more dimensions, without `.weight`."""
        chosen = [name for name, each in self.formats.items() if each in formats and len(self.shapes[name]) >= 2]
        found = [name.removesuffix(".weight") for name in chosen if name.endswith(".weight")]
        return [*found, "lm_head"] if None in formats and self.is_tied and "lm_head" not in found else found


class Layout:
    """A way to store block-scaled weights.

    name: as users write it.  formats: it can hold, with what it stores each as.  read_only: it is not written.
    """

    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    read_only: ClassVar[bool] = False

    def is_of(self, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> bool:
        """Whether a folder with this config and these tensors has this layout."""
        raise NotImplementedError

    def entries(self, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Entry]:
        """Weights by name. Every stored tensor belongs to one."""
        raise NotImplementedError

    def store(self, name: str, q: BlockScaled) -> dict[str, Tensor]:
        """Tensors of a quantized weight by stored name. CheckpointError if the layout cannot hold its bytes."""
        raise NotImplementedError

    def holds(self, name: str, q: BlockScaled) -> bool:
        """Whether a quantized weight can be stored."""
        try:
            self.store(name, q)
        except CheckpointError:
            return False
        return True

    def describe(self, written: Written) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Fields of config.json, and files beside it, for what was written."""
        raise NotImplementedError


class Suffix(NamedTuple):
    """What the end of a stored name says.

    role: of this tensor.  data: ends that the codes' name may have in its place.  weight: end of the weight's name.
    or_plain: a tensor with this end and no codes beside it is a plain one.
    """

    role: str
    data: tuple[str, ...]
    weight: str
    or_plain: bool = False


def entries_of(
    stored: Mapping[str, Stored], suffixes: Mapping[str, Suffix], entry: Callable[[str, dict[str, str]], Entry]
) -> dict[str, Entry]:
    """Entries of a layout whose scales have names of their own.  suffixes: longest first.  entry: of a weight with
    scales, from its name and parts."""
    scaled, taken = dict[str, dict[str, str]](), set[str]()
    for name, each in stored.items():
        suffix = next((end for end in suffixes if name.endswith(end) and name != end), None)
        if suffix is None:
            continue
        what, base = suffixes[suffix], name.removesuffix(suffix)
        codes = [base + end for end in what.data if base + end in stored]
        if len(codes) != 1:
            if what.or_plain and not codes:
                continue
            rule = f"it scales {' or '.join(base + end for end in what.data)}"
            damaged(f"{each.file} has {name!r} {'beside codes twice' if codes else 'without codes'}", rule)
        parts = scaled.setdefault(base + what.weight, {"data": codes[0]})
        if what.role in parts:
            damaged(f"{each.file} has {name!r} beside {parts[what.role]!r}", "a weight has its scales once")
        parts[what.role] = name
        taken |= {name, codes[0]}
    found = dict[str, Entry]()
    for name, parts in scaled.items():
        if "scale" not in parts:
            there = next(part for role, part in parts.items() if role != "data")
            damaged(f"{stored[there].file} has {there!r} without block scales", f"{name} has scales for its blocks")
        found[name] = entry(name, parts)
    for name in stored.keys() - taken:
        check_is_values(name, stored[name], suffixes)
        if name in found:
            damaged(f"{stored[name].file} has {name!r} beside its codes", "a weight is stored once")
        found[name] = plain_entry(name, stored[name])
    order = {part: at for at, part in enumerate(stored)}
    return dict(sorted(found.items(), key=lambda item: order[item[1].parts["data"]]))


def plain_entry(name: str, stored: Stored) -> Entry:
    """Entry of an unquantized tensor."""
    return Entry(name, None, stored.shape, {"data": name}, stored.dtype, nbytes=stored.nbytes)


def check_is_values(name: str, stored: Stored, suffixes: Iterable[str] = ()) -> None:
    """Raise unless a tensor without scales holds values: codes alone mean nothing."""
    codes = stored.dtype in BYTES and len(stored.shape) >= 2 and name.endswith((".weight", "_packed", "_blocks"))
    if not codes and not stored.dtype.startswith(("F4", "F8_")):
        return
    ends = ", ".join(f"...{each}" for each in suffixes)
    rule = f"codes have scales beside them{f', by these names: {ends}' if ends else ''}"
    damaged(f"{stored.file}: {name!r} is {stored.dtype} {stored.shape} without scales", rule, OTHER_LAYOUT)


OTHER_LAYOUT = "name the layout that wrote it: open(folder, layout=...)"


def quantized_entry(
    name: str,
    format: str,
    parts: Mapping[str, str],
    stored: Mapping[str, Stored],
    *,
    codes: tuple[str, ...],
    scales: tuple[str, ...],
    divides: bool = False,
) -> Entry:
    """Entry of a weight in a format, with the dtypes and shapes of its parts checked.

    codes, scales: dtypes that this layout has them in.
    """
    spec = get_format(format)
    data, scale = stored[parts["data"]], stored[parts["scale"]]
    shape = values_shape(data, spec)
    check_part(parts["data"], data, codes, (*shape[:-1], code_bytes(spec, shape[-1])), name)
    check_part(parts["scale"], scale, scales, (*shape[:-2], *scale_counts(spec, shape[-2], shape[-1])), name)
    check_global_scale(name, parts, stored, shape)
    nbytes = sum(stored[part].nbytes for part in parts.values())
    return Entry(name, format, shape, dict(parts), divides=divides, nbytes=nbytes)


def check_global_scale(
    name: str, parts: Mapping[str, str], stored: Mapping[str, Stored], shape: tuple[int, ...]
) -> None:
    """Raise unless the tensor scale of a weight of this shape is fp32, and one value or one for each expert."""
    if "global_scale" not in parts:
        return
    factor = stored[parts["global_scale"]]
    if factor.dtype != "F32" or math.prod(factor.shape) not in (1, math.prod(shape[:-2])):
        what = f"{factor.file}: {parts['global_scale']!r} is {factor.dtype} {factor.shape}"
        damaged(what, f"the tensor scale of {name} is one F32 value, or one for each expert")


def code_shape(stored: Stored) -> tuple[int, ...]:
    """Shape of a tensor's bytes: FP4 as its own dtype counts values."""
    return (*stored.shape[:-1], stored.shape[-1] // 2) if stored.dtype == "F4" and stored.shape else stored.shape


def values_shape(data: Stored, spec: Format) -> tuple[int, ...]:
    """Shape of the values of stored codes, by their bytes."""
    shape = code_shape(data)
    if len(shape) < 2 or 0 in shape:
        damaged(f"{data.file}: codes of shape {data.shape}", "a quantized weight has rows and columns")
    return (*shape[:-1], shape[-1] * spec.codes_per_byte)


def check_part(part: str, stored: Stored, dtypes: tuple[str, ...], shape: tuple[int, ...], name: str) -> None:
    """Raise unless a stored part has one of these dtypes and this shape of bytes."""
    if stored.dtype not in dtypes or code_shape(stored) != shape:
        what = f"{stored.file}: {part!r} is {stored.dtype} {stored.shape}"
        damaged(what, f"for {name} it is {' or '.join(dtypes)} {shape}")


def tiles_of(data: Stored, block: tuple[int, int], per_byte: int = 1) -> tuple[int, ...]:
    """Shape of the scales of stored codes with blocks of this size."""
    shape = code_shape(data)
    length = shape[-1] * per_byte
    return (*shape[:-2], ceil_div(shape[-2], block[0]), ceil_div(length, block[1]))


def read_operand(entry: Entry, read: Read, stored: Mapping[str, Stored]) -> BlockScaled:
    """A quantized weight from its stored parts. Scales that are not numbers are an error: a damaged file."""
    assert entry.format is not None
    spec = get_format(entry.format)
    data, scale = (read(entry.parts[role]) for role in ("data", "scale"))
    if spec.element.bits == 6:
        data = unpack_fp6(data, entry.shape[-1])
    elif data.dim() > len(entry.shape):  # blocks have an axis of their own
        data = data.flatten(len(entry.shape) - 1)
    scale = _scale(spec, scale).reshape(*entry.shape[:-2], *scale_counts(spec, *entry.shape[-2:]))
    _check_finite(entry, "scale", scale, stored)
    factor = read(entry.parts["global_scale"]) if "global_scale" in entry.parts else None
    if factor is not None:
        factor = 1 / factor if entry.divides else factor
        factor = factor.reshape([]) if factor.numel() == 1 and len(entry.shape) == 2 else factor.reshape(-1)
        if len(entry.shape) > 2 and factor.numel() == 1:
            factor = factor.expand(math.prod(entry.shape[:-2])).contiguous()
        _check_finite(entry, "global_scale", factor, stored)
    return operand_of(spec, data, scale, factor, entry.shape)


def _scale(spec: Format, scale: Tensor) -> Tensor:
    """Block scales in the format's dtype; powers of two and 16-bit scales widen exactly."""
    if spec.scale_dtype != torch.float32:
        return scale.view(torch.uint8).view(spec.scale_dtype)
    if scale.element_size() == 1:
        return e8m0_decode(scale.view(torch.uint8))
    return scale.float()


def _check_finite(entry: Entry, role: str, values: Tensor, stored: Mapping[str, Stored]) -> None:
    """Raise unless all scales are numbers."""
    if values.dtype == torch.float8_e8m0fnu:
        wrong = values.view(torch.uint8) == 0xFF
    elif values.dtype == torch.float8_e4m3fn:
        wrong = values.view(torch.uint8) & 0x7F == 0x7F
    else:
        wrong = ~values.isfinite()
    count = int(wrong.sum())
    if count:
        part = entry.parts[role]
        damaged(f"{stored[part].file}: {part!r} has {count:,} scales that are not finite", "scales are finite numbers")


def e8m0_bytes(scale: Tensor) -> Tensor | None:
    """Bytes of powers of two in fp32, uint8; None if one of them is none.

    >>> e8m0_bytes(torch.tensor([1.0, 0.5])).tolist(), e8m0_bytes(torch.tensor([3.0]))
    ([127, 126], None)
    """
    found = (scale.contiguous().view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    return found if torch.equal(e8m0_decode(found), scale) and not bool((found == 0xFF).any()) else None


def cannot_hold(layout: str, name: str, q: BlockScaled, formats: Iterable[str], why: str = "") -> None:
    """Raise the error of a weight that a layout does not hold.  why: if it holds the format."""
    held = list(formats)
    what = f"{name} is {q.format} {q.shape}"
    rule = f"{layout} holds {', '.join(held)}" + (why if q.format in held else "")
    fix = "write another layout" if q.format in held else "convert it to one of these, or write another layout"
    refuse(what, rule, fix, error=CheckpointError)
