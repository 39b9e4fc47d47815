"""Triton GEMM in the interpreter against the exact product, and the fused epilogue pass against torch; a program,
because the interpreter is chosen at import.

    TRITON_INTERPRET=1 python tests/gemm/interpreted.py

Prints `cases values mismatches` and the first mismatches. A value is right if its error is within the bound of fp32
sums of K terms, plus one rounding for 16-bit results.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

assert os.environ.get("TRITON_INTERPRET") == "1"
os.environ["BLOCKSCALE_POISON"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import blockscale as bs  # noqa: E402
from blockscale.formats import FORMATS, BlockScaled  # noqa: E402
from blockscale.formats.spec import LEGAL_PAIRS  # noqa: E402
from blockscale.gemm import ACCUMULATOR_DTYPES, exact_mm  # noqa: E402
from blockscale.gemm._finish import finish_at_once  # noqa: E402
from blockscale.gemm.ops import finish  # noqa: E402

# tails in every direction, an odd K, whole blocks, one row
THOROUGH = "ALL_TESTS" in os.environ
SIZES = ((33, 70, 150), (5, 66, 257), (40, 64, 256), (1, 1, 1))
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# output, bias, accumulate; every case has the first, whose bound is the tightest, and two others in rotation: the
# epilogue does not depend on the operands, and the sizes of a format cover all of them
EPILOGUES = [(dtype, bias, False) for dtype in ROUNDING for bias in (False, True)]
EPILOGUES += [(dtype, False, True) for dtype in ACCUMULATOR_DTYPES]
PER_CASE = 3


def bound(a: BlockScaled, b: BlockScaled) -> Tensor:
    magnitudes = bs.dequantize(a, torch.float32).double().abs() @ bs.dequantize(b, torch.float32).double().abs().mT
    return magnitudes * (a.length + 4) * 2.0**-24


def operands(pair: tuple[str, str], m: int, n: int, k: int, **options: object) -> tuple[BlockScaled, BlockScaled]:
    x, w = torch.randn(m, k), torch.randn(n, k) * torch.exp2(torch.randint(-8, 8, (n, 1)))
    return bs.quantize(x, pair[0], **options), bs.quantize(w, pair[1], **options)  # pyright: ignore[reportArgumentType]


def poisoned(name: str) -> tuple[BlockScaled, BlockScaled]:
    """Operands with one NaN; its other blocks and rows are finite."""
    x = torch.randn(33, 150)
    x[5, 70] = torch.nan
    return bs.quantize(x, name), bs.quantize(torch.randn(70, 150), name)


def cases() -> Iterator[tuple[str, BlockScaled, BlockScaled]]:
    for pair in sorted(LEGAL_PAIRS):
        same_family = pair[0] == pair[1] or FORMATS[pair[0]].family != "mx"
        every = same_family and (THOROUGH or pair[0] in ("fp8_1x128", "mxfp8_e4m3", "nvfp4"))
        for size in SIZES if every else SIZES[:1]:
            yield f"{pair} {size}", *operands(pair, *size)
    for name in ("mxfp8_e4m3", "mxfp8_e4m3_128x128", "nvfp4"):
        yield f"{name} blocked", *operands((name, name), 33, 70, 150, scale_layout="blocked")
    for name in ("mxfp4", "nvfp4"):
        yield f"{name} rotated", *operands((name, name), 33, 70, 150, hadamard=True)
    yield "a NaN", *poisoned("mxfp8_e4m3")
    transposed = bs.quantize(torch.randn(150, 33), "fp8_1x128", axis=-2).mT
    yield "transposed", transposed, bs.quantize(torch.randn(150, 70), "fp8_1x128", axis=-2).mT


def epilogues(number: int) -> list[tuple[torch.dtype, bool, bool]]:
    """Epilogues of a case."""
    first, *others = EPILOGUES
    return [first, *(others[(2 * number + place) % len(others)] for place in range(PER_CASE - 1))]


def wrong(a: BlockScaled, b: BlockScaled, backend: str, number: int) -> int:
    exact, most = exact_mm(a, b), bound(a, b)
    bias, start = torch.randn(b.rows), torch.randn(a.rows, b.rows)
    count = 0
    for dtype, has_bias, accumulate in epilogues(number):
        before = start.to(dtype)
        given, total = bias.to(dtype) if has_bias else None, before.clone() if accumulate else None
        with bs.use_backend(gemm=backend):
            got = bs.scaled_mm(a, b, dtype, bias=given, accumulate=total).double()
        want = exact if given is None else exact + given.double()
        want = want + before.double() if accumulate else want
        loss = most + want.abs() * (ROUNDING[dtype] + 2.0**-23)
        count += int(((got - want).abs() > loss).sum()) + int((got.isnan() != want.isnan()).sum())
    return count


def epilogue_passes() -> Iterator[tuple[str, int, int]]:
    """Case, values compared, and values that differ from torch bit for bit; outputs are strided."""
    scales = torch.tensor(0.3), torch.tensor(1.7)
    for rows, columns in ((7, 1030), (1, 1), (4, 1024)):
        product, bias = torch.randn(rows, columns) * 1e3, torch.randn(columns)
        for dtype in ROUNDING:
            for given in (None, bias, bias.to(dtype)):
                for factors in (None, scales):
                    for accumulate in (False, True) if dtype in ACCUMULATOR_DTYPES and given is None else (False,):
                        scaled = product if factors is None else product * factors[0] * factors[1]
                        got, want = (torch.ones(2 * rows, 3 * columns).to(dtype) for _ in range(2))
                        finish(scaled, want[::2, ::3], given, accumulate=accumulate)
                        finish_at_once(product, got[::2, ::3], given, accumulate=accumulate, scales=factors)
                        yield f"finish {rows}x{columns} {dtype}", got.numel(), int((got != want).sum())


def main(
    cases: Iterable[tuple[str, BlockScaled, BlockScaled]], backend: str, more: Iterable[tuple[str, int, int]] = ()
) -> int:
    torch.manual_seed(0)
    with bs.use_backend("reference"):  # casts are tested elsewhere, and are slower in the interpreter than GEMMs
        found = [
            (what, PER_CASE * a.rows * b.rows, wrong(a, b, backend, number))
            for number, (what, a, b) in enumerate(cases)
        ]
    found += more
    bad = [f"{what}: {count} values off" for what, _, count in found if count]
    print(len(found), sum(values for _, values, _ in found), len(bad))
    print("\n".join(bad[:10]))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(cases(), "triton", epilogue_passes()))
