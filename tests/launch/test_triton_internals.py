"""Triton's private parts, with this version of Triton: a launch without its host path passes the same arguments."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs triton, which is not installed")
driver = pytest.importorskip("triton.backends.nvidia.driver", reason="this Triton has no backend for NVIDIA GPUs")
_gluon = pytest.importorskip("blockscale.gemm._gluon", reason="this Triton has no Gluon for Hopper")
triton_internals = pytest.importorskip("blockscale.launch.triton_internals")

SOURCE = Path(triton_internals.__file__).parents[1]
GRID = (3, 2, 1)
META = {"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [64, 128], "fp4_padded": False}
LAYOUT = _gluon.gl.NVMMASharedLayout.get_default_for([64, 128], _gluon.gl.float8e4nv)


def descriptor(tensor: Tensor) -> Any:
    return _gluon.TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [64, 128], LAYOUT)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Arguments of the driver's launch; without a GPU a tensor map is the arguments that it is made from."""
    found: list[tuple[object, ...]] = []
    utils = SimpleNamespace(fill_tma_descriptor=lambda *args: ("map", *map(str, args)))
    active = SimpleNamespace(utils=utils, get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return found


def compiled(launched: list[tuple[object, ...]], **signature: str) -> Any:
    """A compiled kernel whose launch writes down its arguments."""
    run = object.__new__(driver.CudaLauncher)
    metas = [META] * sum(each.startswith("tensordesc") for each in signature.values())
    run.launch = driver.wrap_handle_tensordesc(lambda *args: launched.append(args), signature, metas)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    # of later versions
    run.gsan_enabled, run.arg_annotations, run.kernel_signature = False, (), ()
    return SimpleNamespace(run=run, function=5, packed_metadata=("metadata",))


def is_known() -> bool:
    """Whether launches skip Triton's host path with this version."""
    return triton.__version__.startswith("3.6.")


def public_launch(kernel: Any, *arguments: object) -> None:
    """The launch of a compiled kernel by Triton itself, on the stream 71."""
    kernel.run(*GRID, 71, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


def replayed_launch(start: Any, addresses: tuple[object, ...], *rest: object) -> None:
    start.run(71, *start.head, *(addresses if start.expand is None else start.expand(addresses)), *rest)


@pytest.mark.parametrize("signature", [{"a": "*fp32", "n": "i32"}, {"a": "tensordesc<fp8[64, 128]>", "n": "i32"}])
def test_the_guard_knows_this_version(signature: dict[str, str], launched: list[tuple[object, ...]]):
    kernel = compiled(launched, **signature)
    descriptors = signature["a"].startswith("tensordesc")
    assert (triton_internals.bare_launcher(kernel, GRID, descriptors) is not None) == is_known()


@pytest.mark.parametrize("known", [True, False])
def test_a_replayed_launch_passes_what_triton_passes(
    known: bool, launched: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
):
    if not known:
        monkeypatch.setattr(triton_internals, "bare_launcher", lambda *args: None)
    kernel = compiled(launched, a="*fp32", b="*fp32", n="i32")
    public_launch(kernel, 4096, None, 7)
    replayed_launch(triton_internals.recorded_start(kernel, GRID, 1, ()), (4096, None), 7)
    want, got = launched
    assert want[:4] == (*GRID, 71)
    assert got == want


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.skipif(not is_known(), reason="launches of this Triton take its public path")
def test_expanded_descriptors_are_those_of_triton(
    known: bool, launched: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
):
    if not known:
        monkeypatch.setattr(triton_internals, "bare_launcher", lambda *args: None)
    kernel = compiled(launched, a="tensordesc<fp8[64, 128]>", b="tensordesc<fp8[64, 128]>", p="*fp32", n="i32")
    first, second = torch.zeros(128, 256, dtype=torch.float8_e4m3fn), torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    public_launch(kernel, descriptor(first), descriptor(second), 4096, 7)
    descriptors = [descriptor(torch.empty_like(first)), descriptor(torch.empty_like(second))]
    start = triton_internals.recorded_start(kernel, GRID, 1, descriptors)
    monkeypatch.setattr(triton_internals._thread, "has_context", True, raising=False)
    for _ in range(2):
        replayed_launch(start, (first.data_ptr(), second.data_ptr(), 4096), 7)
    want, *got = launched
    assert want[:4] == (*GRID, 71)
    assert got == [want, want]


@pytest.mark.parametrize("change", ["scratch", "closure", "expansion", "flags", "order"])
def test_a_launcher_that_differs_takes_the_public_path(
    change: str, launched: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
):
    kernel = compiled(launched, a="tensordesc<fp8[64, 128]>", n="i32")
    if change == "scratch":
        kernel.run.global_scratch_size = 16
    elif change == "closure":
        kernel.run.launch = lambda *args: None
    elif change == "expansion":
        monkeypatch.setattr(triton_internals, "_expand_descriptor", lambda arg: arg)
    elif change == "order":
        monkeypatch.setattr(driver.CudaLauncher, "__call__", lambda self, *args: self.launch(*args[3:], *args[:3]))
    else:
        del kernel.run.launch_pdl
    assert triton_internals.bare_launcher(kernel, GRID, 1) is None


def test_a_descriptor_at_another_address_equals_a_new_one():
    first, second = (torch.zeros(128, 256, dtype=torch.float8_e4m3fn) for _ in range(2))
    made = descriptor(first)
    fields = triton_internals.descriptor_fields(made)
    assert not any(isinstance(value, Tensor) for value in fields.values()), "a recording keeps no tensor alive"
    filled = triton_internals.descriptor_at(type(made), fields, second)
    assert type(filled) is type(made)
    assert filled.base is second
    assert made.base is first
    assert triton_internals.descriptor_fields(filled) == triton_internals.descriptor_fields(descriptor(second))


def starts_a_kernel(node: ast.AST) -> bool:
    """`name_kernel[grid](...)` or `name_kernel.warmup(...)` or `.run(...)`, and the same with a variable `kernel`."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    named = function.value if isinstance(function, ast.Subscript | ast.Attribute) else None
    if isinstance(function, ast.Attribute) and function.attr not in ("warmup", "run"):
        return False
    return isinstance(named, ast.Name) and (named.id == "kernel" or named.id.endswith("_kernel"))


def test_kernels_start_through_launch_alone():
    """A kernel that starts elsewhere would be missing in a recording, and a replay would skip it."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if starts_a_kernel(node)
    }
    assert found == {"launch/kernels.py"}


def test_private_parts_of_triton_are_in_one_file():
    """Launchers, compiled kernels and drivers; the hook that selects ptxas is public (`knobs.runtime`)."""
    private = (
        "triton.backends.nvidia",
        "triton.runtime.driver",
        "packed_metadata",
        "tensordesc_meta",
        "launch_enter_hook",
    )
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(word in path.read_text() for word in private)
    }
    assert found == {"launch/triton_internals.py"}
