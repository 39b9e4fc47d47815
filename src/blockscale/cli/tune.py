"""`blockscale tune`: autotune the Hopper FP8 GEMM for the layers of a model, and store the plans that win."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..bench.store import Where
    from ..bench.tuning import Outcome
    from ..diagnostics.precompile import Target
    from ..gemm.heuristics import Plan, Problem

TUNABLE = ("fp8_1x128@fp8_128x128", "fp8_1x128@fp8_1x128")


def run(
    model: str | None = None,
    /,
    shapes: tuple[str, ...] = (),
    m: tuple[int, ...] = (1, 16, 128, 4096, 16384),
    formats: str = TUNABLE[0],
    device: str | None = None,
    inference: bool = False,
    dry_run: bool = False,
    budget: float | None = None,
    out: Path | None = None,
    json: Path | None = None,
    workers: int | None = None,
    commit: str | None = None,
) -> int:
    """Time candidate plans for the GEMMs of a model's linear layers, each checked against the exact product, and store
    those that beat the plan of the heuristic by more than 2 % and by more than the spread of the rounds. Later GEMMs on
    such a GPU use them, and explain shows it. Exit status 1 without a Hopper GPU, or if a plan gives a wrong result.

    Args:
        model: A model by name, such as llama3-8b.
        shapes: The layers instead of a model, each N,K: out and in features of a weight, separated by spaces or ;
        m: Token counts, separated by spaces or commas.
        formats: Formats of activations and weights: fp8_1x128@fp8_128x128 or fp8_1x128@fp8_1x128.
        device: The GPU, such as cuda:0.
        inference: Only the GEMMs of a forward pass.
        dry_run: List the plans and their predicted times; needs no GPU.
        budget: Seconds after which no further GEMM is started, compilation not counted.
        out: Store the plans in this file instead of the user's.
        json: Append every measured time to this file, as JSON lines.
        workers: Compile processes; by default one per core, at most 16.
        commit: Commit to record if the source is not a git checkout.
    """
    if budget is not None and not budget > 0:
        arguments.refuse(f"--budget {budget:g}", "it is a time in seconds", "leave it out, or pass more than 0")
    layers, processes = arguments.layers(model, shapes, "tune"), arguments.worker_count(workers)
    tokens, vector = arguments.numbers(m, "--m"), _has_1x128_weights(formats)
    arguments.check_device(device)
    arguments.check_writable(out, "--out")
    arguments.check_writable(json, "--json")
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from .. import __version__
        from ..bench.store import where
        from ..gemm import tuned

    target, gpu = _gpu(device)
    problems = _problems(layers, tokens, target.sms, vector=vector, training=not inference)
    if dry_run:
        if device is not None and gpu is None:
            rule = "plans are listed for the named GPU, or for an H200 without one"
            arguments.refuse(f"--device {device} is no GPU of this machine", rule, "leave --device out")
        return _list(console, problems, target)
    obstacle = _obstacle(target, gpu)
    if gpu is None or obstacle is not None:
        rule = "plans are compiled by Triton and timed on the Hopper GPU (sm_90) that will run them"
        return arguments.nothing_done("tuned", str(obstacle), rule, "run it there, or list the plans with --dry-run")
    path = out or tuned.own_file(target.name, target.sms)
    _compile(console, problems, target, processes)
    facts = where(gpu, __version__, commit)
    outcomes: list[Outcome] = []
    for outcome in _timed(console, problems, gpu, budget):
        _keep(outcome, facts, path, json)  # at once, so that an interrupted run keeps its results
        outcomes.append(outcome)
    return _report(console, outcomes, len(problems), path)


def _has_1x128_weights(formats: str) -> bool:
    """Whether weights have 1x128 blocks too; raises for formats without plans."""
    pair = arguments.format_pair(formats)
    if "@".join(pair) not in TUNABLE:
        rule = "only the FP8 GEMM for Hopper has plans to choose from"
        arguments.refuse(f"--formats {formats}", rule, f"--formats {' or '.join(TUNABLE)}")
    return pair[1] == "fp8_1x128"


def _problems(
    layers: Sequence[arguments.Layer], tokens: Sequence[int], sms: int, *, vector: bool, training: bool
) -> list[Problem]:
    """GEMMs to tune; raises if there are none."""
    from ..bench import tuning

    found = tuning.problems_of(layers, tokens, sms, vector=vector, training=training)
    if not found:
        rule = "plans are tuned for outputs with 16-byte aligned rows: N a multiple of 8, in fp32 of 4"
        arguments.refuse(
            f"--shapes {' '.join(f'{n},{k}' for n, k in layers)}",
            rule,
            "pass other sizes: for these the heuristic chooses",
        )
    return found


def _gpu(device: str | None) -> tuple[Target, torch.device | None]:
    """Target and GPU to tune on; without a GPU, an H200 for --dry-run, and None."""
    import torch

    from ..diagnostics.precompile import Target
    from ..hardware import Capability, capability, gpu_name, named_device, sm_count

    gpu = named_device(device or "cuda:0") if torch.cuda.is_available() else None
    if gpu is None or gpu.type != "cuda":
        return Target(Capability("cuda", 90)), None
    return Target(capability(gpu), sm_count(gpu), gpu_name(gpu)), gpu


def _obstacle(target: Target, gpu: torch.device | None) -> str | None:
    """Reason why nothing can be tuned on this machine, or None."""
    from ..diagnostics import precompile

    if gpu is None:
        return "torch finds no GPU, or another device was named"
    if target.capability.sm != 90:
        return f"{target.name} is {target.capability}"
    return precompile.obstacle()


def _compile(console: Console, problems: Sequence[Problem], target: Target, workers: int) -> None:
    """Compile every kernel that a plan needs, once each, in parallel processes: serially it would dominate."""
    from ..bench import tuning
    from ..diagnostics import precompile
    from ..gemm._hopper_launch import specialization_of

    kernels: dict[object, tuple[Problem, Plan]] = {}
    for problem in problems:
        for plan, _ in tuning.plans_for(problem):
            kernel = (
                plan.tile,
                plan.stream_k,
                specialization_of(problem.n),
                problem.b_1x128,
                problem.fp32_out,
                problem.accumulate,
            )
            kernels.setdefault(kernel, (problem, plan))
    requests = [precompile.product_request(problem, target) for problem, _ in kernels.values()]
    plans = [plan for _, plan in kernels.values()]
    with arguments.progress(console, len(plans), "starting compile processes") as advance:
        for done in precompile.compile_all(requests, target, workers, plans):
            advance(f"compiling, the last in {done.seconds:.1f} s")


def _timed(console: Console, problems: Sequence[Problem], gpu: torch.device, budget: float | None) -> Iterator[Outcome]:
    """Yield outcomes as they are measured, with a progress bar that names the current GEMM."""
    from ..bench import candidates, tuning

    texts = [tuning.problem_text(problem) for problem in problems]
    measure = functools.partial(candidates.measure_plans, device=gpu)
    with arguments.progress(console, len(problems), texts[0]) as advance:
        for number, outcome in enumerate(tuning.tune(problems, measure, seconds=budget), 1):
            yield outcome
            advance(texts[number] if number < len(texts) else "")


def _keep(outcome: Outcome, facts: Where, path: Path, record: Path | None) -> None:
    from ..bench import tuning
    from ..gemm import tuned

    entry = tuning.entry_of(outcome, facts)
    if entry is not None:
        tuned.store(path, [entry])
    if record is not None:
        tuning.append_record(record, outcome, facts)


def _report(console: Console, outcomes: Sequence[Outcome], total: int, path: Path) -> int:
    """Print the outcomes; returns the exit status."""
    from ..bench.tuning import plan_text, problem_text

    console.print(_table(outcomes))
    won = sum(outcome.taken not in (None, outcome.model) for outcome in outcomes)
    console.print(f"{won} of {len(outcomes)} GEMMs have a plan that beats the heuristic")
    if won:
        console.print(f"stored in {path}", soft_wrap=True)
    if len(outcomes) < total:
        console.print(f"{total - len(outcomes)} were not started within the budget")
    wrong = [(outcome.problem, *fault) for outcome in outcomes for fault in outcome.faults.items()]
    for problem, plan, fault in wrong:
        console.print(f"[red]WRONG[/] {problem_text(problem)} by {plan_text(plan)}: {fault}")
    return 1 if wrong else 0


def _table(outcomes: Sequence[Outcome]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..bench.tuning import plan_text, problem_text

    table = Table(title="µs per GEMM", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("GEMM", "heuristic", "µs", "best", "µs", "±%", "gain", ""):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("µs", "±%", "gain") else "left")
    for outcome in outcomes:
        model_time, best = outcome.times.get(outcome.model), outcome.best
        cells = [
            problem_text(outcome.problem),
            plan_text(outcome.model),
            f"{model_time.us:.1f}" if model_time else "[red]WRONG[/]",
        ]
        if best is not None and model_time is not None:
            best_time = outcome.times[best]
            spread = 50 * (best_time.high - best_time.low) / best_time.us
            gain = 100 * (1 - best_time.us / model_time.us)
            kept = "kept" if outcome.taken not in (None, outcome.model) else ""
            cells += [plan_text(best), f"{best_time.us:.1f}", f"{spread:.1f}", f"{gain:.1f} %", kept]
        table.add_row(*cells)
    return table


def _list(console: Console, problems: Sequence[Problem], target: Target) -> int:
    """Print the plans of each GEMM with their predicted times."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..bench.tuning import plan_text, plans_for, problem_text
    from ..gemm import heuristics

    title = f"plans that would be timed; {target.sms} SMs"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("GEMM", "", "plan", "predicted µs", "stages", "CTAs", "waves"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("GEMM", "", "plan") else "right")
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
