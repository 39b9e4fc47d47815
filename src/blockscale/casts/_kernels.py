"""Triton kernels of the casts: cast, amax of a tensor, and reduction of partial column sums.

The cast kernel writes the row operand, the column operand, or both from one read (`_write.py` stores them). Its sources
are a tensor, gathered rows, rows times gate weights, SwiGLU, SwiGLU's backward, and RMSNorm. Group ends are read on the
device. Offsets are 64-bit.
"""

# Type checkers do not know Triton: a constexpr stands for its value, and parameters have no types.
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from ._device import locate, round_to_bf16
from ._device_codes import encodes_packed
from ._device_fused import rstd, swiglu, swiglu_backward
from ._tiles import load_pairs, rotate_columns, rotate_rows, round_and_pack, tensor_factors, to_fp32, unpack
from ._write import write_column, write_row


@triton.jit
def _locate_tile(offs_ptr, e, position, M, groups, GROUPS: tl.constexpr, ALIGN: tl.constexpr):
    """Location of the tile at a (padded) position: (group, first source row, group's first row, its end, inside).

    Rows past the last group belong to no group: their group index is `groups` and `inside` is false. Without groups,
    every matrix e is one group."""
    if GROUPS:
        group, row0, start, end = locate(offs_ptr, groups, position, M, GROUPS, ALIGN)
        return group, row0, start, end, group < groups
    else:
        return e, position, 0, M, e >= 0


@triton.jit
def _load_tile(
    x_ptr, index_ptr, row0, rows_end, pk, columns, stride_m, stride_k,
    MODE: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
    NARROW: tl.constexpr, WRAP: tl.constexpr = False, gate_weights_ptr=None, FAST: tl.constexpr = False,
):  # fmt: skip
    """Tile [MQ, J, W] at (row0, pk * BK) of a matrix, in its register form (`_tiles.py`).

    Strides are in packed words unless MODE is "any".  NARROW: a thread loads two neighbouring pairs, not four.
    WRAP: columns past the last one wrap to the first.  gate_weights_ptr: fp32 factor of each row, multiplied here, in
    the layout of the load.

    The load is 2-D with rows in the order (j, mq). Lanes and warps then take the MQ groups, and a thread keeps the J
    rows of one group. Every Triton version chooses this layout for 2-D loads; for 3-D loads versions differ.
    """
    i = tl.arange(0, J * MQ)[:, None]
    m = (i % MQ) * J + i // MQ
    w = pk * (BK // 2) + tl.arange(0, BK // 2)[None, :]
    if WRAP:
        w = tl.where(w < columns // 2, w, w - columns // 2)
    if NARROW:
        w = tl.max_contiguous(w, (1, 2))
    ok = m < rows_end - row0
    if gate_weights_ptr is not None:
        # Loaded before the values: Triton gives the product the layout of the later load. The layout of this load
        # would move a full fp32 tile across threads.
        factor = tl.load(gate_weights_ptr + row0 + m, mask=ok, other=0.0)
    if GATHER:
        source = tl.load(index_ptr + row0 + m, mask=ok, other=-1).to(tl.int64)
        lo, hi = load_pairs(x_ptr, source * stride_m, w, ok & (source >= 0), columns, stride_k, MODE, EVEN)
    else:
        # 32-bit offsets suffice within a tile; 64-bit offsets per row would cost a third of the registers
        first = x_ptr + tl.cast(row0, tl.int64) * stride_m
        lo, hi = load_pairs(first, m * stride_m, w, ok, columns, stride_k, MODE, EVEN)
    if gate_weights_ptr is not None:
        lo, hi = to_fp32(lo, hi, MODE)
        first, second = factor, factor
        if not EVEN.columns:  # zeros past the last column stay +0.0, also for a negative factor
            first = tl.where(2 * w < columns, factor, 0.0)
            second = tl.where(2 * w + 1 < columns, factor, 0.0)
        lo, hi = _round_to_source(lo * first, hi * second, x_ptr, MODE, FAST)
    lo = tl.permute(tl.reshape(lo, (J, MQ, BK // 2)), (1, 0, 2))
    hi = tl.permute(tl.reshape(hi, (J, MQ, BK // 2)), (1, 0, 2))
    return lo, hi


@triton.jit
def _load_source(
    source, e, row0, rows_end, pk, M, K,
    SOURCE: tl.constexpr, MODE: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Tile to cast, and for SwiGLU's backward two more tiles: gradient of up, recomputed activation. In register form.

    plain: x itself.  swiglu: x is [gate | up]; the result has half its columns.  swiglu_backward: y is the gradient of
    silu(gate) * up; the result is [gradient of gate | gradient of up], both halves at once where H is a multiple of the
    tile, else (swiglu_backward_any) one tile at a time.  rmsnorm: y is rstd [rows], z the weight [columns].
    rmsnorm_rows: the same for tiles that hold full rows; rstd is computed and stored.  weighted: y holds the gate
    weights, one factor per row. Computed values are rounded to the dtype of x.
    """
    x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m, y_k, inv_columns, eps = source
    x_ptr += e * stride_e
    if SOURCE == "plain":
        lo, hi = _load_tile(
            x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW
        )  # fmt: skip
        return lo, hi, lo, hi, lo, hi
    elif SOURCE == "weighted":
        lo, hi = _load_tile(
            x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW,
            gate_weights_ptr=y_ptr, FAST=FAST,
        )  # fmt: skip
        return lo, hi, lo, hi, lo, hi
    elif SOURCE == "rmsnorm" or SOURCE == "rmsnorm_rows":
        a, b = _load_tile(
            x_ptr, index_ptr, row0, rows_end, pk, K, stride_m, stride_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW
        )  # fmt: skip
        lo, hi = to_fp32(a, b, MODE)
        m = tl.arange(0, MQ)[:, None, None] * J + tl.arange(0, J)[None, :, None]
        at = y_ptr + e * M + row0 + m
        if SOURCE == "rmsnorm":
            factor = tl.load(at, mask=m < rows_end - row0, other=0.0)
        else:
            pairs: tl.constexpr = (MQ * J, BK // 2)
            factor = rstd(tl.reshape(lo, pairs), tl.reshape(hi, pairs), inv_columns, eps, MQ * J, BK // 2)
            factor = tl.reshape(factor, (MQ, J, 1))
            tl.store(at, factor, mask=m < rows_end - row0)
        w = pk * (BK // 2) + tl.arange(0, BK // 2)[None, None, :]
        if z_ptr.dtype.element_ty == tl.int32:  # packed pairs of x's dtype
            first, second = unpack(tl.load(z_ptr + w, mask=w < K // 2, other=0), MODE)
        else:
            first = tl.load(z_ptr + 2 * w, mask=2 * w < K, other=0.0).to(tl.float32)
            second = tl.load(z_ptr + 2 * w + 1, mask=2 * w + 1 < K, other=0.0).to(tl.float32)
        lo, hi = _round_to_source((lo * factor) * first, (hi * factor) * second, x_ptr, MODE, FAST)
        return lo, hi, lo, hi, lo, hi
    else:
        H = K if SOURCE == "swiglu" else K // 2
        WRAP: tl.constexpr = SOURCE == "swiglu_backward_any"
        up_ptr = x_ptr + (H * stride_k if MODE == "any" else H // 2)
        steps = (stride_m, stride_k)
        a, b = _load_tile(x_ptr, index_ptr, row0, rows_end, pk, H, *steps, MODE, EVEN, GATHER, J, MQ, BK, NARROW, WRAP)
        c, d = _load_tile(up_ptr, index_ptr, row0, rows_end, pk, H, *steps, MODE, EVEN, GATHER, J, MQ, BK, NARROW, WRAP)
        gate_lo, gate_hi = to_fp32(a, b, MODE)
        up_lo, up_hi = to_fp32(c, d, MODE)
        if SOURCE == "swiglu":
            lo, hi = _round_to_source(swiglu(gate_lo, up_lo), swiglu(gate_hi, up_hi), x_ptr, MODE, FAST)
            return lo, hi, lo, hi, lo, hi
        else:
            y_ptr += e * y_e
            a, b = _load_tile(
                y_ptr, index_ptr, row0, rows_end, pk, H, y_m, y_k, MODE, EVEN, GATHER, J, MQ, BK, NARROW, WRAP
            )
            dy_lo, dy_hi = to_fp32(a, b, MODE)
            gate_lo, up_lo, y_lo = swiglu_backward(dy_lo, gate_lo, up_lo)
            gate_hi, up_hi, y_hi = swiglu_backward(dy_hi, gate_hi, up_hi)
            if WRAP:
                is_gate = pk * (BK // 2) + tl.arange(0, BK // 2)[None, None, :] < H // 2
                lo, hi = tl.where(is_gate, gate_lo, up_lo), tl.where(is_gate, gate_hi, up_hi)
                lo, hi = _round_to_source(lo, hi, x_ptr, MODE, FAST)
                return lo, hi, lo, hi, lo, hi
            else:
                gate_lo, gate_hi = _round_to_source(gate_lo, gate_hi, x_ptr, MODE, FAST)
                up_lo, up_hi = _round_to_source(up_lo, up_hi, x_ptr, MODE, FAST)
                y_lo, y_hi = _round_to_source(y_lo, y_hi, x_ptr, MODE, FAST)
                return gate_lo, gate_hi, up_lo, up_hi, y_lo, y_hi


@triton.jit
def _round_to_source(lo, hi, x_ptr, MODE: tl.constexpr, FAST: tl.constexpr):
    """fp32 pairs rounded to the dtype of the source, in register form."""
    if MODE == "any" and x_ptr.dtype.element_ty == tl.bfloat16:
        return round_to_bf16(lo), round_to_bf16(hi)
    elif MODE == "any" and x_ptr.dtype.element_ty == tl.float16:
        return lo.to(tl.float16).to(tl.float32), hi.to(tl.float16).to(tl.float32)
    else:
        return round_and_pack(lo, hi, MODE, FAST)


@triton.jit
def _write_tile(
    lo, hi, row, col, partials_ptr, e, pk, pm, location, position, is_first, M, K, length, tiles_m, zero,
    ROW: tl.constexpr, COL: tl.constexpr, REG_MODE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    GROUPED: tl.constexpr, COLSUM: tl.constexpr, COUNT: tl.constexpr, BK: tl.constexpr, IS_SOURCE: tl.constexpr,
):  # fmt: skip
    """Write the operands of a tile.  location: see `_locate_tile`.  row, col: kernel arguments of each operand.
    IS_SOURCE: the tile was loaded, not computed."""
    group, row0, start, rows_end, inside = location
    if COLSUM:
        low, high = to_fp32(lo, hi, REG_MODE)
        low, high = tl.sum(tl.sum(low.to(tl.float64), 1), 0), tl.sum(tl.sum(high.to(tl.float64), 1), 0)
        k = pk * BK + tl.arange(0, BK)
        tl.store(partials_ptr + (e * tiles_m + pm) * K + k, tl.reshape(tl.join(low, high), (BK,)), mask=k < K)
    if COL is not None:
        (data, scale, factor, amax, state, units, pitch, scale_e, amax_count,
         stream, first_group, first_row, first_column, all_columns) = col  # fmt: skip
        factors = tensor_factors(amax, factor, group, inside, is_first, amax_count, COUNT, COL)
        first = ((e * M + row0 - start) + first_row) * all_columns + first_column
        random = (state, stream, group + first_group if GROUPED else e * 0, first, all_columns)
        write_column(
            data + e * K * units, scale + e * scale_e, lo, hi, position, length, inside, pk, K, units, pitch, factors,
            random, REG_MODE, PACKED, EVEN, GROUPED and not EVEN.rows, COL,
        )  # fmt: skip
    if ROW is not None:
        if COL is not None and PACKED and not (IS_SOURCE and encodes_packed(REG_MODE, ROW)):
            # An opt_barrier: `zero` is 0 at run time, so the compiler unpacks the words again. Keeping the fp32 values
            # of a full tile in registers would leave room for two CTAs per SM instead of three.
            lo = lo ^ zero
            hi = lo
        (data, scale, factor, amax, state, units, pitch, scale_e, amax_count,
         stream, first_group, first_row, first_column, all_columns) = row  # fmt: skip
        factors = tensor_factors(amax, factor, group, inside, is_first, amax_count, COUNT, ROW)
        first = ((e * M + row0 - start) + first_row) * all_columns + first_column
        random = (state, stream, group + first_group if GROUPED else e * 0, first, all_columns)
        write_row(
            data + e * M * units, scale + e * scale_e, lo, hi, row0, rows_end, M, pk, K, units, pitch, factors, random,
            REG_MODE, PACKED, EVEN, ROW,
        )  # fmt: skip


@triton.jit
def _cast_tile(
    source, row, col, hidden, partials_ptr, location, scalars,
    ROW: tl.constexpr, COL: tl.constexpr, HIDDEN: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr,
    REG_MODE: tl.constexpr, PACKED: tl.constexpr, EVEN_LOADS: tl.constexpr, EVEN: tl.constexpr, GROUPED: tl.constexpr,
    GATHER: tl.constexpr, COLSUM: tl.constexpr, COUNT: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Load or compute a tile and write its operands.  hidden: column operand of silu(gate) * up, recomputed by
    SwiGLU's backward.  EVEN_LOADS, EVEN: which bounds loads and stores need not check."""
    e, pk, pm, position, is_first, M, K, length, tiles_m, tiles_k, zero = scalars
    lo, hi, next_lo, next_hi, hidden_lo, hidden_hi = _load_source(
        source, e, location[1], location[3], pk, M, K, SOURCE, MODE, EVEN_LOADS, GATHER, FAST, J, MQ, BK, NARROW
    )  # fmt: skip
    if HIDDEN is not None:  # first, to free its registers before the other operands are written
        data, scale, units, pitch, scale_e = hidden
        write_column(
            data + e * (K // 2) * units, scale + e * scale_e, hidden_lo, hidden_hi, position, length, location[4], pk,
            K // 2, units, pitch, (1.0, 1.0), (None, 0, 0, 0, 0), REG_MODE, PACKED, EVEN,
            GROUPED and not EVEN.rows, HIDDEN,
        )  # fmt: skip
    _write_tile(
        lo, hi, row, col, partials_ptr, e, pk, pm, location, position, is_first, M, K, length, tiles_m, zero,
        ROW, COL, REG_MODE, PACKED, EVEN, GROUPED, COLSUM, COUNT, BK, SOURCE == "plain",
    )  # fmt: skip
    if SOURCE == "swiglu_backward":
        _write_tile(
            next_lo, next_hi, row, col, partials_ptr, e, pk + tiles_k, pm, location, position, False, M, K, length,
            tiles_m, zero, ROW, COL, REG_MODE, PACKED, EVEN, GROUPED, COLSUM, COUNT, BK, False,
        )  # fmt: skip


# Scalars that are not specialized: Triton would compile a kernel for each class of value (1, multiple of 16, other).
_UNSPECIALIZED = [
    "tiles_m", "tiles_k", "groups", "row_amax_count", "col_amax_count", "zero", "inv_columns", "eps",
    "row_stream", "row_first_group", "row_first_row", "row_first_column", "row_all_columns",
    "col_stream", "col_first_group", "col_first_row", "col_first_column", "col_all_columns",
]  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def cast_kernel(
    x_ptr, y_ptr, z_ptr, index_ptr, offs_ptr, partials_ptr,
    row_data, row_scale, row_global, row_amax, row_state, col_data, col_scale, col_global, col_amax, col_state,
    hidden_data, hidden_scale,
    M, K, stride_e, stride_m, stride_k, y_e, y_m, y_k, row_units, col_units, row_pitch, col_pitch, row_scale_e,
    col_scale_e, hidden_units, hidden_pitch, hidden_scale_e, length, tiles_m, tiles_k, groups,
    row_amax_count, col_amax_count, zero, inv_columns, eps,
    row_stream, row_first_group, row_first_row, row_first_column, row_all_columns,
    col_stream, col_first_group, col_first_row, col_first_column, col_all_columns,
    ROW: tl.constexpr, COL: tl.constexpr, HIDDEN: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr,
    REG_MODE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, EVEN_FULL: tl.constexpr, GROUPS: tl.constexpr,
    GATHER: tl.constexpr, COLSUM: tl.constexpr, COUNT: tl.constexpr, ALIGN: tl.constexpr, FAST: tl.constexpr,
    J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr, DOWN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Cast one tile of matrix e and write its operands.

    ROW, COL, HIDDEN: `OperandConfig` of each operand, None if it is not written.  MODE, REG_MODE: how pairs are loaded
    and kept in registers (`load_pairs`).  EVEN_FULL: the `Even` of tiles that lie inside one group, else None.
    *_units: code units per row.  *_pitch: scale row stride.  *_scale_e: scales per matrix.
    """
    pid = tl.program_id(0)
    e = (pid // tiles_k // tiles_m).to(tl.int64)
    if DOWN:
        pm, pk = pid % tiles_m, pid // tiles_m % tiles_k
    else:
        pk, pm = pid % tiles_k, pid // tiles_k % tiles_m
    position = pm * (MQ * J)
    location = _locate_tile(offs_ptr, e, position, M, groups, GROUPS, ALIGN)
    source = (x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m, y_k, inv_columns, eps)
    row = (row_data, row_scale, row_global, row_amax, row_state, row_units, row_pitch, row_scale_e, row_amax_count,
           row_stream, row_first_group, row_first_row, row_first_column, row_all_columns)  # fmt: skip
    col = (col_data, col_scale, col_global, col_amax, col_state, col_units, col_pitch, col_scale_e, col_amax_count,
           col_stream, col_first_group, col_first_row, col_first_column, col_all_columns)  # fmt: skip
    hidden = (hidden_data, hidden_scale, hidden_units, hidden_pitch, hidden_scale_e)
    scalars = (e, pk, pm, position, pid == 0, M, K, length, tiles_m, tiles_k, zero)
    if EVEN_FULL is None:
        _cast_tile(
            source, row, col, hidden, partials_ptr, location, scalars, ROW, COL, HIDDEN, SOURCE, MODE, REG_MODE, PACKED,
            EVEN, EVEN, GROUPS > 0, GATHER, COLSUM, COUNT, FAST, J, MQ, BK, NARROW,
        )  # fmt: skip
    elif location[4] & (location[3] - location[1] >= MQ * J):
        # a full tile inside one group, as nearly all are: no row masks
        _cast_tile(
            source, row, col, hidden, partials_ptr, location, scalars, ROW, COL, HIDDEN, SOURCE, MODE, REG_MODE, PACKED,
            EVEN if GATHER else EVEN_FULL, EVEN_FULL, GROUPS > 0, GATHER, COLSUM, COUNT, FAST, J, MQ, BK, NARROW,
        )  # fmt: skip
    else:
        _cast_tile(
            source, row, col, hidden, partials_ptr, location, scalars, ROW, COL, HIDDEN, SOURCE, MODE, REG_MODE, PACKED,
            EVEN, EVEN, GROUPS > 0, GATHER, COLSUM, COUNT, FAST, J, MQ, BK, NARROW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "tiles_m", "tiles_k", "groups"])
def amax_kernel(
    x_ptr, y_ptr, z_ptr, index_ptr, offs_ptr, amax_ptr, M, K, stride_e, stride_m, stride_k, y_e, y_m, y_k,
    tiles_m, tiles_k, groups,
    PER_GROUP: tl.constexpr, SOURCE: tl.constexpr, MODE: tl.constexpr, REG_MODE: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, GATHER: tl.constexpr, ALIGN: tl.constexpr, FAST: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, J: tl.constexpr, MQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """amax of the tensor or of each group, as int32 bit patterns. Values are rotated first if the operand is."""
    pid = tl.program_id(0)
    pk, pm, e = pid % tiles_k, (pid // tiles_k) % tiles_m, (pid // tiles_k // tiles_m).to(tl.int64)
    group, row0, _, rows_end, inside = _locate_tile(offs_ptr, e, pm * (MQ * J), M, groups, GROUPS, ALIGN)
    source = (x_ptr, y_ptr, z_ptr, index_ptr, stride_e, stride_m, stride_k, y_e, y_m, y_k, 0.0, 0.0)
    lo, hi, next_lo, next_hi, _, _ = _load_source(
        source, e, row0, rows_end, pk, M, K, SOURCE, MODE, EVEN, GATHER, FAST, J, MQ, BK, False
    )
    amax = _tile_amax(lo, hi, REG_MODE, ROW, COL)
    if SOURCE == "swiglu_backward":
        amax = tl.maximum(amax, _tile_amax(next_lo, next_hi, REG_MODE, ROW, COL))
    tl.atomic_max(amax_ptr + (group if PER_GROUP else 0), amax, mask=inside, sem="relaxed")


@triton.jit
def _tile_amax(lo, hi, REG_MODE: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr):
    lo, hi = to_fp32(lo, hi, REG_MODE)
    if ROW is not None:
        lo, hi = rotate_rows(lo, hi, ROW)
    if COL is not None:
        lo, hi = rotate_columns(lo, COL), rotate_columns(hi, COL)
    amax = tl.maximum(tl.abs(lo), tl.abs(hi), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(amax.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["M", "K", "tiles_m", "groups"])
def colsum_kernel(
    partials_ptr, offs_ptr, out_ptr, M, K, tiles_m, groups, GROUPS: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Partial column sums reduced in tile order: fp64 [matrices, tiles, K] -> fp32 [matrices or groups, K]."""
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
    while tile < last:  # the interpreter has no range() over device scalars
        total += tl.load(partials_ptr + tile * K + k, mask=k < K, other=0.0)
        tile += 1
    tl.store(out_ptr + g * K + k, total.to(tl.float32), mask=k < K)
