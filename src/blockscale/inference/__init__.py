"""Models that no longer train: layers with stored codes and scales, and checkpoints loaded without decoding.

frozen_layer.py  buffers of a quantized weight, and its state_dict
linear.py        QuantizedLinear
mlp.py           QuantizedSwiGLU
experts.py       QuantizedGroupedLinear, QuantizedExperts
freeze.py        freeze_: layers of a model as frozen ones
report.py        FrozenReport
"""

from ..nn.adapters import ClampedSwiGLU
from .experts import QuantizedExperts, QuantizedGroupedLinear
from .freeze import freeze_
from .linear import QuantizedLinear
from .mlp import QuantizedSwiGLU
from .report import FrozenReport

__all__ = [
    "ClampedSwiGLU",
    "FrozenReport",
    "QuantizedExperts",
    "QuantizedGroupedLinear",
    "QuantizedLinear",
    "QuantizedSwiGLU",
    "freeze_",
]
