"""Persistent tile loop, TMA loads of codes and row stores shared by the grouped Hopper kernels."""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ..gemm._gluon import gl, gluon, mbarrier, tma_load
from ..gemm._hopper_common import apply_epilogue, load_rows, store_by_tma
from ..gemm._hopper_schedule import count_rotated_tiles, rotated_tile_at, tile_at


@gluon.jit
def count_tiles(problem, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    """Number of tiles of this CTA."""
    list_ptr, groups, M, N, _ = problem
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64
    tiles_m = groups * gl.cdiv(M, BM) if K_GROUPED else gl.load(list_ptr)
    return count_rotated_tiles(gl.program_id(0), gl.num_programs(0), tiles_m * gl.cdiv(N, TILE.bn))


@gluon.jit
def tile_coords(item, problem, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    """Coordinates of this CTA's tile number `item`: (group, a_row, c_row, end, column, k_start, k_stop, begin).

    a_row, c_row: first row of the tile in a and in c.  [begin, end): rows of c that belong to the group.  k_start,
    k_stop: range of K-blocks; empty for rows of no group and for groups without tokens."""
    list_ptr, groups, M, N, K = problem
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64
    blocks, tiles_n = gl.cdiv(K, 128), gl.cdiv(N, TILE.bn)
    tile = rotated_tile_at(item, gl.program_id(0), gl.num_programs(0))
    if K_GROUPED:
        tiles_m = gl.cdiv(M, BM)
        entry = list_ptr + tile // (tiles_m * tiles_n) * 4
        pm, pn = tile_at(tile % (tiles_m * tiles_n), tiles_m, tiles_n, TILE.group_m)
        group, k_start, count = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        c_row = group * M + pm * BM
        return group, pm * BM, c_row, group * M + M, pn * TILE.bn, k_start, gl.minimum(k_start + count, blocks), c_row
    else:
        pm, pn = tile_at(tile, gl.load(list_ptr), tiles_n, TILE.group_m)
        entry = list_ptr + (1 + pm) * 4
        row, end, group, begin = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        return group, row, row, end, pn * TILE.bn, 0, blocks if group < groups else 0, begin


@gluon.jit
def load_codes(operands, rings, bar, row, b_row, k, stage, one_subtile, SCALE_BYTES: gl.constexpr, TILE: gl.constexpr):
    """TMA loads of one K-block of a and b into a stage.  one_subtile: load only the first m_subtile of a.  SCALE_BYTES:
    bytes of scales that the caller loads on the same mbarrier."""
    a_desc, a_subtile_desc, b_desc = operands
    a_ring, b_ring = rings
    bytes: gl.constexpr = b_desc.block_type.nbytes + SCALE_BYTES
    if one_subtile:
        mbarrier.expect(bar, a_subtile_desc.block_type.nbytes + bytes)
        tma_load(a_subtile_desc, [row, k * 128], bar, a_ring.index(stage * TILE.a_loads).slice(0, 64))
    else:
        mbarrier.expect(bar, TILE.a_loads * a_desc.block_type.nbytes + bytes)
        load_rows(a_desc, a_ring, bar, row, k * 128, stage, TILE)
    tma_load(b_desc, [b_row, k * 128], bar, b_ring.index(stage))


@gluon.jit
def store_rows(
    acc, output, destination, buffer, row, column, bias_columns, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr
):
    """Epilogue and store of one m_subtile: TMA if all 64 rows belong to the group, else masked stores from registers.

    destination: (c_ptr, c_stride, N, begin, end).  bias_columns: number of columns that have a bias."""
    c_desc, _, _ = output
    c_ptr, c_stride, N, begin, end = destination
    acc = apply_epilogue(acc, output, buffer, column, bias_columns, BIAS, ACCUMULATE)
    if (begin <= row) & (row + 64 <= end):
        store_by_tma(acc, c_desc, buffer, row, column)
    else:
        m = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        ptrs = c_ptr + m.to(gl.int64)[:, None] * c_stride + n[None, :]
        gl.store(ptrs, acc.to(c_ptr.dtype.element_ty), mask=((m >= begin) & (m < end))[:, None] & (n < N)[None, :])
