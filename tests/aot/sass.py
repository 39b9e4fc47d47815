"""Hashes of the SASS of every kernel for sm_90 and sm_100, held against tests/golden/sass.txt. Needs no GPU.

    PYTHONPATH=tests python -m aot.sass                 # compile everything, list the cases that differ
    PYTHONPATH=tests python -m aot.sass --only 'gemm'   # the cases whose names match
    PYTHONPATH=tests python -m aot.sass --write         # record the hashes of this tree

A change that only renames leaves every hash as it is. A hash covers the instruction lines alone: no headers, no PTX, no
encodings, no names. Compilations for sm_100 of kernels with tensor-core MMAs vary from process to process, sources
unchanged: such a case has several stored variants, `a | b`. A new variant is stored after it was seen in the old tree
as well (`--repeat`). The hashes hold for triton 3.6 and the ptxas that Triton takes by default; the first line of
the file names both.

Cases: the casts of `matrix.py`; GEMMs (dense, few rows, MX, Triton, Blackwell); grouped GEMMs (FP8, MX, upcast, Triton,
Blackwell); the kernels that list tiles, move rows and finish a product.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from aot.compiled import CAN_COMPILE, CUOBJDUMP, compiled_for
from aot.matrix import matrix
from blockscale import quantize, sort_by_expert
from blockscale.formats import FORMATS, BlockScaled
from blockscale.gemm import _blackwell, _finish, _hopper, _hopper_mx, _hopper_rows, _triton, heuristics, heuristics_mx
from blockscale.gemm._hopper import empty_for_tma
from blockscale.gemm._tiles import Tile as TritonTile
from blockscale.grouped import _blackwell as grouped_blackwell
from blockscale.grouped import _hopper as grouped_hopper
from blockscale.grouped import _hopper_mx as grouped_hopper_mx
from blockscale.grouped import _hopper_upcast, _triton_rows
from blockscale.grouped import _triton as grouped_triton
from blockscale.grouped import heuristics as grouped_heuristics
from blockscale.grouped.ops import Inputs
from support.products import offsets

GOLDEN = Path(__file__).parent.parent / "golden" / "sass.txt"
ARCHES = (90, 100)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# output dtype, bias, accumulate
_EPILOGUES = (
    ("bf16", False, False),
    ("bf16", True, False),
    ("fp32", False, True),
    ("fp16", False, False),
    ("bf16", False, True),
    ("fp32", False, False),
)

# A case makes its operands, outside of `compiled_for`, and returns the launch.
Case = Callable[[], Callable[[], object]]


def hash_instructions(sass: str) -> str:
    """16 hex digits of the instruction lines of one `cuobjdump -sass` listing; raises if it has none.

    >>> line = "        /*0a10*/                   {} ;      /* 0x00007610010c7816 */"
    >>> hash_instructions(line.format("MOV R10, R11")) == hash_instructions(line.format("MOV R10, R12"))
    False
    """
    lines = _INSTRUCTION.findall(sass)
    if not lines:
        raise ValueError("no instructions in the listing")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def hash_kernel(compiled: Any) -> str:
    """Hash of a kernel that `compiled_for` collected."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-sass", file.name]
        return hash_instructions(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# ---- cases: name, architectures, call --------------------------------------------------------------------------------


def _epilogues(count: int = 3) -> Iterator[tuple[str, torch.dtype, bool, bool]]:
    """The first of `_EPILOGUES`: bf16 with and without bias, fp32 `out +=`; all of them with 6."""
    for dtype, bias, accumulate in _EPILOGUES[:count]:
        words = [dtype, "bias" if bias else "", "accumulate" if accumulate else ""]
        yield " ".join(word for word in words if word), _DTYPES[dtype], bias, accumulate


def _output(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return empty_for_tma((rows, columns), dtype, torch.device("cpu"))


@functools.cache
def _operand(rows: int, length: int, name: str, *, groups: int = 0, layout: str = "") -> BlockScaled:
    shape = (groups, rows, length) if groups else (rows, length)
    return quantize(torch.zeros(shape), name, scale_layout=layout or None)


@functools.cache
def _k_grouped_operand(columns: int, name: str, layout: str = "") -> BlockScaled:
    return quantize(torch.zeros(512, columns), name, axis=-2, offs=_OFFS, scale_layout=layout or None).mT


_OFFS = offsets([100, 200, 212])


def _hopper_gemms() -> Iterator[tuple[str, Case]]:
    """Every tile, whole and split; the one with the fewest registers with every epilogue and odd sizes."""

    def call(tile: int, weight: str, dtype: torch.dtype, bias: bool, accumulate: bool, split: bool, n: int, k: int):
        problem = heuristics.Problem(512, n, k, weight == "fp8_1x128", dtype == torch.float32, 132, accumulate)
        chosen = heuristics.TILES[tile]
        plan = heuristics.stream_k_plan(chosen, problem) if split else heuristics.data_parallel_plan(chosen, problem)
        assert plan is not None
        a, b = _operand(512, k, "fp8_1x128"), _operand(n, k, weight)
        out, added = _output(512, n, dtype), torch.zeros(n) if bias else None
        return lambda: _hopper.launch(a, b, out, added, accumulate=accumulate, plan=plan)

    for weight, tile in itertools.product(("fp8_128x128", "fp8_1x128"), range(len(heuristics.TILES))):
        for (words, dtype, bias, accumulate), split in itertools.product(
            _epilogues(6 if tile == 1 else 3), (False, True)
        ):
            if accumulate and heuristics.TILES[tile].m_subtiles > 1:
                continue
            name = f"gemm hopper {weight} tile {tile} {words}{' stream-K' if split else ''}"
            yield name, functools.partial(call, tile, weight, dtype, bias, accumulate, split, 512, 2048)
        for n in (1, 511) if tile == 1 else ():
            name = f"gemm hopper {weight} tile {tile} bf16 bias N={n}"
            yield name, functools.partial(call, tile, weight, torch.bfloat16, True, False, False, n, 2047)


def _few_rows_gemms() -> Iterator[tuple[str, Case]]:
    def call(rows: int, n: int, weight: str, dtype: torch.dtype, bias: bool, accumulate: bool):
        problem = heuristics.Problem(rows, n, 2047, weight == "fp8_1x128", dtype == torch.float32, 132, accumulate)
        a, b = _operand(rows, 2047, "fp8_1x128"), _operand(n, 2047, weight)
        plan, _ = heuristics.choose_few_rows(problem)
        out, added = torch.empty(rows, n, dtype=dtype), torch.zeros(n) if bias else None
        return lambda: _hopper_rows.launch(a, b, out, added, accumulate=accumulate, plan=plan)

    for weight, rows, n in itertools.product(("fp8_128x128", "fp8_1x128"), (16, 32), (512, 511)):
        for words, dtype, bias, accumulate in _epilogues():
            name = f"gemm few rows {weight} M={rows} N={n} {words}"
            yield name, functools.partial(call, rows, n, weight, dtype, bias, accumulate)


def _hopper_mx_gemms() -> Iterator[tuple[str, Case]]:
    def call(tile: int, left: str, dtype: torch.dtype, bias: bool, accumulate: bool, n: int):
        problem = heuristics.Problem(512, n, 2047, False, dtype == torch.float32, 132, accumulate)
        a, b = _operand(512, 2047, left), _operand(n, 2047, "mxfp8_e4m3_128x128")
        plan = heuristics_mx.plan_for(heuristics_mx.TILES[tile], problem)
        out, added = _output(512, n, dtype), torch.zeros(n) if bias else None
        return lambda: _hopper_mx.launch(a, b, out, added, accumulate=accumulate, plan=plan)

    tiles = range(len(heuristics_mx.TILES))
    for tile, left, n in itertools.product(tiles, ("mxfp8_e4m3", "mxfp8_e5m2"), (512, 511)):
        if n == 511 and (tile or left == "mxfp8_e5m2"):
            continue
        for words, dtype, bias, accumulate in _epilogues(3 if tile else 6):
            name = f"gemm hopper MX {left} tile {tile} N={n} {words}"
            yield name, functools.partial(call, tile, left, dtype, bias, accumulate, n)


def _triton_gemms() -> Iterator[tuple[str, Case]]:
    def call(pair: tuple[str, str], m: int, k: int, dtype: torch.dtype, bias: bool, accumulate: bool):
        a, b = _operand(m, k, pair[0]), _operand(512, k, pair[1])
        out, added = torch.empty(m, 512, dtype=dtype), torch.zeros(512) if bias else None
        return lambda: _triton.scaled_mm(a, b, out, bias=added, accumulate=accumulate)

    for pair in sorted(_triton.LEGAL_PAIRS):
        yield (
            f"gemm triton {pair[0]} {pair[1]} bf16",
            functools.partial(call, pair, 512, 1024, torch.bfloat16, False, False),
        )
    for pair in (("fp8_1x128", "fp8_128x128"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("nvfp4", "nvfp4_16x16")):
        for (words, dtype, bias, accumulate), m in itertools.product(_epilogues(), (16, 64, 512)):
            name = f"gemm triton {pair[0]} {pair[1]} M={m} odd K {words}"
            yield name, functools.partial(call, pair, m, 1000, dtype, bias, accumulate)


_BLACKWELL_PAIRS = (
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp8_e5m2", "mxfp8_e4m3"),
    ("mxfp8_e4m3", "mxfp8_e4m3_128x128"),
    ("mxfp8_e4m3", "mxfp4"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_16x16"),
)


def _blackwell_gemms() -> Iterator[tuple[str, Case]]:
    def call(pair: tuple[str, str], dtype: torch.dtype, bias: bool, accumulate: bool, tile: TritonTile | None):
        a, b = (_operand(512, 1024, name, layout="blocked") for name in pair)
        chosen = tile or _blackwell.tile_for_sm100(a, b, dtype, 8)
        out, added = torch.empty(512, 512, dtype=dtype), torch.zeros(512) if bias else None
        return lambda: _blackwell.launch_gemm(a, b, out, added, accumulate=accumulate, tile=chosen)

    for pair in _BLACKWELL_PAIRS:
        for words, dtype, bias, accumulate in _epilogues():
            name = f"gemm blackwell {pair[0]} {pair[1]} {words}"
            yield name, functools.partial(call, pair, dtype, bias, accumulate, None)
        narrow = TritonTile(128, 128, 128, 8, 3)
        yield (
            f"gemm blackwell {pair[0]} {pair[1]} 128x128",
            functools.partial(call, pair, torch.bfloat16, False, False, narrow),
        )


def _grouped(
    title: str,
    model: grouped_heuristics.Model,
    launch: Callable[..., object],
    pairs: tuple[tuple[str, str, bool], ...],
    sizes: tuple[int, ...] = (512, 511),
) -> Iterator[tuple[str, Case]]:
    """Grouped GEMMs of Hopper: every tile; the second with every epilogue and an odd N.  pairs: formats, k-grouped."""

    def call(tile: int, pair: tuple[str, str, bool], dtype: torch.dtype, bias: bool, accumulate: bool, n: int):
        left, right, k_grouped = pair
        if k_grouped:
            a, b = _k_grouped_operand(384, left), _k_grouped_operand(n, right)
        else:
            a, b = _operand(512, 2048, left), _operand(n, 2048, right, groups=3)
        wide = dtype == torch.float32
        problem = grouped_heuristics.Problem(a.rows, n, a.length, 3, k_grouped, wide, 132, accumulate)
        out = _output(3 * a.rows if k_grouped else a.rows, n, dtype)
        added = torch.zeros(3, n) if bias else None
        chosen = model.fitted(model.tiles[tile], problem)
        return lambda: launch(Inputs(a, b, _OFFS, bias=added), out, chosen, accumulate=accumulate)

    for pair, tile, n in itertools.product(pairs, range(len(model.tiles)), sizes):
        if n != sizes[0] and tile != 1:
            continue
        for words, dtype, bias, accumulate in _epilogues(6 if tile == 1 else 3):
            if (pair[2] and bias) or (accumulate and model.tiles[tile].m_subtiles > 1):
                continue
            kind = "k-grouped" if pair[2] else "m-grouped"
            name = f"{kind} {title} {pair[0]} {pair[1]} tile {tile} N={n} {words}"
            yield name, functools.partial(call, tile, pair, dtype, bias, accumulate, n)


def _grouped_by_pair(
    title: str, launch: Callable[..., object], layout: str, formats: set[str]
) -> Iterator[tuple[str, Case]]:
    """Grouped GEMMs of plain Triton: every format by itself."""

    def call(name: str, k_grouped: bool, dtype: torch.dtype, bias: bool, accumulate: bool):
        if k_grouped:
            a, b = (_k_grouped_operand(size, name, layout) for size in (384, 512))
            out = torch.empty(3, 384, 512, dtype=dtype)
            return lambda: launch(Inputs(a, b, _OFFS), out, accumulate=accumulate)
        a, b = _operand(512, 1024, name, layout=layout), _operand(512, 1024, name, groups=3, layout=layout)
        out, added = torch.empty(512, 512, dtype=dtype), torch.zeros(3, 512) if bias else None
        return lambda: launch(Inputs(a, b, _OFFS, bias=added), out, accumulate=accumulate)

    for name, k_grouped in itertools.product(sorted(formats), (False, True)):
        for words, dtype, bias, accumulate in _epilogues():
            if not (k_grouped and bias):
                kind = "k-grouped" if k_grouped else "m-grouped"
                yield (
                    f"{kind} {title} {name} {words}",
                    functools.partial(call, name, k_grouped, dtype, bias, accumulate),
                )


def _others() -> Iterator[tuple[str, Case]]:
    """Rows permuted and combined, and the pass behind a product of the vendor's library."""

    def rows(columns: int, weighted: bool):
        routing = sort_by_expert(torch.zeros(256, 8, dtype=torch.int64), 64)
        x, y = (torch.empty(count, columns, dtype=torch.bfloat16) for count in (256, 2048))
        weights = torch.ones(256, 8)

        def launch():
            _triton_rows.permute_rows(x, routing.tokens, routing.rows, weights if weighted else None, y)
            _triton_rows.combine_rows(y, routing.rows, weights if weighted else None, x)
            _triton_rows.combine_dots(y, x, routing.rows, weights)
            _triton_rows.clear_rows(y, routing.offs)

        return launch

    def finish(dtype: torch.dtype, bias: bool, accumulate: bool, scaled: bool):
        scales = (torch.ones(()), torch.ones(())) if scaled else None
        out, added = torch.empty(512, 512, dtype=dtype), torch.zeros(512) if bias else None
        product = torch.empty(512, 512)
        return lambda: _finish.finish_at_once(product, out, added, accumulate=accumulate, scales=scales)

    for columns, weighted in itertools.product((7168, 7169), (False, True)):
        name = f"rows of {columns}{' with gate weights' if weighted else ''}"
        yield name, functools.partial(rows, columns, weighted)
    for (words, dtype, bias, accumulate), scaled in itertools.product(_epilogues(6), (False, True)):
        name = f"epilogue pass {words}{' tensor scales' if scaled else ''}"
        yield name, functools.partial(finish, dtype, bias, accumulate, scaled)


def _cast(call: Callable[[], object]) -> Callable[[], object]:
    return call


@functools.cache
def cases() -> dict[str, tuple[tuple[int, ...], Case]]:
    """Every case by its name."""
    found: dict[str, tuple[tuple[int, ...], Case]] = {}

    def add(arches: tuple[int, ...], every: Iterator[tuple[str, Case]]) -> None:
        for name, call in every:
            assert name not in found, name
            found[name] = (arches, call)

    fp8 = (("fp8_1x128", "fp8_128x128", False), ("fp8_1x128", "fp8_1x128", True))
    mx = (("mxfp8_e4m3", "mxfp8_e4m3_128x128", False), ("mxfp8_e5m2", "mxfp8_e4m3_128x128", False))
    upcast = (("nvfp4", "nvfp4", False), ("nvfp4", "nvfp4", True))
    one_d = {name for name, spec in FORMATS.items() if not spec.is_2d}
    add((90,), _hopper_gemms())
    add((90,), _few_rows_gemms())
    add((90,), _hopper_mx_gemms())
    add((90,), _grouped("hopper", grouped_heuristics.FP8, grouped_hopper.launch, fp8))
    add((90,), _grouped("hopper MX", grouped_heuristics.MX, grouped_hopper_mx.launch, mx))
    add((90,), _grouped("hopper upcast", grouped_heuristics.UPCAST, _hopper_upcast.launch, upcast, (512,)))
    add((100,), _blackwell_gemms())
    blackwell = one_d & {name for pair in _BLACKWELL_PAIRS for name in pair}
    add((100,), _grouped_by_pair("blackwell", grouped_blackwell.scaled_grouped_mm_sm100, "blocked", blackwell))
    add(ARCHES, _triton_gemms())
    add(ARCHES, _grouped_by_pair("triton", grouped_triton.scaled_grouped_mm, "", one_d))
    add(ARCHES, _others())
    add(ARCHES, ((f"cast {name}", functools.partial(_cast, case.call)) for name, case in matrix(product=False).items()))
    return found


# ---- the command -----------------------------------------------------------------------------------------------------


def hashes_of(name: str, arch: int) -> str:
    """Hashes of the kernels that one case launches, in order of launch, each kernel once."""
    os.environ["BLOCKSCALE_PTXAS"] = "default"
    launch = cases()[name][1]()
    with compiled_for(arch) as kernels:
        launch()
    return " ".join(dict.fromkeys(hash_kernel(kernel) for kernel in kernels))


def toolchain() -> str:
    """The compiler that hashes belong to."""
    versions = ", ".join(f"ptxas {get_ptxas(arch).version} for sm_{arch}" for arch in ARCHES)
    return f"# triton {triton.__version__}, {versions}"


def compiled_hashes(only: str, jobs: int | None) -> dict[str, str]:
    """`sm_90 case` -> hashes, in the order of `cases`."""
    work = [(name, arch) for name, (arches, _) in cases().items() for arch in arches if re.search(only, name)]
    found: dict[str, str] = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(hashes_of, *case): case for case in work}
        for number, task in enumerate(as_completed(tasks), 1):
            name, arch = tasks[task]
            found[f"sm_{arch} {name}"] = task.result()
            if number % 50 == 0:
                print(f"{number} of {len(tasks)} cases compiled", flush=True)
    return {f"sm_{arch} {name}": found[f"sm_{arch} {name}"] for name, arch in work}


def is_stored(found: dict[str, None] | None, stored: set[str] | None) -> bool:
    """Whether a case was compiled, and every compilation gave one of its stored variants."""
    return found is not None and stored is not None and set(found) <= stored


def main() -> int:
    """Write the hashes, or compare with those that are stored; 1 if one differs or is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the hashes of this tree")
    parser.add_argument("--only", default="", help="a pattern that a case's name must hold; not with --write")
    parser.add_argument("--repeat", type=int, default=1, help="compile so often, in new processes; for --write")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    assert CAN_COMPILE, "needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"
    assert not (options.write and options.only), "--write records every case"
    start = time.monotonic()
    found: dict[str, dict[str, None]] = {}
    for _ in range(options.repeat):
        for case, line in compiled_hashes(options.only, options.jobs).items():
            found.setdefault(case, {})[line] = None
    kernels = len({each for lines in found.values() for line in lines for each in line.split()})
    print(f"{len(found)} cases, {kernels} different kernels, {time.monotonic() - start:.0f} s")
    if options.write:
        GOLDEN.write_text(
            "\n".join([toolchain(), *(f"{case}: {' | '.join(lines)}" for case, lines in found.items())]) + "\n"
        )
        return 0
    first, *lines = GOLDEN.read_text().splitlines()
    if first != toolchain():
        print(f"the stored hashes are of another compiler: {first}; this one is {toolchain()}")
        return 1
    stored = {case: set(text.split(" | ")) for case, text in (line.rsplit(": ", 1) for line in lines)}
    wanted = {case for case in stored if re.search(options.only, case.split(" ", 1)[1])}
    wrong = sorted(case for case in wanted | set(found) if not is_stored(found.get(case), stored.get(case)))
    for case in wrong:
        print(f"DIFFERS {case}: {stored.get(case, 'not stored')} -> {list(found.get(case, ['not compiled']))}")
    print(f"{len(wanted) - len(wrong)} of {len(wanted)} cases have the stored instructions")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
