"""Choice of the ptxas for the Hopper GEMM: versions from 12.9 on schedule it better than the one of Triton 3.6.

Order: the environment variable, Triton's own if it is new enough, the other one in Triton's wheel. A ptxas is taken if
`ALLOWED` lists it and the driver can load its code; else Triton's default stays. `choice()` gives the ptxas and the
reason. `_ptxas_hook.py` applies it to launches.

Cost: a few `ptxas --version`, once. Triton is imported late, since `doctor` also runs without it.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..errors import refuse
from ..hardware import cuda_driver

Version = tuple[int, int, int]

SETTING = "BLOCKSCALE_PTXAS"
TRITON_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
# the first that lets the two warps of a scheduler alternate in their accumulation (docs/design/gemm.md)
MIN_VERSION: Version = (12, 9, 0)

# (Triton, ptxas) pairs beside Triton's own, with the evidence. A pair enters only after tests/gemm/test_hopper.py
# passed with it on a GPU, and leaves when a test fails: ptxas has miscompiled, and each Triton emits other PTX.
ALLOWED: dict[tuple[tuple[int, int], Version], str] = {
    ((3, 6), (12, 9, 86)): "tests/gemm/test_hopper.py passed on an H200",
}


@dataclass(frozen=True)
class Ptxas:
    """A ptxas that answers `--version`: path, version, and where it was found."""

    path: str
    version: Version
    origin: str = ""

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))

    def __str__(self) -> str:
        return f"ptxas {self.name} ({self.origin or self.path})"


@dataclass(frozen=True)
class Choice:
    """The ptxas to use, or None for Triton's own; the reason; and the refused ones with their reasons."""

    ptxas: Ptxas | None
    reason: str
    refused: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name and version without a path, for benchmark results."""
        return f"ptxas {self.ptxas.name}" if self.ptxas else "Triton's ptxas"

    def __str__(self) -> str:
        taken = str(self.ptxas) if self.ptxas else "Triton's default"
        return "; ".join((f"{taken}: {self.reason}", *self.refused))


@functools.lru_cache(maxsize=64)
def version_of(path: str) -> Version | None:
    """Version by `ptxas --version`, such as (12, 9, 86); None if it does not answer."""
    try:
        command = [path, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def probe(places: Iterable[tuple[str, str]]) -> list[Ptxas]:
    """Each ptxas among (origin, path) that answers, in the same order."""
    return [Ptxas(path, version, origin) for origin, path in places if (version := version_of(path)) is not None]


def choose(candidates: Iterable[Ptxas], own: str, triton: tuple[int, int], driver: int | None) -> Choice:
    """First candidate without an objection. own: path of Triton's default, which needs no entry in `ALLOWED`."""
    refused: list[str] = []
    for candidate in candidates:
        if candidate.path == own and candidate.version >= MIN_VERSION:
            return Choice(None, f"{candidate} is new enough", tuple(refused))
        objection = _objection(candidate, triton, driver)
        if objection is None:
            why = f"the first that is new enough, loadable and allowed ({ALLOWED[triton, candidate.version]})"
            return Choice(candidate, f"{candidate} is {why}", tuple(refused))
        refused.append(f"{candidate} {objection}")
    return Choice(None, "no better one is usable", tuple(refused))


UNLISTED = "is not allowed with Triton"


def _objection(candidate: Ptxas, triton: tuple[int, int], driver: int | None) -> str | None:
    if candidate.version < MIN_VERSION:
        return f"is older than {MIN_VERSION[0]}.{MIN_VERSION[1]}"
    if driver is None:
        return "needs a driver to compare versions with, and there is none"
    if candidate.version[0] > driver:
        return f"writes code for drivers from CUDA {candidate.version[0]} on, and this driver is of CUDA {driver}"
    if (triton, candidate.version) not in ALLOWED:
        return f"{UNLISTED} {triton[0]}.{triton[1]}"
    return None


def choice() -> Choice:
    """The ptxas that this process uses for the Hopper GEMM, and why."""
    return resolve(env.get(SETTING))


_failures: list[str] = []


def disable(reason: str) -> None:
    """Record a failed compilation: from now on this process uses Triton's ptxas, unless the user forces another."""
    _failures.append(reason)
    resolve.cache_clear()


@functools.lru_cache(maxsize=16)
def resolve(setting: str) -> Choice:
    """Choice under a value of BLOCKSCALE_PTXAS. It precedes Triton's variables: it is about this GEMM alone, and torch
    sometimes sets Triton's itself."""
    if setting == "default":
        return Choice(None, f"{SETTING} says so")
    if setting:
        return Choice(_forced(setting, cuda_driver()), f"{SETTING} says so")
    if _failures:
        return Choice(None, _failures[-1])
    named = [f"{name}={value}" for name in TRITON_VARIABLES if (value := env.of_others(name))]
    if named:
        return Choice(None, f"{' and '.join(named)} is set, and Triton obeys it")
    try:
        import triton

        from ..launch.triton_internals import own_ptxas

        own = own_ptxas().path
        release = re.match(r"(\d+)\.(\d+)", triton.__version__)
    except (ImportError, AttributeError) as error:
        return Choice(None, f"this Triton does not say which ptxas it uses ({error})")
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if Path(own).parent != binaries or release is None:
        return Choice(None, f"Triton was told to use {own}")
    found = probe(_places(own, binaries))
    return choose(found, own, (int(release[1]), int(release[2])), cuda_driver())


def _forced(setting: str, driver: int | None) -> Ptxas:
    """The ptxas that the user forces. It need not be listed, but must answer, and the driver must load its code."""
    path = shutil.which(setting) or setting
    version = version_of(path)
    if version is not None and (driver is None or version[0] <= driver):
        return Ptxas(path, version, SETTING)
    if version is None:
        what = f"{SETTING}={setting!r} does not answer `--version` like a ptxas"
    else:
        what = f"{SETTING}={setting!r} is of CUDA {version[0]}, and the driver is of CUDA {driver}"
    rule = "it is 'default' or the path of a ptxas that runs here and is not of a later CUDA than the driver"
    refuse(what, rule, "correct the path, or unset the variable")


def _places(own: str, binaries: Path) -> list[tuple[str, str]]:
    """Candidates in Triton's wheel, best first: (origin, path)."""
    others = (str(binaries / name) for name in ("ptxas-blackwell", "ptxas"))
    return [("Triton's for Hopper", own), *(("Triton's for other GPUs", path) for path in others if path != own)]
