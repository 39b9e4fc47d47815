"""`BlockScaledConverter`: replaces linear layers and experts in a torchtitan model's config by ones with a recipe.

torchtitan builds models from a tree of configs, so nodes of that tree are replaced, and no module is. The fields of a
node (sizes, initialisation, sharding) are carried over. Layers are chosen by name. A layer that cannot be converted
stays as it is, and the report, which torchtitan's logger prints, has the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.logging import logger

from ...autograd.recipe import Recipe
from ...distributed.overlap.choice import OVERLAPS, Overlap
from ...errors import check_name, refuse
from ...nn.policy import NARROW, Blocks, find_ends
from ...nn.report import ConversionReport, Converted, Skipped, nothing_converted, speed_note
from .dispatch import Dispatch, use_dispatch
from .experts import RecipeExperts, experts_class
from .linear import BlockScaledLinear
from .recipe_module import TitanRecipeModule, training_recipe
from .wires import wired_class

# names begin with model_spec.model in the config tree of a trainer; `*` matches dots too
FQNS = ("*layers.*",)
SKIP = ("*.router.*", "*.gate", "*lm_head*")
# classes of experts whose products all go through `_grouped_mm`
_EXPERTS = ("GroupedExperts", "GptOssGroupedExperts")


class BlockScaledConverter(QuantizationConverter):
    """Passed to a model's `model_registry(flavor, converters=[BlockScaledConverter.Config(recipe="mxfp8")])`."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """recipe: a name or a `Recipe`.  weight_cast: "forward" or "twice"; None takes the recipe's.

        gather: "low", FSDP2 gathers weights in square blocks as codes; None, in the dtype of its policy.
        dispatch: under expert parallelism rows travel by our dispatchers: "bf16" or "low", the payload of `AllToAll`,
        or a function from the mesh to a dispatcher; None, by torchtitan's.
        tensor_parallel: "low", attention and feed-forward gather codes of sequence shards; None, torchtitan gathers 16
        bits.  overlap: that gather and the sums beside products, see `distributed.column_parallel`.
        fqns: globs of the layers to convert, linear ones and experts.  skip: globs of those to keep.  keep_first,
        keep_last: blocks that stay in high precision at the ends, the last ones also by share; None keeps the first
        two and the last 15 % with 4-bit formats, and none with others.
        """

        recipe: str | Recipe = "fp8_blockwise"
        weight_cast: str | None = None
        gather: str | None = None
        dispatch: Dispatch | None = None
        tensor_parallel: str | None = None
        overlap: Overlap = "auto"
        fqns: list[str] = field(default_factory=lambda: list(FQNS))
        skip: list[str] = field(default_factory=lambda: list(SKIP))
        keep_first: int | None = None
        keep_last: float | None = None

    def __init__(self, config: Config) -> None:
        self.config = config
        self.report: ConversionReport | None = None

    def convert(self, model_config: Any) -> Any:
        """Replace the layers of a model's config, in place."""
        options = self.config
        recipe = training_recipe(options.recipe, options.weight_cast)
        if options.gather is not None:
            check_name(options.gather, ("low",), "gather")
        if options.tensor_parallel is not None:
            check_name(options.tensor_parallel, ("low",), "tensor_parallel")
        check_name(options.overlap, OVERLAPS, "overlap")
        _check_globs(fqns=options.fqns, skip=options.skip)
        nodes = list(_nodes(model_config))
        ends = find_ends(lambda: _blocks(nodes), recipe, options.keep_first, options.keep_last, defaults=True)
        converted: list[Converted] = []
        skipped: list[Skipped] = []
        matched = False
        for node in nodes:
            reason = _reason(node, options.fqns, options.skip)
            matched = matched or reason is None
            new = reason or ends.reason(node.fqn) or converted_config(node.config, recipe, node.fqn)
            if not isinstance(new, str):
                _replace(node, new)
            for at, size in enumerate(node.sizes()):
                if isinstance(new, str):
                    skipped.append(Skipped(size[0], new, *size[1:]))
                else:
                    note = speed_note(recipe, size[1], size[2]) if at == 0 else ""
                    converted.append(Converted(*size[:4], note, *size[4:]))
        if not matched:
            refuse(
                f"no layer matches fqns={options.fqns} and not skip={options.skip}",
                "a converter that converts nothing is a mistake; names are such as "
                f"{', '.join(node.fqn for node in nodes[:3]) or '(the model has no linear layers)'}",
                "write globs that match whole names, such as '*layers.*.feed_forward.*'",
            )
        warnings = () if converted else (nothing_converted(skipped),)
        self.report = ConversionReport(recipe, tuple(converted), tuple(skipped), warnings=warnings)
        for line in str(self.report).splitlines():
            (logger.info if converted else logger.warning)(line)
        if options.dispatch is not None:
            use_dispatch(model_config, options.dispatch, recipe)
        wires = {"gather": options.gather, "tensor_parallel": options.tensor_parallel, "overlap": options.overlap}
        if options.dispatch is None and options.gather is None and options.tensor_parallel is None:
            return model_config
        return derive(model_config, wired_class(type(model_config)._owner).Config, **wires)


def converted_config(config: Any, recipe: Recipe, name: str = "") -> Any | str:
    """Config of the same layer with a recipe, or the reason why there is none."""
    plain = type(config)._owner
    named = {"name": name} if name else {}
    if isinstance(config, GroupedExperts.Config):
        if issubclass(plain, RecipeExperts):
            return derive(config, type(config), recipe=recipe, **named)
        if plain.__name__ not in _EXPERTS:
            return f"a {plain.__name__}, which may compute something else"
        return derive(config, experts_class(plain).Config, recipe=recipe, **named)
    if plain is not Linear and not issubclass(plain, TitanRecipeModule):
        return f"a {plain.__name__}, which may compute something else"
    if min(config.in_features, config.out_features) < NARROW:
        return f"narrow: fewer than {NARROW} features on a side"
    return derive(config, BlockScaledLinear.Config, recipe=recipe, **named)


class _Node(NamedTuple):
    """A layer in the tree of configs, with its parent and attribute there.  active: experts per token."""

    fqn: str
    config: Any
    parent: Any
    attribute: Any
    active: int = 1

    def sizes(self) -> Iterator[tuple[str, int, int, int, int, int]]:
        """Name, inputs, outputs, parameters, experts and active experts of each weight."""
        config = self.config
        if isinstance(config, Linear.Config):
            inner, outer = config.in_features, config.out_features
            yield self.fqn, inner, outer, inner * outer + (outer if config.bias else 0), 1, 1
            return
        dim, hidden, experts = config.dim, config.hidden_dim, config.num_experts
        for part, inner, outer in (("gate", dim, hidden), ("up", dim, hidden), ("down", hidden, dim)):
            yield f"{self.fqn}.{part}", inner, outer, experts * inner * outer, experts, self.active


def _nodes(model_config: Any) -> Iterator[_Node]:
    for node in model_config.traverse(Linear.Config):
        yield _Node(*node)
    for node in model_config.traverse(GroupedExperts.Config):
        dispatcher = getattr(node[2], "token_dispatcher", None)
        yield _Node(*node, active=getattr(dispatcher, "top_k", 1))


def _replace(node: _Node, config: Any) -> None:
    if isinstance(node.parent, list):
        node.parent[node.attribute] = config
    else:
        setattr(node.parent, node.attribute, config)


def _check_globs(**lists: Any) -> None:
    """Raise for a string in place of a list: its letters would be globs, and `*` matches everything."""
    for name, globs in lists.items():
        if isinstance(globs, str):
            rule = "globs come in a list"
            refuse(f"{name}={globs!r}", rule, f"{name}=[{globs!r}]")


def _matches(fqn: str, globs: Iterable[str]) -> str | None:
    return next((glob for glob in globs if fnmatchcase(fqn, glob)), None)


def _reason(node: _Node, fqns: Sequence[str], skip: Sequence[str]) -> str | None:
    """Why a layer is not selected; None if it is."""
    if node.parent is None:
        return "the model itself, which has no parent"
    if _matches(node.fqn, fqns) is None:
        return "not in fqns"
    glob = _matches(node.fqn, skip)
    return None if glob is None else f"skip has {glob}"


def _blocks(nodes: Sequence[_Node]) -> Blocks:
    """The numbered blocks of a model, by the names of their layers."""
    numbers = {node.fqn: number for node in nodes if (number := _block_number(node.fqn)) is not None}
    return Blocks(max(numbers.values(), default=-1) + 1, numbers)


def _block_number(fqn: str) -> int | None:
    """Number of the block that a layer is in; None outside of blocks."""
    parts = fqn.split(".")
    at = parts.index("layers") + 1 if "layers" in parts else len(parts)
    return int(parts[at]) if at < len(parts) and parts[at].isdigit() else None
