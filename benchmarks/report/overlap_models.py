"""Forward of all experts of a model on eight GPUs, with overlap off and on.

A cell ends in its basis: m, modelled; g, one rank's GEMM measured on one H200 and the link modelled. Measured are the
grouped GEMM with its rows placed or combined in one launch; how much longer it takes in the chunks that ranks choose
over NVLink, communication, its latency and the slowdown by copies are those of the model. Cells without a mark are
measured over PCIe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blockscale.bench.overlaps import ONE, PERMUTED, SERIAL
from blockscale.bench.shapes import OVERLAP_MODELS, OVERLAP_TOKENS, expert_products
from blockscale.bench.store import Row
from blockscale.bench.suites.overlap import Named
from blockscale.distributed.overlap.decision import Work, pays, predict

from .overlap import LAYERS, MACHINES, MEASURED_ON, NOT_MEASURED, PAYLOADS, method, rows_of, with_provenance
from .tables import table

TP = 8
# machine whose GEMMs are measured
MEASURED = "h200"
MODELLED, LINK_MODELLED = "m", "g"
# what `overlap="auto"` chooses, by whether both layers together gain
_CHOICES = {True: "on", False: "off"}


class Times(NamedTuple):
    """Seconds of a layer, or of all of a model.

    product: grouped GEMM alone, in one launch.  placed: rows placed before it or combined after it.  off, on: all of
    it, with overlap off and on.
    """

    product: float
    placed: float
    off: float
    on: float


class Forward(NamedTuple):
    """All experts of a model.  mark: basis of the times.  pays: as overlap="auto" decides beforehand."""

    times: Times
    mark: str
    pays: bool


def models_table(rows: Sequence[Row]) -> str:
    """A line for each model and machine, and one for the stored rows over PCIe."""
    head = ["model", "GPUs"]
    for name in PAYLOADS.values():
        head += [f"{name}, off", "on", "off / on", "auto"]
    lines: list[list[str]] = []
    for model, (_, layers) in OVERLAP_MODELS.items():
        label, option = f"{model}, {layers} layers", f"--model {model.lower().replace(' ', '-')}"
        for machine, gpus in MACHINES.items():
            found = [forward(rows, model, machine, payload) for payload in PAYLOADS]
            cells = [
                cell
                for each in found
                for cell in (*_cells(each.times.off, each.times.on, f" {each.mark}"), _CHOICES[each.pays])
            ]
            on = "" if machine == MEASURED else f" --machine {machine}"
            modelled = all(each.mark == MODELLED for each in found)
            command = f"blockscale roofline overlap {option}{on}" if modelled else "make report"
            lines.append([label, gpus, *cells, f"`{command}`"])
        cells = [cell for payload in PAYLOADS for cell in _over_pcie(rows, model, payload)]
        lines.append(
            [
                label,
                MEASURED_ON,
                *cells,
                f"`blockscale bench overlap {option} --payload {','.join(PAYLOADS)}{method(rows, cases_of(model)[0])}`",
            ]
        )
    cases = [case for model in OVERLAP_MODELS for case in cases_of(model)]
    return with_provenance(rows, cases, table([*head, "command"], lines))


def cases_of(model: str) -> tuple[Named, Named]:
    """Layers 0 and 1 of a model on TP 8."""
    mixture = OVERLAP_MODELS[model].mixture
    first, second = (
        Named(op, sizes, TP, 1, mixture.experts, mixture.top_k)
        for op, sizes in zip(LAYERS, expert_products(mixture, OVERLAP_TOKENS), strict=True)
    )
    return first, second


def forward(rows: Sequence[Row], model: str, machine: str, payload: str) -> Forward:
    """Times of all layers. Those of an H200 are measured if both layers are stored."""
    cases = cases_of(model)
    us = [_contenders(rows, case, payload) if machine == MEASURED else None for case in cases]
    known = [each for each in us if each is not None]
    measured = known if len(known) == len(us) else [None, None]
    found = [_layer(case, machine, payload, each) for case, each in zip(cases, measured, strict=True)]
    layers = OVERLAP_MODELS[model].layers
    total = Times(*(layers * sum(each) for each in zip(*found, strict=True)))
    works = tuple(Work(case.op, *case.sizes, payload, case.experts, case.topk) for case in cases)
    return Forward(total, MODELLED if measured[0] is None else LINK_MODELLED, pays(machine, TP, works))


def _layer(case: Named, machine: str, payload: str, us: dict[str, float] | None) -> Times:
    """Times of a layer.  us: of the contenders of its row."""

    work = Work(case.op, *case.sizes, payload, case.experts, case.topk)
    if us is None:
        modelled = predict(machine, TP, work)
        return Times(modelled.product, 0.0, modelled.serial, modelled.overlapped)
    one, permuted = (us[name] / 1e6 for name in (ONE, PERMUTED))
    found = predict(machine, TP, work, product=permuted)
    return Times(one, max(0.0, permuted - one), found.serial, found.overlapped)


def _contenders(rows: Sequence[Row], case: Named, payload: str) -> dict[str, float] | None:
    """Microseconds of the contenders of the fastest row."""
    for row in rows_of(rows, case, payload):
        us = {name: cell["us"] for name, cell in row.peers.items() if "us" in cell}
        if {ONE, PERMUTED} <= {*us}:
            return us
    return None


def _over_pcie(rows: Sequence[Row], model: str, payload: str) -> list[str]:
    """Cells of the stored rows: both layers over the virtual link, times the layers."""
    found = [
        [
            (row.peers[SERIAL]["us"], row.us or 0.0)
            for row in rows_of(rows, case, payload)
            if "us" in row.peers.get(SERIAL, {})
        ]
        for case in cases_of(model)
    ]
    if not all(found):
        return [NOT_MEASURED, "-", "-", "-"]
    (first, *_), (second, *_) = found
    off, on = (OVERLAP_MODELS[model].layers * sum(each) / 1e6 for each in zip(first, second, strict=True))
    return [*_cells(off, on), "-"]


def _cells(off: float, on: float, mark: str = "") -> list[str]:
    return [f"{1e3 * off:.1f}{mark}", f"{1e3 * on:.1f}{mark}", f"{off / on:.2f}x{mark}"]
