"""What else multiplies the same groups: the other rows of our table, torch's grouped products in bf16 and in FP8 with a
scale per row, and ours with rows in equal groups, or with room for more of each.

As in `product_peers.py` each takes the form that it needs, and casts are outside of the timing. torch looks at group
sizes on the device and stops the program at one that it does not take, so such a peer is not even started.
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
from .product_peers import FAST, judged, table_rows
from .products import gate_db

ALL_PEERS = frozenset({"rows", "bf16", "rowwise"})
BALANCED, PLACED = "balanced", "with room"
# rows of a group in a product that contracts them by FP8 units: 16 bytes
_ALIGNED = 16


def multiply(operands: Grouped) -> Tensor:
    """Ours, by whom the registry selects."""
    return scaled_grouped_mm(operands.a, operands.b, operands.offs, operands.dtype, accumulate=operands.acc)


def peers(
    request: Request, sizes: Sequence[int], names: frozenset[str], *, even: bool, decoding: bool = False
) -> dict[str, Peer | str]:
    """The named peers of a grouped product, and ours with other groups.  even: groups are equal, so that there is
    nothing to compare them with.  decoding: also ours where every group has room for more rows."""
    found: dict[str, Peer | str] = {}
    gate = gate_db(request.formats[0], request.dtype)
    if "rows" in names:
        found |= table_rows(request, multiply)
    if not even:
        found[BALANCED] = judged_evenly(gate)
    if decoding:
        found[PLACED] = judged_placed(gate)
    if "bf16" in names:
        found["bf16"] = Peer(plain, accuracy=lambda operands: operands.plain_accuracy(plain))
    if "rowwise" in names:
        if request.op == "k_grouped" and any(size % _ALIGNED for size in sizes):
            found[FAST] = f"not run: takes groups in multiples of {_ALIGNED} rows only"
        else:
            found[FAST] = Peer(rowwise, accuracy=lambda operands: operands.rowwise_accuracy(rowwise))
    return found


def judged_evenly(gate: float) -> Peer:
    """Ours with as many rows and FLOPs in equal groups."""
    one = judged(multiply, gate)
    assert one.accuracy is not None
    accuracy = one.accuracy
    return Peer(lambda o: multiply(o.evenly), gate_db=gate, accuracy=lambda o: accuracy(o.evenly))


def judged_placed(gate: float) -> Peer:
    """Ours with the same rows in groups that have room for more; those that count are judged."""

    def run(operands: MGrouped) -> Tensor:
        a, starts, ends, _ = operands.placed
        return scaled_grouped_mm(a, operands.b, ends, operands.dtype, starts=starts)

    return Peer(run, gate_db=gate, accuracy=lambda o: o.accuracy(lambda o: run(o)[o.placed[3]]))


def plain(operands: Grouped) -> Tensor:
    """The product of the bf16 matrices; on a CPU of their values in fp32, as `product_peers.plain`."""
    x, w = operands.x, operands.w
    if not x.is_cuda:
        x, w = x.float(), w.float()
    a, b = (x.mT, w) if isinstance(operands, KGrouped) else (x, w.mT)
    return functional.grouped_mm(a, b, offs=operands.offs)


def rowwise(operands: Grouped) -> Tensor:
    """FP8 with one scale per row of each group and fast accumulation."""
    x, scale_x, w, scale_w = operands.rowwise
    if not isinstance(operands, KGrouped):
        scale_x, scale_w = scale_x[:, 0], scale_w[:, :, 0]
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]
        x, w.mT, scale_x, scale_w, offs=operands.offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )
