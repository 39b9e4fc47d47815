"""What the Gluon kernels of Hopper share: a program's work, the ring, output tiles, and the pieces of shared tiles."""

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
from ._hopper_schedule import count_items, item_at, pieces_of


@gluon.jit
def _sharer():
    """This program's number among those that share tiles: from behind. One that waits for pieces waits for greater
    numbers, and the hardware starts programs in order: with few multiprocessors, these must be the ones that run."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def count_work(tiles, rounds, blocks, SHARED: gl.constexpr):
    """How many tiles, or pieces of tiles, this program works on."""
    if SHARED:
        return count_items(_sharer(), gl.num_programs(0), tiles, rounds, blocks)
    else:
        return gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def work_at(item, tiles, rounds, blocks, SHARED: gl.constexpr):
    """A tile, and its blocks of K from, to."""
    if SHARED:
        return item_at(item, _sharer(), gl.num_programs(0), tiles, rounds, blocks)
    else:
        return gl.program_id(0) + item * gl.num_programs(0), 0, blocks


@gluon.jit
def allocate_blocks(desc, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Room for blocks of a descriptor's type and width. Each begins at a multiple of 128 bytes: elsewhere the copy
    engine cannot write, and says so only when it runs."""
    WIDTH: gl.constexpr = desc.block_type.shape[1]
    gl.static_assert(ROWS * WIDTH * desc.dtype.primitive_bitwidth % 1024 == 0, "blocks of whole 128 bytes")
    return gl.allocate_shared_memory(desc.dtype, [COUNT, ROWS, WIDTH], desc.layout)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, CLUSTER: gl.constexpr):
    """For each multiprocessor of a cluster its own."""
    layout: gl.constexpr = mbarrier.MBarrierLayout([[1]] if CLUSTER == 2 else [])
    return gl.allocate_shared_memory(gl.int64, [COUNT, CLUSTER], layout)


@gluon.jit
def ring_blocks(start, stop, TILE: gl.constexpr):
    """How many blocks pass through the ring for blocks of K from, to: whole runs."""
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
    """A tile's rows of codes, in as few copies as their number allows."""
    LOADS: gl.constexpr = TILE.a_loads
    ROWS: gl.constexpr = a_ring.shape[1]
    for load in gl.static_range(LOADS):
        to = a_ring.index(stage * LOADS + load)
        if a_desc.block_type.shape[0] < ROWS:  # of few rows, the rest is never stored
            to = to.slice(0, a_desc.block_type.shape[0])
        tma_load(a_desc, [row + load * ROWS, column], bar, to)


@gluon.jit
def release_stage(empty, stage):
    """A block of the ring, to each producer that fills it."""
    for who in gl.static_range(len(empty)):
        mbarrier.arrive(empty[who].index(stage), count=1)


@gluon.jit
def skip_blocks(full, empty, stage, phase, count, STAGES: gl.constexpr):
    """A group whose rows all lie below the operand gives its blocks back."""
    for _ in range(count):
        mbarrier.wait(full.index(stage), phase)
        release_stage(empty, stage)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def opt_barrier(x):
    """x, in a way that the compiler cannot look through. It would move the sums of the first part below the next
    product, and the partial results of two parts do not fit in the registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def fetch_tile(output, buffer, bar, row, column):
    """What the product is added to, into the buffer that its sum will leave from."""
    c_desc, _, _ = output
    tma_store_wait(0)
    thread_barrier()  # of all threads that have stored from it
    mbarrier.expect(bar, c_desc.block_type.nbytes // gl.num_ctas())
    tma_load(c_desc, [row, column], bar, buffer)


@gluon.jit
def finished(acc, output, buffer, column, N, BIAS: gl.constexpr, ADD: gl.constexpr):
    """Sums with the bias, or with what the buffer was filled with, added in fp32."""
    _, _, bias_ptr = output
    if BIAS:
        n = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if ADD:
        acc = acc + buffer.load(acc.type.layout).to(gl.float32)
    return acc


@gluon.jit
def copy_out(acc, c_desc, buffer, row, column):
    """To memory by the copy engine."""
    buffer.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row, column], buffer)


@gluon.jit
def store_tile(acc, output, buffer, row, column, N, BIAS: gl.constexpr, ADD: gl.constexpr):
    """Bias, or what the buffer was filled with, added in fp32; then to memory."""
    c_desc, _, _ = output
    copy_out(finished(acc, output, buffer, column, N, BIAS, ADD), c_desc, buffer, row, column)


@gluon.jit
def gathered(acc, place, part, sizes, TILE: gl.constexpr):
    """A piece of a shared tile. Whoever has the tile's first blocks adds the others' pieces to its own, in their order;
    the others leave theirs in the workspace, and tell.

    A tile's first blocks are the last work of their program, and all others' first: it seldom waits, and whom it waits
    for waits for nobody. Who does what is known beforehand, so the warps of a group cannot disagree.

    Returns the sum, and whether this program has it.
    """
    counters, pieces, tile = place
    _, _, K, _, tiles_m, tiles_n, rounds = sizes
    parts: gl.constexpr = TILE.warpgroups * TILE.m_subtiles
    program, programs, tiles, blocks = _sharer(), gl.num_programs(0), tiles_m * tiles_n, gl.cdiv(K, 128)
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    n = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    counter = counters + (tile - rounds * programs) * parts + part
    inside = pieces + part * (64 * TILE.bn) + m[:, None] * TILE.bn + n[None, :]
    begin, end = pieces_of(tile, programs, tiles, rounds, blocks)
    adds = program == begin
    if adds:
        while gl.load(counter, volatile=True) < end - begin - 1:
            pass
        thread_barrier()  # all threads have seen it before one takes it back
        gl.atomic_xchg(counter, 0, sem="acquire", scope="gpu")  # for the next launch
        thread_barrier()
        for other in range(begin + 1, end):
            # past the first-level cache, which does not see what other multiprocessors write
            acc = acc + gl.load(inside + other.to(gl.int64) * (parts * 64 * TILE.bn), cache_modifier=".cg")
    else:
        gl.store(inside + program.to(gl.int64) * (parts * 64 * TILE.bn), acc)
        thread_barrier()  # all threads have stored before one tells
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
    return acc, adds
