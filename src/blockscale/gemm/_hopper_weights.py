"""Weight-only GEMM for Hopper, registry entry of the Gluon kernel: choice and launch.

Compiled for sm_90; it has never run on a GPU, so it is selected only if it is forced (docs/design/inference.md).
"""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..hardware import capture_id, sm_count
from ..launch import launch as launch_kernel
from ..launch import note_persistent_buffer
from ..library import empty
from ..registry import Forecast, Request, kernel
from ._gluon import TensorDescriptor, gl
from ._hopper import MOST_COUNTERS, descriptor, is_tma_addressable
from ._hopper_weights_kernel import weights_kernel
from .heuristics_weights import (
    CHUNK,
    MAX_TOKENS,
    TILE_ROWS,
    Schedule,
    WeightProblem,
    WeightTile,
    bound,
    choose,
    schedule,
    tile_for,
)
from .packed import PACKABLE, PACKED_LAYOUT, PackedWeight

MAX_ROWS = 256  # of x; more are a GEMM bound by the tensor cores


def _reject(request: Request) -> str | None:
    if 0 in request.shape:
        return "takes no empty operands"
    if request.shape[0] > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows, these are {request.shape[0]}"
    if request.layouts[1:] != (PACKED_LAYOUT,):
        return "wants a weight packed by pack_weight"
    if "accumulate" in request.options:
        return "has no accumulate"
    return None


def _problem(request: Request) -> WeightProblem:
    m, n, k = request.shape
    here = torch.cuda.is_available() and request.capability.device == "cuda"
    return WeightProblem(m, n, k, request.formats[1], sm_count(torch.device("cuda")) if here else 132)


def forecast(request: Request) -> Forecast:
    """Tile, schedule and predicted time."""
    problem = _problem(request)
    tile, cut, us = choose(problem)
    flops = 2 * problem.m * problem.n * problem.k
    note = "by the model, which is fitted to a study on one H200"
    return Forecast(f"{tile.label}; {cut.ctas} CTAs", us, flops, *bound(problem), note)


@kernel(
    "gemm",
    "hopper_weights",
    sm=(90, 90),
    formats=[("bf16", name) for name in PACKABLE],
    layouts=dict.fromkeys(PACKABLE, PACKED_LAYOUT),
    priority=27,
    reject=_reject,
    forced_only=True,  # it has never run
    forecast=forecast,
)
def packed_mm(x: Tensor, w: PackedWeight, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: weight-only GEMM of few rows, weights decoded in registers; a result row does not depend on the others"""
    assert not accumulate, "refused by _reject"
    cut = schedule(w.rows, w.length, sm_count(out.device))
    if x.shape[0] <= MAX_TOKENS:
        return launch(x, w, out, bias, cut=cut)
    for first in range(0, x.shape[0], MAX_TOKENS):
        rows = slice(first, first + MAX_TOKENS)
        launch(x[rows], w, out[rows], bias, cut=cut)


def launch(
    x: Tensor, w: PackedWeight | Tensor, out: Tensor, bias: Tensor | None,
    *, cut: Schedule, tile: WeightTile | None = None,
) -> None:  # fmt: skip
    """Launch the GEMM for up to 64 rows of x with a given schedule, and a tile other than `tile_for`'s if one is given.

    w: packed, or a bf16 tensor [N, K].  out: rows are contiguous.
    """
    n = w.shape[0]
    assert out.stride(1) == 1, "the kernel stores along N"
    assert MAX_TOKENS * out.stride(0) < 1 << 31, "the kernel has offsets of 32 bits"
    assert cut.ctas * 4 <= MOST_COUNTERS
    assert x.shape[0] <= MAX_TOKENS
    plain = isinstance(w, Tensor)
    name = "bf16" if plain else w.format
    tile = tile or tile_for(x.shape[0], name)
    if isinstance(w, Tensor):
        if not is_tma_addressable(w):
            tile = tile._replace(pdl=False)  # a copy of it is written by the kernel in front
    elif any(each.data_ptr() % 16 for each in (w.data, w.scale)):
        w, tile = replace(w, data=w.data.clone(), scale=w.scale.clone()), tile._replace(pdl=False)
    if x.stride(0) < x.shape[1]:  # rows that share memory
        x = x.contiguous()
    weights = (descriptor(w, (TILE_ROWS, CHUNK)),) * 2 if plain else _packed_descriptors(w, tile)
    scale = None if isinstance(w, Tensor) else w.global_scale
    tensors = (
        *weights, descriptor(x, (tile.bn, CHUNK)),
        out, scale, None if bias is None else bias.contiguous(),
        _counters(out.device), empty((cut.ctas * TILE_ROWS * tile.bn,), torch.float32, out.device),
    )  # fmt: skip
    sizes = (x.shape[0], n, out.stride(0), cut.units, cut.tile_units)
    # By Triton's own ptxas: the study ran with it, and versions of ptxas differ in wgmma with operands in registers.
    launch_kernel(
        weights_kernel, (cut.ctas,), tensors, (*sizes, name, tile, scale is not None, bias is not None),
        num_warps=4, launch_pdl=tile.pdl,
        enable_fp_fusion=False,  # a tensor scale and a bias round separately
    )  # fmt: skip


def _counters(device: torch.device) -> Tensor:
    """Counters at zero, int32 [MOST_COUNTERS], of launches that follow each other: on a stream, or in what the stream
    captures in a CUDA graph. A fill before each launch would take microseconds and keep launches from overlapping."""
    if device.type != "cuda":
        return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    stream, capture = torch.cuda.current_stream(device).cuda_stream, None
    if torch.cuda.is_current_stream_capturing():
        capture = capture_id(stream)
        if capture is None:
            return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    key = device, stream, capture is None
    known, found = _COUNTERS.get(key, (None, None))
    if found is None or known != capture:
        # in a capture also filled at the start of each replay
        found = torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
        _COUNTERS[key] = capture, found
    note_persistent_buffer(found, functools.partial(_counters, device))
    return found


# By device, stream and whether it captures: the number of the capture, and counters that every launch leaves at zero.
# Those of the latest capture of a stream stay alive, since its graph has their address.
_COUNTERS: dict[tuple[torch.device, int, bool], tuple[int | None, Tensor]] = {}


def _packed_descriptors(w: PackedWeight, tile: WeightTile) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of codes and scales, each box the bytes of a stage: consecutive in memory."""
    blocks = tile.chunks // 2  # of 128 of K
    found: list[TensorDescriptor] = []
    for data, dtype in ((w.data, torch.int16), (w.scale, torch.int32)):
        width = 256 if dtype == torch.int16 else 64
        rows = data.view(dtype).view(-1, width)
        box = [blocks * data.shape[2] // (width * dtype.itemsize), width]
        found.append(TensorDescriptor(rows, list(rows.shape), [width, 1], box, _linear_layout(8 * dtype.itemsize)))
    return tuple(found)


@functools.cache
def _linear_layout(bits: int) -> object:
    """Layout of a block without a swizzle."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=2)
