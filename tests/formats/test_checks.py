"""Argument checks."""

from __future__ import annotations

import pytest
import torch

from blockscale.errors import DeviceError
from blockscale.formats.checks import check_device


def test_a_missing_gpu_index_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda:3", torch.device("cuda", 2)):
        with pytest.raises(DeviceError, match="torch sees 2 here"):
            check_device(device)
    check_device("cuda:1")
    check_device("cuda")
