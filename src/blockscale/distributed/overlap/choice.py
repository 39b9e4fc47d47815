"""Whether a call overlaps: what was asked for, what the call allows, and what the model promises."""

from __future__ import annotations

import platform
from typing import Literal

import torch
from torch import Tensor

from ...errors import ShardingError, check_name, refuse
from ..collectives import Ranks
from .link import Link

Overlap = Literal["auto", "on", "off"]
OVERLAPS: tuple[Overlap, ...] = ("auto", "on", "off")
# machines that keep the order of stores, and of loads, by other cores' view
_ORDERED = ("x86_64", "AMD64")


def link_for(overlap: Overlap, x: Tensor, ranks: Ranks) -> Link | None:
    """The link that a call uses, or None for a collective before or after the product.

    overlap: "on" raises if the call cannot overlap; "auto" overlaps where the model promises a gain, which on CPU ranks
    is never. All ranks pass the same and decide alike.
    """
    check_name(overlap, OVERLAPS, "overlap")
    if overlap == "off" or (overlap == "auto" and x.device.type == "cpu"):
        return None
    why = reason_against(x, ranks)
    if why is None:
        return Link.of(ranks)
    if overlap == "on":
        refuse(f'overlap="on" for {why[0]}', rule=why[1], fix=f'{why[2]}, or pass overlap="auto"', error=ShardingError)
    return None


def reason_against(x: Tensor, ranks: Ranks) -> tuple[str, str, str] | None:
    """What of a call cannot overlap, the rule, and the fix; None if it can."""
    if ranks.size == 1:
        return "one rank", "communication that hides needs another rank", "pass a group of several ranks"
    if torch.compiler.is_compiling():
        rule = "side streams and waits are not traced"
        return "compiled code", rule, "leave the layer out of torch.compile"
    if platform.machine() not in _ORDERED:
        rule = "rows must be there when a flag is, which processors guarantee that keep stores in order"
        return f"a {platform.machine()}", rule, "run on x86-64"
    if x.device.type != "cpu":
        return f"tensors on {x.device.type}", "side streams exist for CPU ranks only, so far", "move to the CPU"
    return None
