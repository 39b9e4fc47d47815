"""Names of Gluon, Triton's language of explicit layouts, for Triton 3.6 to 3.9.

The only file that imports them, so that a renamed function is one line. The import fails where Triton has no Gluon;
then the modules that need it register no kernels.
"""

# pyright: basic, reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# by presence, not by version: 3.8 has both names, and from 3.9 on the old ones raise
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
# barrier of the threads of one warp-specialized partition
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "thread_barrier",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
