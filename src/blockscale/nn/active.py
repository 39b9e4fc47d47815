"""How many experts of a mixture see a token, as the modules say it that people write.

FLOPs and rooflines depend on it. It stands in an attribute of the block, of its router or of its configuration, under
one of a few names; where none of them says it, a report tells so and counts one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from torch import nn

Named = Sequence[tuple[str, nn.Module]]
ROUTERS = frozenset({"router", "gate", "gating"})
# heads by any place in a model, and words that mean a head only outside of numbered blocks (BERT's have an `output`)
HEADS = frozenset({"lm_head", "shared_head", "embed_out"})
OUTER_HEADS = frozenset(
    {"head", "heads", "output", "classifier", "score", "qa_outputs", "output_layer", "output_projection", "proj_out"}
)
# what blocks, routers and configurations call the number of experts that see a token
_WORDS = (
    "top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts",
    "num_selected", "n_activated_experts", "num_activated_experts", "moe_top_k", "moe_topk", "moe_router_topk",
)  # fmt: skip
# many things are called so: it counts beside experts and in routers
_SHORT = "k"
_CONFIGS = ("config", "cfg", "args")


class Active(NamedTuple):
    """known: experts that see a token, None where nothing says it.  among: experts of the list that a module is one of,
    1 for a module that holds all of them."""

    known: int | None
    among: int = 1


def active_experts(modules: Named, holders: Mapping[int, int]) -> dict[int, Active]:
    """What is known of each module that holds experts, and of each module within a list of experts, by its id.

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
    """By its name, or by a router beside it that is as wide as it is long; a head of that width is no router."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    last = name.rpartition(".")[2].lower()
    if "expert" in last:
        return "shared" not in last  # those see every token
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
    """What the module itself says, or the nearest module around it that says anything."""
    around: nn.Module | None = module
    while around is not None:
        children = list(around.named_children())
        routers = [each for name, each in children if is_router(name, each)]
        short = (_SHORT,) if routers or around is parents.get(id(module)) else ()
        said = [*_said(around, (*_WORDS, *short))]
        for each in routers:
            said += _said(each, (*_WORDS, _SHORT))
        for _, each in children:
            said += _said(each, _WORDS)
        for count in said:
            if 1 <= count <= experts:
                return count
        around = parents.get(id(around))
    return None


def _said(module: nn.Module, words: Sequence[str]) -> Iterator[int]:
    """Whole numbers under these names, of a module and then of its configuration."""
    yield from _numbers(vars(module), words)
    yield from _numbers({word: getattr(type(module), word, None) for word in words}, words)
    for name in _CONFIGS:
        config: Any = vars(module).get(name)
        if config is None or isinstance(config, nn.Module):
            continue
        # Transformers' configurations have a top_k of sampling
        plain = words if not hasattr(config, "model_type") else [word for word in _WORDS if word != "top_k"]
        held = config if isinstance(config, Mapping) else {word: getattr(config, word, None) for word in plain}
        yield from _numbers(held, [word for word in plain if word != _SHORT])


def _numbers(held: Mapping[str, object], words: Sequence[str]) -> Iterator[int]:
    for word in words:
        value = held.get(word)
        if not isinstance(value, bool) and isinstance(value, Integral):  # also numpy's
            yield int(value)
