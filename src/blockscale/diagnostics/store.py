"""Numerics of a run on disk: JSON lines, one for the model and one for each sample, told apart by "kind".

    {"kind": "model", "recipe": {...}, "converted": [...], "skipped": [...]}
    {"kind": "numerics", "step": 100, "loss": 1.25, "layers": [{"layer": ..., "fprop": ..., "operands": ..., ...}]}

The first line holds what `quantize_` did, so that advice can be given without the model. A run that resumes appends
another; the last counts, and so do samples before it where it is the same. A line that was cut off in the middle is the
last, and no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..autograd.recipe import PRODUCTS, Operand, Product, Recipe
from ..errors import OptionError, message
from ..nn import ConversionReport
from ..nn.report import Converted, Skipped
from .layers import ExpertNumerics, LayerNumerics, Numerics, OperandNumerics

NAME = "numerics.jsonl"


@dataclass(frozen=True)
class Stored:
    """What a file holds.  samples: by the step that they were taken before."""

    report: ConversionReport
    samples: dict[int, Numerics]


def model_line(report: ConversionReport) -> str:
    """The first line."""
    row = {
        "kind": "model",
        "recipe": recipe_to_dict(report.recipe),
        "converted": [each._asdict() for each in report.converted],
        "skipped": [each._asdict() for each in report.skipped],
    }
    return json.dumps(row)


def sample_line(step: int, found: Numerics) -> str:
    """A sample's line."""
    return json.dumps({"kind": "numerics", "step": step, **asdict(found)})


def read(path: Path) -> Stored:
    """A file, or the file in a run's folder."""
    place = path / NAME if path.is_dir() else path
    if not place.is_file():
        raise OptionError(
            message(
                f"{path} without {NAME}",
                rule="a run leaves its numerics in its folder if it was asked to",
                fix="train with --folder and --numerics-every 500, or name a preset",
            )
        )
    report: ConversionReport | None = None
    samples: dict[int, Numerics] = {}
    for row in _rows(place):
        if row.get("kind") == "model":
            before, report = report, _report(row)
            if before != report:  # other layers, or another recipe: what was measured before says nothing of them
                samples.clear()
        elif row.get("kind") == "numerics":
            samples[row["step"]] = _numerics(row)
    if report is None or not samples:
        raise OptionError(
            message(
                f"{place} with {len(samples)} samples{'' if report else ' and no model'}",
                rule="advice needs the model's line and one sample",
                fix="let the run log once after its first sample",
            )
        )
    return Stored(report, samples)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            return
        if isinstance(row, dict):
            yield row


def _report(row: dict[str, Any]) -> ConversionReport:
    return ConversionReport(
        recipe_from_dict(row["recipe"]),
        tuple(Converted(**each) for each in row["converted"]),
        tuple(Skipped(**each) for each in row["skipped"]),
    )


def _numerics(row: dict[str, Any]) -> Numerics:
    return Numerics(row["loss"], tuple(_layer(each) for each in row["layers"]))


def _layer(row: dict[str, Any]) -> LayerNumerics:
    operands = {
        role: OperandNumerics(**(each | {"scales": {int(key): count for key, count in each["scales"].items()}}))
        for role, each in row["operands"].items()
    }
    experts = tuple(ExpertNumerics(**each) for each in row["experts"])
    made: dict[str, Any] = row | {"operands": operands, "experts": experts}
    return LayerNumerics(**made)


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """A recipe as JSON holds it.

    >>> from blockscale import get_recipe
    >>> recipe_from_dict(recipe_to_dict(get_recipe("nvfp4"))) == get_recipe("nvfp4")
    True
    """
    plain = {each.name: getattr(recipe, each.name) for each in fields(recipe) if each.init}
    products = {name: None if plain[name] is None else asdict(plain[name]) for name in PRODUCTS}
    return plain | products | {"until": dict(recipe.until)}


def recipe_from_dict(row: dict[str, Any]) -> Recipe:
    """The inverse."""
    products = {
        name: None if row[name] is None else Product(Operand(**row[name]["a"]), Operand(**row[name]["b"]))
        for name in PRODUCTS
    }
    made: dict[str, Any] = row | products
    return Recipe(**made)
