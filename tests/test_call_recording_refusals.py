"""Calls that cannot be recorded: work outside of recorded launches, and addresses of no recorded tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blockscale import call_recording, library
from blockscale.autograd import get_recipe, linear_plan
from blockscale.autograd.operands import Casts, Groups, NeedsGrad
from blockscale.call_recording import Recorder, record
from blockscale.grouped import sort_by_expert
from support.products import assert_same_bits
from support.recorded import add, allocate, floats, one, refusal, run_add

pytestmark = pytest.mark.usefixtures("forgotten")


def test_an_unknown_address_refuses():
    a, unlisted = floats(1), floats(2)
    assert refusal(lambda: run_add(a, unlisted), a)
    assert not refusal(lambda: run_add(a, unlisted), a, unlisted)
    assert refusal(lambda: run_add(a[1:], None, out=allocate()), a)  # an address inside an input is not its start


def test_an_unknown_result_refuses():
    a = floats(1)
    assert refusal(lambda: run_add(a, None) + 1, a)
    assert refusal(lambda: run_add(a, None)[1:], a)


def test_an_operator_without_a_launch_refuses():
    a = floats(1)

    def silent() -> Tensor:
        call_recording.note_operator_start()
        return run_add(a, None)

    assert refusal(silent, a)
    assert refusal(lambda: allocate(), a)  # no launch


@pytest.mark.parametrize("finishes", [False, True])
def test_an_operator_of_two_launches_marks_its_last(finishes: bool):
    a = floats(1)

    def twice() -> Tensor:
        call_recording.note_operator_start()
        first, second = allocate(), allocate()
        for x, out, last in ((a, first, False), (first, second, finishes)):
            add(-1, x.data_ptr(), None, out.data_ptr(), 1.0)
            call_recording.note_launch(add, (x.data_ptr(), None, out.data_ptr()), (1.0,), last=last)
        return second

    _, recording = record(twice, (a,), one)
    assert (recording is not None) == finishes
    if recording is not None:
        assert_same_bits(recording.replay([floats(2)]), [floats(2) + 1 + 1])


def test_a_call_to_refuse_refuses():
    a = floats(1)

    def torchs() -> Tensor:
        out = run_add(a, None)
        call_recording.refuse("a sum by torch")
        return out

    assert refusal(torchs, a)


@pytest.mark.parametrize(
    "product",
    ["fprop", "dgrad", "wgrad", "bias", "grouped fprop", "grouped dgrad", "grouped wgrad", "grouped bias", "gather"],
)
def test_work_by_torch_in_a_layer_refuses(product: str, monkeypatch: pytest.MonkeyPatch):
    """Also work without a result, such as a gradient added to a buffer: a replay would skip it."""
    x, weight, grad = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 6)
    calls: dict[str, Callable[[], object]] = {
        "fprop": lambda: linear_plan.fprop(x, weight, None, None, None, torch.float32),
        "dgrad": lambda: linear_plan.dgrad(grad, None, weight, None, torch.float32),
        "wgrad": lambda: linear_plan.wgrad(grad, None, x, None, torch.float32, torch.zeros(6, 8)),
        "bias": lambda: Casts(get_recipe("mxfp8_wgrad_bf16")).gradient(grad, NeedsGrad(True, True, True)),
    }
    experts, acc, routing = torch.randn(2, 6, 8), torch.zeros(2, 6, 8), sort_by_expert(torch.tensor([[0, 1]] * 2), 2)
    groups, tokens = Groups(routing.offs), torch.randn(2, 8)
    calls |= {
        "grouped fprop": lambda: linear_plan.fprop(x, experts, None, None, None, torch.float32, groups),
        "grouped dgrad": lambda: linear_plan.dgrad(grad, None, experts, None, torch.float32, groups),
        "grouped wgrad": lambda: linear_plan.wgrad(grad, None, x, None, torch.float32, acc, groups),
        "grouped bias": lambda: Casts(get_recipe("mxfp8_wgrad_bf16"), None, groups).gradient(
            grad, NeedsGrad(True, True, True)
        ),
        "gather": lambda: Groups(routing.offs, routing.tokens, routing.rows).gathered(tokens),
    }
    found = Recorder([x, weight, grad], 3)
    monkeypatch.setattr(call_recording._state, "recorder", found, raising=False)
    calls[product]()
    # a kernel that notes no launch leaves its operator unfinished
    refused = found.refused in ("a product in high precision", "an unquantized product", "a sum by torch")
    assert refused if product != "gather" else found.operators == 1 > found.finished


def test_a_poisoned_buffer_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_POISON", True)
    a = floats(1)
    assert refusal(lambda: run_add(a, None), a)


def test_checked_ends_of_groups_refuse(monkeypatch: pytest.MonkeyPatch):
    """torch checks them, which is no recorded launch."""
    a = floats(1)
    monkeypatch.setenv("BLOCKSCALE_CHECK", "1")
    returned, recording = record(lambda: run_add(a, None), (a,), one)
    assert_same_bits(returned, a)
    assert recording is None


def test_two_inputs_with_one_address_refuse():
    a = floats(1)
    assert refusal(lambda: run_add(a, a), a, a)
    assert refusal(lambda: run_add(a, a), a, a[:5])
    assert not refusal(lambda: run_add(a, a), a)
    assert refusal(lambda: run_add(a, None), a, torch.empty(0))  # an empty tensor has no address


def test_a_call_that_raises_ends_its_recording():
    a = floats(1)

    def fails() -> Tensor:
        run_add(a, None)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(fails, (a,), one)
    assert call_recording.recorder() is None


def test_other_threads_are_not_recorded():
    a = floats(1)

    def elsewhere() -> None:
        assert call_recording.recorder() is None
        call_recording.refuse("not my call")
        run_add(floats(2), None)

    def call() -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return run_add(a, None)

    assert not refusal(call, a)


def test_notes_without_a_recording_do_nothing():
    out = run_add(floats(1), floats(2))
    call_recording.note_persistent_buffer(out, lambda: out)
    call_recording.refuse("not recording")
    assert call_recording.recorder() is None
