"""Weight-only GEMM on a Hopper GPU: every format, tile and epilogue against the exact product, rows that do not depend
on the batch, dependent launch, nothing written outside the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.errors import BackendError
from blockscale.formats import BlockScaled
from blockscale.gemm import PackedWeight, exact_mm, heuristics_weights, pack_weight
from blockscale.gemm.heuristics_weights import BITS
from blockscale.gemm.packed import PACKABLE
from blockscale.hardware import sm_count
from support.products import check_frame, framed

_weights = pytest.importorskip("blockscale.gemm._hopper_weights", reason="this Triton has no Gluon for Hopper")
pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

ROWS = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 64)
# (N, K): whole tiles, one CTA for each; split tiles, some of them whole; half a block at the end; odd; small
SIZES = (
    (33792, 256),
    (4096, 4096),
    (7168, 2048),
    (576, 7168),
    (2880, 2880),
    (2111, 4095),
    (511, 129),
    (17, 15),
    (1, 1),
)
DB = {torch.float32: 80.0, torch.float16: 60.0, torch.bfloat16: 50.0}

every_format = pytest.mark.parametrize("name", BITS)
every_packed = pytest.mark.parametrize("name", PACKABLE)


def run(
    x: Tensor, w: PackedWeight | Tensor, dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None,
    out: Tensor | None = None, **changes: object,
) -> Tensor:  # fmt: skip
    """Up to 64 rows, into a buffer of NaN.  changes: of the tile."""
    n, k = w.shape
    name = w.format if isinstance(w, PackedWeight) else "bf16"
    if out is None:
        out = torch.full((x.shape[0], n), torch.nan, dtype=dtype, device="cuda")
    tile = heuristics_weights.tile_for(x.shape[0], name)._replace(**changes)
    cut = heuristics_weights.schedule(n, k, sm_count(out.device))
    _weights.launch(x, w, out, bias, cut=cut, tile=tile)
    return out


def weight(n: int, k: int, name: str) -> tuple[BlockScaled | Tensor, PackedWeight | Tensor]:
    """Rows of different sizes: the weight, and as the kernel takes it."""
    w = torch.randn(n, k, device="cuda") * torch.exp2(torch.randint(-6, 1, (n, 1), device="cuda").float())
    if name == "bf16":
        return w.bfloat16(), w.bfloat16()
    q = bs.quantize(w, name)
    return q, pack_weight(q)


def exact(x: Tensor, w: BlockScaled | Tensor) -> Tensor:
    return x.double() @ w.double().mT if isinstance(w, Tensor) else exact_mm(x, w)


def small_integers(n: int, k: int, name: str) -> tuple[BlockScaled | Tensor, PackedWeight | Tensor]:
    """Weights whose products with small integers have exact sums: a wrong place or scale changes the result."""
    values = torch.randint(-2, 3, (n, k), device="cuda").float()
    if name == "bf16":
        return values.bfloat16(), values.bfloat16()
    # the largest of each block is what the scale makes of it; of NVFP4 also of the tensor
    q = bs.quantize(values, name)
    scale = torch.randint(126, 129, q.scale.shape, device="cuda") if q.spec.family == "mx" else None
    if scale is None:
        scale = torch.tensor([0x30, 0x34, 0x38, 0x3C], device="cuda")[torch.randint(0, 4, q.scale.shape, device="cuda")]
        q = replace(q, global_scale=torch.tensor(0.5, device="cuda"))
    q = replace(q, scale=scale.to(torch.uint8).view(q.scale.dtype))
    if name == "mxfp8_e4m3":
        q = replace(q, data=values.to(torch.float8_e4m3fn))
    return q, pack_weight(q)


@every_format
@pytest.mark.parametrize("m", ROWS)
def test_exact_products_match_bit_for_bit(m: int, name: str) -> None:
    for n, k in SIZES:
        q, w = small_integers(n, k, name)
        x = torch.randint(-2, 3, (m, k), device="cuda").bfloat16()
        want, bias = exact(x, q), torch.randint(-8, 9, (n,), device="cuda").float()
        for given in (None, bias):
            shifted = want if given is None else want + given.double()
            got = run(x, w, torch.float32, given)
            wrong = got.double() != shifted
            assert not wrong.any(), (m, n, k, int(wrong.sum()), wrong.nonzero()[:8].tolist())
            assert torch.equal(run(x, w, torch.bfloat16, given), shifted.float().bfloat16()), (m, n, k)


@every_format
@pytest.mark.parametrize("m", ROWS)
def test_products_of_random_values(m: int, name: str) -> None:
    """Gate of exact upcasts, all outputs; twice, for the same bits; nothing written outside."""
    for n, k in SIZES:
        q, w = weight(n, k, name)
        x, bias = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
        want = exact(x, q)
        for dtype, gate in DB.items():
            for given in (None, bias):
                frame, out = framed(m, n, dtype)
                run(x, w, dtype, given, out)
                exactly = want if given is None else want + given.double()
                slack = 6 if m * n < 10_000 else 0  # of so few values, chance may pick bad ones
                assert sqnr_db(exactly, out) > gate - slack, (m, n, k, dtype)
                assert torch.equal(out, run(x, w, dtype, given)), (m, n, k, dtype)
                check_frame(frame, m, n)


# ---- batch invariance ------------------------------------------------------------------------------------------------


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of zeros with a sign."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@every_format
def test_a_row_does_not_depend_on_the_batch(name: str) -> None:
    """The row alone equals the row in every batch and at every place, bitwise, in fp32."""
    for n, k in ((4096, 4096), (576, 7168), (33792, 256), (2880, 2880), (2111, 4095), (1, 1)):
        _, w = weight(n, k, name)
        x = torch.randn(64, k, device="cuda").bfloat16()
        alone = torch.cat([run(x[row : row + 1].contiguous(), w, torch.float32) for row in range(64)])
        for m in ROWS:
            for first in sorted({0, (64 - m) // 2, 64 - m}):
                got = run(x[first : first + m].contiguous(), w, torch.float32)
                assert same_bits(got, alone[first : first + m]), (n, k, m, first)
        order = torch.randperm(64, device="cuda")
        assert same_bits(run(x[order], w, torch.float32), alone[order])


@every_format
def test_a_row_does_not_depend_on_the_tile(name: str) -> None:
    """Also wider tiles for one row, other stages, and launches that do not overlap."""
    for n, k in ((4096, 4096), (576, 7168)):
        _, w = weight(n, k, name)
        x = torch.randn(1, k, device="cuda").bfloat16()
        want = run(x, w, torch.float32)
        for changes in (
            {"pdl": False}, {"stages": 2}, {"stages": 3}, {"bn": 16, "stages": 3}, {"bn": 32, "stages": 3},
            {"bn": 64, "stages": 2},
        ):  # fmt: skip
            assert same_bits(run(x, w, torch.float32, **changes), want), (n, k, changes)
        if name in ("mxfp4", "nvfp4"):
            assert same_bits(run(x, w, torch.float32, chunks=2), want)


# ---- edges of scales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "least", "most"), [("mxfp4", 0, 128), ("mxfp8_e4m3", 3, 134), ("mxfp4", 24, 150)])
def test_every_scale_byte(name: str, least: int, most: int) -> None:
    """One value per row, so that nothing is added: subnormal weights and the greatest ones, decoded exactly. x lifts
    the products of the former out of the subnormal numbers of fp32."""
    n, k = 256, 4096
    q = bs.quantize(torch.zeros(n, k, device="cuda"), name)
    codes = torch.arange(n, device="cuda") % (16 if name == "mxfp4" else 256)
    codes[(codes & 0x7F) == 0x7F] = 1
    scale = (least + torch.arange(k // 32, device="cuda") % (most - least + 1)).expand(n, -1)
    data = (codes * 0x11 if name == "mxfp4" else codes)[:, None].expand(n, q.data.shape[1]).contiguous()
    q = replace(q, data=data.to(torch.uint8).view(q.data.dtype), scale=scale.to(torch.uint8).view(q.scale.dtype))
    w = pack_weight(q)
    for block in range(k // 32):
        x = torch.zeros(1, k, device="cuda").bfloat16()
        x[0, 32 * block + 5] = 2.0**40
        values = exact_mm(x, q)
        assert torch.equal(run(x, w, torch.float32), values.float()), block


def test_tensor_scales() -> None:
    q = bs.quantize(torch.randn(300, 320, device="cuda"), "nvfp4")
    x = torch.randn(5, 320, device="cuda").bfloat16()
    for factor in (2.0**-60, 1.0, 0.3, 2.0**40):
        scaled = replace(q, global_scale=torch.tensor(factor, device="cuda"))
        assert sqnr_db(exact_mm(x, scaled), run(x, pack_weight(scaled), torch.float32)) > DB[torch.float32] - 6


# ---- launches --------------------------------------------------------------------------------------------------------


def chained(x: Tensor, layers: list[PackedWeight], **changes: object) -> Iterator[Tensor]:
    """Each product reads what the one before it wrote, with no other kernel between them."""
    outs = [torch.empty(x.shape[0], w.rows, dtype=torch.bfloat16, device="cuda") for w in layers]
    for w, out in zip(layers, outs, strict=True):
        x = run(x, w, out=out, **changes)
        yield x


@every_packed
@pytest.mark.parametrize("m", [1, 16, 64])
def test_dependent_launches_wait_for_their_input(m: int, name: str) -> None:
    """A chain of products in a graph, replayed: the bits of launches one by one."""
    layers = []
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (576, 4096), (4096, 576)):
        q = bs.quantize(torch.randn(n, k, device="cuda") / k**0.5, name)
        layers.append(pack_weight(q))
    static = torch.randn(m, 4096, device="cuda").bfloat16()
    torch.cuda.synchronize()
    for _ in chained(static, layers):  # compiles
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = list(chained(static.mul(1), layers))
    for _ in range(50):
        static.copy_(torch.randn_like(static))
        graph.replay()
        want = []
        for y in chained(static.mul(1), layers, pdl=False):
            torch.cuda.synchronize()
            want.append(y)
        for got, y in zip(found, want, strict=True):
            assert torch.equal(got, y)


@every_packed
def test_many_launches_leave_the_counters_at_zero(name: str) -> None:
    """Launches back to back, of two numbers of tokens in turn, whose partials lie differently."""
    _, w = weight(576, 7168, name)
    x = torch.randn(64, 7168, device="cuda").bfloat16()
    wants = [run(rows, w) for rows in (x, x[:1])]
    outs = [torch.empty_like(want) for want in wants]
    for _ in range(1000):
        for rows, out in zip((x, x[:1]), outs, strict=True):
            run(rows, w, out=out)
    for want, out in zip(wants, outs, strict=True):
        assert torch.equal(out, want)


@every_packed
def test_forced_backend(name: str) -> None:
    """Through the operator, more rows than a tile has, and rows of x that TMA cannot address."""
    for m, n, k in ((1, 4096, 4096), (130, 2111, 2880), (256, 576, 7168), (7, 17, 33)):
        q, w = weight(n, k, name)
        x, bias = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, device="cuda")
        with bs.use_backend(gemm="hopper_weights"):
            for dtype, gate in DB.items():
                got = bs.scaled_mm(x, w, dtype, bias=bias)
                slack = 6 if m * n < 10_000 else 0
                assert sqnr_db(exact(x, q) + bias.double(), got) > gate - slack, (m, n, k, dtype)
            one = bs.scaled_mm(x[m - 1 :], w, torch.float32)
            assert same_bits(bs.scaled_mm(x, w, torch.float32)[m - 1 :], one)
            shared = bs.scaled_mm(x[m - 1 :].expand(8, k), w, torch.float32)  # rows that share memory
            assert same_bits(shared, one.expand(8, n))


def test_refusals() -> None:
    q, w = weight(256, 256, "mxfp4")
    x = torch.randn(300, 256, device="cuda")
    with bs.use_backend(gemm="hopper_weights"):
        for given, operand in ((x.half(), w), (x[:2], w), (x.bfloat16(), w), (x[:2].bfloat16(), q)):
            with pytest.raises(BackendError):
                bs.scaled_mm(given, operand)


def test_not_selected_unless_forced() -> None:
    """Until it has been timed."""
    _, w = weight(256, 256, "mxfp4")
    q = w.unpack()
    x = torch.randn(2, 256, device="cuda").bfloat16()
    assert torch.equal(bs.scaled_mm(x, w), bs.scaled_mm(x, q))
