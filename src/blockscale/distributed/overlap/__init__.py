"""Communication behind compute: products that start on the rows that are there, and send rows that are done.

`link.py` moves rows between ranks beside products, through memory that all ranks map, on a side stream
(`transport.py`): a thread and files in memory on CPU ranks (`side.py`, `arena.py`), a CUDA stream and symmetric memory
on GPUs (`cuda.py`, `signals.py`). `choice.py` decides whether a call overlaps; otherwise a collective comes before the
product or after it (`sharing.py`). `column_parallel`, `row_parallel` and `swiglu_parallel` use it, forward and
backward, by `overlap=`; `all_gather_mm` and `mm_reduce_scatter` are the same without gradients.
"""

from __future__ import annotations

from .ops import all_gather_mm, check, mm_reduce_scatter

__all__ = ["all_gather_mm", "check", "mm_reduce_scatter"]
