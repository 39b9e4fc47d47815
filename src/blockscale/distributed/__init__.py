"""Layers over several GPUs, on the engines that people have: FSDP2 that gathers codes (`fsdp.py`), tensor parallel
layers that cast before they gather (`tensor_parallel.py`, `styles.py`), experts that are divided among ranks
(`expert_parallel.py`, `dispatch.py`), and experts that are cut along their hidden units
(`expert_tensor_parallel.py`). `world.py`, `failures.py` and `agreement.py` have what ranks agree on, and how one
rank's error ends all."""

from __future__ import annotations

from .deep_ep import DeepEP
from .dispatch import AllToAll, Dispatcher
from .expert_parallel import expert_parallel_
from .expert_styles import ExpertTensorParallel
from .expert_tensor_parallel import grouped_swiglu_parallel
from .failures import naming_failures
from .fixed_capacity import FixedCapacity
from .fsdp import GatherReport, gather_low_
from .gathered_activation import gather_activation
from .styles import ColwiseParallel, RowwiseParallel, SwiGLUParallel
from .tensor_parallel import column_parallel, row_parallel, swiglu_parallel
from .underflows import Underflows, count_underflows

__all__ = [
    "AllToAll",
    "ColwiseParallel",
    "DeepEP",
    "Dispatcher",
    "ExpertTensorParallel",
    "FixedCapacity",
    "GatherReport",
    "RowwiseParallel",
    "SwiGLUParallel",
    "Underflows",
    "column_parallel",
    "count_underflows",
    "expert_parallel_",
    "gather_activation",
    "gather_low_",
    "grouped_swiglu_parallel",
    "naming_failures",
    "row_parallel",
    "swiglu_parallel",
]
