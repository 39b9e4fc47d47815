"""Casts fused with the operation before them.

The peers run the operation to bf16 and then a separate cast. `unfused` compiles the operation, which rounds to bf16
once, as ours does: only torch's exponential and reduction order differ, and few codes differ. `eager` runs it kernel by
kernel and rounds after each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from ...casts import quantize, quantize_both
from ...casts.fused import rmsnorm_quantize, swiglu_backward_quantize_both, swiglu_quantize_both
from ...casts.permuted import permute_quantize_both, quantize_permute
from ..harness import Args, Case, Peer, check_bytes, random
from ..peers import compiled
from ..shapes import Shape, numel, text
from .casts import Extent, cast_backend, stored_bytes

FORMAT = "mxfp8_e4m3"
GROUPS = 8
EXPERTS_PER_TOKEN = 8
# each additional rounding to bf16 moves one code in thirty to its neighbour
_ROUNDED_AGAIN_DB = 30.0


def cases(extent: Extent) -> Iterator[Case]:
    """Every fused cast."""
    for format in (FORMAT, "fp8_1x128"):
        yield _swiglu(format, extent)
    for format in (FORMAT, "fp8_1x128"):
        yield _swiglu_backward(format, extent)
    yield _rmsnorm(extent)
    yield _permute(extent)
    yield _permute_once(extent)


def _case(
    name: str,
    shape: Shape,
    extent: Extent,
    make: Callable[[torch.device], Args],
    run: Callable[..., Any],
    backend: Callable[..., str],
    moved: int,
    before: Callable[..., Tensor],
    then: Callable[..., object],
    *,
    in_steps: Callable[..., Tensor] | None = None,
    compared: bool = True,
    format: str = FORMAT,
) -> Case:
    """Case of a fused cast.  before: the operation, for the compiled peer.  in_steps: the same kernel by kernel, for
    the eager peer.  then: the cast after it; takes the tensor and the arguments."""
    peers: dict[str, Peer | str] = {}
    if "eager" in extent.peers and in_steps is not None:
        note = "rounds to bf16 after each kernel, then a cast"
        peers["eager"] = Peer(lambda *args: then(in_steps(*args), *args), note=note, gate_db=_ROUNDED_AGAIN_DB)
    if "compile" in extent.peers:
        program, note = compiled(before), "compiled to bf16, then a cast"
        peers["unfused"] = Peer(lambda *args: then(program(*args), *args), note=note, compared=compared)
    title, axis = f"{name}{'' if format == FORMAT else f' {format}'}", "both" if "both" in name else "-1"
    return Case(
        f"{title} {text(shape)}", "fused", format, axis, shape, make, run, backend, check_bytes, moved, copied=shape,
        peers=peers,
    )  # fmt: skip


def _swiglu(format: str, extent: Extent) -> Case:
    (tokens, width), wide = extent.gated, (extent.gated[0], 2 * extent.gated[1])

    def activate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (silu(gate) * up).bfloat16()

    def activate_in_steps(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    return _case(
        "swiglu_quantize_both", wide, extent, lambda device: (random(wide, device),),
        lambda gate_up: swiglu_quantize_both(gate_up, format, format),
        lambda gate_up: cast_backend("swiglu_both", gate_up[:, :width], format, format),
        2 * numel(wide) + stored_bytes(format, (tokens, width), -1, -2),
        activate, lambda x, *args: quantize_both(x, format, format), in_steps=activate_in_steps, format=format,
    )  # fmt: skip


def _swiglu_backward(format: str, extent: Extent) -> Case:
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
        "swiglu_backward_quantize_both", wide, extent,
        lambda device: (random(extent.gated, device), random(wide, device)),
        lambda grad, gate_up: swiglu_backward_quantize_both(grad, gate_up, format, format),
        lambda grad, gate_up: cast_backend("swiglu_backward_both", gate_up, format, format),
        2 * numel(extent.gated) + 2 * numel(wide) + stored_bytes(format, wide, -1, -2),
        differentiate, lambda x, *args: quantize_both(x, format, format), in_steps=differentiate_in_steps,
        format=format,
    )  # fmt: skip


def _rmsnorm(extent: Extent) -> Case:
    """Case of `rmsnorm_quantize`. It also returns an fp32 factor per row, which the peer does not."""
    shape = extent.main
    return _case(
        "rmsnorm_quantize", shape, extent, lambda device: (random(shape, device), random(shape[-1:], device)),
        functools.partial(rmsnorm_quantize, spec=FORMAT, eps=1e-6),
        lambda x, weight: cast_backend("rmsnorm", x, FORMAT),
        2 * numel(shape) + 2 * shape[-1] + 4 * shape[0] + stored_bytes(FORMAT, shape, -1),
        lambda x, weight: rms_norm(x.float(), weight.shape, weight.float(), 1e-6).bfloat16(),
        lambda y, *args: quantize(y, FORMAT),
    )  # fmt: skip


def _permute(extent: Extent) -> Case:
    """Case with every token once, in unequal groups. Padded groups cannot be decoded together: not compared."""
    shape = extent.main

    def make(device: torch.device) -> Args:
        indices = torch.randperm(shape[0]).to(device)
        ends = torch.randint(0, shape[0], (GROUPS - 1,)).sort().values
        offs = torch.cat((ends, torch.tensor([shape[0]]))).to(torch.int32)
        return random(shape, device), indices, offs.to(device)

    return _case(
        "permute_quantize_both", shape, extent, make,
        lambda x, indices, offs: permute_quantize_both(x, indices, offs, FORMAT, FORMAT),
        lambda x, indices, offs: cast_backend("permute_both", x, FORMAT, FORMAT, offs=offs),
        2 * numel(shape) + 8 * shape[0] + stored_bytes(FORMAT, shape, -1, -2),
        lambda x, indices, offs: x[indices],
        lambda y, x, indices, offs: quantize_both(y, FORMAT, FORMAT, offs=offs), compared=False,
    )  # fmt: skip


def _permute_once(extent: Extent) -> Case:
    """Case with the tokens of a microbatch to eight experts each: cast once, then rows of codes and scales are copied.

    Least bytes: tokens once, and the experts' operands once. Our extra store and load of codes is not included.
    """
    shape = tokens, width = extent.matrices[0]
    routed = EXPERTS_PER_TOKEN * tokens
    return _case(
        "quantize_permute", shape, extent,
        lambda device: (random(shape, device), torch.randperm(routed).remainder(tokens).to(device)),
        lambda x, indices: quantize_permute(x, indices, FORMAT), lambda x, indices: cast_backend("permute", x, FORMAT),
        2 * numel(shape) + 8 * routed + stored_bytes(FORMAT, (routed, width), -1),
        lambda x, indices: x[indices], lambda y, *args: quantize(y, FORMAT),
    )  # fmt: skip
