"""`quantize_`: convert a model's linear layers and experts to a recipe, in place, with a report.

A module changes its class and nothing else. References to it (hooks, optimizers, tied weights, compiled callers, DDP)
stay valid, and its `state_dict` keeps its keys and tensors. `unquantize_` changes it back. Conversion only walks over
the modules, and works on the meta device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..autograd.dtensor import DTensor, check_shards, local, refuse_experts, shard_shape
from ..autograd.recipe import Recipe, get_recipe
from ..errors import refuse
from ..formats.checks import check_int, check_model, in_words
from ..formats.stochastic import check_seed, module_name, rng_state, whole_number
from .active import Active, active_experts
from .adapters import AdaptedExperts
from .linear import Linear
from .policy import Defaults, Ends, find_blocks, find_defaults, find_ends, obstacle, sizes_of
from .recipe_module import DEFAULT_SEED, RecipeModule
from .report import ConversionReport, Converted, Other, Skipped, nothing_converted, speed_note, unknown_active

FilterFn = Callable[[nn.Module, str], bool]
# name of a model that is a single layer: stochastic rounding needs a name
ROOT = "root"


def quantize_(
    model: nn.Module,
    recipe: str | Recipe,
    filter_fn: FilterFn | None = None,
    *,
    keep_first: int | None = None,
    keep_last: float | None = None,
    seed: int = DEFAULT_SEED,
) -> ConversionReport:
    """Convert a model's linear layers to a recipe, in place. The report lists them, and the others with the reason.
    Experts that are one 3-D parameter are layers too: `GroupedLinear`, and Transformers' (docs/experts.md).

    filter_fn(module, name): whether to convert a layer; called for each layer that can be converted, in place of the
    default policy.  By default the output head, routers and narrow layers stay in high precision, and with 4-bit
    formats the first two and the last 15 % of blocks.  keep_first, keep_last: blocks to keep whatever the recipe and
    filter_fn say, by number (int), the last ones also by share (float).  seed: of stochastic rounding.

    Names are without the prefixes of torch.compile, DDP and checkpointing. Layers that were converted before get the
    new recipe.

    >>> model = nn.Sequential(nn.Linear(4096, 14336), nn.ReLU(), nn.Linear(14336, 4))
    >>> report = quantize_(model, "fp8_blockwise")
    >>> [layer.name for layer in report.converted], report.skipped[0].reason
    (['0'], 'narrow: fewer than 16 features on a side')
    """
    check_model(model, "the modules of a torch.nn.Module are changed in place")
    check_filter(filter_fn)
    check_seed(seed)
    chosen = get_recipe(recipe)
    modules = [(module_name(name), module) for name, module in model.named_modules()]
    defaults = find_defaults(modules) if filter_fn is None else None
    ends = find_ends(lambda: find_blocks(modules), chosen, keep_first, keep_last, defaults=filter_fn is None)

    # all layers are decided before the first one changes: a filter_fn that raises leaves the model as it was
    reasons = [_reason(name, module, filter_fn, defaults, ends) if sizes_of(module) else "" for name, module in modules]
    holders = {id(module): max((size.experts for size in sizes_of(module)), default=1) for _, module in modules}
    for (name, module), reason in zip(modules, reasons, strict=True):
        if reason is None and chosen.is_quantized:
            _check_sharding(module, name or ROOT, chosen)
    active = active_experts(modules, {each: experts for each, experts in holders.items() if experts > 1})
    unknown: dict[int, list[str]] = {}
    converted: list[Converted] = []
    skipped: list[Skipped] = []
    others: dict[str, Other] = {}
    states: dict[torch.device, Tensor] = {}
    counted: set[int] = set()
    for (name, module), reason in zip(modules, reasons, strict=True):
        parameters = count_parameters(module, counted)
        sizes = sizes_of(module)
        if not sizes:
            kind = type(module).__name__
            if parameters:
                others[kind] = others.get(kind, Other(kind, 0, 0)).plus(parameters)
            continue
        before = _convert(module, name or ROOT, chosen, states, seed) if reason is None else ""
        for at, size in enumerate(sizes):
            place = ".".join(filter(None, (name, size.part))) or ROOT
            seen = active.get(id(module), Active(1))
            if seen.known is None:
                unknown.setdefault(max(size.experts, seen.among), []).append(place)
            counted_as = (size.experts, seen.known or 1, seen.among)
            # the first part carries the parameters of all parts
            held = (size.in_features, size.out_features, 0 if at else parameters)
            if reason is None:
                notes = speed_note(chosen, *held[:2]), before, _experts_note(size.experts, seen)
                converted.append(Converted(place, *held, "; ".join(filter(None, notes)), *counted_as))
            else:
                skipped.append(Skipped(place, reason, *held, *counted_as))
    warnings = [ends.warning] if ends.warning else []
    warnings += [unknown_active(names, experts) for experts, names in unknown.items()]
    kept = [module for (_, module), reason in zip(modules, reasons, strict=True) if reason]
    left = [each for each in kept if isinstance(each, RecipeModule) and each.recipe.is_quantized]
    if left:
        warnings.append(
            f"{len(left)} of the layers that were not converted still have another recipe: call unquantize_(model) "
            "first, or, for layers constructed as blockscale.nn's, quantize_(model, 'bf16', lambda module, name: True)"
        )
    if not converted:
        warnings.append(nothing_converted(skipped))
    return ConversionReport(chosen, tuple(converted), tuple(skipped), tuple(others.values()), tuple(warnings))


def unquantize_(model: nn.Module) -> int:
    """Change the layers that `quantize_` converted back to their plain classes; returns their number.

    Layers constructed as `blockscale.nn.Linear` or `GroupedLinear` do not change.

    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> report = quantize_(model, "mxfp8")
    >>> unquantize_(model), type(model[0]) is nn.Linear
    (1, True)
    """
    check_model(model, "the modules of a torch.nn.Module are changed in place")
    kinds = (Linear, AdaptedExperts)
    found = [module for module in model.modules() if isinstance(module, kinds) and module.was_plain is not None]
    for module in found:
        if type(module) not in kinds:
            refuse(
                f"unquantize_ for a {type(module).__name__}",
                "a layer is restored by its class, which has changed since the conversion: by fully_shard or "
                "a parametrization",
                "call it before fully_shard, and remove parametrizations; quantize_ with 'bf16' before those "
                "computes the same as the plain layer",
            )
    for module in found:
        module.restore()
    return len(found)


def advance_(model: nn.Module, tick: int | None = None) -> None:
    """Advance the tick of stochastic rounding, in place: once after every backward.

    tick: value to set instead, when training resumes: optimizer_step * microbatches + microbatch.

    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> report = quantize_(model, "nvfp4", lambda module, name: True, seed=7)
    >>> advance_(model)
    >>> model[0].rng
    tensor([7, 1])
    """
    check_model(model, "the modules of a torch.nn.Module are changed in place")
    if tick is not None:
        tick = whole_number(tick, "tick")
    found = (getattr(module, "rng", None) for module, _ in _recipe_modules(model))
    states = [local(state) for state in found if isinstance(state, Tensor) and not state.is_meta]
    # layers share one state until the model is moved; then each has its own
    ticks = list({(state.device, state.data_ptr()): state[1] for state in states}.values())
    if tick is None and ticks:
        torch._foreach_add_(ticks, 1)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif tick is not None:
        for each in ticks:
            each.fill_(tick)


def set_step_(model: nn.Module, step: int) -> None:
    """Set the next optimizer step, for recipes whose products change with it (`Recipe.until`, `since`).

    >>> from blockscale import get_recipe
    >>> model = nn.Sequential(nn.Linear(64, 64))
    >>> report = quantize_(model, get_recipe("mxfp8").replace(until={"fprop": 100}))
    >>> set_step_(model, 100)
    >>> print(model[0].recipe_now.fprop)
    None
    """
    check_model(model, "the modules of a torch.nn.Module are changed in place")
    check_int(step, "step", "steps are counted from 0")
    now: dict[Recipe, Recipe] = {}
    for module, recipe in _recipe_modules(model):
        current = now.setdefault(recipe, recipe.at(step))
        # not replaced by an equal object: compiled callers guard on identity and would compile again
        if getattr(module, "recipe_now", None) != current:
            module.recipe_now = current  # pyright: ignore[reportArgumentType]


def _recipe_modules(model: nn.Module) -> Iterator[tuple[nn.Module, Recipe]]:
    """All layers of a model that have a recipe, with it."""
    for module in model.modules():
        recipe = getattr(module, "recipe", None)
        if isinstance(recipe, Recipe) and hasattr(module, "recipe_now"):
            yield module, recipe


# ---- one module ------------------------------------------------------------------------------------------------------


def _reason(
    name: str, module: nn.Module, filter_fn: FilterFn | None, defaults: Defaults | None, ends: Ends
) -> str | None:
    """Why a layer is not converted; None if it is."""
    reason = obstacle(module)
    if reason is not None:
        return reason
    if filter_fn is not None:
        reason = kept_by_filter(filter_fn, module, name)
    elif defaults is not None:
        reason = defaults.reason(name, module)
    reason = reason or ends.reason(id(module))
    if reason is not None and isinstance(module, RecipeModule):
        return f"{reason}; still has recipe {module.recipe.name}"
    return reason


def _check_sharding(module: nn.Module, name: str, recipe: Recipe) -> None:
    """Raise for parameters that torch's parallel styles have sharded in a way that the recipe cannot compute.

    FSDP gathers its shards before a layer is called. On a mesh of several dimensions the two cannot be told apart here,
    and the call checks.
    """
    if not getattr(module, "_distribute_module_applied", False):
        return
    for part, parameter in module.named_parameters(recurse=False):
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != 1:
            continue
        if isinstance(module, RecipeModule):
            module.check_sharding(f"{name}.{part}", parameter, recipe)
        elif isinstance(module, nn.Linear):
            check_shards(f"{name}.{part}", tuple(parameter.shape), shard_shape(parameter), recipe)
        else:
            refuse_experts(f"{name}.{part}", parameter)


def _convert(module: nn.Module, name: str, recipe: Recipe, states: dict[torch.device, Tensor], seed: int) -> str:
    """Change the class and apply the recipe; returns a note for the report."""
    device = next(module.parameters(recurse=False)).device
    state = states.setdefault(device, rng_state(seed, device=device)) if recipe.stochastic else None
    note = f"had recipe {module.recipe.name} before" if isinstance(module, RecipeModule) else ""
    kind = Linear if isinstance(module, nn.Linear) else AdaptedExperts
    layer = module if isinstance(module, RecipeModule) else kind.convert(module)
    layer.apply_recipe(recipe, name=name, rng=state, seed=seed)
    return note


def _experts_note(experts: int, seen: Active) -> str:
    held = f"{experts} experts" if experts > 1 else f"one of {seen.among} experts" if seen.among > 1 else ""
    count = "an unknown number (counted as 1)" if seen.known is None else str(seen.known)
    return f"{held}, {count} for each token" if held else ""


def count_parameters(module: nn.Module, counted: set[int]) -> int:
    """Number of a module's own parameters; tied ones count for the first module."""
    total = 0
    for each in module.parameters(recurse=False):
        if id(each) not in counted and not isinstance(each, UninitializedParameter):
            total += each.numel()
        counted.add(id(each))
    return total


def kept_by_filter(filter_fn: FilterFn, module: nn.Module, name: str) -> str | None:
    """Why a layer is kept, by a filter_fn; None if it is not."""
    answer = filter_fn(module, name)
    if not isinstance(answer, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"filter_fn returned {answer!r} for {name!r}",
            "it returns True or False: whether to convert a layer",
            "return a bool, such as bool(re.search('mlp', name))",
        )
    return None if answer else "filter_fn returned False"


def _takes_a_layer(filter_fn: object) -> bool:
    """Whether it can be called with a module and a name; True if it has no signature to inspect."""
    if not callable(filter_fn) or isinstance(filter_fn, nn.Module | type):
        return False
    try:
        inspect.signature(filter_fn).bind(None, "")
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True


def check_filter(filter_fn: object) -> None:
    """Raise unless a filter_fn can be called, or is None."""
    if filter_fn is not None and not _takes_a_layer(filter_fn):
        refuse(
            f"filter_fn is {filter_fn!r}" if callable(filter_fn) else f"filter_fn is {in_words(filter_fn)}",
            "it is called with a module and its name, and returns whether to convert it",
            "pass a function, such as lambda module, name: 'mlp' in name",
        )
