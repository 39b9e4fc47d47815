"""What device is this, and is it the current one."""

from __future__ import annotations

import pytest
import torch

from blockscale import hardware


def test_another_gpu_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of Triton go to the current device, whichever their operands are on."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for here in ("cpu", "meta", "cuda:0"):
        assert not isinstance(hardware.made_current(torch.device(here)), torch.cuda.device)
    other = hardware.made_current(torch.device("cuda:1"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 1
