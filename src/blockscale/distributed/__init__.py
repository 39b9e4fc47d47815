"""Layers over several GPUs, on the engines that people have: FSDP2 that gathers codes (`fsdp.py`), and tensor parallel
layers that cast before they gather (`tensor_parallel.py`)."""

from __future__ import annotations

from .fsdp import GatherReport, gather_low_
from .styles import ColwiseParallel, RowwiseParallel, SwiGLUParallel
from .tensor_parallel import column_parallel, row_parallel, swiglu_parallel
from .underflows import Underflows, count_underflows

__all__ = [
    "ColwiseParallel",
    "GatherReport",
    "RowwiseParallel",
    "SwiGLUParallel",
    "Underflows",
    "column_parallel",
    "count_underflows",
    "gather_low_",
    "row_parallel",
    "swiglu_parallel",
]
