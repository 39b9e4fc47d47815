"""Communication behind compute: products that start on the rows that are there, and send rows that are done.

`link.py` moves rows between ranks beside products, through memory that all ranks map, on a side stream
(`transport.py`): a thread and files in memory on CPU ranks (`side.py`, `arena.py`), a CUDA stream and symmetric memory
on GPUs (`cuda.py`, `signals.py`). `choice.py` decides whether a call overlaps; otherwise a collective comes before the
product or after it (`sharing.py`). `column_parallel`, `row_parallel` and `swiglu_parallel` use it, forward and
backward, by `overlap=`, and so do experts (`expert_sharing.py`, `expert_rows.py`). The four operations here are the
same without gradients.
"""

from __future__ import annotations

from .expert_ops import GatheredRows, all_gather_grouped_mm, grouped_mm_reduce_scatter
from .explained import explain
from .ops import all_gather_mm, check, mm_reduce_scatter

__all__ = [
    "GatheredRows",
    "all_gather_grouped_mm",
    "all_gather_mm",
    "check",
    "explain",
    "grouped_mm_reduce_scatter",
    "mm_reduce_scatter",
]
