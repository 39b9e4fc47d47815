"""One benchmark case: check against the reference, compare peers, time all in turns, make the row.

A case with wrong bytes is not timed. A peer with a different result is timed and labelled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..casts import dequantize
from ..formats.spec import get_format
from ..formats.tensor import BlockScaled
from ..registry import use_backend
from .shapes import numel
from .store import Row, Where
from .timing import Reading, Slice, Telemetry, Timing, input_sets, measure, prepare, watch

Args = tuple[Any, ...]
# Least closeness in dB that counts as the same cast, by bits of an element. Implementations of one cast differ where a
# value or scale lies between two codes; different casts differ by their noise, about 30 and 18 dB.
SAME_DB = {8: 40.0, 6: 30.0, 4: 28.0}
# name of the copy among the slices of a case; no peer has it
COPY = "copy of bf16"
NOT_COMPILED = "not run: compiled on a GPU only, at some shapes"


@dataclass(frozen=True)
class Verdict:
    """Result of a check.

    wrong_bytes: bytes that differ from the reference.  how: what was compared.  problem: fault of a result that is not
    compared byte by byte.  sqnr_db: against the exact result.  details: further figures of the check.
    """

    wrong_bytes: int
    how: str
    problem: str = ""
    sqnr_db: float | None = None
    details: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Peer:
    """Another implementation of a case. `view` converts its output to the type of ours, outside of the timing.

    compared: False if it computes something else on purpose.  gate_db: least closeness that counts as the same cast;
    None: by the format.  accuracy: for GEMMs and layers, called with the arguments: SQNR in dB against the exact result
    of the peer's own operands; below gate_db, if any, the peer differs.  ready: makes the slice from the arguments of
    all sets, if calls are not timed as ours are.
    """

    run: Callable[..., Any]
    view: Callable[[Any], object] = lambda output: output
    note: str = ""
    compared: bool = True
    gate_db: float | None = None
    accuracy: Callable[..., float] | None = None
    ready: Callable[[Sequence[Args], torch.device, Budget], Slice] | None = None


@dataclass(frozen=True)
class Case:
    """A case to time. `make` returns the arguments of one call; `run` and the peers take them.

    bytes: least memory traffic of one call; None if it is not reported.  copied: shape of the bf16 tensor whose copy is
    timed for comparison.  host: time the host's share of a call instead of the device's.  flops: of one call.
    bound_us: lower bound of the time on this machine.  dtype: see `Row`.  another: makes a further set of arguments
    from the first, if sets share tensors; else `make` is called again.  captured: False to time launches too.  parts:
    equal parts of a call; times and figures are of one part.  details: figures that are known beforehand.  derive:
    further ones, from the microseconds of ours ("blockscale") and of the peers by name.
    """

    name: str
    group: str
    format: str
    axis: str
    shape: tuple[int, ...]
    make: Callable[[torch.device], Args]
    run: Callable[..., Any]
    backend: Callable[..., str]
    check: Callable[[Case, Args], Verdict]
    bytes: int | None = None
    copied: tuple[int, ...] | None = None
    peers: Mapping[str, Peer | str] = field(default_factory=dict[str, Peer | str])
    host: bool = False
    flops: int | None = None
    bound_us: float | None = None
    dtype: str = "bfloat16"
    another: Callable[..., Args] | None = None
    captured: bool = True
    parts: int = 1
    details: Mapping[str, float] = field(default_factory=dict[str, float])
    derive: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda us: {}


def with_peers(case: Case, names: Collection[str]) -> Case:
    """The case beside those of its peers that are named."""
    return dataclasses.replace(case, peers={name: peer for name, peer in case.peers.items() if name in names})


@dataclass(frozen=True)
class Budget:
    """Timing budget: number of rounds, and seconds of a slice per variant."""

    rounds: int = 11
    seconds: float = 0.004


def random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """bf16 tensor of normal values, from our own generator: a failed graph capture breaks the default one."""
    generator = _generator(device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


# correctness


def check_bytes(case: Case, args: Args) -> Verdict:
    """Compare all output bytes with the reference's; of experts one by one, since the reference needs many times the
    memory of its input."""
    ours = _on_poisoned_memory(case, args)
    if len(case.shape) < 3:
        return Verdict(count_wrong(ours, _reference(case, args)), "every byte")
    leaves, (experts, *_) = pytree.tree_leaves(ours), case.shape
    wrong = 0
    for index in range(experts):
        wrong += count_wrong([leaf[index] for leaf in leaves], _reference(case, (args[0][index], *args[1:])))
    return Verdict(wrong, f"every byte, each of {experts} experts by itself")


def count_wrong(ours: object, reference: object) -> int:
    """Number of bytes that differ between two outputs of the same structure."""
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(reference), strict=True)
    return sum(int((_as_bytes(a) != _as_bytes(b)).sum()) for a, b in pairs)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.contiguous().view(-1).view(torch.uint8)


def _reference(case: Case, args: Args) -> object:
    with use_backend("reference"):
        return case.run(*args)


def _on_poisoned_memory(case: Case, args: Args) -> object:
    """Output of a second run, whose memory blocks are those of the first run, filled with 0xFF."""
    for leaf in pytree.tree_leaves(case.run(*args)):
        leaf.untyped_storage().fill_(0xFF)
    return case.run(*args)


def closeness_db(ours: object, theirs: object) -> float:
    """Signal to difference ratio of two outputs in dB, the lowest over operands; for batches of the first matrix.

    A peer may lack small trailing outputs.
    """
    pairs = zip(_values(ours), _values(theirs), strict=False)
    return min(float(20 * torch.log10(a.norm() / (a - b).norm())) for a, b in pairs)


def _values(output: object) -> Iterator[Tensor]:
    """Decoded fp32 values of each result, scaled axis last."""
    for leaf in pytree.tree_leaves(output, is_leaf=lambda node: isinstance(node, BlockScaled)):
        if isinstance(leaf, BlockScaled):
            operand = leaf.operand
            if len(operand.shape) == 3:
                first = {"data": operand.data[0], "scale": operand.scale[0], "shape": operand.shape[1:]}
                operand = dataclasses.replace(operand, **first)
            with use_backend("reference"):
                yield dequantize(operand, torch.float32)
        else:
            yield leaf.float()


# rows


def run_cases(cases: Iterable[Case], suite: str, device: torch.device, where: Where, budget: Budget) -> Iterator[Row]:
    """Check and time cases one by one."""
    telemetry = watch(device)
    for case in cases:
        yield run_case(case, suite, device, where, budget, telemetry)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # compiled peers share code, which torch would count as recompilations
        if device.type == "cuda":
            torch.cuda.empty_cache()


def run_case(case: Case, suite: str, device: torch.device, where: Where, budget: Budget, telemetry: Telemetry) -> Row:
    """Row of a case: with a fault, or timed."""
    args = case.make(device)
    verdict = case.check(case, args)
    row = Row(
        suite=suite,
        group=case.group,
        case=case.name,
        format=case.format,
        axis=case.axis,
        shape=list(case.shape),
        dtype=case.dtype,
        backend=case.backend(*args),
        checked=verdict.how,
        wrong_bytes=verdict.wrong_bytes,
        bytes=case.bytes,
        where=dataclasses.asdict(where),
        bound_us=None if case.bound_us is None else round(case.bound_us, 3),
        sqnr_db=verdict.sqnr_db,
        problem=verdict.problem,
        details={**case.details, **verdict.details},
    )
    if row.fault:
        return row
    more = functools.partial(case.make, device) if case.another is None else functools.partial(case.another, *args)
    sets = [args, *(more() for _ in range(_set_count(case, device) - 1))]
    slices, remarks = _slices(case, sets, device, budget)
    found = measure(slices, rounds=budget.rounds, sample=telemetry.sample)
    timings = {name: timing.per_part(case.parts) for name, timing in found.items()}
    return _fill(row, case, timings, remarks, telemetry.take())


def _set_count(case: Case, device: torch.device) -> int:
    if case.host or case.bytes is None:
        return 1
    # between two uses of an input set, the traffic of the other sets has to exceed the cache
    return input_sets(case.bytes if case.copied is None else 2 * numel(case.copied), device)


def _slices(
    case: Case, sets: list[Args], device: torch.device, budget: Budget
) -> tuple[dict[str, Slice], dict[str, dict[str, Any]]]:
    """Slices to time in turns: ours, the copy, and the peers that run here; and note and accuracy of each peer."""

    def ready(run: Callable[..., object], arguments: list[Args]) -> Slice:
        calls = [functools.partial(run, *one) for one in arguments]
        return prepare(calls, device, seconds=budget.seconds, host=case.host, captured=case.captured)

    slices = {"blockscale": ready(case.run, sets)}
    if case.copied is not None:
        # random values, since zeros take less power
        sources = [random(case.copied, device) for _ in sets]
        slices[COPY] = ready(Tensor.copy_, [(torch.empty_like(source), source) for source in sources])
    ours, remarks = case.run(*sets[0]), dict[str, dict[str, Any]]()
    for name, peer in case.peers.items():
        if isinstance(peer, str):
            remarks[name] = {"note": peer}
            continue
        try:
            remarks[name] = _compare(case, ours, peer, sets[0])
            slices[name] = ready(peer.run, sets) if peer.ready is None else peer.ready(sets, device, budget)
        except Exception as error:  # a failing peer becomes a note of the row
            remarks[name] = {"note": failure(error)}
    return slices, remarks


def failure(error: Exception) -> str:
    """An exception as a note: its type and its first line."""
    return f"fails: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def _compare(case: Case, ours: object, peer: Peer, args: Args) -> dict[str, Any]:
    """Remark on a peer: its accuracy if it has a measure, and its note with a remark if its result differs."""
    cell, differs = dict[str, Any](), ""
    if peer.accuracy is not None:
        close = peer.accuracy(*args)
        if math.isnan(close):  # JSON has no NaN
            differs = "differs: not all of its values are finite"
        else:
            cell["sqnr_db"] = close
            if peer.gate_db is not None and close < peer.gate_db:
                differs = f"differs: {close:.1f} dB from the exact product"
    elif peer.compared:
        distance = closeness_db(ours, peer.view(peer.run(*args)))
        gate = SAME_DB[get_format(case.format).element.bits] if peer.gate_db is None else peer.gate_db
        differs = "" if distance >= gate else f"differs: {distance:.1f} dB from ours"
    note = "; ".join(text for text in (differs, peer.note) if text)
    return cell | ({"note": note} if note else {})


def _fill(
    row: Row, case: Case, timings: dict[str, Timing], remarks: dict[str, dict[str, Any]], reading: Reading | None
) -> Row:
    mine, copy = timings["blockscale"], timings.get(COPY)
    gb_s = None if case.bytes is None else case.bytes / mine.us / 1e3
    copy_gb_s = None if copy is None or case.copied is None else 4 * numel(case.copied) / copy.us / 1e3
    return dataclasses.replace(
        row,
        us=round(mine.us, 3),
        spread_us=[round(mine.low, 3), round(mine.high, 3)],
        gb_s=_rounded(gb_s),
        copy_gb_s=_rounded(copy_gb_s),
        percent_of_copy=_rounded(None if gb_s is None or copy_gb_s is None else 100 * gb_s / copy_gb_s),
        peers={name: _figures(case, timings.get(name), mine) | remark for name, remark in remarks.items()},
        method=mine.method,
        rounds=mine.rounds,
        sm_clock_mhz=None if reading is None else reading.sm_clock_mhz,
        power_w=None if reading is None else reading.power_w,
        tflop_s=_rounded(None if case.flops is None else case.flops / mine.us / 1e6),
        percent_of_bound=_rounded(None if case.bound_us is None else 100 * case.bound_us / mine.us),
        details={**row.details, **case.derive({name: timing.us for name, timing in timings.items()})},
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _figures(case: Case, theirs: Timing | None, mine: Timing) -> dict[str, Any]:
    """Figures of a peer; none if it was not timed."""
    if theirs is None:
        return {}
    cell = {"us": round(theirs.us, 3), "ratio": round(theirs.us / mine.us, 3), "method": theirs.method}
    return cell if case.flops is None else cell | {"tflop_s": round(case.flops / theirs.us / 1e6, 1)}
