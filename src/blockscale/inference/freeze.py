"""`freeze_`: the linear layers and experts of a model as frozen layers, in place, with a report.

A module changes its class and its tensors; references to it and its hooks stay. The weight in high precision is dropped
and its memory freed, unless something else holds it: an optimizer, or an embedding tied to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..autograd.dtensor import DTensor
from ..autograd.recipe import Recipe
from ..errors import ShardingError, refuse
from ..formats.cast_spec import CastSpec, as_cast_spec
from ..formats.checks import check_model
from ..formats.stochastic import module_name
from ..formats.tensor import BlockScaled
from ..nn import GroupedExperts, GroupedLinear, SwiGLU
from ..nn.adapters import has_experts
from ..nn.convert import FilterFn, check_filter, count_parameters, kept_by_filter
from ..nn.policy import Defaults, find_defaults, is_fully_sharded, obstacle, sizes_of
from ..nn.recipe_module import RecipeModule
from ..nn.report import Converted, Other, Skipped
from .experts import QuantizedExperts, QuantizedGroupedLinear
from .frozen_layer import FrozenLayer, fprop_recipe, quantize_weight
from .linear import QuantizedLinear
from .mlp import QuantizedSwiGLU
from .report import FrozenReport, model_bytes

ROOT = "root"


class Formats(NamedTuple):
    """Casts of a frozen layer's weight and of its input; None: the input is not rounded."""

    weights: CastSpec
    activations: CastSpec | None

    def __str__(self) -> str:
        return f"weights {_in_words(self.weights)}, activations {_in_words(self.activations)}"


def _in_words(cast: CastSpec | None) -> str:
    return "unquantized" if cast is None else " ".join(filter(None, (cast.format, cast.scale_rule)))


@torch.no_grad()
def freeze_(
    model: nn.Module,
    weights: str | CastSpec | None = None,
    activations: str | CastSpec | None = None,
    *,
    head: str | CastSpec | None = None,
    filter_fn: FilterFn | None = None,
) -> FrozenReport:
    """Replace the weights of a model's linear layers and experts by codes and scales, in place. The report lists the
    frozen layers, and the others with the reason. Nothing of the model requires a gradient any longer.

    weights, activations: formats of all frozen layers.  Without `weights` each layer with a recipe gets those of its
    fprop, and computes the same bits as before; without `activations` beside `weights` inputs are not rounded.
    head: format of the output head, whose input is never rounded; None: it stays as it is.
    filter_fn(module, name): whether to freeze a layer; called for each layer that can be frozen, in place of the
    default policy, by which the head, routers and narrow layers stay in high precision.

    >>> model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    >>> report = freeze_(model, "mxfp4")
    >>> report.bytes_before, report.bytes_after
    (263680, 36352)
    >>> model[0]
    QuantizedLinear(in_features=128, out_features=256, bias=True, weights=mxfp4, activations=None)
    """
    check_model(model, "the modules of a torch.nn.Module are changed in place")
    check_filter(filter_fn)
    _refuse_sharded(model)
    given = None if weights is None else _formats(weights, activations)
    if activations is not None:
        as_cast_spec(activations).plan()
    of_head = None if head is None else _formats(head, None)
    modules = [(module_name(name), module) for name, module in model.named_modules()]
    defaults = find_defaults(modules)
    # all layers are decided before the first one changes: a filter_fn that raises, or formats without a product, leave
    # the model as it was
    plans = [_plan(*each, given, activations, of_head, filter_fn, defaults) for each in modules]
    fused = [module for _, module in modules if _is_fused(module)]
    before, counted, names = model_bytes(model), set[int](), dict[int, str]()
    cast: dict[tuple[int, str], BlockScaled] = {}
    frozen: list[Converted] = []
    skipped: list[Skipped] = []
    others: dict[str, Other] = {}
    for (name, module), plan in zip(modules, plans, strict=True):
        parameters, sizes, kind = count_parameters(module, counted), sizes_of(module), type(module).__name__
        if plan is None:
            if parameters:
                others[kind] = others.get(kind, Other(kind, 0, 0)).plus(parameters)
            continue
        for at, size in enumerate(sizes):
            place = ".".join(filter(None, (name, size.part))) or ROOT
            held = (size.in_features, size.out_features, 0 if at else parameters)
            if isinstance(plan, str):
                skipped.append(Skipped(place, plan, *held, size.experts))
            else:
                weight: Tensor = module.weight  # pyright: ignore[reportAssignmentType]
                tied = names.setdefault(id(weight), place)
                note = f"{plan}{'' if tied == place else f', with the codes of {tied}, to which it is tied'}"
                if id(weight) in defaults.embeddings:
                    note += "; the embedding that it is tied to keeps its own weight"
                _freeze_layer(module, plan, cast)
                frozen.append(Converted(place, *held, note, size.experts))
    for module in fused:
        _freeze_mlp(module)
    for parameter in model.parameters():
        if not isinstance(parameter, UninitializedParameter):
            parameter.requires_grad_(False)
    found = tuple(frozen)
    warnings = () if found else ("no layer was frozen: see the reasons above, or pass weights, such as 'mxfp4'",)
    recipe = _recipe_of(plans)
    return FrozenReport(recipe, found, tuple(skipped), tuple(others.values()), warnings, before, model_bytes(model))


def _formats(weights: str | CastSpec, activations: str | CastSpec | None) -> Formats:
    """Both casts, checked; raises unless the formats have a product."""
    spec = as_cast_spec(weights)
    plan = spec.plan()
    if plan.stream is not None or plan.hadamard is not None or plan.grouped_amax or spec.amax_tensor is not None:
        kind = (
            "stochastic rounding" if plan.stream is not None else "a rotation" if plan.hadamard is not None else "amax"
        )
        rule = "each weight is cast to nearest by its own amax, and not rotated"
        refuse(
            f"{kind} for weights in {spec.format}", rule, "pass the name of a format, or CastSpec(format, scale_rule)"
        )
    fprop_recipe(spec.format, activations)
    return Formats(spec, None if activations is None else as_cast_spec(activations))


def _plan(
    name: str,
    module: nn.Module,
    given: Formats | None,
    activations: str | CastSpec | None,
    head: Formats | None,
    filter_fn: FilterFn | None,
    defaults: Defaults,
) -> Formats | str | None:
    """Formats of a layer that is frozen, or the reason why it is not; None for a module that is no layer."""
    if not sizes_of(module):
        return None
    if isinstance(module, FrozenLayer):
        return f"frozen before: weights {module.format}"
    if has_experts(module):
        return "experts of Transformers: load their checkpoint, or use nn.GroupedExperts"
    reason = obstacle(module) or _held_besides(module)
    if reason is not None:
        return reason
    by_policy = defaults.reason(name, module)
    if head is not None and by_policy is not None and by_policy.startswith("output head"):
        return head
    if filter_fn is not None:
        reason = kept_by_filter(filter_fn, module, name)
    elif given is not None:
        reason = by_policy
    if reason is not None:
        return reason
    if given is not None:
        return given
    fprop = module.recipe_now.fprop if isinstance(module, RecipeModule) else None
    if fprop is None:
        what = f"recipe {module.recipe_now.name}" if isinstance(module, RecipeModule) else "no recipe"
        return by_policy or f"{what}, so fprop is unquantized: pass weights"
    if fprop.b.hadamard is not False:
        return "its recipe rotates the operands of fprop, which frozen layers do not"
    a, b = fprop.a, fprop.b
    own = CastSpec(a.format, a.scale_rule) if activations is None else as_cast_spec(activations)
    fprop_recipe(b.format, own)  # raises unless the formats have a product
    return Formats(CastSpec(b.format, b.scale_rule), own)


def _held_besides(module: nn.Module) -> str | None:
    """Why a layer stays, if it holds modules, parameters or buffers that a frozen layer has no place for."""
    parts = [("module", name) for name, _ in module.named_children()]
    parts += [("parameter", name) for name, _ in module.named_parameters(recurse=False)]
    own = {"weight", "bias"}
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    parts += [("buffer", name) for name in buffers if name != "rng" or not isinstance(module, RecipeModule)]
    found = [f"{kind} {name}" for kind, name in parts if kind != "parameter" or name not in own]
    return f"holds {', '.join(found)} besides its weight, which freezing would drop" if found else None


def _freeze_layer(module: Any, formats: Formats, cast: dict[tuple[int, str], BlockScaled]) -> None:
    """Make a linear layer a frozen one, in place.  cast: operands of weights, which tied layers share."""
    weight: Tensor = module.weight
    key = id(weight), formats.weights.plan().text()
    if key not in cast:
        cast[key] = quantize_weight(weight, formats.weights)
    kind = QuantizedGroupedLinear if isinstance(module, GroupedLinear) else QuantizedLinear
    made = kind.from_operand(cast[key], module.bias, formats.activations)
    made.train(module.training)
    before = vars(module)
    kept = {name: value for name, value in before.items() if name not in _own_attributes(module)}
    kept |= getattr(module, "was_plain", None) or {}
    hooks = {name: value for name, value in before.items() if "hook" in name}
    before.clear()
    before.update(kept | vars(made) | hooks)
    _become(module, kind)


def _own_attributes(module: nn.Module) -> set[str]:
    """Names of attributes of a linear layer that a frozen one has in another form, or not at all."""
    names = {"in_features", "out_features", "_compiled_call_impl"}
    if isinstance(module, RecipeModule):
        names |= {"experts", "is_packed", "was_plain", "plain_class", *module.RECIPE_ATTRIBUTES}
    return names


def _is_fused(module: nn.Module) -> bool:
    """Whether an MLP computes its activation fused with casts, so that its frozen form has to."""
    if type(module) not in (SwiGLU, GroupedExperts) or not module.is_fused:
        return False
    recipe: Recipe = module.down.recipe_now  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    return None not in (recipe.fprop, recipe.dgrad, recipe.wgrad)


def _freeze_mlp(module: Any) -> None:
    """Make an MLP whose layers were frozen a frozen one, in place."""
    parts = (module.gate_up, module.down)
    if not all(isinstance(part, FrozenLayer) for part in parts):
        return
    if isinstance(module, GroupedExperts):
        vars(module)["clamp"] = None
    _become(module, QuantizedExperts if isinstance(module, GroupedExperts) else QuantizedSwiGLU)


def _become(module: Any, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def _refuse_sharded(model: nn.Module) -> None:
    """Raise for models whose parameters are sharded."""
    for name, module in model.named_modules():
        sharded = [part for part, each in module.named_parameters(recurse=False) if isinstance(each, DTensor)]
        if sharded or is_fully_sharded(module):
            where = ".".join(filter(None, (module_name(name), *sharded[:1]))) or ROOT
            refuse(
                f"{where} of the model is sharded",
                rule="freeze_ casts whole weights on one device",
                fix="load a full state_dict into an unsharded model, and freeze that",
                error=ShardingError,
            )


def _recipe_of(plans: list[Formats | str | None]) -> Recipe:
    """A recipe of fprop alone with the formats of all frozen layers, or without formats if these differ."""
    found = {str(plan): plan for plan in plans if isinstance(plan, Formats)}
    if len(found) != 1:
        return Recipe("; ".join(found) or "nothing")
    ((name, plan),) = found.items()
    return fprop_recipe(plan.weights.format, plan.activations).replace(name=name)
