"""Peers of a grouped GEMM: our other kernels, torch's grouped GEMMs in bf16 and rowwise FP8, and ours with equal groups
or with spare capacity in each group.

As in `product_peers.py`, each peer takes the operands that it needs, and casts are not timed. torch checks group sizes
on the device and aborts the program at an unsupported one, so such a peer is not started.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..grouped import scaled_grouped_mm
from ..registry import Request
from .grouped_products import Grouped, KGrouped, MGrouped
from .peers import Peer
from .product_peers import FAST, judged, other_kernels
from .products import gate_db

ALL_PEERS = frozenset({"rows", "bf16", "rowwise"})
BALANCED, PLACED = "balanced", "with room"
# row multiple of a group in torch's k-grouped FP8 GEMM: 16 bytes
_ALIGNED = 16


def multiply(operands: Grouped) -> Tensor:
    """Our grouped GEMM, by the kernel that the registry selects."""
    return scaled_grouped_mm(operands.a, operands.b, operands.offs, operands.dtype, accumulate=operands.acc)


def peers(
    request: Request, sizes: Sequence[int], names: frozenset[str], *, even: bool, decoding: bool = False
) -> dict[str, Peer | str]:
    """The named peers of a grouped GEMM, and ours with other groups.  even: groups are equal already.  decoding: add
    ours with spare capacity in every group."""
    found: dict[str, Peer | str] = {}
    gate = gate_db(request.formats[0], request.dtype)
    if "rows" in names:
        found |= other_kernels(request, multiply)
    if not even:
        found[BALANCED] = equal_groups_peer(gate)
    if decoding:
        found[PLACED] = capacity_peer(gate)
    if "bf16" in names:
        found["bf16"] = Peer(plain, accuracy=lambda operands: operands.plain_accuracy(plain))
    if "rowwise" in names:
        if request.op == "k_grouped" and any(size % _ALIGNED for size in sizes):
            found[FAST] = f"not run: takes groups in multiples of {_ALIGNED} rows only"
        else:
            found[FAST] = Peer(rowwise, accuracy=lambda operands: operands.rowwise_accuracy(rowwise))
    return found


def equal_groups_peer(gate: float) -> Peer:
    """Our GEMM with the same rows and FLOPs in equal groups."""
    one = judged(multiply, gate)
    assert one.accuracy is not None
    accuracy = one.accuracy
    return Peer(lambda o: multiply(o.with_equal_groups), gate_db=gate, accuracy=lambda o: accuracy(o.with_equal_groups))


def capacity_peer(gate: float) -> Peer:
    """Our GEMM with the same rows in groups with spare capacity; accuracy is computed on the occupied rows."""

    def run(operands: MGrouped) -> Tensor:
        a, starts, ends, _ = operands.with_capacity
        return scaled_grouped_mm(a, operands.b, ends, operands.dtype, starts=starts)

    return Peer(run, gate_db=gate, accuracy=lambda o: o.accuracy(lambda o: run(o)[o.with_capacity[3]]))


def plain(operands: Grouped) -> Tensor:
    """Grouped GEMM of the bf16 matrices; on a CPU of their values in fp32, as `product_peers.plain`."""
    x, w = operands.x, operands.w
    if not x.is_cuda:
        x, w = x.float(), w.float()
    a, b = (x.mT, w) if isinstance(operands, KGrouped) else (x, w.mT)
    return functional.grouped_mm(a, b, offs=operands.offs)


def rowwise(operands: Grouped) -> Tensor:
    """Grouped FP8 GEMM with one scale per row of each group and fast accumulation."""
    x, scale_x, w, scale_w = operands.rowwise
    if not isinstance(operands, KGrouped):
        scale_x, scale_w = scale_x[:, 0], scale_w[:, :, 0]
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]
        x, w.mT, scale_x, scale_w, offs=operands.offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )
