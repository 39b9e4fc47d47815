"""Layouts of checkpoints, a file for each: how a weight's codes and scales are named and stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError, check_name, refuse
from ..files import Stored
from .blockscale import Native
from .compressed_tensors import CompressedTensors
from .deepseek import DeepSeek
from .gpt_oss import GptOss
from .layout import Entry, Layout, Written
from .modelopt import ModelOpt
from .unquantized import Unquantized

__all__ = ["LAYOUTS", "Entry", "Layout", "Written", "find_layout", "get_layout"]

# in the order in which a folder is asked
LAYOUTS: dict[str, Layout] = {
    each.name: each for each in (Native(), DeepSeek(), GptOss(), CompressedTensors(), ModelOpt(), Unquantized())
}


def get_layout(name: str) -> Layout:
    """A layout by its name."""
    check_name(name, LAYOUTS, "layout")
    return LAYOUTS[name]


def find_layout(config: Mapping[str, Any], stored: Mapping[str, Stored], folder: object) -> Layout:
    """The layout of a folder, by its config or, without a quantization_config, by its names."""
    for layout in LAYOUTS.values():
        if layout.is_of(config, stored):
            return layout
    method = config.get("quantization_config", {}).get("quant_method")
    refuse(
        f"{folder} has quant_method {method!r}",
        rule=f"layouts that are read are {', '.join(LAYOUTS)} and one GGUF file",
        fix="name the layout if it is one of these: open(folder, layout=...)",
        error=CheckpointError,
    )
