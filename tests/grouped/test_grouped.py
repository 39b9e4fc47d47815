"""Grouped GEMMs: every registered kernel, every pair and every kind of group size, against GEMMs group by group."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import Stochastic, rng_state
from blockscale.diagnostics.quality import sqnr_db
from blockscale.errors import OptionError
from blockscale.formats import FORMATS, BlockScaled
from blockscale.formats.layout import padded_length
from blockscale.gemm import ACCUMULATOR_DTYPES
from blockscale.grouped._reference import exact_grouped
from blockscale.grouped.ops import grouped_request
from support.products import FEW, ONE_D, PAIRS, accepts, cases, gate_a, gaussian, offsets, only, skip_refused, step

# sizes of the groups, and rows that come after the last group
GROUPS: dict[str, tuple[list[int], int]] = {
    "empty first": ([0, 40, 24], 0),
    "empty last": ([40, 24, 0], 0),
    "empty middle": ([33, 0, 0, 31], 0),
    "all empty": ([0, 0, 0], 5),
    "one row": ([1, 1, 1], 0),
    "around a block": ([31, 32, 33], 0),
    "around the alignment": ([127, 129, 128, 1], 0),
    "one has everything": ([0, 70, 0], 0),
    "rows of no group": ([20, 11], 37),
    "one group": ([57], 0),
    "one group and a rest": ([57], 3),
    "many groups": ([i % 4 for i in range(24)], 2),
    "no rows": ([0, 0], 0),
}
K, N = 64, 24
M_PAIRS = [pair for pair in PAIRS if not FORMATS[pair[0]].is_2d]
K_PAIRS = [(a, b) for a, b in PAIRS if a in ONE_D and b in ONE_D]
M_FEW = [pair for pair in FEW if pair in M_PAIRS]
K_FEW = [pair for pair in FEW if pair in K_PAIRS]


def spans(sizes: list[int]) -> list[tuple[int, int]]:
    ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return list(itertools.pairwise(ends))


class MGrouped:
    """m-grouped GEMM of x [M, K] and w [G, N, K]; `values` is the product of the dequantized operands, in fp64."""

    def __init__(self, pair, sizes, rest, device, *, k=K, amax="tensor", **options):
        self.offs, self.sizes = offsets(sizes, device), sizes
        self.x = gaussian(sum(sizes) + rest, k, device=device, seed=1)
        self.w = gaussian(len(sizes), N, k, device=device, seed=2)
        grouped = {"amax": amax} if FORMATS[pair[0]].family == "nvfp4" else {}
        ends = {"offs": self.offs} if amax == "group" else {}
        self.a = bs.quantize(self.x, pair[0], **grouped, **ends, **options)
        self.b = bs.quantize(self.w, pair[1], **grouped, **options)

    def values(self) -> Tensor:
        ends = self.offs if self.a.global_scale is not None and self.a.global_scale.dim() else None
        x, w = bs.dequantize(self.a, torch.float32, offs=ends).double(), bs.dequantize(self.b, torch.float32).double()
        out = torch.zeros(x.shape[0], N, dtype=torch.float64, device=x.device)
        for group, (start, end) in enumerate(spans(self.sizes)):
            out[start:end] = x[start:end] @ w[group].mT
        return out


class KGrouped:
    """k-grouped GEMM: dy [M, N] and x [M, K], contracted over the tokens of each group, give [G, N, K]."""

    def __init__(self, pair, sizes, rest, device, *, k=K, amax="tensor", **options):
        self.offs, self.sizes = offsets(sizes, device), sizes
        self.dy = gaussian(sum(sizes) + rest, N, device=device, seed=1)
        self.x = gaussian(sum(sizes) + rest, k, device=device, seed=2)
        grouped = {"amax": amax} if FORMATS[pair[0]].family == "nvfp4" else {}
        self.a = bs.quantize(self.dy, pair[0], axis=-2, offs=self.offs, **grouped, **options).mT
        self.b = bs.quantize(self.x, pair[1], axis=-2, offs=self.offs, **grouped, **options).mT

    def values(self) -> Tensor:
        dy, x = (bs.dequantize(q.mT, torch.float32, offs=self.offs).double() for q in (self.a, self.b))
        parts = [dy[start:end].mT @ x[start:end] for start, end in spans(self.sizes)]
        return torch.stack(parts)


def request(problem: MGrouped | KGrouped, dtype: torch.dtype = torch.float32, *, bias=False, accumulate=False):
    return grouped_request(problem.a, problem.b, len(problem.sizes), dtype, bias=bias, accumulate=accumulate)


def dtype_of(kernel, problem: MGrouped | KGrouped) -> torch.dtype:
    """fp32 if the kernel supports it, else bf16; skips with the reason if it rejects both."""
    if accepts(kernel, request(problem)):
        return torch.float32
    skip_refused(kernel, request(problem, torch.bfloat16))
    return torch.bfloat16


def assert_close(got: Tensor, want: Tensor, gate: float) -> None:
    """SQNR against the exact product; if that is all zeros, the result must be, too."""
    assert got.shape == want.shape
    if want.count_nonzero() == 0:
        assert got.count_nonzero() == 0
        assert not got.isnan().any()
    else:
        assert sqnr_db(want, got).item() >= gate


def check(kernel, problem: MGrouped | KGrouped, pair, want: Tensor | None = None) -> None:
    """Compare one product, in every output dtype of the kernel, with the exact one rounded likewise."""
    dtype_of(kernel, problem)
    want = problem.values() if want is None else want
    results = {}
    with only(kernel):
        for dtype in (torch.float32, torch.bfloat16):
            if accepts(kernel, request(problem, dtype)):
                results[dtype] = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, dtype)
    assert all(got.dtype == dtype for dtype, got in results.items())
    got = results[torch.bfloat16]
    if torch.float32 in results:
        assert_close(results[torch.float32], want, gate_a(kernel, pair))
        # the backend's bf16 is its own fp32, rounded once
        assert torch.equal(got, results[torch.float32].bfloat16())
    else:
        slack = 2.0**-20 * want.abs().max() if want.numel() else 0.0
        assert ((got.double() - want).abs() <= step(want, torch.bfloat16) / 2 + slack).all()


# ---- every pair and every kind of group ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_PAIRS))
def test_m_grouped_pairs(kernel, device, pair):
    for name in ("empty middle", "rows of no group"):
        check(kernel, MGrouped(pair, *GROUPS[name], device), pair)


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("k_grouped", K_PAIRS))
def test_k_grouped_pairs(kernel, device, pair):
    for name in ("empty middle", "rows of no group"):
        check(kernel, KGrouped(pair, *GROUPS[name], device), pair)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW))
def test_m_grouped_sizes(kernel, device, pair, groups):
    check(kernel, MGrouped(pair, *GROUPS[groups], device), pair)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("kernel", "device", "pair"), cases("k_grouped", K_FEW))
def test_k_grouped_sizes(kernel, device, pair, groups):
    check(kernel, KGrouped(pair, *GROUPS[groups], device), pair)


@pytest.mark.parametrize("pair", M_PAIRS, ids="@".join)
@pytest.mark.parametrize("k", [1, 33, 130])
def test_m_grouped_with_odd_k(device, pair, k):
    """The registry has a kernel for every K; padding nibbles of FP4 do not enter the sums."""
    problem = MGrouped(pair, *GROUPS["empty middle"], device, k=k)
    got = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
    assert_close(got, problem.values(), 77.0 if device.type == "cuda" else 80.0)


@pytest.mark.parametrize("pair", K_FEW, ids="@".join)
def test_k_grouped_with_odd_features(device, pair):
    problem = KGrouped(pair, *GROUPS["around a block"], device, k=7)
    got = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
    assert_close(got, problem.values(), 77.0 if device.type == "cuda" else 80.0)


@pytest.mark.parametrize("amax", ["tensor", "group"])
@pytest.mark.parametrize("kind", [MGrouped, KGrouped])
def test_exact_grouped_is_the_product_of_the_values(device, kind, amax):
    pairs = M_FEW if kind is MGrouped else K_FEW
    for pair in pairs:
        problem = kind(pair, *GROUPS["rows of no group"], device, amax=amax)
        assert_close(exact_grouped(problem.a, problem.b, problem.offs), problem.values(), 130.0)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if FORMATS[pair[0]].is_2d], ids="@".join)
def test_two_dimensional_blocks_in_the_rows_are_refused(device, pair):
    """A 2-D block of rows may span two groups."""
    problem = MGrouped(pair, [20, 0, 130], 0, device)
    for backend in ("reference", "auto"):
        with bs.use_backend(m_grouped=backend), pytest.raises(OptionError, match="would span groups"):
            bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "nvfp4", "fp8_1x128"])
@pytest.mark.parametrize("amax", ["tensor", "group"])
def test_no_groups_at_all(device, name, amax):
    offs = torch.zeros(0, dtype=torch.int32, device=device)
    options = {"amax": amax} if name == "nvfp4" else {}
    x = bs.quantize(gaussian(5, K, device=device), name, offs=offs, **options)
    w = bs.quantize(torch.zeros(0, N, K, device=device), name, **options)
    assert torch.equal(bs.scaled_grouped_mm(x, w, offs), torch.zeros(5, N, dtype=torch.bfloat16, device=device))
    x_t = bs.quantize(gaussian(5, K, device=device), name, axis=-2, offs=offs, **options).mT
    assert bs.scaled_grouped_mm(x_t, x_t, offs).shape == (0, K, K)


# ---- bitwise equal to dense GEMMs ----------------------------------------------------------------------------------


def dense_amax(pair: tuple[str, str], *sources: Tensor) -> list[dict[str, Tensor]]:
    """amax of the whole tensor for NVFP4: its tensor scale is not that of the slice of one group."""
    if FORMATS[pair[0]].family != "nvfp4":
        return [{} for _ in sources]
    return [{"amax": source.float().abs().max()} for source in sources]


@pytest.mark.parametrize("pair", M_PAIRS, ids="@".join)
def test_m_grouped_reference_equals_dense_gemms(device, pair):
    sizes = [5, 0, 1, 31, 20]
    problem = MGrouped(pair, sizes, 4, device, k=144)
    x_options, w_options = dense_amax(pair, problem.x, problem.w)
    with bs.use_backend("reference"):
        got = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
        for group, (start, end) in enumerate(spans(sizes)):
            rows = bs.quantize(problem.x[start:end], pair[0], **x_options)
            matrix = bs.quantize(problem.w[group], pair[1], **w_options)
            assert torch.equal(got[start:end], bs.scaled_mm(rows, matrix, torch.float32))
    assert torch.equal(got[sum(sizes) :], torch.zeros(4, N, device=device))


@pytest.mark.parametrize("pair", K_PAIRS, ids="@".join)
def test_k_grouped_reference_equals_dense_gemms(device, pair):
    sizes = [5, 0, 127, 129, 1]
    problem = KGrouped(pair, sizes, 0, device)
    dy_options, x_options = dense_amax(pair, problem.dy, problem.x)
    with bs.use_backend("reference"):
        got = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
        for group, (start, end) in enumerate(spans(sizes)):
            dy = bs.quantize(problem.dy[start:end], pair[0], axis=-2, **dy_options).mT
            x = bs.quantize(problem.x[start:end], pair[1], axis=-2, **x_options).mT
            assert torch.equal(got[group], bs.scaled_mm(dy, x, torch.float32))


def test_k_grouped_groups_start_where_the_contract_says(device):
    """Section 9 of docs/numerics.md: groups of 0, 1, 31, 127 and 129 tokens start at 0, 0, 128, 256 and 384."""
    x = torch.ones(288, 8, device=device)
    q = bs.quantize(x, "mxfp8_e4m3", axis=-2, offs=offsets([0, 1, 31, 127, 129], device)).mT
    occupied = (q.data.view(torch.uint8)[0] != 0).nonzero().flatten().tolist()
    want = [start + i for start, size in ((0, 1), (128, 31), (256, 127), (384, 129)) for i in range(size)]
    assert occupied == want


def test_k_grouped_operands_have_a_static_length(device):
    """The buffer does not depend on the sizes, so nothing recompiles or syncs when routing changes."""
    for sizes in ([0, 1, 31, 127, 129], [288, 0, 0, 0, 0], [0, 0, 0, 0, 288]):
        problem = KGrouped(("mxfp8_e4m3", "mxfp8_e4m3"), sizes, 0, device)
        assert problem.a.length == padded_length(288, 5) == 1024


# ---- tensor scales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "device", "pair"), cases("m_grouped", [("nvfp4", "nvfp4"), ("nvfp4", "nvfp4_16x16")])
)
def test_m_grouped_tensor_scale_per_group(kernel, device, pair):
    for name in ("empty middle", "rows of no group", "one group"):
        sizes, rest = GROUPS[name]
        problem = MGrouped(pair, sizes, rest, device, amax="group")
        assert problem.a.global_scale.shape == problem.b.global_scale.shape == (len(sizes),)
        check(kernel, problem, pair)
        mixed = MGrouped(pair, sizes, rest, device)
        mixed.b = problem.b  # one scale for the tokens, one per expert for the weights
        check(kernel, mixed, pair)


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("k_grouped", [("nvfp4", "nvfp4")]))
def test_k_grouped_tensor_scale_per_group(kernel, device, pair):
    for name in ("empty middle", "rows of no group", "one group"):
        sizes, rest = GROUPS[name]
        problem = KGrouped(pair, sizes, rest, device, amax="group")
        assert problem.a.global_scale.shape == (len(sizes),)
        check(kernel, problem, pair)


def test_tensor_scale_per_group_keeps_small_groups(device):
    """A group 2^-20 below the rest is lost under one tensor scale and kept under its own."""
    found = {}
    for amax in ("tensor", "group"):
        offs = offsets([64, 64], device)
        x, w = gaussian(128, K, device=device, seed=1), gaussian(2, N, K, device=device, seed=2)
        x[64:] *= 2.0**-20
        a = bs.quantize(x, "nvfp4", amax=amax, offs=offs)
        y = bs.scaled_grouped_mm(a, bs.quantize(w, "nvfp4"), offs, torch.float32)
        found[amax] = sqnr_db(x[64:].double() @ w[1].double().mT, y[64:]).item()
    assert found["tensor"] == 0.0
    assert found["group"] > 15.0


# ---- epilogue ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW))
def test_bias(kernel, device, pair):
    sizes, rest = [3, 0, 20, 9], 4
    problem = MGrouped(pair, sizes, rest, device)
    skip_refused(kernel, request(problem, bias=True))
    bias = gaussian(4, N, device=device, seed=5)
    with only(kernel):
        plain = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
        got = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32, bias=bias)
        low = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, bias=bias.float())
    for group, (start, end) in enumerate(spans(sizes)):
        assert torch.equal(got[start:end], plain[start:end] + bias[group].float())
    assert got[sum(sizes) :].count_nonzero() == 0
    # one rounding, after the bias
    assert torch.equal(low, got.bfloat16())


@pytest.mark.parametrize("dtype", ACCUMULATOR_DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW) + cases("k_grouped", K_FEW))
def test_accumulate(kernel, device, pair, dtype):
    kind = MGrouped if kernel.op == "m_grouped" else KGrouped
    problem = kind(pair, [3, 0, 20, 9], 4, device)
    skip_refused(kernel, request(problem, dtype, accumulate=True))
    with only(kernel):
        product = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
        acc = gaussian(*product.shape, device=device, seed=5).to(dtype)
        once = (acc.float() + product).to(dtype)
        assert bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, accumulate=acc) is acc
        assert torch.equal(acc, once)
        bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, accumulate=acc)
    assert torch.equal(acc, (once.float() + product).to(dtype))


@pytest.mark.parametrize("kind", [MGrouped, KGrouped])
def test_accumulate_into_a_tensor_that_requires_grad_is_refused(kind):
    problem = kind(("mxfp8_e4m3", "mxfp8_e4m3"), [3, 0, 20, 9], 4, torch.device("cpu"))
    product = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
    acc = torch.ones_like(product, requires_grad=True)
    with pytest.raises(OptionError, match=r"accumulate requires grad.*Fix: pass accumulate\.detach\(\)"):
        bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, accumulate=acc)
    assert (acc == 1).all()
    with torch.no_grad():
        bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, accumulate=acc)
    assert torch.equal(acc, 1 + product)


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW) + cases("k_grouped", K_FEW))
def test_scale_layouts_do_not_matter(kernel, device, pair):
    kind = MGrouped if kernel.op == "m_grouped" else KGrouped
    problem = kind(pair, [3, 0, 20, 9], 4, device, k=160)
    dtype = dtype_of(kernel, problem)
    a, b, offs = problem.a, problem.b, problem.offs
    with only(kernel):
        want = bs.scaled_grouped_mm(a, b, offs, dtype)
        for first in a.spec.layouts:
            for second in b.spec.layouts:
                got = bs.scaled_grouped_mm(a.with_layout(first), b.with_layout(second), offs, dtype)
                assert torch.equal(got, want)


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW) + cases("k_grouped", K_FEW))
def test_results_are_reproducible(kernel, device, pair):
    kind = MGrouped if kernel.op == "m_grouped" else KGrouped
    problem = kind(pair, *GROUPS["around the alignment"], device)
    dtype = dtype_of(kernel, problem)
    with only(kernel):
        first = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, dtype)
        assert torch.equal(first, bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, dtype))


# ---- NaN stays in its group ----------------------------------------------------------------------------------------


def spoil(x: Tensor, row: int) -> Tensor:
    spoiled = x.clone()
    spoiled[row, 3] = torch.nan
    return spoiled


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW))
def test_m_grouped_nan_stays_in_its_row(kernel, device, pair):
    sizes = [3, 5, 20, 4]
    problem = MGrouped(pair, sizes, 0, device, amax="group")
    dtype = dtype_of(kernel, problem)
    family = FORMATS[pair[0]].family
    options = {"amax": "group", "offs": problem.offs} if family == "nvfp4" else {}
    a = bs.quantize(spoil(problem.x, 10), pair[0], **options)
    with only(kernel):
        want = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, dtype)
        got = bs.scaled_grouped_mm(a, problem.b, problem.offs, dtype)
    # a tensor scale per group poisons the group, a block scale the row
    lost = torch.zeros(sum(sizes), dtype=torch.bool, device=device)
    lost[slice(8, 28) if family == "nvfp4" else slice(10, 11)] = True
    assert got[lost].isnan().all()
    assert torch.equal(got[~lost], want[~lost])


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW))
def test_m_grouped_nan_in_one_matrix_stays_in_its_group(kernel, device, pair):
    sizes = [3, 5, 0, 4]
    problem = MGrouped(pair, sizes, 2, device, amax="group")
    dtype = dtype_of(kernel, problem)
    w = problem.w.clone()
    w[1, :, 3] = torch.nan
    w[2] = torch.nan  # the matrix of a group without rows
    options = {"amax": "group"} if FORMATS[pair[0]].family == "nvfp4" else {}
    with only(kernel):
        want = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, dtype)
        got = bs.scaled_grouped_mm(problem.a, bs.quantize(w, pair[1], **options), problem.offs, dtype)
    assert got[3:8].isnan().all()
    kept = [0, 1, 2, 8, 9, 10, 11, 12, 13]
    assert torch.equal(got[kept], want[kept])


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("k_grouped", K_FEW))
def test_k_grouped_nan_stays_in_its_group(kernel, device, pair):
    """Groups share no scale block, and padding separates them."""
    problem = KGrouped(pair, [3, 5, 0, 150, 4], 2, device, amax="group")
    dtype = dtype_of(kernel, problem)
    options = {"amax": "group"} if FORMATS[pair[0]].family == "nvfp4" else {}
    dy = spoil(spoil(problem.dy, 5), 163)  # a row of group 1, and one of no group
    a = bs.quantize(dy, pair[0], axis=-2, offs=problem.offs, **options).mT
    with only(kernel):
        want = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, dtype)
        got = bs.scaled_grouped_mm(a, problem.b, problem.offs, dtype)
    if options:
        assert got[1].isnan().all()
    else:
        assert got[1, 3].isnan().all()
        assert torch.equal(got[1, :3], want[1, :3])
    kept = [0, 2, 3, 4]
    assert torch.equal(got[kept], want[kept])


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", M_FEW) + cases("k_grouped", K_FEW))
def test_rows_of_no_group_do_not_affect_the_result(kernel, device, pair):
    """Rows after the last group may hold anything: they affect no result and no tensor scale."""
    kind, sizes, rest = (MGrouped if kernel.op == "m_grouped" else KGrouped), [20, 11], 37
    problem = kind(pair, sizes, rest, device)
    dtype = dtype_of(kernel, problem)
    source = (problem.x if kind is MGrouped else problem.dy).clone()
    with only(kernel):
        results = []
        for junk in (0.0, torch.nan, torch.inf, 1e30):
            source[31:] = junk
            axis = -1 if kind is MGrouped else -2
            q: BlockScaled = bs.quantize(source, pair[0], axis=axis, offs=problem.offs).operand
            results.append(bs.scaled_grouped_mm(q, problem.b, problem.offs, dtype))
    for result in results[1:]:
        assert torch.equal(result, results[0])
    if kind is MGrouped:
        assert results[0][31:].count_nonzero() == 0


# ---- Hadamard, stochastic rounding ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("k_grouped", [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")]))
def test_k_grouped_with_hadamard_and_stochastic_rounding(kernel, device, pair):
    """The wgrad of FP4 training: Hadamard transform of both operands, stochastic rounding of the gradient."""
    sizes = [70, 0, 300, 1]
    state = rng_state(3, tick=5, device=device)
    problem = KGrouped(pair, sizes, 0, device, hadamard=True)
    stochastic = {"rounding": Stochastic(state, "experts"), "role": "wgrad_dy", "hadamard": True}
    problem.a = bs.quantize(problem.dy, pair[0], axis=-2, offs=problem.offs, **stochastic).mT
    # dequantize cuts the transformed tail, which the GEMM contracts: compare with exact_grouped, not with `values`
    check(kernel, problem, pair, exact_grouped(problem.a, problem.b, problem.offs))
    dtype = dtype_of(kernel, problem)
    with only(kernel):
        got = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, dtype)
    true = torch.stack([problem.dy[s:e].double().mT @ problem.x[s:e].double() for s, e in spans(sizes)])
    # gate B of the wgrad products is 13.6 (mxfp4) and 15.0 (nvfp4) dB; groups this small scatter by a decibel
    assert sqnr_db(true[0], got[0]).item() >= 12.5
    assert sqnr_db(true[2], got[2]).item() >= 12.5
    assert got[1].count_nonzero() == 0


def test_stochastic_rounding_of_a_group_is_independent_of_its_position(device):
    """Experts on another rank: group 2 of three and the only group of a rank that starts at expert 2."""
    sizes = [40, 7, 90]
    dy = gaussian(137, N, device=device)
    rounding = {"rounding": Stochastic(rng_state(3, device=device), "experts"), "role": "wgrad_dy"}
    whole = bs.quantize(dy, "mxfp4", axis=-2, offs=offsets(sizes, device), **rounding).mT
    rounding["rounding"] = Stochastic(rng_state(3, device=device), "experts", first_group=2)
    shard = bs.quantize(dy[47:], "mxfp4", axis=-2, offs=offsets([90], device), **rounding).mT
    eye = bs.quantize(torch.ones(137, 8, device=device), "mxfp4", axis=-2, offs=offsets(sizes, device)).mT
    part = bs.quantize(torch.ones(90, 8, device=device), "mxfp4", axis=-2, offs=offsets([90], device)).mT
    with bs.use_backend("reference"):
        want = bs.scaled_grouped_mm(whole, eye, offsets(sizes, device), torch.float32)[2]
        got = bs.scaled_grouped_mm(shard, part, offsets([90], device), torch.float32)[0]
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_m_grouped_with_hadamard(device, name):
    problem = MGrouped((name, name), [20, 0, 31], 5, device, k=70, hadamard=True)
    got = bs.scaled_grouped_mm(problem.a, problem.b, problem.offs, torch.float32)
    assert_close(got, exact_grouped(problem.a, problem.b, problem.offs), 80.0)
    aligned = MGrouped((name, name), [20, 0, 31], 5, device, k=64, hadamard=True)
    got = bs.scaled_grouped_mm(aligned.a, aligned.b, aligned.offs, torch.float32)
    assert_close(got, aligned.values(), 80.0)
