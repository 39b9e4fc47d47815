"""Every way a call can fail, one class per kind, and the checks that are shared by several subpackages.

A message always has three parts: what was wrong (with the value), the rule it breaks, and what to do instead.
User mistakes are `ValueError`s, missing features are `NotImplementedError`s, a failure of another rank is a
`RuntimeError`; `assert` is for our own invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import NoReturn


class BlockscaleError(Exception):
    """Base of all errors raised on purpose by this library. It has no constructor of its own, so that torch.compile can
    trace a raise and keep the text; `message` makes that text."""


def message(what: str, *, rule: str, fix: str) -> str:
    """The three parts of every error as sentences.

    >>> message("axis=5", rule="blocks run along one of the last two axes", fix="use axis=-1")
    'axis=5. Rule: blocks run along one of the last two axes. Fix: use axis=-1.'
    """
    parts = (what, f"Rule: {rule}", f"Fix: {fix}")
    return " ".join(part if part[-1] in ".?!" else part + "." for part in parts)


def _as_argument(name: str, *value: object) -> str:
    return "=".join((name, *map(str, value)))


_written: ContextVar[Callable[..., str]] = ContextVar("_written", default=_as_argument)


def option(name: str, *value: object) -> str:
    """A field of a config, with its value if one is given, as the user writes it: `steps=0` in Python, `--steps 0` on
    the command line.

    >>> option("steps", 0), option("recipe.since")
    ('steps=0', 'recipe.since')
    """
    return _written.get()(name, *value)


def option_writer() -> Callable[..., str]:
    """The function of (name, *value) that `option` calls; a new process is given it."""
    return _written.get()


def write_options(writer: Callable[..., str]) -> None:
    """Let `option` call this function from now on, in this context."""
    _written.set(writer)


class UnknownNameError(BlockscaleError, ValueError):
    """A format, scale rule, backend, operation or layout that does not exist."""


class DtypeError(BlockscaleError, ValueError):
    """A tensor of a dtype that the operation does not take."""


class ShapeError(BlockscaleError, ValueError):
    """A rank or size that does not fit, alone or together with another operand."""


class AxisError(BlockscaleError, ValueError):
    """A scaled axis that does not exist, or that is not the one a product contracts."""


class LayoutError(BlockscaleError, ValueError):
    """A scale tensor whose layout, shape or dtype is not what its format says."""


class ShardingError(BlockscaleError, ValueError):
    """Shards or placements that cannot be computed without gathering an operand."""


class CapacityError(BlockscaleError, ValueError):
    """More rows for another rank than a dispatcher has room for."""


class OptionError(BlockscaleError, ValueError):
    """An option that exists but makes no sense for this format."""


def refuse(what: str, rule: str, fix: str, error: type[BlockscaleError] = OptionError) -> NoReturn:
    """Raise an error with the three parts of its message."""
    raise error(message(what, rule=rule, fix=fix))


class DeviceError(BlockscaleError, ValueError):
    """Operands that live on different devices."""


class StaleWeightError(BlockscaleError, ValueError):
    """A shared cast of a weight that has been written since."""


class StaleActivationError(BlockscaleError, ValueError):
    """A shared cast of an input that has been written since."""


class DataError(BlockscaleError, ValueError):
    """Training text that is missing, too short, or cannot be read or stored."""


class CheckpointError(BlockscaleError, ValueError):
    """A checkpoint that is damaged, that belongs to another run, or that could not be written."""


class NonFiniteError(BlockscaleError, ValueError):
    """A loss or gradient that is not finite, and where that happened first."""


class OutOfMemoryError(BlockscaleError, ValueError):
    """A run that does not fit the memory of its device."""


class ProcessError(BlockscaleError, ValueError):
    """A worker process that ended without a result."""


class RankError(BlockscaleError, RuntimeError):
    """A collective that failed because of another rank, which the message names."""


class TransformError(BlockscaleError, NotImplementedError):
    """A torch.func transform or forward-mode AD that needs a derivative that layers do not have."""


class PairError(BlockscaleError, NotImplementedError):
    """Two formats that no product combines."""


class MissingPackageError(BlockscaleError, NotImplementedError, ImportError):
    """A required package that is not installed."""


class VersionError(BlockscaleError, NotImplementedError):
    """An unsupported version of a package. Not an ImportError: torchtitan hides those."""


class BackendError(BlockscaleError, NotImplementedError):
    """No kernel in the registry can serve this request."""


class PtxasError(BackendError):
    """A kernel that ptxas failed to assemble."""


def _nearest(name: str, choices: list[str]) -> list[str]:
    """The most similar names, best first. By hand, since torch.compile cannot trace difflib's search."""

    def pairs(word: str) -> set[str]:
        return {word[i : i + 2] for i in range(len(word) - 1)}

    scored: list[tuple[float, int, str]] = []
    for choice in choices:
        shared = len(pairs(name) & pairs(choice))
        likeness = shared / max(1, min(len(pairs(name)), len(pairs(choice))))
        if likeness >= 0.25:
            scored.append((-likeness, abs(len(choice) - len(name)), choice))
    return [choice for _, _, choice in sorted(scored)[:3]]


def check_name(name: object, known: Iterable[str], kind: str) -> None:
    """Raise unless `name` is one of `known`, proposing the nearest valid names.

    >>> check_name("mxpf8", ["mxfp8_e4m3", "mxfp4"], "format")
    Traceback (most recent call last):
    ...
    blockscale.errors.UnknownNameError: unknown format 'mxpf8'. Rule: a format is one of mxfp8_e4m3, mxfp4. \
Fix: did you mean mxfp4 or mxfp8_e4m3?
    """
    choices = list(known)
    if isinstance(name, str) and name in choices:
        return
    close = _nearest(str(name).lower(), choices)
    article = "an" if kind[0] in "aeiou" else "a"
    what = f"unknown {kind} {name!r}"
    rule = f"{article} {kind} is one of {', '.join(choices)}"
    fix = f"did you mean {' or '.join(close)}?" if close else f"pick {article} {kind} from that list"
    raise UnknownNameError(message(what, rule=rule, fix=fix))
