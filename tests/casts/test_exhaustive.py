"""Inline PTX on a GPU for every input pattern, and casts with forced tiles: the bytes do not change.

The interpreter cannot run these branches of `_device.py` and `_device_fused.py`. They are compared with torch's
correctly rounded division, with the plain branches, and with `activation.py`.
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
from blockscale.casts import _device, _device_codes, _device_fused, _source, _triton, activation
from blockscale.casts._source import Tile

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
def _plain_codes(words, factor, half: tl.constexpr, S: tl.constexpr):
    """Codes of the first (half 0) or second values of packed words, by integer rounding."""
    v = (words & -65536 if half else words << 16).to(tl.float32, bitcast=True) * factor
    return _device_codes.encode_signed(v, 0, S)


@triton.jit
def _packed_words_kernel(words_ptr, factor_ptr, wrong_ptr, S: tl.constexpr, W: tl.constexpr):
    """Compare one factor and W packed words per program: along a row, and in eight consecutive rows."""
    factor = tl.load(factor_ptr + tl.program_id(0)) + tl.zeros((1, W), tl.float32)
    at = tl.program_id(1) * W + tl.arange(0, W)[None, :]
    words = tl.load(words_ptr + at)
    given = _device_codes.pack_factors(factor, factor) if _device_codes.is_exact(S) else factor
    code = _device_codes.encode_packed_row(words, given, S).to(tl.int32) & ((1 << 2 * S.code_bits) - 1)
    want = _plain_codes(words, factor, 0, S) | (_plain_codes(words, factor, 1, S) << S.code_bits)
    wrong = tl.sum((code != want).to(tl.int32))
    COUNT: tl.constexpr = 1 << 15
    a, b = words, tl.load(words_ptr + (at + 111) % COUNT)
    c, d = tl.load(words_ptr + (at + 222) % COUNT), tl.load(words_ptr + (at + 3333) % COUNT)
    if S.code_bits == 8:
        low, high = _device_codes.encode_packed_4_rows(a, b, c, d, factor, factor, S)
    else:
        low, high = _device_codes.encode_packed_8_rows(a, b, c, d, d, b, c, a, factor, factor, S)
    for half in tl.static_range(2):
        want = _plain_codes(a, factor, half, S) | (_plain_codes(b, factor, half, S) << S.code_bits)
        want |= _plain_codes(c, factor, half, S) << (2 * S.code_bits)
        want |= _plain_codes(d, factor, half, S) << (3 * S.code_bits)
        if S.code_bits == 4:
            want |= (_plain_codes(d, factor, half, S) << 16) | (_plain_codes(b, factor, half, S) << 20)
            want |= (_plain_codes(c, factor, half, S) << 24) | (_plain_codes(a, factor, half, S) << 28)
        wrong += tl.sum(((high if half else low) != want).to(tl.int32))
    tl.atomic_add(wrong_ptr, wrong)


@triton.jit
def _sigmoid_kernel(gate_ptr, out_ptr, count, W: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    tl.store(out_ptr + at, _device_fused.sigmoid(tl.load(gate_ptr + at, mask=at < count, other=0.0)), mask=at < count)


def patterns(first: int, last: int) -> Iterator[Tensor]:
    """int32 patterns from first to last inclusive, in chunks that fit in memory."""
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
def test_factors_of_every_amax(compared: Counter[str]) -> None:
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
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "fp8_1x128", "nvfp4"])
def test_codes_of_every_bf16_value(name: str, compared: Counter[str]) -> None:
    """Inline PTX from packed words to codes against the plain encoder: all 65536 values times every power of two and
    NaN, or times 4096 factors. Small integers and their reciprocals are included, since they make ties."""
    spec = _source.operand_config(CastSpec(name).plan(), torch.cuda.get_device_capability()[0] * 10, grouped=False)
    words = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.int32)
    if spec.family == "mx":
        factors = torch.arange(1, 256, dtype=torch.int32, device="cuda") << 23  # 2^-126 and up, and Inf for NaN
        factors = torch.cat((factors.view(torch.float32), torch.tensor([2.0**-127], device="cuda")))
        factors[254] = torch.nan
    else:
        some = torch.arange(1, 513, device="cuda").float()
        factors = torch.cat((some, 1 / some, torch.randn(3071, device="cuda").exp2(), some.new_tensor([torch.nan])))
    wrong = torch.zeros((), dtype=torch.int32, device="cuda")
    _packed_words_kernel[(factors.numel(), 32)](words, factors, wrong, S=spec, W=1024, enable_fp_fusion=False)
    assert wrong.item() == 0
    compared["the plain encoder, codes of every bf16 value"] += factors.numel() * (1 << 16)


@pytest.mark.gpu
def test_sigmoids_of_every_gate(compared: Counter[str]) -> None:
    """All bf16 values, and 2^26 fp32 values from -87 to where the sigmoid is 1."""
    bf16 = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    dense = torch.linspace(-87.0, 20.0, (1 << 26) - 3, device="cuda")
    for gate in (bf16.float().nan_to_num(0.0).clamp(min=-87.0), dense):
        got = torch.full_like(gate, -1.0)
        launch(_sigmoid_kernel, gate, got)
        compared["torch, sigmoids of Triton"] += same(got, activation.sigmoid(gate), gate.view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("up", [1.0, -3.0, 2.0**-100, 3e38])
def test_swiglu_of_every_gate(up: float, compared: Counter[str]) -> None:
    """The fused cast for all 65536 bf16 gates and some factors, forward and backward."""
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


# ---- forced tiles ----------------------------------------------------------------------------------------------------

# (J, MQ, BK, warps): a tile of the column operand holds full blocks of 128 rows, and J rows fill 32-bit words of codes
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
    """Cast one odd matrix with every tile forced, twice each, and compare with the reference; values compared."""
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
            chosen: list[Tile] = []

            def forced(*plans: object, tile: Tile = tile, chosen: list[Tile] = chosen, **rest: object) -> Tile:
                chosen.append(tile)
                return tile

            with pytest.MonkeyPatch.context() as patch, bs.use_backend("triton"):
                patch.setattr(_triton, "tile_shape", forced)
                results = [call() for _ in range(2)]
            assert chosen, "the tile is not chosen by tile_shape"
            for got in results:
                count += sum(same_operand(a, b) for a, b in zip(got, want, strict=True))
    return count


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_1x128", "mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_bytes_do_not_depend_on_the_tile(name: str, compared: Counter[str]) -> None:
    compared["the reference, Triton casts with other tiles"] += check_tiles(name, "cuda")
