"""Models that no longer train: layers with stored codes and scales, and checkpoints loaded without decoding.

frozen_layer.py  buffers of a quantized weight, and its state_dict
linear.py        QuantizedLinear
mlp.py           QuantizedSwiGLU
experts.py       QuantizedGroupedLinear, QuantizedExperts
freeze.py        freeze_: layers of a model as frozen ones
split_linear.py  SplitLinear: parts of a fused layer that cannot be joined
load.py          load: a checkpoint as a model; stored_activations.py: how its inputs are cast
decoder.py       Decoder: logits symbol by symbol, with a cache; graphs.py: a call as a CUDA graph
sampling.py      generate: greedy or random text
report.py        FrozenReport
"""

from ..nn.adapters import ClampedSwiGLU
from .decoder import Decoder
from .experts import QuantizedExperts, QuantizedGroupedLinear
from .freeze import freeze_
from .linear import QuantizedLinear
from .load import Loaded, load
from .mlp import QuantizedSwiGLU
from .report import FrozenReport
from .sampling import generate
from .split_linear import SplitLinear

__all__ = [
    "ClampedSwiGLU",
    "Decoder",
    "FrozenReport",
    "Loaded",
    "QuantizedExperts",
    "QuantizedGroupedLinear",
    "QuantizedLinear",
    "QuantizedSwiGLU",
    "SplitLinear",
    "freeze_",
    "generate",
    "load",
]
