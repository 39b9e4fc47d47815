"""Whether a call overlaps: what was asked for, what the call allows, and what the model promises."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ...errors import ShardingError, check_name, refuse
from ..collectives import Ranks
from . import decision
from .decision import Work
from .link import LayerLink, Link

Overlap = Literal["auto", "on", "off"]
OVERLAPS: tuple[Overlap, ...] = ("auto", "on", "off")
# machines that keep the order of stores, and of loads, by other cores' view
_ORDERED = ("x86_64", "AMD64")


def link_for(
    overlap: Overlap, x: Tensor, ranks: Ranks, works: Callable[[], tuple[Work, ...]] = tuple
) -> LayerLink | None:
    """The link that a layer's call uses, or None for a collective before or after the product.

    overlap: "on" raises if the call cannot overlap; "auto" overlaps where the model promises a gain, which on CPU ranks
    is never, and on GPUs not before it has been measured (`MEASURED_ON`). All ranks pass the same and decide alike.
    works: makes the operations of the call for the model; without any "auto" is the collective.
    """
    check_name(overlap, OVERLAPS, "overlap")
    if overlap == "off" or (overlap == "auto" and x.device.type not in decision.MEASURED_ON):
        return None
    why = reason_against(x.device, ranks)
    if overlap == "auto":
        found = works() if why is None else ()
        machine = Link.of(ranks, x.device).machine() if found else None
        promised = machine is not None and decision.pays(machine, ranks.size, found)
        return LayerLink(Link.of(ranks, x.device)) if promised else None
    if why is not None:
        refuse(f'overlap="on" for {why[0]}', rule=why[1], fix=f'{why[2]}, or pass overlap="auto"', error=ShardingError)
    return LayerLink(Link.of(ranks, x.device))


def reason_against(device: torch.device, ranks: Ranks) -> tuple[str, str, str] | None:
    """What of a call cannot overlap, the rule, and the fix; None if it can. Whether ranks can map each other's memory
    shows when they first do."""
    if ranks.size == 1:
        return "one rank", "communication that hides needs another rank", "pass a group of several ranks"
    if torch.compiler.is_compiling():
        rule = "side streams and waits are not traced"
        return "compiled code", rule, "leave the layer out of torch.compile"
    if device.type == "cuda":
        return _reason_of_gpu()
    if device.type != "cpu":
        return f"tensors on {device.type}", "side streams exist for CPU ranks and CUDA", "move to CUDA"
    if platform.machine() not in _ORDERED:
        rule = "rows must be there when a flag is, which processors guarantee that keep stores in order"
        return f"a {platform.machine()}", rule, "run on x86-64"
    return None


def _reason_of_gpu() -> tuple[str, str, str] | None:
    if torch.version.hip is not None:
        return "a GPU of AMD", "waits read the clock of an NVIDIA GPU", "run on an NVIDIA GPU"
    if find_spec("triton") is None:
        return "a GPU without Triton", "flags are set and read by Triton kernels", "install triton"
    return None
