"""`BlockScaledMetrics`: torchtitan's metrics without a utilisation that means nothing.

torchtitan prints FLOP/s as a share of the bf16 peak, unless it knows that layers are in low precision, and it knows
only its own. With ours the share could pass 100 %. tokens/s and TFLOP/s (those of the model, whatever the format) stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor


class BlockScaledMetrics(MetricsProcessor):
    """Prints `mfu: N/A`: `config.metrics = derive(config.metrics, BlockScaledMetrics.Config)`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, **given: Any) -> None:
        given["has_quantization"] = True
        super().__init__(config, **given)
