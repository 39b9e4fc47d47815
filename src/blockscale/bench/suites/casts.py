"""Casts: one operand, both at once, expert weights, FP4, back to bf16, and casts fused with what comes before them.

The bytes of a row are the fewest that any implementation moves: the input once, codes and scales of every output once.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...casts import dequantize, plan_cast, quantize, quantize_both
from ...casts.ops import cast_request, dequantize_request
from ...formats.cast_spec import CastSpec, as_cast_spec
from ...formats.spec import get_format
from ...formats.tensor import BlockScaled
from ...registry import select
from .. import peers as others
from .. import shapes
from ..harness import Case, check_experts, check_whole
from ..peers import Peer
from ..shapes import Shape, text

ALL_PEERS = frozenset({"eager", "compile", "torchao"})
EIGHT_BIT = ("fp8_1x128", "fp8_128x128", "mxfp8_e4m3")


@dataclass(frozen=True)
class Extent:
    """Which shapes to run and whom to compare with; compiling costs seconds a row, so only `compiled` shapes do."""

    matrices: tuple[Shape, ...]
    large: tuple[Shape, ...]
    experts: tuple[Shape, ...]
    main: Shape
    gated: Shape
    compiled: frozenset[Shape]
    peers: frozenset[str]

    def peers_at(self, shape: Shape) -> frozenset[str]:
        return self.peers if shape in self.compiled else self.peers - {"compile"}


def extent(device: torch.device, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """What fits the device and the patience."""
    if device.type != "cuda":
        tiny, expert = shapes.TINY, (2, *shapes.TINY_EXPERT)
        return Extent((tiny,), (tiny,), (expert,), tiny, tiny, frozenset(), peers & {"eager"})
    large = (shapes.MAIN,) if quick else shapes.LARGE
    experts = tuple((count, *shapes.EXPERT) for count in ((4,) if quick else shapes.EXPERT_COUNTS))
    compiled = frozenset({shapes.MAIN, shapes.SMALL, (4, *shapes.EXPERT)})
    return Extent((shapes.SMALL, *large), large, experts, shapes.MAIN, shapes.GATED, compiled, peers)


def cases(extent: Extent) -> Iterator[Case]:
    """All rows, in the order of the tables."""
    for shape in extent.matrices:
        for format in EIGHT_BIT:
            for axis in (-1, -2):
                yield single(format, axis, shape, extent, group="one operand")
    for shape in extent.matrices:
        for format in EIGHT_BIT:
            yield both(format, shape, extent, group="both operands")
    for shape in extent.experts:
        for format in ("fp8_128x128", "mxfp8_e4m3"):
            yield both(format, shape, extent, group="expert weights")
    for shape in extent.large:
        for format in ("mxfp4", "nvfp4", "nvfp4_16x16"):
            for axis in (-1, -2):
                yield single(format, axis, shape, extent, group="FP4, amax given", given=format != "mxfp4")
    for shape in extent.large:
        yield single("nvfp4", -1, shape, extent, group="NVFP4, own amax")
    for format in ("mxfp8_e4m3", "fp8_1x128", "fp8_128x128", "mxfp4", "nvfp4"):
        yield back(format, extent.main)
    yield from fused(extent)


def random(shape: Shape, device: torch.device) -> Tensor:
    """A bf16 tensor of that shape."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


# one operand


def single(format: str, axis: int, shape: Shape, extent: Extent, *, group: str, given: bool = False) -> Case:
    """`quantize`; given: NVFP4's tensor maximum is an argument, so that one read is enough."""
    two_level = get_format(format).family == "nvfp4"

    def make(device: torch.device) -> tuple[Any, ...]:
        x = random(shape, device)
        return (x, x.abs().amax().float()) if given else (x,)

    def spec(amax: Tensor | None) -> CastSpec:
        return CastSpec(format) if amax is None else CastSpec(format, amax=amax)

    def run(x: Tensor, amax: Tensor | None = None) -> BlockScaled:
        return quantize(x, spec(amax), axis=axis)

    reads = 2 if two_level and not given else 1
    own = " own amax" if reads == 2 else ""
    return Case(
        name=f"{format} axis {axis}{own} {text(shape)}",
        group=group,
        format=format,
        axis=str(axis),
        shape=shape,
        make=make,
        run=run,
        backend=lambda x, amax=None: cast_backend("cast", x, spec(amax)),
        check=check_whole,
        bytes=reads * 2 * _numel(shape) + _stored(format, shape, axis),
        copied=shape,
        peers=others.casts(format, (axis,), _numel(shape), _peers_of(format, extent.peers_at(shape))),
    )


def _peers_of(format: str, names: frozenset[str]) -> frozenset[str]:
    return names if format in EIGHT_BIT else names - {"compile"}


def cast_backend(op: str, x: Tensor, *specs: str | CastSpec) -> str:
    """Who serves a cast."""
    plans = tuple(plan_cast(x, as_cast_spec(spec), None) for spec in specs)
    return select(cast_request(op, x, plans)).backend


def _stored(format: str, shape: Shape, axis: int) -> int:
    """Bytes of codes and scales, from a cast that has no memory."""
    return quantize(torch.empty(shape, dtype=torch.bfloat16, device="meta"), format, axis=axis).nbytes


def _numel(shape: Shape) -> int:
    return torch.Size(shape).numel()


# both operands


def both(format: str, shape: Shape, extent: Extent, *, group: str) -> Case:
    """`quantize_both`, for matrices and for weights of experts."""
    return Case(
        name=f"{format} both {text(shape)}",
        group=group,
        format=format,
        axis="both",
        shape=shape,
        make=lambda device: (random(shape, device),),
        run=lambda x: quantize_both(x, format, format),
        backend=lambda x: cast_backend("cast_both", x, format, format),
        check=check_experts if len(shape) == 3 else check_whole,
        bytes=2 * _numel(shape) + _stored(format, shape, -1) + _stored(format, shape, -2),
        copied=shape,
        peers=others.casts(format, (-1, -2), _numel(shape), extent.peers_at(shape)),
    )


# back to bf16


def back(format: str, shape: Shape) -> Case:
    """`dequantize` to bf16."""

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
        bytes=2 * _numel(shape) + _stored(format, shape, -1),
        copied=shape,
    )


# fused with what comes before


def missing_fusions() -> list[str]:
    """Fused casts that this version of the library does not have."""
    return [name for name in FUSIONS if _fusion(name) is None]


def fused(extent: Extent) -> Iterator[Case]:
    """Every fused cast that exists."""
    for name, build in FUSIONS.items():
        function = _fusion(name)
        if function is not None:
            yield build(function, extent)


def _fusion(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module("blockscale.casts.fused"), name, None)
    except ModuleNotFoundError:
        return None


def _fused_case(
    name: str, run: Callable[..., Any], make: Callable[[torch.device], tuple[Any, ...]], shape: Shape, moved: int
) -> Case:
    return Case(
        name=f"{name} {text(shape)}",
        group="fused",
        format="mxfp8_e4m3",
        axis="both" if "both" in name else "-1",
        shape=shape,
        make=make,
        run=run,
        backend=lambda *args: "see explain",
        check=check_whole,
        bytes=moved,
        copied=shape,
    )


def _swiglu(function: Callable[..., Any], extent: Extent) -> Case:
    format, (tokens, width) = "mxfp8_e4m3", extent.gated
    out = _stored(format, extent.gated, -1) + _stored(format, extent.gated, -2)

    def activate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate.float()).mul(up.float()).bfloat16()

    case = _fused_case(
        "swiglu_quantize_both",
        lambda gate_up: function(gate_up, format, format),
        lambda device: (random((tokens, 2 * width), device),),
        (tokens, 2 * width),
        2 * tokens * 2 * width + out,
    )
    return _with_unfused(case, activate, format, extent)


def _with_unfused(case: Case, before: Callable[..., Tensor], format: str, extent: Extent) -> Case:
    """With the peer that people have today: the compiled element-wise part to bf16, then a cast of its own."""
    if "compile" not in extent.peers:
        return case
    program = others.compiled(before)
    note = "compiled to bf16, then quantize_both"
    peer = Peer(lambda *args: quantize_both(program(*args), format, format), note=note)
    return dataclasses.replace(case, peers={"unfused": peer})


def _swiglu_backward(function: Callable[..., Any], extent: Extent) -> Case:
    format, (tokens, width) = "mxfp8_e4m3", extent.gated
    wide = (tokens, 2 * width)
    out = _stored(format, wide, -1) + _stored(format, wide, -2)

    def differentiate(grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = (half.float() for half in gate_up.chunk(2, -1))
        sigmoid, dy = torch.sigmoid(gate), grad.float()
        d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((d_gate, dy * gate * sigmoid), -1).bfloat16()

    case = _fused_case(
        "swiglu_backward_quantize_both",
        lambda grad, gate_up: function(grad, gate_up, format, format),
        lambda device: (random(extent.gated, device), random(wide, device)),
        wide,
        2 * tokens * 3 * width + out,
    )
    return _with_unfused(case, differentiate, format, extent)


def _rmsnorm(function: Callable[..., Any], extent: Extent) -> Case:
    format, shape = "mxfp8_e4m3", extent.main
    return _fused_case(
        "rmsnorm_quantize",
        lambda x, weight: function(x, weight, 1e-6, format),
        lambda device: (random(shape, device), random(shape[-1:], device)),
        shape,
        2 * _numel(shape) + 2 * shape[-1] + _stored(format, shape, -1),
    )


def _permute(function: Callable[..., Any], extent: Extent) -> Case:
    """Tokens gathered into eight groups of unequal sizes."""
    format, shape, groups = "mxfp8_e4m3", extent.main, 8

    def make(device: torch.device) -> tuple[Any, ...]:
        indices = torch.randperm(shape[0], device=device)
        ends = torch.randint(0, shape[0], (groups - 1,), device=device).sort().values
        offs = torch.cat((ends, ends.new_full((1,), shape[0]))).to(torch.int32)
        return random(shape, device), indices, offs

    moved = 2 * _numel(shape) + _stored(format, shape, -1) + _stored(format, shape, -2) + 8 * shape[0]
    return _fused_case(
        "permute_quantize_both",
        lambda x, indices, offs: function(x, indices, offs, format, format),
        make,
        shape,
        moved,
    )


FUSIONS: dict[str, Callable[[Callable[..., Any], Extent], Case]] = {
    "swiglu_quantize_both": _swiglu,
    "swiglu_backward_quantize_both": _swiglu_backward,
    "rmsnorm_quantize": _rmsnorm,
    "permute_quantize_both": _permute,
}
