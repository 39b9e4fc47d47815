"""Shared parts of the cast suites: shapes to run, bytes of outputs, and the backend of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...casts import quantize
from ...casts.checks import resolve_cast
from ...casts.ops import cast_request
from ...formats.cast_spec import CastSpec
from ...registry import select
from .. import shapes
from ..shapes import Shape

ALL_PEERS = frozenset({"eager", "compile", "torchao"})


@dataclass(frozen=True)
class Extent:
    """Shapes to run and peers to compare with; peers compile only at `compiled` shapes, since that takes seconds."""

    matrices: tuple[Shape, ...]
    large: tuple[Shape, ...]
    experts: tuple[Shape, ...]
    main: Shape
    gated: Shape
    compiled: frozenset[Shape]
    peers: frozenset[str]


def extent(device: torch.device, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a device; quick: fewer shapes."""
    if device.type != "cuda":
        tiny, expert = shapes.TINY, (2, *shapes.TINY_EXPERT)
        return Extent((tiny,), (tiny,), (expert,), tiny, tiny, frozenset(), peers & {"eager"})
    large = (shapes.MAIN,) if quick else shapes.LARGE
    experts = tuple((count, *shapes.EXPERT) for count in ((4,) if quick else shapes.EXPERT_COUNTS))
    compiled = frozenset({shapes.MAIN, shapes.SMALL, (4, *shapes.EXPERT)})
    return Extent((shapes.SMALL, *large), large, experts, shapes.MAIN, shapes.GATED, compiled, peers)


def stored_bytes(spec: str | CastSpec, shape: Shape, *axes: int) -> int:
    """Bytes of codes and scales of casts along those axes, from casts on the meta device."""
    source = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return sum(quantize(source, spec, axis=axis).nbytes for axis in axes)


def cast_backend(op: str, x: Tensor, *specs: str | CastSpec, offs: Tensor | None = None) -> str:
    """Backend that serves a cast."""
    plans = tuple(resolve_cast(x, spec, offs).plan for spec in specs)
    return select(cast_request(op, x, plans, offs)).backend
