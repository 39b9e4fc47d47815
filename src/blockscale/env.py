"""The only reader of `os.environ`: every BLOCKSCALE_* variable is declared here once, with its help text.

`get(name)` reads at call time, so a variable that is set later in the process still counts. `blockscale doctor` prints
the table; a variable that starts with BLOCKSCALE_ and is not declared here is reported there as a likely typo.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "BLOCKSCALE_"


@dataclass(frozen=True)
class Variable:
    """One setting: its name, what it does, and its value when unset."""

    name: str
    help: str
    default: str = ""


VARIABLES: tuple[Variable, ...] = (
    Variable("BLOCKSCALE_BACKEND", "force this backend for every operation that it implements, as use_backend() does"),
    Variable("BLOCKSCALE_CHECK", "1: check starts and ends of groups on the GPU; a wrong one stops the program", "0"),
    Variable("BLOCKSCALE_CHECK_RANKS", "1: compare every call of parallel layers among ranks, also on GPUs", "0"),
    Variable("BLOCKSCALE_CHECK_WEIGHTS", "1: compare shared casts of weights with the weights in every forward", "0"),
    Variable("BLOCKSCALE_LOG", "print messages of this level and above: debug, info, warning or error"),
    Variable("BLOCKSCALE_POISON", "1: fill outputs with NaN bytes before a kernel writes them (debugging, tests)", "0"),
    Variable("BLOCKSCALE_PTXAS", "ptxas for Hopper's product: default for Triton's own, or a path"),
    Variable("BLOCKSCALE_REQUIRE_GPU", "1: GPU tests fail instead of skipping when there is no GPU", "0"),
    Variable("BLOCKSCALE_TUNED", "folder of your tuned plans, instead of the one in the cache; off: use no tuned plan"),
)
_DECLARED = {variable.name: variable for variable in VARIABLES}


# The dict behind os.environ: os.environ raises and catches for an unset name, which takes microseconds in every call.
_ENVIRON: dict[Any, Any] = os.environ._data  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
_KEYS = {variable.name: os.environ.encodekey(variable.name) for variable in VARIABLES}


def get(name: str) -> str:
    """The value of a declared variable, stripped; its default when unset."""
    return os.environ[name].strip() if _KEYS[name] in _ENVIRON else _DECLARED[name].default


def flag(name: str) -> bool:
    """Whether a declared on/off variable is on."""
    return get(name).lower() in {"1", "true", "yes", "on"}


def of_others(name: str) -> str:
    """The value of another program's variable, stripped; empty when unset."""
    return os.environ.get(name, "").strip()


def suggest_to_others(name: str, value: str) -> None:
    """Set another library's variable unless it is set; call before that library is imported."""
    os.environ.setdefault(name, value)


def cache_folder(name: str) -> Path:
    """The user's cache folder for one kind of file; it may not exist yet."""
    cache = of_others("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(os.path.expanduser(cache), "blockscale", name)


def current() -> dict[str, str]:
    """Declared variables that are set now, with their values."""
    return {name: os.environ[name] for name in _DECLARED if name in os.environ}


def undeclared() -> list[str]:
    """Variables with the prefix BLOCKSCALE_ that are not declared: usually typos."""
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in _DECLARED)
