"""The cast kernel and its companions: which rows a program takes, from what source, and which operands it writes.

One kernel makes the row operand, the column operand, or both from one read (`_write.py` writes them); its sources are a
tensor, gathered or weighted rows, SwiGLU, its backward, and RMSNorm. Group ends are read on the device. Offsets are
64-bit.
"""

# The language of kernels is not Python: a constexpr stands for its value, and functions have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from ._device import locate, round_to_bf16
from ._device_codes import takes_words
from ._device_fused import rstd, swiglu, swiglu_backward
from ._tiles import hold, load_pairs, rotate_columns, rotate_rows, tensor_factors, unpack, values
from ._write import write_column, write_row


@triton.jit
def _place(offs_ptr, e, position, M, groups, GROUPS: tl.constexpr, ALIGN: tl.constexpr):
    """What the tile at a (padded) position covers: its group, its first source row, the group's first row and end, and
    whether there is a group. Past the last group come the rows of no group, under the number `groups`; without groups
    every matrix is one."""
    if GROUPS:
        group, row0, start, end = locate(offs_ptr, groups, position, M, GROUPS, ALIGN)
        return group, row0, start, end, group < groups
    else:
        return e, position, 0, M, e >= 0


@triton.jit
def _load_tile(
    x_ptr, index_ptr, row0, rows_end, pk, columns, stride_m, stride_k,
    MODE: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
    NARROW: tl.constexpr, TWICE: tl.constexpr = False, weights_ptr=None, FAST: tl.constexpr = False,
):  # fmt: skip
    """The tile [MQ, J, W] at (row0, pk * BK) of a matrix, as it is held; strides are in words unless MODE is "any".
    NARROW: a thread takes two neighbouring pairs, not four.  TWICE: behind the last column comes the first again.
    weights_ptr: a factor of each row, which is multiplied here, where values still lie as they were loaded.

    Loaded as a matrix whose rows are in the order (j, mq): then lanes and warps take the MQ groups and a thread keeps
    the J rows of one, by a rule that every Triton has for matrices. Among three dimensions versions choose differently.
    """
    i = tl.arange(0, J * MQ)[:, None]
    m = (i % MQ) * J + i // MQ
    w = pk * (BK // 2) + tl.arange(0, BK // 2)[None, :]
    if TWICE:
        w = tl.where(w < columns // 2, w, w - columns // 2)
    if NARROW:
        w = tl.max_contiguous(w, (1, 2))
    ok = m < rows_end - row0
    if weights_ptr is not None:
        # before the values: of two loads the compiler takes the layout of the later one for what both go into, and in
        # this one's a whole tile of fp32 would cross threads
        factor = tl.load(weights_ptr + row0 + m, mask=ok, other=0.0)
    if GATHER:
        source = tl.load(index_ptr + row0 + m, mask=ok, other=-1).to(tl.int64)
        lo, hi = load_pairs(x_ptr, source * stride_m, w, ok & (source >= 0), columns, stride_k, MODE, EVEN)
    else:
        # within a tile 32 bits are enough, and 64-bit offsets for each row would cost a third of the registers
        first = x_ptr + tl.cast(row0, tl.int64) * stride_m
        lo, hi = load_pairs(first, m * stride_m, w, ok, columns, stride_k, MODE, EVEN)
    if weights_ptr is not None:
        lo, hi = values(lo, hi, MODE)
        first, second = factor, factor
        if not EVEN.columns:  # what lies behind the last column has no sign, whatever the factor of its row has
            first = tl.where(2 * w < columns, factor, 0.0)
            second = tl.where(2 * w + 1 < columns, factor, 0.0)
        lo, hi = _rounded(lo * first, hi * second, x_ptr, MODE, FAST)
    lo = tl.permute(tl.reshape(lo, (J, MQ, BK // 2)), (1, 0, 2))
    hi = tl.permute(tl.reshape(hi, (J, MQ, BK // 2)), (1, 0, 2))
    return lo, hi


@triton.jit
def _load_source(
    source, e, row0, rows_end, pk, M, K,
    SOURCE: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The tile of what is cast and, for a backward of SwiGLU, the tile beside it and that of its forward: as they are
    held.

    plain: x itself.  swiglu: x is [gate | up], the cast tensor its half.  swiglu_backward: y is the gradient of that,
    and the cast tensor [gradient of gate | gradient of up]; both halves at once, where they are whole tiles, else
    (swiglu_backward_any) each tile by itself.  rmsnorm: y is rstd [rows], z the weight [columns].
    rmsnorm_rows: the same for tiles that hold whole rows; rstd is computed and stored.  weighted: y is a factor of each
    row. What is computed is rounded to the type of x.
    """
    x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m, y_k, share, eps = source
    x_ptr += e * stride_e
    if SOURCE == "plain":
        lo, hi = _load_tile(
            x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW
        )  # fmt: skip
        return lo, hi, lo, hi, lo, hi
    elif SOURCE == "weighted":
        lo, hi = _load_tile(
            x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW,
            weights_ptr=y_ptr, FAST=FAST,
        )  # fmt: skip
        return lo, hi, lo, hi, lo, hi
    elif SOURCE == "rmsnorm" or SOURCE == "rmsnorm_rows":
        a, b = _load_tile(
            x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW
        )  # fmt: skip
        lo, hi = values(a, b, MODE)
        m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
        at = y_ptr + e * M + row0 + m
        if SOURCE == "rmsnorm":
            factor = tl.load(at, mask=m < rows_end - row0, other=0.0)
        else:
            pairs: tl.constexpr = (MQ * J, BK // 2)
            factor = rstd(tl.reshape(lo, pairs), tl.reshape(hi, pairs), share, eps, MQ * J, BK // 2)
            factor = tl.reshape(factor, (MQ, J, 1))
            tl.store(at, factor, mask=m < rows_end - row0)
        w = pk * (BK // 2) + tl.arange(0, BK // 2)[None, None, :]
        if z_ptr.dtype.element_ty == tl.int32:  # of x's type, and in pairs
            first, second = unpack(tl.load(z_ptr + w, mask=w < K // 2, other=0), MODE)
        else:
            first = tl.load(z_ptr + 2 * w, mask=2 * w < K, other=0.0).to(tl.float32)
            second = tl.load(z_ptr + 2 * w + 1, mask=2 * w + 1 < K, other=0.0).to(tl.float32)
        lo, hi = _rounded((lo * factor) * first, (hi * factor) * second, x_ptr, MODE, FAST)
        return lo, hi, lo, hi, lo, hi
    else:
        H = K if SOURCE == "swiglu" else K // 2
        TWICE: tl.constexpr = SOURCE == "swiglu_backward_any"
        up_ptr = x_ptr + (H * stride_k if MODE == "any" else H // 2)
        steps = (stride_m, stride_k)
        a, b = _load_tile(x_ptr, index_ptr, row0, rows_end, pk, H, *steps, MODE, EVEN, GATHER, J, MQ, BK, NARROW, TWICE)
        c, d = _load_tile(
            up_ptr, index_ptr, row0, rows_end, pk, H, *steps, MODE, EVEN, GATHER, J, MQ, BK, NARROW, TWICE
        )
        gate_lo, gate_hi = values(a, b, MODE)
        up_lo, up_hi = values(c, d, MODE)
        if SOURCE == "swiglu":
            lo, hi = _rounded(swiglu(gate_lo, up_lo), swiglu(gate_hi, up_hi), x_ptr, MODE, FAST)
            return lo, hi, lo, hi, lo, hi
        else:
            y_ptr += e * y_e
            a, b = _load_tile(
                y_ptr, index_ptr, row0, rows_end, pk, H, y_m, y_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW, TWICE
            )
            dy_lo, dy_hi = values(a, b, MODE)
            gate_lo, up_lo, y_lo = swiglu_backward(dy_lo, gate_lo, up_lo)
            gate_hi, up_hi, y_hi = swiglu_backward(dy_hi, gate_hi, up_hi)
            if TWICE:
                is_gate = pk * (BK // 2) + tl.arange(0, BK // 2)[None, None, :] < H // 2
                lo, hi = tl.where(is_gate, gate_lo, up_lo), tl.where(is_gate, gate_hi, up_hi)
                lo, hi = _rounded(lo, hi, x_ptr, MODE, FAST)
                return lo, hi, lo, hi, lo, hi
            else:
                gate_lo, gate_hi = _rounded(gate_lo, gate_hi, x_ptr, MODE, FAST)
                up_lo, up_hi = _rounded(up_lo, up_hi, x_ptr, MODE, FAST)
                y_lo, y_hi = _rounded(y_lo, y_hi, x_ptr, MODE, FAST)
                return gate_lo, gate_hi, up_lo, up_hi, y_lo, y_hi


@triton.jit
def _rounded(lo, hi, x_ptr, MODE: tl.constexpr, FAST: tl.constexpr):
    """fp32 pairs rounded to the source's type, as they are held."""
    if MODE == "any" and x_ptr.dtype.element_ty == tl.bfloat16:
        return round_to_bf16(lo), round_to_bf16(hi)
    elif MODE == "any" and x_ptr.dtype.element_ty == tl.float16:
        return lo.to(tl.float16).to(tl.float32), hi.to(tl.float16).to(tl.float32)
    else:
        return hold(lo, hi, MODE, FAST)


@triton.jit
def _write_tile(
    lo, hi, row, col, sums_ptr, e, pk, pm, place, position, is_first, M, K, length, tiles_m, zero,
    ROW: tl.constexpr, COL: tl.constexpr, HELD: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    GROUPED: tl.constexpr, SUMS: tl.constexpr, COUNT: tl.constexpr, BK: tl.constexpr, IS_SOURCE: tl.constexpr,
):  # fmt: skip
    """Write the operands of a tile. place: (group, first row, group's first row, its end, whether there is a group);
    row, col: the kernel's arguments for each.  IS_SOURCE: the tile was loaded, not computed."""
    group, row0, start, rows_end, inside = place
    if SUMS:
        low, high = values(lo, hi, HELD)
        low, high = tl.sum(tl.sum(low.to(tl.float64), 1), 0), tl.sum(tl.sum(high.to(tl.float64), 1), 0)
        k = pk * BK + tl.arange(0, BK)
        tl.store(sums_ptr + (e * tiles_m + pm) * K + k, tl.reshape(tl.join(low, high), (BK,)), mask=k < K)
    if COL is not None:
        data, scale, factor, amax, state, units, pitch, scales, count, stream, number, first_row, origin, stride = col
        factors = tensor_factors(amax, factor, group, inside, is_first, count, COUNT, COL)
        first = ((e * M + row0 - start) + first_row) * stride + origin
        random = (state, stream, group + number if GROUPED else e * 0, first, stride)
        write_column(
            data + e * K * units, scale + e * scales, lo, hi, position, length, inside, pk, K, units, pitch, factors,
            random, HELD, PACKED, EVEN, GROUPED and not EVEN.rows, COL,
        )  # fmt: skip
    if ROW is not None:
        if COL is not None and PACKED and not (IS_SOURCE and takes_words(HELD, ROW)):
            # Words that the compiler takes for new ones, so that it unpacks them once more: keeping the fp32 values of
            # a whole tile would leave room for two programs instead of three.
            lo = lo ^ zero
            hi = lo
        data, scale, factor, amax, state, units, pitch, scales, count, stream, number, first_row, origin, stride = row
        factors = tensor_factors(amax, factor, group, inside, is_first, count, COUNT, ROW)
        first = ((e * M + row0 - start) + first_row) * stride + origin
        random = (state, stream, group + number if GROUPED else e * 0, first, stride)
        write_row(
            data + e * M * units, scale + e * scales, lo, hi, row0, rows_end, M, pk, K, units, pitch, factors, random,
            HELD, PACKED, EVEN, ROW,
        )  # fmt: skip


@triton.jit
def _cast_tile(
    source, row, col, third, sums_ptr, place, numbers,
    ROW: tl.constexpr, COL: tl.constexpr, THIRD: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr,
    HELD: tl.constexpr, PACKED: tl.constexpr, LOADS: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr,
    GATHER: tl.constexpr, SUMS: tl.constexpr, COUNT: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Load a tile, or make it, and write its operands.  third: the column operand of what SwiGLU's backward is the
    backward of.  LOADS, EVEN: whether loads and stores must ask for rows and columns."""
    e, pk, pm, position, is_first, M, K, length, tiles_m, tiles_k, zero = numbers
    lo, hi, next_lo, next_hi, third_lo, third_hi = _load_source(
        source, e, place[1], place[3], pk, M, K, SOURCE, MODE, LOADS, GATHER, FAST, J, MQ, BK, NARROW
    )  # fmt: skip
    if THIRD is not None:  # first, so that it is not held while the others are written
        data, scale, units, pitch, scales = third
        write_column(
            data + e * (K // 2) * units, scale + e * scales, third_lo, third_hi, position, length, place[4], pk, K // 2,
            units, pitch, (1.0, 1.0), (None, 0, 0, 0, 0), HELD, PACKED, EVEN, GROUPED and not EVEN.rows, THIRD,
        )  # fmt: skip
    _write_tile(
        lo, hi, row, col, sums_ptr, e, pk, pm, place, position, is_first, M, K, length, tiles_m, zero,
        ROW, COL, HELD, PACKED, EVEN, GROUPED, SUMS, COUNT, BK, SOURCE == "plain",
    )  # fmt: skip
    if SOURCE == "swiglu_backward":
        _write_tile(
            next_lo, next_hi, row, col, sums_ptr, e, pk + tiles_k, pm, place, position, False, M, K, length, tiles_m,
            zero, ROW, COL, HELD, PACKED, EVEN, GROUPED, SUMS, COUNT, BK, False,
        )  # fmt: skip


# Numbers that tell the compiler nothing: it would make a kernel for each of their kinds (1, multiple of 16, other).
_PLAIN_NUMBERS = [
    "tiles_m", "tiles_k", "groups", "row_count", "col_count", "zero", "share", "eps",
    "row_stream", "row_group", "row_first", "row_origin", "row_stride",
    "col_stream", "col_group", "col_first", "col_origin", "col_stride",
]  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN_NUMBERS)
def cast_kernel(
    x_ptr, y_ptr, z_ptr, index_ptr, offs_ptr, sums_ptr,
    row_data, row_scale, row_global, row_amax, row_state, col_data, col_scale, col_global, col_amax, col_state,
    third_data, third_scale,
    M, K, stride_e, stride_m, stride_k, y_e, y_m, y_k, row_units, col_units, row_pitch, col_pitch, row_scales,
    col_scales, third_units, third_pitch, third_scales, length, tiles_m, tiles_k, groups, row_count, col_count, zero,
    share, eps,
    row_stream, row_group, row_first, row_origin, row_stride,
    col_stream, col_group, col_first, col_origin, col_stride,
    ROW: tl.constexpr, COL: tl.constexpr, THIRD: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr,
    HELD: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, INNER: tl.constexpr, GROUPS: tl.constexpr,
    GATHER: tl.constexpr, SUMS: tl.constexpr, COUNT: tl.constexpr, ALIGN: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr, DOWN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    e = (pid // tiles_k // tiles_m).to(tl.int64)
    if DOWN:
        pm, pk = pid % tiles_m, pid // tiles_m % tiles_k
    else:
        pk, pm = pid % tiles_k, pid // tiles_k % tiles_m
    position = pm * (MQ * J)
    place = _place(offs_ptr, e, position, M, groups, GROUPS, ALIGN)
    source = (x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m, y_k, share, eps)
    row = (row_data, row_scale, row_global, row_amax, row_state, row_units, row_pitch, row_scales, row_count,
           row_stream, row_group, row_first, row_origin, row_stride)  # fmt: skip
    col = (col_data, col_scale, col_global, col_amax, col_state, col_units, col_pitch, col_scales, col_count,
           col_stream, col_group, col_first, col_origin, col_stride)  # fmt: skip
    third = (third_data, third_scale, third_units, third_pitch, third_scales)
    numbers = (e, pk, pm, position, pid == 0, M, K, length, tiles_m, tiles_k, zero)
    if INNER is None:
        _cast_tile(
            source, row, col, third, sums_ptr, place, numbers, ROW, COL, THIRD, SOURCE, MODE, HELD, PACKED,
            EVEN, EVEN, GROUPS > 0, GATHER, SUMS, COUNT, FAST, J, MQ, BK, NARROW,
        )  # fmt: skip
    elif place[4] & (place[3] - place[1] >= MQ * J):
        # within a group, as nearly all tiles are: which rows are whose is not asked again
        _cast_tile(
            source, row, col, third, sums_ptr, place, numbers, ROW, COL, THIRD, SOURCE, MODE, HELD, PACKED,
            EVEN if GATHER else INNER, INNER, GROUPS > 0, GATHER, SUMS, COUNT, FAST, J, MQ, BK, NARROW,
        )  # fmt: skip
    else:
        _cast_tile(
            source, row, col, third, sums_ptr, place, numbers, ROW, COL, THIRD, SOURCE, MODE, HELD, PACKED,
            EVEN, EVEN, GROUPS > 0, GATHER, SUMS, COUNT, FAST, J, MQ, BK, NARROW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tiles_m", "tiles_k", "groups"])
def amax_kernel(
    x_ptr, y_ptr, z_ptr, index_ptr, offs_ptr, amax_ptr, M, K, stride_e, stride_m, stride_k, y_e, y_m, y_k,
    tiles_m, tiles_k, groups,
    PER_GROUP: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr, HELD: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, GATHER: tl.constexpr, ALIGN: tl.constexpr, FAST: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Largest pattern of the tensor, or of each group, as one side will see it: rotated, when it rotates."""
    pid = tl.program_id(0)
    pk, pm, e = pid % tiles_k, (pid // tiles_k) % tiles_m, (pid // tiles_k // tiles_m).to(tl.int64)
    group, row0, _, rows_end, inside = _place(offs_ptr, e, pm * (MQ * J), M, groups, GROUPS, ALIGN)
    source = (x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m, y_k, 0.0, 0.0)
    lo, hi, next_lo, next_hi, _, _ = _load_source(
        source, e, row0, rows_end, pk, M, K, SOURCE, MODE, EVEN, GATHER, FAST, J, MQ, BK, False
    )
    most = _tile_maximum(lo, hi, HELD, ROW, COL)
    if SOURCE == "swiglu_backward":
        most = tl.maximum(most, _tile_maximum(next_lo, next_hi, HELD, ROW, COL))
    tl.atomic_max(amax_ptr + (group if PER_GROUP else 0), most, mask=inside, sem="relaxed")


@triton.jit
def _tile_maximum(lo, hi, HELD: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr):
    lo, hi = values(lo, hi, HELD)
    if ROW is not None:
        lo, hi = rotate_rows(lo, hi, ROW)
    if COL is not None:
        lo, hi = rotate_columns(lo, COL), rotate_columns(hi, COL)
    most = tl.maximum(tl.abs(lo), tl.abs(hi), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(most.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["M", "K", "tiles_m", "groups"])
def colsum_kernel(
    sums_ptr, offs_ptr, out_ptr, M, K, tiles_m, groups, GROUPS: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Partial sums of tiles, added in their order: fp64 [matrices, tiles, K] -> fp32 [matrices or groups, K]."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    g = tl.program_id(1).to(tl.int64)
    first, last = g * tiles_m, (g + 1) * tiles_m
    if GROUPS:
        i = tl.arange(0, GROUPS)
        ends = tl.load(offs_ptr + i, mask=i < groups, other=0)
        starts = tl.load(offs_ptr + i - 1, mask=(i > 0) & (i < groups), other=0)
        tiles = tl.cdiv(tl.where(i < groups, ends - starts, 0), ALIGN) * (ALIGN // BM)
        first = tl.sum(tl.where(i < g, tiles, 0)).to(tl.int64)
        last = first + tl.sum(tl.where(i == g, tiles, 0))
    total = tl.zeros((BK,), tl.float64)
    tile = first
    while tile < last:  # the interpreter has no range over numbers of the device
        total += tl.load(sums_ptr + tile * K + k, mask=k < K, other=0.0)
        tile += 1
    tl.store(out_ptr + g * K + k, total.to(tl.float32), mask=k < K)
