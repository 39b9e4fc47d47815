"""`blockscale warmup`: precompile the kernels of a model's linear layers, so that the first step does not wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import arguments

if TYPE_CHECKING:
    from rich.console import Console

    from ..diagnostics.precompile import Needed, Target


def run(
    model: str | None = None,
    /,
    shapes: tuple[str, ...] = (),
    m: tuple[int, ...] = (),
    formats: str = "fp8_1x128@fp8_128x128",
    device: str | None = None,
    inference: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
) -> int:
    """Compile the kernels of a model's linear layers into Triton's cache on disk: the casts of activations and weights,
    fprop, dgrad, and wgrad into fp32. Exit status 1 without a GPU to compile for.

    Args:
        model: A model by name, such as llama3-8b.
        shapes: The layers instead of a model, each N,K: out and in features of a weight, separated by spaces or ;
        m: Token counts, separated by spaces or commas; by default one for every kernel that up to 16384 tokens need.
        formats: Formats of activations and weights.
        device: The GPU, such as cuda:0; with --dry-run also an architecture such as sm_90, which need not be present.
        inference: Only the kernels of a forward pass.
        dry_run: List the kernels and compile none.
        workers: Compile processes; by default one per core, at most 16.
    """
    layers, pair = arguments.layers(model, shapes, "warmup"), arguments.format_pair(formats)
    tokens = arguments.numbers(m, "--m") if m else None
    processes = arguments.worker_count(workers)
    arguments.check_device(device, is_architecture=True)
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..diagnostics import precompile

    obstacle = precompile.obstacle()
    if obstacle is not None:
        rule, fix = "kernels are compiled by Triton", "install triton, and unset TRITON_INTERPRET"
        return arguments.nothing_done("compiled", obstacle, rule, fix)
    target = _target(device, dry_run=dry_run)
    if target is None:
        what = "torch finds no GPU" if device is None else f"device {device!r} is no GPU of this machine"
        rule = "kernels are compiled for the GPU, driver and ptxas of the machine that will run them"
        fix = "pass --device sm_90" if dry_run else "run it there, or list the kernels with --dry-run"
        return arguments.nothing_done("compiled", what, rule, fix)
    with console.status("collecting the kernels ..."):
        requests = precompile.layer_requests(layers, target, tokens=tokens, formats=pair, training=not inference)
        calls = precompile.needed(requests, target)
    ready = [call for call in calls if call.kernels]
    name = model or f"{len(layers)} layers"
    if dry_run:
        _list(console, ready, target)
        console.print(f"{_count(ready)} kernels for {name} on {target.capability}; none was compiled")
    else:
        _compile(console, ready, target, processes, name)
    for text in dict.fromkeys(_text(call) for call in calls if not call.kernels):
        console.print(f"[dim]{text}: nothing to precompile[/]")
    return 0


def _compile(console: Console, calls: Sequence[Needed], target: Target, workers: int, name: str) -> None:
    from ..diagnostics import precompile

    started, compiled, found = time.perf_counter(), 0, 0
    with arguments.progress(console, len(calls), "starting processes") as advance:
        for done in precompile.compile_all([call.request for call in calls], target, workers):
            compiled, found = compiled + done.kernels - done.found, found + done.found
            advance(f"{done.request.op} {'x'.join(map(str, done.request.shape))}, {done.seconds:.1f} s")
    seconds = time.perf_counter() - started
    console.print(
        f"{compiled + found} kernels for {name} on {target.capability}: {compiled} compiled, {found} were cached; "
        f"{seconds:.1f} s with {min(workers, len(calls))} processes"
    )
    console.print(f"stored in {precompile.cache_folder()}", soft_wrap=True)


def _list(console: Console, calls: Sequence[Needed], target: Target) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"one call for each kernel; {target.sms} SMs"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("call", "formats", "sizes", "result", "backend", "kernel"):
        table.add_column(heading, no_wrap=True)
    for call in calls:
        request = call.request
        dtype = str(request.dtype)[6:] + (" +=" if "accumulate" in request.options else "")
        sizes, names = "x".join(map(str, request.shape)), " @ ".join(request.formats)
        result = dtype if request.op == "gemm" else f"from {dtype}"
        table.add_row(request.op, names, sizes, result, call.backend, ", ".join(call.kernels))
    console.print(table)


def _count(calls: Sequence[Needed]) -> int:
    return sum(len(call.kernels) for call in calls)


def _text(call: Needed) -> str:
    return f"{call.request.op} {' @ '.join(call.request.formats)} by {call.backend}"


def _target(device: str | None, *, dry_run: bool) -> Target | None:
    """The GPU to compile for, or None without one."""
    import torch

    from ..diagnostics.precompile import Target
    from ..hardware import Capability, capability, gpu_name, named_device, sm_count

    here = None
    if torch.cuda.is_available():
        named = device is not None and not device.startswith("sm_")
        gpu = named_device(device if named and device is not None else "cuda")
        known = (capability(gpu), sm_count(gpu), gpu_name(gpu))
        here = Target(*known) if gpu.type == "cuda" else None
    if device is None or not device.startswith("sm_"):
        return here or (Target(Capability("cuda", 90)) if dry_run and device is None else None)
    wanted = Capability("cuda", int(device[3:]))
    if here is not None and here.capability == wanted:
        return here
    return Target(wanted) if dry_run else None
