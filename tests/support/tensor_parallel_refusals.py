"""What layers on DTensors refuse, as one rank of tests/autograd/test_tensor_parallel.py sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import blockscale as bs
from blockscale.autograd import linear, swiglu_mlp
from blockscale.errors import BlockscaleError
from blockscale.formats import Stochastic
from blockscale.nn import GroupedExperts, MoE, SwiGLU

Case = tuple[str, Callable[[], str]]


def everything(module: nn.Module, name: str) -> bool:
    return True


def refusals(mesh: DeviceMesh) -> Iterator[Case]:
    """What raises, and when: while the model is parallelised, or at the call where only that shows it."""

    def said(call: Callable[[], object]) -> str:
        try:
            call()
        except BlockscaleError as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"raw {type(error).__name__}: {error}"
        return "nothing"

    def layer(inputs: int, outputs: int, recipe: str, bias: bool = True) -> nn.Module:
        model = nn.Sequential(nn.Linear(inputs, outputs, bias))
        bs.quantize_(model, recipe, everything)
        return model

    def parallel(model: nn.Module, **plan: Any) -> str:
        return said(lambda: parallelize_module(model, mesh, {key.replace("__", "."): it for key, it in plan.items()}))

    def converted_after(outputs: int, recipe: str) -> str:
        model = parallelize_module(nn.Sequential(nn.Linear(256, outputs)), mesh, {"0": ColwiseParallel()})
        return said(lambda: bs.quantize_(model, recipe, everything))

    def replicated(x: Tensor) -> DTensor:
        return distribute_tensor(x, mesh, [Replicate()])

    def sharded(x: Tensor, dim: int) -> DTensor:
        return distribute_tensor(x, mesh, [Shard(dim)])

    def main_grad() -> str:
        weight = nn.Parameter(sharded(torch.randn(256, 256), 0))
        weight.main_grad = torch.zeros(128, 256)
        return said(lambda: linear(replicated(torch.randn(4, 256)), weight, recipe="mxfp8"))

    def changed_between(weight_cast: str, saves: str) -> str:
        """A weight, or an input that is kept, that changes between forward and backward."""
        recipe = bs.get_recipe("mxfp8").replace(weight_cast=weight_cast, saves=saves)
        weight, sent = nn.Parameter(sharded(torch.randn(256, 256), 0)), replicated(torch.randn(4, 256))
        y = linear(sent, weight, recipe=recipe)
        with torch.no_grad():
            (weight if saves == "operand" else sent).mul_(2)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    def changed_input(recipe: str | bs.Recipe, *, frozen: bool = False) -> str:
        """An input that changes between forward and backward."""
        weight, bias = sharded(torch.randn(256, 256), 0), sharded(torch.randn(256), 0).requires_grad_()
        sent = replicated(torch.randn(4, 256))
        y = linear(sent, weight if frozen else weight.requires_grad_(), bias, recipe)
        sent.mul_(2)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    def half_converted() -> str:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        bs.quantize_(model, "mxfp8", everything)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        text = said(lambda: bs.quantize_(model, "nvfp4", everything))
        assert [each.recipe.name for each in model] == ["mxfp8", "mxfp8"]
        return text

    def moe(**names: Any) -> MoE:
        return MoE(dim=64, hidden=64, experts=4, top_k=2, recipe="mxfp8", **names)

    def experts() -> GroupedExperts:
        return GroupedExperts(experts=4, dim=64, hidden=64, recipe="mxfp8")

    def cut_experts(module: GroupedExperts) -> None:
        module.gate_up.weight = nn.Parameter(sharded(module.gate_up.weight.detach(), 0))

    def cut_behind(module: GroupedExperts) -> None:
        """As code does that writes to `_parameters`."""
        module.gate_up._parameters["weight"] = nn.Parameter(sharded(module.gate_up.weight.detach(), 0))
        module(torch.randn(8, 64), torch.tensor([2, 4, 6, 8], dtype=torch.int32))

    x, w = torch.randn(8, 256), torch.randn(512, 256)
    cases: dict[str, Callable[[], str]] = {
        "hidden 384, colwise": lambda: parallel(layer(256, 384, "fp8_blockwise"), **{"0": ColwiseParallel()}),
        "hidden 384, rowwise": lambda: parallel(layer(384, 256, "fp8_blockwise"), **{"0": RowwiseParallel()}),
        "hidden 384, mxfp8": lambda: parallel(layer(256, 384, "mxfp8"), **{"0": ColwiseParallel()}),
        "one block for two ranks": lambda: parallel(layer(256, 32, "mxfp8"), **{"0": ColwiseParallel()}),
        "converted after": lambda: converted_after(384, "fp8_blockwise"),
        "converted after, fits": lambda: converted_after(512, "fp8_blockwise"),
        "nvfp4": lambda: parallel(layer(256, 512, "nvfp4"), **{"0": ColwiseParallel()}),
        "nvfp4 converted after": lambda: converted_after(512, "nvfp4"),
        "nvfp4 sharded tokens": lambda: said(
            lambda: linear(sharded(x, 0), replicated(w), recipe="nvfp4", rounding=Stochastic(bs.rng_state(0), "layer"))
        ),
        "swiglu": lambda: parallel(SwiGLU(256, 512, recipe="mxfp8"), gate_up=ColwiseParallel(), down=RowwiseParallel()),
        "swiglu with bias": lambda: parallel(SwiGLU(256, 512, bias=True, recipe="mxfp8"), gate_up=ColwiseParallel()),
        "swiglu from linears": lambda: parallel(
            SwiGLU.from_linears(*(nn.Linear(256, 256) for _ in range(3)), "mxfp8"), gate_up=ColwiseParallel()
        ),
        "swiglu by hand": lambda: said(
            lambda: swiglu_mlp(replicated(x), sharded(w, 0), sharded(torch.randn(256, 256), 1), recipe="mxfp8")
        ),
        "moe": lambda: said(lambda: distribute_module(moe(), mesh)),
        "experts": lambda: said(lambda: cut_experts(experts())),
        "experts behind its back": lambda: said(lambda: cut_behind(experts())),
        "moe with a DTensor": lambda: said(lambda: moe()(replicated(torch.randn(8, 64)))),
        "plain input": lambda: said(lambda: linear(x, sharded(w, 0), recipe="mxfp8")),
        "plain weight": lambda: said(lambda: linear(replicated(x), w, recipe="mxfp8")),
        "tokens and rows": lambda: said(lambda: linear(sharded(x, 0), sharded(w, 0), recipe="mxfp8")),
        "features and a whole weight": lambda: said(lambda: linear(sharded(x, 1), replicated(w), recipe="mxfp8")),
        "bias placed otherwise": lambda: said(
            lambda: linear(replicated(x), sharded(w, 0), replicated(torch.randn(512)), recipe="mxfp8")
        ),
        "main_grad": main_grad,
        "changed weight": lambda: changed_between("twice", "operand"),
        "changed input": lambda: changed_between("forward", "source"),
        "changed input, wgrad in bf16": lambda: changed_input("mxfp8_wgrad_bf16"),
        "changed input, cast kept": lambda: changed_input("mxfp8"),
        "changed input, frozen weight": lambda: changed_input(
            bs.get_recipe("mxfp8").replace(saves="source"), frozen=True
        ),
        "converted again": half_converted,
        "drawn along the second axis": lambda: said(
            lambda: linear(
                sharded(torch.randn(2, 8, 256), 1).requires_grad_(),
                replicated(w),
                recipe="mxfp4",
                rounding=Stochastic(bs.rng_state(0), "layer"),
            )
        ),
        "only the bias": lambda: said(lambda: linear(x, w, replicated(torch.randn(512)), "mxfp8")),
        "misaligned by hand": lambda: said(lambda: linear(replicated(x), sharded(w[:96], 0), recipe="fp8_blockwise")),
        "cast": lambda: said(lambda: bs.quantize(sharded(torch.randn(4, 192), 1), "fp8_1x128")),
        "product": lambda: said(
            lambda: bs.scaled_mm(bs.quantize(sharded(x, 0), "mxfp8_e4m3"), bs.quantize(sharded(w, 0), "mxfp8_e4m3"))
        ),
        "dequantize": lambda: said(lambda: bs.dequantize(bs.quantize(sharded(x, 0), "mxfp8_e4m3"))),
    }
    for name, call in cases.items():
        yield f"refused {name}", call
