"""Ceilings: every figure has a source, the measured ones are those of the stored results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from blockscale.errors import OptionError, UnknownNameError
from blockscale.roofline import MEASURED, NOMINAL, architecture_of, nominal

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("machine", NOMINAL)
def test_every_specification_has_a_source_and_plausible_figures(machine: str) -> None:
    found = NOMINAL[machine]
    assert "https://" in found.source
    assert not found.measured
    assert 0.5e12 < found.bandwidth < 1e13
    assert found.fp8 is None or found.fp8 == pytest.approx(2 * found.bf16, rel=0.01)
    assert found.fp4 is None or found.architecture == "blackwell"
    assert (found.fp8 is None) == (found.architecture == "ampere")


def test_the_machines_of_the_table() -> None:
    assert set(NOMINAL) == {"a100", "h100", "h200", "h800", "b200", "gb200", "l20", "rtx5090"}


def test_what_could_not_be_read_is_marked() -> None:
    assert "not verified" in NOMINAL["h800"].source
    assert "no page of the vendor" in NOMINAL["l20"].source


def test_measured_figures_are_those_of_the_stored_results() -> None:
    found = MEASURED["h200"]
    rows = [json.loads(line) for line in (RESULTS / "gemm-h200.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if row["case"] == "1x128 @ 128x128 8192x8192x8192"]
    assert found.bf16 == row["peers"]["bf16"]["tflop_s"] * 1e12
    assert found.fp8 == row["peers"]["rowwise fast"]["tflop_s"] * 1e12
    assert f"gemm-h200.jsonl (commit {row['where']['commit']})" in found.source
    casts = [json.loads(line) for line in (RESULTS / "casts-h200.jsonl").read_text().splitlines()]
    casts = [row for row in casts if row["group"] != "transpose of codes"]  # a later run, with copies of fewer bytes
    copies = [row["copy_gb_s"] for row in casts if row["shape"] == [16384, 8192] and row["copy_gb_s"]]
    assert found.bandwidth == pytest.approx(statistics.median(copies) * 1e9, rel=0.01)
    assert {row["where"]["commit"] for row in casts} == {"3a7a2a0"}


def test_measured_stays_below_nominal() -> None:
    for name, found in MEASURED.items():
        sheet = nominal(name)
        assert found.bandwidth < sheet.bandwidth
        assert found.bf16 < sheet.bf16
        assert found.fp8 is not None
        assert sheet.fp8 is not None
        assert found.fp8 < sheet.fp8


def test_a_rate_that_a_machine_lacks() -> None:
    with pytest.raises(OptionError, match="fp8 units of A100"):
        nominal("a100").rate("fp8")
    assert nominal("b200").units == ("bf16", "fp8", "fp4")


def test_unknown_machines_are_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown machine 'h20'"):
        nominal("h20")


@pytest.mark.parametrize(
    ("sm", "name"), [(80, "ampere"), (86, "ampere"), (89, "ada"), (90, "hopper"), (103, "blackwell")]
)
def test_architectures(sm: int, name: str) -> None:
    assert architecture_of(sm) == name
