"""Model of communication hidden behind a product: four operations of tensor and expert parallel layers.

    all_gather_mm              rows [M / W, K] of W ranks are gathered, then multiplied by [N / TP, K]
    mm_reduce_scatter          [M, K / TP] times [N, K / TP], summed over the ranks, M / W rows for each
    all_gather_grouped_mm      layer 0 of a mixture: gather, rows sorted by expert, grouped product
    grouped_mm_reduce_scatter  layer 1 of a mixture: grouped product, sum over a token's experts, reduce-scatter

With G seconds of the product alone, C of the communication alone, both in n chunks:

    gather   T = setup + max((1 + slowdown) G, C + G / n)          the last chunk arrives, then it is multiplied
    scatter  T = setup + max((1 + slowdown) G + C / n, C + G / n)  the last chunk is sent after the product
    serial       latency of a collective + G + C

A product in chunks takes longer than one launch where their tiles fill a GPU badly or each reads the weight. Where that
factor is known, G stands for it in the first two lines, and the last chunk of a scatter, which stays here, hides the
sending of the one before it.

Published times are within 3 % of it in the mean where G is known, and within 6 % where constants were fitted to them
(`calibration.py`). A prediction depends on global shapes and constants alone, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import check_name, refuse
from .ceilings import Ceilings, Engine, engine_for, measured, nominal
from .communication import all_gather, scatter
from .links import Kind, Link, link_of
from .model import stored_bytes

Operation = Literal["all_gather_mm", "mm_reduce_scatter", "all_gather_grouped_mm", "grouped_mm_reduce_scatter"]
Bound = Literal["product", "link"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
# formats of rows and weights by the name of a recipe; gathers carry the rows' format, sums travel in bf16
OVERLAP_PAYLOADS: Mapping[str, tuple[str | None, str | None]] = {
    "bf16": (None, None),
    "fp8_blockwise": ("fp8_1x128", "fp8_128x128"),
    "fp8_blockwise_pow2": ("fp8_1x128", "fp8_128x128"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
}
# an overlapped call promises this much over the serial one, and has this many FLOPs on a rank
LEAST_GAIN, LEAST_FLOPS = 1.05, 1e11
_BF16 = 2


# ---- machines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """A figure of the model.  value: FLOP/s, seconds, or a share.  kind: its basis.  source: the rows behind it."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True)
class OverlapMachine:
    """Constants of one machine and its link.

    bf16, fp8: FLOP/s of a large dense product.  grouped: rate of a grouped product over that.  setup: seconds that an
    overlapped call adds.  slowdown: share by which copies lengthen the product.
    """

    ceilings: Ceilings
    link: Link
    bf16: Constant
    fp8: Constant | None
    grouped: Constant
    setup: Constant
    slowdown: Constant

    def engine(self, payload: str) -> Engine:
        """Tensor cores of the product of that payload."""
        check_name(payload, OVERLAP_PAYLOADS, "payload")
        return engine_for(self.ceilings.architecture, *OVERLAP_PAYLOADS[payload])


_H100_ROWS = "Triton's AG+GEMM on 8 H100, published in symm-mem-recipes"
_GROUPED = Constant(0.9, "assumed", "tiles of gathered rows, padded for each expert")
# FLOP/s of (bf16, fp8)
_RATES: Mapping[str, tuple[Constant, Constant]] = {
    "h200": (
        Constant(682e12, "measured", "torch.mm, gemm-h200.jsonl (commit cb11969)"),
        Constant(1200e12, "measured", "1x128 @ 128x128, mean of 8 shapes, gemm-h200.jsonl (commit cb11969)"),
    ),
    "l20": (
        Constant(116e12, "published", "GEMM in the Flux performance report"),
        Constant(200e12, "assumed", "5/6 of the specification"),
    ),
}
# seconds of setup, slowdown, and the rows that both were fitted to
_FITTED: Mapping[str, tuple[float, float, str]] = {
    "h100": (60e-6, 0.08, _H100_ROWS),
    "l20": (50e-6, 0.02, "Flux performance report, 10 rows"),
    "h800": (150e-6, 0.06, "Flux performance report, 8 rows"),
}
_LINK_OF = {
    "a100": "nvlink3", "h100": "nvlink4", "h800": "nvlink4-h800", "h200": "nvlink4", "b200": "nvlink5",
    "gb200": "nvlink5", "l20": "pcie4", "rtx5090": "pcie5",
}  # fmt: skip


def overlap_machine(name: str, link: str | None = None) -> OverlapMachine:
    """Constants of a machine by its short name.  link: between its GPUs; the machine's own if None.

    >>> machine = overlap_machine("b200", link="infiniband")
    >>> machine.link.name, machine.bf16.kind, f"{machine.bf16.value / 1e12:.0f} TFLOP/s"
    ('InfiniBand, 400 Gbit/s for each GPU', 'assumed', '1551 TFLOP/s')
    """
    sheet, h200 = nominal(name), nominal("h200")
    if name in _RATES:
        bf16, fp8 = _RATES[name]
    else:
        shares = (each.value / h200.rate(units) for each, units in zip(_RATES["h200"], h200.units, strict=True))
        bf16, fp8 = (
            None if rate is None else Constant(rate * share, "assumed", "the H200's share of the specification")
            for rate, share in zip((sheet.bf16, sheet.fp8), shares, strict=True)
        )
    assert bf16 is not None
    setup, slowdown, source = _FITTED.get(name, (*_FITTED["h100"][:2], f"as fitted to {_H100_ROWS}"))
    kind: Kind = "fitted" if name in _FITTED else "assumed"
    both = Constant(setup, kind, source), Constant(slowdown, kind, source)
    return OverlapMachine(measured(name) or sheet, link_of(link or _LINK_OF[name]), bf16, fp8, _GROUPED, *both)


# ---- operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Times of one operation on one rank, in seconds.

    product, communication: each alone.  overlapped: with the communication hidden behind the product.  serial: one
    after the other.  chunks: parts of both.  flops: of the rank's product.  wire: bytes that leave a rank.  bound: what
    limits the overlapped time.
    """

    product: float
    communication: float
    overlapped: float
    serial: float
    chunks: int
    flops: float
    wire: float
    bound: Bound

    @property
    def exposed(self) -> float:
        """Seconds that the overlapped operation takes longer than its product."""
        return self.overlapped - self.product

    @property
    def efficiency(self) -> float:
        """Share of the communication that is hidden; 0 without communication, negative if overlap costs more."""
        return 1 - self.exposed / self.communication if self.communication else 0.0

    @property
    def gain(self) -> float:
        """Serial time over overlapped time."""
        return self.serial / self.overlapped

    @property
    def pays(self) -> bool:
        """True if the overlapped path is worth taking: a gain of 5 % or more, and 1e11 FLOPs or more."""
        return self.gain >= LEAST_GAIN and self.flops >= LEAST_FLOPS

    @property
    def decision(self) -> str:
        """The path to take, with the reason."""
        if self.communication and self.flops < LEAST_FLOPS:
            return f"plain: {self.flops:.1g} FLOP, below {LEAST_FLOPS:.0e}"
        if not self.communication:
            return "plain: nothing is sent"
        return f"overlap: {self.gain:.2f}x" if self.pays else f"plain: {self.gain:.2f}x, below {LEAST_GAIN}x"


def gathers(op: Operation) -> bool:
    """True if the operation gathers before its product, False if it scatters after it."""
    return op.startswith("all_gather")


def overlapped_seconds(
    op: Operation,
    product: float,
    communication: float,
    chunks: int,
    setup: float,
    slowdown: float,
    *,
    stretch: float | None = None,
) -> tuple[float, Bound]:
    """Overlapped seconds and their bound, from the seconds of both alone.  stretch: time of the product in chunks over
    that of one launch.

    >>> overlapped_seconds("all_gather_mm", 4.0, 2.0, 4, setup=0.5, slowdown=0.25)
    (5.5, 'product')
    >>> overlapped_seconds("mm_reduce_scatter", 4.0, 2.0, 4, setup=0.5, slowdown=0.25)
    (6.0, 'product')
    """
    product *= stretch or 1
    hidden = 0 if stretch is None else product / chunks
    by_product = (1 + slowdown) * product + (0 if gathers(op) else max(0.0, communication / chunks - hidden))
    by_link = communication + product / chunks
    return setup + max(by_product, by_link), "product" if by_product >= by_link else "link"


def work(
    op: Operation, m: int, n: int, k: int, *, tp: int, ep: int = 1, topk: int = 1, payload: str = "bf16"
) -> tuple[float, float]:
    """FLOPs of a rank's product, and bytes that leave a rank over its link; experts have equal loads.

    >>> work("all_gather_mm", 4096, 49152, 12288, tp=8)
    (618475290624.0, 88080384.0)
    """
    ranks = tp * ep
    own = stored_bytes(-(-m // ranks) * k, OVERLAP_PAYLOADS[payload][0], _BF16)
    sent = all_gather("x", own, ranks) if gathers(op) else scatter("y", m * n * _BF16, ranks)
    return 2.0 * m * topk * n * k / ranks, float(sent.wire)


def overlap_gain(
    op: Operation,
    m: int,
    n: int,
    k: int,
    *,
    tp: int,
    machine: OverlapMachine,
    ep: int = 1,
    experts: int = 1,
    topk: int = 1,
    payload: str = "bf16",
    chunks: int | None = None,
    product: float | None = None,
    communication: float | None = None,
    stretch: float | None = None,
) -> Prediction:
    """Predicted times of an operation, serial and overlapped; `.pays` is the decision.

    m, n, k: global sizes: rows of all ranks (tokens), out and in features of the whole weight, or of all weights that
    share a gather.  tp, ep: gathers and scatters are over all TP x EP ranks.  payload: name of a recipe.  chunks: one
    for each rank if None.  product, communication: measured seconds of each alone, modelled if None; they must be the
    same on all ranks.  stretch: time of the product in chunks over that of one launch, if it is known.

    >>> found = overlap_gain("mm_reduce_scatter", 4096, 12288, 49152, tp=8, machine=overlap_machine("h200"))
    >>> found.decision, found.bound
    ('overlap: 1.09x', 'product')
    >>> overlap_gain("all_gather_mm", 64, 1024, 1024, tp=2, machine=overlap_machine("h200")).decision
    'plain: 7e+07 FLOP, below 1e+11'
    """
    check_name(op, OPERATIONS, "operation")
    engine, ranks, most = machine.engine(payload), tp * ep, max(1, m)
    _check(op, m, n, k, tp, ep, experts, topk)
    if chunks is not None and not 1 <= chunks <= most:
        refuse(f"{chunks} chunks of {m} rows", "a chunk has a row or more", f"pass 1 to {most}")
    parts = min(ranks, most) if chunks is None else chunks
    flops, wire = work(op, m, n, k, tp=tp, ep=ep, topk=topk, payload=payload)
    if product is None:
        x, y = (ep, ranks) if gathers(op) else (ranks, ep)
        values = m * topk * k // x, experts * n * k // ranks
        moved = sum(map(stored_bytes, values, OVERLAP_PAYLOADS[payload])) + _BF16 * m * topk * n / y
        rate = machine.bf16 if engine.units == "bf16" or machine.fp8 is None else machine.fp8
        share = machine.grouped.value if "grouped" in op else 1
        product = max(flops / (rate.value * share), moved / machine.ceilings.bandwidth)
    if communication is None:
        communication = wire / machine.link.bandwidth
    constants = machine.setup.value, machine.slowdown.value
    overlapped, bound = overlapped_seconds(op, product, communication, parts, *constants, stretch=stretch)
    serial = product + communication + (machine.link.latency if ranks > 1 else 0)
    return Prediction(product, communication, overlapped, serial, parts, flops, wire, bound)


def _check(op: Operation, m: int, n: int, k: int, tp: int, ep: int, experts: int, topk: int) -> None:
    """Raise for sizes that the operation cannot have."""
    if m < 0 or min(n, k, tp, ep) < 1:
        what, rule = f"m={m}, n={n}, k={k}, tp={tp}, ep={ep}", "features and ranks are positive, m is not negative"
        refuse(what, rule, "pass such sizes")
    if "grouped" not in op and (ep, experts, topk) != (1, 1, 1):
        rule, fix = f"{op} has one weight", "leave them out, or name a grouped operation"
        refuse(f"ep={ep}, experts={experts}, topk={topk}", rule, fix)
    if not 1 <= topk <= experts:
        refuse(f"topk={topk} of {experts} experts", "a token has one or more of them", f"pass 1 to {experts}")
    cut, features = ("n", n) if gathers(op) else ("k", k)
    for what, size, name, parts in ((cut, features, "tp", tp), ("experts", experts, "ep", ep)):
        if size % parts:
            refuse(f"{what}={size} on {name}={parts}", "all ranks have as many", f"pass a multiple of {parts}")
