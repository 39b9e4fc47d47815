"""Calls that are remembered: what may be, what may not, where buffers go; and on a GPU the same bytes as calls that are
not."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import library, replay
from blockscale.autograd import get_recipe, work
from blockscale.autograd.operands import Casts, Groups, Needs
from blockscale.grouped import sort_by_expert
from blockscale.replay import Recorder, Recording, record
from products import assert_same_bits, gaussian

N = 33  # floats: no multiple of any alignment


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Every test begins with nothing known, and without poison, which no replay would write."""
    known: dict[Any, Any] = {}
    monkeypatch.setattr(replay, "_KNOWN", known)
    monkeypatch.setattr(library, "_POISON", False)
    return known


# ---- a device of our own: kernels that read and write memory by address ----------------------------------------------

SEEN: list[tuple[int, ...]] = []


def add(device: int, a: int, b: int | None, out: int, plus: float) -> None:
    """out = a + b + plus, of N floats each."""
    SEEN.append((a, b or 0, out))
    x, y, z = (None if at is None else (ctypes.c_float * N).from_address(at) for at in (a, b, out))
    for i in range(N):
        z[i] = x[i] + (0 if y is None else y[i]) + plus  # pyright: ignore[reportOptionalSubscript]


def allocate(*shape: int) -> Tensor:
    return library.empty(shape or (N,), torch.float32, torch.device("cpu"))


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def run_add(a: Tensor, b: Tensor | None, plus: float = 0.0, out: Tensor | None = None) -> Tensor:
    """An operator: one launch is all of its work."""
    replay.started()
    out = allocate() if out is None else out
    pointers = a.data_ptr(), address(b), out.data_ptr()
    add(-1, *pointers, plus)
    replay.launched(add, pointers, (plus,))
    return out


def floats(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def one(found: Tensor) -> tuple[list[Tensor | None], object]:
    return [found], None


def refusal(call: Callable[[], Tensor], *inputs: Tensor) -> bool:
    """Whether a call is not remembered; it is done in any case."""
    returned, recording = record(call, inputs, one)
    assert isinstance(returned, Tensor)
    assert replay.recorder() is None
    return recording is None


# ---- what a recording does -----------------------------------------------------------------------------------------


def test_a_replay_computes_with_other_tensors():
    a, b = floats(1), floats(2)
    got, recording = record(lambda: run_add(a, b), (a, b), one)
    assert recording is not None
    assert_same_bits(got, a + b)
    x, y = floats(3), floats(4)
    (again,) = recording.replay([x, y])
    assert_same_bits(again, x + y)
    (third,) = recording.replay([y, y])  # one address is no problem any more: places are known
    assert_same_bits(third, y + y)
    assert_same_bits(again, x + y)


def test_no_address_is_an_address():
    a = floats(1)
    _, recording = record(lambda: run_add(a, None, 1.0), (a,), one)
    assert recording is not None
    assert recording.launches[0].places == (0, None, 1)
    assert_same_bits(recording.replay([floats(2)]), [floats(2) + 1])


def test_results_are_numbered():
    """In the order that is asked for: buffers, an input, nothing, and a buffer twice."""
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
    assert_same_bits([first, second], [a + b, a + b + b])  # what the recorded call returned is not written again


def test_views_are_returned_as_their_buffers():
    a = floats(1)
    _, recording = record(lambda: run_add(a, None).view(3, 11), (a,), one)
    assert recording is not None
    assert recording.replay([a])[0].shape == (N,)  # pyright: ignore[reportOptionalMemberAccess]


def test_scalars_are_buffers():
    a = floats(1)

    def write(device: int, at: int) -> None:
        ctypes.c_float.from_address(at).value = 7.0

    def call() -> Tensor:
        scalar = library.empty((), torch.float32, torch.device("cpu"))
        replay.started()
        write(-1, scalar.data_ptr())
        replay.launched(write, (scalar.data_ptr(),))
        return scalar

    _, recording = record(call, (a,), one)
    assert recording is not None
    assert_same_bits(recording.replay([a]), [torch.tensor(7.0)])


def test_what_is_added_into_is_an_input():
    a, total = floats(1), torch.zeros(N)
    _, recording = record(lambda: run_add(a, total, out=total), (a, total), lambda found: ([None], None))
    assert recording is not None
    for _ in range(2):
        assert recording.replay([a, total]) == [None]
    assert_same_bits(total, a + a + a)


def test_hidden_buffers_share_one_allocation_and_do_not_overlap():
    a = floats(1)

    def call() -> Tensor:
        first = run_add(a, None, 1.0)
        second = run_add(a, first)
        third = run_add(second, first)
        return run_add(third, second)

    _, recording = record(call, (a,), one)
    assert recording is not None
    assert recording.hidden == (0, 512, 1024)
    assert recording.hidden_bytes == 3 * 512
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
def test_hidden_buffers_of_any_size_are_aligned(size: int):
    a = floats(1)

    def call() -> Tensor:
        rooms = [allocate(size), allocate(2, size)]
        replay.started()
        replay.launched(lambda device, *at: None, [room.data_ptr() for room in rooms])
        return run_add(a, None)

    _, recording = record(call, (a,), one)
    assert recording is not None
    start, second = recording.hidden
    assert start == 0
    assert second % 512 == 0
    assert second >= 4 * size
    assert recording.hidden_bytes >= second + 8 * size


def test_providers_are_asked_each_time():
    """A workspace is that of the stream that a call runs on."""
    a, rooms = floats(1), [torch.full((N,), float(i)) for i in range(4)]
    asked: list[int] = []

    def again() -> Tensor:
        asked.append(len(asked) + 1)
        return rooms[len(asked)]

    def call() -> Tensor:
        for _ in range(2):  # two operators may be given the same one
            replay.provided(rooms[0], again)
        return run_add(a, rooms[0])

    _, recording = record(call, (a,), one)
    assert recording is not None
    assert asked == []
    assert_same_bits(recording.replay([a]), [a + rooms[2]])
    assert asked == [1, 2]
    asked.clear()
    assert_same_bits(recording.replay([a]), [a + rooms[2]])


# ---- what may not be remembered ------------------------------------------------------------------------------------


def test_an_unknown_address_refuses():
    a, stranger = floats(1), floats(2)
    assert refusal(lambda: run_add(a, stranger), a)
    assert not refusal(lambda: run_add(a, stranger), a, stranger)
    assert refusal(lambda: run_add(a[1:], None, out=allocate()), a)  # inside of an input is not its start


def test_an_unknown_result_refuses():
    a = floats(1)
    assert refusal(lambda: run_add(a, None) + 1, a)
    assert refusal(lambda: run_add(a, None)[1:], a)


def test_an_operator_without_a_launch_refuses():
    a = floats(1)

    def silent() -> Tensor:
        replay.started()
        return run_add(a, None)

    assert refusal(silent, a)
    assert refusal(lambda: allocate(), a)  # nothing at all was launched


@pytest.mark.parametrize("finishes", [False, True])
def test_an_operator_of_two_launches_tells_its_last(finishes: bool):
    a = floats(1)

    def twice() -> Tensor:
        replay.started()
        first, second = allocate(), allocate()
        for x, out, last in ((a, first, False), (first, second, finishes)):
            add(-1, x.data_ptr(), None, out.data_ptr(), 1.0)
            replay.launched(add, (x.data_ptr(), None, out.data_ptr()), (1.0,), last=last)
        return second

    _, recording = record(twice, (a,), one)
    assert (recording is not None) == finishes
    if recording is not None:
        assert_same_bits(recording.replay([floats(2)]), [floats(2) + 1 + 1])


def test_work_that_says_so_refuses():
    a = floats(1)

    def torchs() -> Tensor:
        out = run_add(a, None)
        replay.refuse("a sum by torch")
        return out

    assert refusal(torchs, a)


@pytest.mark.parametrize(
    "product",
    ["fprop", "dgrad", "wgrad", "bias", "grouped fprop", "grouped dgrad", "grouped wgrad", "grouped bias", "gather"],
)
def test_what_a_layer_does_by_torch_refuses(product: str, monkeypatch: pytest.MonkeyPatch):
    """Even where it leaves nothing to return, as a gradient that is added to a buffer: a replay would leave it out."""
    x, weight, grad = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 6)
    calls: dict[str, Callable[[], object]] = {
        "fprop": lambda: work._fprop(x, weight, None, None, None, torch.float32),
        "dgrad": lambda: work.dgrad(grad, None, weight, None, torch.float32),
        "wgrad": lambda: work.wgrad(grad, None, x, None, torch.float32, torch.zeros(6, 8)),
        "bias": lambda: Casts(get_recipe("mxfp8_wgrad_bf16")).gradient(grad, Needs(True, True, True)),
    }
    experts, acc, routing = torch.randn(2, 6, 8), torch.zeros(2, 6, 8), sort_by_expert(torch.tensor([[0, 1]] * 2), 2)
    groups, tokens = Groups(routing.offs), torch.randn(2, 8)
    calls |= {
        "grouped fprop": lambda: work._fprop(x, experts, None, None, None, torch.float32, groups),
        "grouped dgrad": lambda: work.dgrad(grad, None, experts, None, torch.float32, groups),
        "grouped wgrad": lambda: work.wgrad(grad, None, x, None, torch.float32, acc, groups),
        "grouped bias": lambda: Casts(get_recipe("mxfp8_wgrad_bf16"), None, groups).gradient(
            grad, Needs(True, True, True)
        ),
        "gather": lambda: Groups(routing.offs, routing.tokens, routing.rows).gathered(tokens),
    }
    found = Recorder([x, weight, grad], 3)
    monkeypatch.setattr(replay._state, "recorder", found, raising=False)
    calls[product]()
    # a row of the table that tells of no launch leaves its operator unfinished
    refused = found.refused in ("a product in high precision", "a sum by torch")
    assert refused if product != "gather" else found.operators == 1 > found.finished


def test_a_poisoned_buffer_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_POISON", True)
    a = floats(1)
    assert refusal(lambda: run_add(a, None), a)


def test_checked_ends_of_groups_refuse(monkeypatch: pytest.MonkeyPatch):
    """They are looked at by torch, which no launch tells of."""
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
    assert refusal(lambda: run_add(a, None), a, torch.empty(0))  # nothing is nowhere


def test_a_call_that_fails_leaves_nobody_recording():
    a = floats(1)

    def fails() -> Tensor:
        run_add(a, None)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(fails, (a,), one)
    assert replay.recorder() is None


def test_other_threads_are_not_recorded():
    a = floats(1)

    def elsewhere() -> None:
        assert replay.recorder() is None
        replay.refuse("not my call")
        run_add(floats(2), None)

    def call() -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return run_add(a, None)

    assert not refusal(call, a)


def test_where_nobody_records_nothing_is_told():
    out = run_add(floats(1), floats(2))
    replay.provided(out, lambda: out)
    replay.refuse("nobody hears")
    assert replay.recorder() is None


# ---- learning ------------------------------------------------------------------------------------------------------


def learned(key: str, call: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
    return replay.learn((key,), call, inputs, one)


def test_the_second_call_is_recorded():
    """The first compiles its kernels, and would not be like the others."""
    a, recorded = floats(1), []

    def call() -> Tensor:
        recorded.append(replay.recorder() is not None)
        return run_add(a, None, 2.0)

    for seen in ([False], [False, True]):
        assert replay.known(("key",)) is None
        assert_same_bits(learned("key", call, a), a + 2)
        assert recorded == seen
    recording = replay.known(("key",))
    assert isinstance(recording, Recording)
    assert_same_bits(recording.replay([floats(5)]), [floats(5) + 2])
    assert replay.known(("other",)) is None


def test_some_tries_and_no_more():
    a, stranger, recorded = floats(1), floats(2), []

    def call() -> Tensor:
        recorded.append(replay.recorder() is not None)
        return run_add(a, stranger)

    for _ in range(7):
        assert_same_bits(learned("key", call, a), a + stranger)
    assert recorded == [False, True, True, True, False, False, False]
    assert replay.known(("key",)) is None


def test_a_later_try_may_succeed():
    a, stranger = floats(1), floats(2)
    for inputs in ((a,), (a,), (a, stranger)):
        learned("key", lambda: run_add(a, stranger), *inputs)
    assert replay.known(("key",)) is not None


def test_a_known_call_that_is_learned_again_is_only_done():
    a = floats(1)
    for _ in range(2):
        learned("key", lambda: run_add(a, None), a)
    recording = replay.known(("key",))
    assert_same_bits(learned("key", lambda: run_add(a, None), a), a)
    assert replay.known(("key",)) is recording


def test_memory_of_calls_is_bounded(monkeypatch: pytest.MonkeyPatch, forgotten: dict[Any, Any]):
    """Also of calls that were made once: with another number of tokens each time there are many."""
    monkeypatch.setattr(replay, "_MOST_KNOWN", 8)
    a = floats(1)
    for times in (1, 2):
        for number in range(50):
            for _ in range(times):
                learned(f"{times} {number}", lambda: run_add(a, None), a)
            assert len(forgotten) <= 8
    assert replay.known(("2 49",)) is not None


def test_a_layout_is_all_but_the_address():
    x = torch.zeros(64, 64)
    same = torch.zeros(64, 64)
    assert replay.layout(x) == replay.layout(same)
    others = [x.mT, x[1:], x[:, :32], x.bfloat16(), x[None], x.flatten()[1:-63].view(63, 64), x[:, 1:33]]
    assert len({replay.layout(other) for other in (x, *others)}) == 1 + len(others)


def test_layers_on_a_cpu_are_not_replayed(forgotten: dict[Any, Any]):
    layer = bs.nn.Linear(64, 64, recipe="fp8_blockwise")
    for _ in range(4):
        layer(torch.randn(8, 64)).sum().backward()
    assert not forgotten


# ---- on a GPU ------------------------------------------------------------------------------------------------------

STEPS = 8


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recording]]:
    """What was replayed."""
    found: list[Recording] = []
    plain = Recording.replay

    def counted(self: Recording, inputs: Any) -> list[Tensor | None]:
        found.append(self)
        return plain(self, inputs)

    monkeypatch.setattr(Recording, "replay", counted)
    return found


class Training:
    """A layer, its optimizer and an input for each step."""

    def __init__(self, m: int | tuple[int, ...], n: int, k: int, *, bias: bool = False, weight_cast: str = "forward"):
        recipe = bs.get_recipe("fp8_blockwise").replace(weight_cast=weight_cast)
        torch.manual_seed(0)
        self.layer = bs.nn.Linear(k, n, bias, "cuda", torch.bfloat16, recipe=recipe)
        lead = (m,) if isinstance(m, int) else m
        self.xs = [gaussian(*lead, k, device="cuda", seed=i) for i in range(STEPS)]
        self.dy = gaussian(*lead, n, device="cuda", seed=99)
        self.x = self.xs[0].clone().requires_grad_()
        parameters = self.layer.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)
        if weight_cast == "step":
            bs.attach(self.optimizer, self.layer)

    def step(self) -> list[Tensor | None]:
        """y and all gradients; the weights change."""
        self.x.grad = None
        self.optimizer.zero_grad()
        y = self.layer(self.x)
        y.backward(self.dy)
        found = [y.detach(), self.x.grad, *(param.grad for param in self.layer.parameters())]
        self.optimizer.step()
        return found

    def run(self, x: Tensor) -> list[Tensor | None]:
        with torch.no_grad():
            self.x.copy_(x)
        return [None if each is None else each.clone() for each in self.step()]


def same_training(*sizes: Any, **named: Any) -> None:
    """Replayed where it may be, and in the ordinary way, step by step."""
    one, other = Training(*sizes, **named), Training(*sizes, **named)
    for x in one.xs:
        got = one.run(x)
        with bs.use_backend("auto"):
            want = other.run(x)
        assert_same_bits(got, want)
    assert_same_bits(list(one.layer.parameters()), list(other.layer.parameters()))


SIZES = (256, 512, 384)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("weight_cast", ["forward", "twice", "step"])
def test_replayed_calls_give_ordinary_bytes(replays: list[Recording], weight_cast: str):
    same_training(*SIZES, weight_cast=weight_cast)
    # plain, recorded, then replayed: the forward from the third step on, the backward two steps later
    assert len(replays) >= (STEPS - 3) + (STEPS - 5)
    assert len(set(replays)) == 2


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "sizes",
    [(37, 200, 72), (1, 17, 33), (0, 64, 64), (100, 512, 384), ((2, 128), 512, 384), ((3, 5, 7), 520, 136)],
    ids=str,
)
def test_sizes_that_take_other_ways_give_ordinary_bytes(sizes: Any, bias: bool):
    same_training(*sizes, bias=bias)


@pytest.mark.gpu
@pytest.mark.sm90
def test_a_forward_without_a_backward_is_replayed(replays: list[Recording]):
    layer = Training(*SIZES, bias=True).layer
    with torch.no_grad():
        for seed in range(5):
            x = gaussian(256, 384, device="cuda", seed=seed)
            got = layer(x)
            with bs.use_backend("auto"):
                assert_same_bits(got, layer(x))
    assert len(replays) >= 2


@pytest.mark.gpu
@pytest.mark.sm90
def test_main_grads_are_added_to_by_replays(replays: list[Recording]):
    one, other = Training(*SIZES), Training(*SIZES)
    for each in (one, other):
        each.layer.weight.main_grad = torch.zeros(512, 384, device="cuda")  # pyright: ignore[reportAttributeAccessIssue]
    for x in one.xs:
        got = one.run(x)
        with bs.use_backend("auto"):
            assert_same_bits(got, other.run(x))
        assert_same_bits(one.layer.weight.main_grad, other.layer.weight.main_grad)  # pyright: ignore[reportAttributeAccessIssue]
    assert replays


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("trained", [False, True], ids=["at once", "after steps of the default stream"])
@pytest.mark.parametrize("weight_cast", ["forward", "step"])
def test_a_captured_training_step_is_an_eager_one(replays: list[Recording], weight_cast: str, trained: bool):
    """Forward, backward, optimizer and the refresh of shared casts in one CUDA graph. After steps of the default stream
    a capture fails as long as anything keeps their graph alive: its leaves would have to wait for that stream."""
    from blockscale.gemm import _hopper_launch

    _hopper_launch._KNOWN.clear()  # so that these steps are the first of their shapes
    warm = 6
    one, other = (
        Training(*SIZES, bias=True, weight_cast=weight_cast),
        Training(*SIZES, bias=True, weight_cast=weight_cast),
    )
    if trained:
        for each in (one, other):
            for _ in range(3):
                each.run(each.xs[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            one.run(one.xs[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    before = len(replays)
    with torch.cuda.graph(graph):
        found = one.step()
    assert len(replays) > before
    with bs.use_backend("auto"):
        for _ in range(warm):
            other.run(other.xs[0])
    for x in one.xs:
        with torch.no_grad():
            one.x.copy_(x)
        graph.replay()
        with bs.use_backend("auto"):
            want = other.run(x)
        assert_same_bits(found, want)
        assert_same_bits(list(one.layer.parameters()), list(other.layer.parameters()))


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("own_stream", [False, True], ids=["one stream", "own stream"])
def test_a_second_thread_replays_too(replays: list[Recording], own_stream: bool):
    same_training(*SIZES)
    before, failures = len(replays), []

    def work() -> None:
        try:
            stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                same_training(*SIZES)
        except BaseException as failure:  # a thread's failures are nobody's
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    assert len(replays) > before


@pytest.mark.gpu
@pytest.mark.sm90
def test_a_profiler_sees_operators_and_the_same_bytes(replays: list[Recording]):
    one, other = Training(*SIZES), Training(*SIZES)
    for x in one.xs[:6]:
        one.run(x)
        with bs.use_backend("auto"):
            other.run(x)
    before = len(replays)
    with torch.profiler.profile() as profile:
        got = one.run(one.xs[6])
    assert len(replays) == before
    with bs.use_backend("auto"):
        assert_same_bits(got, other.run(one.xs[6]))
    assert {"blockscale::quantize_both", "blockscale::scaled_mm"} <= {event.key for event in profile.key_averages()}
    got = one.run(one.xs[7])
    assert len(replays) == before + 2
    with bs.use_backend("auto"):
        assert_same_bits(got, other.run(one.xs[7]))
