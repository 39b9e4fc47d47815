"""Layers over several GPUs, on the engines that people have: FSDP2 that gathers codes (`fsdp.py`), and experts that are
divided among ranks (`expert_parallel.py`, `dispatch.py`)."""

from __future__ import annotations

from .deep_ep import DeepEP
from .dispatch import AllToAll, Dispatcher
from .expert_parallel import expert_parallel_
from .fixed_capacity import FixedCapacity
from .fsdp import GatherReport, gather_low_

__all__ = ["AllToAll", "DeepEP", "Dispatcher", "FixedCapacity", "GatherReport", "expert_parallel_", "gather_low_"]
