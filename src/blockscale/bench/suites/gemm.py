"""GEMMs: large ones, few rows as in decoding, the layers of real models, MX and NVFP4 without native tensor cores, and
MXFP8 on the FP8 tensor cores of Hopper.

A row times the kernel that the registry selects; the other kernels are peers, so that a wrong choice shows. The bytes
of a row are the operands once and the output once, or twice if it accumulates.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ...formats.spec import get_format
from ...gemm.ops import gemm_request
from ...hardware import Capability, capability
from ...registry import Request, select
from .. import shapes
from ..ceilings import Ceilings
from ..harness import Case
from ..peers import Peer
from ..product_peers import ALL_PEERS, ROW, by_backend, multiply, peers
from ..products import BF16_DB, Operands, check_product, make_operands
from ..shapes import Product, numel, text
from .common import stored_bytes

# least K of GEMMs that accumulate: in wgrad K is the number of tokens
ACCUMULATED_FROM = 4096


@dataclass(frozen=True)
class Kind:
    """Formats of both operands.  accumulate: `out +=` into fp32."""

    a: str
    b: str
    accumulate: bool = False

    @property
    def label(self) -> str:
        """Short label; FP8 formats are named by their blocks."""
        names = (name.removeprefix("fp8_") for name in (self.a, self.b))
        return " @ ".join(names) + (" fp32 +=" if self.accumulate else "")


WEIGHTS = Kind("fp8_1x128", "fp8_128x128")
VECTORS = Kind("fp8_1x128", "fp8_1x128")
NATIVE = Kind("mxfp8_e4m3", "mxfp8_e4m3_128x128")
EMULATED: tuple[str, ...] = ("mxfp8_e4m3", "mxfp4", "nvfp4")


@dataclass(frozen=True)
class Extent:
    """GEMMs to run, the device, and peers to compare with; peers compile only at `compiled` GEMMs."""

    device: Capability
    large: tuple[Product, ...]
    accumulated: tuple[Product, ...]
    few_rows: tuple[Product, ...]
    models: Mapping[str, tuple[Product, ...]]
    emulated: Mapping[str, Product]
    native: tuple[Product, ...]
    compiled: frozenset[Product]
    peers: frozenset[str]


def extent(device: torch.device, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a device; quick: fewer GEMMs."""
    if device.type == "cuda":
        return gpu_extent(capability(device), quick=quick, peers=peers)
    tiny = (shapes.TINY_PRODUCT,)
    emulated = dict.fromkeys(EMULATED, shapes.TINY_PRODUCT)
    return Extent(capability(device), tiny, tiny, tiny, {"tiny": tiny}, emulated, (), frozenset(tiny), peers)


def gpu_extent(device: Capability, *, quick: bool = False, peers: frozenset[str] = ALL_PEERS) -> Extent:
    """Extent for a GPU; can be computed without one."""
    compiled = frozenset({shapes.SQUARE, shapes.LONG})
    large = (shapes.LONG, (4096, 7168, 2048)) if quick else shapes.LARGE_PRODUCTS
    few = ((16, *shapes.DECODED[0]),) if quick else _decoding()
    names, counts = (("Llama3 8B",), (4096,)) if quick else (tuple(shapes.MODELS), shapes.MODEL_ROWS)
    models = {name: tuple((m, n, k) for k, n in shapes.MODELS[name] for m in counts) for name in names}
    emulated = dict.fromkeys(EMULATED[:1] if quick else EMULATED, shapes.SQUARE)
    accumulated = tuple(product for product in large if product[2] >= ACCUMULATED_FROM)
    native = large if device.sm == 90 and importlib.util.find_spec("triton") is not None else ()
    return Extent(device, large, accumulated, few, models, emulated, native, compiled, peers)


def _decoding() -> tuple[Product, ...]:
    return tuple((m, n, k) for n, k in shapes.DECODED for m in shapes.FEW_ROWS)


def cases(extent: Extent, ceilings: Ceilings) -> Iterator[Case]:
    """All rows, in the order of the tables."""
    for kind in (WEIGHTS, VECTORS):
        for product in extent.large:
            yield case(kind, product, extent, ceilings, group="large")
        for product in extent.accumulated:
            yield case(Kind(kind.a, kind.b, accumulate=True), product, extent, ceilings, group="large")
    for product in extent.few_rows:
        yield case(WEIGHTS, product, extent, ceilings, group="few rows", prefix="few rows ")
    for name, products in extent.models.items():
        for product in products:
            yield case(WEIGHTS, product, extent, ceilings, group="models", prefix=f"{name} ")
    for format, product in extent.emulated.items():
        yield case(Kind(format, format), product, extent, ceilings, group="MX and NVFP4")
    for product in extent.native:
        yield native_case(product, extent, ceilings)


def case(kind: Kind, product: Product, extent: Extent, ceilings: Ceilings, *, group: str, prefix: str = "") -> Case:
    """Case of one GEMM.  prefix: makes its name unique if another group has the same GEMM."""
    m, n, k = product
    dtype = torch.float32 if kind.accumulate else torch.bfloat16
    output = m * n * (2 * 4 if kind.accumulate else 2)
    moved = stored_bytes(kind.a, (m, k), -1) + stored_bytes(kind.b, (n, k), -1) + output
    options = frozenset({"accumulate"} if kind.accumulate else ())
    request = Request("gemm", extent.device, (kind.a, kind.b), product, dtype, options=options)
    return Case(
        name=f"{prefix}{kind.label} {text(product)}",
        group=group,
        format=f"{kind.a} @ {kind.b}",
        axis="-1",
        shape=product,
        make=lambda device: (make_operands(product, (kind.a, kind.b), device, accumulate=kind.accumulate),),
        run=multiply,
        backend=_backend,
        check=check_product,
        bytes=moved,
        peers=peers(request, extent.peers, compiling=product in extent.compiled),
        flops=2 * numel(product),
        bound_us=ceilings.bound_us(2 * numel(product), moved, units(kind, extent.device)),
        dtype=str(dtype)[6:],
    )


def native_case(product: Product, extent: Extent, ceilings: Ceilings) -> Case:
    """Case of MXFP8 with the Hopper kernel forced, beside the kernel that is selected by default."""
    usual = case(NATIVE, product, extent, ceilings, group="MXFP8 natively")
    ours = {name: peer for name, peer in usual.peers.items() if not name.startswith(ROW)}
    if "rows" in extent.peers:
        ours = {"upcast": Peer(multiply, gate_db=BF16_DB, accuracy=lambda o: o.accuracy(multiply)), **ours}
    return replace(
        usual,
        name=f"natively {NATIVE.label} {text(product)}",
        run=by_backend("gemm", "hopper", multiply),
        backend=lambda _: "hopper",
        peers=ours,
    )


def units(kind: Kind, device: Capability) -> str:
    """Tensor cores of a GEMM's bound: before sm_100 FP8 tensor cores have no block scales of 32 or 16 values."""
    return "fp8" if get_format(kind.a).family == "fp8" or device.sm >= 100 else "bf16"


def _backend(operands: Operands) -> str:
    a, b, accumulate = operands.a, operands.b, operands.acc is not None
    dtype = torch.float32 if accumulate else torch.bfloat16
    return select(gemm_request(a, b, dtype, bias=False, accumulate=accumulate)).backend
