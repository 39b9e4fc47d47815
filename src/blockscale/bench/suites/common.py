"""What suites of casts share: which shapes to run, random inputs, bytes of outputs, and who serves a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...casts import plan_cast, quantize
from ...casts.ops import cast_request
from ...formats.cast_spec import CastSpec, as_cast_spec
from ...registry import select
from .. import shapes
from ..shapes import Shape

ALL_PEERS = frozenset({"eager", "compile", "torchao"})


@dataclass(frozen=True)
class Extent:
    """Which shapes to run and whom to compare with; compiling takes seconds a row, so only `compiled` shapes do it."""

    matrices: tuple[Shape, ...]
    large: tuple[Shape, ...]
    experts: tuple[Shape, ...]
    main: Shape
    gated: Shape
    compiled: frozenset[Shape]
    peers: frozenset[str]


def extent(device: torch.device, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """What fits the device and the patience."""
    if device.type != "cuda":
        tiny, expert = shapes.TINY, (2, *shapes.TINY_EXPERT)
        return Extent((tiny,), (tiny,), (expert,), tiny, tiny, frozenset(), peers & {"eager"})
    large = (shapes.MAIN,) if quick else shapes.LARGE
    experts = tuple((count, *shapes.EXPERT) for count in ((4,) if quick else shapes.EXPERT_COUNTS))
    compiled = frozenset({shapes.MAIN, shapes.SMALL, (4, *shapes.EXPERT)})
    return Extent((shapes.SMALL, *large), large, experts, shapes.MAIN, shapes.GATED, compiled, peers)


def stored_bytes(spec: str | CastSpec, shape: Shape, *axes: int) -> int:
    """Bytes of codes and scales of casts along those axes, from casts that have no memory."""
    source = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return sum(quantize(source, spec, axis=axis).nbytes for axis in axes)


def cast_backend(op: str, x: Tensor, *specs: str | CastSpec, offs: Tensor | None = None) -> str:
    """Who serves a cast."""
    plans = tuple(plan_cast(x, as_cast_spec(spec), offs) for spec in specs)
    return select(cast_request(op, x, plans, offs)).backend
