"""Recorded calls: what a replay computes, where its buffers lie, and when a call is recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import launch, library
from blockscale.launch import Recording, record
from blockscale.launch import recording as store
from support.products import assert_same_bits
from support.recorded import SEEN, N, allocate, floats, one, run_add, start

pytestmark = pytest.mark.usefixtures("forgotten")


# ---- what a recording does -----------------------------------------------------------------------------------------


def test_a_replay_computes_with_other_tensors():
    a, b = floats(1), floats(2)
    got, recording = record(lambda: run_add(a, b), (a, b), one)
    assert recording is not None
    assert_same_bits(got, a + b)
    x, y = floats(3), floats(4)
    (again,) = recording.replay([x, y])
    assert_same_bits(again, x + y)
    (third,) = recording.replay([y, y])  # inputs of a replay may share an address
    assert_same_bits(third, y + y)
    assert_same_bits(again, x + y)


def test_null_pointers_are_replayed():
    a = floats(1)
    _, recording = record(lambda: run_add(a, None, 1.0), (a,), one)
    assert recording is not None
    assert recording.launches[0][2](["a", "b", None]) == ("a", None, "b")
    assert_same_bits(recording.replay([floats(2)]), [floats(2) + 1])


def test_results_come_in_the_requested_order():
    """Buffers, an input, None, and a buffer twice."""
    a, b = floats(1), floats(2)

    def call() -> tuple[Tensor, Tensor]:
        first = run_add(a, b)
        return first, run_add(first, b)

    wanted = lambda found: ([found[1], None, a, found[0], found[1]], "note")  # noqa: E731
    (first, second), recording = record(call, (a, b), wanted)
    assert recording is not None
    assert recording.note == "note"
    x, y = floats(3), floats(4)
    results = recording.replay([x, y])
    assert_same_bits(results, [x + y + y, None, x, x + y, x + y + y])
    assert results[2] is x
    assert results[0] is results[4]
    assert_same_bits([first, second], [a + b, a + b + b])  # a replay does not write the results of the recorded call


def test_views_come_back_as_views():
    """Activation checkpointing recomputes a recorded call by a replay, and compares shapes of saved tensors."""
    a = floats(1)
    got, recording = record(lambda: run_add(a, None).view(3, 11).mT, (a,), one)
    assert recording is not None
    (again,) = recording.replay([a])
    assert again is not None
    assert (again.shape, again.stride()) == (got.shape, got.stride()) == ((11, 3), (1, 11))
    assert_same_bits(again, a.view(3, 11).mT)


def test_scalars_are_buffers():
    a = floats(1)

    def write(stream: int, at: int) -> None:
        ctypes.c_float.from_address(at).value = 7.0

    def call() -> Tensor:
        scalar = library.empty((), torch.float32, torch.device("cpu"))
        start(write, (scalar.data_ptr(),))
        return scalar

    _, recording = record(call, (a,), one)
    assert recording is not None
    assert_same_bits(recording.replay([a]), [torch.tensor(7.0)])


def test_an_accumulator_is_an_input():
    a, total = floats(1), torch.zeros(N)
    _, recording = record(lambda: run_add(a, total, out=total), (a, total), lambda found: ([None], None))
    assert recording is not None
    for _ in range(2):
        assert recording.replay([a, total]) == [None]
    assert_same_bits(total, a + a + a)


def test_scratch_buffers_share_one_allocation_and_do_not_overlap():
    a = floats(1)

    def call() -> Tensor:
        first = run_add(a, None, 1.0)
        second = run_add(a, first)
        third = run_add(second, first)
        return run_add(third, second)

    _, recording = record(call, (a,), one)
    assert recording is not None
    assert recording.scratch_offsets == (0, 512, 1024)
    assert recording.scratch().numel() == 3 * 512
    SEEN.clear()
    x = floats(2)
    (got,) = recording.replay([x])
    first = x + 1
    second = x + first
    third = second + first
    assert_same_bits(got, third + second)
    places = [out for _, _, out in SEEN[:3]]
    assert [place - places[0] for place in places] == [0, 512, 1024]
    assert SEEN[3][2] == got.data_ptr()  # pyright: ignore[reportOptionalMemberAccess]
    assert SEEN[3][2] not in places


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000])
def test_scratch_buffers_of_any_size_are_aligned(size: int):
    a = floats(1)

    def call() -> Tensor:
        buffers = [allocate(size), allocate(2, size)]
        start(lambda device, *at: None, [each.data_ptr() for each in buffers])
        return run_add(a, None)

    _, recording = record(call, (a,), one)
    assert recording is not None
    first, second = recording.scratch_offsets
    assert first == 0
    assert second % 512 == 0
    assert second >= 4 * size
    assert recording.scratch().numel() >= second + 8 * size


def test_persistent_buffers_are_looked_up_in_each_replay():
    """A workspace belongs to the stream that a call runs on."""
    a, workspaces = floats(1), [torch.full((N,), float(i)) for i in range(4)]
    lookups: list[int] = []

    def lookup() -> Tensor:
        lookups.append(len(lookups) + 1)
        return workspaces[len(lookups)]

    def call() -> Tensor:
        for _ in range(2):  # two operators may use the same one
            launch.note_persistent_buffer(workspaces[0], lookup)
        return run_add(a, workspaces[0])

    _, recording = record(call, (a,), one)
    assert recording is not None
    assert lookups == []
    assert_same_bits(recording.replay([a]), [a + workspaces[2]])
    assert lookups == [1, 2]
    lookups.clear()
    assert_same_bits(recording.replay([a]), [a + workspaces[2]])


# ---- when to record ------------------------------------------------------------------------------------------------


def call_once(key: str, call: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
    return launch.run_and_record((key,), call, inputs, one)


def test_the_second_call_is_recorded():
    """The first call compiles its kernels, so it differs from later ones."""
    a, recorded = floats(1), []

    def call() -> Tensor:
        recorded.append(launch.recorder() is not None)
        return run_add(a, None, 2.0)

    for seen in ([False], [False, True]):
        assert launch.find_recording(("key",)) is None
        assert_same_bits(call_once("key", call, a), a + 2)
        assert recorded == seen
    recording = launch.find_recording(("key",))
    assert isinstance(recording, Recording)
    assert_same_bits(recording.replay([floats(5)]), [floats(5) + 2])
    assert launch.find_recording(("other",)) is None


def test_recording_is_tried_three_times():
    a, unlisted, recorded = floats(1), floats(2), []

    def call() -> Tensor:
        recorded.append(launch.recorder() is not None)
        return run_add(a, unlisted)

    for _ in range(7):
        assert_same_bits(call_once("key", call, a), a + unlisted)
    assert recorded == [False, True, True, True, False, False, False]
    assert launch.find_recording(("key",)) is None


def test_a_later_try_may_succeed():
    a, unlisted = floats(1), floats(2)
    for inputs in ((a,), (a,), (a, unlisted)):
        call_once("key", lambda: run_add(a, unlisted), *inputs)
    assert launch.find_recording(("key",)) is not None


def test_a_recorded_call_is_not_recorded_again():
    a = floats(1)
    for _ in range(2):
        call_once("key", lambda: run_add(a, None), a)
    recording = launch.find_recording(("key",))
    assert_same_bits(call_once("key", lambda: run_add(a, None), a), a)
    assert launch.find_recording(("key",)) is recording


def test_the_number_of_recordings_is_bounded(monkeypatch: pytest.MonkeyPatch, forgotten: dict[Any, Any]):
    """Calls that run only once count too: with varying token counts there are many."""
    monkeypatch.setattr(store, "_MAX_RECORDINGS", 8)
    a = floats(1)
    for times in (1, 2):
        for number in range(50):
            for _ in range(times):
                call_once(f"{times} {number}", lambda: run_add(a, None), a)
            assert len(forgotten) <= 8
    assert launch.find_recording(("2 49",)) is not None


def test_a_layout_is_everything_but_the_address():
    x = torch.zeros(64, 64)
    same = torch.zeros(64, 64)
    assert launch.call_key(x) == launch.call_key(same)
    others = [x.mT, x[1:], x[:, :32], x.bfloat16(), x[None], x.flatten()[1:-63].view(63, 64), x[:, 1:33]]
    assert len({launch.call_key(other) for other in (x, *others)}) == 1 + len(others)


def test_layers_on_a_cpu_are_not_replayed(forgotten: dict[Any, Any]):
    layer = bs.nn.Linear(64, 64, recipe="fp8_blockwise")
    for _ in range(4):
        layer(torch.randn(8, 64)).sum().backward()
    assert not forgotten
