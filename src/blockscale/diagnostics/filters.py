"""The layer filter of an advice: layers to convert, by name; read from a file and checked against a model."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..autograd import Recipe
from ..errors import OptionError, message, refuse
from ..formats.stochastic import module_name
from ..nn.convert import ROOT, FilterFn
from ..nn.policy import sizes_of

KIND = "blockscale advice"


@dataclass(frozen=True)
class ByName:
    """Accepts layers by name. Experts with several weights are converted all or none."""

    low: tuple[str, ...]

    def __call__(self, module: nn.Module, name: str) -> bool:
        place = name or ROOT
        return any(each == place or each.startswith(f"{place}.") for each in self.low)


def load_filter(path: str | Path, model: nn.Module | None = None, recipe: Recipe | None = None) -> FilterFn:
    """The filter of a saved advice: `quantize_(model, recipe, filter_fn=load_filter("advice.json"))`.

    model: raise if it lacks a layer of the advice or has a linear layer that the advice does not list; the advice is
    then for another model.  recipe: warn if the advice is for another recipe.
    """
    place = Path(path)
    try:
        stored = json.loads(place.read_text())
        if stored["kind"] != KIND:
            raise KeyError(stored["kind"])
        low, keep, others, unmeasured = (_names(stored, key) for key in ("low", "keep", "others", "unmeasured"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            message(
                f"{place}: {type(error).__name__}: {error}",
                rule="a filter is read from a file that blockscale advise wrote",
                fix="blockscale advise out/run --out advice.json",
            )
        ) from error
    if model is not None:
        _check_names(place, [*low, *keep], [*others, *unmeasured] if "others" in stored else None, model)
    if recipe is not None and recipe.is_quantized and recipe.name != stored.get("recipe"):
        warnings.warn(
            f"{place} is for {stored.get('recipe')}, this is {recipe.name}, whose noise differs", stacklevel=2
        )
    return ByName(tuple(low))


def _names(stored: dict[str, Any], key: str) -> list[str]:
    found = stored["low"] if key == "low" else stored.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"{key} is not a list of names")
    return found


def _check_names(path: Path, names: list[str], others: list[str] | None, model: nn.Module) -> None:
    """Raise unless the model has exactly the listed layers, which are modules or weights of modules.

    names: layers that the advice is about.  others: its other linear layers; None if the file does not list them.
    """
    named = (name for each in (model.named_modules(), model.named_parameters()) for name, _ in each)
    there = {module_name(name) or ROOT for name in named}
    missing = [name for name in names if name not in there]
    layers = {
        ".".join(filter(None, (module_name(name), size.part))) or ROOT
        for name, each in model.named_modules()
        for size in sizes_of(each)
    }
    new = [] if others is None else sorted(layers - {*names, *others})
    if missing or new:
        what = (
            f"names {missing[0]}, and {len(missing) - 1} more that this model does not have"
            if missing
            else f"does not list {new[0]}, and {len(new) - 1} more that this model has"
        )
        rule = "advice is for the model that was measured"
        refuse(f"{path} {what}", rule, "blockscale advise for this one")
