"""Compilation of the Hopper kernels, and of no others, by the ptxas that `_ptxas` chose.

A launch carries `options()`. During the launch a hook of Triton replaces the last stage of compilation. The version of
ptxas is in the option `ptx_options`, part of Triton's cache key in memory and on disk, so that code of two versions is
never mixed up. The marker is not an option of any ptxas: if the hook is lost, the launch fails instead of storing code
of the default ptxas under another version. Cost: 4 us per launch on a slow CPU.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import env
from ..errors import PtxasError, refuse
from ..registry import log
from . import _ptxas
from ._ptxas import SETTING, Ptxas

_MARKER = "--blockscale-ptxas="
_by_marker: dict[str, Ptxas] = {}


def options() -> dict[str, Any]:
    """Launch options that select the chosen ptxas; empty for Triton's own."""
    return _options(env.get(SETTING))


@functools.lru_cache(maxsize=16)
def _options(setting: str) -> dict[str, Any]:
    choice = _ptxas.resolve(setting)
    ptxas = choice.ptxas
    # logged once: this function is cached
    if ptxas is None:
        if any(_ptxas.UNLISTED in refusal for refusal in choice.refused):
            log.warning("the Hopper GEMM is compiled by %s", choice)
        return {}
    log.info("the Hopper GEMM is compiled by %s", choice)
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
        _ptxas.disable(str(error))
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
