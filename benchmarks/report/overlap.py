"""Overlapped products in the form of the Flux performance report: published, modelled and measured times side by side.

A cell ends in its basis: p, published by Flux for eight GPUs; m, modelled by `blockscale roofline overlap`. Measured
times are one rank's share on one H200 over PCIe, from stored rows of `blockscale bench overlap`; they are another link,
so they have lines or columns of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from blockscale.bench.overlaps import ONE
from blockscale.bench.store import Row
from blockscale.bench.suites.overlap import Named, named
from blockscale.distributed.overlap.decision import Work, predict
from blockscale.roofline import Prediction
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
                found = predict(machine, 8, Work(op, m, n, k, payload))
                command = f"`blockscale roofline overlap --op {op} --machine {machine} --payload {payload}`"
                lines.append([f"{title}, ours {name}", gpus, *_modelled(found), command])
        for payload, name in PAYLOADS.items():
            times = _measured(rows, _dense(op), payload)
            command = f"`blockscale bench overlap --op {op} --payload {payload}{method(rows, _dense(op))}`"
            lines.append([f"{title}, ours {name}", MEASURED_ON, *times, command])
    return with_provenance(rows, [_dense(op) for op in OPERATIONS], table(head, lines))


def experts_table(rows: Sequence[Row]) -> str:
    """Layers 0 and 1 of a mixture: a line for each case and machine."""
    head = ["", "GPUs", "torch", "Flux"]
    for name in PAYLOADS.values():
        head += [f"{name} GEMM", "exposed", "total"]
    head.append("command")
    lines: list[list[str]] = []
    published = {(_case(row), row.machine): row for row in FLUX_ROWS}
    cases = [*dict.fromkeys(_case(row) for row in FLUX_ROWS if row.experts > 1)]
    for case in cases:
        label = f"{LAYERS[case.op]}, TP {case.tp} EP {case.ep}, E={case.experts} k={case.topk}"
        options = " ".join([f"--op {case.op}", *(text for text in _options(case) if text not in _DEFAULTS)])
        for machine, gpus in MACHINES.items():
            row = published.get((case, machine))
            theirs = (
                ["-", "-"] if row is None else [f"{1e3 * (row.serial or 0):.3f} p", f"{1e3 * row.overlapped:.3f} p"]
            )
            ours: list[str] = []
            for payload in PAYLOADS:
                work = Work(case.op, *case.sizes, payload, case.experts, case.topk)
                found = predict(machine, case.tp * case.ep, work, ep=case.ep)
                ours += _modelled(found)
            on = "" if machine == "h200" else f" --machine {machine}"
            lines.append([label, gpus, *theirs, *ours, f"`blockscale roofline overlap {options}{on}`"])
        times = [cell for payload in PAYLOADS for cell in _measured(rows, case, payload)]
        if any(cell not in ("-", NOT_MEASURED) for cell in times):
            command = f"`blockscale bench overlap {options} --payload {','.join(PAYLOADS)}{method(rows, case)}`"
            lines.append([label, MEASURED_ON, "-", "-", *times, command])
    if not any(line[1] == MEASURED_ON for line in lines):
        lines.append(["all", MEASURED_ON, "-", "-", *["-", "-", NOT_MEASURED] * len(PAYLOADS), "-"])
    return with_provenance(rows, cases, table(head, lines))


def flux_cases() -> list[Named]:
    """The dense and the grouped operations of the report."""
    return [*map(_dense, OPERATIONS), *dict.fromkeys(_case(row) for row in FLUX_ROWS if row.experts > 1)]


def _dense(op: Operation) -> Named:
    return Named(op, _DENSE_SIZES[op], 8, 1, 1, 1)


def _case(row: PublishedRow) -> Named:
    return Named(row.op, (row.m, row.n, row.k), row.tp, row.ep, row.experts, row.topk)


def _options(case: Named) -> list[str]:
    return [f"--tp {case.tp}", f"--ep {case.ep}", f"--experts {case.experts}", f"--topk {case.topk}"]


def _modelled(found: Prediction) -> list[str]:
    """Cells of product, exposed communication and total, by the path that the model chooses."""
    total = found.overlapped if found.pays else found.serial
    plain = "" if found.pays else ", plain"
    return [f"{1e3 * found.product:.3f} m", f"{1e3 * (total - found.product):.3f} m", f"{1e3 * total:.3f} m{plain}"]


def rows_of(rows: Sequence[Row], case: Named, payload: str) -> list[Row]:
    """Timed rows of a case, by whatever chunks, the fastest one first."""
    mine = [row for row in rows if row.suite == SUITE and row.format == payload and named(row.case) == case]
    return sorted((row for row in mine if row.us is not None), key=lambda row: row.us or 0.0)


def _measured(rows: Sequence[Row], case: Named, payload: str) -> list[str]:
    """Cells of product, exposed communication and total of the fastest stored row of a case."""
    mine = [(row.us, row.peers[ONE]["us"]) for row in rows_of(rows, case, payload) if "us" in row.peers.get(ONE, {})]
    if not mine:
        return ["-", "-", NOT_MEASURED]
    total, product = mine[0]
    return [f"{(each or 0.0) / 1e3:.3f}" for each in (product, (total or 0.0) - product, total)]


def method(rows: Sequence[Row], case: Named) -> str:
    """The option of the stored rows of a case, if they were captured."""
    found = [row for payload in PAYLOADS for row in rows_of(rows, case, payload)[:1]]
    return " --graph" if found and all(row.case.endswith(" graph") for row in found) else ""


def with_provenance(rows: Sequence[Row], cases: Collection[Named], text: str) -> str:
    """A table, and below it where the stored rows of its cases come from."""
    mine = [row for row in rows if row.suite == SUITE and named(row.case) in cases]
    return f"{text}\n\nMeasured: {provenance(mine)}" if mine else text
