"""`blockscale warmup`: compile ahead what a model's linear layers need, so that its first step does not wait."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from ..diagnostics.ahead import Layer, Needed, Target

# each holds a torch of its own, some 500 MB
MOST_WORKERS = 16
# of lists that go to a file or a pipe, where nobody can widen the window
FILE_WIDTH = 120


def run(
    model: str | None = None,
    /,
    shapes: str | None = None,
    m: str | None = None,
    formats: str = "fp8_1x128@fp8_128x128",
    device: str | None = None,
    inference: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
) -> int:
    """Compile the kernels of a model's linear layers into Triton's cache on disk: the casts of activations and weights,
    fprop, dgrad, and wgrad into fp32. Exit status 1 where there is no GPU to compile for.

    Args:
        model: A model by name, such as llama3-8b.
        shapes: The layers instead of a model: "N,K;N,K", out and in features of each weight.
        m: Token counts, separated by commas; by default one for every kernel that up to 16384 tokens can need.
        formats: Of activations and weights.
        device: The GPU, such as cuda:0; with --dry-run also an architecture such as sm_90 that need not be here.
        inference: Only what a forward pass needs.
        dry_run: List the kernels and compile none.
        workers: Processes that compile; by default one for each core, at most 16.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    with console.status("importing torch ..."):
        from ..diagnostics import ahead

    layers, pair, tokens = _layers(model, shapes), _pair(formats), _tokens(m)
    if workers is not None and workers < 1:
        _refuse(f"workers={workers}", "at least one process compiles", "leave it out, or pass 1 or more")
    against = ahead.obstacle()
    if against is not None:
        return _nothing(against, "kernels are compiled by Triton", "install triton, and unset TRITON_INTERPRET")
    target = _target(device, dry_run=dry_run)
    if target is None:
        what = "torch sees no GPU here" if device is None else f"device {device!r} is no GPU of this machine"
        rule = "kernels are compiled for the GPU, driver and assembler of the machine that will run them"
        return _nothing(what, rule, "run it there, or list what it would compile with --dry-run")
    with console.status("looking for what is needed ..."):
        requests = ahead.layer_requests(layers, target, tokens=tokens, formats=pair, training=not inference)
        calls = ahead.needed(requests, target)
    ready = [call for call in calls if call.kernels]
    name = model or f"{len(layers)} layers"
    if dry_run:
        _list(console, ready, target)
        console.print(f"{_count(ready)} kernels for {name} on {target.capability}; none was compiled")
    else:
        _compile(console, ready, target, workers or min(_cores(), MOST_WORKERS), name)
    for text in dict.fromkeys(_text(call) for call in calls if not call.kernels):
        console.print(f"[dim]{text}: nothing to compile ahead[/]")
    return 0


def _compile(console: Console, calls: Sequence[Needed], target: Target, workers: int, name: str) -> None:
    from ..diagnostics import ahead

    started, made, found = time.perf_counter(), 0, 0
    with _progress(console, len(calls)) as advance:
        for done in ahead.compile_all([call.request for call in calls], target, workers):
            made, found = made + done.kernels - done.found, found + done.found
            advance(f"{done.request.op} {'x'.join(map(str, done.request.shape))}, {done.seconds:.1f} s")
    seconds = time.perf_counter() - started
    console.print(
        f"{made + found} kernels for {name} on {target.capability}: {made} compiled, {found} were there; "
        f"{seconds:.1f} s with {min(workers, len(calls))} processes"
    )
    console.print(f"they are in {ahead.cache_folder()}", soft_wrap=True)


@contextmanager
def _progress(console: Console, total: int) -> Generator[Callable[[str], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting processes", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def _list(console: Console, calls: Sequence[Needed], target: Target) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"one call for each kernel; {target.multiprocessors} multiprocessors"
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


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _layers(model: str | None, shapes: str | None) -> list[Layer]:
    """(N, K) of every weight."""
    from ..bench.shapes import MODELS, model_name

    if (model is None) == (shapes is None):
        given = "neither a model nor shapes" if model is None else f"model {model!r} and shapes {shapes!r}"
        _refuse(given, "one of them names the layers", "blockscale warmup llama3-8b, or --shapes '4096,14336'")
    if model is not None:
        return [(n, k) for k, n in MODELS[model_name(model)]]
    assert shapes is not None
    pairs = [_numbers(part, "shapes") for part in shapes.split(";") if part.strip()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        _refuse(f"shapes={shapes!r}", "each weight is N,K", "separate weights by semicolons: --shapes '4096,14336'")
    return [(n, k) for n, k in pairs]


def _numbers(text: str, what: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        _refuse(f"{what}={text!r}", "sizes are positive integers", "separate them by commas, such as 1,16,128")
    return [int(word) for word in words]


def _tokens(m: str | None) -> list[int] | None:
    return None if m is None else _numbers(m, "m")


def _pair(formats: str) -> tuple[str, str]:
    from ..formats.spec import check_pair, get_format

    names = [name.strip() for name in formats.split("@")]
    if len(names) != 2:
        _refuse(f"formats={formats!r}", "activations and weights have a format each", "write fp8_1x128@fp8_128x128")
    a, b = names
    for name in names:
        get_format(name)
    check_pair(a, b)
    return a, b


def _target(device: str | None, *, dry_run: bool) -> Target | None:
    """The GPU to compile for, or None where there is none."""
    import torch

    from ..diagnostics.ahead import Target
    from ..hardware import Capability, capability, multiprocessors, named_device

    here = None
    if torch.cuda.is_available():
        named = device is not None and not device.startswith("sm_")
        place = named_device(device if named and device is not None else "cuda")
        here = Target(capability(place), multiprocessors(place)) if place.type == "cuda" else None
    if device is None or not device.startswith("sm_"):
        return here or (Target(Capability("cuda", 90)) if dry_run and device is None else None)
    if not device[3:].isdecimal():
        _refuse(f"device={device!r}", "an architecture is sm_ and a number", "write sm_90, for instance")
    wanted = Capability("cuda", int(device[3:]))
    if here is not None and here.capability == wanted:
        return here
    return Target(wanted) if dry_run else None


def _nothing(what: str, rule: str, fix: str) -> int:
    """Say why nothing was compiled."""
    from ..errors import message

    print(f"blockscale: nothing was compiled: {message(what, rule=rule, fix=fix)}", file=sys.stderr)
    return 1


def _refuse(what: str, rule: str, fix: str) -> NoReturn:
    from ..errors import OptionError, message

    raise OptionError(message(what, rule=rule, fix=fix))
