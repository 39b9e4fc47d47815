"""`tl.dot_scaled` in Triton's interpreter, which lacks it in 3.6 and 3.7 and reads E4M3 scales as E8M0 in 3.8 and 3.9.

`install` changes two things in this process, and nothing of a kernel's text. The builder's `create_dot_scaled` decodes
both operands by torch and a table, applies their scales, sums in fp64 and rounds the new sum to fp32 once. And below
3.8, where the semantics ask names of formats for `.value`, plain strings are wrapped.

Not the library's own decoding: what a kernel hands to `tl.dot_scaled` is read by code that shares nothing with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _fp8(codes: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.float64]:
    return torch.from_numpy(np.array(codes, np.uint8, order="C")).view(dtype).double().numpy()


def _scales(handle: Any) -> NDArray[np.float64]:
    """Bytes are exponents, FP8 is E4M3."""
    if handle.dtype.scalar in _FP8:
        return _fp8(handle.data, _FP8[handle.dtype.scalar])
    return np.where(handle.data == 255, np.nan, np.exp2(handle.data.astype(np.float64) - 127))


def _values(handle: Any, scale: Any) -> NDArray[np.float64]:
    """[rows, K] of an operand with K last; FP4 comes two to a byte, the first code in the low bits."""
    if handle.dtype.scalar in _FP8:
        value = _fp8(handle.data, _FP8[handle.dtype.scalar])
    else:
        value = _E2M1[np.stack([handle.data & 15, handle.data >> 4], axis=-1)].reshape(handle.data.shape[0], -1)
    factor = _scales(scale)
    with np.errstate(invalid="ignore"):
        return value * np.repeat(factor, value.shape[1] // factor.shape[1], axis=1)


def _create_dot_scaled(
    self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any,
    fast_math: bool, a_k_pack: bool, b_k_pack: bool, acc: Any,
) -> Any:  # fmt: skip
    assert a_k_pack
    assert b_k_pack
    turned = interpreter.TensorHandle(b.data.T, b.dtype)  # [K, N], but its scales are [N, K / block]
    with np.errstate(invalid="ignore", over="ignore"):
        total = _values(a, a_scale) @ _values(turned, b_scale).T + acc.data
        return interpreter.TensorHandle(total.astype(np.float32), tl.float32)


def _boxed(original: Any) -> Any:
    def dot_scaled(
        self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *rest: Any
    ) -> Any:
        return original(self, a, a_scale, tl.constexpr(a_format), b, b_scale, tl.constexpr(b_format), *rest)

    return dot_scaled


def install() -> None:
    """Once a process, with TRITON_INTERPRET=1 set before triton was imported."""
    interpreter.InterpreterBuilder.create_dot_scaled = _create_dot_scaled
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8):
        TritonSemantic.dot_scaled = _boxed(TritonSemantic.dot_scaled)
