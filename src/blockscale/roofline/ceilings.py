"""Ceilings of machines: memory bandwidth and tensor-core FLOP/s, measured or from specifications.

`MEASURED` ceilings come from a run on the machine: a copy, and the vendor's plain products at 8192^3. `NOMINAL` ones
are data sheets: dense rates without sparsity, at clocks and power that no machine sustains; `source` says if no page of
the vendor could be read. Ceilings from `blockscale roofline --measure` are stored in the user's cache and take
precedence over the shipped ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import env
from ..errors import OptionError, check_name, message

Architecture = Literal["ampere", "ada", "hopper", "blackwell"]
Units = Literal["bf16", "fp8", "fp4"]
# (lowest compute capability, its tensor cores)
_ARCHITECTURES: tuple[tuple[int, Architecture], ...] = ((100, "blackwell"), (90, "hopper"), (89, "ada"), (80, "ampere"))


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of one machine.

    bandwidth: bytes per second.  bf16, fp8, fp4: dense FLOP/s, None without such tensor cores.  source: origin of the
    figures.  measured: by a run on such a machine, not from a data sheet.

    >>> MEASURED["h200"].rate("fp8") / MEASURED["h200"].rate("bf16") > 2
    True
    """

    name: str
    architecture: Architecture
    bandwidth: float
    bf16: float
    fp8: float | None
    fp4: float | None
    source: str
    measured: bool = False

    def rate(self, units: Units) -> float:
        """FLOP/s of those tensor cores; raises if the machine has none."""
        found: float | None = getattr(self, units)
        if found is None:
            rule = f"{self.architecture} has units for {', '.join(self.units)}"
            raise OptionError(message(f"{units} units of {self.name}", rule=rule, fix="take the rate of one of those"))
        return found

    @property
    def units(self) -> tuple[Units, ...]:
        """Tensor-core dtypes of the machine, slowest first."""
        every: tuple[Units, ...] = ("bf16", "fp8", "fp4")
        return tuple(name for name in every if getattr(self, name) is not None)

    @property
    def kind(self) -> str:
        return "measured" if self.measured else "nominal"

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {self.rate(name) / 1e12:,.0f} TFLOP/s" for name in self.units)
        return f"{self.name} {self.kind}: {self.bandwidth / 1e12:.3g} TB/s, {rates}"


def _nominal(
    name: str,
    architecture: Architecture,
    tb_s: float,
    tflop_s: tuple[float, float | None, float | None],
    source: str,
) -> Ceilings:
    bf16, fp8, fp4 = (None if rate is None else rate * 1e12 for rate in tflop_s)
    assert bf16 is not None
    return Ceilings(name, architecture, tb_s * 1e12, bf16, fp8, fp4, source)


# Dense rates; vendors print twice as much, "with sparsity". A source names the vendor's page first, then the page that
# the figures were read from.
NOMINAL: Mapping[str, Ceilings] = {
    "a100": _nominal(
        "A100 SXM 80 GB", "ampere", 2.039, (312, None, None),
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf, read in https://glennklockwood.com/garden/processors/A100",
    ),
    "h100": _nominal(
        "H100 SXM", "hopper", 3.35, (989.4, 1978.9, None),
        "https://www.nvidia.com/en-us/data-center/h100/, read in https://glennklockwood.com/garden/processors/h100",
    ),
    "h800": _nominal(
        "H800 SXM", "hopper", 3.35, (989.4, 1978.9, None),
        "not verified: no page of the vendor was found; the H100's figures, as "
        "https://www.philisun.com/technical-analysis/"
        "nvidia-h800-vs-h100-a-technical-deep-dive-into-politically-defined-ai-chips/ says (NVLink and FP64 differ)",
    ),
    "h200": _nominal(
        "H200 SXM", "hopper", 4.8, (989.4, 1978.9, None),
        "https://www.nvidia.com/en-us/data-center/h200/, read in "
        "https://github.com/stas00/ml-engineering/blob/master/insights/when-to-upgrade-gpus/README.md",
    ),
    "b200": _nominal(
        "B200 SXM", "blackwell", 8.0, (2250, 4500, 9000),
        "https://www.nvidia.com/en-us/data-center/hgx/, read in https://glennklockwood.com/garden/processors/B200 "
        "(at 1,000 W)",
    ),
    "gb200": _nominal(
        "one GPU of a GB200", "blackwell", 8.0, (2500, 5000, 10000),
        "https://www.nvidia.com/en-us/data-center/gb200-nvl72/, read in "
        "https://glennklockwood.com/garden/processors/B200 (at 1,200 W; half of a superchip)",
    ),
    "l20": _nominal(
        "L20", "ada", 0.864, (119.5, 239, None),
        "no page of the vendor was found; a seller's list as printed by https://www.tomshardware.com/pc-components/gpus/"
        "new-nvidia-ai-gpus-designed-to-get-around-us-export-bans-come-to-china-h20-l20-and-l2-to-fill-void-left-by-"
        "restricted-models",
    ),
    "rtx5090": _nominal(
        "RTX 5090", "blackwell", 1.792, (209.5, 419, 1676),
        "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf, sums "
        "in fp32,, read in https://main-horse.github.io/posts/5090-mm-perf, where more than that was measured",
    ),
}  # fmt: skip

# One run each: copies of 16384x8192; bf16 and rowwise FP8 products with fast accumulation, in rows of 1x128 @ 128x128.
MEASURED: Mapping[str, Ceilings] = {
    "h200": Ceilings(
        "H200", "hopper", 4.2e12, 681.6e12, 1397.4e12, None,
        "benchmarks/results/casts-h200.jsonl (commit 3a7a2a0) and gemm-h200.jsonl (commit cb11969)",
        measured=True,
    )
}  # fmt: skip


def nominal(machine: str) -> Ceilings:
    """The specification of a machine by its short name.

    >>> print(nominal("h200"))
    H200 SXM nominal: 4.8 TB/s, bf16 989 TFLOP/s, fp8 1,979 TFLOP/s
    """
    check_name(machine, NOMINAL, "machine")
    return NOMINAL[machine]


def measured(machine: str) -> Ceilings | None:
    """Measured ceilings of a machine: the user's own, else the shipped ones, else None.

    >>> measured("b200") is None
    True
    """
    check_name(machine, NOMINAL, "machine")
    return load(file_of(machine)) or MEASURED.get(machine)


def machine_of(gpu: str) -> str | None:
    """Short name of the machine for a driver's GPU name; None if it is not in the table.

    >>> machine_of("NVIDIA H200"), machine_of("NVIDIA GeForce RTX 5090"), machine_of("NVIDIA GB200"), machine_of("T4")
    ('h200', 'rtx5090', 'gb200', None)
    """
    plain = re.sub("[^a-z0-9]", "", gpu.lower())
    found = [name for name in NOMINAL if name in plain]
    return max(found, key=len) if found else None


def architecture_of(sm: int) -> Architecture | None:
    """Tensor-core architecture of a compute capability, None before sm_80.

    >>> architecture_of(90), architecture_of(120), architecture_of(75)
    ('hopper', 'blackwell', None)
    """
    return next((name for least, name in _ARCHITECTURES if sm >= least), None)


# ---- the user's own measurements -------------------------------------------------------------------------------------


def file_of(machine: str) -> Path:
    """File of the user's own ceilings of a machine."""
    return env.cache_folder("ceilings") / f"{machine}.json"


def store(path: Path, found: Ceilings) -> None:
    """Write measured ceilings; the file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(json.dumps(dataclasses.asdict(found)) + "\n")
    os.replace(fresh, path)


def load(path: Path) -> Ceilings | None:
    """Stored ceilings, None without a file; raises if the file holds something else."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        fields: dict[str, Any] = json.loads(text)
        found = Ceilings(**fields)
        check_name(found.architecture, [name for _, name in _ARCHITECTURES], "architecture")
        rates = [found.bandwidth, found.bf16, *(rate for rate in (found.fp8, found.fp4) if rate is not None)]
        if not all(0 < float(rate) < math.inf for rate in rates):
            raise ValueError(f"rates {rates}")
    except (TypeError, ValueError) as error:
        rule = "it holds the ceilings that were measured on this machine"
        fix = "delete it, or measure again: blockscale roofline --measure"
        raise OptionError(message(f"{path}: {error}", rule=rule, fix=fix)) from None
    return found
