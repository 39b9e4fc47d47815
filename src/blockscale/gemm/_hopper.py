"""The Gluon product of Hopper as a row of the table: descriptors, the choice of a tile, the launch."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..formats.layout import round_up
from ..formats.tensor import BlockScaled
from ..registry import Request, kernel
from . import _assembly
from ._gluon import TensorDescriptor, gl
from ._hopper_kernel import scaled_mm_kernel
from .epilogue import finish
from .heuristics import PART, Problem, Tile, choose
from .ops import reject_fp8_of_hopper

_LANGUAGE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def _reject(request: Request) -> str | None:
    if "accumulate" in request.options and request.formats[1] == "fp8_1x128":
        return "is not trusted to add 1x128 @ 1x128 into a buffer: two runs of a large product differed"
    return reject_fp8_of_hopper(request)


@kernel(
    "gemm",
    "hopper",
    sm=(90, 90),
    formats=[("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")],
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    # below the vendor's until it is measured to be faster: it serves what the vendor refuses
    priority=15,
    reject=_reject,
)
def scaled_mm(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: warp-specialised FP8 product, promoted after every 128 of K"""
    problem = Problem(
        a.rows, b.rows, a.length, not b.spec.is_2d, out.dtype == torch.float32, multiprocessors(out.device)
    )
    tile, _ = choose(problem)
    if _can_be_described(out):
        return launch(a, b, out, bias, accumulate=accumulate, tile=tile)
    # a buffer of the caller's that the copy engine cannot write to
    product = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    launch(a, b, product, bias, accumulate=False, tile=tile)
    finish(product, out, None, accumulate=accumulate)


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many programs run at a time; on a CPU, where it is only compiled, an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, tile: Tile) -> None:
    """The product by one shape of tiles."""
    assert _can_be_described(out), "a copy of the output would be written, and lost"
    vector = not b.spec.is_2d
    m, n, k = a.rows, b.rows, a.length
    a_scale, b_scale = a.scale.mT, b.scale.mT if vector else b.scale
    a_layout, b_layout, scale_layout, out_layout = _layouts(tile.bn, out.dtype)
    grid = (min(-(-m // tile.bm) * -(-n // tile.bn), multiprocessors(out.device)),)
    _assembly.launch(functools.partial(
        scaled_mm_kernel[grid],
        _descriptor(a.data[:, :k], (PART, 128), a_layout),
        _descriptor(b.data[:, :k], (tile.bn, 128), b_layout),
        _descriptor(a_scale, (1, PART), scale_layout),
        _descriptor(b_scale if vector else a_scale, (1, tile.bn), scale_layout),
        _descriptor(out, (PART, tile.bn), out_layout),
        out, b_scale, None if bias is None else bias.contiguous(), m, n, k, b_scale.stride(0), out.stride(0),
        tile, vector, bias is not None, accumulate, num_warps=4,
        enable_fp_fusion=True,  # of the scaled sums: the contract's fused multiply-add
    ))  # fmt: skip


def _can_be_described(tensor: Tensor) -> bool:
    """Whether the copy engine can address it: rows dense, and starting at multiples of 16 bytes."""
    size = tensor.element_size()
    return tensor.stride(1) == 1 and tensor.stride(0) * size % 16 == 0 and tensor.data_ptr() % 16 == 0


def _descriptor(tensor: Tensor, block: tuple[int, int], layout: object) -> TensorDescriptor:
    if not _can_be_described(tensor):
        rows, columns = tensor.shape
        aligned = torch.empty_strided(
            (rows, columns), (round_up(columns, 16), 1), dtype=tensor.dtype, device=tensor.device
        )
        tensor = aligned.copy_(tensor)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), layout)


@functools.lru_cache(maxsize=64)
def _layouts(bn: int, dtype: torch.dtype) -> tuple[object, ...]:
    """Of tiles of a, b, scales and the output in shared memory."""
    shared = gl.NVMMASharedLayout
    return (
        shared.get_default_for([PART, 128], gl.float8e4nv),
        shared.get_default_for([bn, 128], gl.float8e4nv),
        shared(swizzle_byte_width=0, element_bitwidth=32, rank=2),
        shared.get_default_for([PART, bn], _LANGUAGE[dtype]),
    )
