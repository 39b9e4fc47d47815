"""Mixtures of experts: rates of grouped GEMMs, then whole layers (`moe_layers.py`).

GEMMs are those of a layer's forward and backward: fprop and dgrad (m-grouped), and wgrad (k-grouped) to bf16, to fp32
and accumulating in fp32. `equal groups` are the sizes of the goals. Layers of models have rows balanced over their
experts, by Zipf's law, or all on one expert; the same GEMM with equal groups is then a peer. `decoding` has 16 rows for
each of 32 experts; a peer has the same rows with a capacity of 128 per expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...formats.layout import padded_length
from ...grouped.ops import grouped_request
from ...hardware import Capability, capability
from ...registry import Request, select, would_serve
from .. import grouped_peers, shapes
from ..ceilings import Ceilings
from ..grouped_peers import multiply, peers
from ..grouped_products import Grouped, make_k_grouped, make_m_grouped
from ..harness import Args, Case
from ..loads import LOADS, Load, sizes
from ..products import check_product
from ..rooflines import Roofs
from ..shapes import numel, text
from . import moe_layers
from .common import stored_bytes
from .gemm import NATIVE, VECTORS, WEIGHTS, Kind, units
from .moe_layers import LayersExtent

GROUP = "grouped products"
GROUPS = (GROUP, *moe_layers.GROUPS)
ALL_PEERS = grouped_peers.ALL_PEERS | moe_layers.ALL_PEERS
EQUAL, DECODING = "equal groups", "decoding"
# rows of a model's experts: 4096 tokens with eight experts each
ROWS = 32768
# experts of DeepSeek-V3 on one of 32 or of 8 GPUs
SHARDS = (8, 32)


@dataclass(frozen=True)
class Output:
    """Output of a grouped GEMM."""

    label: str = ""
    dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False


BF16, FP32, ADDED = Output(), Output(" fp32", torch.float32), Output(" fp32 +=", torch.float32, accumulate=True)


@dataclass(frozen=True)
class Problem:
    """A grouped GEMM of `rows` rows on `experts` experts.

    what: fprop, dgrad or wgrad.  n, k: columns of the result and contracted size; for wgrad rows and columns of a
    group's result.  most: largest number of rows of one expert, the number of tokens; None: no limit.
    """

    label: str
    what: str
    experts: int
    rows: int
    n: int
    k: int
    load: Load = "balanced"
    most: int | None = None
    kind: Kind = WEIGHTS
    output: Output = BF16

    @property
    def k_grouped(self) -> bool:
        return self.what == "wgrad"

    @property
    def product(self) -> shapes.Product:
        """(M, N, K) of the dense GEMM with the same FLOPs."""
        return (self.n, self.k, self.rows) if self.k_grouped else (self.rows, self.n, self.k)

    @property
    def sizes(self) -> tuple[int, ...]:
        return sizes(self.rows, self.experts, self.load, self.most)

    @property
    def name(self) -> str:
        load = "" if self.label.startswith(EQUAL) else f" {self.load}"
        return f"{self.label} {self.what}{self.output.label} E={self.experts}{load} {text(self.product)}"


@dataclass(frozen=True)
class Extent:
    """GEMMs and layers to run, the device, and peers to compare with."""

    device: Capability
    products: tuple[Problem, ...]
    layers: LayersExtent
    peers: frozenset[str]


def extent(device: torch.device, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a device; quick: fewer cases."""
    here = capability(device)
    if device.type == "cuda":
        return gpu_extent(here, quick=quick, peers=peers)
    tiny = ("tiny", 4, 80, 128, 256)
    products = [*equal_groups((4,), 160, 128, 256), *_of_model(*tiny, most=40), *other_formats(4, 160, 128, 256)]
    products.append(Problem(DECODING, "fprop", 4, 16, 128, 256))
    return Extent(here, tuple(products), moe_layers.cpu_extent(here, peers), peers)


def gpu_extent(device: Capability, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a GPU; can be computed without one."""
    n, k = shapes.EXPERT
    counts = (4, 64) if quick else shapes.EXPERT_COUNTS
    products = [*equal_groups(counts, moe_layers.ROWS, n, k), *_eight_experts()]
    products += [Problem(DECODING, "fprop", 32, 32 * 16, *matrix) for matrix in ((4096, 7168), (7168, 2048))]
    if not quick:
        products += [*other_formats(4, moe_layers.ROWS, n, k), *_models()]
    return Extent(device, tuple(products), moe_layers.gpu_extent(device, peers, quick=quick), peers)


def equal_groups(counts: tuple[int, ...], rows: int, n: int, k: int) -> Iterator[Problem]:
    """All GEMMs of one layer K -> N, with rows in each of `counts` equal groups."""
    for experts in counts:
        yield Problem(EQUAL, "fprop", experts, rows, n, k)
        yield Problem(EQUAL, "dgrad", experts, rows, k, n)
        yield from _wgrads(experts, rows, n, k)


def _wgrads(experts: int, rows: int, n: int, k: int) -> Iterator[Problem]:
    for output in (BF16, FP32, ADDED):
        yield Problem(EQUAL, "wgrad", experts, rows, n, k, kind=VECTORS, output=output)


def _eight_experts() -> Iterator[Problem]:
    """GEMMs of DeepSeek-V3's gate-up and down on eight experts."""
    pairs = ((4096, 7168), (7168, 2048))
    for n, k in pairs:
        yield Problem(EQUAL, "fprop", 8, ROWS, n, k)
    for n, k in ((2048, 7168), *pairs):
        yield from _wgrads(8, ROWS, n, k)


def _models() -> Iterator[Problem]:
    for name, (experts, top_k, features, hidden) in shapes.MIXTURES.items():
        yield from _of_model(name, experts, ROWS, hidden, features, most=-(-ROWS // top_k))
    deepseek, (_, _, features, hidden) = next(iter(shapes.MIXTURES.items()))
    for count in SHARDS:
        yield from _of_model(f"{deepseek} shard", count, ROWS, hidden, features, most=ROWS)


def _of_model(label: str, experts: int, rows: int, hidden: int, features: int, *, most: int) -> Iterator[Problem]:
    """GEMMs of features -> hidden; those of hidden -> features are the same in another order. If both are equal, fprop
    and dgrad are the same GEMM."""
    for load in LOADS:
        yield Problem(label, "fprop", experts, rows, hidden, features, load, most)
        if features != hidden:
            yield Problem(label, "dgrad", experts, rows, features, hidden, load, most)
        yield Problem(label, "wgrad", experts, rows, hidden, features, load, most, VECTORS)


def other_formats(experts: int, rows: int, n: int, k: int) -> Iterator[Problem]:
    """GEMMs in formats without native tensor cores on Hopper."""
    for kind, gradients in ((Kind("mxfp8_e4m3", "mxfp8_e4m3"),) * 2, (NATIVE, None), (Kind("nvfp4", "nvfp4"),) * 2):
        label = f"{EQUAL} {kind.label}"
        yield Problem(label, "fprop", experts, rows, n, k, kind=kind)
        if gradients is not None:
            yield Problem(label, "wgrad", experts, rows, n, k, kind=gradients)


def cases(extent: Extent, ceilings: Ceilings, roofs: Roofs | None) -> Iterator[Case]:
    """All rows, in the order of the tables, without GEMMs that a GPU serves only by the reference, in seconds."""
    for problem in extent.products:
        if extent.device.device != "cuda" or would_serve(request(problem, extent.device)).backend != "reference":
            yield case(problem, extent, ceilings)
    yield from moe_layers.cases(extent.layers, roofs)


def case(problem: Problem, extent: Extent, ceilings: Ceilings) -> Case:
    """Case of one grouped GEMM."""
    kind, output, moved = problem.kind, problem.output, moved_bytes(problem)
    flops = 2 * numel(problem.product)
    return Case(
        name=problem.name,
        group=GROUP,
        format=f"{kind.a} @ {kind.b}",
        axis="-1",
        shape=problem.product,
        make=lambda device: make(problem, device),
        run=multiply,
        backend=_backend,
        check=check_product,
        bytes=moved,
        peers=peers(
            request(problem, extent.device),
            problem.sizes,
            extent.peers,
            even=problem.load == "balanced",
            decoding=problem.label == DECODING,
        ),
        flops=flops,
        bound_us=ceilings.bound_us(flops, moved, units(kind, extent.device)),
        dtype=str(output.dtype)[6:],
    )


def make(problem: Problem, device: torch.device) -> Args:
    """Operands of a grouped GEMM."""
    formats, n, k, output = (problem.kind.a, problem.kind.b), problem.n, problem.k, problem.output
    if not problem.k_grouped:
        return (make_m_grouped(problem.sizes, n, k, formats, device, output.dtype),)
    made = make_k_grouped(problem.sizes, n, k, formats, device, output.dtype, accumulate=output.accumulate)
    return (made,)


def moved_bytes(problem: Problem) -> int:
    """Least memory traffic: operands of experts with rows once, the result once, or twice if it accumulates."""
    kind, rows, n, k = problem.kind, problem.rows, problem.n, problem.k
    size = problem.output.dtype.itemsize * (2 if problem.output.accumulate else 1)
    busy = sum(size > 0 for size in problem.sizes)
    if problem.k_grouped:
        operands = stored_bytes(kind.a, (n, rows), -1) + stored_bytes(kind.b, (k, rows), -1)
        # the accumulator of an expert without rows is not touched
        return operands + (busy if problem.output.accumulate else problem.experts) * n * k * size
    return stored_bytes(kind.a, (rows, k), -1) + busy * stored_bytes(kind.b, (n, k), -1) + rows * n * size


def request(problem: Problem, device: Capability) -> Request:
    """Request to the registry."""
    op, (rows, columns, depth) = "k_grouped" if problem.k_grouped else "m_grouped", problem.product
    if problem.k_grouped:
        depth = padded_length(depth, problem.experts)
    options = frozenset({"accumulate"} if problem.output.accumulate else ())
    shape, formats = (rows, columns, depth, problem.experts), (problem.kind.a, problem.kind.b)
    return Request(op, device, formats, shape, problem.output.dtype, options=options)


def _backend(operands: Grouped) -> str:
    added = operands.acc is not None
    asked = grouped_request(operands.a, operands.b, len(operands.sizes), operands.dtype, bias=False, accumulate=added)
    return select(asked).backend
