"""Operations that casts are fused with, in fp32 and exactly specified: SwiGLU, its backward, RMSNorm, row gather.

Section 16 of docs/numerics.md, statement by statement, in torch. e^-r is a polynomial instead of a platform's exp, so
that every device gives the same bits. `_device_fused.py` has the same functions for Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# fp32 numbers, in full so that they convert exactly
MINUS_LOG2E = -1.44269502162933349609375
LN2 = 0.693147182464599609375
LOWEST, HIGHEST = -87.0, 88.0
"""Gates below -87 count as -87, which keeps 1 / s normal. At 88 the exponent field of 2^n is 0."""
MAGIC = 12583039.0
"""1.5 * 2^23 + 127: adding it rounds to an integer n, and leaves n + 127 in the low byte."""
EXP = (
    -0.0083126835525035858154296875,
    0.04189018905162811279296875,
    -0.1666711270809173583984375,
    0.499992311000823974609375,
    -1.0,
    1.0,
)
"""e^-r for |r| <= ln(2) / 2, highest power first; off by at most 1.05e-7 of the value."""


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """fp32 a * b + c with one rounding; torch has no such operator.

    The product is exact in fp64. The sum is rounded to odd there: an inexact one gets an odd last bit, so that the
    rounding to fp32 never takes it for a tie.
    """
    addend = c.double() if isinstance(c, Tensor) else torch.full_like(a, c, dtype=torch.float64)
    product = a.double() * b
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = error.abs() > 0  # not of an infinite total, whose error is NaN
    return torch.where(inexact & (bits & 1 == 0), bits + away, bits).view(torch.float64).float()


def sigmoid(g: Tensor) -> Tensor:
    """fp32 g >= -87 -> 1 / (1 + e^-g); 1 from 16.64 on. Undefined for NaN: callers multiply the result by g.

    >>> sigmoid(torch.tensor([0.0, 1.0, -1.0, 20.0])).tolist()
    [0.5, 0.7310585379600525, 0.26894140243530273, 1.0]
    """
    clamped = g.clamp(max=HIGHEST)
    k = fma(clamped, MINUS_LOG2E, MAGIC)
    r = fma(k - MAGIC, LN2, clamped)
    power = torch.full_like(r, EXP[0])
    for coefficient in EXP[1:]:
        power = fma(power, r, coefficient)
    two_to_n = ((k.view(torch.int32) & 0xFF) << 23).view(torch.float32)
    return torch.ones_like(g) / fma(power, two_to_n, 1.0)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2H], gates first -> silu(gate) * up [..., H], computed in fp32 and rounded once to the input's type.

    >>> swiglu(torch.tensor([[0.0, 2.0, 3.0, -1.0]])).tolist()
    [[0.0, -1.7615940570831299]]
    """
    gate, up = _gate_and_up(gate_up)
    return ((gate * sigmoid(gate)) * up).to(gate_up.dtype)


def _gate_and_up(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp32; a gate below -87 is -87."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate.clamp(min=LOWEST), up


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """[gradient of gate | gradient of up], [..., 2H], for the gradient [..., H] of `swiglu`; rounded likewise."""
    gate, up = _gate_and_up(gate_up)
    dy, s = grad.float(), sigmoid(gate)
    slope = s * fma(gate, 1.0 - s, 1.0)
    return torch.cat(((dy * up) * slope, dy * (gate * s)), dim=-1).to(gate_up.dtype)


def tree_sum(x: Tensor) -> Tensor:
    """fp32 sums over the last axis by a pairwise tree of neighbours."""
    length = x.shape[-1]
    x = pad(x, (0, (1 << (length - 1).bit_length()) - length))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x * rstd * weight over the last axis, rounded to x's type, and rstd (fp32) without that axis."""
    wide = x.float()
    # tensors: with a Python number a device may replace the division by a multiplication
    share, epsilon = (torch.tensor(v, dtype=torch.float32, device=x.device) for v in (1.0 / x.shape[-1], eps))
    # by way of fp64: vector libraries do not always round the root of an fp32 number correctly
    root = torch.sqrt((tree_sum(wide * wide) * share + epsilon).double()).float()
    rstd = torch.ones_like(root) / root
    return ((wide * rstd[..., None]) * weight.float()).to(x.dtype), rstd


def gather_rows(x: Tensor, indices: Tensor, gate_weights: Tensor | None = None) -> Tensor:
    """x[indices], with a row of zeros for each -1.  gate_weights: fp32 [P], factor of each row; the product is computed
    in fp32 and rounded once to x's dtype.

    >>> gather_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1, 1])).flatten().tolist()
    [2.0, 0.0, 2.0]
    """
    rows = with_zero_row(x).index_select(0, zero_row_for_padding(indices, x.shape[0]))
    return rows if gate_weights is None else (rows.float() * gate_weights[:, None]).to(x.dtype)


def with_zero_row(x: Tensor) -> Tensor:
    """[T, K] -> [T + 1, K]: the added last row is zeros, for padding."""
    return torch.cat((x, x.new_zeros(1, x.shape[1])))


def zero_row_for_padding(indices: Tensor, rows: int) -> Tensor:
    """Indices into the result of `with_zero_row`: -1 becomes `rows`."""
    return torch.where(indices < 0, rows, indices)
