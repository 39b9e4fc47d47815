"""Newer assemblers schedule Hopper's product better than the one of Triton 3.6; this picks one that is safe to use.

The user wins; then, best first, Triton's own if it is new enough, the other one in Triton's wheel, the CUDA toolkit's.
One is taken if it stands in `ALLOWED` and the driver can load what it writes; else Triton's default stays. `choice()`
says what and why. How a launch gets it is in `_ptxas_hook.py`.

Cost: a few `ptxas --version`, once. Triton is imported late, since `doctor` asks also where there is none.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import env
from ..errors import OptionError, message
from ..hardware import cuda_driver

Version = tuple[int, int, int]

SETTING = "BLOCKSCALE_PTXAS"
FOREIGN = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
# the first that lets the two warps of a scheduler alternate between their sums (docs/design/gemm.md)
WORTH_IT: Version = (12, 9, 0)

# (Triton, assembler) beside Triton's own: what was run. A pair enters only after tests/gemm/test_hopper.py passed with
# it on a GPU, and leaves when anything fails: assemblers miscompile, and each Triton gives them other code.
ALLOWED: dict[tuple[tuple[int, int], Version], str] = {
    ((3, 6), (12, 9, 86)): "tests/gemm/test_hopper.py passed on an H200",
}


@dataclass(frozen=True)
class Ptxas:
    """A `ptxas` that answered: where it is, its version, and how it was found."""

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
    """The assembler to use, or None for Triton's own; why; and what was passed over, with the reason of each."""

    assembler: Ptxas | None
    reason: str
    refused: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name alone, for results: no folders of somebody's machine."""
        return f"ptxas {self.assembler.name}" if self.assembler else "Triton's ptxas"

    def __str__(self) -> str:
        taken = str(self.assembler) if self.assembler else "Triton's default"
        return "; ".join((f"{taken}: {self.reason}", *self.refused))


@functools.lru_cache(maxsize=64)
def version_of(path: str) -> Version | None:
    """What `ptxas --version` says, (12, 9, 86) for instance; None if it does not answer."""
    try:
        command = [path, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def answering(places: Iterable[tuple[str, str]]) -> list[Ptxas]:
    """The assemblers among (origin, path) that answer, in the same order, each version once."""
    found: dict[Version, Ptxas] = {}
    for origin, path in places:
        version = version_of(path)
        if version is not None:
            found.setdefault(version, Ptxas(path, version, origin))
    return list(found.values())


def choose(candidates: Iterable[Ptxas], own: str, triton: tuple[int, int], driver: int | None) -> Choice:
    """The first candidate that nothing speaks against. own: the path of Triton's, which needs no choosing."""
    refused: list[str] = []
    for candidate in candidates:
        if candidate.path == own and candidate.version >= WORTH_IT:
            return Choice(None, f"{candidate} is new enough", tuple(refused))
        against = _against(candidate, triton, driver)
        if against is None:
            why = f"the first that is new enough, loads and is allowed ({ALLOWED[triton, candidate.version]})"
            return Choice(candidate, f"{candidate} is {why}", tuple(refused))
        refused.append(f"{candidate} {against}")
    return Choice(None, "nothing better can be used", tuple(refused))


UNLISTED = "is not among those allowed with Triton"


def _against(candidate: Ptxas, triton: tuple[int, int], driver: int | None) -> str | None:
    if candidate.version < WORTH_IT:
        return f"is older than {WORTH_IT[0]}.{WORTH_IT[1]}"
    if driver is None:
        return "may not suit the driver, and there is none to ask"
    if candidate.version[0] > driver:
        return f"writes code for a driver of CUDA {candidate.version[0]}, and this one is of CUDA {driver}"
    if (triton, candidate.version) not in ALLOWED:
        return f"{UNLISTED} {triton[0]}.{triton[1]}"
    return None


def choice() -> Choice:
    """What this process uses for Hopper's product, and why."""
    return decided(env.get(SETTING))


_failures: list[str] = []


def give_up(reason: str) -> None:
    """An assembler failed on code that it should take: from now on this process uses Triton's, but for a demand."""
    _failures.append(reason)
    decided.cache_clear()


@functools.lru_cache(maxsize=16)
def decided(setting: str) -> Choice:
    """A demand comes first: it is about this product alone, and torch sets Triton's variables by itself at times."""
    if setting == "default":
        return Choice(None, f"{SETTING} says so")
    if setting:
        return Choice(_demanded(setting, cuda_driver()), f"{SETTING} says so")
    if _failures:
        return Choice(None, _failures[-1])
    named = [f"{name}={value}" for name in FOREIGN if (value := env.of_others(name))]
    if named:
        return Choice(None, f"{' and '.join(named)} is set, which Triton follows")
    try:
        import triton
        from triton.backends.nvidia.compiler import get_ptxas

        own = get_ptxas(90).path
        release = re.match(r"(\d+)\.(\d+)", triton.__version__)
    except (ImportError, AttributeError) as error:
        return Choice(None, f"this Triton does not say which assembler it uses ({error})")
    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if Path(own).parent != binaries or release is None:
        return Choice(None, f"Triton was told to use {own}")
    found = answering(_places(own, binaries))
    return choose(found, own, (int(release[1]), int(release[2])), cuda_driver())


def _demanded(setting: str, driver: int | None) -> Ptxas:
    """The assembler that the user names. It need not be listed, but it has to answer and the driver has to load it."""
    path = shutil.which(setting) or setting
    version = version_of(path)
    if version is not None and (driver is None or version[0] <= driver):
        return Ptxas(path, version, SETTING)
    if version is None:
        what = f"{SETTING}={setting!r} does not answer `--version` as an assembler does"
    else:
        what = f"{SETTING}={setting!r} is of CUDA {version[0]}, and the driver is of CUDA {driver}"
    rule = "it is 'default' or the path of a ptxas that runs here and is not of a later CUDA than the driver"
    raise OptionError(message(what, rule=rule, fix="correct the path, or unset the variable"))


def _places(own: str, binaries: Path) -> Iterator[tuple[str, str]]:
    """Where assemblers may be, best first: (origin, path)."""
    yield "Triton's for Hopper", own
    for path in (binaries / "ptxas-blackwell", binaries / "ptxas"):
        if str(path) != own:
            yield "Triton's for other GPUs", str(path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if folder := env.of_others(name):
            yield name, str(Path(folder) / "bin" / "ptxas")
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        for folder in _package_folders(package):
            yield f"package {package}", str(Path(folder) / "bin" / "ptxas")
    if path := shutil.which("ptxas"):
        yield "PATH", path


def _package_folders(name: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of the package around it
        return []
    return list(spec.submodule_search_locations or ()) if spec else []
