"""Calls that cannot be recorded: work outside of recorded launches, and addresses of no recorded tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import launch, library
from blockscale.autograd import get_recipe, linear_plan
from blockscale.autograd.mlp_plan import swiglu_bias_gradient
from blockscale.autograd.operands import Casts, NeedsGrad
from blockscale.formats.layout import check_group_ends
from blockscale.grouped import Routing, sort_by_expert
from blockscale.launch import record
from blockscale.launch.recording import Recorder
from support.products import assert_same_bits
from support.recorded import N, allocate, floats, one, refusal, run_add

pytestmark = pytest.mark.usefixtures("forgotten")


def test_an_unknown_address_refuses():
    a, unlisted = floats(1), floats(2)
    assert refusal(lambda: run_add(a, unlisted), a)
    assert not refusal(lambda: run_add(a, unlisted), a, unlisted)


def test_an_unknown_result_refuses():
    a = floats(1)
    assert refusal(lambda: run_add(a, None) + 1, a)
    assert refusal(lambda: run_add(a, None)[1:], a)


def test_a_call_without_a_launch_refuses():
    assert refusal(lambda: allocate(), floats(1))


def test_an_address_inside_a_tensor_moves_with_it():
    """A kernel may be given a view: the last end of groups, a column of a buffer."""
    a, wide = floats(1), torch.randn(2, N)
    _, recording = record(lambda: run_add(wide[1], a), (a, wide), one)
    assert recording is not None
    other = torch.randn(2, N)
    assert_same_bits(recording.replay([a, other]), [other[1] + a])


def test_zeroed_buffers_are_zero_in_each_replay():
    a = floats(1)

    def call() -> Tensor:
        total = torch.zeros(N)
        run_add(a, total, out=total)
        return run_add(total, None)

    _, recording = record(call, (a,), one)
    assert recording is not None
    for _ in range(2):
        assert_same_bits(recording.replay([floats(2)]), [floats(2)])


def test_an_address_inside_several_tensors_refuses():
    """Columns of one matrix: which of them a view belongs to cannot be told."""
    wide = torch.randn(4, N + 12)
    left, right = wide[:, :4], wide[:, 4:]
    assert refusal(lambda: run_add(right[0, 4:], None), left, right)


def reason(call: Callable[[], object], *inputs: Tensor) -> str:
    """Why a call is not recorded, or an empty string."""
    with Recorder(inputs) as found:
        call()
    return found.refused


def test_allocations_and_views_do_not_refuse():
    a = torch.randn(4, 8)
    calls = (
        lambda: torch.empty(3, dtype=torch.bfloat16),
        lambda: a.new_empty((2, 2)),
        lambda: torch.empty_like(a),
        lambda: torch.zeros(2, dtype=torch.int32),
        lambda: a.view(2, 16).mT[1:, None].expand(15, 3, 2).unflatten(0, (3, 5)),
        lambda: a.view(torch.uint8).view(torch.int32),
        lambda: a.as_strided((2, 2), (1, 8)).detach().squeeze().select(0, 1),
        lambda: a.contiguous().to(torch.float32).reshape(32),
    )
    assert [reason(call, a) for call in calls] == [""] * len(calls)


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a + 1,
        lambda a: a.add_(1),
        lambda a: a.mT.contiguous(),
        lambda a: a.to(torch.bfloat16),
        lambda a: a.mT.reshape(32),
        lambda a: a.sum().item(),
        lambda a: torch.full((3,), 7.0),
        lambda a: torch.mm(a, a.mT),
        lambda a: a.copy_(a * 2),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_any_other_work_by_torch_refuses(call: Callable[[Tensor], object], mode: Callable[[], Any]):
    with mode():
        a = torch.randn(4, 8)
        assert "by torch" in reason(lambda: call(a), a)


@pytest.mark.parametrize(
    "product",
    ["fprop", "dgrad", "wgrad", "bias", "grouped fprop", "grouped dgrad", "grouped wgrad", "grouped bias", "gather",
     "sort", "gate and up bias"],
)  # fmt: skip
def test_work_by_torch_in_a_layer_refuses(product: str):
    """Also work without a result, such as a gradient added to a buffer: a replay would skip it."""
    x, weight, grad = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 6)
    calls: dict[str, Callable[[], object]] = {
        "fprop": lambda: linear_plan.fprop(x, weight, None, None, None, torch.float32),
        "dgrad": lambda: linear_plan.dgrad(grad, None, weight, None, torch.float32),
        "wgrad": lambda: linear_plan.wgrad(grad, None, x, None, torch.float32, torch.zeros(6, 8)),
        "bias": lambda: Casts(get_recipe("mxfp8_wgrad_bf16")).gradient(grad, NeedsGrad(True, True, True)),
    }
    experts, acc, routing = torch.randn(2, 6, 8), torch.zeros(2, 6, 8), sort_by_expert(torch.tensor([[0, 1]] * 2), 2)
    groups, tokens = Routing(routing.offs), torch.randn(2, 8)
    calls |= {
        "grouped fprop": lambda: linear_plan.fprop(x, experts, None, None, None, torch.float32, groups),
        "grouped dgrad": lambda: linear_plan.dgrad(grad, None, experts, None, torch.float32, groups),
        "grouped wgrad": lambda: linear_plan.wgrad(grad, None, x, None, torch.float32, acc, groups),
        "grouped bias": lambda: Casts(get_recipe("mxfp8_wgrad_bf16"), None, groups).gradient(
            grad, NeedsGrad(True, True, True)
        ),
        "gather": lambda: routing.permuted(tokens),
        "sort": lambda: sort_by_expert(torch.tensor([[0, 1]] * 2), 2),
        "gate and up bias": lambda: swiglu_bias_gradient(x, torch.randn(4, 16)),
    }
    assert "by torch" in reason(calls[product], x, weight, grad)


@pytest.mark.parametrize("name", ["quantize", "quantize_both", "scaled_mm", "accumulate", "dequantize"])
def test_operators_that_torch_computes_refuse(name: str):
    """The reference backend works by operators of torch. Operators with arguments that are written in place go through
    the dispatcher, and the recording sees into them too."""
    x, total = torch.randn(4, 64), torch.zeros(4, 4)
    q = bs.quantize(x, "mxfp8_e4m3")
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: bs.quantize(x, "mxfp8_e4m3"),
        "quantize_both": lambda: bs.quantize_both(x, "mxfp8_e4m3", "mxfp8_e4m3"),
        "scaled_mm": lambda: bs.scaled_mm(q, q),
        "accumulate": lambda: bs.scaled_mm(q, q, torch.float32, accumulate=total),
        "dequantize": lambda: bs.dequantize(q),
    }
    assert "by torch" in reason(calls[name], x, q.data, q.scale, total)


def test_a_poisoned_buffer_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_POISON", True)
    a = floats(1)
    assert refusal(lambda: run_add(a, None), a)


def test_checked_ends_of_groups_refuse():
    """torch checks them, on a GPU with BLOCKSCALE_CHECK=1: a replay would not."""
    offs = torch.tensor([1, 4], dtype=torch.int32)
    assert "by torch" in reason(lambda: check_group_ends(offs, 4), offs)


def test_two_inputs_with_one_address_refuse():
    a = floats(1)
    assert refusal(lambda: run_add(a, a), a, a)
    assert refusal(lambda: run_add(a, a), a, a[:5])
    assert not refusal(lambda: run_add(a, a), a)
    assert not refusal(lambda: run_add(a, None), a, torch.empty(0))  # an empty tensor has no address


def test_a_call_that_raises_ends_its_recording():
    a = floats(1)

    def fails() -> Tensor:
        run_add(a, None)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(fails, (a,), one)
    assert launch.recorder() is None


def test_other_threads_are_not_recorded():
    a = floats(1)

    def elsewhere() -> None:
        assert launch.recorder() is None
        launch.refuse("not my call")
        run_add(floats(2), None)

    def call() -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return run_add(a, None)

    assert not refusal(call, a)


def test_notes_without_a_recording_do_nothing():
    out = run_add(floats(1), floats(2))
    launch.note_persistent_buffer(out, lambda: out)
    launch.refuse("not recording")
    assert launch.recorder() is None
