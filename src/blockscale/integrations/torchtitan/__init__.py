"""Recipes in torchtitan 0.3: layers, a converter, overrides, activation checkpointing and ready-made runs.

    torchrun --nproc-per-node 8 -m torchtitan.train --module blockscale.integrations.torchtitan \\
        --config llama3_debug_fp8_blockwise

docs/torchtitan.md has every way to switch them on. Nothing of torchtitan's own code is changed.
"""

from ..packages import check_package

check_package("torchtitan", "0.3.", "titan", "before it models were converted as modules, and now as configs")

from .checkpointing import BlockScaledAC  # noqa: E402
from .convert import BlockScaledConverter  # noqa: E402
from .experts import BlockScaledExperts  # noqa: E402
from .linear import BlockScaledLinear  # noqa: E402
from .metrics import BlockScaledMetrics  # noqa: E402

__all__ = [
    "BlockScaledAC",
    "BlockScaledConverter",
    "BlockScaledExperts",
    "BlockScaledLinear",
    "BlockScaledMetrics",
]
