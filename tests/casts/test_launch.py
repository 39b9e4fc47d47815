"""Recorded launches of casts: arguments of replays as the driver receives them, with a fake driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import blockscale as bs
from blockscale import launch
from blockscale.casts import ops
from blockscale.formats.cast_spec import Cast

triton = pytest.importorskip("triton")
_triton = pytest.importorskip("blockscale.casts._triton")
_dequantize = pytest.importorskip("blockscale.casts._triton_dequantize")
_fused = pytest.importorskip("blockscale.casts._triton_fused")
pytestmark = [
    pytest.mark.skipif(_triton.INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.usefixtures("forgotten"),  # poisoned buffers are not recorded
]


class Driver:
    get_current_stream = staticmethod(lambda device: 1000 + device)


class Kernel:
    """Fake of a Triton kernel and of its compiled form; both record their arguments."""

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self) -> None:
        self.compiled: list[tuple[object, ...]] = []
        self.raw: list[tuple[object, ...]] = []

    def __getitem__(self, grid: object):
        def launch(*args: object, **options: object) -> Kernel:
            self.compiled.append(args)
            return self

        return launch

    def run(self, *args: object) -> None:
        self.raw.append(args)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(_triton, "cast_kernel", kernel)
    monkeypatch.setattr(_dequantize, "_dequantize_kernel", kernel)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return kernel


def cast(x: torch.Tensor, name: str, axis: int) -> ops.Buffers:
    cast = Cast(bs.CastSpec(name).plan())
    out = ops.allocate(x, cast, axis, None)
    _triton.quantize(x, cast, axis, out, None)
    return out


def recorded(call: Callable[[], Sequence[torch.Tensor | None]], *inputs: torch.Tensor) -> launch.Recording | None:
    return launch.record(call, inputs, lambda out: (list(out), None))[1]


def as_addresses(args: tuple[object, ...]) -> list[object]:
    """Arguments of a JIT launch, with tensors as addresses: the arguments that a replayed launch must have."""
    return [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_1x128", "mxfp4"])
def test_a_replayed_cast_passes_its_own_addresses(kernel: Kernel, name: str, axis: int) -> None:
    first = torch.ones(64, 128)
    recording = recorded(lambda: cast(first, name, axis), first)
    assert recording is not None
    assert (len(kernel.compiled), kernel.raw) == (1, [])
    x = torch.ones(64, 128)
    data, scale, factor = recording.replay([x])
    assert data is not None
    assert scale is not None
    assert factor is None
    (args,) = kernel.raw
    assert args[3:9] == (999, 77, (4, 1, 0), None, None, None)
    before, after = as_addresses(kernel.compiled[0]), list(args[9:])
    place = 6 if axis == -1 else 11  # x, y, z, index, offs, partials, then five per operand
    assert after[0] == x.data_ptr()
    assert after[place : place + 2] == [data.data_ptr(), scale.data_ptr()]
    assert after[16:] == before[16:]
    assert [i for i in range(16) if bool(before[i]) != bool(after[i])] == []


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.ones(128, 128),
        lambda: torch.ones(64, 256)[:, :128],
        lambda: torch.ones(64, 128).half(),
        lambda: torch.ones(64 * 128 + 1)[1:].view(64, 128),
        lambda: torch.ones(1, 64, 128),
    ],
    ids=["shape", "stride", "dtype", "alignment", "rank"],
)
def test_another_layout_is_another_call(other: Callable[[], torch.Tensor]) -> None:
    key = launch.call_key("cast", torch.ones(64, 128), "mxfp8_e4m3", -1)
    assert key == launch.call_key("cast", torch.ones(64, 128), "mxfp8_e4m3", -1)
    assert key != launch.call_key("cast", other(), "mxfp8_e4m3", -1)
    assert key != launch.call_key("cast", torch.ones(64, 128), "mxfp8_e4m3", -2)


def test_epsilon_is_an_argument_of_the_launch(kernel: Kernel) -> None:
    x, weight, cast = torch.ones(64, 128), torch.ones(128), Cast(bs.CastSpec("mxfp8_e4m3").plan())
    for eps in (1e-6, 1e-2):
        _fused.rmsnorm(x, weight, eps, cast, ops.allocate(x, cast, -1, None), torch.empty(64))
    assert [
        sum(isinstance(arg, float) and arg == eps for arg in args)
        for args, eps in zip(kernel.compiled, (1e-6, 1e-2), strict=True)
    ] == [1, 1]


def test_no_call_is_replayed_while_triton_launch_hooks_are_set(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels then start through Triton, which calls the hooks."""
    x, key = torch.ones(64, 128), ("a cast",)

    def call() -> ops.Buffers:
        return launch.run_and_record(key, lambda: cast(x, "mxfp8_e4m3", -1), [x], lambda out: (list(out), None))

    call(), call()
    assert launch.find_recording(key) is not None
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert launch.find_recording(key) is None
    call()
    assert (len(kernel.compiled), len(kernel.raw)) == (3, 0)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_1x128", "nvfp4"])
def test_a_replayed_decode_passes_its_own_addresses(kernel: Kernel, name: str, axis: int) -> None:
    def parts(q: bs.BlockScaled) -> list[torch.Tensor]:
        return [each for each in (q.data, q.scale, q.global_scale) if each is not None]

    def decoded() -> tuple[torch.Tensor]:
        out = torch.empty(64, 128)
        _dequantize.dequantize(first, out)
        return (out,)

    first, second = (bs.quantize(torch.ones(64, 128), name, axis=axis) for _ in range(2))
    recording = recorded(decoded, *parts(first))
    assert recording is not None
    (out,) = recording.replay(parts(second))
    assert out is not None
    before, after = as_addresses(kernel.compiled[0]), list(kernel.raw[0][9:])
    factor = None if second.global_scale is None else second.global_scale.data_ptr()
    assert after[:5] == [second.data.data_ptr(), second.scale.data_ptr(), factor, None, out.data_ptr()]
    assert after[5:] == before[5:]


def test_decode_of_a_copy_is_not_recorded(kernel: Kernel) -> None:
    q = bs.quantize(torch.ones(2, 64, 256), "mxfp8_e4m3", scale_layout="blocked")
    apart = torch.zeros(2, 2 * q.scale.shape[1], dtype=torch.uint8).view(q.scale.dtype)[:, ::2]
    copied = bs.BlockScaled(q.data, apart, None, q.format, -1, "blocked", q.shape)
    out = torch.empty(q.shape)
    assert recorded(lambda: (_dequantize.dequantize(copied, out),), q.data, apart, out) is None


def test_ptx_text_is_part_of_the_compile_key() -> None:
    """Triton keys compiled kernels by their source; inline PTX assembled by Python must be part of that key."""
    codes = pytest.importorskip("blockscale.casts._device_codes")
    before = codes._ptx_for.cache_key  # collects the globals of the function
    assert "_PTX" in {name for name, _ in codes._ptx_for.used_global_vals}
    changed = triton.constexpr_function(codes._ptx_for.fn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codes, "_PTX", triton.language.constexpr({}))
        assert changed.cache_key != before
    assert triton.constexpr_function(codes._ptx_for.fn).cache_key == before
