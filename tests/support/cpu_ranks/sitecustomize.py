"""Ranks on the CPU for accelerate, which turns FSDP into DDP there: it is told that gloo ranks are GPUs.

Python imports a file of this name at its start, so that a script of a page runs as it is; see
tests/integrations/test_accelerate.py.
"""

import os

if "LOCAL_RANK" in os.environ:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda self, *args, **named: ("gloo", DistributedType.MULTI_GPU)
