"""`explain`: the path that an overlapped operation takes, why, and the model's times."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import check_name, refuse
from ...hardware import default_device, gpu_name, named_device
from ...roofline.ceilings import machine_of
from ...roofline.overlap import OVERLAP_PAYLOADS, Operation, Prediction
from ..collectives import ranks_of
from . import decision
from .choice import OVERLAPS, Overlap, reason_against
from .decision import Work

# in words, what a call does
_PATHS = {True: "beside the product", False: "by a collective"}


class OverlapExplanation(NamedTuple):
    """The path of a call; print it.  overlaps: whether it communicates beside its product.  reason: of that.
    prediction: the model's times, None on a machine that it does not know.  machine: short name, or None."""

    call: str
    overlaps: bool
    reason: str
    prediction: Prediction | None
    machine: str | None

    def __str__(self) -> str:
        lines = [f"{self.call}: {_PATHS[self.overlaps]}, {self.reason}"]
        if self.prediction is None:
            return f"{lines[0]}\nno model of this machine"
        found = self.prediction
        times = "product {:,.0f} µs, communication {:,.0f} µs, overlapped {:,.0f} µs, one after the other {:,.0f} µs"
        each = (found.product, found.communication, found.overlapped, found.serial)
        lines.append(f"model of {self.machine}, not measured: {times.format(*(1e6 * seconds for seconds in each))}")
        lines.append(f"which promises: {found.decision}, bound by the {found.bound}")
        return "\n".join(lines)


def explain(
    op: Operation,
    m: int,
    n: int,
    k: int,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    device: torch.device | str | None = None,
    overlap: Overlap = "auto",
    payload: str = "bf16",
    ep: int = 1,
    experts: int = 1,
    topk: int = 1,
    machine: str | None = None,
) -> OverlapExplanation:
    """The path that an operation takes over the ranks of a group. Nothing is communicated.

    m, n, k, payload, ep, experts, topk: global sizes, as for `roofline.overlap_gain`.  device: of the operands, by
    default the current one.  machine: short name such as "h200"; by default that of the device.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> print(explain("all_gather_mm", 4096, 49152, 12288, group=dist.group.WORLD, device="cpu"))
    all_gather_mm M=4,096 N=49,152 K=12,288, 1 ranks: by a collective, since one rank has nothing to hide
    no model of this machine
    >>> dist.destroy_process_group()
    """
    ranks, where = ranks_of(group), default_device() if device is None else named_device(device)
    check_name(overlap, OVERLAPS, "overlap")
    if ranks.size % ep:
        refuse(f"ep={ep} of {ranks.size} ranks", "experts are divided among groups of ranks", "pass a divisor")
    known = machine or (machine_of(gpu_name(where)) if where.type == "cuda" else None)
    prediction = None
    if known is not None:
        check_name(payload, OVERLAP_PAYLOADS, "payload")
        prediction = decision.predict(known, ranks.size, Work(op, m, n, k, payload, experts, topk), ep=ep)
    against = reason_against(where, ranks)
    if overlap == "off":
        reason = 'as overlap="off" asks for'
    elif ranks.size == 1:
        reason = "since one rank has nothing to hide"
    elif against is not None:
        reason = f"since {against[1]}: {against[0]}"
    elif overlap == "on":
        reason = 'as overlap="on" asks for'
    elif where.type == "cpu":
        reason = "since CPU ranks gain nothing by overlap"
    elif where.type not in decision.MEASURED_ON:
        reason = 'since overlap="auto" overlaps on GPUs only once it has been measured there'
    else:
        reason = "since there is no model of this machine" if prediction is None else f"as {prediction.decision}"
    gains = overlap == "auto" and where.type in decision.MEASURED_ON and prediction is not None and prediction.pays
    call = f"{op} M={m:,} N={n:,} K={k:,}, {ranks.size} ranks"
    overlaps = against is None and (overlap == "on" or gains)
    return OverlapExplanation(call, overlaps, reason, prediction, known)
