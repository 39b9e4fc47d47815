"""Number of active experts per token (top-k), read from the attributes of a model's modules.

FLOPs and rooflines depend on it. It is an attribute of the block, of its router or of its configuration, under one of a
few names. If none has it, the report warns and counts one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from torch import nn

Named = Sequence[tuple[str, nn.Module]]
ROUTERS = frozenset({"router", "gate", "gating"})
# names of heads anywhere in a model, and names of heads outside of numbered blocks (BERT's blocks have an `output`)
HEADS = frozenset({"lm_head", "shared_head", "embed_out"})
OUTER_HEADS = frozenset(
    {"head", "heads", "output", "classifier", "score", "qa_outputs", "output_layer", "output_projection", "proj_out"}
)
# names of top-k in blocks, routers and configurations
_WORDS = (
    "top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts",
    "num_selected", "n_activated_experts", "num_activated_experts", "moe_top_k", "moe_topk", "moe_router_topk",
)  # fmt: skip
# an ambiguous name: counts only in a module with experts and in routers
_SHORT = "k"
_CONFIGS = ("config", "cfg", "args")


class Active(NamedTuple):
    """Active experts of a module.  known: experts per token, None if unknown.  among: length of the list of experts
    that the module is in, 1 for a module that holds all of them."""

    known: int | None
    among: int = 1


def active_experts(modules: Named, holders: Mapping[int, int]) -> dict[int, Active]:
    """Active experts of each module that holds experts, and of each module within a list of experts, by id.

    holders: how many experts a module holds in one parameter, by its id, for those that hold several.
    """
    parents = {id(child): module for _, module in modules for child in module.children()}
    found: dict[int, Active] = {}
    for name, module in modules:
        if id(module) in holders:
            found.setdefault(id(module), Active(_count(module, parents, holders[id(module)])))
        elif _is_list_of_experts(name, module, parents.get(id(module))):
            among = len(list(module.children()))
            count = _count(module, parents, among)
            found.update((id(each), Active(count, among)) for each in module.modules() if each is not module)
    return found


def _is_list_of_experts(name: str, module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether a list is one of experts: by its name, or by a sibling (no head) with as many outputs as it is long."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    last = name.rpartition(".")[2].lower()
    if "expert" in last:
        return "shared" not in last  # shared experts see every token
    beside = {} if parent is None else dict(parent.named_children())
    widths = {} if parent is None else widths_of_routers(parent)
    return any(
        widths.get(id(each)) == len(module) and (is_router(called, each) or called not in HEADS | OUTER_HEADS)
        for called, each in beside.items()
    )


def widths_of_routers(block: nn.Module) -> dict[int, int]:
    """Out features of the children of a block that are as wide as a list beside them is long, by their ids."""
    children = list(block.children())
    lengths = {len(child) for child in children if isinstance(child, nn.ModuleList | nn.ModuleDict)}
    widths = {id(child): getattr(child, "out_features", None) for child in children} if lengths else {}
    return {child: width for child, width in widths.items() if isinstance(width, int) and width in lengths}


def is_router(name: str, module: nn.Module) -> bool:
    """Whether a module is a router by its name or its class: `gate_proj` is none."""
    kind = type(module).__name__.lower()
    return name in ROUTERS or "router" in kind or kind.endswith("gate")


def _count(module: nn.Module, parents: Mapping[int, nn.Module], experts: int) -> int | None:
    """Top-k of the module itself, or of the nearest parent that has it; None if none has."""
    around: nn.Module | None = module
    while around is not None:
        children = list(around.named_children())
        routers = [each for name, each in children if is_router(name, each)]
        short = (_SHORT,) if routers or around is parents.get(id(module)) else ()
        values = [*_values(around, (*_WORDS, *short))]
        for each in routers:
            values += _values(each, (*_WORDS, _SHORT))
        for _, each in children:
            values += _values(each, _WORDS)
        for count in values:
            if 1 <= count <= experts:
                return count
        around = parents.get(id(around))
    return None


def _values(module: nn.Module, words: Sequence[str]) -> Iterator[int]:
    """Integers under these names, of a module and then of its configuration."""
    yield from _numbers(vars(module), words)
    yield from _numbers({word: getattr(type(module), word, None) for word in words}, words)
    for name in _CONFIGS:
        config: Any = vars(module).get(name)
        if config is None or isinstance(config, nn.Module):
            continue
        # Transformers' configurations have a top_k for sampling
        plain = words if not hasattr(config, "model_type") else [word for word in _WORDS if word != "top_k"]
        held = config if isinstance(config, Mapping) else {word: getattr(config, word, None) for word in plain}
        yield from _numbers(held, [word for word in plain if word != _SHORT])


def _numbers(held: Mapping[str, object], words: Sequence[str]) -> Iterator[int]:
    for word in words:
        value = held.get(word)
        if not isinstance(value, bool) and isinstance(value, Integral):  # numpy's integers too
            yield int(value)
