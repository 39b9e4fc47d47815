"""Selected kernels and the reasons, a self-check of this machine, and quantization error of tensors, of every layer of
a model in training, and in its loss."""

from .advice import Advice, advise
from .doctor import DoctorReport, doctor
from .explain import explain
from .filters import load_filter
from .layers import LayerNumerics, Numerics, layer_numerics, sample
from .quality import Quality, measure

__all__ = [
    "Advice",
    "DoctorReport",
    "LayerNumerics",
    "Numerics",
    "Quality",
    "advise",
    "doctor",
    "explain",
    "layer_numerics",
    "load_filter",
    "measure",
    "sample",
]
