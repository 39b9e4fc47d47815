"""m-grouped GEMMs with starts, as in decoding: every registered kernel, bitwise against packed rows, no writes between
groups. On a GPU also every Hopper tile, CUDA graphs and invalid starts.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.errors import BackendError
from blockscale.formats import BlockScaled
from blockscale.formats.layout import check_group_ends
from blockscale.gemm.heuristics import Tile
from blockscale.grouped import heuristics
from blockscale.grouped._reference import exact_grouped
from blockscale.grouped.ops import Inputs, grouped_request
from blockscale.registry import Kernel, Request
from support.grouped_kernels import CAPACITIES, Room, room, twice
from support.products import FEW, HYPOTHETICAL, SENTINEL, cases, gaussian, only, raw, skip_refused

M_FEW = [pair for pair in FEW if not bs.formats.FORMATS[pair[0]].is_2d]
K, N = 144, 48
STARTS = frozenset({"starts"})
# torch's product takes packed rows alone
PLACED = [case for case in cases("m_grouped", M_FEW) if case.values[0].backend != "torch"]


def cast(x: Tensor, pair: tuple[str, str], amax: Tensor) -> BlockScaled:
    """Quantize.  amax: for NVFP4, so that placed and packed rows have the same tensor scale."""
    return bs.quantize(x, pair[0], **({"amax": amax} if pair[0] == "nvfp4" else {}))


def experts(made: Room, pair: tuple[str, str], n: int = N) -> BlockScaled:
    shape = (made.counts.shape[0], n, made.placed.shape[1])
    return bs.quantize(gaussian(*shape, device=made.placed.device, seed=3), pair[1])


def written(out: Tensor) -> Tensor:
    """Mask of the rows a kernel wrote: outputs are allocated as bytes FF."""
    return (out.contiguous().view(torch.uint8) != 0xFF).any(1)


def check_placed(kernel: Kernel, device: torch.device, pair: tuple[str, str], name: str, dtype: torch.dtype) -> None:
    made = room(*CAPACITIES[name], K, device)
    amax = made.placed.float().abs().max()
    a, packed, b = cast(made.placed, pair, amax), cast(made.packed, pair, amax), experts(made, pair)
    skip_refused(kernel, grouped_request(a, b, len(made.counts), dtype, bias=True, accumulate=True, starts=True))
    bias, inside = gaussian(len(made.counts), N, device=device), made.inside
    taken = int(inside.sum())
    with only(kernel):
        got = bs.scaled_grouped_mm(a, b, made.ends, dtype, bias=bias, starts=made.starts)
        want = bs.scaled_grouped_mm(packed, b, made.packed_ends, dtype, bias=bias)[:taken]
        assert torch.equal(raw(got[inside]), raw(want))
        assert not written(got[~inside]).any()
        total = torch.full_like(got, 100.0)
        bs.scaled_grouped_mm(a, b, made.ends, accumulate=total, starts=made.starts)
        alone = bs.scaled_grouped_mm(a, b, made.ends, torch.float32, starts=made.starts)
        assert torch.equal(total[inside], (100.0 + alone[inside]).to(dtype))
        assert bool((total[~inside] == 100.0).all())


@pytest.mark.parametrize("name", CAPACITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("kernel", "device", "pair"), PLACED)
def test_placed_rows_equal_packed_rows(kernel, device, pair, dtype, name):
    check_placed(kernel, device, pair, name, dtype)


@pytest.mark.parametrize(("kernel", "device", "pair"), PLACED)
def test_rows_between_groups_do_not_affect_the_result(kernel, device, pair):
    """They may hold NaN, infinity or values far out of the range of a block."""
    counts, capacity = CAPACITIES["a row less than full"]
    made = room(counts, capacity, K, device)
    b, amax = experts(made, pair), made.placed.float().abs().max()
    skip_refused(
        kernel,
        grouped_request(cast(made.placed, pair, amax), b, 3, torch.bfloat16, bias=False, accumulate=False, starts=True),
    )
    results = []
    with only(kernel):
        for junk in (0.0, torch.nan, torch.inf, 1e30):
            x = torch.where(made.inside[:, None], made.placed, junk)
            y = bs.scaled_grouped_mm(cast(x, pair, amax), b, made.ends, starts=made.starts)
            results.append(raw(y[made.inside]))
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("pair", [("mxfp8_e4m3", "mxfp8_e4m3"), ("fp8_1x128", "fp8_128x128")], ids="@".join)
def test_contiguous_starts_equal_no_starts(device, pair):
    """Except for rows after all groups, which are zero without starts."""
    offs = torch.tensor([5, 5, 40, 41], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5, 5, 40], dtype=torch.int32, device=device)
    a, b = bs.quantize(gaussian(50, K, device=device), pair[0]), bs.quantize(gaussian(4, N, K, device=device), pair[1])
    with bs.use_backend(m_grouped="reference"):
        got, want = bs.scaled_grouped_mm(a, b, offs, starts=starts), bs.scaled_grouped_mm(a, b, offs)
    assert torch.equal(got[:41], want[:41])
    assert not written(got[41:]).any()
    assert want[41:].count_nonzero() == 0


def test_no_experts_and_no_rows(device):
    none = torch.zeros(0, dtype=torch.int32, device=device)
    a = bs.quantize(gaussian(5, K, device=device), "mxfp8_e4m3")
    b = bs.quantize(torch.zeros(0, N, K, device=device), "mxfp8_e4m3")
    assert not written(bs.scaled_grouped_mm(a, b, none, starts=none)).any()
    made = room([0, 0], 1, K, device)
    a = bs.quantize(made.placed[:0], "mxfp8_e4m3")
    assert bs.scaled_grouped_mm(a, experts(made, ("", "mxfp8_e4m3")), made.counts, starts=made.counts).shape == (0, N)


# ---- the registry --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_no_decoding_on_a_gpu_uses_the_reference(where: str) -> None:
    """The reference reads starts and offsets on the host, and cannot be captured."""
    for pair in M_FEW:
        asked = Request("m_grouped", HYPOTHETICAL[where], pair, (4096, 4096, 7168, 32), torch.bfloat16, (), STARTS)
        taken = bs.registry.select(asked).backend
        hopper = where == "sm_90" and pair in {("fp8_1x128", "fp8_128x128"), ("mxfp8_e4m3", "mxfp8_e4m3_128x128")}
        assert taken == ("hopper" if hopper else "triton")


def test_torch_rejects_starts() -> None:
    made = room(*CAPACITIES["full"], K)
    a, b = bs.quantize(made.placed, "mxfp8_e4m3"), experts(made, ("", "mxfp8_e4m3"))
    with bs.use_backend(m_grouped="torch"), pytest.raises(BackendError, match="contiguous groups"):
        bs.scaled_grouped_mm(a, b, made.ends, starts=made.starts)
    explained = bs.explain("grouped", a, b, made.ends, starts=made.starts)
    assert (explained.taken.backend, "with starts" in str(explained)) == ("reference", True)


def _gpu_kernels() -> list:
    """Every kernel that takes starts on a GPU, with a pair and an architecture for it."""
    pairs = [("fp8_1x128", "fp8_128x128"), ("mxfp8_e4m3", "mxfp8_e4m3_128x128"), ("mxfp8_e4m3", "mxfp8_e4m3")]
    found = []
    for kernel in bs.registry.kernels("m_grouped"):
        where = f"sm_{max(kernel.sm[0], 80)}"
        pair = next((pair for pair in pairs if pair in kernel.formats), None)
        if pair is None or "cuda" not in kernel.devices:
            continue
        asked = Request("m_grouped", HYPOTHETICAL[where], pair, (512, 64, 256, 4), torch.bfloat16, (), STARTS)
        if kernel.refusal(asked) is None:
            found.append(pytest.param(kernel, pair, int(where[3:]), id=f"{kernel.backend}.{kernel.launch.__name__}"))
    return found


@pytest.mark.parametrize(("kernel", "pair", "arch"), _gpu_kernels())
def test_launches_one_tile_list_and_one_gemm(kernel: Kernel, pair: tuple[str, str], arch: int) -> None:
    """Everything up to the launch runs; nothing is compiled."""
    launched = pytest.importorskip("aot.compiled", reason="needs triton").launched
    made = room([3, 0, 128, 1], 128, 256)
    a, b = (q.with_layout(kernel.layouts.get(q.format, q.scale_layout)) for q in (
        bs.quantize(made.placed, pair[0]), experts(made, pair, 64),
    ))  # fmt: skip
    out = torch.empty(512, 64, dtype=torch.bfloat16)
    names = launched(lambda: kernel.launch(Inputs(a, b, made.ends, made.starts), out, accumulate=False), arch)
    assert "_row_tiles_kernel" in names
    assert sum("grouped_mm" in name for name in names) == 1


# ---- Hopper's tiles --------------------------------------------------------------------------------------------------

_TILES = [("fp8_1x128", "fp8_128x128", tile) for tile in heuristics.FP8.tiles]
_TILES += [("mxfp8_e4m3", "mxfp8_e4m3_128x128", tile) for tile in heuristics.MX.tiles]
_TILES += [("nvfp4", "nvfp4", tile) for tile in heuristics.UPCAST.tiles]
MODELS = {"_hopper": heuristics.FP8, "_hopper_mx": heuristics.MX, "_hopper_upcast": heuristics.UPCAST}
on_hopper = pytest.mark.sm90


def launch_tile(a: BlockScaled, b: BlockScaled, offs: Tensor, starts: Tensor | None, tile: Tile) -> Tensor:
    """Output of one tile in a frame of sentinels; rows that are not written keep the sentinel."""
    name = {"fp8": "_hopper", "mx": "_hopper_mx", "nvfp4": "_hopper_upcast"}[a.spec.family]
    module = pytest.importorskip(f"blockscale.grouped.{name}", reason="this Triton has no Gluon for Hopper")
    sizes = (a.rows, b.rows, a.length, offs.shape[0])
    fitted = MODELS[name].fitted(tile, heuristics.Problem(*sizes, False, False, 132))
    return twice(
        lambda out: module.launch(Inputs(a, b, offs, starts), out, fitted, accumulate=False),
        a.rows, b.rows, torch.bfloat16, None,
    )  # fmt: skip


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", CAPACITIES)
@pytest.mark.parametrize(("first", "second", "tile"), _TILES, ids=str)
def test_every_tile(first: str, second: str, tile: Tile, name: str) -> None:
    for n, k in ((336, 400), (256, 128)):
        made = room(*CAPACITIES[name], k, "cuda")
        amax = made.placed.float().abs().max()
        a, packed = (cast(x, (first, second), amax) for x in (made.placed, made.packed))
        b = experts(made, ("", second), n)
        got = launch_tile(a, b, made.ends, made.starts, tile)
        want = launch_tile(packed, b, made.packed_ends, None, tile)
        assert torch.equal(got[made.inside], want[: int(made.inside.sum())])
        assert bool((got[~made.inside] == SENTINEL).all()), "written between groups"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("starts", "ends"),
    [
        ([0, 50, 90], [100, 120, 200]),
        ([90, 30, 200], [50, 100, 150]),
        ([-5, 2**31 - 1, 130], [20, -7, 2**31 - 1]),
        ([-(2**31), 200, 100], [300, 250, 900]),
    ],
)
@pytest.mark.parametrize(("first", "second", "tile"), _TILES, ids=str)
def test_invalid_starts_write_nothing_out_of_bounds(
    first: str, second: str, tile: Tile, starts: list[int], ends: list[int]
) -> None:
    """`launch_tile` checks the frame around the output and compares two runs: overlapping groups would race."""
    made = room([100, 100, 100], 106, 272, "cuda")
    a, b = bs.quantize(made.placed, first), experts(made, ("", second), 144)
    wrong_starts, wrong_ends = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in (starts, ends))
    launch_tile(a, b, wrong_ends, wrong_starts, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [7, 48])
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(("fp8_1x128", "fp8_128x128"), marks=on_hopper),
        pytest.param(("mxfp8_e4m3", "mxfp8_e4m3_128x128"), marks=on_hopper),
        ("nvfp4", "nvfp4"),
        ("mxfp4", "mxfp4"),
    ],
    ids="@".join,
)
def test_cuda_graph_replays_with_any_counts(pair: tuple[str, str], n: int) -> None:
    """Captured once, replayed with other counts, without a host sync; rows past the counts are unchanged."""
    counts = [[3, 0, 40, 16], [0, 0, 0, 0], [40, 40, 40, 40], [0, 1, 2, 39]]
    made = room(counts[0], 40, 336, "cuda")
    a, b, ends = bs.quantize(made.placed, pair[0]), experts(made, pair, n), made.ends
    total = torch.zeros(160, n, device="cuda")
    bs.scaled_grouped_mm(a, b, ends, accumulate=total, starts=made.starts)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            bs.scaled_grouped_mm(a, b, ends, accumulate=total, starts=made.starts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for each in counts:
        ends.copy_(made.starts + torch.tensor(each, dtype=torch.int32, device="cuda"))
        total.fill_(0.0)
        graph.replay()
        want = exact_grouped(a, b, ends, made.starts)
        inside = (want != 0).any(1)
        assert int(inside.sum()) == sum(each)
        assert bool((total[~inside] == 0).all())
        assert torch.allclose(total.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


# ---- BLOCKSCALE_CHECK ------------------------------------------------------------------------------------------------

_PROGRAM = """
import torch, blockscale as bs
w = bs.quantize(torch.ones(2, 64, 128, device="cuda"), "fp8_128x128")
x = bs.quantize(torch.ones(32, 128, device="cuda"), "fp8_1x128")
ends, starts = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in ({ends}, {starts}))
bs.scaled_grouped_mm(x, w, ends, starts=starts)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "ends", "right"), [([0, 16], [3, 32], True), ([0, 2], [3, 20], False), ([0, 16], [3, 33], False)]
)
def test_blockscale_check_asserts_on_the_device(monkeypatch, starts: list[int], ends: list[int], right: bool) -> None:
    """In a subprocess: a failed device assert ends it."""
    for asked in ("0", "1"):
        monkeypatch.setenv("BLOCKSCALE_CHECK", asked)
        program = _PROGRAM.format(ends=ends, starts=starts)
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert ("done" in found.stdout) == (right or asked == "0"), found.stderr


@pytest.mark.parametrize(
    ("starts", "ends", "right"),
    [
        ([0, 16], [3, 32], True),
        ([0, 16], [0, 16], True),
        ([0, 3], [3, 20], True),
        ([0, 2], [3, 20], False),
        ([4, 16], [3, 20], False),
        ([0, 16], [3, 33], False),
        ([-1, 16], [3, 20], False),
        ([16, 0], [20, 3], False),
        ([0, -(2**31)], [2**31 - 1, 3], False),
    ],
)
def test_check_group_ends(starts: list[int], ends: list[int], right: bool) -> None:
    first, last = (torch.tensor(each, dtype=torch.int32) for each in (starts, ends))
    if right:
        check_group_ends(last, 32, first)
    else:
        with pytest.raises(bs.errors.ShapeError, match="starts is"):
            check_group_ends(last, 32, first)
