"""A GEMM to time: operands in the layouts of all variants, the SQNR of its result, and peers.

Accuracy is computed on 256 rows spread over the output, including the last: an fp64 GEMM of all rows would take longer
than everything that is timed. That every value is written, and equal in a second run, is checked on all rows.

Peers are our other kernels, bf16, rowwise FP8 (one scale per row) and torchao. Each takes from `Operands` the layout
that it needs; casts are not timed. A kernel that refuses a GEMM, or a peer that is not installed, becomes a note.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..casts import quantize
from ..formats.layout import round_up
from ..formats.tensor import BlockScaled
from ..gemm import exact_mm, scaled_mm
from ..registry import Request, kernels, select, use_backend
from .harness import NOT_COMPILED, Args, Case, Peer, Verdict, failure, random
from .peers import torchao
from .shapes import Product
from .store import BF16_DB, ROW

ROWS = 256
# widest tile of torchao's kernels
WIDEST = 256
# least SQNR with fp32 accumulation (docs/numerics.md), on FP8 tensor cores and by exact upcasts
FP8_DB, EXACT_DB = 77.0, 80.0
# SQNR of a result without error: JSON has no infinity
NO_ERROR_DB = 300.0
# rowwise FP8 whose sums stay in the accumulator of the tensor core
FAST = "rowwise fast"


@dataclass(frozen=True, eq=False)
class Operands:
    """x [M, K] and w [N, K] in bf16, their casts a and b, and the fp32 accumulator, if any.

    Layouts for peers are made at first use, in their warm-up and not timed.
    """

    x: Tensor
    w: Tensor
    a: BlockScaled
    b: BlockScaled
    acc: Tensor | None = None

    def fresh(self) -> Operands:
        """The same operands with an accumulator of zeros: timing accumulates into this one."""
        return self if self.acc is None else replace(self, acc=torch.zeros_like(self.acc))

    @functools.cached_property
    def judged(self) -> Tensor:
        """Indices of the rows that are compared with the exact result."""
        return spread(self.x.shape[0], ROWS, self.x.device)

    @property
    def how(self) -> str:
        """What is compared with the exact result, as text."""
        return f"{len(self.judged)} rows"

    def some(self, out: Tensor) -> Tensor:
        """The compared rows of a result."""
        return out[self.judged]

    def unchanged(self, out: Tensor) -> Tensor:
        """Flags of values that are still zero after accumulation into zeros."""
        return out == 0

    @functools.cached_property
    def exact(self) -> Tensor:
        """The compared rows of a @ b.mT, fp64."""
        return exact_mm(take_rows(self.a, self.judged), self.b)

    @functools.cached_property
    def rowwise(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes and scales of x and of w with one scale per row."""
        return *cast_rows(self.x), *cast_rows(self.w)

    @functools.cached_property
    def padded_scales(self) -> tuple[Tensor, Tensor]:
        """FP8 scales of a [M, blocks], M contiguous, and of b: [blocks, N] for 1x128, N contiguous, else [blocks, N
        tiles], blocks contiguous. They are padded for kernels that read scales without a mask."""
        a, b = self.a.plain_scale(), self.b.plain_scale()
        if self.b.spec.is_2d:
            tiles = b.new_ones(b.shape[0] + WIDEST // self.b.spec.block[0], b.shape[1])
            tiles[: b.shape[0]] = b
            return _with_room(a), tiles[: b.shape[0]].mT
        return _with_room(a), _with_room(b).mT

    def compared(self, x: Tensor, scale_x: Tensor, w: Tensor, scale_w: Tensor) -> Tensor:
        """The compared rows of the product of scaled matrices, fp64."""
        return (x[self.judged].double() * scale_x[self.judged]) @ (w.double() * scale_w).mT

    @property
    def unscaled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x and w with scales of 1, as in `rowwise`."""
        return self.x, torch.ones_like(self.x[:, :1]), self.w, torch.ones_like(self.w[..., :1])

    def accuracy(self, run: Callable[[Operands], Tensor]) -> float:
        """SQNR of a GEMM of a and b."""
        return sqnr_db(self.exact, self.some(run(self.fresh())))

    def rowwise_accuracy(self, run: Callable[[Operands], Tensor]) -> float:
        """SQNR of a GEMM of the rowwise operands."""
        return sqnr_db(self.compared(*self.rowwise), self.some(run(self)))

    def plain_accuracy(self, run: Callable[[Operands], Tensor]) -> float:
        """SQNR of a GEMM of x and w."""
        return sqnr_db(self.compared(*self.unscaled), self.some(run(self)))


def make_operands(product: Product, formats: tuple[str, str], device: torch.device, *, accumulate: bool) -> Operands:
    """Normal values, and our casts of them."""
    m, n, k = product
    x, w = random((m, k), device), random((n, k), device)
    acc = torch.zeros(m, n, device=device) if accumulate else None
    return Operands(x, w, quantize(x, formats[0]), quantize(w, formats[1]), acc)


def spread(count: int, most: int, device: torch.device) -> Tensor:
    """At most `most` evenly spaced indices of `count`, including the first and the last.

    >>> spread(9, 3, torch.device("cpu")).tolist()
    [0, 4, 8]
    """
    return torch.linspace(0, count - 1, min(count, most), device=device, dtype=torch.float64).round().long()


def _with_room(scale: Tensor) -> Tensor:
    """Scales [rows, blocks] with rows contiguous, each column padded to whole tiles."""
    buffer = scale.new_ones(scale.shape[1], round_up(scale.shape[0], WIDEST))
    buffer[:, : scale.shape[0]] = scale.mT
    return buffer.mT[: scale.shape[0]]


def take_rows(operand: BlockScaled, index: Tensor) -> BlockScaled:
    """Some rows of an operand with 1D blocks along its rows."""
    assert not operand.spec.is_2d
    data, scale = (take(tensor, index) for tensor in (operand.data, operand.plain_scale()))
    shape = (len(index), operand.shape[1])
    return replace(operand, data=data, scale=scale, scale_layout="plain", shape=shape)


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Entries along the first axis of a tensor; as bytes for dtypes that torch cannot index."""
    return tensor.view(torch.uint8)[index].view(tensor.dtype) if tensor.element_size() == 1 else tensor[index]


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes with one fp32 scale per row: [.., rows, K] and [.., rows, 1]."""
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def sqnr_db(exact: Tensor, found: Tensor) -> float:
    """20 log10(|exact| / |exact - found|), rounded to 0.1 dB; NaN if a value is not finite.

    >>> sqnr_db(torch.full((4,), 10.0), torch.full((4,), 9.0))
    20.0
    """
    signal, noise = exact.double().norm().item(), (exact.double() - found.double()).norm().item()
    if noise == 0:
        return NO_ERROR_DB
    return round(20 * math.log10(signal / noise), 1) if signal > 0 and math.isfinite(noise) else math.nan


def gate_db(format: str, dtype: torch.dtype) -> float:
    """Least SQNR in dB of a GEMM of normal operands."""
    if dtype != torch.float32:
        return BF16_DB
    return FP8_DB if format.startswith("fp8") else EXACT_DB


def check_product(case: Case, args: Args) -> Verdict:
    """Check of a GEMM case."""
    return judge(case.run, args[0])


def judge(run: Callable[[Operands], Tensor], operands: Operands) -> Verdict:
    """Check a GEMM: two runs on poisoned memory agree in every bit, all values are written, the SQNR is high enough.

    An exception counts as a fault, so that the rest of a long run continues.
    """
    how = f"{operands.how} against the exact product, all values in two runs"
    try:
        problems, db = _problems(run, operands)
    except Exception as error:
        return Verdict(0, how, failure(error))
    return Verdict(0, how, "; ".join(problems), None if math.isnan(db) else db)


def _problems(run: Callable[[Operands], Tensor], operands: Operands) -> tuple[list[str], float]:
    """Faults, and the SQNR."""
    out = run(operands.fresh())
    first = out.clone()
    # the allocator gives this block to the second run; 0xFF in every byte is a NaN
    out.untyped_storage().fill_(0xFF)  # pyright: ignore[reportAttributeAccessIssue]
    del out
    second = run(operands.fresh())
    db = operands.accuracy(lambda _: second)
    flags = {"values differ between two runs": second != first}
    flags["values are not finite, or were not written"] = ~second.isfinite()
    sqnrs = {"the product": db}
    if operands.acc is not None:
        flags["values were not added to"] = operands.unchanged(second)
        sqnrs["a second sum"] = sqnr_db(2 * operands.exact, operands.some(run(replace(operands, acc=first))))
    problems = [f"{number} {what}" for what, each in flags.items() if (number := int(each.sum()))]
    gate = gate_db(operands.a.format, second.dtype)
    too_low = {what: found for what, found in sqnrs.items() if not found >= gate}
    return [
        *problems,
        *(f"{what} is {found:.1f} dB from the exact one, less than {gate:.0f}" for what, found in too_low.items()),
    ], db


# ---- peers -----------------------------------------------------------------------------------------------------------


def multiply(operands: Operands) -> Tensor:
    """Our GEMM, by the kernel that the registry selects."""
    return scaled_mm(operands.a, operands.b, torch.bfloat16, accumulate=operands.acc)


def peers(request: Request, *, compiling: bool) -> Mapping[str, Peer | str]:
    """Peers of a GEMM.  compiling: whether to run torchao's, which compile for each N and K."""
    found, accumulates = other_kernels(request), "accumulate" in request.options
    if accumulates:
        found["to bf16"] = judged(lambda o: scaled_mm(o.a, o.b), gate_db(request.formats[0], torch.bfloat16))
    found["bf16"] = Peer(plain, accuracy=lambda o: o.plain_accuracy(plain))
    for name, fast in ((FAST, True), ("rowwise", False)):
        run = functools.partial(rowwise, fast=fast)
        found[name] = Peer(run, accuracy=lambda o, run=run: o.rowwise_accuracy(run))
    if not accumulates:
        found["torchao"] = _torchao_peer(request, compiling=compiling)
    return found


def judged(run: Callable[..., Tensor], gate: float, note: str = "") -> Peer:
    """Peer that multiplies our operands, with its accuracy gate."""
    return Peer(run, note=note, gate_db=gate, accuracy=lambda operands: operands.accuracy(run))


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
