"""`blockscale bench overlap`: overlapped products of one rank, over a virtual link of pinned host memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import env
from ..errors import MissingPackageError
from . import arguments
from .bench_rows import FILE_WIDTH, show_wrong, timed
from .roofline_overlap import LAYERS, SHAPES, Op, Payload, expert_model

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..bench.store import Row
    from ..bench.suites.overlap import Problem

SUITE = "overlap"
# sizes of a dry run on a CPU: rows of each rank, features of each rank, features
TINY = (8, 128, 256)
# experts of a mixture, and of a token; and of each EP rank, and of a token in a dry run
MIXTURE, TINY_MIXTURE = (32, 4), (4, 2)
# seconds of a slice: a call takes about a millisecond, and the first one finds the device idle
SECONDS = 0.02
_TIMES = {
    "one": "one product", "permuted": "one product, permuted", "G'": "one product beside copies",
    "chunks": "chunks, rows there", "copies": "copies", "serial": "serial", "auto": "auto",
}  # fmt: skip
_FIGURES = {
    "C/G": "copies_over_product", "attained": "attainment", "strict": "attainment_strict", "/serial": "over_serial",
    "chunks/one": "chunked_over_one",
    "exposed": "exposed_us", "hidden": "hidden",
}  # fmt: skip


def run(
    op: tuple[Op, ...] = (),
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    experts: int | None = None,
    topk: int | None = None,
    model: str | None = None,
    tp: int = 8,
    ep: int = 1,
    payload: tuple[Payload, ...] = ("fp8_blockwise_pow2",),
    ratio: tuple[float, ...] = (),
    tokens: tuple[int, ...] = (),
    chunks: tuple[int, ...] = (),
    rank: int = 0,
    graph: bool = False,
    json: Path | None = None,
    trace: Path | None = None,
    quick: bool = False,
    device: str | None = None,
    commit: str | None = None,
) -> int:
    """Time the share of one rank of an overlapped product, on one GPU: the memory of the other ranks is pinned host
    memory, so the link is PCIe. Beside it, in turns: one product of all rows, the same chunks with all rows there, the
    copies alone, copies and then the product, and the product while the copies run. Every case is checked first; exit
    status 1 if one is wrong. Sizes are of all ranks together, by default those of the Flux performance report.

    Args:
        op: all_gather_mm, the default: rows are gathered, then multiplied. mm_reduce_scatter: partial products are
            summed over the ranks. all_gather_grouped_mm, grouped_mm_reduce_scatter: the same with experts, layers 0
            and 1 of a mixture.
        m: Rows, which are tokens.
        n: Out features: those of an expert in layer 0, those of a token in layer 1.
        k: In features: those of a token in layer 0, those of an expert in layer 1.
        experts: Experts of a mixture; 32 by default.
        topk: Experts of a token; 4 by default. Each token draws its experts at random, from a fixed seed.
        model: mixtral-8x7b or qwen1.5-moe-a2.7b: layers 0 and 1 at its sizes, gate and up in one weight, or one of them
            with --op. 8192 tokens, or --m, or --tokens.
        tp: Ranks that cut a weight.
        ep: Groups of TP ranks that divide the experts.
        payload: What gathers carry and products multiply; sums travel in bf16.
        ratio: Times of copies over those of the product: the N of a gather and the K of a sum are chosen so, from the
            rates of an H200 or of this machine if it is known.
        tokens: A case for each of these M, with the path that overlap="auto" would take beside it.
        chunks: Numbers of ranks whose rows share a product, such as 1,3,4 of 8, in the order of arrival of a gather;
            sums take them backwards. By default those that layers use on this GPU over such a link.
        rank: The rank that is timed, on which it depends whether such rows are adjacent.
        graph: Time calls in CUDA graphs, without launches.
        json: Store the rows in this file, replacing rows of the same case and GPU.
        trace: Draw one overlapped call of each case and one serial one into this .svg or .png: a lane for each CUDA
            stream with its GEMMs, copies, sums and waits.
        quick: Five rounds instead of eleven.
        device: Device to run on, such as cpu or cuda:0; the first GPU if there is one.
        commit: Commit to record if the source is not a git checkout.
    """
    mixture = {"--experts": experts, "--topk": topk, "--ep": ep if ep != 1 else None}
    sizes = dict(SHAPES)
    if model is not None:
        from ..bench.shapes import OVERLAP_TOKENS, expert_products

        named = {"--n": n, "--k": k, "--experts": experts, "--topk": topk, "--ratio": ratio}
        named |= {f"--op {each}": each not in LAYERS for each in op}
        _, (of_model, _) = expert_model(model, named)
        op, experts, topk = op or LAYERS, of_model.experts, of_model.top_k
        sizes |= zip(LAYERS, expert_products(of_model, OVERLAP_TOKENS), strict=True)
    op = op or ("all_gather_mm",)
    _check_options(op, {"--m": m, "--n": n, "--k": k, "--tp": tp}, mixture, ratio, tokens)
    arguments.check_device(device)
    arguments.check_writable(json, "--json")
    _check_trace(trace)
    if trace is not None:
        env.suggest_to_others("KINETO_LOG_LEVEL", "99")  # silences the log of torch's profiler
    console = arguments.wide_console(FILE_WIDTH)
    with console.status("importing torch ..."):
        from ..bench.store import read
        from ..bench.suites import overlap
        from ..hardware import default_device, gpu_name, named_device

    where = default_device() if device is None else named_device(device)
    if trace is not None and where.type != "cuda":
        rule, fix = "a timeline is one of CUDA streams, and a CPU has none", "leave --trace out, or run it on a GPU"
        arguments.refuse(f"--trace {trace} on {where.type}", rule, fix)
    if json is not None:
        read(json)  # raises for a file of another kind before anything is timed
    gpu, cases = gpu_name(where), list[overlap.Case]()
    for each in op:
        size, (most, few) = (m, n, k), MIXTURE
        if where.type != "cuda":
            size, (most, few) = _tiny(each, size, tp * ep, tp), (TINY_MIXTURE[0] * ep, TINY_MIXTURE[1])
        counts = (experts or most, topk or few) if "grouped" in each else (1, 1)
        default = sizes[each]
        rows, out, features = (given or usual for given, usual in zip(size, default, strict=True))
        for name in payload:
            first = overlap.Problem(each, rows, out, features, tp, name, ep, *counts, chunks, rank, graph)
            for problem in _problems(first, ratio, tokens, gpu):
                cases.append(overlap.case(problem, gpu, decides=bool(tokens)))
    if where.type != "cuda":
        console.print("no GPU: a dry run with copies of the CPU; the times are no measure of speed")
    rows_found = list(timed(console, cases, SUITE, where, SECONDS, json=json, quick=quick, commit=commit))
    console.print(_table(rows_found))
    _show_notes(console, rows_found)
    if trace is not None:
        from ..bench import timeline

        panels = dict[str, list[timeline.Event]]()
        for case, row in zip(cases, rows_found, strict=True):
            panels |= {} if row.fault else timeline.timelines(case, where)
        if panels:
            timeline.draw(panels, trace)
            console.print(f"wrote {trace}")
    return show_wrong(console, rows_found)


def _check_options(
    ops: Sequence[Op],
    sizes: dict[str, int | None],
    mixture: dict[str, int | None],
    ratio: Sequence[float],
    tokens: Sequence[int],
) -> None:
    """Raise for options that do not go together, before torch is imported."""
    for flag, count in (sizes | mixture).items():
        if count is not None:
            arguments.at_least(1, count, flag, "sizes and counts are positive")
    for count in tokens:
        arguments.at_least(1, count, "--tokens", "a case has a row or more")
    for value in ratio:
        if not 0 < value < 100:
            arguments.refuse(f"--ratio {value:g}", "copies take a multiple of the product's time", "pass 0.25 to 2")
    if tokens and sizes["--m"] is not None:
        arguments.refuse("--tokens with --m", "both are the rows", "leave one of them out")
    for each in ops:
        chosen = "--n" if each.startswith("all_gather") else "--k"
        if ratio and sizes[chosen] is not None:
            arguments.refuse(f"--ratio with {chosen}", f"--ratio chooses {chosen} of {each}", "leave one of them out")
        for flag, count in mixture.items():
            if count is not None and "grouped" not in each:
                fix = f"leave {flag} out"
                arguments.refuse(f"{flag} {count} with {each}", "only operations of a mixture have experts", fix)


def _check_trace(trace: Path | None) -> None:
    """Raise for a picture that cannot be drawn."""
    arguments.check_writable(trace, "--trace")
    if trace is not None and trace.suffix not in (".svg", ".png"):
        arguments.refuse(f"--trace {trace}", "the picture is an .svg or a .png", f"pass {trace.with_suffix('.svg')}")
    if trace is not None and importlib.util.find_spec("matplotlib") is None:
        rule, fix = "matplotlib draws it, which is not installed", "pip install matplotlib"
        arguments.refuse(f"--trace {trace}", rule, fix, MissingPackageError)


def _tiny(op: Op, sizes: tuple[int | None, ...], ranks: int, tp: int) -> tuple[int | None, ...]:
    """Sizes of a dry run, where none are given."""
    rows, cut, features = TINY
    usual = (rows * ranks, cut * tp, features) if op.startswith("all_gather") else (rows * ranks, features, cut * tp)
    return tuple(given or size for given, size in zip(sizes, usual, strict=True))


def _problems(first: Problem, ratio: Sequence[float], tokens: Sequence[int], gpu: str) -> Iterator[Problem]:
    """The problem at each number of tokens and each ratio."""
    from dataclasses import replace

    from ..bench.suites.overlap import at_ratio, check, virtual_machine

    for m in tokens or (first.m,):
        problem = replace(first, m=m)
        check(problem)
        machine = virtual_machine(problem.op, gpu)
        yield from (at_ratio(problem, each, machine) for each in ratio) if ratio else (problem,)


def _table(rows: Sequence[Row]) -> Table:
    """A line for each row: microseconds, and figures derived from them."""
    times = {head: name for head, name in _TIMES.items() if any("us" in row.peers.get(name, {}) for row in rows)}
    head = ("T", "±%", *times, *_FIGURES, "model")
    table = arguments.table("µs; attained: least time over T", ("case", *head, "backend"), head, padding=0)
    for row in rows:
        if row.us is None or row.spread_us is None:
            table.add_row(row.case, "[red]WRONG[/]", *["-"] * (len(head) - 1), row.backend)
            continue
        spread = f"{50 * (row.spread_us[1] - row.spread_us[0]) / row.us:.1f}"
        cells = [_number(row.peers.get(name, {}).get("us"), 1) for name in times.values()]
        cells += [_number(row.details.get(name), 3) for name in _FIGURES.values()]
        model = _number(row.details.get("modelled_us"), 1)
        table.add_row(row.case, f"{row.us:.1f}", spread, *cells, model, f"{row.backend}/{row.method}")
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _show_notes(console: Console, rows: Sequence[Row]) -> None:
    """Print notes of contenders, and cases whose chunks have other bits than one product."""
    for row in rows:
        for name, cell in row.peers.items():
            if "note" in cell:
                console.print(f"[dim]{row.case}, {name}: {cell['note']}[/]")
        if unlike := row.details.get("values_unlike_one_launch"):
            console.print(f"[dim]{row.case}: {unlike:,.0f} values of chunks differ from one product[/]")
