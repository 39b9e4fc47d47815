"""Models that no longer train: layers with stored codes and scales, and checkpoints loaded without decoding.

frozen_layer.py  buffers of a quantized weight, and its state_dict
linear.py        QuantizedLinear
"""

from .linear import QuantizedLinear

__all__ = ["QuantizedLinear"]
