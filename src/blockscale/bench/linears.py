"""Times of linear layers in bf16 and by recipes, forward and backward or forward alone, timed in turns.

It times the step of `bench linear` in a CUDA graph, since the roofline has no launch overhead. If a weight is cast once
a step, a call is the cast and all microbatches with accumulated gradients, and the reported time is of one microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..autograd.recipe import get_recipe
from ..errors import OptionError, message
from ..roofline import Use
from .layers import Batch, cast_weights, infer, make_batch, normal_linear, our_linear, our_variant, plain_variant, step
from .timing import Call, input_sets, measure, prepare

Layer = tuple[int, int]  # (K, N)
BASELINE = "bf16"


@dataclass(frozen=True)
class Measured:
    """Time of one layer by one recipe in one use.  where: machine and versions, as in `store.Row`."""

    layer: Layer
    tokens: int
    recipe: str
    training: bool
    microbatches: int
    weight_cast: str
    us: float
    spread_us: tuple[float, float]
    method: str
    where: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def fits(self, tokens: int | None, use: Use) -> bool:
        """Whether it was measured in that use, and with that number of tokens if given."""
        same = (self.training, self.microbatches, self.weight_cast) == (use.training, use.microbatches, use.weight_cast)
        return same and tokens in (None, self.tokens)


def time_layers(
    layers: Sequence[Layer],
    tokens: int,
    recipes: Sequence[str],
    device: torch.device,
    use: Use,
    *,
    rounds: int = 11,
    seconds: float = 0.03,
    where: dict[str, Any] | None = None,
) -> Iterator[list[Measured]]:
    """For each layer the times of bf16 and of every recipe, timed in turns."""
    names = list(dict.fromkeys((BASELINE, *recipes)))
    how = (use.training, use.microbatches, use.weight_cast)
    for layer in layers:
        sets = _input_sets(layer, tokens, device, use)
        slices = {name: prepare(_calls(name, sets, use), device, seconds=seconds) for name in names}
        found = {name: timing.per_part(_forwards(use)) for name, timing in measure(slices, rounds=rounds).items()}
        yield [
            Measured(layer, tokens, name, *how, timing.us, (timing.low, timing.high), timing.method, where or {})
            for name, timing in found.items()
        ]


def _forwards(use: Use) -> int:
    """Microbatches of one call: all of a step if they share a cast, in bf16 too, so that calls are comparable."""
    return use.microbatches if use.training and use.weight_cast == "step" else 1


def _input_sets(layer: Layer, tokens: int, device: torch.device, use: Use) -> list[Batch]:
    """Input sets that together exceed the cache."""
    k, n = layer
    first = make_batch(normal_linear(k, n, device, bias=use.bias), tokens, layer, device)
    return [first, *(first.another() for _ in range(input_sets(2 * (tokens * k + n * k + tokens * n), device) - 1))]


def _calls(name: str, sets: Sequence[Batch], use: Use) -> list[Call]:
    """One call for each input set, of the bf16 layer or of ours by a recipe."""
    weight_cast = use.weight_cast if use.training else "step"
    variant = plain_variant() if name == BASELINE else our_variant(our_linear, get_recipe(name), weight_cast)
    if use.training:
        return [functools.partial(step, variant, _forwards(use), one) for one in sets]
    cast_weights(variant, sets[0])
    return [functools.partial(infer, variant, one) for one in sets]


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path: Path, rows: Iterable[Measured]) -> None:
    """Append rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)


def read(path: Path) -> list[Measured]:
    """Rows of `write` or of `bench linear`; the last row of the same layer, use and recipe counts."""
    found: dict[object, Measured] = {}
    try:
        for line in path.read_text().splitlines():
            fields: dict[str, Any] = json.loads(line)
            for row in _of_suite(fields) if "suite" in fields else (_of_fields(fields),):
                found[row.layer, row.tokens, row.recipe, row.training, row.microbatches, row.weight_cast] = row
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        rule = "each line of a file of measured layers is a row of roofline --measure or bench linear"
        said = f"{path} has other lines ({type(error).__name__}: {error})"
        raise OptionError(message(said, rule=rule, fix="name another file")) from None
    return list(found.values())


def _of_fields(fields: dict[str, Any]) -> Measured:
    fields["layer"], fields["spread_us"] = tuple(fields["layer"]), tuple(fields["spread_us"])
    return Measured(**fields)


def _of_suite(row: dict[str, Any]) -> Iterator[Measured]:
    """Rows of ours and of bf16 from a row of the suite: forward and backward with the weight cast each time. Rows of
    whole steps and of host time are other uses and are skipped."""
    plain = row["peers"].get(BASELINE, {}).get("us")
    if (row["suite"], row["group"]) != ("linear", "layers") or row["us"] is None or plain is None:
        return
    tokens, n, k = row["shape"]
    for recipe, us, spread in ((row["format"], row["us"], tuple(row["spread_us"])), (BASELINE, plain, (plain, plain))):
        yield Measured((k, n), tokens, recipe, True, 1, "forward", us, spread, row["method"], row["where"])
