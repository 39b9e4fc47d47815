"""FSDP2 that gathers codes: weights in square blocks travel in 8 or 4 bits in place of 16 or 32.

Every rank casts its shard, FSDP gathers code bytes and scales, and the layer multiplies them: its forward casts no
weight, and its backward transposes codes. Bytes are those of casting the gathered weight. Blocks that straddle shards
need the amax of rows on other ranks: all weights exchange theirs in one MAX all-reduce, after each optimizer step and
before each forward of the model, and shards of whole blocks exchange nothing.

Parameters, gradients, optimizer states and checkpoints stay those of the unquantized model under FSDP2: `ShardedWeight`
holds the high-precision shard, uses FSDP's documented hooks and pickles as a plain tensor.
Wire: 1 byte a weight for 8-bit formats, half a byte for NVFP4, and one scale per block.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from ..autograd.dtensor import local
from ..formats.checks import check_model
from ..nn.recipe_module import RecipeModule
from .tensors import ShardedWeight
from .weight_gather import AmaxExchange, WeightGather, plan_of


@dataclass(frozen=True)
class GatherReport:
    """How the weights of a model are gathered.  formats: of those that travel as codes.  others: layers with a recipe
    whose weights travel in their own dtype, and the reason.  Both by the name of the parameter."""

    formats: dict[str, str]
    others: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.formats)} weights are gathered as codes, {len(self.others)} in their own dtype"]
        by_format: dict[str, list[str]] = {}
        for name, text in (*self.formats.items(), *((name, f"not: {why}") for name, why in self.others.items())):
            by_format.setdefault(text, []).append(name)
        lines += [f"  {text}: {', '.join(names)}" for text, names in by_format.items()]
        return "\n".join(lines)


def gather_low_(model: Module) -> GatherReport:
    """Let FSDP2 gather the codes of quantized weights in place of the weights. Call it after `quantize_` and after
    tensor or expert parallelism, before `fully_shard`; print the report.

    >>> import torch
    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    >>> report = bs.quantize_(model, "fp8_blockwise", lambda module, name: True)
    >>> print(gather_low_(model))
    1 weights are gathered as codes, 0 in their own dtype
      fp8_128x128: 0.weight
    """
    check_model(model, "FSDP2 gathers the weights of a torch.nn.Module")
    formats, others, gathers = dict[str, str](), dict[str, str](), list[WeightGather]()
    users = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    late = {id(each) for fsdp in model.modules() if isinstance(fsdp, FSDPModule) for each in fsdp.parameters()}
    for name, module, parameter, param in _weights_with_recipe(model):
        reason = _reason_against(module, parameter, param, users[id(param)], late=id(param) in late)
        found = reason or plan_of(module.recipe, param)
        if isinstance(found, str):
            others[name] = found
            continue
        formats[name] = found.format
        gathers.append(WeightGather(name, module, parameter))
        setattr(module, parameter, Parameter(_sharded(param.detach(), gathers[-1]), param.requires_grad))
    if gathers:
        AmaxExchange(model, gathers)
    return GatherReport(formats, others)


def _weights_with_recipe(model: Module) -> list[tuple[str, RecipeModule, str, Parameter]]:
    """Weights of quantized layers: full name, layer, name in the layer, parameter."""
    return [
        (f"{prefix}.{parameter}" if prefix else parameter, module, parameter, param)
        for prefix, module in model.named_modules()
        if isinstance(module, RecipeModule) and module.recipe.is_quantized
        for parameter, param in module.named_parameters(recurse=False)
        if not parameter.endswith("bias")
    ]


def _sharded(weight: Tensor, gather: WeightGather) -> Tensor:
    """The same weight, whose gathers by FSDP2 are those of codes. A DTensor stays one, with another local tensor."""
    if not isinstance(weight, DTensor):
        return ShardedWeight(weight, gather)
    mine = ShardedWeight(weight.to_local(), gather)
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())


def _reason_against(module: RecipeModule, parameter: str, param: Parameter, users: int, *, late: bool) -> str | None:
    weight = local(param.detach())
    if isinstance(weight, ShardedWeight):
        return "it is gathered as codes already"
    if late and isinstance(param.data, DTensor):
        return "it is a DTensor already: call gather_low_ before fully_shard"
    if users > 1:
        return "several modules share it"
    return module.reason_against_codes(parameter)
