"""Casts: one operand, both operands, expert weights, FP4 and dequantize (`fused.py`: casts fused with the operation
before them); and host time of a call.

The bytes of a row are the least memory traffic: the input once, codes and scales of every output once. Host time is
that of one call on a tensor so small that the device is never the bottleneck, beside the floor of a call: an allocation
with a copy, and the launch of an empty kernel. On a CPU there is no launch, and a row is the whole call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...casts import dequantize, quantize, quantize_both
from ...casts.checks import resolve_cast
from ...casts.ops import cast_request, dequantize_request
from ...casts.transpose import transpose_codes, transpose_request
from ...formats.cast_spec import CastSpec
from ...formats.spec import get_format
from ...formats.tensor import BlockScaled
from ...registry import select
from .. import peers as others
from .. import shapes
from ..harness import Case, Peer, check_bytes, random
from ..shapes import Shape, numel, text

EIGHT_BIT = ("fp8_1x128", "fp8_128x128", "mxfp8_e4m3")
HOST_SHAPE = (128, 128)
HOST_FORMATS = ("fp8_1x128", "mxfp8_e4m3", "nvfp4")


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


def extent(device: torch.device) -> Extent:
    """Extent for a device."""
    if device.type != "cuda":
        tiny, expert = shapes.TINY, (2, *shapes.TINY_EXPERT)
        return Extent((tiny,), (tiny,), (expert,), tiny, tiny, frozenset(), frozenset({"eager"}))
    experts = tuple((count, *shapes.EXPERT) for count in shapes.EXPERT_COUNTS)
    compiled = frozenset({shapes.MAIN, shapes.SMALL, (4, *shapes.EXPERT)})
    peers = frozenset({"eager", "compile", "torchao"})
    return Extent((shapes.SMALL, *shapes.LARGE), shapes.LARGE, experts, shapes.MAIN, shapes.GATED, compiled, peers)


def stored_bytes(spec: str | CastSpec, shape: Shape, *axes: int) -> int:
    """Bytes of codes and scales of casts along those axes, from casts on the meta device."""
    source = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return sum(quantize(source, spec, axis=axis).nbytes for axis in axes)


def cast_backend(op: str, x: Tensor, *specs: str | CastSpec, offs: Tensor | None = None) -> str:
    """Backend that serves a cast."""
    plans = tuple(resolve_cast(x, spec, offs).plan for spec in specs)
    return select(cast_request(op, x, plans, offs)).backend


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
    for shape in extent.matrices:
        for format in ("fp8_128x128", "nvfp4_16x16"):
            yield turned(format, shape)


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
    moved = reads * 2 * numel(shape) + stored_bytes(format, shape, axis)
    return Case(
        f"{format} axis {axis}{' own amax' if reads == 2 else ''} {text(shape)}", group, format, str(axis), shape, make,
        run, lambda x, amax=None: cast_backend("cast", x, spec(amax)), check_bytes, moved, copied=shape,
        peers=_peers(format, (axis,), shape, extent),
    )  # fmt: skip


def both(format: str, shape: Shape, extent: Extent, *, group: str, layout: str | None = None) -> Case:
    """Case of `quantize_both`, for matrices and weights of experts.  layout: of the scales, if not the default."""
    spec = CastSpec(format, scale_layout=layout)
    scales = "" if layout is None else f" {layout} scales"
    return Case(
        f"{format}{scales} both {text(shape)}", group, format, "both", shape, lambda device: (random(shape, device),),
        lambda x: quantize_both(x, spec, spec), lambda x: cast_backend("cast_both", x, spec, spec), check_bytes,
        2 * numel(shape) + stored_bytes(spec, shape, -1, -2), copied=shape,
        peers=_peers(format, (-1, -2), shape, extent),
    )  # fmt: skip


def _peers(format: str, axes: tuple[int, ...], shape: Shape, extent: Extent) -> Mapping[str, Peer | str]:
    """Peers of a cast; `compile` only for 8-bit formats, since plain FP4 casts in torch are not used in practice."""
    names = extent.peers if format in EIGHT_BIT else extent.peers - {"compile"}
    return others.casts(format, axes, numel(shape), names, compiling=shape in extent.compiled)


def back(format: str, shape: Shape, extent: Extent) -> Case:
    """Case of `dequantize` to bf16."""

    def backend(q: BlockScaled) -> str:
        return select(dequantize_request(q, torch.bfloat16)).backend

    peers = others.decodes(extent.peers, compiling=shape in extent.compiled) if format in EIGHT_BIT else {}
    return Case(
        f"{format} dequantize {text(shape)}", "dequantize", format, "-1", shape,
        lambda device: (quantize(random(shape, device), format),), dequantize, backend, check_bytes,
        2 * numel(shape) + stored_bytes(format, shape, -1), copied=shape, peers=peers,
    )  # fmt: skip


def turned(format: str, shape: Shape) -> Case:
    """Case of `transpose_codes`: the column operand of a weight in square blocks from its row operand. The copy moves
    as many bytes."""
    (rows, length), bits = shape, get_format(format).element.bits
    width = length * bits // 8

    def backend(codes: Tensor) -> str:
        return select(transpose_request(codes, length, bits)).backend

    return Case(
        f"{format} transpose {text(shape)}", "transpose of codes", format, "-2", shape,
        lambda device: (random((rows, width // 2), device).view(torch.uint8),),
        lambda codes: transpose_codes(codes, length, bits), backend, check_bytes,
        2 * rows * width, copied=(rows, width // 2), dtype="uint8",
    )  # fmt: skip


# ---- host time -------------------------------------------------------------------------------------------------------


def dispatch_cases(device: torch.device) -> Iterator[Case]:
    """Every public cast in three formats."""
    for name in ("quantize", "quantize_both", "dequantize"):
        for format in HOST_FORMATS:
            yield _host_case(name, format, device)


def _host_case(name: str, format: str, device: torch.device) -> Case:
    """Case of one cast. Specs are made once, as in a layer; NVFP4 gets its amax, so that every call is one launch."""
    spec = CastSpec(format, amax=torch.full((), 4.0, device=device)) if format == "nvfp4" else CastSpec(format)
    q = quantize(random(HOST_SHAPE, device), format)
    calls: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], str]]] = {
        "quantize": (lambda x: quantize(x, spec), lambda x: cast_backend("cast", x, spec)),
        "quantize_both": (lambda x: quantize_both(x, spec, spec), lambda x: cast_backend("cast_both", x, spec, spec)),
        "dequantize": (lambda x: dequantize(q), lambda x: select(dequantize_request(q, torch.bfloat16)).backend),
    }
    group = "host time of a call" if device.type == "cuda" else "whole call on a CPU"
    axis = "both" if name == "quantize_both" else "-1"
    return Case(
        f"{name} {format}", group, format, axis, HOST_SHAPE, lambda device: (random(HOST_SHAPE, device),), *calls[name],
        check_bytes, peers=_host_floor(device), host=True,
    )  # fmt: skip


def _host_floor(device: torch.device) -> dict[str, Peer | str]:
    """Floor of a call: peers that compute something else and are not compared."""
    least: dict[str, Peer | str] = {"copy": Peer(lambda x: torch.empty_like(x).copy_(x), compared=False)}
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from ._launch import launch

            least["triton launch"] = Peer(launch, compared=False)
    return least
