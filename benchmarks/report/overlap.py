"""Overlapped products in the form of the Flux performance report: published, modelled and measured times side by side.

A cell ends in its basis: p, published by Flux for eight GPUs; m, modelled by `blockscale roofline overlap`. Measured
times are one rank's share on one H200 over PCIe, from stored rows of `blockscale bench overlap`; they are another link,
so they have lines or columns of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from blockscale.bench.overlaps import ONE
from blockscale.bench.shapes import Mixture
from blockscale.bench.store import Row
from blockscale.bench.suites.overlap import Named, named
from blockscale.roofline import Prediction, overlap_gain, overlap_machine
from blockscale.roofline.calibration import FLUX_ROWS, PublishedRow
from blockscale.roofline.overlap import Operation

from .tables import provenance, table

SUITE = "overlap"
NOT_MEASURED = "not measured"
MEASURED_ON = "1 H200, PCIe 5"
MACHINES = {"l20": "8 L20, PCIe 4", "h800": "8 H800, NVLink", "h200": "8 H200, NVLink"}
PAYLOADS = {"bf16": "bf16", "fp8_blockwise_pow2": "FP8"}
OPERATIONS: dict[Operation, str] = {"all_gather_mm": "AG+GEMM", "mm_reduce_scatter": "GEMM+RS"}
LAYERS: dict[Operation, str] = {"all_gather_grouped_mm": "layer 0", "grouped_mm_reduce_scatter": "layer 1"}
_DENSE_SIZES: dict[Operation, tuple[int, int, int]] = {
    "all_gather_mm": (4096, 49152, 12288),
    "mm_reduce_scatter": (4096, 12288, 49152),
}


class Published(NamedTuple):
    """Milliseconds of a product, of its exposed communication, and of both, in torch (NCCL) and in Flux."""

    torch: tuple[float, float, float]
    flux: tuple[float, float, float]


# L20: Flux's docs/performance.md; H800: its docs/performance_report.md of 2024
_DENSE: dict[tuple[Operation, str], Published] = {
    ("all_gather_mm", "l20"): Published((5.746, 11.200, 16.946), (5.316, 0.587, 5.903)),
    ("mm_reduce_scatter", "l20"): Published((5.392, 12.273, 17.664), (5.389, 0.341, 5.730)),
    ("all_gather_mm", "h800"): Published((0.846, 0.583, 1.429), (0.814, 0.143, 0.957)),
    ("mm_reduce_scatter", "h800"): Published((0.818, 0.590, 1.408), (0.822, 0.111, 0.932)),
}

# experts, experts of a token, features, hidden units; and layers
MODELS: dict[str, tuple[Mixture, int]] = {
    "Mixtral 8x7B": (Mixture(8, 2, 4096, 14336), 32),
    "Qwen1.5-MoE-A2.7B": (Mixture(60, 4, 2048, 1408), 24),
}
TOKENS = 8192
# what `overlap="auto"` chooses, by whether it pays in layers 0 and 1
_CHOICES = {(True, True): "on", (True, False): "on in layer 0", (False, True): "on in layer 1", (False, False): "off"}
# options of `blockscale roofline overlap` that need not be written
_DEFAULTS = ("--tp 8", "--ep 1", "--experts 32", "--topk 4")


def dense_table(rows: Sequence[Row]) -> str:
    """AG+GEMM and GEMM+RS: a line for each implementation and machine."""
    head = ["", "GPUs", "GEMM ms", "exposed ms", "total ms", "command"]
    lines: list[list[str]] = []
    for op, title in OPERATIONS.items():
        m, n, k = _DENSE_SIZES[op]
        for machine, gpus in MACHINES.items():
            if (published := _DENSE.get((op, machine))) is not None:
                for name, ms in zip(("torch", "Flux"), published, strict=True):
                    times = [f"{each:.3f} p" for each in ms]
                    lines.append([f"{title}, {name} fp16", gpus, *times, "Flux's report"])
            for payload, name in PAYLOADS.items():
                found = overlap_gain(op, m, n, k, tp=8, machine=overlap_machine(machine), payload=payload)
                command = f"`blockscale roofline overlap --op {op} --machine {machine} --payload {payload}`"
                lines.append([f"{title}, ours {name}", gpus, *_modelled(found), command])
        for payload, name in PAYLOADS.items():
            times = _measured(rows, Named(op, (m, n, k), 8, 1, 1, 1), payload)
            command = f"`blockscale bench overlap --op {op} --payload {payload}`"
            lines.append([f"{title}, ours {name}", MEASURED_ON, *times, command])
    return _with_provenance(rows, OPERATIONS, table(head, lines))


def experts_table(rows: Sequence[Row]) -> str:
    """Layers 0 and 1 of a mixture: a line for each case and machine."""
    head = ["", "GPUs", "torch", "Flux"]
    for name in PAYLOADS.values():
        head += [f"{name} GEMM", "exposed", "total"]
    head.append("command")
    lines: list[list[str]] = []
    published = {(_case(row), row.machine): row for row in FLUX_ROWS}
    for case in dict.fromkeys(_case(row) for row in FLUX_ROWS if row.experts > 1):
        label = f"{LAYERS[case.op]}, TP {case.tp} EP {case.ep}, E={case.experts} k={case.topk}"
        options = " ".join([f"--op {case.op}", *(text for text in _options(case) if text not in _DEFAULTS)])
        for machine, gpus in MACHINES.items():
            row = published.get((case, machine))
            theirs = (
                ["-", "-"] if row is None else [f"{1e3 * (row.serial or 0):.3f} p", f"{1e3 * row.overlapped:.3f} p"]
            )
            ours: list[str] = []
            for payload in PAYLOADS:
                found = overlap_gain(
                    case.op, *case.sizes, tp=case.tp, ep=case.ep, experts=case.experts, topk=case.topk,
                    machine=overlap_machine(machine), payload=payload,
                )  # fmt: skip
                ours += _modelled(found)
            on = "" if machine == "h200" else f" --machine {machine}"
            lines.append([label, gpus, *theirs, *ours, f"`blockscale roofline overlap {options}{on}`"])
        times = [cell for payload in PAYLOADS for cell in _measured(rows, case, payload)]
        if any(cell not in ("-", NOT_MEASURED) for cell in times):
            command = f"`blockscale bench overlap {options} --payload {','.join(PAYLOADS)}`"
            lines.append([label, MEASURED_ON, "-", "-", *times, command])
    if not any(line[1] == MEASURED_ON for line in lines):
        lines.append(["all", MEASURED_ON, "-", "-", *["-", "-", NOT_MEASURED] * len(PAYLOADS), "-"])
    return _with_provenance(rows, LAYERS, table(head, lines))


def models_table(rows: Sequence[Row]) -> str:
    """Forward of all experts of a model, both layers, with overlap off and on, and what `auto` chooses."""
    head = ["model", "GPUs"]
    for name in PAYLOADS.values():
        head += [f"{name}, off", "on", "off / on", "auto"]
    lines: list[list[str]] = []
    for model, (mixture, layers) in MODELS.items():
        for machine, gpus in MACHINES.items():
            cells: list[str] = []
            for payload in PAYLOADS:
                found = forward(mixture, machine, payload)
                off = sum(each.serial for each in found) * layers
                on = sum(each.overlapped for each in found) * layers
                cells += [f"{1e3 * off:.1f} m", f"{1e3 * on:.1f} m", f"{off / on:.2f}x m", _CHOICES[_pay(found)]]
            lines.append([f"{model}, {layers} layers", gpus, *cells])
    return table(head, lines)


def _pay(found: tuple[Prediction, Prediction]) -> tuple[bool, bool]:
    return found[0].pays, found[1].pays


def forward(mixture: Mixture, machine: str, payload: str) -> tuple[Prediction, Prediction]:
    """Layer 0, with gate and up on one gather, and layer 1 of one mixture on TP 8."""
    experts, topk, features, hidden = mixture
    first, second = LAYERS
    given = {"tp": 8, "experts": experts, "topk": topk}
    of = overlap_machine(machine)
    return (
        overlap_gain(first, TOKENS, 2 * hidden, features, **given, machine=of, payload=payload),
        overlap_gain(second, TOKENS, features, hidden, **given, machine=of, payload=payload),
    )


def _case(row: PublishedRow) -> Named:
    return Named(row.op, (row.m, row.n, row.k), row.tp, row.ep, row.experts, row.topk)


def _options(case: Named) -> list[str]:
    return [f"--tp {case.tp}", f"--ep {case.ep}", f"--experts {case.experts}", f"--topk {case.topk}"]


def _modelled(found: Prediction) -> list[str]:
    """Cells of product, exposed communication and total, by the path that the model chooses."""
    total = found.overlapped if found.pays else found.serial
    plain = "" if found.pays else ", plain"
    return [f"{1e3 * found.product:.3f} m", f"{1e3 * (total - found.product):.3f} m", f"{1e3 * total:.3f} m{plain}"]


def _measured(rows: Sequence[Row], case: Named, payload: str) -> list[str]:
    """Cells of product, exposed communication and total of the fastest stored row of a case."""
    mine = [
        (row.us, row.peers[ONE]["us"])
        for row in rows
        if row.suite == SUITE
        and row.format == payload
        and named(row.case) == case
        and row.us is not None
        and "us" in row.peers.get(ONE, {})
    ]
    if not mine:
        return ["-", "-", NOT_MEASURED]
    total, product = min(mine)
    return [f"{each / 1e3:.3f}" for each in (product, total - product, total)]


def _with_provenance(rows: Sequence[Row], ops: Iterable[Operation], text: str) -> str:
    mine = [row for row in rows if row.suite == SUITE and row.group in {*ops}]
    return f"{text}\n\nMeasured: {provenance(mine)}" if mine else text
