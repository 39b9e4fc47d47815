"""The ptxas of the Hopper GEMMs: its choice, and compilation of these kernels, and of no others, by it.

Versions from 12.9 on schedule the kernels better than the one of Triton 3.6. Order: the environment variable, Triton's
own if it is new enough, the other one in Triton's wheel. A ptxas is taken if `ALLOWED` lists it and the driver can load
its code; else Triton's default stays. `choice()` gives the ptxas and the reason: a few `ptxas --version`, once.

A launch carries `options()`. During the launch a hook of Triton replaces the last stage of compilation. The version of
ptxas is in the option `ptx_options`, part of Triton's cache key in memory and on disk, so that code of two versions is
never mixed up. The marker is not an option of any ptxas: if the hook is lost, the launch fails instead of storing code
of the default ptxas under another version. Cost: 4 us per launch on a slow CPU.

Triton is imported late, since `doctor` also runs without it.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env
from ..errors import PtxasError, refuse
from ..hardware import cuda_driver
from ..registry import log

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


# ---- launches --------------------------------------------------------------------------------------------------------


_MARKER = "--blockscale-ptxas="
_by_marker: dict[str, Ptxas] = {}


def options() -> dict[str, Any]:
    """Launch options that select the chosen ptxas; empty for Triton's own."""
    return _options(env.get(SETTING))


@functools.lru_cache(maxsize=16)
def _options(setting: str) -> dict[str, Any]:
    chosen = resolve(setting)
    ptxas = chosen.ptxas
    # logged once: this function is cached
    if ptxas is None:
        if any(UNLISTED in refusal for refusal in chosen.refused):
            log.warning("the Hopper GEMM is compiled by %s", chosen)
        return {}
    log.info("the Hopper GEMM is compiled by %s", chosen)
    from ..launch.triton_internals import own_ptxas, ptx_version

    marker = f"{_MARKER}{ptxas.name}"
    _by_marker[marker] = ptxas
    # The PTX stays Triton's, so that only ptxas differs; an older one may need an older PTX version.
    own = own_ptxas()
    version = min(own.ptx_version, ptx_version(f"{ptxas.version[0]}.{ptxas.version[1]}"))
    return {"ptx_version": version, "ptx_options": " ".join(filter(None, (marker, own.options)))}


def launch(run: Callable[..., Any]) -> Any:
    """Call `run` with the options of the chosen ptxas; if that fails, log it, and from then on use Triton's own.

    A ptxas that the user forces does not fall back.
    """
    selected = options()
    if not selected:
        return run()
    try:
        with _hooked:
            return run(**selected)
    except PtxasError as error:
        if env.get(SETTING):
            raise
        log.warning("the Hopper GEMM falls back to Triton's default ptxas: %s", error)
        disable(str(error))
        _options.cache_clear()
        return run()


@dataclass(frozen=True)
class _Hook:
    """Replaces the last compilation stage of marked launches. From Triton 3.7 on it is also called without arguments,
    for additions to the cache key: none here, since marked launches have their own keys."""

    earlier: Callable[..., Any] | None

    def __call__(self, *args: Any) -> Any:
        theirs = self.earlier(*args) if self.earlier is not None else ("", "")
        if args:
            backend, stages, options = args[:3]
            ptxas = _by_marker.get((getattr(options, "ptx_options", None) or "").split(" ")[0])
            if ptxas is not None:
                arch = f"sm_{backend.target.arch}a"
                stages["cubin"] = lambda ptx, metadata: assemble(ptxas, ptx, _flags(ptxas, options), arch)
        return theirs


class _Hooked:
    """Context in which the hook wraps an existing one. Removed afterwards: from Triton 3.7 on the cache keys of all
    kernels depend on whether there is a hook, so other kernels would be compiled again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0  # threads inside a launch
        self.hook: _Hook | None = None

    def __enter__(self) -> None:
        runtime = _runtime()
        with self.lock:
            self.users += 1
            current = runtime.add_stages_inspection_hook
            if current is None or current is not self.hook:
                if self.hook is None or self.hook.earlier is not current:
                    self.hook = _Hook(current)
                runtime.add_stages_inspection_hook = self.hook

    def __exit__(self, *_: object) -> None:
        runtime = _runtime()
        with self.lock:
            self.users -= 1
            if not self.users and self.hook is not None and runtime.add_stages_inspection_hook is self.hook:
                runtime.add_stages_inspection_hook = self.hook.earlier


@functools.cache
def _runtime() -> Any:
    from triton import knobs

    return knobs.runtime


_hooked = _Hooked()


def _flags(ptxas: Ptxas, options: Any) -> list[str]:
    """Flags of ptxas as in Triton's `make_cubin`, with its debugging knobs."""
    import triton
    from triton import knobs

    flags = ["-v", "-lineinfo"]
    if knobs.compilation.disable_line_info:
        flags += ["-suppress-debug-info"]
    elif knobs.nvidia.disable_ptxas_opt:
        flags[-1] = "-g"
    if knobs.nvidia.disable_ptxas_opt:
        flags += ["--opt-level", "0"]
    if not options.enable_fp_fusion:
        flags += ["--fmad=false"]
    # Triton's workaround, since 3.7, for a defect of CUDA 13
    if ptxas.version[0] >= 13 or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        flags += ["--regAllocOptLevel=2"]
    return flags + options.ptx_options.split()[1:]


def assemble(ptxas: Ptxas, ptx: str, flags: list[str], arch: str) -> bytes:
    """Cubin for `arch`; raises PtxasError with the messages of ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [ptxas.path, *flags, f"--gpu-name={arch}", str(source), "-o", str(binary)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            status, said = done.returncode, done.stderr
        except OSError as error:
            status, said = -1, str(error)
        log.debug("%s: %s", ptxas, said)
        if status == 0 and binary.exists():
            return binary.read_bytes()
    rule = f"ptxas accepts the PTX that Triton emits for {arch}"
    what = f"{ptxas} failed with status {status} on the Hopper GEMM: {said.strip()[-2000:]}"
    refuse(what, rule, fix=f"set {SETTING}=default, and report the text above", error=PtxasError)
