"""Device properties, the current device, and matrix products on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockscale import hardware
from blockscale.autograd import linear
from blockscale.errors import DeviceError
from blockscale.hardware import named_device


class Products(TorchDispatchMode):
    """Records the dtypes of torch's matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_on_a_cpu_are_rounded_once(dtype: torch.dtype) -> None:
    """fprop, dgrad and wgrad run in fp32: many CPUs have no 16-bit instructions."""
    # integers: sums are exact in fp32, in any order, and too long for 16 bits
    x, weight, grad = (torch.randint(-99, 99, shape).to(dtype) for shape in ((24, 64), (32, 64), (24, 32)))
    leaves = x.requires_grad_(), weight.requires_grad_()
    with Products() as seen:
        y = linear(x, weight, recipe="bf16")
        made = torch.autograd.grad(y, leaves, grad)
    wide = [each.detach().float() for each in (x, weight, grad)]
    assert torch.equal(y, (wide[0] @ wide[1].mT).to(dtype))
    assert torch.equal(made[0], (wide[2] @ wide[1]).to(dtype))
    assert torch.equal(made[1], (wide[2].mT @ wide[0]).to(dtype))
    assert seen.dtypes == [torch.float32] * 3


def test_another_gpu_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whichever device the operands are on."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for here in ("cpu", "meta", "cuda:0"):
        assert not isinstance(hardware.current_cuda_device(torch.device(here)), torch.cuda.device)
    other = hardware.current_cuda_device(torch.device("cuda:1"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 1


@pytest.mark.parametrize(("count", "here"), [(1, "cpu, cuda or cuda:0"), (4, "cpu, or cuda:0 to cuda:3")])
def test_a_gpu_that_is_not_here_is_refused_by_its_number(
    count: int, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert named_device(f"cuda:{count - 1}") == torch.device("cuda", count - 1)
    assert named_device("cuda") == torch.device("cuda")
    with pytest.raises(DeviceError, match=f"device 'cuda:{count}'. Rule: a device is {here}"):
        named_device(f"cuda:{count}")
