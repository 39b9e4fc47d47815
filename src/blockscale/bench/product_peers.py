"""Peers of a GEMM: our other kernels, bf16, rowwise FP8 (one scale per row), torchao.

Each is called with `Operands` and takes from them the layout that it needs; casts are not timed. A kernel that refuses
a GEMM, or a peer that is not installed, becomes a note with the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..gemm import scaled_mm
from ..registry import Request, kernels, select, use_backend
from .peers import NOT_COMPILED, Peer, torchao
from .products import Operands, gate_db

ALL_PEERS = frozenset({"rows", "bf16", "rowwise", "torchao"})
FAST = "rowwise fast"
ROW = "row "


def multiply(operands: Operands) -> Tensor:
    """Our GEMM, by the kernel that the registry selects."""
    return scaled_mm(operands.a, operands.b, torch.bfloat16, accumulate=operands.acc)


def peers(request: Request, names: frozenset[str], *, compiling: bool) -> Mapping[str, Peer | str]:
    """The named peers of a GEMM.  compiling: whether to include torchao's, which compile for each N and K."""
    found: dict[str, Peer | str] = {}
    if "rows" in names:
        found |= other_kernels(request)
        if "accumulate" in request.options:
            found["to bf16"] = judged(lambda o: scaled_mm(o.a, o.b), gate_db(request.formats[0], torch.bfloat16))
    if "bf16" in names:
        found["bf16"] = Peer(plain, accuracy=lambda o: o.plain_accuracy(plain))
    if "rowwise" in names:
        for name, fast in ((FAST, True), ("rowwise", False)):
            run = functools.partial(rowwise, fast=fast)
            found[name] = Peer(run, accuracy=lambda o, run=run: o.rowwise_accuracy(run))
    if "torchao" in names and "accumulate" not in request.options:
        found["torchao"] = _torchao_peer(request, compiling=compiling)
    return found


def judged(run: Callable[..., Tensor], gate: float, note: str = "") -> Peer:
    """Peer that multiplies our operands, with its accuracy gate."""
    return Peer(run, note=note, gate_db=gate, accuracy=lambda operands: operands.accuracy(run))


# our other kernels


def other_kernels(request: Request, run: Callable[..., Tensor] = multiply) -> dict[str, Peer | str]:
    """Every backend except the selected one as a peer, or the reason why it does not run.  run: our call."""
    taken, gate = select(request).backend, gate_db(request.formats[0], request.dtype)
    found: dict[str, Peer | str] = {}
    for backend in dict.fromkeys(row.backend for row in kernels(request.op)):
        if backend == taken:
            continue
        refused = refusal(request, backend)
        if refused is not None:
            found[ROW + backend] = f"refuses: {refused}"
        elif backend == "reference" and request.capability.device == "cuda":
            found[ROW + backend] = "not run: it is made to be exact, and takes many times longer"
        else:
            found[ROW + backend] = judged(by_backend(request.op, backend, run), gate)
    return found


def refusal(request: Request, backend: str) -> str | None:
    """Reason why no kernel of a backend serves a request, or None if one does.

    A backend may have several kernels for different formats; the reason is that of the best matching one.
    """
    refused: list[tuple[bool, str]] = []
    for row in kernels(request.op):
        if row.backend == backend:
            reason = row.refusal(request)
            if reason is None:
                return None
            refused.append((row.misfit(request) is not None, reason))
    return min(refused)[1]


def by_backend(op: str, backend: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Our call with a forced backend."""

    def forced(operands: Operands) -> Tensor:
        with use_backend(**{op: backend}):
            return run(operands)

    return forced


# torch


def plain(operands: Operands) -> Tensor:
    """GEMM of the bf16 matrices: the cost of a layer without casts."""
    if not operands.x.is_cuda:  # on CPUs without bf16 units torch is slow and warns
        return torch.mm(operands.x.float(), operands.w.float().mT).bfloat16()
    return torch.mm(operands.x, operands.w.mT)


def rowwise(operands: Operands, *, fast: bool) -> Tensor:
    """FP8 GEMM with one scale per row.  fast: sums stay in the tensor core's reduced-precision accumulator."""
    x, scale_x, w, scale_w = operands.rowwise
    return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        x, w.mT, scale_a=scale_x, scale_b=scale_w.mT, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


# torchao


def _torchao_peer(request: Request, *, compiling: bool) -> Peer | str:
    if request.formats[0] != "fp8_1x128":
        return "has none for these formats"
    if request.shape[2] % 128:
        return "not run: its masks are right for K in multiples of 128 only"
    if not compiling:
        return NOT_COMPILED
    vector = request.formats[1] == "fp8_1x128"
    name = "triton_fp8_gemm_1x128_128x1" if vector else "triton_fp8_gemm_1x128_128x128"
    try:
        product = getattr(torchao("blockwise_fp8_training.kernels"), name)
    except ImportError as error:
        return f"not importable: {error}"

    def run(operands: Operands) -> Tensor:
        scale_a, scale_b = operands.padded_scales
        return product(operands.a.data, operands.b.data.mT, scale_a, scale_b, 128, torch.bfloat16)

    return judged(run, gate_db(request.formats[0], torch.bfloat16), name)
