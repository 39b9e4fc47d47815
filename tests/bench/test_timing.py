"""Timing: medians and quartiles, the order of calls, and the time of a call of known length."""

from __future__ import annotations

import os
import time

import pytest
import torch

from blockscale.bench.timing import (
    Reading,
    Slice,
    Telemetry,
    input_sets,
    measure,
    prepare,
    sets_for,
    summarise,
    watch,
)

CPU = torch.device("cpu")


def test_summary_is_median_and_quartiles():
    found = summarise([5.0, 1.0, 4.0, 2.0, 3.0], "graph")
    assert (found.us, found.low, found.high, found.rounds) == (3.0, 2.0, 4.0, 5)
    assert summarise([7.0], "cpu").low == summarise([7.0], "cpu").high == 7.0


def test_sets_exceed_the_cache():
    cache = 50 << 20
    for size in (1, 1 << 20, 59 << 20, 235 << 20, 537 << 20):
        count = sets_for(size, cache)
        assert count * size >= 4 * cache
        assert count >= 3
    assert sets_for(16 * cache, cache) == 1
    assert input_sets(1, CPU) == 1


def test_variants_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    times = {name: iter([100.0, *(first + step for step in range(15))]) for name, first in (("a", 1.0), ("b", 21.0))}

    def slice(name: str) -> Slice:
        def start():
            order.append(name)
            return lambda: next(times[name])

        return Slice(start, "fake")

    samples: list[int] = []
    found = measure({name: slice(name) for name in times}, rounds=15, sample=lambda: samples.append(1))
    turns = [tuple(order[at : at + 2]) for at in range(0, 32, 2)]
    assert set(turns) == {("a", "b"), ("b", "a")}, "each once a round, and not always in the same order"
    assert (found["a"].us, found["b"].us) == (8.0, 28.0)
    assert len(samples) == 15


def test_the_samples_are_taken_while_the_device_works():
    events: list[str] = []

    def start():
        events.append("start")
        return lambda: events.append("wait") or 1.0

    measure({"a": Slice(start, "fake")}, rounds=1, sample=lambda: events.append("sample"))
    assert events[2:] == ["start", "sample", "wait"]


@pytest.mark.parametrize("host", [False, True])
def test_a_call_of_known_length_is_timed(host: bool):
    found = measure({"sleep": prepare([lambda: time.sleep(0.002)] * 2, CPU, seconds=0.004, host=host)}, rounds=2)
    assert 2000 <= found["sleep"].us < 20000
    assert found["sleep"].method == "cpu"


def test_a_slice_cycles_through_its_sets():
    seen: list[int] = []
    slice = prepare([lambda i=i: seen.append(i) for i in range(3)], CPU, seconds=1e-6)
    seen.clear()
    slice.start()()
    assert seen[:3] == [0, 1, 2]
    assert len(seen) % 3 == 0


def test_telemetry_gives_medians_and_resets():
    readings = iter([Reading(1000, 300), Reading(1980, 700), Reading(1500, 500), None])
    telemetry = Telemetry(lambda: next(readings))
    for _ in range(4):
        telemetry.sample()
    assert telemetry.take() == Reading(1500, 500)
    assert telemetry.take() is None


def test_there_is_no_telemetry_on_a_cpu():
    telemetry = watch(CPU)
    telemetry.sample()
    assert telemetry.take() is None


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="needs the GPU to itself: other workers use it")
def test_graphs_on_a_gpu():
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    slices = {
        "one": prepare([lambda: y.copy_(x)], device, seconds=0.002),
        "two": prepare([lambda: y.copy_(x).copy_(x)], device, seconds=0.002),
        "syncs": prepare([lambda: x[0, 0].item()], device, seconds=0.0005),
    }
    found = measure(slices, rounds=5)
    assert found["one"].method == found["two"].method == "graph"
    assert found["syncs"].method == "events"
    assert 1.5 < found["two"].us / found["one"].us < 2.5
    assert torch.randn(8, device=device).isfinite().all()  # a failed capture would have broken the generator


@pytest.mark.gpu
def test_clock_and_power_of_a_gpu_are_plausible():
    telemetry = watch(torch.device("cuda"))
    for _ in range(5):
        time.sleep(0.1)
        telemetry.sample()
    found = telemetry.take()
    if found is None:
        pytest.skip("torch has no bindings of NVML here")
    assert 100 < found.sm_clock_mhz < 5000
    assert 10 < found.power_w < 2000
