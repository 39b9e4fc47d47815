"""Time of the weight-only GEMM of packed weights, beside bf16, a weight decoded in every call, and a copy of its bytes.

    python -m benchmarks.weights --out rows.jsonl                  # on an H200, about ten minutes
    python -m benchmarks.weights --sizes 512x512 --rows 1,16       # a dry run on a CPU: times mean nothing

Each result is compared with the exact product first. Calls are timed in CUDA graphs, in turns. They rotate through
copies of the weight that are larger than L2 together. `no pdl` is the same kernel without programmatic dependent
launch; calls of one product back to back are the most that it can gain.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import blockscale as bs
from blockscale.bench.gemms import sqnr_db
from blockscale.bench.store import command_line, where
from blockscale.bench.timing import Slice, Timing, input_sets, measure, prepare, watch
from blockscale.gemm import PackedWeight, exact_mm, heuristics_weights, pack_weight
from blockscale.gemm.packed import PACKABLE
from blockscale.hardware import capability, sm_count

OURS, COPY, BF16 = "hopper_weights", "copy", "bf16"
# (N, K): packed MXFP4 of 250, 125, 125, 70 and 31 MB, both ways of the last; then small and odd ones
SIZES = (
    (57344, 8192), (28672, 8192), (8192, 28672), (7168, 18432), (14336, 4096), (4096, 14336), (4096, 4096),
    (6144, 4096), (2112, 7168), (576, 7168), (5120, 2880), (2880, 4096),
)  # fmt: skip
ROWS = (1, 4, 8, 16, 32, 64, 128)
GATE_DB = 50.0  # of a bf16 result


@dataclass
class Found:
    """One product.  us: medians by variant.  spread: quartiles.  predicted_us: by the model.  packed_bytes: of codes
    and scales, padding included."""

    format: str
    m: int
    n: int
    k: int
    packed_bytes: int
    predicted_us: float
    sqnr_db: float
    us: dict[str, float] = field(default_factory=dict[str, float])
    spread: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    sm_clock_mhz: float | None = None

    @property
    def wrong(self) -> bool:
        return not self.sqnr_db >= GATE_DB


@dataclass(frozen=True)
class Options:
    """Command line."""

    formats: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    rounds: int
    out: Path | None


def parse(words: Sequence[str]) -> Options:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(PACKABLE))
    parser.add_argument("--sizes", default=",".join(f"{n}x{k}" for n, k in SIZES), help="N x K of weights")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows of x")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a file that takes one JSON line per product")
    given = parser.parse_args(words)
    sizes = [tuple(map(int, size.split("x"))) for size in given.sizes.split(",")]
    return Options(
        tuple(given.formats.split(",")), tuple((n, k) for n, k in sizes), tuple(map(int, given.rows.split(","))),
        given.rounds, given.out,
    )  # fmt: skip


def ours(x: Tensor, w: PackedWeight) -> Tensor:
    """The product by the kernel, where it runs."""
    if capability(x.device).sm != 90:
        return bs.scaled_mm(x, w)
    with bs.use_backend(gemm=OURS):
        return bs.scaled_mm(x, w)


def without_pdl(x: Tensor, w: PackedWeight) -> Tensor:
    """The product of up to 64 rows without programmatic dependent launch."""
    from blockscale.gemm._hopper_weights import launch

    out = torch.empty(x.shape[0], w.rows, dtype=torch.bfloat16, device=x.device)
    tile = heuristics_weights.tile_for(x.shape[0], w.format)._replace(pdl=False)
    launch(x, w, out, None, cut=heuristics_weights.schedule(w.rows, w.length, sm_count(x.device)), tile=tile)
    return out


def copies_of(w: PackedWeight) -> list[PackedWeight]:
    """The weight, and so many copies that they do not fit in L2 together."""
    leaves, spec = pytree.tree_flatten(w)
    count = input_sets(w.nbytes, w.device)
    return [w, *(pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec) for _ in range(count - 1))]


def slices_of(
    x: Tensor, weights: list[PackedWeight], plain: list[Tensor], make: Callable[..., Slice]
) -> dict[str, Slice]:
    """Variants of one product."""
    targets = [torch.empty_like(w.data) for w in weights]
    found = {
        OURS: make([functools.partial(ours, x, w) for w in weights]),
        BF16: make([functools.partial(torch.mm, x, w.mT) for w in plain]),
        "decoded": make([functools.partial(bs.scaled_mm, x, each.unpack()) for each in weights]),
        COPY: make([functools.partial(a.copy_, w.data) for a, w in zip(targets, weights, strict=True)]),
    }
    if capability(x.device).sm == 90 and x.shape[0] <= heuristics_weights.MAX_TOKENS:
        found["no pdl"] = make([functools.partial(without_pdl, x, w) for w in weights])
    return found


def products(options: Options, device: torch.device) -> Iterator[Found]:
    """Check and time every product."""
    telemetry = watch(device)
    for n, k in options.sizes:
        generator = torch.Generator(device).manual_seed(n + k)
        values = torch.randn(n, k, device=device, generator=generator).bfloat16()
        plain = [values, *(values.clone() for _ in range(input_sets(2 * n * k, device) - 1))]
        for name in options.formats:
            q = bs.quantize(values, name)
            weights = copies_of(pack_weight(q))
            for m in options.rows:
                x = torch.randn(m, k, device=device, generator=generator).bfloat16()
                problem = heuristics_weights.WeightProblem(m, n, k, name)
                us = heuristics_weights.choose(problem)[2]
                db = sqnr_db(exact_mm(x, q), ours(x, weights[0]))
                found = Found(name, m, n, k, weights[0].nbytes, round(us, 1), db)
                if not found.wrong:
                    make = functools.partial(prepare, device=device, seconds=0.004)
                    times = measure(slices_of(x, weights, plain, make), rounds=options.rounds, sample=telemetry.sample)
                    _note(found, times)
                    reading = telemetry.take()
                    found.sm_clock_mhz = reading.sm_clock_mhz if reading else None
                yield found


def _note(found: Found, times: dict[str, Timing]) -> None:
    for name, timing in times.items():
        found.us[name] = round(timing.us, 2)
        found.spread[name] = (round(timing.low, 2), round(timing.high, 2))


def line(found: Found) -> str:
    """Row of the table."""
    start = f"{found.format:11} {found.m:4} {found.n:6}x{found.k:<6} {found.packed_bytes / 1e6:6.1f} MB"
    if found.wrong:
        return f"{start} WRONG: {found.sqnr_db} dB"
    us = found.us[OURS]
    # a copy reads and writes, a product reads
    share = found.us[COPY] / 2 / us * found.packed_bytes / (found.packed_bytes - _scale_bytes(found))
    others = " ".join(f"{name} {time:.1f}" for name, time in found.us.items() if name != OURS)
    return (
        f"{start} {us:7.1f} us, predicted {found.predicted_us:.1f}, {share:.0%} of the copy's rate, "
        f"{found.us[BF16] / us:.2f}x bf16; {others}"
    )


def _scale_bytes(found: Found) -> float:
    """Bytes of the scales, which the copy leaves out."""
    element = {"mxfp4": 4.0, "nvfp4": 4.0, "mxfp8_e4m3": 8.0}[found.format]
    return found.packed_bytes * (1 - element / heuristics_weights.BITS[found.format])


def main(words: Sequence[str]) -> int:
    """Measure, print the table; returns 1 if a result is wrong."""
    options = parse(words)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU: times mean nothing"
    print(f"torch {torch.__version__}, {name}", flush=True)
    command = command_line(["", *words]).replace("blockscale", "python -m benchmarks.weights", 1)
    shared = {"suite": "weights", "where": asdict(replace(where(device, bs.__version__), command=command))}
    wrong = 0
    for found in products(options, device):
        print(line(found), flush=True)
        wrong += found.wrong
        if options.out is not None:  # line by line: a run that is cut off still tells
            with options.out.open("a") as file:
                file.write(json.dumps({**asdict(found), **shared}) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
