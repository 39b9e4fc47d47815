"""Communication behind compute: products that start on the rows that are there, and send rows that are done.

`link.py` moves rows between ranks beside products, through memory that all ranks map (`arena.py`), on a side stream
(`side.py`). `choice.py` decides whether a call overlaps. `tensor_parallel.py` of the folder above uses it, forward and
backward, by `overlap=`.
"""
