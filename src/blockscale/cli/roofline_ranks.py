"""`blockscale roofline fsdp`, `tp` and `ep`: a model of a training step on several GPUs, by wire and recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from . import arguments

if TYPE_CHECKING:
    from rich.console import Console

    from ..autograd.recipe import Recipe
    from ..roofline import Ceilings, StepCost

Parallel = Literal["fsdp", "tp", "ep"]
PARALLEL: tuple[Parallel, ...] = ("fsdp", "tp", "ep")
DEFAULT_MODELS = {"fsdp": "llama3-8b", "tp": "llama3-8b", "ep": "deepseek-16b"}
_TITLES = {"fsdp": "FSDP", "tp": "tensor and sequence parallel", "ep": "expert parallel"}
_HEAD = ("recipe", "wire", "MB a layer", "link ms", "compute ms", "GB a step", "serial ms", "overlapped ms")


def show(
    console: Console,
    kind: Parallel,
    model: str | None,
    tokens: int,
    recipes: Sequence[str],
    ceilings: Ceilings,
    ranks: int,
    link: str,
) -> int:
    """Print the table: a row for each recipe and each way that its data can travel."""
    from ..autograd.recipe import get_recipe
    from ..bench.blocks import BLOCKS
    from ..bench.shapes import model_name
    from ..roofline import link_of, parallel_cost

    name = model_name(model or DEFAULT_MODELS[kind], BLOCKS, "model with blocks")
    blocks, line = BLOCKS[name], link_of(link)
    mixtures = [block for block in blocks if block.experts]
    if kind == "ep" and not mixtures:
        arguments.refuse(f"ep of {name}", "it has no experts", "--model deepseek-16b")
    if kind == "tp" and mixtures:
        rule = "tensor parallel is modelled for dense models; experts are divided by ep"
        arguments.refuse(f"tp of {name}", rule, "blockscale roofline ep, or --model llama3-8b")
    where = "of all ranks" if kind == "tp" else "a rank"
    layers = sum(block.count for block in blocks)
    console.print(f"{name}, {_TITLES[kind]} on {ranks} GPUs, {tokens:,} tokens {where}, {layers} layers")
    console.print("model, not measured: bytes by the formulas of the layers, compute by the roofline")
    console.print(f"[dim]{line} ({line.source})[/]", soft_wrap=True)
    console.print(f"[dim]{ceilings} ({ceilings.source})[/]", soft_wrap=True)
    table = arguments.table("", _HEAD, _HEAD[2:], padding=0)
    for recipe in map(get_recipe, ("bf16", *recipes)):
        for payload in payloads(kind, recipe):
            cost = parallel_cost(kind, payload, blocks, tokens, recipe.formats(), ceilings, line, ranks)
            table.add_row(recipe.name, payload, *_cells(cost, layers))
    console.print(table)
    return 0


def _cells(cost: StepCost, layers: int) -> list[str]:
    per_layer = [cost.wire / 1e6, 1e3 * cost.link, 1e3 * cost.compute]
    step = [f"{cost.wire / 1e9:,.1f}", f"{1e3 * cost.serial:,.0f}", f"{1e3 * cost.overlapped:,.0f}"]
    megabytes, *times = (each / layers for each in per_layer)
    return [f"{megabytes:,.0f}", *(f"{each:.2f}" for each in times), *step]


def payloads(kind: Parallel, recipe: Recipe) -> list[str]:
    """How data of a recipe can travel."""
    from ..casts.requantize import keeps_values
    from ..formats import get_format

    weight = recipe.operand("fprop_w")
    rows = [recipe.operand(role) for role in ("fprop_x", "wgrad_x", "dgrad_dy", "wgrad_dy")]
    keeps = all(each is not None and keeps_values(each.format, each.scale_rule) for each in rows)
    found = ["bf16"]
    if kind == "fsdp" and weight is not None and get_format(weight.format).is_2d:
        found.append("codes")
    if kind == "tp" and any(rows) and not any(each is not None and each.format == "nvfp4" for each in rows):
        found += ["owner", "requantized"] if keeps else ["owner"]
    if kind == "ep" and keeps:
        found.append("low")
    return found
