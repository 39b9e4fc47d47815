"""Every way a call can fail, one class per kind, and the checks that are shared by several rooms.

A message always has three parts: what was wrong (with the value), the rule it breaks, and what to do instead.
User mistakes are `ValueError`s, things nobody has built are `NotImplementedError`s; `assert` is for our own invariants.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BlockscaleError(Exception):
    """Base of all errors raised on purpose by this library."""

    def __init__(self, what: str, *, rule: str = "", fix: str = "") -> None:
        parts = [what, rule and f"Rule: {rule}", fix and f"Fix: {fix}"]
        super().__init__(" ".join(part if part[-1] in ".?!\n" else part + "." for part in parts if part))


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


class OptionError(BlockscaleError, ValueError):
    """An option that exists but makes no sense for this format."""


class DeviceError(BlockscaleError, ValueError):
    """Operands that live on different devices."""


class PairError(BlockscaleError, NotImplementedError):
    """Two formats that no product combines."""


class BackendError(BlockscaleError, NotImplementedError):
    """No kernel in the table can serve this request."""


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
    close = difflib.get_close_matches(str(name).lower(), choices, n=3, cutoff=0.4)
    raise UnknownNameError(
        f"unknown {kind} {name!r}",
        rule=f"a {kind} is one of {', '.join(choices)}",
        fix=f"did you mean {' or '.join(close)}?" if close else f"pick a {kind} from that list",
    )
