"""Checkpoints without quantized weights: every tensor is plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...formats.tensor import BlockScaled
from ..files import Stored
from .layout import Entry, Layout, Written, cannot_hold, check_is_values, plain_entry


class Unquantized(Layout):
    """No quantization_config, and no codes."""

    name = "unquantized"
    formats = ()

    def is_of(self, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> bool:
        return not config.get("quantization_config")

    def entries(self, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Entry]:
        for name, each in stored.items():
            check_is_values(name, each)
        return {name: plain_entry(name, each) for name, each in stored.items()}

    def store(self, name: str, q: BlockScaled) -> dict[str, Tensor]:
        cannot_hold(self.name, name, q, ("plain tensors",))
        raise AssertionError

    def describe(self, written: Written) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        return {}, {}
