"""GEMMs: large ones, few rows as in decoding, the layers of real models, MX and NVFP4 without native tensor cores, and
MXFP8 on the FP8 tensor cores of Hopper.

A row times the kernel that the registry selects; the other kernels are peers, so that a wrong choice shows. The bytes
of a row are the operands once and the output once, or twice if it accumulates.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...formats.spec import get_format
from ...hardware import Capability
from ...registry import Request, select
from ...roofline import Ceilings
from .. import shapes
from ..gemms import by_backend, check_product, judged, make_operands, multiply, peers
from ..harness import Args, Case, Peer
from ..rooflines import bound_us
from ..shapes import LONG, SQUARE, TINY_PRODUCT, Product, numel, text
from ..store import BF16_DB, ROW
from .casts import stored_bytes

# peers that compile for each N and K run only at these
COMPILED = (SQUARE, LONG, TINY_PRODUCT)
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


def cases(device: Capability, ceilings: Ceilings) -> Iterator[Case]:
    """All rows, in the order of the tables."""
    large, emulated = shapes.LARGE_PRODUCTS, dict.fromkeys(EMULATED, SQUARE)
    few = tuple((m, n, k) for n, k in shapes.DECODED for m in shapes.FEW_ROWS)
    models = {
        name: tuple((m, n, k) for k, n in layers for m in shapes.MODEL_ROWS) for name, layers in shapes.MODELS.items()
    }
    if device.device != "cuda":
        large = few = (TINY_PRODUCT,)
        models, emulated = {"tiny": large}, dict.fromkeys(EMULATED, TINY_PRODUCT)
    make = functools.partial(case, device=device, ceilings=ceilings)
    for kind in (WEIGHTS, VECTORS):
        for product in large:
            yield make(kind, product, group="large")
        for product in large:
            if product[2] >= ACCUMULATED_FROM or product == TINY_PRODUCT:
                yield make(replace(kind, accumulate=True), product, group="large")
    for product in few:
        yield make(WEIGHTS, product, group="few rows", prefix="few rows ")
    for name, products in models.items():
        for product in products:
            yield make(WEIGHTS, product, group="models", prefix=f"{name} ")
    for format, product in emulated.items():
        yield make(Kind(format, format), product, group="MX and NVFP4")
    if device.sm == 90 and importlib.util.find_spec("triton") is not None:
        for product in large:
            yield native_case(product, device, ceilings)


def case(
    kind: Kind,
    product: Product,
    device: Capability,
    ceilings: Ceilings,
    *,
    group: str,
    prefix: str = "",
) -> Case:
    """Case of one GEMM.  prefix: makes its name unique if another group has the same GEMM."""
    m, n, k = product
    dtype = torch.float32 if kind.accumulate else torch.bfloat16
    output = m * n * (2 * 4 if kind.accumulate else 2)
    moved = stored_bytes(kind.a, (m, k), -1) + stored_bytes(kind.b, (n, k), -1) + output
    options = frozenset({"accumulate"} if kind.accumulate else ())
    request = Request("gemm", device, (kind.a, kind.b), product, dtype, options=options)
    return product_case(
        f"{prefix}{kind.label} {text(product)}", group, kind, product, moved, request, ceilings,
        lambda device: (make_operands(product, (kind.a, kind.b), device, accumulate=kind.accumulate),),
        multiply, peers(request, compiling=product in COMPILED),
    )  # fmt: skip


def product_case(
    name: str,
    group: str,
    kind: Kind,
    product: Product,
    moved: int,
    request: Request,
    ceilings: Ceilings,
    make: Callable[[torch.device], Args],
    run: Callable[..., Any],
    peers: Mapping[str, Peer | str],
) -> Case:
    """Case of a GEMM, dense or grouped.  product: (M, N, K) with the same FLOPs."""
    flops, family = 2 * numel(product), get_format(kind.a).family
    # before sm_100 FP8 tensor cores have no block scales of 32 or 16 values
    units = "fp8" if family == "fp8" or request.capability.sm >= 100 else "bf16"
    return Case(
        name, group, f"{kind.a} @ {kind.b}", "-1", product, make, run, lambda _: select(request).backend,
        check_product, moved, flops=flops,
        bound_us=bound_us(ceilings, flops, moved, units), dtype=str(request.dtype)[6:], peers=peers,
    )  # fmt: skip


def native_case(product: Product, device: Capability, ceilings: Ceilings) -> Case:
    """Case of MXFP8 with the Hopper kernel forced, beside the kernel that is selected by default."""
    usual = case(NATIVE, product, device, ceilings, group="MXFP8 natively")
    others = {name: peer for name, peer in usual.peers.items() if not name.startswith(ROW)}
    return replace(
        usual,
        name=f"natively {NATIVE.label} {text(product)}",
        run=by_backend("gemm", "hopper", multiply),
        backend=lambda _: "hopper",
        peers={"upcast": judged(multiply, BF16_DB), **others},
    )
