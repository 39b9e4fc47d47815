"""The fused device functions in Triton's interpreter against torch. A script: TRITON_INTERPRET must be set first.

    TRITON_INTERPRET=1 python tests/casts/interpreted_fused.py

Without the variable the same runs on a GPU. Prints `values mismatches` of each function; all NaNs are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockscale.casts import _device_fused as device
from blockscale.casts import activation

WHERE = "cpu" if not isinstance(device.sigmoid, triton.runtime.JITFunction) else "cuda"
WIDTH = 4096


@triton.jit
def _fma_kernel(a, b, c, out, W: tl.constexpr):
    at = tl.program_id(0) * W + tl.arange(0, W)
    tl.store(out + at, device.fma(tl.load(a + at), tl.load(b + at), tl.load(c + at)))


@triton.jit
def _reciprocal_kernel(x, out, W: tl.constexpr):
    at = tl.program_id(0) * W + tl.arange(0, W)
    tl.store(out + at, device.reciprocal(tl.load(x + at)))


@triton.jit
def _swiglu_kernel(gate, up, out, W: tl.constexpr):
    at = tl.program_id(0) * W + tl.arange(0, W)
    tl.store(out + at, device.swiglu(tl.load(gate + at), tl.load(up + at)))


@triton.jit
def _sigmoid_kernel(gate, out, W: tl.constexpr):
    at = tl.program_id(0) * W + tl.arange(0, W)
    tl.store(out + at, device.sigmoid(tl.load(gate + at)))


@triton.jit
def _backward_kernel(dy, gate, up, out, size, W: tl.constexpr):
    at = tl.program_id(0) * W + tl.arange(0, W)
    dgate, dup, _ = device.swiglu_backward(tl.load(dy + at), tl.load(gate + at), tl.load(up + at))
    tl.store(out + at, dgate)
    tl.store(out + size + at, dup)


@triton.jit
def _rstd_kernel(x, out, length, inv_columns, eps, R: tl.constexpr, N: tl.constexpr):
    row, column = tl.program_id(0) * R + tl.arange(0, R), 2 * tl.arange(0, N // 2)[None, :]
    at = x + row[:, None] * length + column
    lo, hi = tl.load(at, mask=column < length, other=0.0), tl.load(at + 1, mask=column + 1 < length, other=0.0)
    tl.store(out + row, device.rstd(lo, hi, inv_columns, eps, R, N // 2))


def launch(kernel: Callable, *inputs: Tensor, results: int = 1) -> Tensor:
    """Launch with one program per 4096 values."""
    size = inputs[0].numel()
    assert size % WIDTH == 0
    out = torch.full((results, size), -1.0, device=WHERE)
    extra = (size,) if results == 2 else ()
    kernel[(size // WIDTH,)](*inputs, out, *extra, W=WIDTH, enable_fp_fusion=False)
    return out.squeeze(0)


def mismatches(got: Tensor, want: Tensor) -> int:
    assert got.shape == want.shape, (got.shape, want.shape)
    same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
    return int((~same).sum())


def any_fp32(count: int) -> Tensor:
    """Random fp32 patterns: every exponent, NaN and infinities included."""
    return torch.randint(-(1 << 31), 1 << 31, (count,)).to(torch.int32).view(torch.float32).to(WHERE)


def all_bf16() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().to(WHERE)


def gates() -> Tensor:
    """Every bf16 value, every fp16 value, fp32 values where the sigmoid is neither 0 nor 1, and its edges."""
    half = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16).float().to(WHERE)
    edges = torch.tensor([-89.0, -88.3763, -87.3365, -87.0, 16.6355, 17.33, 88.0, 88.03], device=WHERE)
    near = (edges.view(torch.int32)[:, None] + torch.arange(-256, 256, device=WHERE)).to(torch.int32).flatten()
    uniform = torch.rand(1 << 16, device=WHERE) * 120 - 95
    return torch.cat((all_bf16(), half, near.view(torch.float32), uniform))


def others(count: int) -> Tensor:
    """Factors for the gates: a third random patterns, a third bf16 values, a third Gaussian numbers."""
    pick = torch.randint(3, (count,), device=WHERE)
    bf16 = all_bf16()[torch.randint(1 << 16, (count,), device=WHERE)]
    return torch.where(pick == 0, any_fp32(count), torch.where(pick == 1, bf16, torch.randn(count, device=WHERE)))


def comparisons() -> Iterator[tuple[str, int, int]]:
    """(function, values compared, number that differ)."""
    gate = gates()
    count = gate.numel()
    up, dy = others(count), others(count)
    plain = gate.nan_to_num(0.0).clamp(min=activation.LOWEST)
    yield (
        "sigmoid",
        count,
        mismatches(launch(_sigmoid_kernel, plain), activation.sigmoid(plain)),
    )
    yield "swiglu", count, mismatches(launch(_swiglu_kernel, gate, up), activation.swiglu(torch.cat((gate, up))))
    got = launch(_backward_kernel, dy, gate, up, results=2)
    want = activation.swiglu_backward(dy, torch.cat((gate, up))).view(2, -1)
    yield "swiglu_backward", 2 * count, mismatches(got, want)
    # sums of any size, sums that nearly cancel, and products near overflow and underflow
    a, b, c = any_fp32(1 << 17), any_fp32(1 << 17), any_fp32(1 << 17)
    c[::2] = -(a * b)[::2] * (1 + torch.randint(-3, 4, (1 << 16,), device=WHERE) * 2.0**-23)
    a[1::4], b[1::4], c[1::4] = (torch.randn(1 << 15, device=WHERE) for _ in range(3))
    yield "fma", 1 << 17, mismatches(launch(_fma_kernel, a, b, c), activation.fma(a, b, c))
    # every mantissa, in the lowest, a middle and the highest binade of its domain
    step = 4096 if WHERE == "cpu" else 1
    mantissas = torch.arange(0, 1 << 23, step, dtype=torch.int32, device=WHERE)[:, None]
    binades = torch.tensor([127, 128, 190, 252], dtype=torch.int32, device=WHERE)
    x = (mantissas + (binades << 23)).flatten().view(torch.float32)
    x = torch.cat((x, torch.ones(-x.numel() % WIDTH, device=WHERE)))
    yield "reciprocal", x.numel(), mismatches(launch(_reciprocal_kernel, x), torch.ones_like(x) / x)
    for length in (1, 2, 3, 96, 255, 1024, 1500):
        x = torch.randn(8, length, device=WHERE) * torch.exp2(torch.randint(-20, 20, (8, 1), device=WHERE))
        x[3, length // 2], x[5] = torch.inf, 0.0
        out, inv_columns = torch.full((8,), -1.0, device=WHERE), torch.tensor(1.0 / length).item()
        width = max(2, 1 << (length - 1).bit_length())
        _rstd_kernel[(2,)](x, out, length, inv_columns, 1e-6, R=4, N=width, enable_fp_fusion=False)
        _, want = activation.rmsnorm(x, torch.ones(length, device=WHERE), 1e-6)
        yield f"rstd {length}", 8, mismatches(out, want)


def main() -> int:
    torch.manual_seed(0)
    found = list(comparisons())
    for name, count, wrong in found:
        print(count, wrong, name)
    return 1 if any(wrong for _, _, wrong in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
