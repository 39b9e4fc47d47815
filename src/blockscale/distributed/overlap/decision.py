"""What `overlap="auto"` decides: the model's times of a call's operations, on a machine that all ranks have."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...autograd.recipe import Recipe
from ...roofline.model import stored_bytes
from ...roofline.overlap import (
    LEAST_FLOPS,
    LEAST_GAIN,
    OVERLAP_PAYLOADS,
    Operation,
    Prediction,
    gathers,
    overlap_gain,
    overlap_machine,
)
from .chunks import Part, stretch_of

# kinds of devices on which "auto" overlaps at all: where overlapped calls have been run and timed
MEASURED_ON: frozenset[str] = frozenset()


class Work(NamedTuple):
    """An operation of a call.  m, n, k: global sizes.  payload: name for the model; None if it has none.  experts,
    topk: of a mixture, of whose experts every rank has a part."""

    op: Operation
    m: int
    n: int
    k: int
    payload: str | None
    experts: int = 1
    topk: int = 1


def expert_work(
    op: Operation, weight: tuple[int, ...], tokens: int, topk: int, ranks: int, payload: str | None
) -> Work:
    """Layer 0 or 1 of a mixture whose hidden units are cut.  weight: [E, N, K] of a rank.  tokens: of all ranks.

    >>> work = expert_work("all_gather_grouped_mm", (8, 1024, 4096), 8192, 2, 8, "bf16")
    >>> work.n, work.k, work.experts
    (8192, 4096, 8)
    """
    experts, n, k = weight
    n, k = (n * ranks, k) if op == "all_gather_grouped_mm" else (n, k * ranks)
    return Work(op, tokens, n, k, payload if topk <= experts else None, experts, topk)


def predict(
    machine: str, ranks: int, work: Work, *, ep: int = 1, product: float | None = None, link: str | None = None
) -> Prediction:
    """Times of an operation in the chunks that a link chooses.  ep: groups of ranks that divide the experts.  product:
    its measured seconds in one launch.  link: between GPUs; the machine's own if None."""
    op, m, n, k, payload, experts, topk = work
    tp = ranks // ep
    columns, features = (n // tp, k) if gathers(op) else (n, k // tp)
    travelling = OVERLAP_PAYLOADS[payload or "bf16"][0] if gathers(op) else None
    sent = int(stored_bytes(m * (features if gathers(op) else columns), travelling, 2)) // ranks
    rows = m * topk // (ranks * ep)
    part = Part(rows, columns, features, sent, payload != "bf16", experts // ep if "grouped" in op else 0)
    return overlap_gain(
        op, m, n, k, tp=tp, ep=ep, experts=experts, topk=topk, payload=payload or "",
        machine=overlap_machine(machine, link), product=product,
        stretch=stretch_of(machine, link, ranks, part),
    )  # fmt: skip


@functools.lru_cache(4096)
def pays(machine: str, ranks: int, works: tuple[Work, ...]) -> bool:
    """Whether the operations of a call gain 5 % or more by overlap, and have 1e11 FLOPs or more on a rank.

    >>> up = Work("all_gather_mm", 16384, 49152, 12288, "fp8_blockwise_pow2")
    >>> pays("h800", 8, (up,)), pays("h800", 8, (up._replace(m=64),)), pays("h800", 8, (up._replace(payload=None),))
    (True, False, False)
    """
    if not works or any(each.payload is None for each in works):
        return False
    found = [predict(machine, ranks, each) for each in works]
    gain = sum(each.serial for each in found) / sum(each.overlapped for each in found)
    return gain >= LEAST_GAIN and sum(each.flops for each in found) >= LEAST_FLOPS


def payload_of(recipe: Recipe) -> str | None:
    """The model's name for what travels, and for the product; None if it has none.

    >>> from blockscale.autograd import get_recipe
    >>> [payload_of(get_recipe(name)) for name in ("bf16", "fp8_blockwise_pow2", "mxfp8", "nvfp4")]
    ['bf16', 'fp8_blockwise', 'mxfp8', None]
    """
    if recipe.fprop is None:
        return "bf16"
    return payload_of_formats(*(recipe.operand(role).format for role in ("fprop_x", "fprop_w")))  # pyright: ignore[reportOptionalMemberAccess]


def payload_of_formats(x: str | None, weight: str | None) -> str | None:
    """The model's name for operands of these formats; None for tensors."""
    return next((name for name, formats in OVERLAP_PAYLOADS.items() if formats == (x, weight)), None)
