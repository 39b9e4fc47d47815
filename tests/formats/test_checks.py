"""Checks of arguments by their kind."""

from __future__ import annotations

import pytest
import torch

from blockscale.errors import DeviceError
from blockscale.formats.checks import check_device


def test_a_gpu_that_is_not_here_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda:3", torch.device("cuda", 2)):
        with pytest.raises(DeviceError, match="torch sees 2 here"):
            check_device(device)
    check_device("cuda:1")
    check_device("cuda")
