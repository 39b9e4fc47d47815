"""`blockscale tune`: precompile the kernels of a model's linear layers, and autotune their FP8 GEMMs on Hopper.

Tuning times candidate plans and stores those that win. `--compile-only` fills Triton's cache on disk, so that the first
step does not wait, and times nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..bench.tuning import Outcome
    from ..diagnostics.precompile import Target
    from ..gemm.heuristics import Plan, Problem
    from ..registry import Request

TUNABLE = ("fp8_1x128@fp8_128x128", "fp8_1x128@fp8_1x128")
TOKENS = (1, 16, 128, 4096, 16384)


def run(
    model: str | None = None,
    /,
    shapes: tuple[str, ...] = (),
    m: tuple[int, ...] = (),
    formats: str = TUNABLE[0],
    device: str | None = None,
    inference: bool = False,
    compile_only: bool = False,
    dry_run: bool = False,
    budget: float | None = None,
    out: Path | None = None,
    workers: int | None = None,
    commit: str | None = None,
) -> int:
    """Time candidate plans for the GEMMs of a model's linear layers, each checked against the exact product, and store
    those that beat the plan of the heuristic by more than 2 % and by more than the spread of the rounds. Later GEMMs on
    such a GPU use them, and explain shows it. Exit status 1 without a Hopper GPU, or if a plan gives a wrong result.

    With --compile-only, compile the kernels of the layers into Triton's cache on disk, for any formats and any GPU: the
    casts of activations and weights, fprop, dgrad, and wgrad into fp32.

    Args:
        model: A model by name, such as llama3-8b.
        shapes: The layers instead of a model, each N,K: out and in features of a weight, separated by spaces or ;
        m: Token counts, separated by spaces or commas; by default 1, 16, 128, 4096 and 16384, with --compile-only one
            for every kernel that up to 16384 tokens need.
        formats: Formats of activations and weights; to tune, fp8_1x128@fp8_128x128 or fp8_1x128@fp8_1x128.
        device: The GPU, such as cuda:0; with --dry-run also an architecture such as sm_90, which need not be present.
        inference: Only the kernels of a forward pass.
        compile_only: Compile the kernels of the layers, and time nothing.
        dry_run: List the plans and their predicted times, or the kernels to compile; needs no GPU.
        budget: Seconds after which no further GEMM is started, compilation not counted.
        out: Store the plans in this file instead of the user's.
        workers: Compile processes; by default one per core, at most 16.
        commit: Commit to record if the source is not a git checkout.
    """
    if budget is not None and not budget > 0:
        arguments.refuse(f"--budget {budget:g}", "it is a time in seconds", "leave it out, or pass more than 0")
    layers, processes = arguments.layers(model, shapes, "tune"), arguments.worker_count(workers)
    tokens, pair = arguments.numbers(m, "--m"), arguments.format_pair(formats)
    if not compile_only and "@".join(pair) not in TUNABLE:
        rule = "only the FP8 GEMM for Hopper has plans to choose from"
        arguments.refuse(f"--formats {formats}", rule, f"--formats {' or '.join(TUNABLE)}, or add --compile-only")
    timing = {"--budget": budget, "--out": out, "--commit": commit}
    for flag in [flag for flag, value in timing.items() if compile_only and value is not None]:
        arguments.refuse(f"{flag} with --compile-only", "nothing is timed or stored then", f"leave {flag} out")
    arguments.check_device(device, is_architecture=True)
    arguments.check_writable(out, "--out")
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..diagnostics import precompile

    target, gpu = _gpu(device)
    if dry_run and gpu is None and device is not None and not device.startswith("sm_"):
        rule = "kernels and plans are listed for the named GPU, or for an H200 without one"
        arguments.refuse(f"--device {device} is no GPU of this machine", rule, "leave it out, or pass --device sm_90")
    problems: list[Problem] = []
    if not compile_only:
        vector = pair[1] == "fp8_1x128"
        problems = _problems(layers, tokens or TOKENS, target.sms, vector=vector, training=not inference)
    obstacle = None if dry_run and not compile_only else precompile.obstacle()
    if gpu is None and not dry_run:
        obstacle = "torch finds no GPU, or another device was named"
    elif not (dry_run or compile_only) and target.capability.sm != 90:
        obstacle = f"{target.name} is {target.capability}"
    if obstacle is not None:
        rule = "kernels are compiled by Triton for the GPU that will run them, and plans are timed on a Hopper (sm_90)"
        done = "compiled" if compile_only else "tuned"
        return arguments.nothing_done(done, obstacle, rule, "run it there, or list what it would do with --dry-run")
    if compile_only:
        with console.status("collecting the kernels ..."):
            requests = precompile.layer_requests(
                layers, target, tokens=tokens or None, formats=pair, training=not inference
            )
        return _precompile(console, requests, target, processes, model or f"{len(layers)} layers", dry_run=dry_run)
    if dry_run:
        return _list_plans(console, problems, target)
    assert gpu is not None
    return _tune(console, problems, target, gpu, processes, budget, out, commit)


def _gpu(device: str | None) -> tuple[Target, torch.device | None]:
    """The GPU to compile for, and its device; None if it is not on this machine (an architecture, else an H200)."""
    import torch

    from ..diagnostics.precompile import Target
    from ..hardware import Capability, capability, gpu_name, named_device, sm_count

    sm = int(device[3:]) if device is not None and device.startswith("sm_") else None
    gpu = named_device(device if device is not None and sm is None else "cuda:0") if torch.cuda.is_available() else None
    if gpu is not None and gpu.type == "cuda" and sm in (None, capability(gpu).sm):
        return Target(capability(gpu), sm_count(gpu), gpu_name(gpu)), gpu
    return Target(Capability("cuda", sm or 90)), None


# ---- kernels to compile ----------------------------------------------------------------------------------------------


def _precompile(
    console: Console, requests: Sequence[Request], target: Target, workers: int, name: str, *, dry_run: bool
) -> int:
    """Compile the kernels of the calls, or list them."""
    from ..diagnostics import precompile

    with console.status("collecting the kernels ..."):
        calls = precompile.needed(requests, target)
    ready = [call for call in calls if call.kernels]
    if dry_run:
        title = f"one call for each kernel; {target.sms} SMs"
        table = arguments.table(title, ("call", "formats", "sizes", "result", "backend", "kernel"))
        for call in ready:
            request = call.request
            dtype = str(request.dtype)[6:] + (" +=" if "accumulate" in request.options else "")
            sizes, names = "x".join(map(str, request.shape)), " @ ".join(request.formats)
            result = dtype if request.op == "gemm" else f"from {dtype}"
            table.add_row(request.op, names, sizes, result, call.backend, ", ".join(call.kernels))
        console.print(table)
        count = sum(len(call.kernels) for call in ready)
        console.print(f"{count} kernels for {name} on {target.capability}; none was compiled")
    else:
        started, compiled, found = time.perf_counter(), 0, 0
        with arguments.progress(console, len(ready), "starting processes") as advance:
            for done in precompile.compile_all([call.request for call in ready], target, workers):
                compiled, found = compiled + done.kernels - done.found, found + done.found
                advance(f"{done.request.op} {'x'.join(map(str, done.request.shape))}, {done.seconds:.1f} s")
        console.print(
            f"{compiled + found} kernels for {name} on {target.capability}: {compiled} compiled, {found} were cached; "
            f"{time.perf_counter() - started:.1f} s with {min(workers, len(ready))} processes"
        )
        console.print(f"stored in {precompile.cache_folder()}", soft_wrap=True)
    rest = [call for call in calls if not call.kernels]
    for text in dict.fromkeys(
        f"{call.request.op} {' @ '.join(call.request.formats)} by {call.backend}" for call in rest
    ):
        console.print(f"[dim]{text}: nothing to precompile[/]")
    return 0


# ---- plans to time ---------------------------------------------------------------------------------------------------


def _problems(
    layers: Sequence[arguments.Layer], tokens: Sequence[int], sms: int, *, vector: bool, training: bool
) -> list[Problem]:
    """GEMMs to tune; raises if there are none."""
    from ..bench import tuning

    found = tuning.problems_of(layers, tokens, sms, vector=vector, training=training)
    if not found:
        rule = "plans are tuned for outputs with 16-byte aligned rows: N a multiple of 8, in fp32 of 4"
        given = f"--shapes {' '.join(f'{n},{k}' for n, k in layers)}"
        arguments.refuse(given, rule, "pass other sizes: for these the heuristic chooses")
    return found


def _tune(
    console: Console, problems: Sequence[Problem], target: Target, gpu: torch.device, workers: int,
    budget: float | None, out: Path | None, commit: str | None,
) -> int:  # fmt: skip
    """Compile, time, store the winners and print the outcomes; returns the exit status."""
    from .. import __version__
    from ..bench import tuning
    from ..bench.store import where
    from ..gemm import tuned

    path = out or tuned.own_file(target.name, target.sms)
    _compile_plans(console, problems, target, workers)
    facts = where(gpu, __version__, commit)
    outcomes: list[Outcome] = []
    for outcome in _timed(console, problems, gpu, budget):
        if (entry := tuning.entry_of(outcome, facts)) is not None:
            tuned.store(path, [entry])  # at once, so that an interrupted run keeps its results
        outcomes.append(outcome)
    console.print(_table(outcomes))
    won = sum(outcome.taken not in (None, outcome.model) for outcome in outcomes)
    console.print(f"{won} of {len(outcomes)} GEMMs have a plan that beats the heuristic")
    if won:
        console.print(f"stored in {path}", soft_wrap=True)
    if len(outcomes) < len(problems):
        console.print(f"{len(problems) - len(outcomes)} were not started within the budget")
    wrong = [(outcome.problem, *fault) for outcome in outcomes for fault in outcome.faults.items()]
    for problem, plan, fault in wrong:
        console.print(f"[red]WRONG[/] {tuning.problem_text(problem)} by {tuning.plan_text(plan)}: {fault}")
    return 1 if wrong else 0


def _compile_plans(console: Console, problems: Sequence[Problem], target: Target, workers: int) -> None:
    """Compile every kernel that a plan needs, once each, in parallel processes: serially it would dominate."""
    from ..bench import tuning
    from ..diagnostics import precompile
    from ..gemm._hopper import specialization_of

    kernels: dict[object, tuple[Problem, Plan]] = {}
    for problem in problems:
        options = (specialization_of(problem.n), problem.b_1x128, problem.fp32_out, problem.accumulate)
        for plan, _ in tuning.plans_for(problem):
            kernels.setdefault((plan.tile, plan.stream_k, options), (problem, plan))
    requests = [precompile.product_request(problem, target) for problem, _ in kernels.values()]
    plans = [plan for _, plan in kernels.values()]
    with arguments.progress(console, len(plans), "starting compile processes") as advance:
        for done in precompile.compile_all(requests, target, workers, plans):
            advance(f"compiling, the last in {done.seconds:.1f} s")


def _timed(console: Console, problems: Sequence[Problem], gpu: torch.device, budget: float | None) -> Iterator[Outcome]:
    """Yield outcomes as they are measured, with a progress bar that names the current GEMM."""
    from ..bench import tuning

    texts = [tuning.problem_text(problem) for problem in problems]
    measure = functools.partial(tuning.measure_plans, device=gpu)
    with arguments.progress(console, len(problems), texts[0]) as advance:
        for number, outcome in enumerate(tuning.tune(problems, measure, seconds=budget), 1):
            yield outcome
            advance(texts[number] if number < len(texts) else "")


def _table(outcomes: Sequence[Outcome]) -> Table:
    from ..bench.tuning import plan_text, problem_text

    headings = ("GEMM", "heuristic", "µs", "best", "µs", "±%", "gain", "")
    table = arguments.table("µs per GEMM", headings, right=("µs", "±%", "gain"))
    for outcome in outcomes:
        model_time, best = outcome.times.get(outcome.model), outcome.best
        us = f"{model_time.us:.1f}" if model_time else "[red]WRONG[/]"
        cells = [problem_text(outcome.problem), plan_text(outcome.model), us]
        if best is not None and model_time is not None:
            best_time = outcome.times[best]
            spread = 50 * (best_time.high - best_time.low) / best_time.us
            gain = 100 * (1 - best_time.us / model_time.us)
            kept = "kept" if outcome.taken not in (None, outcome.model) else ""
            cells += [plan_text(best), f"{best_time.us:.1f}", f"{spread:.1f}", f"{gain:.1f} %", kept]
        table.add_row(*cells)
    return table


def _list_plans(console: Console, problems: Sequence[Problem], target: Target) -> int:
    """Print the plans of each GEMM with their predicted times."""
    from ..bench.tuning import plan_text, plans_for, problem_text
    from ..gemm import heuristics

    right = ("predicted µs", "stages", "CTAs", "waves")
    table = arguments.table(f"plans that would be timed; {target.sms} SMs", ("GEMM", "", "plan", *right), right)
    count = 0
    for problem in problems:
        chosen, name = heuristics.choose(problem)[0], problem_text(problem)
        for plan, us in plans_for(problem):
            mark, style = ("->", "bold green") if plan == chosen else ("", None)
            sizes = (plan.tile.stages, plan.ctas, plan.waves)
            table.add_row(name, mark, plan_text(plan), f"{us:.1f}", *map(str, sizes), style=style)
            name, count = "", count + 1
    console.print(table)
    console.print(f"{count} plans of {len(problems)} GEMMs; -> is the choice of the heuristic; none was timed")
    return 0
