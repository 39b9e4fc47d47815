"""Operations that casts are fused with, bit for bit: fma, sigmoid, SwiGLU, its gradients, RMSNorm; torch and Triton."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from blockscale.casts import activation
from support import helpers
from support.helpers import all_bf16, bits, same_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCRIPT = Path(__file__).parent / "interpreted_fused.py"


def units(got: Tensor, want: Tensor) -> Tensor:
    """Distance of fp32 values from fp64 ones in units of the last place that fp32 has there."""
    exponent = want.abs().clamp(min=2.0**-126).log2().floor()
    return (got.double() - want).abs() / torch.exp2(exponent - 23)


def test_fma_rounds_once(compared: Counter[str]) -> None:
    """Against the C library, on random patterns and on sums that fp64 takes for a tie of fp32."""
    path = ctypes.util.find_library("m")
    if path is None:
        pytest.skip("needs the C library's fmaf, found none")
    fmaf = ctypes.CDLL(path).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b, c = (torch.randint(-(1 << 31), 1 << 31, (20_000,)).to(torch.int32).view(torch.float32) for _ in range(3))
    c[::2] = -(a * b)[::2] * (1 + torch.randint(-2, 3, (10_000,)) * 2.0**-23)
    near, above = 1 - 2.0**-23, 1 + 2.0**-23
    # (1 + 2^-23)(1 - 2^-23) 2^-24 is 2^-70 short of half a unit of 1 + 2^-23
    a[:4], b[:4] = above, torch.tensor([near, near, -near, -near]) * 2.0**-24
    c[:4] = torch.tensor([above, -above, above, -above])
    want = torch.tensor([fmaf(*values) for values in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])
    got = activation.fma(a, b, c)
    assert torch.equal(got.isnan(), want.isnan())
    numbers = ~want.isnan()
    compared["the C library's fmaf"] += same_bits(bits(got[numbers]), bits(want[numbers]))
    naive = (a.double() * b + c.double()).float()
    assert (bits(naive[:4]) != bits(want[:4])).any(), "no case tells one rounding from two"


def test_sigmoid_within_its_bounds() -> None:
    """Error in units in the last place against fp64: every bf16 gate, and fp32 gates in between."""
    gates = torch.cat((all_bf16().float(), torch.rand(1_000_000) * 200 - 100))
    gates = gates[gates.isfinite() & (gates >= -87)]
    off = units(activation.sigmoid(gates), gates.double().sigmoid())
    worst = {low: off[gates >= low].max().item() for low in (-16.0, -64.0, -87.0)}
    print("sigmoid, units off at worst, from a gate of:", worst)
    assert worst[-16.0] < 3.5
    assert worst[-64.0] < 5
    assert worst[-87.0] < 6


def test_sigmoid_never_descends() -> None:
    gates = all_bf16().float()
    gates = torch.cat((gates[gates.isfinite() & (gates >= -87)], torch.linspace(-20, 20, 400_001))).sort().values
    values = activation.sigmoid(gates)
    assert (values.diff() >= 0).all()
    assert 0 < values[0] < 2e-38
    assert values[-1] == 1


def test_special_gates() -> None:
    """As torch's silu, except that a gate below -87 counts as -87: nearly zero, and -Inf does not give NaN."""
    gate = torch.tensor([torch.inf, torch.nan, 3e38, 0.0, -0.0])
    want = torch.nn.functional.silu(gate)
    got = activation.swiglu(torch.cat((gate, torch.ones(5))))
    assert torch.equal(got.isnan(), want.isnan())
    same_bits(bits(got[~want.isnan()]), bits(want[~want.isnan()]))
    low = torch.tensor([-87.0, -88.0, -100.0, -3e38, -torch.inf])
    got = activation.swiglu(torch.cat((low, torch.ones(5))))
    assert (got == got[0]).all()
    assert -1.5e-36 < got[0] < 0
    grads = activation.swiglu_backward(torch.ones(5), torch.cat((low, torch.ones(5)))).view(2, 5)
    assert (grads == grads[:, :1]).all()
    assert (grads.abs() < 1.5e-36).all()


def pattern(words: str) -> Tensor:
    """Hexadecimal fp32 patterns as a row."""
    return torch.from_numpy(np.array([int(word, 16) for word in words.split()], np.uint32).view(np.float32))[None]


def test_worked_examples(device: torch.device) -> None:
    """The examples of docs/numerics.md, section 16."""
    gate = torch.cat((torch.tensor([[0.0, 1, -1, 3.5, -10, -87]]), pattern("41A00000")), dim=-1).to(device)
    want = pattern("3F000000 3F3B26A7 3E89B2B0 3F787EFE 383E6997 00B3368A 3F800000")
    same_bits(bits(activation.sigmoid(gate)), bits(want))
    gate_up = torch.tensor([[2.0, -1, 3, -1, 0.5, 2]], device=device)
    same_bits(bits(activation.swiglu(gate_up)), bits(pattern("BFE17BEA BE09B2B0 40B6E4EC")))
    both = activation.swiglu_backward(torch.tensor([[1.0, -0.25, 0.1]], device=device), gate_up)
    same_bits(bits(both), bits(pattern("BF8B9ED2 BC14217A 3E5ED7FF 3FE17BEA 3D89B2B0 3E9250BD")))
    weight = torch.tensor([1.0, 1, 1, 1, 0.5], device=device)
    y, rstd = activation.rmsnorm(torch.arange(1.0, 6.0, device=device)[None], weight, 1e-6)
    same_bits(bits(y), bits(pattern("3E9A5FB2 3F1A5FB2 3F678F8B 3F9A5FB2 3F40F79E")))
    same_bits(bits(rstd[None]), bits(pattern("3E9A5FB2")))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_its_gradient_are_right(dtype: torch.dtype, device: torch.device) -> None:
    """Against fp64 autograd. Bounds are relative to the terms: the slope of silu has a zero."""
    grad, gate_up = torch.randn(300, 128, device=device).to(dtype), (4 * torch.randn(300, 256, device=device)).to(dtype)
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    assert units(activation.swiglu(gate_up.float()), want.detach()).max() < 6
    assert torch.equal(activation.swiglu(gate_up), activation.swiglu(gate_up.float()).to(dtype))
    want.backward(grad.double())
    got = activation.swiglu_backward(grad.float(), gate_up.float())
    assert torch.equal(activation.swiglu_backward(grad, gate_up), got.to(dtype))
    assert wide.grad is not None
    dgate, dup = wide.grad.chunk(2, dim=-1)
    assert units(got[:, 128:], dup).max() < 6
    term = (grad.double() * up.detach()).abs() * (gate.detach().sigmoid() * (1 + gate.detach().abs()))
    assert ((got[:, :128].double() - dgate).abs() <= 4e-7 * term + 1e-44).all()


@pytest.mark.parametrize("length", [1, 2, 3, 100, 1024, 5000])
def test_rmsnorm_is_right(length: int, device: torch.device) -> None:
    x, weight = torch.randn(40, length, device=device).bfloat16(), torch.randn(length, device=device).bfloat16()
    got, rstd = activation.rmsnorm(x.float(), weight, 1e-6)
    assert torch.equal(activation.rmsnorm(x, weight, 1e-6)[0], got.bfloat16())
    want = (x.double().square().mean(-1) + 1e-6).rsqrt()
    assert units(rstd, want).max() < 6
    assert units(got, x.double() * want[:, None] * weight.double()).max() < 8


def test_sums_are_over_neighbours() -> None:
    """A sum whose result shows its order: the small terms are added to each other before the large one."""
    x = torch.full((1, 1000), 2.0**-24)
    x[0, 0] = 1.0
    levels = x[0].tolist() + [0.0] * 24
    while len(levels) > 1:
        levels = [float(np.float32(a) + np.float32(b)) for a, b in zip(levels[::2], levels[1::2], strict=True)]
    assert activation.tree_sum(x).tolist() == levels
    assert activation.tree_sum(torch.ones(2, 3, 7)).tolist() == [[7.0] * 3] * 2


def test_tile_functions_equal_torch(compared: Counter[str]) -> None:
    """Every bf16 and fp16 gate and more, in Triton's interpreter."""
    pytest.importorskip("triton", reason="needs triton, which is not installed")
    check_tile_functions({**os.environ, "TRITON_INTERPRET": "1"}, compared, helpers.QUICK_INTERPRETER)


@pytest.mark.gpu
def test_tile_functions_equal_torch_on_the_gpu(compared: Counter[str]) -> None:
    check_tile_functions(dict(os.environ), compared)


def check_tile_functions(environment: dict[str, str], compared: Counter[str], *launcher: Path) -> None:
    command = [sys.executable, "-W", "ignore", *map(str, launcher), str(SCRIPT)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert sum(int(wrong) for _, wrong, _ in rows) == 0
    assert len(rows) == 12
    compared["torch, fused tile functions of Triton"] += sum(int(count) for count, _, _ in rows)
