"""Casts fused with the operation before them. Fused casts that this version of the library lacks are skipped and named.

The peers run the operation to bf16 and then a separate cast. `unfused` compiles the operation, which rounds to bf16
once, as ours does: only torch's exponential and reduction order differ, and few codes differ. `eager` runs it kernel by
kernel and rounds after each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from ...casts import quantize, quantize_both
from ..harness import Case, check_whole, random
from ..peers import Peer, compiled
from ..shapes import Shape, numel, text
from .common import Extent, cast_backend, stored_bytes

FORMAT = "mxfp8_e4m3"
GATED_FORMATS = (FORMAT, "fp8_1x128")
GROUPS = 8
EXPERTS_PER_TOKEN = 8
# each additional rounding to bf16 moves one code in thirty to its neighbour
_ROUNDED_AGAIN_DB = 30.0


def missing() -> list[str]:
    """Fused casts that this version of the library does not have."""
    return [name for name in FUSIONS if _find(name) is None]


def cases(extent: Extent) -> Iterator[Case]:
    """Every fused cast that exists."""
    for name, build in FUSIONS.items():
        function = _find(name)
        if function is not None:
            yield from build(function, extent)


def _find(name: str) -> Callable[..., Any] | None:
    return getattr(importlib.import_module("blockscale"), name, None)


def _case(
    name: str,
    format: str,
    shape: Shape,
    make: Callable[[torch.device], tuple[Any, ...]],
    run: Callable[..., Any],
    backend: Callable[..., str],
    moved: int,
    peers: Mapping[str, Peer | str],
) -> Case:
    return Case(
        name=f"{name}{'' if format == FORMAT else f' {format}'} {text(shape)}",
        group="fused",
        format=format,
        axis="both" if "both" in name else "-1",
        shape=shape,
        make=make,
        run=run,
        backend=backend,
        check=check_whole,
        bytes=moved,
        copied=shape,
        peers=peers,
    )


def _unfused(
    extent: Extent, before: Callable[..., Tensor], then: Callable[..., object], **more: Any
) -> dict[str, Peer]:
    """Peer with the operation compiled, then the cast; `then` takes the tensor and the arguments."""
    if "compile" not in extent.peers:
        return {}
    program = compiled(before)
    return {"unfused": Peer(lambda *args: then(program(*args), *args), note="compiled to bf16, then a cast", **more)}


def _eager(extent: Extent, before: Callable[..., Tensor], then: Callable[..., object]) -> dict[str, Peer]:
    """Peer with the operation in eager torch, then the cast."""
    if "eager" not in extent.peers:
        return {}
    note = "rounds to bf16 after each kernel, then a cast"
    return {"eager": Peer(lambda *args: then(before(*args), *args), note=note, gate_db=_ROUNDED_AGAIN_DB)}


def _both(format: str) -> Callable[..., object]:
    return lambda x, *args: quantize_both(x, format, format)


def _swiglu(function: Callable[..., Any], extent: Extent) -> Iterator[Case]:
    return (_swiglu_to(format, function, extent) for format in GATED_FORMATS)


def _swiglu_to(format: str, function: Callable[..., Any], extent: Extent) -> Case:
    (tokens, width), wide = extent.gated, (extent.gated[0], 2 * extent.gated[1])

    def activate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (silu(gate) * up).bfloat16()

    def activate_in_steps(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    return _case(
        "swiglu_quantize_both",
        format,
        wide,
        make=lambda device: (random(wide, device),),
        run=lambda gate_up: function(gate_up, format, format),
        backend=lambda gate_up: cast_backend("swiglu_both", gate_up[:, :width], format, format),
        moved=2 * numel(wide) + stored_bytes(format, (tokens, width), -1, -2),
        peers=_eager(extent, activate_in_steps, _both(format)) | _unfused(extent, activate, _both(format)),
    )


def _swiglu_backward(function: Callable[..., Any], extent: Extent) -> Iterator[Case]:
    return (_swiglu_backward_to(format, function, extent) for format in GATED_FORMATS)


def _swiglu_backward_to(format: str, function: Callable[..., Any], extent: Extent) -> Case:
    wide = (extent.gated[0], 2 * extent.gated[1])

    def differentiate(grad: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        sigmoid, dy = torch.sigmoid(gate), grad.float()
        d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((d_gate, dy * gate * sigmoid), -1).bfloat16()

    def differentiate_in_steps(grad: Tensor, gate_up: Tensor) -> Tensor:
        """The kernels of autograd, with silu(gate) recomputed, since ours does not save it either."""
        gate, up = gate_up.chunk(2, -1)
        return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)), -1)

    return _case(
        "swiglu_backward_quantize_both",
        format,
        wide,
        make=lambda device: (random(extent.gated, device), random(wide, device)),
        run=lambda grad, gate_up: function(grad, gate_up, format, format),
        backend=lambda grad, gate_up: cast_backend("swiglu_backward_both", gate_up, format, format),
        moved=2 * numel(extent.gated) + 2 * numel(wide) + stored_bytes(format, wide, -1, -2),
        peers=_eager(extent, differentiate_in_steps, _both(format)) | _unfused(extent, differentiate, _both(format)),
    )


def _rmsnorm(function: Callable[..., Any], extent: Extent) -> Iterator[Case]:
    """Case of `rmsnorm_quantize`. It also returns an fp32 factor per row, which the peer does not."""
    shape = extent.main

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x.float(), weight.shape, weight.float(), 1e-6).bfloat16()

    yield _case(
        "rmsnorm_quantize",
        FORMAT,
        shape,
        make=lambda device: (random(shape, device), random(shape[-1:], device)),
        run=lambda x, weight: function(x, weight, spec=FORMAT, eps=1e-6),
        backend=lambda x, weight: cast_backend("rmsnorm", x, FORMAT),
        moved=2 * numel(shape) + 2 * shape[-1] + 4 * shape[0] + stored_bytes(FORMAT, shape, -1),
        peers=_unfused(extent, normalise, lambda y, *args: quantize(y, FORMAT)),
    )


def _permute(function: Callable[..., Any], extent: Extent) -> Iterator[Case]:
    """Case with every token once, in unequal groups. Padded groups cannot be decoded together: not compared."""
    shape = extent.main

    def make(device: torch.device) -> tuple[Any, ...]:
        indices = torch.randperm(shape[0]).to(device)
        ends = torch.randint(0, shape[0], (GROUPS - 1,)).sort().values
        offs = torch.cat((ends, torch.tensor([shape[0]]))).to(torch.int32)
        return random(shape, device), indices, offs.to(device)

    def gather(x: Tensor, indices: Tensor, offs: Tensor) -> Tensor:
        return x[indices]

    yield _case(
        "permute_quantize_both",
        FORMAT,
        shape,
        make=make,
        run=lambda x, indices, offs: function(x, indices, offs, FORMAT, FORMAT),
        backend=lambda x, indices, offs: cast_backend("permute_both", x, FORMAT, FORMAT, offs=offs),
        moved=2 * numel(shape) + 8 * shape[0] + stored_bytes(FORMAT, shape, -1, -2),
        peers=_unfused(
            extent, gather, lambda y, x, indices, offs: quantize_both(y, FORMAT, FORMAT, offs=offs), compared=False
        ),
    )


def _permute_once(function: Callable[..., Any], extent: Extent) -> Iterator[Case]:
    """Case with the tokens of a microbatch to eight experts each: cast once, then rows of codes and scales are copied.

    Least bytes: tokens once, and the experts' operands once. Our extra store and load of codes is not included.
    """
    shape = tokens, width = extent.matrices[0]

    def make(device: torch.device) -> tuple[Any, ...]:
        return random(shape, device), torch.randperm(EXPERTS_PER_TOKEN * tokens).remainder(tokens).to(device)

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        return x[indices]

    yield _case(
        "quantize_permute",
        FORMAT,
        shape,
        make=make,
        run=lambda x, indices: function(x, indices, FORMAT),
        backend=lambda x, indices: cast_backend("permute", x, FORMAT),
        moved=2 * numel(shape)
        + EXPERTS_PER_TOKEN * (8 * tokens)
        + stored_bytes(FORMAT, (EXPERTS_PER_TOKEN * tokens, width), -1),
        peers=_unfused(extent, gather, lambda y, *args: quantize(y, FORMAT)),
    )


FUSIONS: dict[str, Callable[[Callable[..., Any], Extent], Iterator[Case]]] = {
    "swiglu_quantize_both": _swiglu,
    "swiglu_backward_quantize_both": _swiglu_backward,
    "rmsnorm_quantize": _rmsnorm,
    "permute_quantize_both": _permute,
    "quantize_permute": _permute_once,
}
