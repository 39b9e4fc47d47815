"""Operands of a GEMM in the layouts of all variants, and the SQNR of its result.

Accuracy is computed on 256 rows spread over the output, including the last: an fp64 GEMM of all rows would take longer
than everything that is timed. That every value is written, and equal in a second run, is checked on all rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..casts import quantize
from ..formats.layout import round_up
from ..formats.tensor import BlockScaled
from ..gemm import exact_mm
from .harness import Args, Case, Verdict, failure, random
from .shapes import Product

ROWS = 256
# widest tile of torchao's kernels
WIDEST = 256
# least SQNR with fp32 accumulation (docs/numerics.md), on FP8 tensor cores and by exact upcasts; bf16 output has 56 dB
FP8_DB, EXACT_DB, BF16_DB = 77.0, 80.0, 54.0
# SQNR of a result without error: JSON has no infinity
NO_ERROR_DB = 300.0


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

    def accuracy(self, run: Callable[[Operands], Tensor]) -> float:
        """SQNR of a GEMM of a and b."""
        return sqnr_db(self.exact, self.some(run(self.fresh())))

    def rowwise_accuracy(self, run: Callable[[Operands], Tensor]) -> float:
        """SQNR of a GEMM of the rowwise operands."""
        codes_x, scale_x, codes_w, scale_w = self.rowwise
        x = codes_x[self.judged].double() * scale_x[self.judged]
        return sqnr_db(x @ (codes_w.double() * scale_w).mT, run(self)[self.judged])

    def plain_accuracy(self, run: Callable[[Operands], Tensor]) -> float:
        """SQNR of a GEMM of x and w."""
        return sqnr_db(self.x[self.judged].double() @ self.w.double().mT, run(self)[self.judged])


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
    return Verdict(0, how, "; ".join(text for text in problems if text), None if math.isnan(db) else db)


def _problems(run: Callable[[Operands], Tensor], operands: Operands) -> tuple[list[str], float]:
    """Faults, an empty text for each passed check, and the SQNR."""
    out = run(operands.fresh())
    first = out.clone()
    # the allocator gives this block to the second run; 0xFF in every byte is a NaN
    out.untyped_storage().fill_(0xFF)  # pyright: ignore[reportAttributeAccessIssue]
    del out
    second = run(operands.fresh())
    db = operands.accuracy(lambda _: second)
    problems = [
        _count(second != first, "values differ between two runs"),
        _count(~second.isfinite(), "values are not finite, or were not written"),
        _below(db, operands.a.format, second.dtype, "the product"),
    ]
    if operands.acc is not None:
        problems.append(_count(operands.unchanged(second), "values were not added to"))
        twice = operands.some(run(replace(operands, acc=first)))
        problems.append(_below(sqnr_db(2 * operands.exact, twice), operands.a.format, twice.dtype, "a second sum"))
    return problems, db


def _count(flags: Tensor, what: str) -> str:
    number = int(flags.sum())
    return f"{number} {what}" if number else ""


def _below(db: float, format: str, dtype: torch.dtype, what: str) -> str:
    gate = gate_db(format, dtype)
    return "" if db >= gate else f"{what} is {db:.1f} dB from the exact one, less than {gate:.0f}"
