"""Recorded calls of operators: results of a replay, and when the body runs again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockscale import launch, library
from blockscale.launch import recording, run_recorded
from blockscale.library import define_op
from support.products import assert_same_bits
from support.recorded import N, floats, run_add

pytestmark = pytest.mark.usefixtures("forgotten")

CALLS: list[str] = []
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay as if tensors were on a GPU; the kernels of `recorded.py` run on the CPU."""
    monkeypatch.setattr(recording, "may_replay", lambda tensor: recording.nothing_is_forced())
    CALLS.clear()


def body(a: Tensor, b: Tensor | None, plus: float) -> tuple[Tensor, Tensor | None]:
    """a + b + plus, and the same once more where there is a b."""
    CALLS.append("body")
    first = run_add(a, b, plus)
    return first, None if b is None else run_add(a, b, plus)


def recorded(body: Callable[..., Any], places: tuple[int, ...]) -> Callable[..., Any]:
    """The body as an operator with a new name, whose arguments are flat already."""
    name = f"op{next(_numbers)}"
    return lambda *args: run_recorded(name, places, args, body, args)


def run() -> Callable[..., Any]:
    return recorded(body, (0, 1))


def test_the_third_call_is_replayed():
    op = run()
    for number in range(5):
        a, b = floats(number), floats(number + 10)
        first, second = op(a, b, 0.0)
        assert_same_bits([first, second], [a + b, a + b])
        assert first.data_ptr() != second.data_ptr()
    assert len(CALLS) == 2


def test_results_that_are_none_stay_none():
    op = run()
    for number in range(4):
        a = floats(number)
        first, second = op(a, None, 0.0)
        assert_same_bits(first, a)
        assert second is None
    assert len(CALLS) == 2


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ((floats(1), floats(2), 2.0), "a number"),
        ((floats(1), None, 1.0), "None for a tensor"),
        ((torch.cat((floats(1), floats(1)))[::2], floats(2), 1.0), "strides"),
        ((torch.cat((floats(1), floats(1)))[1 : N + 1], floats(2), 1.0), "alignment"),
        ((floats(1)[None], floats(2), 1.0), "a shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_arguments_are_another_call(other: tuple[Any, ...], what: str):
    op = run()
    for _ in range(3):
        op(floats(1), floats(2), 1.0)
    assert len(CALLS) == 2
    op(*other)
    assert len(CALLS) == 3, what


def test_devices_are_part_of_a_layout(monkeypatch: pytest.MonkeyPatch):
    """A kernel must not be given an address of another device."""
    x = floats(1)
    here = launch.call_key(x)
    monkeypatch.setattr(Tensor, "get_device", lambda self: 1)
    assert launch.call_key(x) != here


def test_views_come_back_as_views():
    op = recorded(lambda a: run_add(a, None).view(3, 11).mT, (0,))
    for number in range(4):
        a = floats(number)
        got = op(a)
        assert got.stride() == (1, 11)
        assert_same_bits(got, a.view(3, 11).mT)


def test_an_operator_that_writes_in_place_is_replayed_in_place():
    def add_(total: Tensor, a: Tensor) -> None:
        CALLS.append("add_")
        run_add(a, total, out=total)

    op, total = recorded(add_, (0, 1)), torch.zeros(N)
    for _ in range(4):
        assert op(total, floats(1)) is None
    assert_same_bits(total, floats(1) + floats(1) + floats(1) + floats(1))
    assert len(CALLS) == 2


def test_an_operator_with_work_by_torch_is_never_replayed():
    def more(a: Tensor) -> Tensor:
        CALLS.append("more")
        return run_add(a, None) + a.sum()

    op = recorded(more, (0,))
    for number in range(8):
        assert_same_bits(op(floats(number)), floats(number) + floats(number).sum())
    assert len(CALLS) == 8


def test_an_operator_that_raises_raises_each_time():
    def broken(a: Tensor) -> Tensor:
        raise ValueError("no")

    op = recorded(broken, (0,))
    for _ in range(5):
        with pytest.raises(ValueError, match="no"):
            op(floats(1))
    assert launch.recorder() is None


def test_the_recording_of_a_layer_has_every_launch():
    """Also those of an operator that has a recording of its own."""
    op = recorded(lambda a: run_add(a, None, 1.0), (0,))
    for _ in range(3):
        op(floats(1))
    a = floats(5)
    _, recording = launch.record(lambda: op(op(a)), (a,), lambda found: ([found], None))
    assert recording is not None
    assert len(recording.launches) == 2
    assert_same_bits(recording.replay([floats(6)]), [floats(6) + 1 + 1])


def test_a_forced_backend_is_not_replayed(monkeypatch: pytest.MonkeyPatch):
    op = run()
    for _ in range(3):
        op(floats(1), floats(2), 1.0)
    monkeypatch.setattr(recording, "nothing_is_forced", lambda: False)
    op(floats(1), floats(2), 1.0)
    assert len(CALLS) == 3


def test_every_way_to_call_an_operator_is_replayed(monkeypatch: pytest.MonkeyPatch):
    """Directly, through the dispatcher, and from compiled code."""

    def fake(a: Tensor, b: Tensor) -> Tensor:
        return torch.empty_like(a)

    def recorded_test_add(a: Tensor, b: Tensor) -> Tensor:
        CALLS.append("operator")
        return run_add(a, b)

    direct = define_op(fake=fake)(recorded_test_add)
    op = torch.ops.blockscale.recorded_test_add
    compiled = torch.compile(lambda a, b: op(a, b) * 1, backend="aot_eager")
    for number, call in enumerate((direct, direct, direct, op, op, compiled, compiled)):
        a, b = floats(number), floats(number + 10)
        assert_same_bits(call(a, b), a + b)
    assert len(CALLS) == 2
    library.OPERATORS.pop("recorded_test_add")
