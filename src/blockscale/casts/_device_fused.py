"""Device functions of `activation.py` for Triton kernels: the same operations in the same order, hence the same bits.

As with `_device.py`, launch with `enable_fp_fusion=False`: fused multiply-adds are written as `fma`.
"""

# pyright: basic, reportOperatorIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl

from .activation import EXP, HIGHEST, LN2, LOWEST, MAGIC, MINUS_LOG2E

_LOWEST, _HIGHEST, _MAGIC = tl.constexpr(LOWEST), tl.constexpr(HIGHEST), tl.constexpr(MAGIC)
_MINUS_LOG2E, _LN2 = tl.constexpr(MINUS_LOG2E), tl.constexpr(LN2)
_E5, _E4, _E3, _E2, _E1, _E0 = (tl.constexpr(coefficient) for coefficient in EXP)


@triton.jit
def _fma_by_fp64(a, b, c):
    """`activation.fma` in Triton: fp32 a * b + c with one rounding, by way of fp64."""
    product = a.to(tl.float64) * b
    total = product + c
    back = total - product
    error = (product - (total - back)) - (back - c)
    bits = total.to(tl.int64, bitcast=True)
    away = tl.where((error > 0) == (total > 0), 1, -1)
    inexact = (error > 0) | (error < 0)
    return tl.where(inexact & ((bits & 1) == 0), bits + away, bits).to(tl.float64, bitcast=True).to(tl.float32)


# the interpreter's own fma rounds twice
_INTERPRETED = tl.constexpr(not isinstance(_fma_by_fp64, triton.runtime.JITFunction))


@triton.jit
def fma(a, b, c):
    """fp32 a * b + c with one rounding; a is a tile, b and c are tiles or constants."""
    if _INTERPRETED:
        return _fma_by_fp64(a, b, c)
    else:
        return tl.fma(a, b, c)


# approximate reciprocal `near`, and one Newton step: near + near * (1 - x * near)
_RECIPROCAL = tl.constexpr("""{
    .reg .f32 near, rest;
    rcp.approx.ftz.f32 near, $1;
    neg.f32 rest, near;
    fma.rn.f32 rest, $1, rest, 0f3F800000;
    fma.rn.f32 $0, near, rest, near;
}""")


@triton.jit
def reciprocal(x):
    """fp32 1 / x, correctly rounded, for x from 1 to 2^126: equal to div_rn, without its slow-path branch."""
    if _INTERPRETED:
        return tl.div_rn(1.0, x)
    else:
        return tl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(g):
    """fp32 -> 1 / (1 + e^-g), for a gate clamped by `_bounded`."""
    clamped = tl.minimum(g, _HIGHEST)
    k = fma(clamped, _MINUS_LOG2E, _MAGIC)
    r = fma(k - _MAGIC, _LN2, clamped)
    power = fma(r, _E5, _E4)
    power = fma(power, r, _E3)
    power = fma(power, r, _E2)
    power = fma(power, r, _E1)
    power = fma(power, r, _E0)
    two_to_n = (k.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return reciprocal(fma(power, two_to_n, 1.0))


@triton.jit
def _bounded(gate):
    """max(gate, -87); NaN stays."""
    return tl.maximum(gate, _LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def swiglu(gate, up):
    """fp32 silu(gate) * up."""
    gate = _bounded(gate)
    return (gate * sigmoid(gate)) * up


@triton.jit
def swiglu_backward(dy, gate, up):
    """fp32 gradients of gate and of up, and the recomputed result of `swiglu`."""
    gate = _bounded(gate)
    s = sigmoid(gate)
    slope = s * fma(gate, 1.0 - s, 1.0)
    return (dy * up) * slope, dy * (gate * s), (gate * s) * up


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def tree_sum(x, R: tl.constexpr, N: tl.constexpr):
    """fp32 [R, N] -> [R]: pairwise tree sum of neighbours. N is a power of two; rows are padded with zeros.

    Each step reduces pairs, which has only one order. Triton does not specify the order of a longer reduction.
    """
    for level in tl.static_range(_log2(N)):
        x = tl.sum(tl.reshape(x, (R, N >> (level + 1), 2)), axis=2)
    return tl.reshape(x, (R,))


@triton.jit
def rstd(lo, hi, inv_columns, eps, R: tl.constexpr, W: tl.constexpr):
    """fp32 pairs [R, W] -> 1 / sqrt(mean of squares + eps), [R].  inv_columns: fp32(1 / row length without padding)."""
    root = tl.sqrt_rn(tree_sum(lo * lo + hi * hi, R, W) * inv_columns + eps)
    return tl.div_rn(1.0, root)
