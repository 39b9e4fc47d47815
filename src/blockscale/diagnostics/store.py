"""Numerics of a run on disk: JSON lines, one for the model and one for each sample, distinguished by "kind".

    {"kind": "model", "recipe": {...}, "converted": [...], "skipped": [...]}
    {"kind": "numerics", "step": 100, "loss": 1.25, "layers": [{"layer": ..., "fprop": ..., "operands": ..., ...}]}

The first line is the report of `quantize_`, so that `advise` does not need the model. A run that resumes appends
another model line. The last one counts; samples before it count if it equals the model line before. Reading stops at a
truncated line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..autograd.recipe import PRODUCTS, Operand, Product, Recipe
from ..errors import OptionError, message, refuse
from ..nn import ConversionReport
from ..nn.report import Converted, Skipped
from .layers import ExpertNumerics, LayerNumerics, Numerics, OperandNumerics

NAME = "numerics.jsonl"


@dataclass(frozen=True)
class Stored:
    """Contents of a file.  samples: by step; a sample is taken before its step."""

    report: ConversionReport
    samples: dict[int, Numerics]


def model_line(report: ConversionReport) -> str:
    """The model line."""
    row = {
        "kind": "model",
        "recipe": recipe_to_dict(report.recipe),
        "converted": [each._asdict() for each in report.converted],
        "skipped": [each._asdict() for each in report.skipped],
    }
    return json.dumps(row)


def sample_line(step: int, found: Numerics) -> str:
    """The line of a sample."""
    return json_line("numerics", step=step, **asdict(found))


def json_line(kind: str, **fields: Any) -> str:
    """A line of any kind. NaN and infinity become null, since JSON has neither."""
    return json.dumps(_finite({"kind": kind, **fields}), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> Stored:
    """Read a file, or the file in a run's folder."""
    place = path / NAME if path.is_dir() else path
    if not place.is_file():
        refuse(
            f"{path} without {NAME}",
            "a run writes its numerics with --numerics-every",
            "train with --folder and --numerics-every 1000, or name a preset",
        )
    report: ConversionReport | None = None
    samples: dict[int, Numerics] = {}
    try:
        for row in _rows(place):
            if row.get("kind") == "model":
                before, report = report, _report(row)
                if before != report:  # other layers or another recipe: earlier samples do not apply
                    samples.clear()
            elif row.get("kind") == "numerics":
                layers = tuple(_layer(each) for each in row["layers"])
                samples[row["step"]] = Numerics(_number(row["loss"]), layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            message(
                f"{place}: {type(error).__name__}: {error}",
                rule="blockscale train of this version wrote its lines",
                fix="train with --folder and --numerics-every 1000",
            )
        ) from error
    if report is None or not samples:
        refuse(
            f"{place} with {len(samples)} samples{'' if report else ' and no model'}",
            "advice needs the model's line and one sample",
            "let the run log once after its first sample",
        )
    return Stored(report, samples)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # truncated, or not text
            return
        if isinstance(row, dict):
            yield row


def _report(row: dict[str, Any]) -> ConversionReport:
    return ConversionReport(
        recipe_from_dict(row["recipe"]),
        tuple(Converted(**each) for each in row["converted"]),
        tuple(Skipped(**each) for each in row["skipped"]),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _layer(row: dict[str, Any]) -> LayerNumerics:
    experts = tuple(ExpertNumerics(**(each | {"operands": _operands(each)})) for each in row["experts"])
    gradient = _number(row["gradient"])
    made: dict[str, Any] = row | {"operands": _operands(row), "experts": experts, "gradient": gradient}
    return LayerNumerics(**made)


def _operands(row: dict[str, Any]) -> dict[str, OperandNumerics]:
    """Operands by role; empty for experts of older files, which also have figures that are not read."""
    operands = row.get("operands", {}).items()
    return {role: OperandNumerics(each["sqnr"], each["clipped"], each["underflow"]) for role, each in operands}


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data for JSON.

    >>> from blockscale import get_recipe
    >>> recipe_from_dict(recipe_to_dict(get_recipe("nvfp4"))) == get_recipe("nvfp4")
    True
    """
    plain = {each.name: getattr(recipe, each.name) for each in fields(recipe) if each.init}
    products = {name: None if plain[name] is None else asdict(plain[name]) for name in PRODUCTS}
    return plain | products | {"until": dict(recipe.until)}


def recipe_from_dict(row: dict[str, Any]) -> Recipe:
    """The inverse of `recipe_to_dict`."""
    products = {
        name: None if row[name] is None else Product(Operand(**row[name]["a"]), Operand(**row[name]["b"]))
        for name in PRODUCTS
    }
    made: dict[str, Any] = row | products
    return Recipe(**made)
