"""Layers over several GPUs, on the engines that people have: FSDP2 that gathers codes (`fsdp.py`)."""

from __future__ import annotations

from .fsdp import GatherReport, gather_low_

__all__ = ["GatherReport", "gather_low_"]
