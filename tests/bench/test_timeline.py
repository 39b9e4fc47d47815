"""Timelines of calls: events and waits of a made-up trace, a trace of the profiler, the picture, and mistakes."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blockscale.bench import timeline
from blockscale.bench.suites import overlap as suite
from blockscale.bench.timeline import WAIT, Event
from blockscale.cli.main import main

CPU = torch.device("cpu")
BUSY = "at::cuda::(anonymous namespace)::spin_kernel(long)"
GATHER = [
    ("kernel", BUSY, 7, 100.0, 900.0),
    ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 1000.0, 4.0),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 1001.0, 60.0),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 1061.0, 60.0),
    ("kernel", "scaled_mm_kernel", 7, 1005.0, 40.0),
    ("kernel", "scaled_mm_kernel", 7, 1062.0, 40.0),
    ("kernel", "void at::native::vectorized_elementwise_kernel<4>()", 7, 1122.0, 8.0),
]


def made_up(rows: list[tuple[str, str, int, float, float]]) -> dict[str, Any]:
    """A Chrome trace, with events of the host and a user's range that lies over kernels."""
    host = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 90.0, "dur": 5.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": 91.0, "dur": 2.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "range", "tid": 7, "ts": 100.0, "dur": 1000.0},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    return {
        "traceEvents": host
        + [
            {"ph": "X", "cat": cat, "name": name, "tid": lane, "ts": ts, "dur": us, "args": {"stream": lane}}
            for cat, name, lane, ts, us in reversed(rows)
        ]
    }


def test_events_lie_on_their_streams_and_begin_where_the_gpu_is_free() -> None:
    found = timeline.events_of(made_up(GATHER))
    assert [(each.lane, each.kind, each.start, each.us) for each in found] == [
        ("stream 7", "placement, sums", 0.0, 4.0),
        ("stream 20", "copy to the device", 1.0, 60.0),
        ("stream 7", "product", 5.0, 40.0),
        ("stream 7", WAIT, 45.0, 17.0),
        ("stream 20", "copy to the device", 61.0, 60.0),
        ("stream 7", "product", 62.0, 40.0),
        ("stream 7", WAIT, 102.0, 20.0),
        ("stream 7", "placement, sums", 122.0, 8.0),
    ]
    assert timeline.events_of({"traceEvents": []}) == []


def test_a_product_that_waits_for_all_copies_waits_from_the_start() -> None:
    serial = [
        GATHER[0],
        GATHER[2],
        ("kernel", "nvjet_tst_128x256", 7, 1061.5, 80.0),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 21, 1142.0, 9.0),
    ]
    found = timeline.events_of(made_up(serial))
    assert found[0] == Event("stream 7", WAIT, 0.0, 61.5)
    assert [each.kind for each in found] == [WAIT, "copy to the device", "product", "copy to the host"]


def test_the_profiler_sees_products_of_a_call(tmp_path: Path) -> None:
    """A CPU has no streams: its operators are the events."""
    case = suite.case(suite.Problem("all_gather_mm", 16, 256, 128, 2, "bf16"), "")
    (share,) = case.make(CPU)
    found = timeline.events_of(timeline.record(functools.partial(case.run, share), CPU), timeline.HOST)
    assert {each.lane.partition(" ")[0] for each in found} == {"thread"}
    assert sum(each.name == "aten::mm" for each in found) == 2, "the rows of each rank"
    assert found[0].start == 0
    assert all(each.us >= 0 for each in found)
    both = timeline.timelines(case, CPU)
    assert [*both] == [f"{case.name}: overlapped", f"{case.name}: serial"]
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    timeline.draw(both | {"host": found}, tmp_path / "deep" / "x.png")
    assert (tmp_path / "deep" / "x.png").stat().st_size > 1000


def test_the_picture_has_a_lane_for_each_stream(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    events = timeline.events_of(made_up(GATHER))
    for name in ("one.svg", "two.svg"):
        timeline.draw({"a gather": events}, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert (tmp_path / "two.svg").read_text() == text
    for words in ("a gather, 130 µs", "stream 7", "stream 20", "copy to the device", WAIT):
        assert f"<!-- {words} -->" in text
    assert "copy to the host" not in text
    assert text.index("<!-- stream 7 -->") < text.index("<!-- stream 20 -->"), "streams of products first"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        ("--trace x.svg", "--trace x.svg on cpu", "leave --trace out, or run it on a GPU"),
        ("--trace x.json", "--trace x.json", "pass x.svg"),
    ],
)
def test_mistakes_are_explained(words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    assert main(["bench", "overlap", "--device", "cpu", *words.split()]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert "Rule: " in error
    assert fix in error.split("Fix: ")[1]


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "overlap", "--device", "cpu", "--trace", "x.svg"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["all_gather_mm", "mm_reduce_scatter"])
def test_copies_and_products_of_a_gpu_have_streams_of_their_own(op: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    problem = suite.Problem(op, 1024, 2048, 2048, 4, "bf16")
    found = timeline.timelines(suite.case(problem, torch.cuda.get_device_name()), torch.device("cuda"))
    for title, events in found.items():
        products = {each.lane for each in events if each.kind == "product"}
        copies = {each.lane for each in events if each.kind.startswith("copy")}
        assert products, title
        assert copies, title
        assert not products & copies, title
        assert all(each.start > -5 for each in events), title
        assert ("copy to the host" in {each.kind for each in events}) == (op == "mm_reduce_scatter"), title
    timeline.draw(found, tmp_path / "x.svg")
