"""Names and rows of experts: gpt-oss stores all of a layer in one tensor, other layouts store each by itself.

    gpt_oss   mlp.experts.gate_up_proj [E, 2I, H], rows of gate and up in turn; mlp.experts.gate_up_proj_bias [E, 2I]
    others    mlp.experts.3.gate_proj.weight [I, H], mlp.experts.3.up_proj.weight, ..., .bias

Rows move, and nothing else, so nothing is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, option, refuse
from ..formats.storage import operand_of
from ..formats.tensor import BlockScaled
from .layouts.layout import Entry
from .reexpress import expert_of, stack

Value = Tensor | BlockScaled
Read = Callable[[str], Any]

_FUSED = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)(_bias)?")
_SINGLE = re.compile(r"(.*\bexperts)\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj\.(weight|bias)")


class Item(NamedTuple):
    """A weight of a conversion.  sources: names of the weights that it is made of.  make: reads and makes it.  moved:
    rows have other places than in the source."""

    name: str
    sources: tuple[str, ...]
    make: Callable[[], Value]
    moved: bool = False


def items(entries: Mapping[str, Entry], read: Read, layout: str, target: str) -> Iterator[Item]:
    """Weights of a conversion from one layout to another, in the order of the source."""
    if layout == "gpt_oss" and target not in ("gpt_oss", "blockscale", "unquantized"):
        yield from _split(entries, read)
    elif target == "gpt_oss" and layout != "gpt_oss":
        yield from _merged(entries, read)
    else:
        yield from (Item(name, (name,), lambda name=name: read(name)) for name in entries)


def _split(entries: Mapping[str, Entry], read: Read) -> Iterator[Item]:
    """Each expert by itself. A fused tensor is read once for all of its experts."""
    for name, entry in entries.items():
        match = _FUSED.fullmatch(name)
        if match is None or len(entry.shape) != (2 if match[3] else 3) or 0 in entry.shape:
            yield Item(name, (name,), lambda name=name: read(name))
            continue
        prefix, kind, bias = match[1], match[2], "bias" if match[3] else "weight"
        whole: list[Any] = []

        def part(at: int, rows: slice, name: str = name, whole: list[Any] = whole) -> Value:
            if not whole:
                value = read(name)
                # unquantized experts have inputs first
                whole.append(value.mT if isinstance(value, Tensor) and value.dim() == 3 else value)
            return rows_of_expert(whole[0], at, rows)

        parts = {"down": slice(None)} if kind == "down_proj" else {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        for at in range(entry.shape[0]):
            for piece, rows in parts.items():
                made = f"{prefix}.{at}.{piece}_proj.{bias}"
                yield Item(made, (name,), lambda at=at, rows=rows, part=part: part(at, rows), moved=True)


def is_fused(name: str) -> bool:
    """Whether a weight holds all experts of a layer, as gpt-oss stores them."""
    match = _FUSED.fullmatch(name)
    return match is not None and match[3] is None


def rows_of_expert(value: Value, at: int, rows: slice) -> Value:
    """Some rows of one expert: of a weight with blocks of one row, or of a bias."""
    if isinstance(value, Tensor):
        return value[at, rows].contiguous()
    one = expert_of(value, at)
    scale = one.plain_scale().view(torch.uint8)[rows]
    codes = one.data.view(torch.uint8)[rows]
    return operand_of(one.spec, codes, scale, one.global_scale, (codes.shape[0], one.shape[-1]))


def _merged(entries: Mapping[str, Entry], read: Read) -> Iterator[Item]:
    """Experts of each layer together, where the first of them stands."""
    groups: dict[tuple[str, str, str], dict[tuple[int, str], str]] = {}
    for name in entries:
        match = _SINGLE.fullmatch(name)
        if match is not None:
            kind = "down_proj" if match[3] == "down" else "gate_up_proj"
            groups.setdefault((match[1], kind, match[4]), {})[int(match[2]), match[3]] = name
    done: set[tuple[str, str, str]] = set()
    for name in entries:
        match = _SINGLE.fullmatch(name)
        if match is None:
            yield Item(name, (name,), lambda name=name: read(name))
            continue
        group = (match[1], "down_proj" if match[3] == "down" else "gate_up_proj", match[4])
        if group in done:
            continue
        done.add(group)
        of = groups[group]
        _check_complete(group[0], group[1], of)

        def made(of: Mapping[tuple[int, str], str] = of) -> Value:
            return _fused({key: read(each) for key, each in of.items()})

        fused = f"{group[0]}.{group[1]}" + ("_bias" if group[2] == "bias" else "")
        yield Item(fused, tuple(of.values()), made, moved=True)


def _check_complete(prefix: str, kind: str, of: Mapping[tuple[int, str], str]) -> None:
    """Raise unless every expert from 0 on has its parts."""
    parts = ("down",) if kind == "down_proj" else ("gate", "up")
    count = 1 + max(at for at, _ in of)
    for at in range(min(count, len(of) + 1)):
        for part in parts:
            if (at, part) not in of:
                rule, fix = "experts of a layer are stored together", "name a whole checkpoint"
                refuse(f"{prefix}.{at}.{part}_proj is missing", rule, fix, error=CheckpointError)


def _fused(found: Mapping[tuple[int, str], Value]) -> Value:
    """[E, N, K] of experts, with rows of gate and up in turn."""
    count = 1 + max(at for at, _ in found)
    made: list[Any] = []
    kinds = {_kind(value) for value in found.values()}
    if len(kinds) > 1:
        each = ", ".join(sorted(f"{kind[0]} {kind[1]}" for kind in kinds))
        rule, fix = "experts of a layer have one shape and one format", "convert them to one format first"
        refuse(f"experts of {each} in one tensor", rule, fix, error=CheckpointError)
    for at in range(count):
        if (at, "down") in found:
            made.append(found[at, "down"])
            continue
        gate, up = found[at, "gate"], found[at, "up"]
        made.append(_interleaved(gate, up))
    return torch.stack(made) if isinstance(made[0], Tensor) else stack(made)


def _kind(value: Value) -> tuple[str, tuple[int, ...]]:
    """Format or dtype, and shape."""
    return (str(value.dtype) if isinstance(value, Tensor) else value.format), tuple(value.shape)


def _interleaved(gate: Value, up: Value) -> Value:
    """Rows of gate and up in turn."""
    if isinstance(gate, Tensor) or isinstance(up, Tensor):
        assert isinstance(gate, Tensor)  # of one kind
        assert isinstance(up, Tensor)
        return torch.stack((gate, up), 1).flatten(0, 1)
    if gate.spec.is_2d or gate.global_scale is not None:
        rule = "rows of gate and up are stored in turn, in blocks of one row without a tensor scale"
        fix = f"convert to layout blockscale with {option('format', 'mxfp4')} first"
        refuse(f"gate and up in {gate.format} in one tensor", rule, fix, error=CheckpointError)
    codes, scales = (
        torch.stack(pair, 1).flatten(0, 1)
        for pair in (
            (gate.data.view(torch.uint8), up.data.view(torch.uint8)),
            (gate.plain_scale().view(torch.uint8), up.plain_scale().view(torch.uint8)),
        )
    )
    return operand_of(gate.spec, codes, scales, None, (2 * gate.shape[0], gate.shape[1]))
