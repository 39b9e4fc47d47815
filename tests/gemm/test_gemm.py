"""Dense GEMM: every registered kernel and every legal pair against the exact product, and the contract's rules for
bias, accumulation, layouts, edge bytes and NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.errors import OptionError
from blockscale.formats import FORMATS, BlockScaled
from blockscale.formats.decoding import decode_blocks
from blockscale.gemm import ACCUMULATOR_DTYPES, exact_mm
from blockscale.gemm.ops import exact_bf16, gemm_request
from support.products import (
    FEW,
    PAIRS,
    accepts,
    assert_same_bits,
    cases,
    gate_a,
    gaussian,
    is_vendor_fp8,
    only,
    partner,
    skip_refused,
    step,
)

# (M, N, K): odd sizes, K = 1, one short block, a tail after whole blocks, odd K with two codes per byte, and one size
# that F.scaled_mm takes
SIZES = [(1, 1, 1), (7, 33, 130), (33, 7, 300), (130, 300, 33), (300, 130, 7), (1, 130, 257), (128, 64, 512)]


def operands(pair: tuple[str, str], m: int, n: int, k: int, device: torch.device) -> tuple[BlockScaled, BlockScaled]:
    x, w = gaussian(m, k, device=device, seed=1), gaussian(n, k, device=device, seed=2)
    return bs.quantize(x, pair[0]), bs.quantize(w, pair[1])


def request(a: BlockScaled, b: BlockScaled, dtype: torch.dtype = torch.float32, **options: bool):
    return gemm_request(a, b, dtype, **{"bias": False, "accumulate": False, **options})


def fp32_error(a: BlockScaled, b: BlockScaled) -> Tensor:
    """A priori error bound of fp32 sums of K terms, one bit wider for adders that truncate."""
    magnitudes = bs.dequantize(a, torch.float32).double().abs() @ bs.dequantize(b, torch.float32).double().abs().mT
    return magnitudes * (a.length + 4) * 2.0**-23


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm"))
def test_against_the_exact_product(row, device, pair):
    reasons, ran = [], 0
    for m, n, k in SIZES:
        a, b = operands(pair, m, n, k, device)
        if not accepts(row, request(a, b)):
            reasons.append(row.refusal(request(a, b)))
            continue
        ran += 1
        exact, bound = exact_mm(a, b), fp32_error(a, b)
        with only(row):
            product = bs.scaled_mm(a, b, torch.float32)
            halves = {dtype: bs.scaled_mm(a, b, dtype) for dtype in (torch.bfloat16, torch.float16)}
        assert product.dtype == torch.float32
        assert product.shape == (m, n)
        assert sqnr_db(exact, product).item() >= gate_a(row, pair), (m, n, k)
        if is_vendor_fp8(row, pair):
            # its fp32 error is a few percent of a bf16 step, so some values round to the other neighbour
            assert sqnr_db(exact.bfloat16(), halves[torch.bfloat16]).item() >= 57.0
            continue
        for dtype, y in halves.items():
            assert y.dtype == dtype
            assert ((y.double() - exact).abs() <= step(exact, dtype) / 2 + bound).all(), (m, n, k, dtype)
    if not ran:
        pytest.skip("; ".join(sorted(set(reasons))))


@pytest.mark.parametrize(
    ("row", "device", "pair"), [case for case in cases("gemm") if not is_vendor_fp8(case.values[0], case.values[2])]
)
def test_every_value_is_within_the_error_of_fp32_sums(row, device, pair):
    """A norm hides a single bad value; the a priori bound does not."""
    m, n, k = 33, 17, 96
    a, b = operands(pair, m, n, k, device)
    skip_refused(row, request(a, b))
    with only(row):
        product = bs.scaled_mm(a, b, torch.float32).double()
    assert ((product - exact_mm(a, b)).abs() <= fp32_error(a, b)).all()


@pytest.mark.parametrize("pair", PAIRS, ids="@".join)
def test_the_exact_product_is_that_of_the_decoded_operands(device, pair):
    """exact_mm has its own decoder; dequantize rounds FP8 and NVFP4 values to fp32 and leaves MX values exact."""
    a, b = operands(pair, 33, 20, 300, device)
    decoded = bs.dequantize(a, torch.float32).double() @ bs.dequantize(b, torch.float32).double().mT
    exact = exact_mm(a, b)
    assert exact.dtype == torch.float64
    if a.spec.family == "mx":
        # sums of MX values need fewer than 53 bits here, so order does not matter
        assert torch.equal(decoded, exact)
    else:
        assert sqnr_db(decoded, exact).item() >= 140.0


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
@pytest.mark.parametrize("size", [(0, 5, 64), (5, 0, 64), (5, 7, 0), (0, 0, 0)], ids=str)
def test_empty(row, device, pair, size):
    m, n, k = size
    a, b = operands(pair, m, n, k, device)
    skip_refused(row, request(a, b))
    with only(row):
        y = bs.scaled_mm(a, b)
        acc = torch.full((m, n), 3.0, device=device)
        bs.scaled_mm(a, b, accumulate=acc)
        bias = torch.arange(n, device=device, dtype=torch.float32)
        biased = bs.scaled_mm(a, b, torch.float32, bias=bias)
    assert torch.equal(y, torch.zeros(m, n, dtype=torch.bfloat16, device=device))
    assert torch.equal(acc, torch.full((m, n), 3.0, device=device))
    assert torch.equal(biased, bias.expand(m, n))


@pytest.mark.parametrize(
    ("row", "device", "pair"), cases("gemm", [pair for pair in PAIRS if "mxfp4" in pair and pair[0] != pair[1]])
)
def test_mixed_formats_with_odd_k(row, device, pair):
    """FP4 codes are two per byte and FP6 codes one per byte: the padding nibble must not be multiplied by a value."""
    for k in (1, 31, 33, 65):
        a, b = operands(pair, 5, 6, k, device)
        skip_refused(row, request(a, b))
        with only(row):
            product = bs.scaled_mm(a, b, torch.float32)
        assert sqnr_db(exact_mm(a, b), product).item() >= 130.0


# ---- epilogue ------------------------------------------------------------------------------------------------------


def near_one(pair: tuple[str, str], device: torch.device) -> tuple[BlockScaled, BlockScaled]:
    """A product that is just below 1 + 2^-8, the midpoint of two bf16 numbers, in every format: 1 + 1.5 * 2^-9."""
    x, w = torch.ones(16, 256, device=device), torch.zeros(32, 256, device=device)
    w[:, 0], w[:, 128] = 1.0, 1.5 * 2.0**-9
    return bs.quantize(x, pair[0]), bs.quantize(w, pair[1])


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_bias_comes_before_the_only_rounding(row, device, pair):
    a, b = near_one(pair, device)
    skip_refused(row, request(a, b, torch.bfloat16, bias=True))
    with only(row):
        # rounded first, the sum would be bf16(1 + 2^-9) = 1
        assert (bs.scaled_mm(a, b) == 1.0).all()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            bias = torch.full((32,), 2.0**-9, dtype=dtype, device=device)
            assert (bs.scaled_mm(a, b, bias=bias) == 1.0 + 2.0**-7).all()


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_bias_belongs_to_columns(row, device, pair):
    a, b = operands(pair, 20, 48, 256, device)
    skip_refused(row, request(a, b, bias=True))
    bias = gaussian(48, device=device, seed=3)
    with only(row):
        product, biased = bs.scaled_mm(a, b, torch.float32), bs.scaled_mm(a, b, torch.float32, bias=bias)
    assert torch.equal(biased, product + bias.float())


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_accumulate_adds_in_place_with_one_rounding(row, device, pair, dtype):
    a, b = operands(pair, 20, 48, 256, device)
    skip_refused(row, request(a, b, dtype, accumulate=True))
    acc = gaussian(20, 48, device=device, seed=3).to(dtype)
    start = acc.clone()
    with only(row):
        product = bs.scaled_mm(a, b, torch.float32)
        assert bs.scaled_mm(a, b, accumulate=acc) is acc
        once = (start.float() + product).to(dtype)
        assert torch.equal(acc, once)
        assert bs.scaled_mm(a, b, torch.float16, accumulate=acc) is acc
    assert torch.equal(acc, (once.float() + product).to(dtype))
    assert acc.dtype == dtype


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
def test_accumulate_into_a_transposed_buffer(device, dtype):
    a, b = operands(("mxfp8_e4m3", "mxfp8_e4m3"), 20, 48, 256, device)
    buffer = torch.ones(48, 20, dtype=dtype, device=device)
    bs.scaled_mm(a, b, accumulate=buffer.mT)
    assert torch.equal(buffer.mT, (1 + bs.scaled_mm(a, b, torch.float32)).to(dtype))


@pytest.mark.parametrize("kind", ["leaf", "view of a leaf", "result"])
def test_accumulate_into_a_tensor_that_requires_grad_is_refused(kind: str):
    a, b = operands(("mxfp8_e4m3", "mxfp8_e4m3"), 20, 48, 256, torch.device("cpu"))
    leaf = torch.ones(20, 48, requires_grad=True)
    acc = {"leaf": leaf, "view of a leaf": leaf.view(20, 48), "result": leaf * 1}[kind]
    with pytest.raises(OptionError, match=r"accumulate requires grad.*Fix: pass accumulate\.detach\(\).*no_grad"):
        bs.scaled_mm(a, b, accumulate=acc)
    assert (leaf == 1).all()
    with torch.no_grad():
        bs.scaled_mm(a, b, accumulate=acc)
    assert torch.equal(acc, 1 + bs.scaled_mm(a, b, torch.float32))


# ---- layouts, strides, rotations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
@pytest.mark.parametrize(("m", "n", "k"), [(20, 48, 256), (130, 33, 300)])
def test_scale_layouts_do_not_matter(row, device, pair, m, n, k):
    a, b = operands(pair, m, n, k, device)
    skip_refused(row, request(a, b))
    layouts = [(x, y) for x in a.spec.layouts for y in b.spec.layouts]
    assert len(layouts) == 4
    with only(row):
        want = bs.scaled_mm(a, b, torch.float32)
        for first, second in layouts:
            assert torch.equal(bs.scaled_mm(a.with_layout(first), b.with_layout(second), torch.float32), want)
        cast = bs.quantize(gaussian(m, k, device=device, seed=1), pair[0], scale_layout=a.spec.layouts[1])
        assert cast.scale_layout == a.spec.layouts[1]
        assert torch.equal(bs.scaled_mm(cast, b, torch.float32), want)


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_operands_cast_along_tokens(row, device, pair):
    """wgrad: dy [T, N] and x [T, K] are contracted over T."""
    dy, x = gaussian(144, 32, device=device, seed=1), gaussian(144, 48, device=device, seed=2)
    a, b = bs.quantize(dy, pair[0], axis=-2).mT, bs.quantize(x, pair[1], axis=-2).mT
    assert a.shape == (32, 144)
    skip_refused(row, request(a, b))
    with only(row):
        got = bs.scaled_mm(a, b, torch.float32)
        want = bs.scaled_mm(bs.quantize(dy.mT, pair[0]), bs.quantize(x.mT, pair[1]), torch.float32)
    assert torch.equal(got, want)
    assert sqnr_db(exact_mm(a, b), got).item() >= gate_a(row, pair)


@pytest.mark.parametrize("pair", FEW, ids="@".join)
def test_sources_of_any_strides(device, pair):
    x, w = gaussian(24, 64, device=device, seed=1), gaussian(16, 64, device=device, seed=2)
    wide = torch.empty(24, 128, dtype=x.dtype, device=device)
    wide[:, ::2] = x
    row = w[:1]
    got = bs.scaled_mm(bs.quantize(wide[:, ::2], pair[0]), bs.quantize(row.expand(16, 64), pair[1]), torch.float32)
    want = bs.scaled_mm(bs.quantize(x, pair[0]), bs.quantize(row.repeat(16, 1), pair[1]), torch.float32)
    assert torch.equal(got, want)


def test_rotation_cancels_exactly(device):
    """Rotated unit vectors are +-1/4 (nvfp4, exact up to the tensor scale) and +-0.17678 (mxfp4, coded 0.1875)."""
    eye = torch.eye(64, device=device)
    q = bs.quantize(eye, "mxfp4", hadamard=True)
    assert torch.equal(bs.scaled_mm(q, q, torch.float32), 32 * 0.1875**2 * eye)
    q = bs.quantize(eye, "nvfp4", hadamard=True)
    product = bs.scaled_mm(q, q, torch.float32)
    assert torch.equal(product == 0, eye == 0)
    assert ((product.diagonal() - 1).abs() <= 2.0**-21).all()


@pytest.mark.parametrize("k", [256, 250, 7])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_rotated_operands_give_nearly_the_plain_product(device, name, k):
    x, w = gaussian(64, k, device=device, seed=1), gaussian(64, k, device=device, seed=2)
    true = x.double() @ w.double().mT
    a, b = bs.quantize(x, name, hadamard=True), bs.quantize(w, name, hadamard=True)
    assert a.length == -(-k // a.spec.hadamard) * a.spec.hadamard
    product = bs.scaled_mm(a, b, torch.float32)
    assert sqnr_db(exact_mm(a, b), product).item() >= 80.0
    # another mask on one side would leave noise only: about -3 dB
    assert sqnr_db(true, product).item() >= 14.0
    other = replace(bs.quantize(w, name, hadamard=0x5A5A), hadamard=a.hadamard)
    assert sqnr_db(true, bs.scaled_mm(a, other, torch.float32)).item() < 3.0


# ---- edge bytes ----------------------------------------------------------------------------------------------------

EDGE_BYTES = (0x00, 0x01, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)
MX = [name for name, spec in FORMATS.items() if spec.family == "mx"]
# the upcast on CUDA is exact for fewer bytes; hopper has its own test
CPU_OR_REFERENCE = [
    c for c in cases("gemm", [(n, n) for n in MX]) if not c.id.startswith(("cuda-torch", "cuda-hopper"))
]


def with_scale_bytes(q: BlockScaled, byte_of_row: tuple[int, ...]) -> BlockScaled:
    """q with other scale bytes, one per row (per row of blocks for 2-D formats)."""
    scale = torch.tensor(byte_of_row, dtype=torch.uint8, device=q.device)[:, None].expand(q.scale.shape).contiguous()
    return replace(q, scale=scale.view(q.scale.dtype))


@pytest.mark.parametrize(("row", "device", "pair"), CPU_OR_REFERENCE)
def test_edge_scale_bytes(row, device, pair):
    """Codes of 1 under every pair of edge bytes: subnormal scales are not flushed, overflow is Inf, FF is NaN."""
    across = FORMATS[pair[0]].block[0]
    ones = with_scale_bytes(bs.quantize(torch.ones(7 * across, 40, device=device), pair[0]), EDGE_BYTES)
    one = bs.formats.encode(torch.ones(()), ones.spec.element).item()
    filler = one | one << 4 if ones.spec.codes_per_byte == 2 else one
    ones = replace(ones, data=torch.full_like(ones.data.view(torch.uint8), filler).view(ones.data.dtype))
    skip_refused(row, request(ones, ones, torch.float32))
    with only(row):
        every = bs.scaled_mm(ones, ones, torch.float32)
    product = every[::across, ::across]
    assert_same_bits(every, product.repeat_interleave(across, 0).repeat_interleave(across, 1))
    exponents = torch.tensor(EDGE_BYTES[:-1], dtype=torch.float64, device=device) - 127
    want = torch.full((7, 7), torch.nan, device=device)
    want[:6, :6] = (40 * torch.exp2(exponents[:, None] + exponents[None, :])).float()
    # 00 by 00 vanishes, FE by FE overflows, 00 by FE is 1
    assert want[0, 0] == 0
    assert want[5, 5] == torch.inf
    assert want[0, 5] == 40
    assert torch.equal(product.isnan(), want.isnan())
    assert torch.equal(product.nan_to_num(nan=-1), want.nan_to_num(nan=-1))
    assert torch.equal(exact_mm(ones, ones)[::across, ::across][:6, :6].float(), want[:6, :6])


@pytest.mark.parametrize("name", MX)
def test_scales_are_multiplied_before_the_codes(device, name):
    """448 * 2^127 overflows fp32 when it is decoded; promoted per block it is multiplied by 2^-127 and is finite."""
    largest = FORMATS[name].element.max_normal
    a = with_scale_bytes(bs.quantize(torch.full((1, 32), largest, device=device), name, scale_rule="floor"), (0xFE,))
    b = with_scale_bytes(bs.quantize(torch.full((1, 32), largest, device=device), name, scale_rule="floor"), (0x00,))
    assert bs.dequantize(a, torch.float32).isinf().all()
    with bs.use_backend(gemm="reference"):
        product = bs.scaled_mm(a, b, torch.float32)
    assert product.item() == 32 * largest**2


def test_partial_sums_of_a_block_are_exact(device):
    """448^2 - 448^2 + 2^-18 in one block: fp32 sums would lose the small term, the reference keeps it."""
    x, w = torch.zeros(1, 32, device=device), torch.zeros(1, 32, device=device)
    x[0, :3] = torch.tensor([448.0, 448.0, 2.0**-9])
    w[0, :3] = torch.tensor([448.0, -448.0, 2.0**-9])
    a, b = bs.quantize(x, "mxfp8_e4m3"), bs.quantize(w, "mxfp8_e4m3")
    with bs.use_backend(gemm="reference"):
        assert bs.scaled_mm(a, b, torch.float32).item() == 2.0**-18


def test_promotion_rounds_once_a_block_in_fp32(device):
    """2^24 + 1 from two blocks is 2^24 in fp32, and a third block that takes 2^24 away leaves 0, not 1."""
    x = torch.zeros(1, 96, device=device)
    w = torch.ones(1, 96, device=device)
    x[0, 0], x[0, 32], x[0, 64] = 2.0**24, 1.0, -(2.0**24)
    a, b = bs.quantize(x, "mxfp8_e4m3"), bs.quantize(w, "mxfp8_e4m3")
    assert exact_mm(a, b).item() == 1.0
    with bs.use_backend(gemm="reference"):
        assert bs.scaled_mm(a, b, torch.float32).item() == 0.0


def test_nvfp4_tensor_scales_are_applied_one_after_the_other(device):
    """Tensor scales of 1e-27 each: their product alone would be a zero in fp32, the result is not."""
    x, w = gaussian(8, 64, device=device).float() * 1e-24, gaussian(8, 64, device=device, seed=1).float() * 1e-15
    for backend in ("reference", "torch"):
        a, b = bs.quantize(x, "nvfp4"), bs.quantize(w, "nvfp4")
        scale = (a.global_scale.double() * b.global_scale.double()).item()
        assert scale < torch.finfo(torch.float32).tiny
        with bs.use_backend(gemm=backend):
            assert sqnr_db(exact_mm(a, b), bs.scaled_mm(a, b, torch.float32)).item() >= 80.0


# ---- NaN and Inf ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_a_bad_value_poisons_its_rows_and_nothing_else(row, device, pair, bad):
    m, n, k = 144, 64, 256
    x, w = gaussian(m, k, device=device, seed=1), gaussian(n, k, device=device, seed=2)
    spoiled = x.clone()
    spoiled[5, 200] = bad
    options: dict[str, Tensor] = {}
    if FORMATS[pair[0]].family == "nvfp4":  # with a finite tensor maximum given, only the block is lost
        options["amax"] = x.abs().max().float()
    a, clean = bs.quantize(spoiled, pair[0], **options), bs.quantize(x, pair[0], **options)
    b = bs.quantize(w, pair[1])
    skip_refused(row, request(a, b))
    across = FORMATS[pair[0]].block[0]
    poisoned = torch.arange(m, device=device) // across == 5 // across
    with only(row):
        got, want = bs.scaled_mm(a, b, torch.float32), bs.scaled_mm(clean, b, torch.float32)
    assert got[poisoned].isnan().all()
    assert torch.equal(got[~poisoned], want[~poisoned])
    assert torch.equal(exact_mm(a, b).isnan(), got.isnan())


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", [("nvfp4", "nvfp4"), ("nvfp4_16x16", "nvfp4")]))
def test_a_bad_value_poisons_an_nvfp4_tensor(row, device, pair):
    x = gaussian(32, 64, device=device)
    x[3, 3] = torch.inf
    a, b = bs.quantize(x, pair[0]), bs.quantize(gaussian(16, 64, device=device, seed=1), pair[1])
    skip_refused(row, request(a, b))
    with only(row):
        assert bs.scaled_mm(a, b).isnan().all()


# ---- 128x128 blocks of MX ------------------------------------------------------------------------------------------


def one_dimensional(q: BlockScaled) -> BlockScaled:
    """The same values as MXFP8 1x32: the byte of each 128x128 block repeated."""
    byte = q.plain_scale().view(torch.uint8).repeat_interleave(128, 0).repeat_interleave(4, 1)
    scale = byte[: q.rows, : -(-q.length // 32)].contiguous().view(q.scale.dtype)
    return replace(q, format="mxfp8_e4m3", scale=scale, scale_layout="plain")


WEIGHT = "mxfp8_e4m3_128x128"


@pytest.mark.parametrize(
    ("row", "device", "pair"), cases("gemm", [("mxfp8_e4m3", WEIGHT), (WEIGHT, "mxfp4"), (WEIGHT, WEIGHT)])
)
def test_128x128_product_equals_that_of_repeated_bytes(row, device, pair):
    """Bit for bit the product of the equivalent 1x32 operand, by every kernel that takes both."""
    spread = torch.exp2(torch.randint(-9, 9, (300, 1), generator=torch.Generator().manual_seed(3))).to(device)
    x, w = gaussian(300, 400, device=device, seed=1) * spread, gaussian(272, 400, device=device, seed=2)
    w[:, 128:] *= 16
    a, b = bs.quantize(x, pair[0]), bs.quantize(w, pair[1])
    plain = [one_dimensional(q) if q.format == WEIGHT else q for q in (a, b)]
    skip_refused(row, request(a, b))
    skip_refused(row, request(*plain))
    with only(row):
        for layout in ("plain", "blocked"):
            got = bs.scaled_mm(*(q.with_layout(layout) for q in (a, b)), torch.float32)
            assert_same_bits(got, bs.scaled_mm(*(q.with_layout(layout) for q in plain), torch.float32))
    assert torch.equal(exact_mm(a, b), exact_mm(*plain))


def test_blocked_scales_of_128x128_are_those_of_mxfp8(device):
    """So tensor cores for MXFP8 read them unchanged."""
    for n, k in ((1, 1), (130, 33), (272, 400), (128, 512), (300, 96)):
        w = gaussian(n, k, device=device) * torch.exp2(torch.arange(n, device=device) // 128 * 5.0)[:, None]
        q = bs.quantize(w, WEIGHT)
        plain = one_dimensional(q)
        assert_same_bits(bs.dequantize(q), bs.dequantize(plain))
        for blocked in (q.with_layout("blocked"), bs.quantize(w, WEIGHT, scale_layout="blocked")):
            assert_same_bits(blocked.scale, plain.with_layout("blocked").scale)


def test_fprop_and_dgrad_share_one_cast(device):
    """Both operands of a weight have the same codes and scales, so both products see the same weight."""
    w, dy = gaussian(300, 272, device=device), bs.quantize(gaussian(40, 300, device=device, seed=1), "mxfp8_e5m2")
    row, col = bs.quantize_both(w, WEIGHT, WEIGHT)
    assert_same_bits(row.data.contiguous(), col.data.contiguous())
    assert_same_bits(row.scale.contiguous(), col.scale.contiguous())
    want = bs.dequantize(dy, torch.float32).double() @ bs.dequantize(row, torch.float32).double()
    assert torch.equal(exact_mm(dy, col.mT), want)


# ---- repeatability -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm"))
def test_repeats_itself_and_leaves_its_operands_alone(row, device, pair):
    a, b = operands(pair, 132, 80, 528, device)
    skip_refused(row, request(a, b))
    before = [replace(q, data=q.data.clone(), scale=q.scale.clone()) for q in (a, b)]
    with only(row):
        first = bs.scaled_mm(a, b, torch.float32)
        again = bs.scaled_mm(a, b, torch.float32)
    assert torch.equal(first, again)
    assert_same_bits([a, b], before)


def test_every_format_has_a_product_with_its_partner(device):
    """The default choice, end to end, without naming a backend."""
    for name in FORMATS:
        a, b = operands((name, partner(name)), 9, 10, 70, device)
        assert sqnr_db(exact_mm(a, b), bs.scaled_mm(a, b, torch.float32)).item() >= 77.0


@pytest.mark.parametrize("form", [name for name, spec in FORMATS.items() if spec.family != "fp8"])
def test_operands_of_the_upcast_are_exact(form: str, device: torch.device) -> None:
    """The GPU kernel decodes like the reference; also rotated and transposed operands."""
    spec = FORMATS[form]
    x = gaussian(37, 150, device=device, seed=3) * torch.exp2(torch.randint(-20, 20, (37, 1), device=device))
    casts = [bs.quantize(x, form), bs.quantize(x, form, axis=-2).mT]
    if spec.hadamard and not spec.is_2d:
        casts.append(bs.quantize(x, form, hadamard=True))
    for operand in casts:
        assert_same_bits(exact_bf16(operand).float(), decode_blocks(operand))
