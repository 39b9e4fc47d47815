"""Operators on DTensors: which placements are accepted, which raise, and that shards have the unsharded bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import blockscale as bs
from blockscale import library, rng_state
from blockscale.errors import ShardingError
from blockscale.formats import FORMATS, CastSpec, Stochastic
from support.products import assert_same_bits, gaussian, offsets

if not dist.is_available():
    pytest.skip("this torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from support.ranks import start_ranks
from support.sharded import RANKS, THOROUGH, run, spec

WHOLE = "R"


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A fake process group of four ranks: placements are real, results of collectives are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def put(x: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> DTensor:
    return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])


def where(*tensors: torch.Tensor) -> str:
    """Placements as text: S0 is Shard(0), R Replicate, P Partial."""
    short = {"Shard": "S", "Replicate": "R", "Partial": "P"}
    placements = [placement for tensor in tensors for placement in tensor.placements]
    return " ".join(short[type(p).__name__] + (str(p.dim) if isinstance(p, Shard) else "") for p in placements)


# ---- routing -------------------------------------------------------------------------------------------------------


def test_moves_of_rows_may_be_sharded_along_columns(mesh):
    routing = bs.sort_by_expert(torch.tensor([[1, 0], [0, 2]]), 3)
    tokens, rows = (put(each, mesh, None) for each in (routing.tokens, routing.rows))
    op = library.OPERATORS
    assert where(op["permute_rows"](put(gaussian(2, 8), mesh, 1), tokens, rows, None)) == "S1"
    assert where(op["combine_rows"](put(gaussian(4, 8), mesh, 1), rows, None)) == "S1"
    with pytest.raises(RuntimeError, match="never gathered"):  # uneven
        op["combine_rows"](put(gaussian(4, 6), mesh, 1), rows, None)
    with pytest.raises(RuntimeError, match="never gathered"):
        op["permute_rows"](put(gaussian(2, 8), mesh, 0), tokens, rows, None)


def test_fused_casts_take_replicated_tensors(mesh):
    q = bs.swiglu_quantize(put(gaussian(8, 64), mesh, None), "mxfp8_e4m3")
    assert where(q.data, q.scale) == "R R"
    with pytest.raises(ShardingError, match="never gathered"):
        bs.swiglu_quantize(put(gaussian(8, 64), mesh, 0), "mxfp8_e4m3")


# ---- casts ---------------------------------------------------------------------------------------------------------


SHARDED = [
    # format, layout, shape, axis, sharded dimension -> placements of codes and scales
    ("mxfp8_e4m3", "plain", (8, 32), -1, 0, "S0 S0"),
    ("mxfp8_e4m3", "plain", (8, 128), -1, 1, "S1 S1"),
    ("mxfp8_e4m3", "plain", (128, 8), -2, 0, "S0 S0"),
    ("mxfp8_e4m3", "plain", (32, 8), -2, 1, "S1 S1"),
    ("mxfp8_e4m3", "blocked", (512, 32), -1, 0, "S0 S0"),
    ("mxfp8_e4m3", "blocked", (32, 512), -2, 1, "S1 S0"),
    ("mxfp4", "plain", (8, 128), -1, 1, "S1 S1"),
    ("nvfp4", "plain", (8, 128), -1, 1, "S1 S1"),
    ("nvfp4_16x16", "plain", (64, 16), -1, 0, "S0 S0"),
    ("mxfp8_e4m3_128x128", "plain", (512, 32), -1, 0, "S0 S0"),
    ("mxfp8_e4m3_128x128", "plain", (32, 512), -1, 1, "S1 S1"),
    ("mxfp8_e4m3_128x128", "blocked", (512, 32), -1, 0, "S0 S0"),
    ("fp8_1x128", "mn_major", (16, 128), -1, 0, "S0 S0"),
    ("fp8_1x128", "mn_major", (16, 512), -1, 1, "S1 S1"),
    ("fp8_1x128", "plain", (4, 128), -1, 0, "S0 S0"),
    ("fp8_128x128", "grid", (512, 128), -1, 0, "S0 S0"),
    ("fp8_128x128", "grid", (128, 2048), -1, 1, "S1 S1"),
    ("fp8_128x128", "plain", (128, 512), -1, 1, "S1 S1"),
    ("mxfp8_e4m3", "plain", (4, 3, 5), -1, 0, "S0 S0"),
    ("fp8_1x128", "mn_major", (8, 3, 5), -2, 0, "S0 S0"),
    ("mxfp8_e4m3", "blocked", (4, 3, 5), -1, 0, "S0 S0"),
]
REFUSED = [
    ("mxfp8_e4m3", "plain", (6, 32), -1, 0),  # uneven
    ("mxfp8_e4m3", "plain", (8, 96), -1, 1),  # a block would be split
    ("mxfp8_e4m3", "plain", (8, 64), -1, 1),  # and here
    ("mxfp8_e4m3", "blocked", (256, 32), -1, 0),  # 64 rows of a tile of 128
    ("mxfp8_e4m3", "blocked", (64, 512), -1, 1),  # scales of a shard are not contiguous
    ("nvfp4", "plain", (8, 64), -1, 1),  # 16 codes are half of a row of 16 bytes
    ("nvfp4_16x16", "plain", (32, 16), -1, 0),  # 8 rows of a tile of 16
    ("mxfp8_e4m3_128x128", "plain", (256, 32), -1, 0),  # 64 rows of a tile of 128
    ("mxfp8_e4m3_128x128", "plain", (64, 256), -1, 1),  # 64 columns of one
    ("fp8_1x128", "mn_major", (8, 128), -1, 0),  # each shard would pad its 2 rows to 4
    ("fp8_128x128", "grid", (256, 128), -1, 0),  # 64 rows of a tile of 128
    ("fp8_128x128", "grid", (128, 512), -1, 1),  # each shard would pad its block to 4
    ("mxfp8_e4m3", "plain", (6, 3, 5), -1, 0),
]


@pytest.mark.parametrize(("name", "layout", "shape", "axis", "dim", "want"), SHARDED)
def test_sharded_casts(mesh, name, layout, shape, axis, dim, want):
    q = bs.quantize(put(gaussian(*shape), mesh, dim), spec(name, scale_layout=layout), axis=axis)
    assert where(q.data, q.scale) == want
    if q.global_scale is not None:
        assert where(q.global_scale) == WHOLE
    if dim == len(shape) - 3 - axis or len(shape) == 3:  # dequantize keeps the sharding of rows and batches
        assert where(bs.dequantize(q)) == f"S{dim}"


@pytest.mark.parametrize(("name", "layout", "shape", "axis", "dim"), REFUSED)
def test_casts_that_would_gather_raise(mesh, name, layout, shape, axis, dim):
    x = put(gaussian(*shape), mesh, dim)
    with pytest.raises(ShardingError, match="never gathered unasked") as raised:
        bs.quantize(x, spec(name, scale_layout=layout), axis=axis)
    assert f"x {shape} placed (Shard(dim={dim}),)" in str(raised.value)
    q = bs.quantize(x.redistribute(placements=[Replicate()]), spec(name, scale_layout=layout), axis=axis)
    assert where(q.data, q.scale) == "R R"  # the fix works


@pytest.mark.parametrize("dim", [0, 1])
def test_casts_that_need_the_whole_tensor_raise(mesh, dim):
    x = put(gaussian(512, 512), mesh, dim)
    state, offs = put(rng_state(1), mesh, None), put(offsets([3, 0, 30]), mesh, None)
    stochastic = CastSpec("mxfp4", rounding=Stochastic(state, "layer"), role="dgrad_dy")
    for options in ({"format": "nvfp4"}, {"format": stochastic}, {"format": "mxfp8_e4m3", "offs": offs, "axis": -2}):
        with pytest.raises(ShardingError, match="never gathered"):
            bs.quantize(x, **options)


def test_an_amax_per_batch_is_sharded_with_the_batch(mesh):
    x = gaussian(4, 8, 128)
    for amax in ("group", put(torch.ones(4), mesh, None)):
        q = bs.quantize(put(x, mesh, 0), "nvfp4", amax=amax)
        assert where(q.data, q.scale, q.global_scale, bs.dequantize(q)) == "S0 S0 S0 S0"
    with pytest.raises(ShardingError, match="never gathered"):
        bs.quantize(put(x, mesh, 1), "nvfp4", amax="group")


def test_both_operands(mesh):
    x = gaussian(512, 512)
    for name in FORMATS:
        if name == "fp8_128x128":  # a shard would pad its one column tile
            with pytest.raises(ShardingError, match="never gathered"):
                bs.quantize_both(put(x, mesh, 0), spec(name), spec(name))
            continue
        row, col = bs.quantize_both(put(x, mesh, 0), spec(name), spec(name))
        assert where(row.data, row.scale, col.data, col.scale) == "S0 S0 S0 S0", name
    _, _, total = bs.quantize_both(put(x, mesh, 1), "mxfp8_e4m3", "mxfp8_e4m3", colsum=True)
    assert where(total) == "S0"
    # 16 columns are half a block
    with pytest.raises(ShardingError, match="never gathered"):
        bs.quantize_both(put(gaussian(512, 64), mesh, 1), "mxfp8_e4m3", "mxfp8_e4m3")
    # a column sum is rounded once, so it is not the sum of rounded shards
    with pytest.raises(ShardingError, match="never gathered"):
        bs.quantize_both(put(x, mesh, 0), "mxfp8_e4m3", "mxfp8_e4m3", colsum=True)


def test_formats_do_not_share_a_cache_entry(mesh):
    """DTensor caches shardings by arguments, and the format is one."""
    x = put(gaussian(512, 512), mesh, 0)
    for _ in range(2):
        for name in FORMATS:
            whole = bs.quantize(gaussian(512, 512), spec(name))
            q = bs.quantize(x, spec(name))
            assert (q.data.dtype, q.data.shape, q.scale.shape) == (
                whole.data.dtype,
                whole.data.shape,
                whole.scale.shape,
            )
            blocked = "blocked" in FORMATS[name].layouts
            assert where(bs.quantize(x, spec(name, scale_layout="blocked" if blocked else "plain")).data) == "S0"


# ---- products ------------------------------------------------------------------------------------------------------


def operands(mesh: DeviceMesh, dims: tuple[int | None, int | None], pair: tuple[str, str] = ("mxfp8_e4m3",) * 2):
    return [bs.quantize(put(gaussian(512, 512), mesh, dim), spec(name)) for dim, name in zip(dims, pair, strict=True)]


@pytest.mark.parametrize(
    "pair", [("mxfp8_e4m3",) * 2, ("fp8_1x128", "fp8_128x128"), ("mxfp4",) * 2, ("nvfp4",) * 2], ids="@".join
)
def test_products_are_sharded_along_m_and_n(mesh, pair):
    assert where(bs.scaled_mm(*operands(mesh, (0, None), pair))) == "S0"
    assert where(bs.scaled_mm(*operands(mesh, (None, 0), pair))) == "S1"
    assert where(bs.scaled_mm(*operands(mesh, (None, None), pair))) == "R"
    bias = put(gaussian(512), mesh, 0)
    assert where(bs.scaled_mm(*operands(mesh, (None, 0), pair), bias=bias)) == "S1"


def test_products_sharded_along_k_are_partial_sums(mesh):
    a, b = operands(mesh, (1, 1))
    for dtype in (torch.float32, torch.bfloat16):
        assert where(bs.scaled_mm(a, b, dtype)) == "P"
    with pytest.raises(ShardingError, match="never gathered"):  # every partial sum would add the bias
        bs.scaled_mm(a, b, torch.float32, bias=put(gaussian(512), mesh, None))


def test_weight_only_products_are_sharded_along_m_n_and_k(mesh):
    x, w = (
        gaussian(512, 512),
        {dim: bs.quantize(put(gaussian(512, 512), mesh, dim), "mxfp8_e4m3") for dim in (None, 0, 1)},
    )
    assert where(bs.scaled_mm(put(x, mesh, 0), w[None])) == "S0"
    assert where(bs.scaled_mm(put(x, mesh, None), w[0], bias=put(gaussian(512), mesh, 0))) == "S1"
    assert where(bs.scaled_mm(put(x, mesh, None), w[None])) == "R"
    assert where(bs.scaled_mm(put(x, mesh, 1), w[1])) == "P"
    for operands in ((put(x[:6], mesh, 0), w[None]), (put(x, mesh, 0), w[0]), (put(x, mesh, 0), w[1])):
        with pytest.raises(ShardingError, match="never gathered"):
            bs.scaled_mm(*operands)
    with pytest.raises(ShardingError, match="never gathered"):  # every partial sum would add the bias
        bs.scaled_mm(put(x, mesh, 1), w[1], bias=put(gaussian(512), mesh, None))
    # 32 codes are half of a shard's two blocks of 16 bytes
    odd = bs.quantize(put(gaussian(8, 96), mesh, None), "mxfp8_e4m3")
    with pytest.raises(ShardingError, match="never gathered"):
        bs.scaled_mm(put(gaussian(8, 96), mesh, 1), odd)


def test_products_of_two_sharded_operands_raise(mesh):
    for dims in ((0, 0), (0, 1), (1, 0)):
        with pytest.raises(ShardingError, match="never gathered"):
            bs.scaled_mm(*operands(mesh, dims))


def test_partial_sums_are_reduced_by_the_caller(mesh):
    x = DTensor.from_local(gaussian(512, 512), mesh, [Partial()])
    with pytest.raises(ShardingError, match="never gathered"):
        bs.quantize(x, "mxfp8_e4m3")


def test_accumulators_stay_where_they_are(mesh):
    for dims, dim in (((0, None), 0), ((None, 0), 1), ((None, None), None)):
        acc = put(torch.zeros(512, 512), mesh, dim)
        assert bs.scaled_mm(*operands(mesh, dims), accumulate=acc) is acc
        assert acc.placements == ((Replicate() if dim is None else Shard(dim)),)
    # shards of 1 row have no scales of their own in this layout, and the buffer cannot be gathered
    q = bs.quantize(put(gaussian(4, 128), mesh, None), "fp8_1x128")
    with pytest.raises(RuntimeError, match="never gathered"):
        bs.scaled_mm(q, q, accumulate=put(torch.zeros(4, 4), mesh, 0))


def test_tensors_and_dtensors_do_not_mix(mesh):
    a, b = operands(mesh, (0, None))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        bs.scaled_mm(a, bs.quantize(gaussian(512, 512), "mxfp8_e4m3"))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        bs.scaled_mm(a, b, bias=gaussian(512))


def test_grouped_products_are_sharded_along_n(mesh):
    ends, x = put(offsets([3, 0, 30]), mesh, None), put(gaussian(64, 128), mesh, None)
    a, b = bs.quantize(x, "mxfp8_e4m3"), bs.quantize(put(gaussian(3, 64, 128), mesh, 1), "mxfp8_e4m3")
    assert where(bs.scaled_grouped_mm(a, b, ends)) == "S1"
    assert where(bs.scaled_grouped_mm(a, b, ends, starts=ends)) == "S1"
    acc = put(torch.zeros(64, 64), mesh, 1)
    assert where(bs.scaled_grouped_mm(a, b, ends, accumulate=acc)) == "S1"
    bias = put(gaussian(3, 64), mesh, 1)
    assert where(bs.scaled_grouped_mm(x, b, ends, starts=ends, bias=bias)) == "S1"  # weight-only
    with pytest.raises(ShardingError, match="never gathered"):
        bs.scaled_grouped_mm(put(gaussian(64, 128), mesh, 0), b, ends)
    rows = bs.quantize(put(gaussian(64, 128), mesh, 0), "mxfp8_e4m3")
    assert where(rows.data) == "S0"
    with pytest.raises(ShardingError, match="never gathered"):
        bs.scaled_grouped_mm(rows, b, ends)


def test_layers_of_experts_refuse_every_dtensor(mesh):
    x, ends = gaussian(6, 64), offsets([2, 0, 4])
    weight, down = gaussian(3, 128, 64), gaussian(3, 64, 64)
    sent = [put(each, mesh, None) for each in (x, weight, ends, gaussian(3, 128), down)]
    for call in (
        lambda: bs.autograd.grouped_linear(sent[0], weight, ends, recipe="mxfp8"),
        lambda: bs.autograd.grouped_linear(x, sent[1], ends, recipe="mxfp8"),
        lambda: bs.autograd.grouped_linear(x, weight, sent[2], recipe="mxfp8"),
        lambda: bs.autograd.grouped_linear(x, weight, ends, sent[3], recipe="mxfp8"),
        lambda: bs.autograd.grouped_swiglu_mlp(x, weight, sent[4], ends, recipe="mxfp8"),
    ):
        with pytest.raises(ShardingError, match="not sharded by DTensor"):
            call()


# ---- meshes, builds ------------------------------------------------------------------------------------------------


def test_meshes_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(gaussian(16, 512), mesh, [Shard(0), Replicate()])
    w = distribute_tensor(gaussian(512, 512), mesh, [Replicate(), Shard(0)])
    a, b = bs.quantize(x, "fp8_1x128"), bs.quantize(w, "fp8_128x128")
    assert where(a.data, a.scale) == "S0 R S0 R"
    assert where(b.data, b.scale) == "R S0 R S0"
    assert where(bs.scaled_mm(a, b)) == "S0 S1"
    # both mesh dimensions could shard the 8 rows, into shards of 2
    with pytest.raises(ShardingError, match="never gathered"):
        bs.quantize(distribute_tensor(gaussian(8, 128), mesh, [Shard(0), Replicate()]), "fp8_1x128")


def test_compiled_graphs_are_sharded_alike(mesh):
    def function(x, w):
        return bs.scaled_mm(bs.quantize(x, "fp8_1x128"), bs.quantize(w, "fp8_128x128"))

    # from_local, since the fake group sends nothing
    x = DTensor.from_local(gaussian(16, 128), mesh, [Shard(0)])
    w = DTensor.from_local(gaussian(128, 128, seed=1), mesh, [Replicate()])
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(x, w)
    assert where(got) == "S0"
    assert_same_bits(got.to_local(), function(gaussian(16, 128), gaussian(128, 128, seed=1)))


def test_a_build_without_distributed_still_imports():
    code = "import torch; torch.distributed.is_available = lambda: False; import blockscale as bs; bs.quantize"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shards_have_the_unsharded_bytes(tmp_path):
    """Two real ranks; see tests/support/sharded.py."""
    start_ranks(run, (str(tmp_path),), RANKS)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for result in results:
        wrong = {label: error for label, error in result.items() if isinstance(error, str)}
        assert not wrong, f"{len(wrong)} of {len(result)} wrong, first: {next(iter(wrong.items()))}"
    for label in results[0].keys() & results[1]:  # sums over K: the same shardings on both ranks
        assert results[0][label] == results[1][label], label
    found = results[0] | results[1]
    assert len(found) > 450
    assert sum(pieces > 0 for pieces in found.values()) > (250 if THOROUGH else 225)
