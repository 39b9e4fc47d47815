"""Weight-only GEMM for Hopper, up to 64 rows of x: packed weights are decoded in registers and multiplied from there.

    out[m, n] = sum over k of x[m, k] * w[n, k]        x bf16; w MXFP4, NVFP4 or MXFP8 (`packed.py`), or bf16

With few rows a GEMM is a read of the weights. They are the 64-row operand of wgmma and x lies in shared memory, as in
`_hopper_rows_kernel`. A producer warp fills the stages by TMA; four consumer warpgroups own 64 rows of a tile each.

**Decoding.** `packed.py` places bits so that shifts and masks leave sign, exponent and mantissa of a code where bf16
has them. That pattern is the value times 2^-126 (E2M1) or 2^-120 (E4M3), subnormal codes included. One multiplication
in bf16, by the block scale times the inverse power, finishes it exactly.

**Batch invariance.** The bits of out[m, n] depend on row m of x, on row n of w, on (N, K) and on the number of SMs:

- K is cut in units of 256 by `heuristics_weights.schedule`, which M does not enter;
- within a cut one fp32 accumulator per output takes the products in K order, 16 at a time, by m64nXk16 for every M. The
  number of tokens X of a tile and the K of a stage change neither the order nor the groups of 16;
- the CTA with a tile's first units adds the partials of the others in K order, each once. It adds no zeros for partials
  that do not exist: they would turn -0 into +0 for some tiles only;
- rows past M are zeros from TMA, computed and not stored. Rows past 64 are further launches of the same schedule.

It relies on one property of the hardware, which tests on a GPU check: the sum within m64nXk16 does not depend on X.

**Programmatic dependent launch.** Weights are loaded before the kernel in front has ended, x afterwards. Every write of
this kernel follows a read of x. Weights must have been written before the kernel in front started.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: RUF005 - lists of constexprs are not unpacked

from ._gluon import gl, gluon, mbarrier, thread_barrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from ._hopper_common import allocate_barriers, next_stage
from ._hopper_schedule import cta_of_k_block, k_block_range

# $4: two halves of four E2M1 codes each.  $0 to $3: code i of both halves times its scale.  $5: bf16 scales of codes 0
# and 2, low half first.  $7: of codes 1 and 3.  ($6 and $8 repeat them for the second half.)
E2M1_ASM = gl.constexpr("""{ .reg .b32 a, b, s; .reg .b16 s0, s1, s2, s3;
mov.b32 {s0, s2}, $5;
mov.b32 {s1, s3}, $7;
and.b32 a, $4, 0x81C081C0;
mov.b32 s, {s0, s0};
mul.rn.bf16x2 $0, a, s;
shf.r.wrap.b32 a, $4, $4, 4;
and.b32 a, a, 0x81C081C0;
mov.b32 s, {s1, s1};
mul.rn.bf16x2 $1, a, s;
shl.b32 a, $4, 6;
and.b32 a, a, 0x81C081C0;
mov.b32 s, {s2, s2};
mul.rn.bf16x2 $2, a, s;
shf.r.wrap.b32 a, $4, $4, 6;
and.b32 a, a, 0x81808180;
shl.b32 b, $4, 2;
lop3.b32 a, b, 0x00400040, a, 0xEA;
mov.b32 s, {s3, s3};
mul.rn.bf16x2 $3, a, s; }""")

# $2: two halves of two E4M3 codes each.  $0: low bytes, $1: high bytes, times their scales.  $3: both bf16 scales.
E4M3_ASM = gl.constexpr("""{ .reg .b32 a, b, s; .reg .b16 s0, s1;
mov.b32 {s0, s1}, $3;
shl.b32 a, $2, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, $2, 4;
lop3.b32 a, b, 0x07F007F0, a, 0xEA;
mov.b32 s, {s0, s0};
mul.rn.bf16x2 $0, a, s;
and.b32 a, $2, 0x80008000;
shr.b32 b, $2, 4;
lop3.b32 a, b, 0x07F007F0, a, 0xEA;
mov.b32 s, {s1, s1};
mul.rn.bf16x2 $1, a, s; }""")

# $1: E4M3 scales at the bits of bf16, 2^-120 times their value.  $0: 2^118 times their value, 2^119 twice, exactly.
E4M3_SCALE_ASM = gl.constexpr("""{ .reg .b32 a, c;
mov.b32 c, 0x7B007B00;
mul.rn.bf16x2 a, $1, c;
mul.rn.bf16x2 $0, a, c; }""")

LAUNCH_DEPENDENTS_ASM = gl.constexpr("griddepcontrol.launch_dependents; // $0")
WAIT_ASM = gl.constexpr("griddepcontrol.wait; // $0")


@gluon.jit
def _units(units):
    """Stream-K index of this CTA, in reverse launch order (`_hopper_common`), and its units of K [begin, end)."""
    cta = gl.num_programs(0) - 1 - gl.program_id(0)
    begin, end = k_block_range(cta, gl.num_programs(0), units)
    return cta, begin, end


# ---- producer --------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_weights(operands, rings, full, step, steps, stage, FORMAT: gl.constexpr, TILE: gl.constexpr):
    """Expect all bytes of a stage and load its weights: 256 rows by TILE.chunks * 64 of K.  steps: of a tile."""
    w_desc, s_desc, x_desc = operands
    w_ring, s_ring, _ = rings
    bar = full.index(stage)
    x_bytes: gl.constexpr = TILE.chunks * x_desc.block_type.nbytes
    CHUNKS: gl.constexpr = TILE.chunks
    if FORMAT == "bf16":
        mbarrier.expect(bar, CHUNKS * w_desc.block_type.nbytes + x_bytes)
        for i in gl.static_range(CHUNKS):
            k = (step % steps * TILE.chunks + i) * 64
            tma_load(w_desc, [step // steps * 256, k], bar, w_ring.index(stage * TILE.chunks + i))
    else:
        mbarrier.expect(bar, w_desc.block_type.nbytes + s_desc.block_type.nbytes + x_bytes)
        tma_load(w_desc, [step * w_desc.block_type.shape[0], 0], bar, w_ring.index(stage))
        tma_load(s_desc, [step * s_desc.block_type.shape[0], 0], bar, s_ring.index(stage))


@gluon.jit
def _load_tokens(operands, rings, full, step, steps, stage, TILE: gl.constexpr):
    _, _, x_desc = operands
    _, _, x_ring = rings
    CHUNKS: gl.constexpr = TILE.chunks
    for i in gl.static_range(CHUNKS):
        k = (step % steps * TILE.chunks + i) * 64  # past the end TMA loads zeros
        tma_load(x_desc, [0, k], full.index(stage), x_ring.index(stage * TILE.chunks + i))


@gluon.jit
def _producer(operands, rings, bars, sizes, FORMAT: gl.constexpr, TILE: gl.constexpr):
    full, empty = bars
    _, _, units, tile_units = sizes
    STEPS: gl.constexpr = 4 // TILE.chunks  # stages of a unit
    steps = tile_units * STEPS
    _, begin, end = _units(units)
    begin, end = begin * STEPS, end * STEPS
    ahead = gl.minimum(end - begin, TILE.stages)
    if TILE.pdl:
        gl.inline_asm_elementwise(LAUNCH_DEPENDENTS_ASM, "=r", [], gl.int32, is_pure=False, pack=1)
    for i in range(ahead):
        _load_weights(operands, rings, full, begin + i, steps, i, FORMAT, TILE)
    if TILE.pdl:
        gl.inline_asm_elementwise(WAIT_ASM, "=r", [], gl.int32, is_pure=False, pack=1)
    for i in range(ahead):
        _load_tokens(operands, rings, full, begin + i, steps, i, TILE)
    stage, phase = 0, 0
    for step in range(begin + ahead, end):
        mbarrier.wait(empty.index(stage), phase)
        _load_weights(operands, rings, full, step, steps, stage, FORMAT, TILE)
        _load_tokens(operands, rings, full, step, steps, stage, TILE)
        stage, phase = next_stage(stage, phase, TILE.stages)


# ---- consumers: a chunk is 64 rows by 64 of K ------------------------------------------------------------------------


@gluon.jit
def _load_codes(codes, LOADS: gl.constexpr, A: gl.constexpr):
    """Codes of a chunk, int16 [64, 16 * LOADS], as an operand of wgmma.  codes: its [4 * LOADS, 256] in shared memory,
    of which each thread has 16 bytes per load."""
    WORDS: gl.constexpr = [[0, 1], [0, 2], [0, 4]]  # eight of 16 bits
    LANES: gl.constexpr = [[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]]
    if LOADS == 1:
        once: gl.constexpr = gl.DistributedLinearLayout(WORDS, LANES, [[1, 0], [2, 0]], [], [4, 256])
        h = codes.load(once).reshape((4, 8, 4, 2, 2, 2)).permute((0, 4, 1, 3, 2, 5)).reshape((64, 16))
    else:
        twice: gl.constexpr = gl.DistributedLinearLayout(WORDS + [[4, 0]], LANES, [[1, 0], [2, 0]], [], [8, 256])
        h = codes.load(twice).reshape((2, 4, 8, 4, 2, 2, 2)).permute((1, 5, 2, 0, 4, 3, 6)).reshape((64, 32))
    return gl.convert_layout(h, A, assert_trivial=True)


@gluon.jit
def _load_scales(scales, A: gl.constexpr):
    """Four scale bytes of each row, int32 [64].  scales: [1, 64] in shared memory; a thread has two rows, 8 bytes."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]], [[0, 0], [0, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [], [1, 64]
    )
    s = scales.load(layout).reshape((4, 8, 2)).permute((0, 2, 1)).reshape((64,))
    return gl.convert_layout(s, gl.SliceLayout(1, A), assert_trivial=True)


@gluon.jit
def _as_bf16_scale(bits):
    return gl.inline_asm_elementwise(E4M3_SCALE_ASM, "=r,r", [bits], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _decode_e2m1(h, even, odd):
    """bf16 [64, 64] from int16 [64, 16]: K is code i, then the half."""
    i0, i1, i2, i3 = gl.inline_asm_elementwise(
        E2M1_ASM, "=r,=r,=r,=r,r,r,r,r,r", [h, even[:, None], odd[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)  # fmt: skip
    w = gl.join(gl.join(i0, i1), gl.join(i2, i3)).permute((0, 3, 2, 1)).reshape((64, 64))
    return gl.convert_layout(w, h.type.layout, assert_trivial=True)


@gluon.jit
def _decode_e4m3(h, scale):
    """bf16 [64, 64] from int16 [64, 32]: K is the byte of a half, then the half."""
    i0, i1 = gl.inline_asm_elementwise(
        E4M3_ASM, "=r,=r,r,r,r", [h, scale[:, None]], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )
    w = gl.join(i0, i1).permute((0, 2, 1)).reshape((64, 64))
    return gl.convert_layout(w, h.type.layout, assert_trivial=True)


@gluon.jit
def _weights(rings, stage, CHUNK: gl.constexpr, GROUP: gl.constexpr, FORMAT: gl.constexpr, TILE: gl.constexpr,
             A: gl.constexpr):  # fmt: skip
    """A chunk of weights, bf16 [64, 64]: in shared memory for bf16, else decoded to registers."""
    w_ring, s_ring, _ = rings
    if FORMAT == "bf16":
        return w_ring.index(stage * TILE.chunks + CHUNK).slice(GROUP * 64, 64)
    else:
        PART: gl.constexpr = CHUNK // 2 * 4 + GROUP  # 64 rows by a block of 128 of K
        LOADS: gl.constexpr = 2 if FORMAT == "mxfp8_e4m3" else 1
        codes = w_ring.index(stage).slice((PART * 2 + CHUNK % 2) * (4 * LOADS), 4 * LOADS)
        h = _load_codes(codes, LOADS, A)
        if FORMAT == "nvfp4":
            s = _load_scales(s_ring.index(stage).slice(PART * 2 + CHUNK % 2, 1), A)
            return _decode_e2m1(h, _as_bf16_scale((s << 4) & 0x07F007F0), _as_bf16_scale((s >> 4) & 0x07F007F0))
        else:
            s = _load_scales(s_ring.index(stage).slice(PART, 1), A)
            if CHUNK % 2 == 0:
                s = (s << 7) & 0x7F807F80
            else:
                s = (s >> 1) & 0x7F807F80
            if FORMAT == "mxfp4":
                return _decode_e2m1(h, s, s)
            else:
                return _decode_e4m3(h, s)


@gluon.jit
def _reduce_partials(acc, workspace, unit, cta, sizes, GROUP: gl.constexpr):
    """Stream-K fix-up of 64 rows, as `_hopper_common.publish_or_reduce_partial`: the CTA with the tile's first unit
    adds the partials of the others, in K order. Several are loaded together, since each load is a trip to L2.

    Returns the sum, and whether this CTA owns the tile.
    """
    counters, partials = workspace
    _, _, units, tile_units = sizes
    BN: gl.constexpr = acc.shape[1]
    BATCH: gl.constexpr = 128 // BN if BN > 16 else 8
    first = unit // tile_units * tile_units
    begin = cta_of_k_block(first, gl.num_programs(0), units)
    last = cta_of_k_block(first + tile_units - 1, gl.num_programs(0), units)
    n = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    m = gl.arange(0, BN, gl.SliceLayout(0, acc.type.layout))
    at = partials + GROUP * (64 * BN) + n[:, None] * BN + m[None, :]
    counter = counters + begin * 4 + GROUP
    owns = cta == begin
    if owns:
        if last > begin:
            while gl.load(counter, volatile=True) < last - begin:
                pass
            thread_barrier()  # all threads have seen the count before one resets it
            gl.atomic_xchg(counter, 0, sem="acquire", scope="gpu")  # for the next launch
            thread_barrier()
            for other in range(begin + 1, last + 1, BATCH):
                some = ()
                for i in gl.static_range(BATCH):
                    # past L1, which does not see the writes of other SMs; the last partial again instead of one past it
                    some += (gl.load(at + gl.minimum(other + i, last) * (256 * BN), cache_modifier=".cg"),)
                for i in gl.static_range(BATCH):
                    acc = gl.where(other + i <= last, acc + some[i], acc)
    else:
        gl.store(at + cta * (256 * BN), acc)
        thread_barrier()  # all threads have stored before one increments the counter
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
    return acc, owns


@gluon.jit
def _store(acc, output, row, sizes, FORMAT: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr):
    """Epilogue in fp32: tensor scale, bias, one rounding. 16-bit outputs of enough tokens are turned around in shared
    memory for stores of 16 bytes; fp32 ones fill sectors of 32 bytes as they are."""
    out_ptr, scale_ptr, bias_ptr, m_stride = output
    M, N, _, _ = sizes
    BN: gl.constexpr = acc.shape[1]
    if FORMAT == "nvfp4":
        acc = acc * 256.0  # weights were decoded to 2^-8 times their value
    if SCALED:
        acc = acc * gl.load(scale_ptr)
    if BIAS:
        n = row + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    result = acc.to(out_ptr.dtype.element_ty)
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    turned: gl.constexpr = BN >= 16 and out_ptr.dtype.element_ty.primitive_bitwidth == 16
    layout: gl.constexpr = wide if turned else acc.type.layout
    n = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    m = gl.arange(0, BN, gl.SliceLayout(0, layout))
    inside = (n < N)[:, None] & (m < M)[None, :]
    at = out_ptr + (m[None, :] * m_stride + n[:, None])  # 32 bits hold offsets within 64 rows
    gl.store(at, gl.convert_layout(result, layout), mask=inside)


@gluon.jit
def _consumer(
    output, workspace, rings, bars, sizes, GROUP: gl.constexpr,
    FORMAT: gl.constexpr, TILE: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    full, empty = bars
    _, _, x_ring = rings
    _, _, units, tile_units = sizes
    BN: gl.constexpr = TILE.bn
    CHUNKS: gl.constexpr = TILE.chunks
    STEPS: gl.constexpr = 4 // CHUNKS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    a: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    stage, phase = 0, 0
    cta, unit, end = _units(units)
    while unit < end:
        stop = gl.minimum(end, (unit // tile_units + 1) * tile_units)
        acc = gl.zeros((64, BN), gl.float32, mma)
        for _step in range(unit * STEPS, stop * STEPS):
            mbarrier.wait(full.index(stage), phase)
            partial = acc
            for i in gl.static_range(CHUNKS):
                w = _weights(rings, stage, i, GROUP, FORMAT, TILE, a)
                x = x_ring.index(stage * TILE.chunks + i).permute((1, 0))
                partial = warpgroup_mma(w, x, partial, is_async=True)
            # in the same iteration: ptxas serialises an MMA with register operands that is in flight over the back edge
            acc = warpgroup_mma_wait(0, deps=(partial,))
            mbarrier.arrive(empty.index(stage), count=1)  # codes and scales have been read: the MMA took them
            stage, phase = next_stage(stage, phase, TILE.stages)
        acc, owns = _reduce_partials(acc, workspace, unit, cta, sizes, GROUP)
        if owns:
            _store(acc, output, (unit // tile_units * 4 + GROUP) * 64, sizes, FORMAT, SCALED, BIAS)
        unit = stop


# N and the stride stay specialized, for 16-byte stores.
@gluon.jit(do_not_specialize=["M", "units", "tile_units"])
def weights_kernel(
    w_desc, s_desc, x_desc, out_ptr, scale_ptr, bias_ptr, counters, partials, M, N, m_stride, units, tile_units,
    FORMAT: gl.constexpr, TILE: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """TILE: `heuristics_weights.WeightTile`.  units: of 256 rows by 256 of K, tile_units of them in a tile.  SCALED:
    the weight has a tensor scale."""
    STAGES: gl.constexpr = TILE.stages
    BUFFERS: gl.constexpr = TILE.chunks if FORMAT == "bf16" else 1
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BUFFERS] + w_desc.block_type.shape, w_desc.layout)
    if FORMAT == "bf16":
        s_ring = w_ring
    else:
        s_ring = gl.allocate_shared_memory(s_desc.dtype, [STAGES] + s_desc.block_type.shape, s_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILE.chunks] + x_desc.block_type.shape, x_desc.layout)
    full = allocate_barriers(STAGES)
    empty = allocate_barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=4)
    operands, rings, bars = (w_desc, s_desc, x_desc), (w_ring, s_ring, x_ring), (full, empty)
    output = (out_ptr, scale_ptr, bias_ptr, m_stride)
    workspace = (counters, partials)
    sizes = (M, N, units, tile_units)
    gl.warp_specialize([
        (_consumer, (output, workspace, rings, bars, sizes, 0, FORMAT, TILE, SCALED, BIAS)),
        (_consumer, (output, workspace, rings, bars, sizes, 1, FORMAT, TILE, SCALED, BIAS)),
        (_consumer, (output, workspace, rings, bars, sizes, 2, FORMAT, TILE, SCALED, BIAS)),
        (_consumer, (output, workspace, rings, bars, sizes, 3, FORMAT, TILE, SCALED, BIAS)),
        (_producer, (operands, rings, bars, sizes, FORMAT, TILE)),
    ], [4, 4, 4, 1], [112, 112, 112, 32])  # fmt: skip
