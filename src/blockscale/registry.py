"""The kernel registry: entries by operation and backend, and the choice of a kernel as a lookup, not an `if`.

`select` takes the best kernel that accepts a request; `explain` lists every kernel with the reason it was refused.
Selection runs inside an operator's body, so a compiled graph does not depend on the machine it was traced on. A forced
backend never falls back: it raises with the reason. If none is forced, the registry may take a slower kernel and logs
that once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Generator, Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TypeVar

import torch

from . import env
from .errors import BackendError, check_name, refuse
from .hardware import Capability

log = logging.getLogger("blockscale")


def _configure_log() -> None:
    """Set the log level to BLOCKSCALE_LOG. If unset, the application's logging decides; warnings go to stderr."""
    level = env.get("BLOCKSCALE_LOG").lower()
    if not level:
        return
    check_name(level, ("debug", "info", "warning", "error"), "log level (BLOCKSCALE_LOG)")
    log.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("blockscale: %(message)s"))
    log.addHandler(handler)
    log.propagate = False


_configure_log()

Formats = tuple[str, ...]
F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Request:
    """One problem: the key that kernels are selected by.

    formats: one name for a cast, a pair for a product (a plain left operand is bf16, fp16 or fp32), none for a move of
    rows.  shape: (rows, length) of a cast or a
    move, (M, N, K) of a product, (M, N, K, G) of a grouped product.  dtype: input of a cast, output otherwise.
    layouts: scale layouts of the operands.  options: features of the call, such as "bias", "accumulate", "stochastic",
    "hadamard", "offs", "starts".
    """

    op: str
    capability: Capability
    formats: Formats
    shape: tuple[int, ...]
    dtype: torch.dtype
    layouts: tuple[str, ...] = ()
    options: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        # not all fields: every call hashes a request, and few requests differ in the other fields alone
        return hash((self.op, self.formats, self.shape, self.dtype))

    def __str__(self) -> str:
        extras = f" with {', '.join(sorted(self.options))}" if self.options else ""
        size = "x".join(map(str, self.shape))
        what = " ".join(filter(None, (self.op, " @ ".join(self.formats), size)))
        return f"{what} {str(self.dtype)[6:]}{extras} on {self.capability}"


@dataclass(frozen=True)
class Forecast:
    """A kernel's predicted time for a request.

    configuration: tile and schedule, as text.  us: predicted microseconds.  bound_us: roofline bound in microseconds.
    bound_by: the resource that sets it.  note: assumptions behind the figures.
    """

    configuration: str
    us: float
    flops: int
    bound_us: float
    bound_by: str
    note: str = ""

    @property
    def tflop_s(self) -> float:
        return self.flops / self.us / 1e6

    @property
    def predicted(self) -> str:
        """Predicted time and rate, as text."""
        return f"{self.us:,.1f} µs, {self.tflop_s:,.0f} TFLOP/s"

    @property
    def bound(self) -> str:
        """The roofline bound, and the share of it that the prediction reaches, as text."""
        return f"{self.bound_us:,.1f} µs by {self.bound_by}, of which the prediction reaches {self.share:.0%}"

    @property
    def share(self) -> float:
        """Predicted rate over the rate of the bound."""
        return self.bound_us / self.us

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.configuration}; predicted {self.predicted}; bound {self.bound}{note}"


def _unregistered(*_: object) -> None:
    raise AssertionError("a kernel is launched by the function that it decorates")


@dataclass(frozen=True)
class Kernel:
    """An entry of the registry, and the decorator that registers a launcher.

    devices, formats, dtypes: accepted values; empty accepts all.  layouts: scale layout that the kernel reads, by
    format; a format without an entry is read in any layout.  reject: the reason to refuse a request, or None.
    forced_only: selected only if its backend is forced: never run on a GPU, or slower.  defer: the reason why a kernel
    of lower priority is better for a request that this one accepts, or None.  forecast: predicted time of a request
    that it accepts.  precompile_key: set if a launch with operands on the meta device compiles and runs nothing
    (`hardware.compiling_for`); requests with equal keys use one compiled kernel.  summary: the first line of the
    launcher's docstring, which `explain` shows.
    """

    op: str
    backend: str
    _: KW_ONLY
    devices: Collection[str] = ("cuda",)
    sm: tuple[int, int] = (0, 999)
    formats: Collection[Formats] = ()
    dtypes: Collection[torch.dtype] = ()
    layouts: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    priority: int = 0
    reject: Callable[[Request], str | None] | None = None
    forced_only: bool = False
    forecast: Callable[[Request], Forecast] | None = None
    precompile_key: Callable[[Request], Hashable] | None = None
    defer: Callable[[Request], str | None] | None = None
    launch: Callable[..., object] = _unregistered
    summary: str = ""

    def __post_init__(self) -> None:
        for name in ("devices", "formats", "dtypes"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))

    def __call__(self, launch: F) -> F:
        """Register the launcher below this decorator."""
        summary = (launch.__doc__ or "").strip().partition("\n")[0]
        entries = _REGISTRY.setdefault(self.op, [])
        entries.append(replace(self, launch=launch, summary=summary))
        entries.sort(key=lambda entry: -entry.priority)
        _select.cache_clear()
        return launch

    def misfit(self, request: Request) -> str | None:
        """Why this kernel is not for the device or the formats of the request, or None."""
        where = request.capability
        if self.devices and where.device not in self.devices:
            return f"runs on {' or '.join(sorted(self.devices))}, not on {where.device}"
        if where.device == "cuda" and not self.sm[0] <= where.sm <= self.sm[1]:
            span = f"sm_{self.sm[0]}" + (f" to sm_{self.sm[1]}" if self.sm[1] != self.sm[0] else "")
            return f"needs {span}, this is sm_{where.sm}"
        if self.formats and request.formats not in self.formats:
            return f"does not serve {' @ '.join(request.formats)}"
        return None

    def refusal(self, request: Request) -> str | None:
        """Why this kernel cannot serve the request, or None."""
        misfit = self.misfit(request)
        if misfit is not None:
            return misfit
        if self.dtypes and request.dtype not in self.dtypes:
            return f"has no {str(request.dtype)[6:]}"
        return self.reject(request) if self.reject else None

    def deferral(self, request: Request) -> str | None:
        """Why an accepted request goes to another kernel unless this backend is forced, or None."""
        if self.forced_only:
            return "only if forced"
        return self.defer(request) if self.defer else None

    def conversions(self, request: Request) -> tuple[str, ...]:
        """Scale layouts that must be converted before this kernel runs, as text. A kernel that reads any layout reads
        no packed weight."""
        pairs = zip(request.formats, request.layouts, strict=False)
        read = [
            (name, layout, self.layouts.get(name, "plain" if layout == "packed" else layout)) for name, layout in pairs
        ]
        return tuple(f"{name} scales {layout} -> {wanted}" for name, layout, wanted in read if wanted != layout)


kernel = Kernel  # as a decorator
_REGISTRY: dict[str, list[Kernel]] = {}
# process-wide: on CUDA the backward runs on autograd's own threads, which do not inherit context variables
_forced: list[tuple[str | None, dict[str, str]]] = []


def operations() -> list[str]:
    """Operations that have kernels."""
    return list(_REGISTRY)


def kernels(op: str) -> list[Kernel]:
    """Every kernel of an operation, highest priority first."""
    check_name(op, _REGISTRY, "operation")
    return list(_REGISTRY[op])


def backends() -> list[str]:
    """Every backend name in the registry."""
    return sorted({entry.backend for entries in _REGISTRY.values() for entry in entries})


def forced_backend(op: str) -> str | None:
    """Backend that use_backend() or BLOCKSCALE_BACKEND forces; None if none is forced or it lacks the operation."""
    wanted: str | None = None
    for everywhere, per_operation in reversed(_forced):
        wanted = per_operation.get(op, everywhere)
        if wanted is not None:
            break
    if wanted is None:
        wanted = env.get("BLOCKSCALE_BACKEND")
        if not wanted:
            return None
        check_name(wanted, ["auto", *backends()], "backend")
    return wanted if any(entry.backend == wanted for entry in _REGISTRY[op]) else None


@contextlib.contextmanager
def use_backend(backend: str | None = None, **per_operation: str) -> Generator[None]:
    """Force a backend inside the block; nothing falls back to another one.

    `use_backend("torch")` holds for every operation that has such a backend; `use_backend(gemm="torch")` for one. It
    holds for the whole process, since a backward runs on other threads. Kernels are chosen when a graph runs, so put it
    around the call of a compiled function, not inside.

    >>> import torch, blockscale as bs
    >>> with bs.use_backend("reference"):
    ...     q = bs.quantize(torch.randn(4, 64), "mxfp8_e4m3")
    """
    if torch.compiler.is_compiling():
        refuse(
            "use_backend inside a compiled function",
            "kernels are chosen when a graph runs, not when it is traced",
            "put use_backend around the call of the compiled function",
        )
    for op, name in per_operation.items():
        check_name(op, _REGISTRY, "operation")
        check_name(name, dict.fromkeys(("auto", *(entry.backend for entry in _REGISTRY[op]))), f"backend of {op}")
    if backend is not None:
        check_name(backend, ["auto", *backends()], "backend")
    forced = (backend, per_operation)
    _forced.append(forced)
    try:
        yield
    finally:
        # by identity: blocks of several threads may end in any order
        _forced[:] = [other for other in _forced if other is not forced]


def forced_backends() -> tuple[tuple[str | None, dict[str, str]], ...]:
    """Backends that `use_backend` forces now, to pass to worker processes."""
    return tuple(_forced)


def force_backends(forced: tuple[tuple[str | None, dict[str, str]], ...]) -> None:
    """Force backends in this process until it ends.  forced: from `forced_backends` of the parent process."""
    _forced.extend(forced)


@functools.lru_cache(maxsize=8192)
def _select(request: Request, forced: str | None) -> Kernel:
    candidates = [
        entry
        for entry in _REGISTRY[request.op]
        if entry.backend == forced or (forced is None and not entry.forced_only)
    ]
    refused: list[tuple[Kernel, str]] = []
    for entry in candidates:
        reason = entry.refusal(request)
        if reason is not None:
            refused.append((entry, reason))
        elif forced is not None:
            return entry
        elif entry.deferral(request) is None:
            _log_slower_kernel(request, entry, refused)
            return entry
    known = dict.fromkeys(entry.backend for entry in _REGISTRY[request.op])
    refuse(
        (f"backend {forced!r} cannot run " if forced else "no backend can run ") + str(request),
        rule="; ".join(f"{entry.backend} {reason}" for entry, reason in refused),
        fix=f"leave the choice to the library or force one of {', '.join(known)}",
        error=BackendError,
    )


_logged: set[str] = set()


def _log_slower_kernel(request: Request, taken: Kernel, refused: list[tuple[Kernel, str]]) -> None:
    """Log once that a faster kernel for this device and these formats refused. Kernels for other devices or formats are
    not mentioned, nor are kernels that defer most requests."""
    here = [
        f"{entry.backend} {reason}"
        for entry, reason in refused
        if entry.misfit(request) is None and entry.defer is None
    ]
    text = f"{request.op} {' @ '.join(request.formats)} on {request.capability} uses {taken.backend}"
    if here and text not in _logged:
        _logged.add(text)
        # a slower kernel is worth a warning on a GPU, not on a CPU
        level = logging.WARNING if request.capability.device == "cuda" else logging.INFO
        log.log(level, "%s: %s", text, "; ".join(here))


def select(request: Request) -> Kernel:
    """The kernel for a request: the best that accepts, or the forced one."""
    return _select(request, forced_backend(request.op))


def nothing_is_forced() -> bool:
    """Whether no backend is forced."""
    return not _forced and not env.get("BLOCKSCALE_BACKEND")


@dataclass(frozen=True)
class Candidate:
    """A kernel as `explain` shows it.

    taken: selected; at most one is.  reason: why it is selected, passed over or refused.  fits: for this device and
    these formats, whether it accepts this call or not.  forecast: predicted time, if it accepts and has a model.
    """

    backend: str
    priority: int
    taken: bool
    reason: str
    summary: str
    conversions: tuple[str, ...]
    fits: bool
    forecast: Forecast | None = None


@dataclass(frozen=True)
class Explanation:
    """Every kernel for one request, highest priority first."""

    request: Request
    candidates: tuple[Candidate, ...]

    @property
    def taken(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.taken), None)

    def __str__(self) -> str:
        lines = [str(self.request)]
        for each in self.candidates:
            mark, what = "->" if each.taken else "  ", f" ({each.summary})" if each.summary else ""
            converts = "".join(f"; converts {text}" for text in each.conversions)
            lines.append(f"{mark} {each.backend}{what}: {each.reason}{converts}")
            if each.forecast is not None:
                lines.append(f"   {each.forecast}")
        return "\n".join(lines)


def explain_request(request: Request) -> Explanation:
    """Every kernel for one request: the selected one, and why the others are not."""
    forced = forced_backend(request.op)
    found = False
    candidates: list[Candidate] = []
    for entry in kernels(request.op):
        reason = entry.refusal(request)
        forecast = entry.forecast(request) if entry.forecast is not None and reason is None else None
        deferral = entry.deferral(request) if reason is None else None
        taken = reason is None and not found and (entry.backend == forced or (forced is None and deferral is None))
        found = found or taken
        if reason is None:
            selected = f"forced: {forced}" if taken and forced else "best kernel that accepts"
            passed_over = f"able, but {deferral}" if deferral else "able, lower priority"
            reason = selected if taken else (f"able, but {forced} is forced" if forced else passed_over)
        conversions = entry.conversions(request) if taken else ()
        fits = entry.misfit(request) is None
        candidates.append(
            Candidate(entry.backend, entry.priority, taken, reason, entry.summary, conversions, fits, forecast)
        )
    return Explanation(request, tuple(candidates))
