"""Weight-only GEMM: every registered kernel, format and dtype against the exact product, and what the contract says of
sums, bias, NaN, Inf and overflow."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import registry
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import FORMATS, BlockScaled, decode
from blockscale.formats.scales import e8m0_decode
from blockscale.formats.spec import LEGAL_PAIRS, PLAIN_DTYPES, WEIGHT_ONLY_PAIRS
from blockscale.gemm import exact_mm
from blockscale.gemm.weight_only import weight_only_request
from support.products import HYPOTHETICAL, accepts, assert_same_bits, cases, gaussian, only, skip_refused, step

# (M, N, K): no multiple of a block or of two, one row, one value, edge tiles of 128x128
SIZES = [(1, 1, 1), (7, 33, 130), (33, 7, 300), (1, 130, 257), (2, 576, 320)]
FEW = [("bf16", "mxfp4"), ("fp16", "nvfp4"), ("fp32", "mxfp8_e4m3_128x128"), ("bf16", "fp8_128x128")]


def operands(pair: tuple[str, str], m: int, n: int, k: int, device: torch.device) -> tuple[Tensor, BlockScaled]:
    # a third has more bits than bf16, so that a dtype that is rounded on the way shows
    x = (gaussian(m, k, device=device, seed=1).float() / 3).to(PLAIN_DTYPES[pair[0]])
    return x, bs.quantize(gaussian(n, k, device=device, seed=2), pair[1])


def request(x: Tensor, w: BlockScaled, dtype: torch.dtype = torch.float32, *, bias: bool = False):
    return weight_only_request(x, w, dtype, bias=bias)


def independent(x: Tensor, w: BlockScaled) -> Tensor:
    """x @ w.mT in fp64 from bytes: code by code and scale by scale, in loops over blocks."""
    codes = w.data.view(torch.uint8)
    if w.spec.codes_per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = decode(codes[:, : w.shape[1]], w.spec.element).double()
    scale = w.with_layout("plain").scale
    if w.spec.family == "mx":
        scale = e8m0_decode(scale.view(torch.uint8))
    across, along = w.spec.block
    for row in range(0, w.shape[0], across):
        for column in range(0, w.shape[1], along):
            values[row : row + across, column : column + along] *= scale[row // across, column // along].double()
    return x.double() @ values.mT * (1.0 if w.global_scale is None else w.global_scale.double())


def fp32_error(x: Tensor, w: BlockScaled) -> Tensor:
    """A priori error bound of fp32 sums of K terms whose factors were rounded once, one bit wider for adders that
    truncate."""
    magnitudes = exact_mm(x.abs(), replace(w, data=(w.data.view(torch.uint8) & sign_mask(w)).view(w.data.dtype)))
    return magnitudes * (w.length + 6) * 2.0**-23


def sign_mask(w: BlockScaled) -> int:
    """Mask of a byte of codes without signs."""
    return 0x77 if w.spec.codes_per_byte == 2 else (1 << (w.spec.element.bits - 1)) - 1


@pytest.mark.parametrize("name", FORMATS)
def test_the_exact_product_is_that_of_the_bytes(device, name):
    for plain in PLAIN_DTYPES:
        x, w = operands((plain, name), 5, 130, 300, device)
        assert sqnr_db(independent(x, w), exact_mm(x, w)).item() >= 290.0


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", WEIGHT_ONLY_PAIRS))
def test_against_the_exact_product(row, device, pair):
    ran = 0
    for m, n, k in SIZES:
        x, w = operands(pair, m, n, k, device)
        if not accepts(row, request(x, w)):
            continue
        ran += 1
        exact, bound = exact_mm(x, w), fp32_error(x, w)
        with only(row):
            product = bs.scaled_mm(x, w, torch.float32)
            halves = {dtype: bs.scaled_mm(x, w, dtype) for dtype in (torch.bfloat16, torch.float16)}
        assert (product.dtype, product.shape) == (torch.float32, (m, n))
        assert sqnr_db(exact, product).item() >= 120.0, (m, n, k)
        assert ((product - exact).abs() <= bound).all(), (m, n, k)
        for dtype, y in halves.items():
            assert y.dtype == dtype
            assert ((y.double() - exact).abs() <= step(exact, dtype) / 2 + bound).all(), (m, n, k, dtype)
    if not ran:
        pytest.skip("refuses every size")


@pytest.mark.parametrize("pair", WEIGHT_ONLY_PAIRS, ids="@".join)
def test_the_reference_sums_blocks_by_the_rule_of_the_contract(pair):
    """acc = fma(partial, scale, acc): bit for bit, in loops of our own."""
    x, w = operands(pair, 3, 5, 300, torch.device("cpu"))
    step_k, acc = w.spec.granule, torch.zeros(3, 5)
    one = replace(w, global_scale=None if w.global_scale is None else torch.ones(()))
    values = decode_one(one)
    for start in range(0, 300, step_k):
        for n in range(5):
            scale, codes = values[n][start // step_k]
            partial = (x[:, start : start + step_k].double() * codes.double()).sum(-1).float()
            acc[:, n] = (partial.double() * scale.double() + acc[:, n].double()).float()
    acc = acc if w.global_scale is None else acc * w.global_scale
    with bs.use_backend("reference"):
        assert_same_bits(bs.scaled_mm(x, w, torch.float32), acc)


def decode_one(w: BlockScaled) -> list[list[tuple[Tensor, Tensor]]]:
    """(scale, codes) of every granule of every row."""
    codes = w.data.view(torch.uint8)
    if w.spec.codes_per_byte == 2:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = decode(codes[:, : w.shape[1]], w.spec.element)
    scale = w.with_layout("plain").scale
    scale = e8m0_decode(scale.view(torch.uint8)) if w.spec.family == "mx" else scale.float()
    across, along = w.spec.block
    granule = w.spec.granule
    starts = range(0, w.shape[1], granule)
    return [
        [(scale[n // across, start // along], values[n, start : start + granule]) for start in starts]
        for n in range(w.shape[0])
    ]


def test_kernels_of_two_operands_and_of_one_never_meet():
    """On any device, whatever a kernel claims: a plain left operand goes to kernels for it, and no other."""
    both = {*LEGAL_PAIRS} & {*WEIGHT_ONLY_PAIRS}
    assert not both
    for op in ("gemm", "m_grouped", "k_grouped"):
        for row in registry.kernels(op):
            plain = {pair for pair in row.formats if pair[0] in PLAIN_DTYPES}
            if row.backend != "reference":  # which takes either
                assert row.formats
                assert not plain or plain == row.formats
    x, w = torch.ones(4, 64, device="meta"), bs.quantize(torch.ones(8, 64, device="meta"), "mxfp4")
    for where in HYPOTHETICAL.values():
        taken = bs.explain("gemm", x, w, on=where).taken
        assert taken.summary.startswith("weight decoded")


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
@pytest.mark.parametrize("size", [(0, 5, 64), (5, 0, 64), (5, 7, 0), (0, 0, 0)], ids=str)
def test_empty(row, device, pair, size):
    m, n, k = size
    x, w = operands(pair, m, n, k, device)
    skip_refused(row, request(x, w))
    bias = torch.arange(n, device=device, dtype=torch.float32)
    with only(row):
        assert_same_bits(bs.scaled_mm(x, w), torch.zeros(m, n, dtype=torch.bfloat16, device=device))
        assert torch.equal(bs.scaled_mm(x, w, torch.float32, bias=bias), bias.expand(m, n))


# ---- operands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_strides_and_scale_layouts_do_not_matter(row, device, pair):
    x, w = operands(pair, 12, 130, 300, device)
    skip_refused(row, request(x, w))
    wide = torch.full((12, 600), torch.nan, dtype=x.dtype, device=device)
    wide[:, ::2] = x
    with only(row):
        want = bs.scaled_mm(x, w, torch.float32)
        for layout in w.spec.layouts:
            assert_same_bits(bs.scaled_mm(x, w.with_layout(layout), torch.float32), want)
        for other in (wide[:, ::2], x.mT.contiguous().mT):
            assert not other.is_contiguous()
            assert sqnr_db(exact_mm(x, w), bs.scaled_mm(other, w, torch.float32)).item() >= 120.0
        row_of_all = x[:1].expand(12, 300)
        assert sqnr_db(exact_mm(row_of_all, w), bs.scaled_mm(row_of_all, w, torch.float32)).item() >= 120.0


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_a_weight_cast_along_rows_and_transposed(row, device, pair):
    x, source = gaussian(6, 160, device=device).to(PLAIN_DTYPES[pair[0]]), gaussian(160, 40, device=device, seed=1)
    w = bs.quantize(source, pair[1], axis=-2).mT
    assert w.shape == (40, 160)
    skip_refused(row, request(x, w))
    with only(row):
        want = bs.scaled_mm(x, bs.quantize(source.mT, pair[1]), torch.float32)
        assert_same_bits(bs.scaled_mm(x, w, torch.float32), want)


def test_x_is_never_rounded_to_the_precision_that_torch_allows(device):
    """fp32 rows keep their bits where the user allows TF32 and bf16 for fp32 products."""
    x, w = operands(("fp32", "fp8_1x128"), 40, 48, 256, device)
    matmul = (torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn).matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        seen = []
        original = torch.Tensor.__matmul__

        def spied(a: Tensor, b: Tensor) -> Tensor:
            seen.append(matmul.fp32_precision)
            return original(a, b)

        with pytest.MonkeyPatch.context() as patch, bs.use_backend(gemm="torch"):
            patch.setattr(torch.Tensor, "__matmul__", spied)
            product = bs.scaled_mm(x, w, torch.float32)
        assert seen == ["ieee"]
        assert matmul.fp32_precision == "tf32", "the user's setting is restored"
    finally:
        matmul.fp32_precision = before
    assert sqnr_db(exact_mm(x, w), product).item() >= 120.0


def test_threads_do_not_multiply_in_the_precision_that_another_restores():
    """A second product begins while a first one has changed the setting, and multiplies after it was restored."""
    x, w = operands(("fp32", "fp8_1x128"), 8, 48, 256, torch.device("cpu"))
    matmul, original = torch.backends.mkldnn.matmul, torch.Tensor.__matmul__
    before, seen, started = matmul.fp32_precision, [], []

    def spied(a: Tensor, b: Tensor) -> Tensor:
        if not started:
            started.append(threading.Thread(target=bs.scaled_mm, args=(x, w, torch.float32)))
            started[0].start()
            time.sleep(0.2)  # the other one comes to its product, or to the lock
        seen.append(matmul.fp32_precision)
        return original(a, b)

    matmul.fp32_precision = "tf32"
    try:
        with pytest.MonkeyPatch.context() as patch, bs.use_backend(gemm="torch"):
            patch.setattr(torch.Tensor, "__matmul__", spied)
            bs.scaled_mm(x, w, torch.float32)
            started[0].join()
    finally:
        matmul.fp32_precision = before
    assert seen == ["ieee", "ieee"]


def test_an_inherited_precision_stays_inherited():
    x, w = operands(("fp32", "fp8_1x128"), 8, 48, 256, torch.device("cpu"))
    everywhere, matmul = torch.backends.fp32_precision, torch.backends.mkldnn.matmul
    try:
        torch.backends.fp32_precision = "tf32"
        with bs.use_backend(gemm="torch"):
            bs.scaled_mm(x, w, torch.float32)
        torch.backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = everywhere


@pytest.mark.parametrize("pair", FEW, ids="@".join)
def test_compiled_calls_give_the_bytes_of_eager_ones(pair):
    x, w = operands(pair, 5, 48, 160, torch.device("cpu"))
    bias = gaussian(48)
    compiled = torch.compile(lambda x, w, bias: bs.scaled_mm(x, w, bias=bias), backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(x, w, bias), bs.scaled_mm(x, w, bias=bias))


# ---- epilogue ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_bias_belongs_to_columns_and_comes_before_the_only_rounding(row, device, pair):
    w = torch.zeros(32, 256, device=device)
    w[:, 0], w[:, 128] = 1.0, 1.5 * 2.0**-9
    x, w = torch.ones(4, 256, dtype=PLAIN_DTYPES[pair[0]], device=device), bs.quantize(w, pair[1])
    skip_refused(row, request(x, w, torch.bfloat16, bias=True))
    columns = gaussian(32, device=device, seed=3)
    with only(row):
        # rounded first, the sum would be bf16(1 + 2^-9) = 1
        assert (bs.scaled_mm(x, w) == 1.0).all()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            bias = torch.full((32,), 2.0**-9, dtype=dtype, device=device)
            assert (bs.scaled_mm(x, w, bias=bias) == 1.0 + 2.0**-7).all()
        product, biased = bs.scaled_mm(x, w, torch.float32), bs.scaled_mm(x, w, torch.float32, bias=columns)
    assert torch.equal(biased, product + columns.float())


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", [("fp32", "nvfp4"), ("bf16", "nvfp4_16x16")]))
def test_the_tensor_scale_multiplies_the_sum(row, device, pair):
    """A weight whose tensor scale would not survive in bf16 or fp16, nor beside the block scale in E4M3."""
    x = torch.ones(4, 64, dtype=PLAIN_DTYPES[pair[0]], device=device)
    w = bs.quantize(gaussian(16, 64, device=device).float() * 1e-30, pair[1])
    skip_refused(row, request(x, w))
    with only(row):
        assert sqnr_db(exact_mm(x, w), bs.scaled_mm(x, w, torch.float32)).item() >= 120.0


# ---- NaN and Inf ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", [("fp32", name) for name in FORMATS] + FEW[:1]))
def test_a_nan_scale_poisons_the_rows_of_its_block_and_nothing_else(row, device, pair):
    x, w = operands(pair, 3, 272, 300, device)
    skip_refused(row, request(x, w))
    plain = w.with_layout("plain")
    bad = plain.scale.clone()
    across = w.spec.block[0]
    (bad if bad.dtype == torch.float32 else bad.view(torch.uint8))[1, 1] = (
        torch.nan if bad.dtype == torch.float32 else 0xFF if w.spec.family == "mx" else 0x7F
    )
    with only(row):
        want = bs.scaled_mm(x, plain, torch.float32)
        got = bs.scaled_mm(x, replace(plain, scale=bad), torch.float32)
    poisoned = torch.arange(272, device=device) // across == 1
    assert got[:, poisoned].isnan().all()
    assert torch.equal(got[:, ~poisoned], want[:, ~poisoned])
    assert torch.equal(exact_mm(x, replace(plain, scale=bad)).isnan(), got.isnan())


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", FEW))
def test_nan_and_inf_in_rows_do_as_in_torch(row, device, pair):
    """Inf times a zero code is NaN, Inf of both signs makes NaN; other rows keep their bits."""
    x, w = operands(pair, 6, 40, 256, device)
    skip_refused(row, request(x, w))
    spoiled = x.clone()
    spoiled[1, 200], spoiled[2, 7], spoiled[3, 0], spoiled[3, 255] = torch.inf, torch.nan, torch.inf, -torch.inf
    with only(row):
        got, want = bs.scaled_mm(spoiled, w, torch.float32), bs.scaled_mm(x, w, torch.float32)
    values = bs.dequantize(w, torch.float32)
    as_torch = spoiled.float() @ values.mT
    assert torch.equal(got[:4].isnan(), as_torch[:4].isnan())
    assert torch.equal(got[1:4].nan_to_num(0, 1, -1), as_torch[1:4].nan_to_num(0, 1, -1))
    assert got[1].isinf().any()
    kept = [0, 4, 5]
    assert torch.equal(got[kept], want[kept])


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", [("fp32", "mxfp8_e4m3")]))
def test_edge_scale_bytes(row, device, pair):
    """Subnormal scales are not flushed; FE decodes to 2^127, FF to NaN."""
    if device.type == "cuda" and row.backend != "reference":
        pytest.skip("decodes on CUDA by another kernel, whose tests cover these bytes")
    w = bs.quantize(torch.ones(6, 32, device=device), pair[1])
    one = torch.full_like(w.data.view(torch.uint8), 0x38)  # codes of 1
    edge = torch.tensor([[0x00], [0x01], [0x7F], [0xFD], [0xFE], [0xFF]], dtype=torch.uint8, device=device)
    w = replace(w, data=one.view(w.data.dtype), scale=edge.view(w.scale.dtype))
    x = torch.zeros(1, 32, device=device)
    x[0, 3] = 0.5
    with only(row):
        got = bs.scaled_mm(x, w, torch.float32)
    want = torch.tensor([[2.0**-128, 2.0**-127, 0.5, 2.0**125, 2.0**126, torch.nan]], device=device)
    assert_same_bits(got.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))


# ---- repeatability -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "device", "pair"), cases("gemm", WEIGHT_ONLY_PAIRS))
def test_repeats_itself_and_leaves_its_operands_alone(row, device, pair):
    x, w = operands(pair, 33, 80, 272, device)
    skip_refused(row, request(x, w))
    before = x.clone(), replace(w, data=w.data.clone(), scale=w.scale.clone())
    with only(row):
        first, again = (bs.scaled_mm(x, w, torch.float32) for _ in range(2))
    assert torch.equal(first, again)
    assert_same_bits((x, w), before)
