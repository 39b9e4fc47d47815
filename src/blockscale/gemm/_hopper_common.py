"""Shared by the Gluon kernels for Hopper: stream-K work units, the pipeline stages, the epilogue and the fix-up."""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false

from ._gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
)
from ._hopper_schedule import count_work_units, ctas_of_split_tile, work_unit_at


@gluon.jit
def _stream_k_cta():
    """Stream-K index of this CTA, in reverse launch order. The fix-up waits for CTAs with greater indices. The hardware
    starts CTAs in order, so those run first even where few SMs are free."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def count_work(tiles, waves, blocks, STREAM_K: gl.constexpr):
    """Number of work units of this CTA: tiles, and with STREAM_K also K-ranges of split tiles."""
    if STREAM_K:
        return count_work_units(_stream_k_cta(), gl.num_programs(0), tiles, waves, blocks)
    else:
        return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def work_at(unit, tiles, waves, blocks, STREAM_K: gl.constexpr):
    """Work unit of this CTA: the tile, and its K-blocks [start, stop)."""
    if STREAM_K:
        return work_unit_at(unit, _stream_k_cta(), gl.num_programs(0), tiles, waves, blocks)
    else:
        return gl.program_id(0) + unit * gl.num_programs(0), 0, blocks


@gluon.jit
def allocate_blocks(desc, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Shared memory for COUNT blocks of ROWS rows, with the dtype, width and swizzle of a descriptor. Each block starts
    at a multiple of 128 bytes: TMA writes nowhere else, and the error appears only at run time."""
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    gl.static_assert(ROWS * WIDTH * desc.dtype.primitive_bitwidth % 1024 == 0, "blocks are multiples of 128 bytes")
    return gl.allocate_shared_memory(desc.dtype, [COUNT, ROWS, WIDTH], desc.layout)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """COUNT mbarriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def ring_blocks(start, stop, TILE: gl.constexpr):
    """Number of stages filled for K-blocks [start, stop): rounded up to a multiple of k_unroll."""
    return gl.cdiv(stop - start, TILE.k_unroll) * TILE.k_unroll


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def load_rows(a_desc, a_ring, bar, row, column, stage, TILE: gl.constexpr):
    """TMA loads of a tile's rows of codes: a_loads of them, since a box has a power of two of rows."""
    LOADS: gl.constexpr = TILE.a_loads
    ROWS: gl.constexpr = a_ring.shape[1]
    for load in gl.static_range(LOADS):
        to = a_ring.index(stage * LOADS + load)
        if a_desc.block_type.shape[0] < ROWS:  # small M: results of the other rows are never stored
            to = to.slice(0, a_desc.block_type.shape[0])
        tma_load(a_desc, [row + load * ROWS, column], bar, to)


@gluon.jit
def release_stage(empty, stage):
    """Release a stage to the producer."""
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def skip_blocks(full, empty, stage, phase, count, STAGES: gl.constexpr):
    """Release `count` stages unread, for a consumer warpgroup whose rows all lie past the end of operand or group."""
    for _ in range(count):
        mbarrier.wait(full.index(stage), phase)
        release_stage(empty, stage)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def opt_barrier(x):
    """x, hidden from the optimizer. It would sink the accumulation of the first m_subtile below the next MMA, and the
    partial results of two m_subtiles do not fit in the registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def load_out_tile(output, buffer, bar, row, column):
    """Start the TMA load of the output tile for `out +=`, into the buffer that the sum is stored from."""
    c_desc, _, _ = output
    tma_store_wait(0)
    thread_barrier()  # of all threads that stored from the buffer
    mbarrier.expect(bar, c_desc.block_type.nbytes)
    tma_load(c_desc, [row, column], bar, buffer)


@gluon.jit
def apply_epilogue(acc, output, buffer, column, N, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr):
    """Accumulator plus the bias, or plus the output tile in the buffer; in fp32."""
    _, _, bias_ptr = output
    if BIAS:
        n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if ACCUMULATE:
        acc = acc + buffer.load(acc.type.layout).to(gl.float32)
    return acc


@gluon.jit
def store_by_tma(acc, c_desc, buffer, row, column):
    """Round to the output's dtype, write to shared memory, start the TMA store."""
    buffer.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row, column], buffer)


@gluon.jit
def store_tile(acc, output, buffer, row, column, N, BIAS: gl.constexpr, ACCUMULATE: gl.constexpr):
    """Epilogue: bias or `out +=` in fp32, one rounding, TMA store."""
    c_desc, _, _ = output
    store_by_tma(apply_epilogue(acc, output, buffer, column, N, BIAS, ACCUMULATE), c_desc, buffer, row, column)


@gluon.jit
def publish_or_reduce_partial(acc, place, m_subtile, sizes, TILE: gl.constexpr):
    """Stream-K fix-up of one m_subtile of a split tile. The CTA that owns the tile's first K-block reduces the partials
    into its own, in K order. The other CTAs publish theirs in the workspace and increment the counter.

    The first K-blocks of a tile are the last work unit of their CTA, the later ones the first split unit of theirs.
    It seldom waits, and only on CTAs that publish before they wait themselves: no deadlock. The roles follow from the
    sizes, so the warps of a warpgroup cannot disagree.

    Returns the sum, and whether this CTA owns the tile.
    """
    counters, partials, tile = place
    _, _, K, _, tiles_m, tiles_n, waves = sizes
    m_subtiles: gl.constexpr = TILE.warpgroups * TILE.m_subtiles
    cta, ctas, tiles, blocks = _stream_k_cta(), gl.num_programs(0), tiles_m * tiles_n, gl.cdiv(K, 128)
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    counter = counters + (tile - waves * ctas) * m_subtiles + m_subtile
    inside = partials + m_subtile * (64 * TILE.bn) + m[:, None] * TILE.bn + n[None, :]
    begin, end = ctas_of_split_tile(tile, ctas, tiles, waves, blocks)
    owns = cta == begin
    if owns:
        while gl.load(counter, volatile=True) < end - begin - 1:
            pass
        thread_barrier()  # all threads have seen the count before one resets it
        gl.atomic_xchg(counter, 0, sem="acquire", scope="gpu")  # for the next launch
        thread_barrier()
        for other in range(begin + 1, end):
            # past L1, which does not see the writes of other SMs
            acc = acc + gl.load(inside + other.to(gl.int64) * (m_subtiles * 64 * TILE.bn), cache_modifier=".cg")
    else:
        gl.store(inside + cta.to(gl.int64) * (m_subtiles * 64 * TILE.bn), acc)
        thread_barrier()  # all threads have stored before one increments the counter
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
    return acc, owns
