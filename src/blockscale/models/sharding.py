"""A transformer divided among ranks: FSDP2 by blocks, and experts of several ranks.

Parameters are sharded over all ranks, each block gathered as a whole. With expert parallel degree n, groups of n ranks
divide the experts of a layer, and FSDP2 shards each expert among the groups. No parameter is replicated, so sums over
local shards of all ranks are sums over the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from ..autograd.recipe import Recipe
from ..distributed.dispatch import AllToAll
from ..distributed.expert_parallel import expert_parallel_
from ..distributed.fsdp import GatherReport, gather_low_
from ..distributed.world import World, set_timeout
from ..errors import ShardingError, option, refuse
from ..nn import MoE
from ..nn.recipe_module import RecipeModule
from .config import RanksConfig
from .transformer import Transformer


@dataclass(frozen=True)
class ShardReport:
    """How a model is divided.  ranks: all of them.  gather: of weights as codes; None if none was asked for.  experts:
    ranks among which experts are divided.  payload: of tokens that travel to them."""

    ranks: int
    gather: GatherReport | None
    experts: int
    payload: str

    def __str__(self) -> str:
        lines = [f"{self.ranks} ranks share every step, by FSDP2"]
        if self.experts > 1:
            lines.append(f"experts divided among {self.experts} ranks, tokens travel as {self.payload}")
        lines.append(str(self.gather) if self.gather else "weights are gathered in the dtype of parameters")
        return "\n".join(lines)


def shard_(model: Transformer, config: RanksConfig, world: World, recipe: Recipe) -> ShardReport:
    """Divide a model with values among the ranks, in place. Collective.

    Every rank builds the whole model first, with the same values. Gradients are means over the ranks' losses.
    """
    device = model.embedding.weight.device.type
    ranks = init_device_mesh(device, (world.size,), mesh_dim_names=("ranks",))
    mixtures = [each for each in model.modules() if isinstance(each, MoE)] if config.experts > 1 else []
    mesh = ranks
    if mixtures:
        mesh = init_device_mesh(device, (world.size // config.experts, config.experts), mesh_dim_names=("dp", "ep"))
    for group in {*ranks.get_all_groups(), *mesh.get_all_groups()}:
        set_timeout(group, config.timeout)
    for moe in mixtures:
        expert_parallel_(moe, mesh["ep"], AllToAll(config.payload))
    gather = gather_low_(model) if config.gather == "low" else None
    _check_shared_casts(model, recipe, gather)
    for moe in mixtures:
        _sum_and_divide(fully_shard(moe.experts, mesh=mesh["dp"], shard_placement_fn=_rows), world.size)
    for block in model.layers:
        fully_shard(block, mesh=ranks)
    fully_shard(model, mesh=ranks)
    register_fsdp_forward_method(model, "loss")
    return ShardReport(world.size, gather, config.experts, config.payload)


def _rows(parameter: Parameter) -> Shard:
    """Sharding of a group's experts: along their rows, since dimension 0 is sharded among the ranks of the group."""
    return Shard(1)


def _sum_and_divide(experts: FSDPModule, ranks: int) -> None:
    """Gradients of divided experts are sums over the ranks that divide them: the mean over all ranks divides by all."""
    experts.set_gradient_divide_factor(float(ranks))
    experts.set_force_sum_reduction_for_comms(True)


def _check_shared_casts(model: Transformer, recipe: Recipe, gather: GatherReport | None) -> None:
    """Raise if weights should be cast once per step, and some are gathered in their own dtype and cast by all."""
    if recipe.weight_cast != "step" or not recipe.is_quantized:
        return
    layers = [each for each in model.modules() if isinstance(each, RecipeModule) and each.recipe.is_quantized]
    if layers and gather is None:
        what, why = option("ranks.gather", "high"), "they are gathered in the dtype of parameters"
    elif gather is not None and gather.others:
        name, why = next(iter(gather.others.items()))
        what = f"{len(gather.others)} weights such as {name}"
    else:
        return
    refuse(
        f"{option('recipe.weight_cast', 'step')} with {what} on several ranks",
        rule=f"a step shares the casts of weights that are gathered as codes, and {why}",
        fix=f"pass {option('recipe.weight_cast', 'forward')}",
        error=ShardingError,
    )


def whole_copy(model: Transformer, world: World) -> Transformer | None:
    """The model with whole weights on the CPU of the first rank; None on the others. Gathers every weight."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not world.is_first:
        return None
    copy = Transformer.build(model.config, model.sequence, device="meta", dtype=model.norm.weight.dtype)
    copy.load_state_dict(whole, assign=True)
    return copy
