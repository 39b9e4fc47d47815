"""What Hopper's grouped kernels share: which tiles a program takes, how codes are fetched and rows stored."""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ..gemm._gluon import gl, gluon, mbarrier, tma_load
from ..gemm._hopper_common import apply_epilogue, load_rows, store_by_tma
from ..gemm._hopper_schedule import count_rotated_tiles, rotated_tile_at, tile_at


@gluon.jit
def count_tiles(work, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    """How many tiles this program takes."""
    list_ptr, groups, M, N, _ = work
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64
    down = groups * gl.cdiv(M, BM) if K_GROUPED else gl.load(list_ptr)
    return count_rotated_tiles(gl.program_id(0), gl.num_programs(0), down * gl.cdiv(N, TILE.bn))


@gluon.jit
def place_of(item, work, TILE: gl.constexpr, K_GROUPED: gl.constexpr):
    """Where a program's next tile lies: its group; its first row of a; its first row and its group's end in c; its
    column; its blocks of K from, to: none for rows of no group, and for groups without tokens; and the first row of c
    that is its group's."""
    list_ptr, groups, M, N, K = work
    BM: gl.constexpr = TILE.warpgroups * TILE.m_subtiles * 64
    blocks, tiles_n = gl.cdiv(K, 128), gl.cdiv(N, TILE.bn)
    tile = rotated_tile_at(item, gl.program_id(0), gl.num_programs(0))
    if K_GROUPED:
        tiles_m = gl.cdiv(M, BM)
        entry = list_ptr + tile // (tiles_m * tiles_n) * 4
        pm, pn = tile_at(tile % (tiles_m * tiles_n), tiles_m, tiles_n, TILE.group_m)
        group, start, count = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        top = group * M + pm * BM
        return group, pm * BM, top, group * M + M, pn * TILE.bn, start, gl.minimum(start + count, blocks), top
    else:
        pm, pn = tile_at(tile, gl.load(list_ptr), tiles_n, TILE.group_m)
        entry = list_ptr + (1 + pm) * 4
        row, end, group, begin = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)
        return group, row, row, end, pn * TILE.bn, 0, blocks if group < groups else 0, begin


@gluon.jit
def fetch_codes(operands, rings, bar, row, b_row, k, stage, short, REST_BYTES: gl.constexpr, TILE: gl.constexpr):
    """A block of both operands.  short: of one part, the others' rows are not fetched.  REST_BYTES: beside them."""
    a_desc, part_desc, b_desc = operands
    a_ring, b_ring = rings
    bytes: gl.constexpr = b_desc.block_type.nbytes + REST_BYTES
    if short:
        mbarrier.expect(bar, part_desc.block_type.nbytes + bytes)
        tma_load(part_desc, [row, k * 128], bar, a_ring.index(stage * TILE.a_loads).slice(0, 64))
    else:
        mbarrier.expect(bar, TILE.a_loads * a_desc.block_type.nbytes + bytes)
        load_rows(a_desc, a_ring, bar, row, k * 128, stage, TILE)
    tma_load(b_desc, [b_row, k * 128], bar, b_ring.index(stage))


@gluon.jit
def store_rows(acc, output, c_place, buffer, row, column, biased, BIAS: gl.constexpr, ADD: gl.constexpr):
    """64 rows, of which those of the group are written.  biased: columns that have a bias."""
    c_desc, _, _ = output
    c_ptr, c_stride, N, begin, end = c_place
    acc = apply_epilogue(acc, output, buffer, column, biased, BIAS, ADD)
    if (begin <= row) & (row + 64 <= end):
        store_by_tma(acc, c_desc, buffer, row, column)
    else:
        m = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        at = c_ptr + m.to(gl.int64)[:, None] * c_stride + n[None, :]
        gl.store(at, acc.to(c_ptr.dtype.element_ty), mask=((m >= begin) & (m < end))[:, None] & (n < N)[None, :])
