"""Casts: one operand, both operands, expert weights, FP4, dequantize, and casts fused with the operation before them.

The bytes of a row are the least memory traffic: the input once, codes and scales of every output once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...casts import dequantize, quantize, quantize_both
from ...casts.ops import dequantize_request
from ...formats.cast_spec import CastSpec
from ...formats.spec import get_format
from ...formats.tensor import BlockScaled
from ...registry import select
from .. import peers as others
from ..harness import Case, check_experts, check_whole, random
from ..peers import Peer
from ..shapes import Shape, numel, text
from . import fused
from .common import Extent, cast_backend, stored_bytes

EIGHT_BIT = ("fp8_1x128", "fp8_128x128", "mxfp8_e4m3")


def cases(extent: Extent) -> Iterator[Case]:
    """All rows, in the order of the tables."""
    for shape in extent.matrices:
        for format in EIGHT_BIT:
            for axis in (-1, -2):
                yield single(format, axis, shape, extent, group="one operand")
    for shape in extent.matrices:
        for format in EIGHT_BIT:
            yield both(format, shape, extent, group="both operands")
        yield both("mxfp8_e4m3", shape, extent, group="both operands", layout="blocked")
    for shape in extent.experts:
        for format in ("fp8_128x128", "mxfp8_e4m3"):
            yield both(format, shape, extent, group="expert weights")
        yield both("mxfp8_e4m3", shape, extent, group="expert weights", layout="blocked")
    for shape in extent.large:
        for format in ("mxfp4", "nvfp4", "nvfp4_16x16"):
            for axis in (-1, -2):
                yield single(format, axis, shape, extent, group="FP4, amax given", given=format != "mxfp4")
    for shape in extent.large:
        yield single("nvfp4", -1, shape, extent, group="NVFP4, own amax")
    for format in (*EIGHT_BIT, "mxfp4", "nvfp4"):
        yield back(format, extent.main, extent)
    yield from fused.cases(extent)


def single(format: str, axis: int, shape: Shape, extent: Extent, *, group: str, given: bool = False) -> Case:
    """Case of `quantize`.  given: NVFP4's tensor amax is an argument, so that one read is enough."""

    def make(device: torch.device) -> tuple[Any, ...]:
        x = random(shape, device)
        return (x, x.abs().amax().float()) if given else (x,)

    def spec(amax: Tensor | None) -> CastSpec:
        return CastSpec(format) if amax is None else CastSpec(format, amax=amax)

    def run(x: Tensor, amax: Tensor | None = None) -> BlockScaled:
        return quantize(x, spec(amax), axis=axis)

    reads = 2 if get_format(format).family == "nvfp4" and not given else 1
    return Case(
        name=f"{format} axis {axis}{' own amax' if reads == 2 else ''} {text(shape)}",
        group=group,
        format=format,
        axis=str(axis),
        shape=shape,
        make=make,
        run=run,
        backend=lambda x, amax=None: cast_backend("cast", x, spec(amax)),
        check=check_whole,
        bytes=reads * 2 * numel(shape) + stored_bytes(format, shape, axis),
        copied=shape,
        peers=_peers(format, (axis,), shape, extent),
    )


def both(format: str, shape: Shape, extent: Extent, *, group: str, layout: str | None = None) -> Case:
    """Case of `quantize_both`, for matrices and weights of experts.  layout: of the scales, if not the default."""
    spec = CastSpec(format, scale_layout=layout)
    return Case(
        name=f"{format}{'' if layout is None else f' {layout} scales'} both {text(shape)}",
        group=group,
        format=format,
        axis="both",
        shape=shape,
        make=lambda device: (random(shape, device),),
        run=lambda x: quantize_both(x, spec, spec),
        backend=lambda x: cast_backend("cast_both", x, spec, spec),
        check=check_experts if len(shape) == 3 else check_whole,
        bytes=2 * numel(shape) + stored_bytes(spec, shape, -1, -2),
        copied=shape,
        peers=_peers(format, (-1, -2), shape, extent),
    )


def _peers(format: str, axes: tuple[int, ...], shape: Shape, extent: Extent) -> Mapping[str, Peer | str]:
    """Peers of a cast; `compile` only for 8-bit formats, since plain FP4 casts in torch are not used in practice."""
    names = extent.peers if format in EIGHT_BIT else extent.peers - {"compile"}
    return others.casts(format, axes, numel(shape), names, compiling=shape in extent.compiled)


def back(format: str, shape: Shape, extent: Extent) -> Case:
    """Case of `dequantize` to bf16."""

    def backend(q: BlockScaled) -> str:
        return select(dequantize_request(q, torch.bfloat16)).backend

    return Case(
        name=f"{format} dequantize {text(shape)}",
        group="dequantize",
        format=format,
        axis="-1",
        shape=shape,
        make=lambda device: (quantize(random(shape, device), format),),
        run=dequantize,
        backend=backend,
        check=check_whole,
        bytes=2 * numel(shape) + stored_bytes(format, shape, -1),
        copied=shape,
        peers=others.decodes(extent.peers, compiling=shape in extent.compiled) if format in EIGHT_BIT else {},
    )
