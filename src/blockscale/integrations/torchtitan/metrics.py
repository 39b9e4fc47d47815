"""`BlockScaledMetrics`: torchtitan's metrics without MFU.

torchtitan prints FLOP/s as a share of the bf16 peak unless layers are quantized, and it recognises only its own
quantized layers. With ours the share could exceed 100 %. tokens/s and TFLOP/s (the model's, whatever the format) stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor


class BlockScaledMetrics(MetricsProcessor):
    """Prints `mfu: N/A`: `config.metrics = derive(config.metrics, BlockScaledMetrics.Config)`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """The same fields as torchtitan's."""

    def __init__(self, config: Config, **named: Any) -> None:
        named["has_quantization"] = True
        super().__init__(config, **named)
