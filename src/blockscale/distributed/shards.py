"""Where the shard of a weight lies in the whole, and which blocks it shares with other ranks: arithmetic alone."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from ..casts.shards import Rows
from ..errors import ShardingError, refuse
from ..formats.layout import ceil_div


class Place(NamedTuple):
    """Where the shard of a weight [N, K] or [E, N, K] lies.  shape: of what FSDP shards.  dim: that is sharded.  rank,
    ranks: of the group that shards it.  group: its process group.  device: type of device that it communicates from."""

    shape: tuple[int, ...]
    dim: int
    rank: int
    ranks: int
    group: dist.ProcessGroup
    device: str

    @property
    def chunk(self) -> int:
        """Size of the first shard along the sharded dimension; later ones may be smaller."""
        return ceil_div(self.shape[self.dim], self.ranks)

    def span(self, rank: int) -> tuple[int, int]:
        """First index and size of a rank's shard along the sharded dimension."""
        size = self.shape[self.dim]
        first = min(rank * self.chunk, size)
        return first, min(self.chunk, size - first)

    def rows(self, rank: int | None = None) -> Rows:
        """Rows of each matrix that a rank has, by default this one."""
        total = self.shape[-2]
        if self.dim != len(self.shape) - 2:
            return Rows(0, total, total)
        return Rows(*self.span(self.rank if rank is None else rank), total)

    @property
    def is_plane(self) -> bool:
        """Whether FSDP takes one tensor of the shard's padded shape and no other: not where shards differ in size, or
        are not sharded along the first dimension."""
        return self.dim != 0 or self.shape[0] % self.ranks != 0


def place_of(param: DTensor, shape: tuple[int, ...], inner: tuple[Placement, ...] = ()) -> Place:
    """Where the shard of an FSDP parameter lies in this rank's weight; raises if FSDP shards it over several
    dimensions.

    shape: of this rank's weight, the whole unless tensor or expert parallelism shards it too.  inner: placements that
    do so. FSDP puts its own before them, or replaces one that replicates.
    """
    mesh, placements = param.device_mesh, param.placements
    before = (Replicate(),) * (mesh.ndim - len(inner)) + inner
    pairs = enumerate(zip(before, placements, strict=False))
    dims = [dim for dim, (old, new) in pairs if old.is_replicate() and not new.is_replicate()]
    (dim,) = dims if len(dims) == 1 else (-1,)
    # Shard, or _StridedShard of a dimension that tensor parallelism shards too
    axis: int | None = getattr(placements[dim], "dim", None) if len(dims) == 1 else None
    if axis is None or axis == len(shape) - 1:
        refuse(
            f"a weight {tuple(param.shape)} placed {placements}",
            rule="codes are gathered of weights that FSDP2 shards along one dimension of rows or of experts",
            fix="call gather_low_ without this layer, or shard it along dimension 0",
            error=ShardingError,
        )
    return Place(
        shape,
        axis,
        mesh.get_local_rank(dim),
        mesh.size(dim),
        mesh.get_group(dim),
        mesh.device_type,
    )


def exchanged_tiles(place: Place, tile: int) -> tuple[int, ...]:
    """Row tiles whose maxima are exchanged: those that straddle shards, or all where scales are not gathered."""
    total = place.shape[-2]
    if place.is_plane:
        return tuple(range(ceil_div(total, tile)))
    if place.dim != len(place.shape) - 2:
        return ()
    starts = (place.span(rank)[0] for rank in range(1, place.ranks))
    return tuple(sorted({start // tile for start in starts if start % tile and start < total}))


def edges(rows: Rows, tile: int, *, whole: bool) -> list[Rows]:
    """Runs of rows in tiles that straddle shards; all rows with `whole`."""
    if whole:
        return [rows]
    head = min(-rows.first % tile, rows.size)
    tail = 0 if rows.end == rows.total else min(rows.end % tile, rows.size - head)
    runs = (Rows(rows.first, head, rows.total), Rows(rows.end - tail, tail, rows.total))
    return [each for each in runs if each.size]


def runs_of_scales(place: Place, tile: int) -> list[slice]:
    """Runs of row tiles, in order, among the scales that all ranks send: a rank sends the tiles that it touches, and a
    tile is taken from the first rank that does."""
    spans = [place.span(rank) for rank in range(place.ranks)]
    touched = [range(first // tile, ceil_div(first + size, tile)) for first, size in spans]
    most, done, runs = max(map(len, touched)), 0, list[slice]()
    for rank, tiles in enumerate(touched):
        skipped = max(done - tiles.start, 0)
        if skipped < len(tiles):
            runs.append(slice(rank * most + skipped, rank * most + len(tiles)))
            done = tiles.stop
    return runs
