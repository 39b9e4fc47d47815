"""How long linear layers take, in bf16 and by recipes, forward and backward or forward alone, timed in turns.

Gradients are returned, not added to `.grad`: adding costs the same in every precision and is the optimizer's affair.
Where a weight is cast once a step, a call is the cast and all microbatches, and the time is of one of them.
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
from torch import Tensor

from .. import nn
from ..autograd import refresh_weights_
from ..autograd.recipe import get_recipe
from ..roofline import Use
from .harness import random
from .timing import Call, Timing, input_sets, measure, prepare

Layer = tuple[int, int]  # (K, N)
BASELINE = "bf16"


@dataclass(frozen=True)
class Measured:
    """The time of one layer by one recipe, and how it was used; where: as in `store.Row`."""

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
        """Whether it was measured in that use, and with so many tokens if they are given."""
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
    """For each layer the times of bf16 and of every recipe, measured in the same turns."""
    names = list(dict.fromkeys((BASELINE, *recipes)))
    for layer in layers:
        slices = {name: prepare(_calls(layer, tokens, name, device, use), device, seconds=seconds) for name in names}
        share = _forwards(use)
        yield [
            _measured(layer, tokens, name, use, timing, share, where or {})
            for name, timing in measure(slices, rounds=rounds).items()
        ]


def _measured(
    layer: Layer, tokens: int, name: str, use: Use, timing: Timing, share: int, where: dict[str, Any]
) -> Measured:
    us, spread = timing.us / share, (timing.low / share, timing.high / share)
    how = (use.training, use.microbatches, use.weight_cast)
    return Measured(layer, tokens, name, *how, us, spread, timing.method, where)


def _forwards(use: Use) -> int:
    """Microbatches of one call: all of a step where they share a cast, in bf16 too, so that calls are alike."""
    return use.microbatches if use.training and use.weight_cast == "step" else 1


def _calls(layer: Layer, tokens: int, name: str, device: torch.device, use: Use) -> list[Call]:
    """One call for each input set, every set with a weight of its own, so that none is found in the cache."""
    k, n = layer
    sets = input_sets(2 * (tokens * k + n * k + tokens * n), device)
    return [_call(layer, tokens, name, device, use) for _ in range(sets)]


def _call(layer: Layer, tokens: int, name: str, device: torch.device, use: Use) -> Call:
    k, n = layer
    module = make_layer(layer, name, device, use)
    x, dy = random((tokens, k), device).requires_grad_(use.training), random((tokens, n), device)
    refresh = functools.partial(refresh_weights_, module) if _cast_of(use) == "step" else None
    if not use.training:
        if refresh is not None:
            refresh()

        def infer() -> Tensor:
            with torch.no_grad():
                return module(x)

        return infer
    leaves, repeats = (x, *module.parameters()), _forwards(use)

    def train() -> object:
        if refresh is not None:
            refresh()
        grads: object = None
        for _ in range(repeats):
            grads = torch.autograd.grad(module(x), leaves, dy)
        return grads

    return train


def make_layer(layer: Layer, name: str, device: torch.device, use: Use) -> torch.nn.Module:
    """The layer in bf16, or ours by a recipe."""
    k, n = layer
    if name == BASELINE:
        return torch.nn.Linear(k, n, bias=use.bias, device=device, dtype=torch.bfloat16)
    recipe = get_recipe(name).replace(name=name, weight_cast=_cast_of(use))
    # some recipes draw, by the layer's name
    return nn.Linear(k, n, use.bias, device, torch.bfloat16, recipe=recipe, name="measured")


def _cast_of(use: Use) -> str:
    """Without a backward the weight is cast beforehand."""
    return use.weight_cast if use.training else "step"


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path: Path, rows: Iterable[Measured]) -> None:
    """Append them as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)


def read(path: Path) -> list[Measured]:
    """What was written here or by `bench linear`; of the same layer, use and recipe the last counts."""
    found: dict[object, Measured] = {}
    for line in path.read_text().splitlines():
        fields: dict[str, Any] = json.loads(line)
        for row in _of_suite(fields) if "suite" in fields else (_of_fields(fields),):
            found[row.layer, row.tokens, row.recipe, row.training, row.microbatches, row.weight_cast] = row
    return list(found.values())


def _of_fields(fields: dict[str, Any]) -> Measured:
    fields["layer"], fields["spread_us"] = tuple(fields["layer"]), tuple(fields["spread_us"])
    return Measured(**fields)


def _of_suite(row: dict[str, Any]) -> Iterator[Measured]:
    """A row of the suite: ours and bf16, forward and backward with the weight cast each time. Rows of whole steps,
    whose gradients are added up, and of the host are other uses."""
    plain = row["peers"].get(BASELINE, {}).get("us")
    if (row["suite"], row["group"]) != ("linear", "layers") or row["us"] is None or plain is None:
        return
    tokens, n, k = row["shape"]
    for recipe, us, spread in ((row["format"], row["us"], tuple(row["spread_us"])), (BASELINE, plain, (plain, plain))):
        yield Measured((k, n), tokens, recipe, True, 1, "forward", us, spread, row["method"], row["where"])
