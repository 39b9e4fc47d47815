"""Which linear layers of a model can be converted, and which stay in high precision by default.

Kept by default, because low precision costs quality there and saves little time:

    output head   named so, tied to an embedding, or last and as wide as the vocabulary
    router        named so, or as wide as the number of experts beside it: rounding changes the selection
    narrow        fewer than 16 features on a side: most of a block would be empty (scores, small routers)
    end blocks    with 4-bit formats, the first two and the last 15 % of blocks

Names match by whole components: `mlp.gate` is a router, `mlp.gate_proj` is not. Experts that are one parameter count as
layers: `GroupedLinear`, and those of Transformers in `adapters.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from ..autograd.recipe import Recipe
from ..errors import refuse
from ..formats.checks import all_ints, check_int, in_words
from ..formats.spec import get_format
from .active import HEADS, OUTER_HEADS, ROUTERS, Named, widths_of_routers
from .adapters import AdaptedExperts, expert_sizes, has_experts, style_of
from .experts import GroupedLinear
from .linear import Linear
from .moe import Router

# elements of the smallest block, and the alignment of features for Hopper's products
NARROW = 16
KEPT_FIRST, KEPT_LAST = 2, 0.15
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, ours, or another library's `...Linear` with in_ and out_features."""
    if isinstance(module, nn.Linear):
        return True
    features = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return all(isinstance(each, int) for each in features) and type(module).__name__.endswith("Linear")


@dataclass(frozen=True)
class Size:
    """Size of a weight.  part: the parameter's name if the layer has several.  experts: weights in the parameter."""

    part: str
    in_features: int
    out_features: int
    experts: int = 1


def sizes_of(module: nn.Module) -> list[Size]:
    """Sizes of the weights of a layer; empty for a module that is no layer."""
    if has_experts(module):
        return [Size(name, inputs, outputs, experts) for name, experts, inputs, outputs in expert_sizes(module)]
    if not is_linear(module):
        return []
    experts = module.experts if isinstance(module, GroupedLinear) else 1
    return [Size("", int(module.in_features), int(module.out_features), experts)]  # pyright: ignore[reportArgumentType]


def obstacle(module: nn.Module) -> str | None:
    """Why a layer cannot be converted; None if it can."""
    kind = type(module)
    exact = isinstance(module, AdaptedExperts) or kind in (nn.Linear, Linear, GroupedLinear)
    if isinstance(module, LazyModuleMixin):
        return "lazy, without a shape before its first forward: convert after it"
    if not exact and is_fully_sharded(module):
        return "sharded by itself: convert before fully_shard"
    if has_experts(module):
        style = module.style if isinstance(module, AdaptedExperts) else style_of(module)
        if isinstance(style, str):
            return style
    elif is_parametrized(module) or (isinstance(module, nn.Linear) and not isinstance(module.weight, nn.Parameter)):
        return "parametrized: its weight is computed, not a parameter"
    elif isinstance(module, Router):
        return "router: its scores are in fp32"
    elif kind is NonDynamicallyQuantizableLinear:
        return "part of MultiheadAttention, which reads its weight and never calls it"
    elif not exact:
        return f"a {kind.__module__}.{kind.__qualname__}, which may compute something else"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
    odd = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in _DTYPES]
    return f"weight is {odd[0]}: casts take bfloat16, float16 and float32" if odd else None


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model.  index: a layer, by id or name -> number of its block."""

    count: int
    index: Mapping[Any, int]


def find_blocks(modules: Named) -> Blocks | None:
    """The longest list of modules of one class with linear layers inside. Lists within a list (of experts, for example)
    do not count."""
    found: list[tuple[str, nn.Module]] = []
    lists: list[tuple[str, nn.Module]] = []  # of any classes: lists within them do not count
    for name, module in modules:
        inside = any(name.startswith(outer and f"{outer}.") and name != outer for outer, _ in [*found, *lists])
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            lists.append((name, module))
        if not inside and _is_stack(module):
            found.append((name, module))
    if not found:
        return None
    _, stack = max(found, key=lambda each: len(list(each[1].children())))
    blocks = list(stack.children())
    index = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    return Blocks(len(blocks), index)


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    blocks = list(module.children())
    alike = len(blocks) > 1 and len({type(block) for block in blocks}) == 1
    return alike and all(not is_linear(block) and any(map(is_linear, block.modules())) for block in blocks)


# ---- kept layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ends:
    """How many blocks stay in high precision at either end of a model.  warning: for the report."""

    first: int = 0
    last: int = 0
    blocks: Blocks | None = None
    warning: str = ""

    def reason(self, layer: int | str) -> str | None:
        """Why a layer is kept, by the block that it is in; None if it is not.  layer: its key in the index."""
        number = None if self.blocks is None else self.blocks.index.get(layer)
        if number is None or self.blocks is None:
            return None
        count = self.blocks.count
        ends = (("first", self.first, number), ("last", self.last, count - 1 - number))
        for which, kept, distance in ends:
            if distance < kept:
                return f"{which} {kept} of {count} blocks" if kept > 1 else f"{which} of {count} blocks"
        return None


def find_ends(
    find: Callable[[], Blocks | None], recipe: Recipe, first: int | None, last: float | None, *, defaults: bool
) -> Ends:
    """Blocks to keep, of those that `find` returns.  first: number.  last: number if an int, share if a float.  None:
    the recipe's, if `defaults`."""
    by_recipe = defaults and has_four_bits(recipe)
    first = (KEPT_FIRST if by_recipe else 0) if first is None else first
    last = (KEPT_LAST if by_recipe else 0) if last is None else last
    check_ends(first, last)
    if not first and not last:
        return Ends()
    blocks = find()
    if blocks is None:
        return Ends(warning="no blocks were found, so none are kept at the ends: choose layers with filter_fn")
    # 0.14 * 50 is slightly more than 7 in floats
    return Ends(first, math.ceil(last * blocks.count - 1e-9) if isinstance(last, float) else last, blocks)


def has_four_bits(recipe: Recipe) -> bool:
    """Whether any operand has 4-bit elements."""
    formats = (format for format in recipe.formats().values() if format is not None)
    return any(get_format(format).element.bits == 4 for format in formats)


def check_ends(first: object, last: object) -> None:
    """Raise unless both are numbers of blocks."""
    check_int(first, "keep_first", "it is a number of blocks")
    share = isinstance(last, float) and 0 <= last <= 1
    if not share and not all_ints((last,)):
        rule = "it is a number of blocks (an int) or a share of them (a float from 0 to 1)"
        refuse(f"keep_last={in_words(last)}", rule, "pass an int of 0 or more, or a float up to 1")


@dataclass(frozen=True)
class Defaults:
    """Layers to keep by default.  embeddings: ids of embedding weights.  vocabulary: largest number of embeddings.
    last: the last linear layer.  routers: ids of layers as wide as the list of experts beside them."""

    embeddings: frozenset[int] = frozenset()
    vocabulary: int = 0
    last: nn.Module | None = None
    routers: frozenset[int] = frozenset()

    def reason(self, name: str, module: nn.Module) -> str | None:
        """Why a layer stays in high precision by default; None if it does not."""
        if isinstance(module, nn.Linear):
            kept = self._reason_of_linear(name, module)
            if kept is not None:
                return kept
        if min(min(size.in_features, size.out_features) for size in sizes_of(module)) < NARROW:
            return f"narrow: fewer than {NARROW} features on a side"
        return None

    def _reason_of_linear(self, name: str, module: nn.Linear) -> str | None:
        parts = name.split(".")
        outer = parts[: next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))]
        if HEADS & set(parts) or OUTER_HEADS & set(outer):
            return "output head"
        if id(module.weight) in self.embeddings:
            return "output head: its weight is an embedding's"
        if module is self.last and module.out_features == self.vocabulary:
            return "output head: the last layer, as wide as the vocabulary"
        if ROUTERS & set(parts):
            return "router"
        if id(module) in self.routers:
            return f"router: as wide as the {module.out_features} experts beside it"
        return None


def find_defaults(modules: Named) -> Defaults:
    """Collect the defaults of a model."""
    tables = [module for _, module in modules if isinstance(module, nn.Embedding)]
    linears = [module for _, module in modules if is_linear(module)]
    routers: set[int] = set()
    for _, module in modules:
        routers.update(widths_of_routers(module))
    return Defaults(
        frozenset(id(table.weight) for table in tables),
        max((table.num_embeddings for table in tables), default=0),
        linears[-1] if linears else None,
        frozenset(routers),
    )
