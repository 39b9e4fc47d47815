"""One rank of tests/test_sharding.py: operators on DTensors, each local shard against the whole's, no collective.

In a module of its own because a spawned process imports it by name. An operator computes shards whose bytes are the
whole's, or raises.
"""

from __future__ import annotations

import json
import os
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree

import blockscale as bs
from blockscale.errors import ShardingError
from blockscale.formats import FORMATS, CastSpec, Stochastic
from blockscale.gemm import exact_mm
from support.products import FEW, ONE_D, gaussian, offsets, raw

RANKS = 2
THOROUGH = "ALL_TESTS" in os.environ
# others have the element width, the layouts and the blocks of one of these, which is all that a shard depends on
FORMS = [name for name in FORMATS if THOROUGH or name not in ("mxfp8_e5m2", "mxfp6_e2m3")]
ALONG_K = ((1, 1), (1, None))
Case = tuple[str, Callable[[], int]]


def is_nvfp4(name: str) -> bool:
    return FORMATS[name].family == "nvfp4"


def spec(name: str, **options: object) -> CastSpec:
    """A cast that may be cut: NVFP4 gets its maximum, which no piece knows."""
    return CastSpec(name, amax=torch.tensor(5.0), **options) if is_nvfp4(name) else CastSpec(name, **options)


def put(x: Tensor, mesh: DeviceMesh, dim: int | None) -> DTensor:
    # every rank has the whole: nothing is sent
    return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)], src_data_rank=None)


def computed(call: Callable[[], Any]) -> Any:
    """What an operator makes of shards without any collective; None where it raises."""
    with CommDebugMode() as comm:
        try:
            made = call()
        except ShardingError:
            made = None
    assert comm.get_total_counts() == 0, comm.get_comm_counts()
    return made


def tried(call: Callable[[], object], want: object, mesh: DeviceMesh) -> int:
    """How many results of an operator on shards are shards with the whole's bytes; 0 where it raises."""
    made = computed(call)
    return 0 if made is None else same_pieces(made, want, mesh)


def same_pieces(made: object, want: object, mesh: DeviceMesh) -> int:
    """`compare`, of results that must not be whole."""
    pieces = compare(made, want, mesh)
    assert pieces, "whole results of sharded inputs: who gathered them?"
    return pieces


def compare(got: object, want: object, mesh: DeviceMesh) -> int:
    """Every local tensor has the bytes of its piece of the whole; how many were pieces."""
    pieces = 0
    got_leaves, want_leaves = pytree.tree_leaves(got), pytree.tree_leaves(want)
    for x, y in zip(got_leaves, want_leaves, strict=True):
        (placement,) = x.placements
        assert (x.shape, x.dtype) == (y.shape, y.dtype), (x.shape, x.dtype, y.shape, y.dtype)
        assert not placement.is_partial()
        if placement.is_shard():
            size = y.shape[placement.dim] // RANKS
            y = y.narrow(placement.dim, size * mesh.get_local_rank(), size)
            pieces += 1
        assert x.to_local().shape == y.shape, (x.to_local().shape, y.shape)
        assert torch.equal(raw(x.to_local()), raw(y)), placement
    return pieces


def casts(mesh: DeviceMesh) -> Iterator[Case]:
    """Every format, layout, axis and cut: shapes whose pieces are aligned, just not aligned, and uneven."""

    def case(x: Tensor, dim: int, recipe: CastSpec, axis: int) -> int:
        q = computed(lambda: bs.quantize(put(x, mesh, dim), recipe, axis=axis))
        if q is None:
            return 0
        whole = bs.quantize(x, recipe, axis=axis)
        return same_pieces(q, whole, mesh) + tried(lambda: bs.dequantize(q), bs.dequantize(whole), mesh)

    for rows, columns, *rest in ((256, 256), (72, 288), (7, 33), (2, 64, 96)):
        for name in FORMS:
            # four tiles to a piece is what the grid of tiles takes
            shape = (256, 1024) if name == "fp8_128x128" and (rows, columns) == (256, 256) else (rows, columns, *rest)
            x = gaussian(*shape)
            for layout in FORMATS[name].layouts:
                for axis in (-1, -2):
                    for dim in range(len(shape)):
                        recipe = spec(name, scale_layout=layout)
                        label = f"cast {name} {layout} {shape} axis={axis} dim={dim}"
                        yield label, lambda a=(x, dim, recipe, axis): case(*a)


def special_casts(mesh: DeviceMesh) -> Iterator[Case]:
    """What depends on more than the piece, or on groups within it."""
    x, batch = gaussian(256, 256), gaussian(4, 64, 256)
    state, offs = bs.rng_state(3), offsets([40, 0, 100])
    for dim in (0, 1):
        for axis in (-1, -2):

            def maximum(dim: int = dim, axis: int = axis) -> int:
                want = bs.quantize(x, "nvfp4", axis=axis)
                return tried(lambda: bs.quantize(put(x, mesh, dim), "nvfp4", axis=axis), want, mesh)

            def drawn(dim: int = dim, axis: int = axis) -> int:
                def recipe(state: Tensor) -> CastSpec:
                    return CastSpec("mxfp4", rounding=Stochastic(state, "layer"), role="dgrad_dy")

                want = bs.quantize(x, recipe(state), axis=axis)
                sent = recipe(put(state, mesh, None))
                return tried(lambda: bs.quantize(put(x, mesh, dim), sent, axis=axis), want, mesh)

            def grouped(dim: int = dim, axis: int = axis) -> int:
                want, sent = bs.quantize(x, "mxfp8_e4m3", axis=axis, offs=offs), put(offs, mesh, None)
                return tried(lambda: bs.quantize(put(x, mesh, dim), "mxfp8_e4m3", axis=axis, offs=sent), want, mesh)

            def rotated(dim: int = dim, axis: int = axis) -> int:
                pieces = 0
                for name in ("mxfp4", "nvfp4"):
                    whole = bs.quantize(x, spec(name, hadamard=True), axis=axis)
                    q = bs.quantize(put(x, mesh, dim), spec(name, hadamard=True), axis=axis)
                    pieces += compare(q, whole, mesh)
                    pieces += tried(lambda q=q: bs.dequantize(q), bs.dequantize(whole), mesh)
                return pieces

            for test in (maximum, drawn, grouped, rotated):
                yield f"{test.__name__} axis={axis} dim={dim}", test

    def per_batch(dim: int, amax: Tensor | None) -> int:
        given = "group" if amax is None else amax
        sent = "group" if amax is None else put(amax, mesh, None)
        q = computed(lambda: bs.quantize(put(batch, mesh, dim), "nvfp4", amax=sent))
        if q is None:
            return 0
        whole = bs.quantize(batch, "nvfp4", amax=given)
        return same_pieces(q, whole, mesh) + tried(lambda: bs.dequantize(q), bs.dequantize(whole), mesh)

    for dim in range(3):
        for amax in (None, torch.tensor([3.0, 4.0, 5.0, 6.0])):
            yield f"maxima per batch, given={amax is not None} dim={dim}", lambda a=(dim, amax): per_batch(*a)

    def both(name: str, dim: int, colsum: bool) -> int:
        wide = gaussian(256, 256)
        want = bs.quantize_both(wide, spec(name), spec(name), colsum=colsum)
        sent = put(wide, mesh, dim)
        return tried(lambda: bs.quantize_both(sent, spec(name), spec(name), colsum=colsum), want, mesh)

    for name in FORMS:
        for dim in (0, 1):
            for colsum in (False, True):
                yield f"both {name} dim={dim} colsum={colsum}", lambda a=(name, dim, colsum): both(*a)


def products(mesh: DeviceMesh) -> Iterator[Case]:
    """Cut along M, along N, along both (which raises), along K, and where shards are not aligned."""

    def case(pair: tuple[str, str], m: int, k: int, dims: tuple[int | None, int | None], layout: str | None) -> int:
        x, w, bias = gaussian(m, k), gaussian(m, k, seed=1), gaussian(m, seed=2)
        a, b = (bs.quantize(t, spec(name, scale_layout=layout)) for t, name in zip((x, w), pair, strict=True))
        sent = [
            computed(lambda a=each: bs.quantize(put(a[0], mesh, a[1]), spec(a[2], scale_layout=layout)))
            for each in zip((x, w), dims, pair, strict=True)
        ]
        if None in sent:
            return 0
        da, db = sent
        added = put(bias, mesh, None)
        want = bs.scaled_mm(a, b, torch.float32, bias=bias)
        pieces = tried(lambda: bs.scaled_mm(da, db, torch.float32, bias=added), want, mesh)
        if dims[0] != 1:
            for dtype in (torch.bfloat16, torch.float32):
                pieces += tried(lambda d=dtype: bs.scaled_mm(da, db, d), bs.scaled_mm(a, b, dtype), mesh)
            return pieces
        # partial sums over K are rounded to the output's dtype and then added
        exact = exact_mm(a, b).float()
        for dtype, off in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
            partial = computed(lambda d=dtype: bs.scaled_mm(da, db, d))
            if partial is None:
                continue
            assert partial.placements[0].is_partial()
            assert (partial.full_tensor().float() - exact).norm() < off * exact.norm()
            pieces += 1
        return pieces

    for pair in FEW:
        for dims in ((0, None), (None, 0), (0, 0), *ALONG_K):
            # whole tiles of rows, and 4 tiles to a piece of K, is what the grid of tiles takes
            for m, k in ((256, 1024) if "fp8_128x128" in pair else (32, 256), (40, 80)):
                yield f"product {pair} {m}x{k} {dims}", lambda a=(pair, m, k, dims, None): case(*a)
        if FORMATS[pair[0]].layouts == FORMATS[pair[1]].layouts:
            for layout in FORMATS[pair[0]].layouts[1:]:
                yield f"product {pair} {layout}", lambda a=(pair, 256, 128, (0, None), layout): case(*a)

    def accumulated(pair: tuple[str, str], dim: int) -> int:
        x, w, acc = gaussian(256, 64), gaussian(256, 64, seed=1), gaussian(256, 256, seed=2).float()
        sent, cut = put(acc.clone(), mesh, dim), (0, None) if dim == 0 else (None, 0)
        a, b = (bs.quantize(t, spec(name)) for t, name in zip((x, w), pair, strict=True))
        da, db = (bs.quantize(put(t, mesh, d), spec(n)) for t, d, n in zip((x, w), cut, pair, strict=True))
        bs.scaled_mm(da, db, accumulate=sent)
        return compare(sent, bs.scaled_mm(a, b, accumulate=acc), mesh)

    for pair in FEW:
        for dim in (0, 1):
            yield f"accumulated {pair} dim={dim}", lambda a=(pair, dim): accumulated(*a)


def grouped_products(mesh: DeviceMesh) -> Iterator[Case]:
    def m_grouped(name: str, n: int) -> int:
        x, w, bias, offs = gaussian(64, 96), gaussian(3, n, 96, seed=1), gaussian(3, n), offsets([20, 0, 30])
        a, b = bs.quantize(x, spec(name)), bs.quantize(w, spec(name))
        da, db = bs.quantize(put(x, mesh, None), spec(name)), computed(lambda: bs.quantize(put(w, mesh, 1), spec(name)))
        if db is None:
            return 0
        ends = put(offs, mesh, None)
        pieces = compare(bs.scaled_grouped_mm(da, db, ends), bs.scaled_grouped_mm(a, b, offs), mesh)
        got = bs.scaled_grouped_mm(da, db, ends, bias=put(bias, mesh, None))
        pieces += compare(got, bs.scaled_grouped_mm(a, b, offs, bias=bias), mesh)
        if n % 8 == 0:
            acc, starts = torch.ones(64, n), offsets([0, 20, 30])
            sent = put(acc.clone(), mesh, 1)
            bs.scaled_grouped_mm(da, db, ends, accumulate=sent)
            pieces += compare(sent, bs.scaled_grouped_mm(a, b, offs, accumulate=acc), mesh)
            begins = put(starts, mesh, None)
            bs.scaled_grouped_mm(da, db, begins + 9, accumulate=sent, starts=begins)
            pieces += compare(sent, bs.scaled_grouped_mm(a, b, starts + 9, accumulate=acc, starts=starts), mesh)
        return pieces

    def k_grouped(name: str) -> int:
        x, w, offs = gaussian(64, 256), gaussian(64, 128, seed=1), offsets([20, 0, 30])
        ends, recipe = put(offs, mesh, None), spec(name)
        a, b = (bs.quantize(t, recipe, axis=-2, offs=offs).mT for t in (x, w))
        # a grouped cast is not cut, so both are whole and their product is cut by hand
        da, db = (bs.quantize(put(t, mesh, None), recipe, axis=-2, offs=ends).mT for t in (x, w))
        assert tried(lambda: bs.quantize(put(w, mesh, 1), recipe, axis=-2, offs=ends), b.mT, mesh) == 0
        return compare(bs.scaled_grouped_mm(da, db, ends), bs.scaled_grouped_mm(a, b, offs), mesh)

    for name in ONE_D:
        yield f"m-grouped {name}", lambda name=name: m_grouped(name, 64)
        yield f"m-grouped {name} not aligned", lambda name=name: m_grouped(name, 7)
        yield f"k-grouped {name}", lambda name=name: k_grouped(name)


def run(rank: int, folder: str) -> None:
    """Half of the cases: only sums over K need another rank. With --all every rank has all products. Writes
    {case: number of pieces, or the error}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    results: dict[str, int | str] = {}
    # it sums in an order that does not depend on the number of rows
    with bs.use_backend(gemm="reference", m_grouped="reference", k_grouped="reference"):
        for kind in (casts, special_casts, products, grouped_products):
            for label, test in kind(mesh):
                shared = label.endswith((*map(str, ALONG_K),)) or (THOROUGH and kind not in (casts, special_casts))
                if not shared and zlib.crc32(label.encode()) % RANKS != rank:
                    continue
                try:
                    results[label] = test()
                except Exception:  # every rank goes on, so that no collective waits for a rank that stopped
                    results[label] = traceback.format_exc(limit=-3)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
