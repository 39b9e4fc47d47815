"""Stored rows of mixtures of experts as tables, and their goals, from made-up rows."""

from __future__ import annotations

from typing import Any

from benchmarks.report import moe, pages, tables
from blockscale.bench import store
from blockscale.bench.rooflines import Roofs
from blockscale.bench.suites import moe as suite
from blockscale.hardware import Capability
from blockscale.roofline import MEASURED, NOMINAL, Ceilings
from support.bench_rows import row as made_up

HOPPER = Capability("cuda", 90)
ROOFS = Roofs(MEASURED["h200"], NOMINAL["h200"])
CEILINGS = Ceilings("", "hopper", 4e12, 7e14, 1.4e15, None, "")


def stored(case: str, group: str = "one grouped linear", **fields: Any) -> store.Row:
    peers = {"bf16": {"us": 7000.0, "ratio": 1.4}}
    given = {"suite": "moe", "format": "fp8_blockwise", "shape": [16640, 8192, 5120], "us": 5000.0, "peers": peers}
    return made_up(case, group=group, **given | fields)


def rate(case: str, tflop_s: float, shape: list[int], **peers: float) -> store.Row:
    beside = {name.replace("_", " "): {"us": 1.0, "ratio": ratio} for name, ratio in peers.items()}
    return stored(case, "grouped products", tflop_s=tflop_s, shape=shape, peers=beside)


def goals(*rows: store.Row) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in moe.goals_table(rows).splitlines()[2:]]
    return {cells[0]: cells[1:] for cells in lines}


def test_goals_of_products():
    fprop = rate("equal groups fprop E=64 16640x8192x5120", 950.0, [16640, 8192, 5120], rowwise_fast=1.5)
    dgrad = rate("equal groups dgrad E=64 16640x5120x8192", 890.0, [16640, 5120, 8192], rowwise_fast=0.9)
    found = goals(fprop)
    assert [cells[:2] for cells in found.values()] == [["950 TFLOP/s", "yes"], ["1.50x", "yes"]]
    assert next(iter(found)) == "fprop and dgrad, 16640x8192x5120, 64 equal groups: 900 TFLOP/s"
    found = goals(fprop, dgrad)
    assert [cells[:2] for cells in found.values()] == [["890 to 950 TFLOP/s", "no"], ["0.90 to 1.50x", "no"]]
    eight = rate("equal groups fprop E=8 32768x7168x2048", 1001.0, [32768, 7168, 2048])
    assert list(goals(eight)) == ["fprop, 32768x7168x2048, 8 equal groups: 1000 TFLOP/s"]
    added = rate("equal groups wgrad fp32 += E=8 2048x7168x32768", 849.0, [2048, 7168, 32768])
    ((text, (figure, met, *_)),) = goals(added).items()
    assert text.startswith("wgrad accumulated into fp32")
    assert (figure, met) == ("849 TFLOP/s", "no")
    zipf = "DeepSeek-V3 671B fprop E=256 zipf 32768x2048x7168"
    assert next(iter(goals(rate(zipf, 900.0, [1, 1, 1], balanced=0.9)).values()))[:2] == ["11 %", "yes"]
    assert next(iter(goals(rate(zipf, 900.0, [1, 1, 1], balanced=0.8)).values()))[:2] == ["25 %", "no"]


def test_goals_of_layers():
    one = stored("fp8_blockwise M=16640 E=64 5120->8192")
    assert [cells[:2] for cells in goals(one).values()] == [["1.40x", "yes"]]
    few = stored("fp8_blockwise M=16640 E=4 5120->8192")
    assert [cells[:2] for cells in goals(few).values()] == [["1.40x", "no"]]
    peers = {"bf16": {"us": 7000.0, "ratio": 1.4}, "fp32 main_grad": {"us": 4000.0, "ratio": 0.8}}
    shared = stored("fp8_blockwise 8 microbatches M=16640 E=4 5120->8192", peers=peers)
    assert [cells[:2] for cells in goals(shared).values()] == [["1.40x", "no"], ["1.75x", "yes"]]
    forward = stored("fp8_blockwise forward M=16640 E=4 5120->8192")
    assert [cells[:2] for cells in goals(forward).values()] == [["1.40x", "yes"]]
    emulated = stored("mxfp8 M=16640 E=4 5120->8192", format="mxfp8", peers={"bf16": {"us": 1.0, "ratio": 0.7}})
    assert [cells[:2] for cells in goals(emulated).values()] == [["0.70x", "no"]]
    native = stored("mxfp8_128x128 8 microbatches M=16640 E=4 5120->8192", format="mxfp8_128x128")
    assert [cells[:2] for cells in goals(native).values()] == [["1.40x", "yes"]]
    mixture = "fp8_blockwise mixture M=4096 DeepSeek 16B E=64 top-6 2048x1408"
    for syncs, met in ((0.0, "yes"), (2.0, "no")):
        found = goals(stored(mixture, "mixture", details={"host_syncs": syncs}))
        assert [cells[:2] for cells in found.values()] == [[f"{syncs:.0f}", met]]
    assert goals(stored("fp8_blockwise M=16640 E=64 5120->8192", us=None, problem="dw is 3.0 dB")) == {}


def test_goals_are_about_cases_that_exist():
    """A goal without a measured row would never fail."""
    rows = [
        stored(
            case.name, case.group, format=case.format, shape=list(case.shape), tflop_s=1.0, details={"host_syncs": 0.0},
            peers={name: {"us": 1.0, "ratio": 1.0} for name in case.peers},
        )
        for case in suite.cases(HOPPER, CEILINGS, ROOFS)
    ]  # fmt: skip
    assert len(goals(*rows)) == len(moe.GOALS)
    for goal in moe.GOALS:
        only = goal.command.partition("--only ")[2].strip("'")
        assert any(only in row.case or only in row.group for row in rows if goal.about(row)), goal.what


def test_the_table_of_the_grouped_linear():
    rows = [
        stored("fp8_blockwise M=16640 E=16 5120->8192"),
        stored("fp8_blockwise M=16640 E=4 5120->8192"),
        stored("fp8_blockwise 8 microbatches M=16640 E=4 5120->8192", peers={"bf16": {"us": 6000.0, "ratio": 1.5}}),
        stored("fp8_blockwise forward M=16640 E=4 5120->8192", us=1500.0, peers={"bf16": {"us": 2400.0, "ratio": 1.6}}),
        stored("mxfp8 M=16640 E=4 5120->8192", format="mxfp8", us=None, problem="3 values differ"),
    ]
    lines = moe.linear_table(rows).splitlines()[2:]
    assert lines[0].startswith("| recipe | E | bf16_e2e_us | scaled_e2e_us | speedup | bf16_fwd_us | scaled_fwd_us |")
    assert lines[2:] == [
        "| fp8_blockwise | 4 | 7,000 | 5,000 | 1.40x | 2,400 | 1,500 | 1.60x | 1.50x |",
        "| fp8_blockwise | 16 | 7,000 | 5,000 | 1.40x | - | - | - | - |",
        "| mxfp8 | 4 | - | WRONG: 3 values differ | - | - | - | - | - |",
    ]


def test_the_long_table_has_every_row():
    rows = [
        rate("equal groups fprop E=64 16640x8192x5120", 950.0, [16640, 8192, 5120]),
        stored("fp8_blockwise M=16640 E=4 5120->8192"),
        stored("fp8_blockwise experts M=32768 DeepSeek 16B E=64 zipf 2048x1408", "experts", shape=[32768, 2048, 1408]),
    ]
    text = moe.long_table(rows)
    for start in (
        "| equal groups fprop E=64 | 16640x8192x5120 |",
        "| E=4 5120->8192 | 16640 | 7.000 | 5.000 | 1.40x |",
    ):
        assert any(line.startswith(start) for line in text.splitlines())
    assert "| DeepSeek 16B E=64 zipf 2048x1408 | 32768 |" in text
    assert "**experts, fp8_blockwise**" in text


def test_rows_are_put_in_order_and_no_rows_are_no_tables():
    names = ("fp8_blockwise M=16640 E=16 5120->8192", "fp8_blockwise M=16640 E=4 5120->8192")
    assert [row.case for row in pages.in_order([stored(name) for name in names])] == list(reversed(names))
    for name in ("moe", "moe-linear", "moe-goals"):
        assert pages.SECTIONS[name]([made_up()]) == tables.EMPTY
