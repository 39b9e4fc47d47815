"""What the library chose and why, whether this machine computes right, and what quantisation does to a tensor, to every
layer of a model while it trains, and to its loss."""

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
