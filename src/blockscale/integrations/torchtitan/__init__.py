"""Recipes in torchtitan 0.3: layers, a converter, overrides, activation checkpointing and ready-made runs.

    torchrun --nproc-per-node 8 -m torchtitan.train --module blockscale.integrations.torchtitan \\
        --config llama3_debug_fp8_blockwise

docs/torchtitan.md has every way to switch them on. torchtitan's own code is not changed. Names are imported
lazily, since importing torchtitan takes seconds; its version is checked at once.
"""

import importlib
from typing import TYPE_CHECKING

from ..packages import check_package

check_package("torchtitan", "0.3.", "titan", "before it models were converted as modules, and now as configs")

_PUBLIC = {
    "BlockScaledAC": "checkpointing",
    "BlockScaledConverter": "convert",
    "BlockScaledExperts": "experts",
    "BlockScaledLinear": "linear",
    "BlockScaledMetrics": "metrics",
}
__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from .checkpointing import BlockScaledAC as BlockScaledAC
    from .convert import BlockScaledConverter as BlockScaledConverter
    from .experts import BlockScaledExperts as BlockScaledExperts
    from .linear import BlockScaledLinear as BlockScaledLinear
    from .metrics import BlockScaledMetrics as BlockScaledMetrics


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
