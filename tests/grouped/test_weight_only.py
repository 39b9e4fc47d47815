"""Weight-only grouped GEMM: every registered kernel, format and dtype against dense products group by group."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import FORMATS, BlockScaled
from blockscale.formats.spec import PLAIN_DTYPES, WEIGHT_ONLY_PAIRS
from blockscale.gemm import exact_mm
from blockscale.grouped._reference import exact_grouped
from blockscale.grouped.weight_only import weight_only_grouped_request
from support.products import accepts, assert_same_bits, cases, gaussian, offsets, only, skip_refused, step

FEW = [("bf16", "mxfp4"), ("fp16", "nvfp4"), ("fp32", "mxfp8_e4m3_128x128"), ("bf16", "fp8_128x128")]
# sizes of the groups, and rows that come after the last group
GROUPS: dict[str, tuple[list[int], int]] = {
    "empty middle": ([33, 0, 0, 31], 0),
    "empty first and last": ([0, 40, 24, 0], 0),
    "all empty": ([0, 0, 0], 5),
    "one row each, and a rest": ([1, 1, 1], 37),
    "no rows": ([0, 0], 0),
    "no groups": ([], 3),
}
N, K = 24, 72


class Problem:
    """Rows, a weight for each group and the offsets."""

    def __init__(
        self, pair: tuple[str, str], sizes: list[int], rest: int, device: torch.device, n: int = N, k: int = K
    ) -> None:
        self.sizes, self.offs = sizes, offsets(sizes, device)
        x = gaussian(sum(sizes) + rest, k, device=device, seed=1).float() / 3
        self.x = x.to(PLAIN_DTYPES[pair[0]])
        self.source = gaussian(len(sizes), n, k, device=device, seed=2)
        amax = {"amax": "group"} if FORMATS[pair[1]].family == "nvfp4" else {}
        self.w = bs.quantize(self.source, pair[1], **amax)

    def request(self, dtype: torch.dtype = torch.float32, **options: bool):
        flags = {"bias": False, **options}
        return weight_only_grouped_request(self.x, self.w, len(self.sizes), dtype, **flags)

    def weight(self, group: int) -> BlockScaled:
        """Weight of a group, cast alone: each expert has its own tensor scale."""
        return bs.quantize(self.source[group], self.w.format)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The same by dense products."""
        ends = [0, *self.offs.tolist()]
        parts = [
            bs.scaled_mm(self.x[start:end], self.weight(group), dtype)
            for group, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        rest = torch.zeros(self.x.shape[0] - ends[-1], self.w.rows, dtype=dtype, device=self.x.device)
        return torch.cat((*parts, rest))


def dtype_of(kernel, problem: Problem, **options: bool) -> torch.dtype:
    """fp32 if the kernel supports it, else bf16; skips with the reason if it rejects both."""
    if accepts(kernel, problem.request(**options)):
        return torch.float32
    skip_refused(kernel, problem.request(torch.bfloat16, **options))
    return torch.bfloat16


def check(got: Tensor, exact: Tensor) -> None:
    """An fp32 result within fp32's sums of the exact product, a bf16 one within its rounding of it; zeros are zeros."""
    assert got.shape == exact.shape
    assert not got.isnan().any()
    zero = exact.abs().sum(-1) == 0
    assert got[zero].count_nonzero() == 0
    if zero.all():
        return
    if got.dtype == torch.float32:
        assert sqnr_db(exact, got).item() >= 120.0
    else:
        slack = 2.0**-18 * exact.abs().max()
        assert ((got.double() - exact).abs() <= step(exact, got.dtype) / 2 + slack).all()


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", WEIGHT_ONLY_PAIRS))
def test_every_pair(kernel, device, pair):
    for name in ("empty middle", "one row each, and a rest"):
        problem = Problem(pair, *GROUPS[name], device, k=301)
        dtype = dtype_of(kernel, problem)
        exact = exact_grouped(problem.x, problem.w, problem.offs)
        with only(kernel):
            check(bs.scaled_grouped_mm(problem.x, problem.w, problem.offs, dtype), exact)
            if dtype == torch.float32:
                check(bs.scaled_grouped_mm(problem.x, problem.w, problem.offs), exact)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", FEW))
def test_group_sizes_and_bits_of_dense_products(kernel, device, pair, groups):
    problem = Problem(pair, *GROUPS[groups], device)
    skip_refused(kernel, problem.request())
    with only(kernel):
        got = bs.scaled_grouped_mm(problem.x, problem.w, problem.offs, torch.float32)
    with bs.use_backend(gemm=kernel.backend):
        want = problem.dense(torch.float32)
    assert_same_bits(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_exact_grouped_is_the_exact_dense_product(device, name):
    problem = Problem(("fp32", name), [3, 0, 9], 2, device, n=130, k=257)
    exact = exact_grouped(problem.x, problem.w, problem.offs)
    for group, (start, end) in enumerate(((0, 3), (3, 3), (3, 12))):
        assert torch.equal(exact[start:end], exact_mm(problem.x[start:end], problem.weight(group)))
    assert exact[12:].count_nonzero() == 0


def test_one_tensor_scale_for_all_experts(device):
    x, w = gaussian(6, 64, device=device), bs.quantize(gaussian(2, 16, 64, device=device, seed=1), "nvfp4")
    assert w.global_scale.dim() == 0
    offs = offsets([2, 4], device)
    assert sqnr_db(exact_grouped(x, w, offs), bs.scaled_grouped_mm(x, w, offs, torch.float32)).item() >= 120.0


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", FEW))
def test_bias_belongs_to_the_experts(kernel, device, pair):
    sizes, rest = [3, 0, 20, 9], 4
    problem = Problem(pair, sizes, rest, device)
    skip_refused(kernel, problem.request(bias=True))
    bias = gaussian(4, N, device=device, seed=5)
    with only(kernel):
        plain = bs.scaled_grouped_mm(problem.x, problem.w, problem.offs, torch.float32)
        got = bs.scaled_grouped_mm(problem.x, problem.w, problem.offs, torch.float32, bias=bias)
        low = bs.scaled_grouped_mm(problem.x, problem.w, problem.offs, bias=bias)
    for group, (start, end) in enumerate(((0, 3), (3, 3), (3, 23), (23, 32))):
        assert torch.equal(got[start:end], plain[start:end] + bias[group].float())
    assert got[32:].count_nonzero() == 0
    assert torch.equal(low, got.bfloat16())


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", FEW))
def test_groups_that_start_anywhere(kernel, device, pair):
    """With starts, group g is rows starts[g] to offs[g]; what lies between them is not read."""
    problem = Problem(pair, [5, 0, 9, 2], 0, device)
    skip_refused(kernel, problem.request(starts=True))
    starts = torch.tensor([0, 8, 8, 20], dtype=torch.int32, device=device)
    counts = torch.tensor(problem.sizes, dtype=torch.int32, device=device)
    spread = torch.full((32, K), torch.nan, device=device).to(problem.x.dtype)
    taken = torch.cat([torch.arange(s, s + c) for s, c in zip(starts.tolist(), problem.sizes, strict=True)]).to(device)
    spread[taken] = problem.x
    with only(kernel):
        want = bs.scaled_grouped_mm(problem.x, problem.w, problem.offs, torch.float32)
        got = bs.scaled_grouped_mm(spread, problem.w, starts + counts, torch.float32, starts=starts)
    assert torch.equal(got[taken], want)


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", FEW))
def test_rows_of_no_group_and_strides_do_not_matter(kernel, device, pair):
    problem = Problem(pair, [20, 11], 9, device)
    dtype = dtype_of(kernel, problem)
    wide = torch.zeros(40, 2 * K, dtype=problem.x.dtype, device=device)
    wide[:, ::2] = problem.x
    with only(kernel):
        want = bs.scaled_grouped_mm(problem.x, problem.w, problem.offs, dtype)
        for layout in problem.w.spec.layouts:
            w = problem.w.with_layout(layout)
            assert_same_bits(bs.scaled_grouped_mm(problem.x, w, problem.offs, dtype), want)
        wide[31:] = torch.nan
        got = bs.scaled_grouped_mm(wide[:, ::2], problem.w, problem.offs, dtype)
    check(got, exact_grouped(problem.x, problem.w, problem.offs) * (torch.arange(40, device=device) < 31)[:, None])


@pytest.mark.parametrize(("kernel", "device", "pair"), cases("m_grouped", FEW[:1] + FEW[3:]))
def test_a_nan_scale_poisons_a_column_of_its_expert(kernel, device, pair):
    problem = Problem(pair, [5, 0, 8], 0, device, n=272)
    dtype = dtype_of(kernel, problem)
    plain = problem.w.with_layout("plain")
    bad = plain.scale.clone()
    across = plain.spec.block[0]
    if bad.dtype == torch.float32:
        bad[2, 1, 0] = torch.nan
    else:
        bad.view(torch.uint8)[2, 1, 0] = 0xFF
    with only(kernel):
        want = bs.scaled_grouped_mm(problem.x, plain, problem.offs, dtype)
        got = bs.scaled_grouped_mm(problem.x, replace(plain, scale=bad), problem.offs, dtype)
    assert got[5:, across : 2 * across].isnan().all()
    got[5:, across : 2 * across] = want[5:, across : 2 * across]
    assert torch.equal(got, want)


@pytest.mark.parametrize("pair", FEW[:2], ids="@".join)
def test_compiled_calls_give_the_bytes_of_eager_ones(pair):
    problem = Problem(pair, [5, 0, 8], 2, torch.device("cpu"))
    compiled = torch.compile(bs.scaled_grouped_mm, backend="aot_eager", fullgraph=True)
    arguments = problem.x, problem.w, problem.offs
    assert_same_bits(compiled(*arguments), bs.scaled_grouped_mm(*arguments))


def test_experts_without_rows_are_not_decoded(monkeypatch):
    """On a CPU a token reads the weights of its experts alone."""
    from blockscale.gemm import _torch

    problem, seen = Problem(("bf16", "mxfp4"), [0, 2, 0, 3, 0], 0, torch.device("cpu")), []
    decode = _torch.decode_blocks
    monkeypatch.setattr(_torch, "decode_blocks", lambda w: seen.append(w) or decode(w))
    bs.scaled_grouped_mm(problem.x, problem.w, problem.offs)
    assert len(seen) == 2
