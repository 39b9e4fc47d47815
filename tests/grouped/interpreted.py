"""Grouped GEMMs in Triton's interpreter against exact ones; a script, because the interpreter is chosen at import.

    TRITON_INTERPRET=1 python tests/grouped/interpreted.py triton
    TRITON_INTERPRET=1 python tests/grouped/interpreted.py blackwell

Prints `cases values mismatches` and the first mismatches. A value is right within the error bound of fp32 sums of its
terms, plus one rounding for a 16-bit output; empty sums must be exact. The accumulator is a window of a larger buffer,
of which nothing else may change. With starts, rows of no group must stay as allocated, and the others must equal the
GEMM of the packed rows bitwise. For Blackwell `tests/support/interpreter.py` supplies `tl.dot_scaled`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

assert os.environ.get("TRITON_INTERPRET") == "1"
os.environ["BLOCKSCALE_POISON"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import blockscale as bs  # noqa: E402
from blockscale.formats import FORMATS, BlockScaled  # noqa: E402
from blockscale.gemm import ACCUMULATOR_DTYPES  # noqa: E402
from blockscale.grouped import _blackwell, _schedule, _triton  # noqa: E402
from blockscale.grouped._reference import exact_grouped  # noqa: E402
from blockscale.grouped.ops import Inputs  # noqa: E402
from blockscale.registry import kernel, kernels  # noqa: E402
from support import interpreter  # noqa: E402
from support.grouped_kernels import room  # noqa: E402

# tile lists are tested elsewhere, and are slow in the interpreter
_schedule._PROGRAMS, _schedule._CHUNK = 1, 64  # pyright: ignore[reportPrivateUsage]

# group sizes, and rows of no group after them
PATTERNS: dict[str, tuple[list[int], int]] = {
    "all empty": ([0, 0, 0], 5),
    "all but one empty": ([0, 0, 37, 0], 0),
    "alternating": ([0, 33, 0, 5, 0], 3),
    "unaligned": ([31, 34, 129, 1], 2),
    "one has everything": ([70], 0),
    "no tokens": ([0, 0], 0),
}
# rows of each expert, and capacity per expert
CAPACITIES = [([0, 0, 5, 0], 16), ([7, 0, 13, 1], 13), ([33], 70), ([129, 3], 130), ([0, 0], 8)]
FEW, MANY = ([3, 0, 7], 2), (list(range(1, 41)), 0)
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 0.0, torch.float16: 2.0**-24, torch.bfloat16: 0.0}


class Case(NamedTuple):
    name: str
    a: BlockScaled
    b: BlockScaled
    offs: Tensor
    starts: Tensor | None = None
    packed: BlockScaled | None = None  # the same rows without gaps
    packed_ends: Tensor | None = None


class Epilogue(NamedTuple):
    dtype: torch.dtype
    bias: bool = False
    accumulate: bool = False


# used in turn: the epilogue does not depend on the operands
EPILOGUES = [Epilogue(dtype, bias) for dtype in ROUNDING for bias in (False, True)]
EPILOGUES += [Epilogue(dtype, accumulate=True) for dtype in ACCUMULATOR_DTYPES]


def operands(
    pair: tuple[str, str], groups: tuple[list[int], int], n: int, k: int, *, k_grouped: bool, **options: object
) -> Case:
    sizes, rest = groups
    offs = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    rows = sum(sizes) + rest
    x, w = torch.randn(rows, k), torch.randn(len(sizes), n, k) * torch.exp2(torch.randint(-8, 8, (len(sizes), n, 1)))
    amax = {"amax": "group"} if FORMATS[pair[0]].family == "nvfp4" else {}
    name = f"{'k' if k_grouped else 'm'}-grouped {pair} {sizes} {n} {k} {options}"
    if k_grouped:
        sources = zip((torch.randn(rows, n), x), pair, strict=True)
        return Case(
            name, *(bs.quantize(y, form, axis=-2, offs=offs, **amax, **options).mT for y, form in sources), offs
        )  # pyright: ignore[reportArgumentType]
    ends = {"offs": offs, **amax} if amax and n % 2 == 0 else {}  # else the tokens have one tensor scale
    a = bs.quantize(x, pair[0], **ends, **options)  # pyright: ignore[reportArgumentType]
    return Case(name, a, bs.quantize(w, pair[1], **amax, **options), offs)  # pyright: ignore[reportArgumentType]


def operands_with_starts(pair: tuple[str, str], counts: list[int], capacity: int, n: int, k: int) -> Case:
    """Operands with a fixed capacity per expert; NVFP4 has one tensor scale for all rows, gaps included."""
    made, w = room(counts, capacity, k), torch.randn(len(counts), n, k)
    nvfp4 = FORMATS[pair[0]].family == "nvfp4"
    amax = {"amax": made.placed.float().abs().max()} if nvfp4 else {}
    a, packed = (bs.quantize(x, pair[0], **amax) for x in (made.placed, made.packed))
    b = bs.quantize(w, pair[1], **({"amax": "group"} if nvfp4 else {}))
    name = f"m-grouped {pair} {counts} of {capacity} {n} {k}"
    return Case(name, a, b, made.ends, made.starts, packed, made.packed_ends)


def cases(m_pairs: list[tuple[str, str]], k_pairs: list[tuple[str, str]], width: int) -> Iterator[Case]:
    """Every pair, every kind of groups for one pair of a family, tails in all dimensions, other layouts.
    width: a number of columns larger than BN."""
    for k_grouped, pairs in ((False, m_pairs), (True, k_pairs)):
        mixed = [pair for pair in pairs if FORMATS[pair[0]].codes_per_byte != FORMATS[pair[1]].codes_per_byte]
        for pair in pairs:
            yield operands(pair, FEW, 20, 128 if pair in mixed else 40, k_grouped=k_grouped)
        for name in dict.fromkeys(FORMATS[pair[0]].family for pair in pairs):
            pair = next(pair for pair in pairs if FORMATS[pair[0]].family == name and pair not in mixed)
            for groups in PATTERNS.values():
                yield operands(pair, groups, 40, 33, k_grouped=k_grouped)
            yield operands(pair, PATTERNS["unaligned"], width, 150, k_grouped=k_grouped)
            if name != "fp8":
                yield operands(pair, FEW, width, 70, k_grouped=k_grouped, scale_layout="blocked")
            if not k_grouped:
                for counts, capacity in CAPACITIES:
                    yield operands_with_starts(pair, counts, capacity, 40, 150)
        yield operands(pairs[0], MANY, 20, 33, k_grouped=k_grouped)
        yield operands(("nvfp4", "nvfp4"), FEW, 20, 40, k_grouped=k_grouped, hadamard=True)


def magnitudes(case: Case) -> Tensor:
    """Sums of the absolute values of the terms."""
    parts: list[BlockScaled] = []
    for q in (case.a, case.b):
        sign = 0x88 if q.spec.codes_per_byte == 2 else 1 << (q.spec.element.bits - 1)
        codes = q.data.view(torch.uint8) & ~sign & 0xFF
        parts.append(replace(q, data=codes.view(q.data.dtype)))
    return exact_grouped(parts[0], parts[1], case.offs, case.starts)


def spans(case: Case) -> list[tuple[int, int]]:
    ends = case.offs.tolist()
    return list(zip([0, *ends[:-1]] if case.starts is None else case.starts.tolist(), ends, strict=True))


def add_bias(want: Tensor, bias: Tensor, case: Case) -> Tensor:
    want = want.clone()
    for group, (start, end) in enumerate(spans(case)):
        want[start:end] += bias[group].double()
    return want


def count_misplaced(case: Case, got: Tensor, bias: Tensor | None) -> int:
    """Number of bytes written in rows of no group, plus values that differ from the packed rows."""
    inside = torch.zeros(got.shape[0], dtype=torch.bool)
    for start, end in spans(case):
        inside[start:end] = True
    assert case.packed is not None
    assert case.packed_ends is not None
    want = bs.scaled_grouped_mm(case.packed, case.b, case.packed_ends, got.dtype, bias=bias)[: int(inside.sum())]
    outside = got[~inside].contiguous().view(torch.uint8)
    return int((outside != 0xFF).sum()) + int((got[inside] != want).sum())


def count_wrong(case: Case, epilogue: Epilogue, backend: str) -> int:
    dtype, has_bias, accumulates = epilogue
    exact = exact_grouped(case.a, case.b, case.offs, case.starts)
    bound = magnitudes(case) * (case.a.length + 4) * 2.0**-24
    has_bias = has_bias and len(case.b.shape) == 3
    bias = torch.randn(case.offs.shape[0], case.b.rows).to(dtype) if has_bias else None
    room = (*exact.shape[:-2], exact.shape[-2] + 2, exact.shape[-1] + 2)
    frame = torch.randn(room).to(dtype) if accumulates else None
    before = None if frame is None else frame.clone()
    total = None if frame is None else frame[..., 1:-1, 1:-1]
    with bs.use_backend(m_grouped=backend, k_grouped=backend):
        got = bs.scaled_grouped_mm(case.a, case.b, case.offs, dtype, bias=bias, accumulate=total, starts=case.starts)
        placed = case.starts is not None and not accumulates
        count = count_misplaced(case, got, bias) if placed else 0
    want = exact if bias is None else add_bias(exact, bias, case)
    if placed:
        got = torch.where(got.isnan(), 0.0, got)  # rows of no group; the others were compared above
    if before is not None and frame is not None:
        want = want + before[..., 1:-1, 1:-1].double()
        before[..., 1:-1, 1:-1] = got
        count += int((before != frame).sum())
    loss = bound + want.abs() * (ROUNDING[dtype] + 2.0**-23) + SMALLEST[dtype] / 2
    if bias is None:
        loss = torch.where(exact == 0, 0.0, loss)
    return count + int(((got.double() - want).abs() > loss).sum()) + int(got.isnan().sum())


def blackwell() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Register the sm_100 kernels for the CPU, with BN = 256 except for fp32; returns the pairs they serve."""
    interpreter.install()
    found = []
    for op in ("m_grouped", "k_grouped"):
        entry = next(entry for entry in kernels(op) if entry.launch is _blackwell.scaled_grouped_mm_sm100)

        @kernel(op, "interpreted", devices=("cpu",), formats=entry.formats, layouts=entry.layouts, reject=entry.reject)
        def product(inputs: Inputs, out: Tensor, *, accumulate: bool) -> None:
            tile = _blackwell.tile_for_sm100(inputs, out)
            tile = tile if out.dtype == torch.float32 else tile._replace(bn=256)
            _blackwell.launch_gemm(inputs, out, tile, accumulate=accumulate)

        found.append(sorted(entry.formats))
    return found[0], found[1]


def main(backend: str) -> int:
    torch.manual_seed(0)
    pairs, width = ((_triton.M_PAIRS, _triton.K_PAIRS), 71) if backend == "triton" else (blackwell(), 133)
    backend = "triton" if backend == "triton" else "interpreted"
    values = 0
    found: list[tuple[str, int]] = []
    with bs.use_backend("reference"):  # casts are tested elsewhere, and are slow in the interpreter
        for number, case in enumerate(cases(*pairs, width)):
            epilogue = EPILOGUES[number % len(EPILOGUES)]
            values += case.a.rows * case.b.rows * (case.offs.shape[0] if len(case.b.shape) == 2 else 1)
            found.append((f"{case.name}, {epilogue}", count_wrong(case, epilogue, backend)))
    bad = [f"{what}: {count} wrong values" for what, count in found if count]
    print(len(found), values, len(bad))
    print("\n".join(bad[:10]))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
