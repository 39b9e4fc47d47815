"""Which kernels a model's linear layers need, and their compilation before the first step.

A call is described by its `Request`; the registry selects its kernel. Kernels with a `precompile_key` are launched with
meta tensors: the compiler needs only sizes and dtypes. So no GPU is needed, several processes compile in parallel, and
later launches of the same call find the kernels in Triton's disk cache. Listing the kernels takes seconds, since Triton
computes a kernel's key before it compiles it.

Triton is imported lazily: without it nothing is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..casts import quantize
from ..casts.checks import resolve_cast
from ..casts.ops import allocate, allocate_both, cast_request
from ..formats.spec import FORMATS, get_format
from ..gemm.heuristics import Plan, Problem
from ..gemm.ops import gemm_request
from ..hardware import DEFAULT_SM_COUNT, Capability, compiling_for
from ..registry import Kernel, Request, kernels, select

Layer = tuple[int, int]  # (N, K) of a weight

# One token count for each case that the casts specialise on: one row; rows, and groups of four scales, that are
# multiples of 16 or not; whole and partial tiles. A test compares them with all counts up to 1024 and some above.
CAST_TOKENS = (1, 2, 15, 16, 64, 127, 128, 256, 500, 1000)
# A product's plan depends on tiles, whose rows are multiples of 64, and on whether there are more than 16 rows, or 32.
# Some products of 128 rows are served by the vendor's kernel, which does not take 127.
MOST_TOKENS = 16384
EVERY_TOKENS = (16, 32, 64, 127, *range(192, MOST_TOKENS + 1, 64))


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are compiled for.  name: the driver's name, by which tuned plans are found."""

    capability: Capability
    sms: int = DEFAULT_SM_COUNT
    name: str = ""

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Context in which meta tensors stand for tensors on this GPU."""
        return compiling_for(self.capability, self.sms, self.name)


@dataclass(frozen=True)
class Needed:
    """A call, its backend, and the names of the kernels to compile for it; none if its kernel cannot be precompiled or
    needs no compilation."""

    request: Request
    backend: str
    kernels: tuple[str, ...]


def layer_requests(
    layers: Sequence[Layer],
    target: Target,
    *,
    tokens: Sequence[int] | None = None,
    formats: tuple[str, str] = ("fp8_1x128", "fp8_128x128"),
    dtype: torch.dtype = torch.bfloat16,
    training: bool = True,
) -> list[Request]:
    """Requests of linear layers: casts of activations and weights, fprop; with training also casts to both operands,
    dgrad, and wgrad accumulated into an fp32 buffer.

    tokens: rows of the activations; by default one count for every plan up to 16384 rows.
    """
    a, b = formats
    widths = dict.fromkeys(width for layer in layers for width in layer)
    found: dict[Request, None] = {}

    def add(op: str, names: tuple[str, ...], shape: tuple[int, ...], out: torch.dtype, *options: str) -> None:
        found[_request(op, target, names, shape, out, *options)] = None

    for width in widths:
        for m in tokens or CAST_TOKENS:
            add("cast", (a,), (m, width), dtype)
            if training:
                add("cast_both", (a, a), (m, width), dtype)
    for n, k in layers:
        add("cast", (b,), (n, k), dtype)
        if training:
            add("cast_both", (b, b), (n, k), dtype)
        for m in tokens or EVERY_TOKENS:
            add("gemm", (a, b), (m, n, k), dtype)
            if training:
                add("gemm", (a, b), (m, k, n), dtype)
                add("gemm", (a, a), (n, k, m), torch.float32, "accumulate")
    return list(found)


def _request(
    op: str, target: Target, names: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype, *options: str
) -> Request:
    """A request of operands in the default layouts of their formats."""
    layouts = tuple(FORMATS[name].default_layout for name in names)
    return Request(op, target.capability, names, shape, dtype, layouts, frozenset(options))


def obstacle() -> str | None:
    """Why this process cannot precompile kernels, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from ..casts._triton import INTERPRETED

    return "TRITON_INTERPRET is set, so kernels are interpreted" if INTERPRETED else None


def needed(requests: Iterable[Request], target: Target) -> list[Needed]:
    """One call for each kernel to compile, and one for each kernel that cannot be precompiled."""
    calls: list[Needed] = []
    with target.compiling(), _compiler(target) as keys_of:
        kinds: set[Hashable] = set()
        named: set[tuple[str, str]] = set()
        for request in requests:
            kernel = select(request)
            key = None if kernel.precompile_key is None else kernel.precompile_key(request)
            kind = (kernel.op, kernel.backend, kernel.summary, key)
            if kind in kinds:
                continue
            kinds.add(kind)
            fresh = set[tuple[str, str]]() if kernel.precompile_key is None else keys_of(request, kernel) - named
            if fresh or kernel.precompile_key is None:
                calls.append(Needed(request, kernel.backend, tuple(sorted(name for name, _ in fresh))))
            named |= fresh
    return calls


@dataclass(frozen=True)
class Compiled:
    """Compilation of one call.  kernels: compiled or found.  found: those in the disk cache already."""

    request: Request
    seconds: float
    kernels: int
    found: int


def compile_call(request: Request, target: Target, plan: Plan | None = None) -> Compiled:
    """Compile the kernels of one call, or find them on disk.  plan: for Hopper's product, instead of the best."""
    from triton import knobs

    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    started = time.perf_counter()
    with target.compiling(), _stub_driver(target), knobs.compilation.scope():
        knobs.compilation.listener = listen
        _launch(request, select(request) if plan is None else _with_plan(plan))
    return Compiled(request, time.perf_counter() - started, len(hits), sum(hits))


def compile_all(
    requests: Sequence[Request], target: Target, workers: int, plans: Sequence[Plan | None] | None = None
) -> Iterator[Compiled]:
    """Compile calls in `workers` processes; yields each call as it is done. A process imports torch first: seconds.

    plans: one per request, see `compile_call`.
    """
    calls = list(zip(requests, plans or [None] * len(requests), strict=True))
    if workers < 2 or len(calls) < 2:
        for request, plan in calls:
            yield compile_call(request, target, plan)
        return
    # products take longest, so they come first
    longest_first = sorted(calls, key=lambda call: call[0].op != "gemm")
    # not forked: a fork would break torch's threads and a CUDA context
    with ProcessPoolExecutor(min(workers, len(requests)), mp_context=get_context("spawn")) as pool:
        submitted = [pool.submit(compile_call, request, target, plan) for request, plan in longest_first]
        for done in as_completed(submitted):
            yield done.result()


def product_request(problem: Problem, target: Target) -> Request:
    """The request of a problem of Hopper's FP8 product."""
    formats = ("fp8_1x128", "fp8_1x128" if problem.b_1x128 else "fp8_128x128")
    dtype = torch.float32 if problem.fp32_out else torch.bfloat16
    options = ["accumulate"] if problem.accumulate else []
    return _request("gemm", target, formats, (problem.m, problem.n, problem.k), dtype, *options)


def cache_folder() -> str:
    """Triton's cache folder."""
    from triton import knobs

    return str(knobs.cache.dir)


def _with_plan(plan: Plan) -> Kernel:
    """Hopper's kernel with a fixed plan."""
    from ..gemm import _hopper

    entry = next(entry for entry in kernels("gemm") if entry.launch is _hopper.scaled_mm)
    return replace(entry, launch=functools.partial(_hopper.launch, plan=plan))


def _launch(request: Request, kernel: Kernel) -> None:
    """Launch a call with meta tensors, which compiles its kernels."""

    def empty(*shape: int, dtype: torch.dtype = request.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if request.op == "gemm":
        m, n, k = request.shape
        a, b = (
            quantize(empty(rows, k), name).with_layout(kernel.layouts.get(name, get_format(name).default_layout))
            for rows, name in zip((m, n), request.formats, strict=True)
        )
        accumulate = "accumulate" in request.options
        assert gemm_request(a, b, request.dtype, bias=False, accumulate=accumulate).options == request.options
        kernel.launch(a, b, empty(m, n), bias=None, accumulate=accumulate)
        return
    x = empty(*request.shape)
    casts = tuple(resolve_cast(x, name, None) for name in request.formats)
    assert cast_request(request.op, x, tuple(cast.plan for cast in casts)) == request
    if request.op == "cast":
        kernel.launch(x, casts[0], -1, allocate(x, casts[0], -1, None), None)
    else:
        out = allocate_both(x, casts[0], casts[1], None)
        kernel.launch(x, casts, (out[0:3], out[3:6]), None, None)


@contextlib.contextmanager
def _stub_driver(target: Target) -> Generator[None]:
    """Context in which Triton compiles for that GPU without a driver, so processes need no CUDA context.

    The stub has what compilation needs of a driver. Its device number is negative: Triton caches kernels by device
    number, and no real device has it.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    before: Any = driver._active  # pyright: ignore[reportPrivateUsage]  # `active` would look for a GPU
    sm = target.capability.sm
    stub: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", sm, 32),
        get_current_device=lambda: -sm,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(stub)
    try:
        yield
    finally:
        driver.set_active(before)


@contextlib.contextmanager
def _compiler(target: Target) -> Generator[Callable[[Request, Kernel], set[tuple[str, str]]]]:
    """Context with a function that returns names and keys of a call's kernels, and compiles none."""
    from triton import knobs

    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: object) -> bool:
        seen.add((fn.name, key))
        return True  # do not compile it

    def keys_of(request: Request, kernel: Kernel) -> set[tuple[str, str]]:
        seen.clear()
        _launch(request, kernel)
        return set(seen)

    with _stub_driver(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        yield keys_of
