"""Run every kernel of this library once, on small odd shapes, under compute-sanitizer. Usage: `make sanitize`.

make sanitize ARGS="--tool racecheck --only nvfp4"

Casts are compared with the reference on the CPU, byte for byte, and GEMMs with exact results, so that no kernel of
torch runs under the sanitizer. Without compute-sanitizer on the PATH the results are still compared, and the last line
says that accesses were not checked.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

os.environ["BLOCKSCALE_POISON"] = "1"  # fills outputs, so that unwritten bytes are detected

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import blockscale as bs
from blockscale import registry
from blockscale.bench.harness import count_wrong
from blockscale.casts.transpose import transpose_codes
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import FORMATS
from blockscale.gemm import exact_mm
from blockscale.grouped import routing as row_moves
from blockscale.grouped._reference import exact_grouped

NAMES = ("fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp8_e4m3_128x128", "mxfp4", "nvfp4")
ROWS, COLUMNS, HIDDEN = 200, 264, 256  # rows and columns are no multiples of a tile; SwiGLU's backward needs 128
WATCHED = "BLOCKSCALE_SANITIZED_BY"
LEAST_DB = 63.0  # lowest SQNR of an fp32 GEMM
FOUND = 9  # exit status of compute-sanitizer if it found an error


@dataclass(frozen=True)
class Inputs:
    """Inputs of the casts."""

    x: Tensor
    gate_up: Tensor
    grad: Tensor
    wide: Tensor
    weight: Tensor
    indices: Tensor
    offs: Tensor
    experts: Tensor
    factors: Tensor

    def to(self, device: str) -> Inputs:
        """Inputs on another device."""
        return Inputs(*(getattr(self, field.name).to(device) for field in fields(self)))


def inputs() -> Inputs:
    """Normal values, tokens routed to several experts, an empty expert, and rows outside all groups."""
    torch.manual_seed(0)
    x, gate_up, grad, wide, weight = (
        torch.randn(shape).bfloat16()
        for shape in ((ROWS, COLUMNS), (ROWS, 2 * COLUMNS), (ROWS, HIDDEN), (ROWS, 2 * HIDDEN), (COLUMNS,))
    )
    indices = torch.randint(-1, ROWS, (ROWS + 33,), dtype=torch.int32)
    offs, experts = torch.tensor([7, 7, 190], dtype=torch.int32), torch.randint(0, 9, (ROWS // 4, 4))
    return Inputs(x, gate_up, grad, wide, weight, indices, offs, experts, torch.randn(indices.shape))


Call = Callable[[Inputs], object]


def cases(name: str) -> Iterator[tuple[str, str, Call]]:
    """(operation, variant, call) for every kernel of a format, both axes and both scale layouts."""
    spec = FORMATS[name]
    for layout in spec.layouts:
        cast = bs.CastSpec(name, scale_layout=layout)
        yield "cast", layout, lambda i, cast=cast: (bs.quantize(i.x, cast), bs.quantize(i.x, cast, axis=-2))
        yield "cast_both", layout, lambda i, cast=cast: bs.quantize_both(i.x, cast, cast, colsum=True)
        if not spec.is_2d:
            yield "permute", layout, lambda i, cast=cast: bs.quantize_permute(i.x, i.indices, cast)
    if not spec.is_2d:
        yield "cast_both", "groups", lambda i: bs.quantize_both(i.x, name, name, offs=i.offs, colsum=True)
        yield "permute_both", "", lambda i: bs.permute_quantize_both(i.x, i.indices, i.offs, name, name)
        yield (
            "permute_both",
            "weighted",
            lambda i: bs.permute_quantize_both(i.x, i.indices, i.offs, name, name, gate_weights=i.factors),
        )
        yield "permute_columns", "", lambda i: bs.permute_quantize_columns(i.x, i.indices, i.offs, name)
    yield "dequantize", "", lambda i: [bs.dequantize(bs.quantize(i.x, name, axis=axis)) for axis in (-1, -2)]
    yield "swiglu", "", lambda i: [bs.swiglu_quantize(i.gate_up, name, axis=axis) for axis in (-1, -2)]
    yield "swiglu_both", "", lambda i: bs.swiglu_quantize_both(i.gate_up, name, name)
    yield (
        "swiglu_backward_both",
        "",
        lambda i: bs.swiglu_backward_quantize_both(i.grad, i.wide, name, name, hidden=name),
    )
    if FORMATS[name].codes_per_byte == 2:
        yield "cast_both", "stochastic", lambda i: bs.quantize_both(i.x, *stochastic(name, i), offs=i.offs)
        yield (
            "swiglu_backward_both",
            "stochastic",
            lambda i: bs.swiglu_backward_quantize_both(i.grad, i.wide, *stochastic(name, i)),
        )
    yield "rmsnorm", "", lambda i: bs.rmsnorm_quantize(i.x, i.weight, name)
    yield "rmsnorm_both", "", lambda i: bs.rmsnorm_quantize_both(i.x, i.weight, name, name)


def stochastic(name: str, inputs: Inputs) -> tuple[bs.CastSpec, bs.CastSpec]:
    """Cast specs of gradients in training: stochastic rounding, and a Hadamard transform for wgrad."""
    rounding = bs.Stochastic(bs.rng_state(0, device=inputs.x.device), "sanitized")
    row = bs.CastSpec(name, rounding=rounding, role="dgrad_dy")
    return row, bs.CastSpec(name, rounding=rounding, hadamard=True, role="wgrad_dy")


def moves() -> Iterator[tuple[str, str, Call]]:
    """(operation, variant, call) of the routing kernels: rows to four experts per token, and back."""

    def permuted(i: Inputs, weights: Tensor | None) -> Tensor:
        routing = bs.sort_by_expert(i.experts, 9)
        return row_moves.permute_rows(i.x[: ROWS // 4], routing.tokens, routing.rows, weights)

    def combined(i: Inputs, weights: Tensor | None) -> Tensor:
        return row_moves.combine_rows(i.x, bs.sort_by_expert(i.experts, 9).rows, weights)

    def dots(i: Inputs) -> Tensor:
        found = row_moves.combine_dots(i.x, i.x[: ROWS // 4], bs.sort_by_expert(i.experts, 9).rows)
        return found.bfloat16()  # the reduction order is not specified

    def cleared(i: Inputs) -> Tensor:
        found = i.x.clone()
        row_moves.clear_rows(found, bs.sort_by_expert(i.experts, 9).offs // 2)
        return found

    def placed(i: Inputs) -> Tensor:
        found = torch.zeros_like(i.x)
        row_moves.place_rows(i.x[: ROWS // 4], bs.sort_by_expert(i.experts, 9).rows, found)
        return found

    def transposed(i: Inputs) -> Tensor:
        return transpose_codes(i.x.contiguous().view(torch.uint8), 2 * i.x.shape[1], 8)

    def weights(i: Inputs) -> Tensor:
        return i.x[: ROWS // 4, :4].float()

    for operation, call in (("permute_rows", permuted), ("combine_rows", combined)):
        yield operation, "", lambda i, call=call: call(i, None)
        yield operation, "weighted", lambda i, call=call: call(i, weights(i))
    yield "combine_dots", "", dots
    yield "clear_rows", "", cleared
    yield "place_rows", "", placed
    yield "transpose_codes", "", lambda i: [transposed(i)]


# (kernel, formats of A and B, M, N, K): every kind of tile of Hopper's GEMMs, split tiles included, with M, N, K tails
PRODUCTS = [
    (row, "fp8_1x128", b, *size)
    for row, sizes in {
        "hopper": ((5, 48, 272), (70, 208, 1040), (330, 399, 397), (700, 4112, 528), (130, 2112, 2064)),
        "hopper_rows": ((1, 208, 272), (17, 400, 528), (17, 399, 527)),
        "triton": ((70, 208, 400),),
    }.items()
    for b in ("fp8_128x128", "fp8_1x128")
    for size in sizes
] + [
    (row, a, b, 130, 208, 400)
    for row, a, b in (
        ("hopper", "mxfp8_e4m3", "mxfp8_e4m3_128x128"),
        ("hopper", "mxfp8_e5m2", "mxfp8_e4m3_128x128"),
        ("triton", "mxfp8_e4m3", "mxfp8_e4m3"),
        ("triton", "nvfp4", "nvfp4"),
    )
]  # fmt: skip


def products(device: str, only: str) -> Iterator[tuple[str, float]]:
    """(title, SQNR in dB against the exact result of the same operands on the CPU), with a bias and accumulating."""
    for kernel, a_format, b_format, m, n, k in PRODUCTS:
        title = f"gemm {kernel} {a_format} @ {b_format} {m}x{n}x{k}"
        if only not in title:
            continue
        x, w, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        with bs.use_backend("reference"):
            a, b = bs.quantize(x, a_format), bs.quantize(w, b_format)
        exact, total = exact_mm(a, b), torch.ones(m, n).to(device)
        a, b = a.to(device), b.to(device)
        with bs.use_backend(gemm=kernel):
            got = bs.scaled_mm(a, b, torch.float32, bias=bias.to(device))
            bs.scaled_mm(a, b, accumulate=total)
        yield title, min(sqnr_db(exact + bias, got.cpu()), sqnr_db(exact + 1, total.cpu()))


SIZES, REST = (0, 5, 70, 0, 130, 64, 1), 9  # rows of each group, and rows outside all groups
GROUPED = [
    (row, "fp8_1x128", *size) for row in ("hopper", "triton") for size in ((208, 400), (144, 272))
] + [("hopper", "mxfp8_e4m3", 208, 400), ("triton", "mxfp8_e4m3", 208, 400), ("triton", "nvfp4", 208, 400)]  # fmt: skip
WEIGHTS = {"fp8_1x128": "fp8_128x128", "mxfp8_e4m3": "mxfp8_e4m3_128x128", "nvfp4": "nvfp4"}


def grouped_products(device: str, only: str) -> Iterator[tuple[str, float]]:
    """(title, SQNR in dB) of m-grouped and k-grouped GEMMs."""
    offs = torch.tensor(SIZES).cumsum(0).int()
    for row, form, n, k in GROUPED:
        title = f"grouped {row} {form} {n}x{k}"
        if only not in title:
            continue
        x, dy, w = torch.randn(sum(SIZES) + REST, k), torch.randn(sum(SIZES) + REST, n), torch.randn(len(SIZES), n, k)
        with bs.use_backend("reference"):
            rows = bs.quantize(x, form), bs.quantize(w, WEIGHTS[form])
            tokens = [bs.quantize(each, form, axis=-2, offs=offs).mT for each in (dy, x)]
        found: list[float] = []
        kinds = [("m_grouped", rows)] + ([] if (row, form) == ("hopper", "mxfp8_e4m3") else [("k_grouped", tokens)])
        for kind, (a, b) in kinds:
            exact = exact_grouped(a, b, offs)
            with bs.use_backend(**{kind: row}):
                got = bs.scaled_grouped_mm(a.to(device), b.to(device), offs.to(device), torch.float32)
                total = torch.ones_like(got)
                bs.scaled_grouped_mm(a.to(device), b.to(device), offs.to(device), accumulate=total)
            found += [sqnr_db(exact, got.cpu()), sqnr_db(exact + 1, total.cpu())]
        yield title, min(found)


def on_the_cpu(result: object) -> list[Tensor]:
    """All tensors of a result on the CPU; 1-byte dtypes as uint8, since torch copies only dense FP4 tensors."""
    leaves = pytree.tree_leaves(result)
    return [(leaf.view(torch.uint8) if leaf.element_size() == 1 else leaf).cpu() for leaf in leaves]


def watched(arguments: list[str], tool: str) -> int | None:
    """Run this program again under compute-sanitizer; returns its exit status, or None if it is not installed."""
    command = shutil.which("compute-sanitizer")
    if command is None:
        return None
    # out-of-bounds accesses within torch's cached blocks would not be detected
    environment = {**os.environ, WATCHED: tool, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", tool, "--error-exitcode", str(FOUND)]
    return subprocess.run([command, *options, sys.executable, __file__, *arguments], env=environment).returncode


def main() -> int:
    """Run all cases, compare and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not interpreted:
        print("needs a CUDA GPU, found none")
        return 2
    if WATCHED not in os.environ and not interpreted:
        status = watched(sys.argv[1:], options.tool)
        if status is not None:
            return status
    here = inputs()
    there = here.to("cpu" if interpreted else "cuda")
    wrong = count = 0
    seen: set[str] = set()
    for name in (*NAMES, ""):
        for operation, about, call in cases(name) if name else moves():
            seen.add(operation)
            title = f"{name} {operation} {about}".strip()
            if options.only not in title:
                continue
            with bs.use_backend("triton"):
                got = on_the_cpu(call(there))
            with bs.use_backend("reference"):
                differ = count_wrong(got, on_the_cpu(call(here)))
            count, wrong = count + 1, wrong + (differ > 0)
            print(f"WRONG {title}: {differ} bytes differ" if differ else f"ok    {title}", flush=True)
    several = (each("cuda", options.only) for each in (products, grouped_products))
    for title, db in () if interpreted else itertools.chain.from_iterable(several):
        count, wrong = count + 1, wrong + (not db > LEAST_DB)
        print(f"{'ok   ' if db > LEAST_DB else 'WRONG'} {title}: {db:.0f} dB", flush=True)
    ours = {op for op in registry.operations() if any(row.backend == "triton" for row in registry.kernels(op))}
    ours -= {"gemm", "m_grouped", "k_grouped"}  # compared by SQNR, not by bytes
    assert seen >= ours, f"no case runs {sorted(ours - seen)}"
    by = f"under {os.environ[WATCHED]}" if WATCHED in os.environ else "accesses not checked: no compute-sanitizer"
    print(f"{count} cases, {wrong} wrong, {by}")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    raise SystemExit(main())
