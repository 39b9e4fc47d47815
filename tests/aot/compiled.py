"""Compilation without a GPU: a normal launch compiles for any architecture and runs nothing. Readers of its code.

    with compiled_for(90) as kernels:
        blockscale.quantize(x, "mxfp8_e4m3")  # x on the CPU: nothing touches its values
    print(report(kernels[0]))

Calling the library itself gives the signature, alignment, constants and options of a real launch; a handwritten copy
would drift. The Triton wheel contains ptxas and cuobjdump, so nothing else is needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from blockscale import hardware, library, use_backend
from blockscale.casts import _triton
from blockscale.hardware import Capability

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CUOBJDUMP = BINARIES / "cuobjdump"
# The wheel's ptxas that Hopper does not get by default; until 3.8 it is the one for Blackwell.
OTHER_PTXAS = str(BINARIES / ("ptxas-blackwell" if get_ptxas(90).path == str(BINARIES / "ptxas") else "ptxas"))
# Under TRITON_INTERPRET=1 there is nothing to compile, and the choice was made when blockscale was imported.
CAN_COMPILE = not _triton.INTERPRETED and CUOBJDUMP.exists()


class _StandIn:
    """The methods of a Triton driver that the JIT calls before compiling."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # the JIT has one cache and one target per device number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiled_for(arch: int) -> Generator[list[Any]]:
    """Context in which `kernel[grid](...)` compiles for sm_<arch> and runs nothing; yields the compiled kernels.

    Triton's cache is a temporary folder, so that no earlier run is reused.
    """
    compiled: list[Any] = []

    def compile_only(kernel: Any, grid: object) -> Any:
        return lambda *args, **options: compiled.append(kernel.run(*args, grid=grid, warmup=True, **options))

    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), _pretending(arch, compile_only):
        knobs.cache.dir = folder
        yield compiled


def launched(call: Callable[[], object], arch: int) -> set[str]:
    """Names of the kernels that a call launches; nothing is compiled."""
    names: set[str] = set()

    def note(kernel: Any, grid: object) -> Any:
        return lambda *args, **options: names.add(kernel.__name__)

    with _pretending(arch, note):
        call()
    return names


@contextmanager
def _pretending(arch: int, instead: Callable[[Any, object], Any]) -> Generator[None]:
    """Context in which the library treats every tensor as on a GPU sm_<arch>, is forced to its Triton kernels, and
    launches them through `instead`."""
    # each module has its own reference to the function
    users = [module for name, module in sys.modules.items() if name.startswith("blockscale.")]
    users = [module for module in users if getattr(module, "capability", None) is hardware.capability]
    real, launch, active, poison = hardware.capability, KernelInterface.__getitem__, driver._active, library._POISON
    try:
        library._POISON = False  # no kernel writes the outputs, and some are large
        for module in users:
            module.capability = lambda device: Capability("cuda", arch)  # type: ignore[attr-defined]
        KernelInterface.__getitem__ = instead
        driver.set_active(_StandIn(arch))
        with use_backend("triton"):
            yield
    finally:
        driver.set_active(active)
        KernelInterface.__getitem__ = launch
        library._POISON = poison
        for module in users:
            module.capability = real  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Report:
    """Machine code of one kernel. Counts are of static instructions, not of executed ones."""

    kernel: str
    arch: int
    warps: int
    registers: int  # per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per CTA
    loads: dict[int, int]  # from global memory: bits -> instructions
    stores: dict[int, int]
    opcodes: Counter[str]
    stray: tuple[str, ...]  # instructions that read the stack pointer as a value
    values: int  # per thread; 0 if the kernel's tile is not in TILES
    ptx: str

    @property
    def instructions(self) -> int:
        """Number of instructions, without the padding at the end."""
        return self.opcodes.total() - self.opcodes["NOP"]

    @property
    def per_value(self) -> float:
        return self.instructions / self.values if self.values else 0.0

    @property
    def resident_warps(self) -> int:
        """Warps of this kernel that fit in the registers of an SM, which are allocated in units of 8 per thread."""
        return 65536 // (32 * (self.registers + -self.registers % 8)) // self.warps * self.warps


# Constants whose product is the number of values in a CTA's tile; none for the small kernels.
TILES: dict[str, tuple[str, ...]] = {
    "cast_kernel": ("J", "MQ", "BK"),
    "amax_kernel": ("J", "MQ", "BK"),
    "colsum_kernel": (),
    "_rstd_kernel": ("R", "N"),
    "gather_kernel": ("R", "W"),
    "_dequantize_kernel": ("BR", "BL"),
    "_transpose_kernel": ("BR", "BL"),
}
_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def report(compiled: Any) -> Report:
    """Report of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text[:1000]
    codes = _CODE.findall(text)
    opcodes = Counter(code.split(".")[0] for code in codes)
    name, warps = compiled.metadata.name, compiled.metadata.num_warps
    return Report(
        kernel=name,
        arch=compiled.metadata.target.arch,
        warps=warps,
        registers=int(usage[1]),
        # a stack alone is not a spill: some versions of ptxas allocate one for every kernel that uses TMA
        spilled=int(usage[2]) if opcodes["STL"] + opcodes["LDL"] else 0,
        shared=compiled.metadata.shared,
        loads=_widths(codes, "LDG"),
        stores=_widths(codes, "STG"),
        opcodes=opcodes,
        stray=stray_reads(text),
        values=_tile_values(compiled, name) // (32 * warps),
        ptx=compiled.asm["ptx"],
    )


_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
_FRAME = re.compile(r"(?:@!?U?P\w+ )?\S+ R1,")  # set-up of the stack pointer


_PRMT = re.compile(r"PRMT\S* R\d+, (\w+)(?:\.reuse)?, (0x[0-9a-f]+|\w+), (\w+)")


def stray_reads(sass: str) -> tuple[str, ...]:
    """Instructions that read R1, the stack pointer, other than as an address: a value that ptxas lost.

    ptxas 12.8 does so for the halves of two merged conversions when they are split again. It also names R1 for a byte
    of a vector that is never read; such single bytes are allowed.
    """
    reads = [line for line in _LINE.findall(sass) if not _FRAME.match(line)]
    reads = [line for line in reads if re.search(r",.*\bR1\b", re.sub(r"\[[^]]*\]", "", line))]
    return tuple(line for line in reads if not _takes_bytes(line))


def _takes_bytes(line: str) -> bool:
    """Whether a PRMT reads no bytes of R1, or only single ones."""
    found = _PRMT.search(line)
    if found is None or not (found[2].startswith("0x") or found[2] == "RZ"):
        return False
    first, second = found[1] == "R1", found[3] == "R1"
    selector = 0 if found[2] == "RZ" else int(found[2], 16)
    picks = [selector >> 4 * place & 7 for place in range(4)]
    taken = {pick & 3 for pick in picks if (first and pick < 4) or (second and pick >= 4)}
    return not ({0, 1} <= taken or {2, 3} <= taken)


def _widths(codes: list[str], opcode: str) -> dict[int, int]:
    """Instructions by width: `LDG.E.128.CONSTANT` -> 128; without a size 32 bits."""
    sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
    parts = [code.split(".") for code in codes if code.split(".")[0] == opcode]
    counts = Counter(next((sizes[part] for part in words if part in sizes), 32) for words in parts)
    return dict(sorted(counts.items()))


def _tile_values(compiled: Any, name: str) -> int:
    function: JITFunction[Any] = compiled.src.fn
    sizes = [compiled.src.constants[(function.arg_names.index(size),)] for size in TILES.get(name, ())]
    product = 1 if sizes else 0
    for size in sizes:
        product *= size
    return product


_STEPS = {
    "wgmma.wait_group": "mma", "mbarrier.try_wait": "other", "ld.shared": "load", "fence.proxy.async": "fence",
    "mbarrier.arrive.shared": "arrive",
}  # fmt: skip


def released_stages(ptx: str) -> list[str]:
    """For each stage released after its MMA, "fenced" if a proxy fence follows the last load of its scales, else
    "in flight": TMA was seen to overwrite scales that had not been read."""
    found: list[str] = []
    after_mma = loading = False
    for step in re.findall("|".join(map(re.escape, _STEPS)), ptx):
        what = _STEPS[step]
        if what == "arrive" and after_mma:
            found.append("in flight" if loading else "fenced")
        after_mma = what == "mma" or (after_mma and what in ("load", "fence"))
        loading = what == "load" or (loading and what != "fence")
    return found
