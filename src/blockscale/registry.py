"""The table of kernels: one row per (operation, backend), and the choice of a row as a lookup, not an `if`.

`select` takes the best row that accepts a request; `explain` gives every row with the reason it was refused. Selection
runs inside an operator's body, so a compiled graph does not depend on the machine it was traced on. A backend that the
user asked for never falls back: it raises with the reason. Left to itself the library may take a slower row and says so
once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from . import call_recording, env
from .errors import BackendError, OptionError, check_name, message
from .hardware import Capability

log = logging.getLogger("blockscale")


def _configure_log() -> None:
    """Follow BLOCKSCALE_LOG. Without it the application's logging decides, and warnings go to standard error."""
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
    """One problem as the table sees it.

    formats: one name for a cast, a pair for a product, none for a move of rows.  shape: (rows, length) of a cast or a
    move, (M, N, K) of a product, (M, N, K, G) of a grouped one.  dtype: input of a cast, output of everything else.
    layouts: of the operands' scales.  options: what else is asked for, such as "bias", "accumulate", "stochastic",
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
        # not of all fields: a request is looked up in every call, and few differ in the others alone
        return hash((self.op, self.formats, self.shape, self.dtype))

    def __str__(self) -> str:
        extras = f" with {', '.join(sorted(self.options))}" if self.options else ""
        size = "x".join(map(str, self.shape))
        what = " ".join(filter(None, (self.op, " @ ".join(self.formats), size)))
        return f"{what} {str(self.dtype)[6:]}{extras} on {self.capability}"


@dataclass(frozen=True)
class Forecast:
    """What a row expects of itself: how it would cut the problem up, the microseconds that its model predicts, and the
    fewest that a machine allows, with what sets them. note: what the figures take for granted."""

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
        """The model's figures, for people."""
        return f"{self.us:,.1f} µs, {self.tflop_s:,.0f} TFLOP/s"

    @property
    def bound(self) -> str:
        """What no kernel can pass, and how near the prediction comes, for people."""
        return f"{self.bound_us:,.1f} µs by {self.bound_by}, of which the prediction reaches {self.share:.0%}"

    @property
    def share(self) -> float:
        """Of the bound's rate, at the predicted time."""
        return self.bound_us / self.us

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.configuration}; predicted {self.predicted}; bound {self.bound}{note}"


@dataclass(frozen=True)
class Kernel:
    """A row. Empty `devices`, `formats` and `dtypes` accept everything; `layouts` maps a format to the scale layout
    that the kernel reads (a format that is not named is read in any layout); `reject` returns a reason or None.
    forced_only: it serves only where it is asked for by name, because too little is known of it.  defer: why a request
    that it could serve is better left to the rows below, or None.  forecast: how it would serve a request that it
    accepts.  precompile_key: it can be compiled without being run, by a launch with operands on the meta device
    (`hardware.compiling_for`); requests with equal answers are served by one compiled kernel."""

    op: str
    backend: str
    launch: Callable[..., object]
    devices: frozenset[str] = frozenset()
    sm: tuple[int, int] = (0, 999)
    formats: frozenset[Formats] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset()
    layouts: dict[str, str] = field(default_factory=dict, hash=False)
    priority: int = 0
    reject: Callable[[Request], str | None] | None = None
    summary: str = ""
    forced_only: bool = False
    forecast: Callable[[Request], Forecast] | None = None
    precompile_key: Callable[[Request], Hashable] | None = None
    defer: Callable[[Request], str | None] | None = None

    def misfit(self, request: Request) -> str | None:
        """Why this row was not made for such a device and such formats, or None."""
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
        """Why this row cannot serve the request, or None."""
        misfit = self.misfit(request)
        if misfit is not None:
            return misfit
        if self.dtypes and request.dtype not in self.dtypes:
            return f"has no {str(request.dtype)[6:]}"
        return self.reject(request) if self.reject else None

    def reserve(self, request: Request) -> str | None:
        """Why it serves a request that it accepts only if it is demanded, or None."""
        if self.forced_only:
            return "only by demand"
        return self.defer(request) if self.defer else None

    def conversions(self, request: Request) -> tuple[str, ...]:
        """Scale layouts that must be changed before this row runs, as text."""
        return tuple(
            f"{name} scales {layout} -> {self.layouts[name]}"
            for name, layout in zip(request.formats, request.layouts, strict=False)
            if self.layouts.get(name, layout) != layout
        )


_TABLE: dict[str, list[Kernel]] = {}
# process-wide on purpose: on CUDA the backward runs on autograd's own threads, which see no context variable
_forced: list[tuple[str | None, dict[str, str]]] = []


def kernel(
    op: str,
    backend: str,
    *,
    devices: Sequence[str] = ("cuda",),
    sm: tuple[int, int] = (0, 999),
    formats: Sequence[Formats] = (),
    dtypes: Sequence[torch.dtype] = (),
    layouts: dict[str, str] | None = None,
    priority: int = 0,
    reject: Callable[[Request], str | None] | None = None,
    forced_only: bool = False,
    forecast: Callable[[Request], Forecast] | None = None,
    precompile_key: Callable[[Request], Hashable] | None = None,
    defer: Callable[[Request], str | None] | None = None,
) -> Callable[[F], F]:
    """Decorator: add the launcher below it to the table. Its docstring's first line is what `explain` shows."""

    def register(launch: F) -> F:
        summary = (launch.__doc__ or "").strip().splitlines()[0] if launch.__doc__ else ""
        row = Kernel(
            op,
            backend,
            launch,
            frozenset(devices),
            sm,
            frozenset(formats),
            frozenset(dtypes),
            layouts or {},
            priority,
            reject,
            summary,
            forced_only,
            forecast,
            precompile_key,
            defer,
        )
        rows = _TABLE.setdefault(op, [])
        rows.append(row)
        rows.sort(key=lambda item: -item.priority)
        _select.cache_clear()
        return launch

    return register


def operations() -> list[str]:
    """Operations that have rows."""
    return list(_TABLE)


def kernels(op: str) -> list[Kernel]:
    """Every row of an operation, best first."""
    check_name(op, _TABLE, "operation")
    return list(_TABLE[op])


def backends() -> list[str]:
    """Every backend name in the table."""
    return sorted({row.backend for table in _TABLE.values() for row in table})


def forced_backend(op: str) -> str | None:
    """The backend that use_backend() or BLOCKSCALE_BACKEND demands for an operation, if it implements it."""
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
    return wanted if any(row.backend == wanted for row in _TABLE[op]) else None


@contextlib.contextmanager
def use_backend(backend: str | None = None, **per_operation: str) -> Generator[None]:
    """Demand a backend inside the block; nothing falls back to another one.

    `use_backend("torch")` holds for every operation that has such a backend; `use_backend(gemm="torch")` for one. The
    demand is the process's, since a backward runs on other threads. Kernels are chosen when a graph runs, so it goes
    around the call of a compiled function, not inside.

    >>> import torch, blockscale as bs
    >>> with bs.use_backend("reference"):
    ...     q = bs.quantize(torch.randn(4, 64), "mxfp8_e4m3")
    """
    if torch.compiler.is_compiling():
        raise OptionError(
            message(
                "use_backend inside a compiled function",
                rule="kernels are chosen when a graph runs, not when it is traced",
                fix="put use_backend around the call of the compiled function",
            )
        )
    for op, name in per_operation.items():
        check_name(op, _TABLE, "operation")
        check_name(name, dict.fromkeys(("auto", *(row.backend for row in _TABLE[op]))), f"backend of {op}")
    if backend is not None:
        check_name(backend, ["auto", *backends()], "backend")
    demand = (backend, per_operation)
    _forced.append(demand)
    try:
        yield
    finally:
        # by identity: blocks of several threads may end in any order
        _forced[:] = [other for other in _forced if other is not demand]


def forced_backends() -> tuple[tuple[str | None, dict[str, str]], ...]:
    """What `use_backend` demands now, for processes that are to choose alike."""
    return tuple(_forced)


def force_backends(demands: tuple[tuple[str | None, dict[str, str]], ...]) -> None:
    """Demand in this process, until it ends, what another demanded."""
    _forced.extend(demands)


@functools.lru_cache(maxsize=8192)
def _select(request: Request, forced: str | None) -> Kernel:
    candidates = [
        row for row in _TABLE[request.op] if row.backend == forced or (forced is None and not row.forced_only)
    ]
    refused: list[tuple[Kernel, str]] = []
    for row in candidates:
        reason = row.refusal(request)
        if reason is not None:
            refused.append((row, reason))
        elif forced is not None:
            return row
        elif row.reserve(request) is None:
            _tell_once(request, row, refused)
            return row
    known = dict.fromkeys(row.backend for row in _TABLE[request.op])
    raise BackendError(
        message(
            (f"backend {forced!r} cannot run " if forced else "no backend can run ") + str(request),
            rule="; ".join(f"{row.backend} {reason}" for row, reason in refused),
            fix=f"leave the choice to the library or ask for one of {', '.join(known)}",
        )
    )


_told: set[str] = set()


def _tell_once(request: Request, taken: Kernel, refused: list[tuple[Kernel, str]]) -> None:
    """Say that a faster row made for this device and these formats was passed over. Other rows are no news, nor is one
    that leaves most requests to others anyway."""
    here = [f"{row.backend} {reason}" for row, reason in refused if row.misfit(request) is None and row.defer is None]
    text = f"{request.op} {' @ '.join(request.formats)} on {request.capability} uses {taken.backend}"
    if here and text not in _told:
        _told.add(text)
        # speed on a CPU is nobody's concern; on a GPU a slower kernel is worth a warning
        level = logging.WARNING if request.capability.device == "cuda" else logging.INFO
        log.log(level, "%s: %s", text, "; ".join(here))


def select(request: Request) -> Kernel:
    """The row that serves a request: the best that accepts, or the one the user demands. For whoever will launch it."""
    call_recording.note_operator_start()
    return would_serve(request)


def would_serve(request: Request) -> Kernel:
    """The row that `select` would take, for whoever only wants to know."""
    return _select(request, forced_backend(request.op))


def nothing_is_forced() -> bool:
    """Whether the choice of kernels is the table's alone."""
    return not _forced and not env.get("BLOCKSCALE_BACKEND")


@dataclass(frozen=True)
class Candidate:
    """A row as `explain` shows it: refused with a reason, or able; at most one is taken. `fits`: made for this device
    and these formats, whether it accepts this call or not.  forecast: of a row that is able and can tell."""

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
    """Every row for one request, best first."""

    request: Request
    candidates: tuple[Candidate, ...]

    @property
    def taken(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.taken), None)

    def __str__(self) -> str:
        lines = [str(self.request)]
        for row in self.candidates:
            mark, what = "->" if row.taken else "  ", f" ({row.summary})" if row.summary else ""
            converts = "".join(f"; converts {text}" for text in row.conversions)
            lines.append(f"{mark} {row.backend}{what}: {row.reason}{converts}")
            if row.forecast is not None:
                lines.append(f"   {row.forecast}")
        return "\n".join(lines)


def explain_request(request: Request) -> Explanation:
    """The table for one request: the row that is taken, and why the others are not."""
    forced = forced_backend(request.op)
    found = False
    candidates: list[Candidate] = []
    for row in kernels(request.op):
        reason = row.refusal(request)
        forecast = row.forecast(request) if row.forecast is not None and reason is None else None
        reserve = row.reserve(request) if reason is None else None
        taken = reason is None and not found and (row.backend == forced or (forced is None and reserve is None))
        found = found or taken
        if reason is None:
            demanded = f"demanded: {forced}" if taken and forced else "best row that accepts"
            passed_over = f"able, but {reserve}" if reserve else "able, lower priority"
            reason = demanded if taken else (f"able, but {forced} is demanded" if forced else passed_over)
        conversions = row.conversions(request) if taken else ()
        fits = row.misfit(request) is None
        told = (row.backend, row.priority, taken, reason, row.summary, conversions, fits, forecast)
        candidates.append(Candidate(*told))
    return Explanation(request, tuple(candidates))
