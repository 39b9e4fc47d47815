"""Layers over several GPUs, on the engines that people have: FSDP2 that gathers codes (`fsdp.py`), tensor parallel
layers that cast before they gather (`tensor_parallel.py`, `styles.py`), and experts that are divided among ranks
(`expert_parallel.py`, `dispatch.py`). `world.py`, `failures.py` and `agreement.py` have what ranks agree on, and how
one rank's error ends all."""

from __future__ import annotations

from .deep_ep import DeepEP
from .dispatch import AllToAll, Dispatcher
from .expert_parallel import expert_parallel_
from .failures import naming_failures
from .fixed_capacity import FixedCapacity
from .fsdp import GatherReport, gather_low_
from .styles import ColwiseParallel, RowwiseParallel, SwiGLUParallel
from .tensor_parallel import column_parallel, row_parallel, swiglu_parallel
from .underflows import Underflows, count_underflows

__all__ = [
    "AllToAll",
    "ColwiseParallel",
    "DeepEP",
    "Dispatcher",
    "FixedCapacity",
    "GatherReport",
    "RowwiseParallel",
    "SwiGLUParallel",
    "Underflows",
    "column_parallel",
    "count_underflows",
    "expert_parallel_",
    "gather_low_",
    "naming_failures",
    "row_parallel",
    "swiglu_parallel",
]
