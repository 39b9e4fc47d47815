"""On a GPU no layer of a model uses the reference backend, which is slow and syncs with the host.

Layers run on the CPU while kernels are selected as on a GPU: the test records the selected kernel and runs the
reference.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale import hardware, registry
from blockscale.autograd.recipe import get_recipe
from blockscale.hardware import Capability
from blockscale.registry import Kernel, Request

pytest.importorskip("triton", reason="needs triton, which is not installed")
TOKENS = 40
# like DeepSeek 16B's 10944, gpt-oss's 2880 and vocabularies, some are no multiples of 128
SIZES = ((256, 384), (192, 320), (200, 136), (96, 10))
RECIPES = {
    **{name: get_recipe(name) for name in ("fp8_blockwise", "mxfp8", "mxfp4", "nvfp4")},
    "mxfp8_128x128": get_recipe("mxfp8").with_weights("mxfp8_e4m3_128x128"),
}


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Operations, and the kernels that an H200 would use for them."""
    found: dict[str, set[str]] = {}
    real, capability = registry.select, hardware.capability
    hopper = Capability("cuda", 90)

    def select(request: Request) -> Kernel:
        found.setdefault(request.op, set()).add(f"{real(request).backend} {request}")
        return next(entry for entry in registry.kernels(request.op) if entry.backend == "reference")

    for name, module in list(sys.modules.items()):
        if name.startswith("blockscale."):
            if getattr(module, "select", None) is real:
                monkeypatch.setattr(module, "select", select)
            if getattr(module, "capability", None) is capability:
                monkeypatch.setattr(module, "capability", lambda device: hopper)
    return found


def train(module: nn.Module, *inputs: torch.Tensor) -> None:
    inputs[0].requires_grad_()
    y = module(*inputs)
    y.backward(torch.randn_like(y))


def assert_served(selected: dict[str, set[str]], least: set[str]) -> None:
    assert least <= set(selected)
    left = sorted(text for texts in selected.values() for text in texts if text.startswith("reference"))
    assert not left, "\n".join(left)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_linear(selected: dict[str, set[str]], name: str, sizes: tuple[int, int], bias: bool) -> None:
    layer = bs.nn.Linear(*sizes, bias, dtype=torch.bfloat16, recipe=RECIPES[name], name="layer")
    train(layer, torch.randn(TOKENS, sizes[0], dtype=torch.bfloat16))
    assert_served(selected, {"gemm"})


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_swiglu(selected: dict[str, set[str]], name: str, sizes: tuple[int, int]) -> None:
    layer = bs.nn.SwiGLU(*sizes, dtype=torch.bfloat16, recipe=RECIPES[name], name="mlp")
    train(layer, torch.randn(TOKENS, sizes[0], dtype=torch.bfloat16))
    assert_served(selected, {"gemm", "swiglu", "swiglu_backward_both"})


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_experts(selected: dict[str, set[str]], name: str, sizes: tuple[int, int], bias: bool) -> None:
    named = {"dim": sizes[0], "hidden": sizes[1], "experts": 4, "top_k": 2, "bias": bias}
    moe = bs.nn.MoE(**named, dtype=torch.bfloat16, recipe=RECIPES[name], name="moe")
    train(moe, torch.randn(TOKENS, sizes[0], dtype=torch.bfloat16))
    assert_served(selected, {"m_grouped", "k_grouped", "swiglu_backward_both", "combine_rows"})


def test_wanted_layouts_follow_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are remembered by capability, not by device: "cuda" may be another GPU at the next call."""
    from blockscale.gemm import ops

    cpu = torch.device("cpu")
    before = ops.wanted_layouts("fp8_1x128", "fp8_128x128", cpu)
    monkeypatch.setattr(ops, "capability", lambda device: Capability("cuda", 90))
    assert ops.wanted_layouts("fp8_1x128", "fp8_128x128", cpu) != before
    monkeypatch.undo()
    assert ops.wanted_layouts("fp8_1x128", "fp8_128x128", cpu) == before
