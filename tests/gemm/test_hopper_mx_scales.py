"""Hopper MXFP8 GEMM without a GPU: scale bytes as fp32 factors, their packing, the choice of a tile, the registry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import blockscale as bs
from blockscale.formats import BlockScaled
from blockscale.formats.decoding import decode_codes, e8m0_decode
from blockscale.gemm import heuristics, heuristics_mx
from blockscale.gemm._reference import block_product
from blockscale.hardware import Capability
from blockscale.registry import Request, kernels, select
from support.products import assert_same_bits, gaussian

_hopper_mx = pytest.importorskip("blockscale.gemm._hopper_mx", reason="this Triton has no Gluon for Hopper")
_kernel = pytest.importorskip("blockscale.gemm._hopper_mx_kernel")
WEIGHT = "mxfp8_e4m3_128x128"
factor_bits, byte_of = _kernel.factor_bits.fn, _kernel.byte_of.fn


def factors(words: torch.Tensor) -> torch.Tensor:
    """Factors of the scaler warps, fp32 [4, ...] from words."""
    return torch.stack([factor_bits(byte_of(words, step)).to(torch.int32) for step in range(4)]).view(torch.float32)


def test_factor_bits_of_every_byte() -> None:
    byte = torch.arange(256, dtype=torch.int32)
    got = factor_bits(byte).to(torch.int32)
    want = e8m0_decode(byte.to(torch.uint8))
    assert torch.equal(got, want.view(torch.int32))
    assert [factor_bits(b) for b in (0, 1, 127, 254, 255)] == [0x400000, 0x800000, 0x3F800000, 0x7F000000, 0x7FC00000]


def test_words_hold_four_bytes_in_order() -> None:
    assert [byte_of(-0x7F8E9DAC, step) for step in range(4)] == [0x54, 0x62, 0x71, 0x80]
    q = bs.quantize(gaussian(5, 300), "mxfp8_e4m3")
    words = _hopper_mx.scale_words(q)
    assert words.shape == (5, 3)
    got = factors(words).permute(1, 2, 0).reshape(5, 12)
    assert torch.equal(got[:, :10], e8m0_decode(q.scale.view(torch.uint8)))
    assert (got[:, 10:] == 2.0**-127).all(), "bytes of zero are finite factors, so that zero codes stay zero"


def test_scales_are_copied_only_if_not_aligned_to_words() -> None:
    q = bs.quantize(gaussian(6, 256), "mxfp8_e5m2")
    assert _hopper_mx.scale_words(q).data_ptr() == q.scale.data_ptr()
    raw = torch.zeros(49, dtype=torch.uint8)[1:].view(6, 8).copy_(q.scale.view(torch.uint8))
    moved = replace(q, scale=raw.view(q.scale.dtype))
    assert torch.equal(_hopper_mx.scale_words(moved), _hopper_mx.scale_words(q))
    apart = replace(q, scale=q.scale.view(torch.uint8).mT.contiguous().mT.view(q.scale.dtype))
    assert torch.equal(_hopper_mx.scale_words(apart), _hopper_mx.scale_words(q))


def emulated(a: BlockScaled, b: BlockScaled) -> torch.Tensor:
    """The kernel's arithmetic, except for the rounding of the tensor cores within a K-step."""
    rows = factors(_hopper_mx.scale_words(a))  # [4, M, blocks of 128]
    weight = factor_bits(b.scale.view(torch.uint8).int()).to(torch.int32).view(torch.float32)
    weight = weight.repeat_interleave(128, dim=0)[: b.rows]
    codes = [torch.nn.functional.pad(decode_codes(q).double(), (0, -q.length % 128)) for q in (a, b)]
    acc = torch.zeros(a.rows, b.rows)
    for k in range(codes[0].shape[1] // 32):
        x, w = (code[:, k * 32 : (k + 1) * 32] for code in codes)
        factor = rows[k % 4, :, k // 4][:, None] * weight[:, k // 4][None, :]  # in fp32
        acc = torch.addcmul(acc.double(), (x @ w.mT).float().double(), factor.double()).float()
    return acc


@pytest.mark.parametrize("k", [1, 15, 16, 17, 33, 96, 127, 129, 400, 511, 512])
def test_arithmetic_equals_the_reference(k: int) -> None:
    spread = torch.exp2(torch.randint(-30, 30, (20, 1), generator=torch.Generator().manual_seed(1)))
    a, b = bs.quantize(gaussian(20, k) * spread, "mxfp8_e4m3"), bs.quantize(gaussian(150, k, seed=1), WEIGHT)
    assert_same_bits(emulated(a, b), block_product(a, b))


def test_product_of_scales_is_exact_in_fp32() -> None:
    """Exact while the bytes accumulate up to 105 to 381, as docs/numerics.md allows."""
    byte = torch.arange(255, dtype=torch.int32)
    factor = factor_bits(byte).to(torch.int32).view(torch.float32)
    product = factor[:, None] * factor[None, :]
    exponent = (byte[:, None] + byte[None, :] - 254).double()
    exact = (exponent >= 105 - 254) & (exponent <= 381 - 254)
    assert torch.equal(product.double()[exact], torch.exp2(exponent)[exact])
    assert (product[exponent < 105 - 254] == 0).all()
    assert product[exponent > 381 - 254].isinf().all()


def test_every_tile_fits_in_shared_memory() -> None:
    for tile in heuristics_mx.TILES:
        for fp32_out in (False, True):
            problem = heuristics.Problem(1000, 1000, 1000, False, fp32_out, 132)
            plan = heuristics_mx.plan_for(tile, problem)
            assert plan.tile.stages >= max(2, tile.k_unroll // 4), "the stages hold an unrolled iteration"
            assert heuristics_mx.shared_bytes(plan.tile, problem) <= heuristics.SHARED_BYTES
            assert plan.ctas <= 132


@pytest.mark.parametrize(
    ("m", "n", "bm", "bn"),
    [(4096, 4096, 128, 128), (16, 7168, 64, 64), (16, 18432, 64, 64), (128, 8000, 64, 128), (1, 16, 64, 64)],
)
def test_small_gemms_get_small_tiles(m: int, n: int, bm: int, bn: int) -> None:
    for accumulate in (False, True):
        tile = heuristics_mx.choose(heuristics.Problem(m, n, 4096, False, accumulate, 132, accumulate))[0].tile
        assert (tile.bm, tile.bn) == (bm, bn)


def test_the_registry_selects_the_kernel() -> None:
    entry = next(entry for entry in kernels("gemm") if entry.launch is _hopper_mx.scaled_mm_mx)
    pair = ("mxfp8_e5m2", WEIGHT)
    request = Request("gemm", Capability("cuda", 90), pair, (100, 48, 80), torch.bfloat16, ("blocked", "plain"))
    assert select(request) is entry
    assert select(replace(request, formats=("mxfp8_e5m2", "mxfp8_e4m3"))).backend == "torch"
    assert entry.conversions(request) == ("mxfp8_e5m2 scales blocked -> plain",)
    for shape in ((100, 2111, 4095), (1, 1, 1)):
        assert select(replace(request, shape=shape)) is entry
    assert "empty" in str(entry.refusal(replace(request, shape=(100, 48, 0))))
    assert "strides" in str(entry.refusal(replace(request, options=frozenset({"strided"}))))
    assert "sm_90" in str(entry.refusal(replace(request, capability=Capability("cuda", 100))))


def test_128x128_blocks_only_as_weights() -> None:
    entry = next(entry for entry in kernels("gemm") if entry.launch is _hopper_mx.scaled_mm_mx)
    request = Request("gemm", Capability("cuda", 90), (), (100, 48, 80), torch.bfloat16, ("plain", "blocked"))
    for pair in (("mxfp8_e4m3", WEIGHT), ("mxfp8_e5m2", WEIGHT)):
        assert entry.refusal(replace(request, formats=pair)) is None
        assert entry.conversions(replace(request, formats=pair)) == (f"{WEIGHT} scales blocked -> plain",)
    for pair in (("mxfp8_e4m3", "mxfp8_e4m3"), (WEIGHT, "mxfp8_e4m3"), (WEIGHT, WEIGHT), ("mxfp4", WEIGHT)):
        assert "does not serve" in str(entry.refusal(replace(request, formats=pair)))
