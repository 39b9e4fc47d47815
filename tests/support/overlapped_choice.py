"""Cases of overlapped calls (`overlapped.py`): whether they overlap, what they say of it, and what they refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import blockscale as bs
from blockscale.autograd import get_recipe
from blockscale.distributed import (
    column_parallel,
    gather_activation,
    grouped_swiglu_parallel,
    row_parallel,
    swiglu_parallel,
)
from blockscale.distributed.collectives import ranks_of
from blockscale.distributed.overlap import (
    all_gather_grouped_mm,
    all_gather_mm,
    decision,
    explain,
    grouped_mm_reduce_scatter,
    mm_reduce_scatter,
)
from blockscale.distributed.overlap.choice import OVERLAPS, link_for
from blockscale.distributed.overlap.transport import HostTransport
from support import overlapped_experts
from support.overlapped_link import device, said_by
from support.rank_program import Case
from support.tokens_sharded import world


def refused_operands() -> dict[str, str]:
    """Messages of operands that do not travel, or that no product combines."""
    x = torch.randn(32, 128)
    q, square = bs.quantize(x, "mxfp8_e4m3", scale_layout="plain"), bs.quantize(x, "nvfp4", scale_layout="plain")
    calls: dict[str, Callable[[], Any]] = {
        "tensor scale": lambda: all_gather_mm(square, square, group=world()),
        "mixed": lambda: all_gather_mm(q, x, group=world()),
        "mixed tensors": lambda: all_gather_mm(x, q, group=world()),
        "none": lambda: all_gather_mm(q, group=world()),
        "biases": lambda: all_gather_mm(q, q, group=world(), biases=[None, None]),
        "rows": lambda: mm_reduce_scatter(x[:31], x, group=world()),
        "axes": lambda: mm_reduce_scatter(x[None], x, group=world()),
    }
    return said_by(calls)


def refusals() -> dict[str, str]:
    """Messages of calls that cannot overlap."""
    x, up = torch.randn(128, 128), torch.randn(128, 128)
    options: dict[str, Any] = {"group": world(), "recipe": "mxfp8"}
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    first = dist.get_rank() == 0
    calls: dict[str, Callable[[], Any]] = {
        "on one rank": lambda: column_parallel(x, up, **options, overlap="on" if first else "off"),
        "after it": lambda: column_parallel(x, up, **options, overlap="on"),
        "name": lambda: column_parallel(x, up, **options, overlap="yes"),  # pyright: ignore[reportArgumentType]
        "values and operands": lambda: gather_activation(
            x, get_recipe("mxfp8").replace(saves="source"), group=world(), overlap="on"
        ),
        "gathered": lambda: column_parallel(
            gather_activation(x, group=world(), recipe="mxfp8"), up, **options, overlap="on"
        ),
        "alone": lambda: column_parallel(x, up, group=alone, recipe="mxfp8", overlap="on"),
    }
    with patch.object(torch.compiler, "is_compiling", lambda: True):
        compiled = said_by({"compiled": lambda: column_parallel(x, up, **options, overlap="on")})
    return said_by(calls) | compiled


def explained() -> dict[str, Any]:
    """Explanations as text, and whether they say what a call does."""
    sizes: Any = ("all_gather_mm", 4096, 49152, 12288)
    said: dict[str, Any] = {}
    agree = True
    for overlap in OVERLAPS:
        found = explain(*sizes, group=world(), device="cpu", overlap=overlap, machine="h200")
        agree &= found.overlaps == (link_for(overlap, torch.zeros(1), ranks_of(world())) is not None)
        said[overlap] = str(found)
    said["experts"] = str(
        explain("all_gather_grouped_mm", 8192, 8192, 8192, group=world(), device="cpu", ep=2, experts=8, topk=2)
    )
    return said | {"agree": agree}


def decided() -> dict[str, Any]:
    """What the model is asked for calls with overlap="auto", as if measured here, and whether its answer decides."""
    up, row, x, y = torch.randn(32, 64), torch.randn(96, 32), torch.randn(32, 64), torch.randn(64, 32)
    gate_up, experts, outs = torch.randn(64, 64), torch.randn(3, 64, 64), torch.randn(3, 64, 32)
    options: dict[str, Any] = {"group": world(), "recipe": "mxfp8"}
    ids, gates = torch.arange(64).view(32, 2) % 3, torch.full((32, 2), 0.5)
    own, other = range(2 * dist.get_rank(), 2 * dist.get_rank() + 2), functools.partial(bs.quantize, format="mxfp4")

    def both_experts(**chosen: Any) -> None:
        routing = bs.sort_by_expert(ids, 4)
        (h,), found = all_gather_grouped_mm(
            x, torch.randn(2, 48, 64), routing=routing, gate_weights=gates, experts=own, **chosen
        )
        grouped_mm_reduce_scatter(h, torch.randn(2, 64, 48).bfloat16(), found, **chosen)

    calls: dict[str, Callable[[], Any]] = {
        "column": lambda: column_parallel(x, up, **options),
        "row": lambda: row_parallel(y, row, **options),
        "mlp": lambda: swiglu_parallel(x, gate_up, row, **options),
        "gathers": lambda: all_gather_mm(x, up, torch.randn(16, 64), group=world()),
        "sums": lambda: mm_reduce_scatter(y, row, group=world()),
        "experts": lambda: grouped_swiglu_parallel(x, experts, outs, bs.sort_by_expert(ids, 3), gates, **options),
        "divided experts": lambda: both_experts(group=world()),
        "no model": lambda: all_gather_mm(other(x), other(up), group=world()),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        for answer in (True, False):
            with (
                patch.object(decision, "MEASURED_ON", {"cpu"}),
                patch.object(HostTransport, "machine", lambda self, group: "h800"),
                patch.object(decision, "pays", return_value=answer) as pays,
                overlapped_experts.moved() as link,
            ):
                call()
            assert bool(link.gathers or link.sums) is (answer and name != "divided experts"), name
            assert all(asked.args[:2] == ("h800", 2) for asked in pays.call_args_list)
            found[name] = [list(work) for asked in pays.call_args_list for work in asked.args[2]]
    return found


def cases(ranks: int) -> Iterator[Case]:
    """Of two ranks."""
    if ranks != 2:
        return
    yield "explained", explained
    if device().type == "cpu":
        yield "decided", decided
        yield "refusals", refusals
        yield "refused operands", refused_operands
