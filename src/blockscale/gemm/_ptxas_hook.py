"""How launches of Hopper's product, and no others, are assembled by what `_assembler` chose.

A launch carries `options()`, and while it lasts a hook of Triton's replaces the last stage of compilation. The version
travels in the option `ptx_options`, a part of Triton's cache key in memory and on disk, so that two assemblers, or one
and Triton's default, never answer for each other. The word is no option of any `ptxas`: if the hook is lost, the launch
fails instead of storing the default's code under another's name. Cost: 4 us a launch on a slow CPU.
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
from ..errors import AssemblyError, message
from ..registry import log
from . import _ptxas
from ._ptxas import SETTING, Ptxas

_MARK = "--blockscale-ptxas="
_marked: dict[str, Ptxas] = {}


def options() -> dict[str, Any]:
    """What a launch carries to be assembled by the chosen assembler: nothing for Triton's own."""
    return _options(env.get(SETTING))


@functools.lru_cache(maxsize=16)
def _options(setting: str) -> dict[str, Any]:
    decided = _ptxas.decided(setting)
    taken = decided.assembler
    # told once: the results of this function are kept
    if taken is None:
        if any(_ptxas.UNLISTED in refusal for refusal in decided.refused):
            log.warning("Hopper's product is assembled by %s", decided)
        return {}
    log.info("Hopper's product is assembled by %s", decided)
    from triton.backends.nvidia.compiler import CUDAOptions, get_ptxas, ptx_get_version

    mark = f"{_MARK}{taken.name}"
    _marked[mark] = taken
    # The text stays Triton's, so that the assembler alone differs; an older one may need an older version of PTX.
    version = min(ptx_get_version(get_ptxas(90).version), ptx_get_version(f"{taken.version[0]}.{taken.version[1]}"))
    return {"ptx_version": version, "ptx_options": " ".join(filter(None, (mark, CUDAOptions.ptx_options)))}


def mark() -> str:
    """What tells launches by one assembler from those by another."""
    return options().get("ptx_options", "")


def launch(run: Callable[..., Any]) -> Any:
    """Call `run` with the options of the chosen assembler; if that fails, tell, and from then on use Triton's own.

    An assembler that the user demanded does not fall back.
    """
    carried = options()
    if not carried:
        return run()
    try:
        with _hooked:
            return run(**carried)
    except AssemblyError as error:
        if env.get(SETTING):
            raise
        log.warning("Hopper's product falls back to Triton's default assembler: %s", error)
        _ptxas.give_up(str(error))
        _options.cache_clear()
        return run()


@dataclass(frozen=True)
class _Hook:
    """Replaces the last stage for marked launches. From Triton 3.7 on it is also called without arguments, for what to
    add to keys: nothing of ours, since marked launches have keys of their own."""

    earlier: Callable[..., Any] | None

    def __call__(self, *args: Any) -> Any:
        theirs = self.earlier(*args) if self.earlier is not None else ("", "")
        if args:
            backend, stages, carried = args[:3]
            assembler = _marked.get((getattr(carried, "ptx_options", None) or "").split(" ")[0])
            if assembler is not None:
                arch = f"sm_{backend.target.arch}a"
                stages["cubin"] = lambda ptx, metadata: assemble(assembler, ptx, _flags(assembler, carried), arch)
        return theirs


class _Hooked:
    """Within it the hook stands in front of what was there. Not longer: from Triton 3.7 on the keys of all kernels
    depend on whether there is any hook, so others would be compiled again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0  # threads that launch now
        self.hook: _Hook | None = None

    def __enter__(self) -> None:
        runtime = _runtime()
        with self.lock:
            self.users += 1
            current = runtime.add_stages_inspection_hook
            if current is None or current is not self.hook:
                # mostly the same again
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


def _flags(assembler: Ptxas, carried: Any) -> list[str]:
    """As Triton's own `make_cubin` has them, with its settings for debugging."""
    import triton
    from triton import knobs

    flags = ["-v", "-lineinfo"]
    if knobs.compilation.disable_line_info:
        flags += ["-suppress-debug-info"]
    elif knobs.nvidia.disable_ptxas_opt:
        flags[-1] = "-g"
    if knobs.nvidia.disable_ptxas_opt:
        flags += ["--opt-level", "0"]
    if not carried.enable_fp_fusion:
        flags += ["--fmad=false"]
    # Triton's remedy, since 3.7, for a defect of CUDA 13's
    if assembler.version[0] >= 13 or tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        flags += ["--regAllocOptLevel=2"]
    return flags + carried.ptx_options.split()[1:]


def assemble(assembler: Ptxas, ptx: str, flags: list[str], arch: str) -> bytes:
    """Machine code for `arch`; raises AssemblyError with what the assembler said."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [assembler.path, *flags, f"--gpu-name={arch}", str(source), "-o", str(binary)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            status, said = done.returncode, done.stderr
        except OSError as error:
            status, said = -1, str(error)
        log.debug("%s: %s", assembler, said)
        if status == 0 and binary.exists():
            return binary.read_bytes()
    rule = f"an assembler accepts what Triton writes for {arch}"
    what = f"{assembler} failed with status {status} on Hopper's product: {said.strip()[-2000:]}"
    raise AssemblyError(message(what, rule=rule, fix=f"set {SETTING}=default, and report the text above"))
