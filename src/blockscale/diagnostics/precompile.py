"""Which kernels a model's linear layers need, and their compilation before the first step: `blockscale warmup`.

A call is described by its `Request`, the kernel that serves it by the registry. Kernels with a `precompile_key` are
launched with operands that have no memory: the compiler asks for sizes and types alone. So no GPU is touched, processes
compile side by side, and what they make is found on disk by whoever runs the same call. Listing what is needed takes
seconds, since Triton names a kernel (its key) before it compiles it.

Triton is imported late: where there is none, nothing is compiled.
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
from typing import Any

import torch
from torch import Tensor

from ..casts import plan_cast, quantize
from ..casts.ops import allocate, allocate_both, cast_request
from ..formats.cast_spec import as_cast_spec
from ..formats.spec import FORMATS, get_format
from ..gemm.heuristics import Plan, Problem
from ..gemm.ops import gemm_request
from ..hardware import DEFAULT_SM_COUNT, Capability, compiling_for
from ..registry import Kernel, Request, kernels, select

Layer = tuple[int, int]  # (N, K) of a weight

# Token counts of every kind that the casts tell apart: one row; rows, and their scales in fours, that are multiples of
# 16 or not; whole tiles and half ones. A test holds them against all counts up to 1024 and some above.
CAST_TOKENS = (1, 2, 15, 16, 64, 127, 128, 256, 500, 1000)
# A product's plan follows tiles, whose rows are multiples of 64, and whether there are more than 16 rows, or 32. With
# 128 rows some are left to the vendor, who takes no 127.
MOST_TOKENS = 16384
EVERY_TOKENS = (16, 32, 64, 127, *range(192, MOST_TOKENS + 1, 64))


@dataclass(frozen=True)
class Target:
    """The GPU that kernels are compiled for. name: the driver's, which tuned plans go by."""

    capability: Capability
    sms: int = DEFAULT_SM_COUNT
    name: str = ""

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Within it, operands on the meta device stand for operands there."""
        return compiling_for(self.capability, self.sms, self.name)


@dataclass(frozen=True)
class Needed:
    """A call, the backend that serves it, and the names of the kernels that it brings; none if its row compiles at its
    first call, or has nothing to compile."""

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
    """What linear layers ask the table for: casts of activations and weights, fprop; with training also casts to both
    operands, dgrad, and wgrad into an fp32 buffer.

    tokens: rows of the activations; by default one count for every plan up to 16384 of them.
    """
    a, b = formats
    widths = dict.fromkeys(width for layer in layers for width in layer)
    found: dict[Request, None] = {}

    def ask(op: str, names: tuple[str, ...], shape: tuple[int, ...], out: torch.dtype, *options: str) -> None:
        layouts = tuple(FORMATS[name].default_layout for name in names)
        found[Request(op, target.capability, names, shape, out, layouts, frozenset(options))] = None

    for width in widths:
        for m in tokens or CAST_TOKENS:
            ask("cast", (a,), (m, width), dtype)
            if training:
                ask("cast_both", (a, a), (m, width), dtype)
    for n, k in layers:
        ask("cast", (b,), (n, k), dtype)
        if training:
            ask("cast_both", (b, b), (n, k), dtype)
        for m in tokens or EVERY_TOKENS:
            ask("gemm", (a, b), (m, n, k), dtype)
            if training:
                ask("gemm", (a, b), (m, k, n), dtype)
                ask("gemm", (a, a), (n, k, m), torch.float32, "accumulate")
    return list(found)


def obstacle() -> str | None:
    """Why no kernel can be compiled ahead in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from ..casts._triton import INTERPRETED

    return "TRITON_INTERPRET is set, so kernels are interpreted" if INTERPRETED else None


def needed(requests: Iterable[Request], target: Target) -> list[Needed]:
    """One call for each kernel that has to be compiled, and one for each row that compiles nothing ahead."""
    calls: list[Needed] = []
    with target.compiling(), _compiler(target) as keys_of:
        asked: set[Hashable] = set()
        named: set[tuple[str, str]] = set()
        for request in requests:
            row = select(request)
            kind = (
                row.op,
                row.backend,
                row.summary,
                row.precompile_key(request) if row.precompile_key is not None else None,
            )
            if kind in asked:
                continue
            asked.add(kind)
            fresh = keys_of(request, row) - named if row.precompile_key is not None else set[tuple[str, str]]()
            if fresh or row.precompile_key is None:
                calls.append(Needed(request, row.backend, tuple(sorted(name for name, _ in fresh))))
            named |= fresh
    return calls


@dataclass(frozen=True)
class Compiled:
    """What one call took. found: kernels that lay on disk already."""

    request: Request
    seconds: float
    kernels: int
    found: int


def compile_call(request: Request, target: Target, plan: Plan | None = None) -> Compiled:
    """Compile, or find on disk, the kernels of one call. plan: Hopper's product by that plan, not by the best."""
    from triton import knobs

    hits: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    started = time.perf_counter()
    with target.compiling(), _standing_in(target), knobs.compilation.scope():
        knobs.compilation.listener = listen
        _launch(request, select(request) if plan is None else _by_plan(plan))
    return Compiled(request, time.perf_counter() - started, len(hits), sum(hits))


def compile_all(
    requests: Sequence[Request], target: Target, workers: int, plans: Sequence[Plan | None] | None = None
) -> Iterator[Compiled]:
    """The calls as they are done, by that many processes. Each loads torch first, which takes seconds.

    plans: of each request, as `compile_call` takes it.
    """
    calls = list(zip(requests, plans or [None] * len(requests), strict=True))
    if workers < 2 or len(calls) < 2:
        for request, plan in calls:
            yield compile_call(request, target, plan)
        return
    # products take longest, so they come first
    longest_first = sorted(calls, key=lambda call: call[0].op != "gemm")
    # not forked: this process may have threads of torch's, and a CUDA context that a fork would break
    with ProcessPoolExecutor(min(workers, len(requests)), mp_context=get_context("spawn")) as pool:
        submitted = [pool.submit(compile_call, request, target, plan) for request, plan in longest_first]
        for done in as_completed(submitted):
            yield done.result()


def product_request(problem: Problem, target: Target) -> Request:
    """What Hopper's product of that problem asks the table for."""
    formats = ("fp8_1x128", "fp8_1x128" if problem.b_1x128 else "fp8_128x128")
    layouts = tuple(FORMATS[name].default_layout for name in formats)
    dtype = torch.float32 if problem.fp32_out else torch.bfloat16
    options = frozenset({"accumulate"} if problem.accumulate else ())
    return Request("gemm", target.capability, formats, (problem.m, problem.n, problem.k), dtype, layouts, options)


def cache_folder() -> str:
    """Where Triton keeps what it compiled."""
    from triton import knobs

    return str(knobs.cache.dir)


def _by_plan(plan: Plan) -> Kernel:
    """Hopper's row, made to follow a plan."""
    from ..gemm import _hopper

    row = next(row for row in kernels("gemm") if row.launch is _hopper.scaled_mm)
    return replace(row, launch=functools.partial(_hopper.launch, plan=plan))


def _launch(request: Request, row: Kernel) -> None:
    """The call itself, with operands that have no memory."""

    def empty(*shape: int, dtype: torch.dtype = request.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if request.op == "gemm":
        m, n, k = request.shape
        a, b = (
            quantize(empty(rows, k), name).with_layout(row.layouts.get(name, get_format(name).default_layout))
            for rows, name in zip((m, n), request.formats, strict=True)
        )
        accumulate = "accumulate" in request.options
        assert gemm_request(a, b, request.dtype, bias=False, accumulate=accumulate).options == request.options
        row.launch(a, b, empty(m, n), bias=None, accumulate=accumulate)
        return
    x = empty(*request.shape)
    plans = tuple(plan_cast(x, as_cast_spec(name), None) for name in request.formats)
    assert cast_request(request.op, x, plans) == request
    if request.op == "cast":
        row.launch(x, plans[0], -1, allocate(x, plans[0], -1, None, None))
    else:
        both = (plans[0], plans[1])
        row.launch(x, both, allocate_both(x, both, (None, None), None), None)


class _StandIn:
    """As much of a driver as Triton asks before it compiles. The number of its device is nobody's: kernels are kept by
    it, each with its target."""

    def __init__(self, sm: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.sm, self.target = sm, GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return -self.sm

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _standing_in(target: Target) -> Generator[None]:
    """Within it Triton compiles for that GPU and asks no driver: processes need no CUDA context of their own."""
    from triton.runtime import driver

    before: Any = driver._active  # pyright: ignore[reportPrivateUsage]  # `active` would look for a GPU
    stand_in: Any = _StandIn(target.capability.sm)
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver.set_active(before)


@contextlib.contextmanager
def _compiler(target: Target) -> Generator[Callable[[Request, Kernel], set[tuple[str, str]]]]:
    """A function that gives names and keys of the kernels of a call, and compiles none."""
    from triton import knobs

    seen: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **_: object) -> bool:
        seen.add((fn.name, key))
        return True  # that it need not be compiled

    def keys_of(request: Request, row: Kernel) -> set[tuple[str, str]]:
        seen.clear()
        _launch(request, row)
        return set(seen)

    with _standing_in(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        yield keys_of
