"""torch.use_deterministic_algorithms: every cast, layer and mixture of experts runs, and no byte depends on the mode.

In that mode torch fills new buffers, which it cannot do for FP4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import library
from blockscale.autograd import RECIPES
from blockscale.casts.permuted import permute_quantize_both, quantize_permute
from blockscale.formats import FORMATS
from support.products import ONE_D, assert_same_bits, gaussian


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_the_mode_changes_no_byte(call: Callable[[], Any], forget: Callable[[], None] | None = None) -> None:
    """Compare a call in the mode and outside.  forget: drops recordings, so that calls are recorded in the mode too."""
    want = call()
    with deterministic():
        assert_same_bits(call(), want)
        if forget is not None:
            forget()
            assert_same_bits(call(), want)


@pytest.mark.parametrize("shape", [(48, 200), (2, 33, 64), (0, 64)], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_casts(name: str, axis: int, shape: tuple[int, ...], device: torch.device):
    x = gaussian(*shape, seed=1).to(device)
    assert_the_mode_changes_no_byte(lambda: bs.dequantize(bs.quantize(x, name, axis=axis)))


@pytest.mark.parametrize("name", ONE_D)  # blocks of rows are not gathered
def test_rows_that_are_gathered_in_a_cast(name: str, device: torch.device):
    x, indices = gaussian(48, 64, seed=1).to(device), torch.arange(47, -1, -1, device=device, dtype=torch.int32)
    offs = torch.tensor([5, 48], dtype=torch.int32, device=device)
    assert_the_mode_changes_no_byte(lambda: quantize_permute(x, indices, name))
    assert_the_mode_changes_no_byte(lambda: permute_quantize_both(x, indices, offs, name, name))


def trained(make: Callable[[], torch.nn.Module], x: Tensor) -> list[Tensor]:
    """The result and all gradients, three times: on a GPU the second call is recorded and the third replayed."""
    torch.manual_seed(0)
    layer, found = make(), list[Tensor]()
    for _ in range(3):
        source = x.clone().requires_grad_()
        y = layer(source)
        found += [y.detach(), *torch.autograd.grad(y, [source, *layer.parameters()], torch.ones_like(y))]
    return found


LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **options: bs.nn.Linear(64, 96, **options),
    "SwiGLU": lambda **options: bs.nn.SwiGLU(64, 128, **options),
    "MoE": lambda **options: bs.nn.MoE(dim=64, hidden=96, experts=4, top_k=2, shared=64, **options),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers(
    recipe: str, kind: str, device: torch.device, forgotten: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    # torch requires it before its own products on a GPU
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x = gaussian(64, 64, seed=2).to(device)

    def make() -> torch.nn.Module:
        return LAYERS[kind](dtype=torch.bfloat16, device=device, recipe=recipe, name="layer")

    assert_the_mode_changes_no_byte(lambda: trained(make, x), forgotten.clear)


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp4", "nvfp4"])
def test_weights_that_are_cast_once_per_step(name: str):
    recipe = bs.get_recipe(name).replace(weight_cast="step")

    def call() -> Tensor:
        torch.manual_seed(0)
        layer = bs.nn.Linear(64, 64, recipe=recipe, name="layer")
        bs.refresh_weights_(layer)
        bs.refresh_weights_(layer)
        return layer(gaussian(8, 64, seed=3).float()).detach()

    assert_the_mode_changes_no_byte(call)


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), ()], ids=str)
def test_a_buffer_has_its_own_memory_in_either_mode(dtype: torch.dtype, shape: tuple[int, ...]):
    """As recordings need it: a dense buffer at an address of its own."""
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            made = library.empty(shape, dtype, torch.device("cpu"))
        finally:
            torch.use_deterministic_algorithms(False)
        assert (made.dtype, tuple(made.shape), made.storage_offset()) == (dtype, shape, 0)
        assert made.is_contiguous()
        assert made.untyped_storage().nbytes() == made.numel() * made.element_size()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_compiled_layers(name: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = bs.nn.Linear(64, 64, recipe=name, name="layer")
    x = gaussian(8, 64, seed=3).float().requires_grad_()
    want = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    with deterministic():
        y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        assert_same_bits(torch.autograd.grad(y.sum(), [x, *layer.parameters()]), want)
