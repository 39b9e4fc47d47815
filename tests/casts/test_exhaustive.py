"""Inline PTX on a GPU, for every pattern that it may meet, and casts whose tiles are others: the bytes do not change.

The interpreter cannot run these branches of `_device.py` and `_device_fused.py`; here they are held against torch's
correctly rounded division, against the plain branches, and against `activation.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton, which is not installed")

import triton
import triton.language as tl

import blockscale as bs
from blockscale import CastSpec
from blockscale.casts import _device, _device_fused, _triton, activation
from blockscale.casts._triton import Tile

CHUNK = 1 << 27
WIDTH = 4096
ONE, INFINITE = 0x3F800000, 0x7F800000
LARGEST_DIVISOR = 253 << 23  # 2^126, whose reciprocal is still normal


# ---- every pattern ---------------------------------------------------------------------------------------------------


@triton.jit
def _factor_kernel(pattern_ptr, decode_ptr, encode_ptr, count, W: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    decode, encode = _device.encode_factor(tl.load(pattern_ptr + at, mask=at < count, other=0), 448.0, True)
    tl.store(decode_ptr + at, decode, mask=at < count)
    tl.store(encode_ptr + at, encode, mask=at < count)


@triton.jit
def _inverse_kernel(x_ptr, out_ptr, count, W: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    tl.store(out_ptr + at, _device.inverse(tl.load(x_ptr + at, mask=at < count, other=1.0)), mask=at < count)


@triton.jit
def _reciprocal_kernel(x_ptr, out_ptr, count, W: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    tl.store(out_ptr + at, _device_fused.reciprocal(tl.load(x_ptr + at, mask=at < count, other=1.0)), mask=at < count)


@triton.jit
def _e2m1_kernel(wrong_ptr, W: tl.constexpr):
    """Every program looks at W of all 2^32 patterns. A negative NaN is left out: no instruction makes one."""
    pattern = (tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)).to(tl.int32)
    v = pattern.to(tl.float32, bitcast=True)
    plain = _device.encode(v, 1, 1, 0x40C00000, 7) | (((pattern >> 31) & 1) << 3)
    off = (_device._encode_e2m1(v) != plain) & ((pattern & 0x7FFFFFFF <= 0x7F800000) | (pattern > 0))
    tl.atomic_add(wrong_ptr, tl.sum(off.to(tl.int32)))


@triton.jit
def _sigmoid_kernel(gate_ptr, out_ptr, count, W: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    tl.store(out_ptr + at, _device_fused.sigmoid(tl.load(gate_ptr + at, mask=at < count, other=0.0)), mask=at < count)


def patterns(first: int, last: int) -> Iterator[Tensor]:
    """int32 patterns from first to last inclusive, in pieces that fit."""
    for start in range(first, last + 1, CHUNK):
        yield torch.arange(min(CHUNK, last + 1 - start), dtype=torch.int32, device="cuda") + start


def launch(kernel: Callable, x: Tensor, *outs: Tensor) -> None:
    count = x.numel()
    kernel[(triton.cdiv(count, WIDTH),)](x, *outs, count, W=WIDTH, enable_fp_fusion=False)


def same(got: Tensor, want: Tensor, pattern: Tensor) -> int:
    wrong = got.view(torch.int32) != want.view(torch.int32)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        pytest.fail(
            f"{int(wrong.sum())} of {got.numel()} differ, first for pattern {int(pattern[first]):08X}: "
            f"{got[first].item()!r}, want {want[first].item()!r}"
        )
    return got.numel()


@pytest.mark.gpu
def test_factors_of_every_maximum(compared: Counter[str]) -> None:
    """encode = min(448 / amax, 2^126), decode its reciprocal, for all 2^31 patterns of a magnitude."""
    for pattern in patterns(0, 0x7FFFFFFF):
        value = pattern.view(torch.float32)
        decode, encode = torch.full_like(value, -1.0), torch.full_like(value, -1.0)
        launch(_factor_kernel, pattern, decode, encode)
        quotient = (torch.full_like(value, 448.0) / value).clamp(max=2.0**126)
        factor = torch.where(pattern == 0, 1.0, quotient)
        finite = pattern < INFINITE
        same(encode, torch.where(finite, factor, torch.nan), pattern)
        same(decode, torch.where(finite, torch.ones_like(factor) / factor, torch.nan), pattern)
        compared["torch's division, factors of FP8 scales"] += 2 * pattern.numel()


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "first"), [(_inverse_kernel, 0), (_reciprocal_kernel, ONE)])
def test_reciprocals_of_every_divisor(kernel: Callable, first: int, compared: Counter[str]) -> None:
    """`inverse` takes divisors from 0, `reciprocal` from 1, both up to 2^126."""
    for pattern in patterns(first, LARGEST_DIVISOR):
        x = pattern.view(torch.float32)
        got = torch.full_like(x, -1.0)
        launch(kernel, x, got)
        compared["torch's division, reciprocals"] += same(got, torch.ones_like(x) / x, pattern)


@pytest.mark.gpu
def test_e2m1_codes_of_every_value(compared: Counter[str]) -> None:
    wrong = torch.zeros((), dtype=torch.int32, device="cuda")
    _e2m1_kernel[((1 << 32) // WIDTH,)](wrong, W=WIDTH, enable_fp_fusion=False)
    assert wrong.item() == 0
    compared["the plain encoder, E2M1 codes by few instructions"] += (1 << 32) - (1 << 23) + 1


@pytest.mark.gpu
def test_sigmoids_of_every_gate(compared: Counter[str]) -> None:
    """All bf16 values, and 2^26 fp32 ones from where a sigmoid is 0 to where it is 1."""
    bf16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    spread = torch.linspace(-90.0, 20.0, (1 << 26) - 3, device="cuda")
    for gate in (bf16.float().nan_to_num(0.0), spread):
        got = torch.full_like(gate, -1.0)
        launch(_sigmoid_kernel, gate, got)
        compared["torch, sigmoids of Triton"] += same(got, activation.sigmoid(gate), gate.view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("up", [1.0, -3.0, 2.0**-100, 3e38])
def test_swiglu_of_every_gate(up: float, compared: Counter[str]) -> None:
    """The whole cast for all 65536 bf16 gates and some factors, forward and backward, as it runs in the kernel."""
    gate = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    gate_up = torch.cat((gate.view(256, 256), torch.full((256, 256), up, device="cuda").bfloat16()), dim=-1)
    grad = torch.full((256, 256), 0.75, device="cuda").bfloat16()
    for name in ("fp8_1x128", "mxfp8_e4m3"):
        results = []
        for backend in ("triton", "reference"):
            with bs.use_backend(backend):
                forward = bs.swiglu_quantize_both(gate_up, name, name)
                results.append((*forward, *bs.swiglu_backward_quantize_both(grad, gate_up, name, name)))
        for got, want in zip(*results, strict=True):
            compared["the reference, SwiGLU of every bf16 gate"] += same_operand(got, want)


# ---- other tiles -----------------------------------------------------------------------------------------------------

# (J, MQ, BK, warps): a tile of the column operand holds whole blocks of 128 rows, and J rows make whole words of codes
ROW_TILES = (Tile(1, 8, 1024, 4), Tile(1, 16, 256, 8), Tile(1, 4, 512, 4), Tile(1, 32, 128, 4))
COLUMN_TILES = (Tile(16, 8, 128, 4), Tile(8, 16, 128, 8), Tile(16, 8, 64, 4))
BOTH_TILES = (Tile(16, 8, 128, 4), Tile(8, 16, 128, 8), Tile(8, 16, 128, 4))


def same_operand(got: bs.BlockScaled, want: bs.BlockScaled) -> int:
    for a, b in ((got.data, want.data), (got.scale, want.scale), (got.global_scale, want.global_scale)):
        if a is not None and b is not None:
            kind = torch.uint8 if a.element_size() == 1 else torch.int32
            assert torch.equal(a.view(kind), b.view(kind))
    assert (got.global_scale is None) == (want.global_scale is None)
    return got.data.numel() * got.spec.codes_per_byte


def check_tiles(name: str, device: str) -> int:
    """Casts of one odd matrix with every tile forced, twice each, against the reference; how many values."""
    x = torch.randn(333, 1202, device=device).bfloat16()
    spec = CastSpec(name, amax=torch.tensor(5.0, device=device)) if name == "nvfp4" else CastSpec(name)
    calls: list[tuple[tuple[Tile, ...], Callable[[], tuple[bs.BlockScaled, ...]]]] = [
        (ROW_TILES, lambda: (bs.quantize(x, spec),)),
        (COLUMN_TILES, lambda: (bs.quantize(x, spec, axis=-2),)),
        (BOTH_TILES, lambda: bs.quantize_both(x, spec, spec)[:2]),
    ]
    count = 0
    for tiles, call in calls:
        with bs.use_backend("reference"):
            want = call()
        for tile in tiles:
            asked: list[Tile] = []

            def forced(*plans: object, tile: Tile = tile, asked: list[Tile] = asked, **rest: object) -> Tile:
                asked.append(tile)
                return tile

            with pytest.MonkeyPatch.context() as patch, bs.use_backend("triton"):
                patch.setattr(_triton, "tile_shape", forced)
                _triton._LAUNCHES.clear()  # what was worked out with another tile
                results = [call() for _ in range(2)]
                _triton._LAUNCHES.clear()
            assert asked, "the tile is not chosen by tile_shape"
            for got in results:
                count += sum(same_operand(a, b) for a, b in zip(got, want, strict=True))
    return count


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_1x128", "mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_tiles_do_not_show(name: str, compared: Counter[str]) -> None:
    compared["the reference, Triton casts with other tiles"] += check_tiles(name, "cuda")
