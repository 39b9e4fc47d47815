"""What suites of layers share: a case with its check, the memory that it keeps, and the roof over it.

A layer is checked against the unquantised one in fp64: two runs on poisoned memory that agree in every bit, all values
finite, output and gradients as close as the recipe allows on normal values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...autograd.recipe import PRODUCTS, Recipe, get_recipe
from ...hardware import Capability, capability, gpu_name
from ...registry import Request, would_serve
from ...roofline import BF16, NOMINAL, CostOf, Use, architecture_of, machine_of
from .. import ceilings
from ..harness import Args, Case, Verdict, failure
from ..layer_peers import MAIN_GRAD, PER_STEP, TWICE, Judge
from ..layers import Batch, Ours, Results, Way, kept_bytes, our_way, plain_way, take
from ..rooflines import Roofs

FP8, MXFP8, NVFP4 = "fp8_blockwise", "mxfp8", "nvfp4"
# MXFP8 as Hopper's FP8 units multiply it
MXFP8_NATIVE = "mxfp8_128x128"
RECIPES: Mapping[str, Recipe] = {
    FP8: get_recipe(FP8),
    MXFP8: get_recipe(MXFP8),
    MXFP8_NATIVE: get_recipe(MXFP8_NATIVE),
    NVFP4: get_recipe(NVFP4),
}
OUTPUTS = ("y", "dx", "dw")


class Ways(NamedTuple):
    """How the layer of a row is trained.

    main: what the row is about.  others: ours with weights cast at other times, or gradients added up elsewhere.  use:
    of the layer in a step, as the roof asks.  label: in front of its sizes in a name.
    """

    main: Way
    others: dict[str, Way]
    use: Use
    label: str


def ways_of(ours: Ours, recipe: Recipe, microbatches: int, *, twice: bool = False) -> Ways:
    """One microbatch casts its weights in the forward; several share the casts of their step.  twice: beside one also
    where weights are cast once more in the backward."""
    if microbatches > 1:
        main, added = (our_way(ours, recipe, "step", main_grads=main_grads) for main_grads in (False, True))
        use = Use(microbatches=microbatches, weight_cast="step")
        return Ways(main, {MAIN_GRAD: added}, use, f"{microbatches} microbatches ")
    others = {TWICE: our_way(ours, recipe, "twice")} if twice else {}
    return Ways(our_way(ours, recipe), others | {PER_STEP: our_way(ours, recipe, "step")}, Use(), "")


def find_roofs(device: torch.device) -> Roofs | None:
    """The roof of this machine, measured now, with casts at the speed of a copy, and its specification; None without a
    GPU that has matrix units."""
    architecture = architecture_of(capability(device).sm) if device.type == "cuda" else None
    if architecture is None:
        return None
    found = ceilings.find(device, rounds=11, seconds=0.02)
    found = replace(found, gb_s=found.copy_gb_s or found.gb_s)
    return Roofs(
        ceilings.as_roof(found, gpu_name(device), architecture), NOMINAL.get(machine_of(gpu_name(device)) or "")
    )


def roof_details(
    cost: CostOf, sizes: tuple[int, int, int], recipe: Recipe, roofs: Roofs | None, use: Use
) -> dict[str, float]:
    """Least times of a layer (M, K, N) by the recipe and in bf16, under both roofs, and the ceilings of the first."""
    if roofs is None:
        return {}
    found: dict[str, float] = {}
    for prefix, roof in (("", roofs.main), ("nominal_", roofs.nominal)):
        if roof is not None:
            for name, formats in (("bound_us", recipe.formats()), ("bf16_bound_us", BF16)):
                found[prefix + name] = round(cost(*sizes, formats, roof, use).seconds * 1e6, 3)
    main = roofs.main
    found |= {"ceiling_gb_s": round(main.bandwidth / 1e9, 1)}
    return found | {f"ceiling_{units}_tflop_s": round(main.rate(units) / 1e12, 1) for units in main.units}


def backends(
    recipe: Recipe, device: Capability, products: Sequence[tuple[int, int, int]], groups: int | None = None
) -> str:
    """Who serves the products (M, N, K) of fprop, dgrad and wgrad.  groups: how many these are of, with experts."""
    found: dict[str, None] = {}
    for name, size in zip(PRODUCTS, products, strict=True):
        product = getattr(recipe, name)
        if product is not None:
            op, shape = "gemm", size
            if groups is not None:
                op, shape = "k_grouped" if name == "wgrad" else "m_grouped", (*size, groups)
            request = Request(op, device, (product.a.format, product.b.format), shape, torch.bfloat16)
            found[would_serve(request).backend] = None
    return ", ".join(found)


def checker(
    main: Way,
    judge: Judge,
    gates: Sequence[float],
    kept: Mapping[str, Way],
    how: str,
    take: Callable[[Way, Batch], Results] = take,
) -> Callable[[Case, Args], Verdict]:
    """A check of what `main` computes; gates: of the first of `OUTPUTS`, as many as the judge tells.  kept: whose
    memory is told."""

    def check(case: Case, args: Args) -> Verdict:
        batch: Batch = args[0]
        try:
            problems, found = _problems(main, judge, gates, batch, take)
            details = {f"{name}_db": db for name, db in zip(OUTPUTS, found, strict=False)}
            details |= {f"kept_bytes {name}": float(kept_bytes(way, batch)) for name, way in kept.items()}
        except Exception as error:  # a layer that raises is as wrong as any other, and the rest of a run goes on
            return Verdict(0, how, failure(error))
        numbers = {name: value for name, value in details.items() if value == value}
        worst = min(found) if len(numbers) == len(details) else None
        return Verdict(0, how, "; ".join(text for text in problems if text), worst, numbers)

    return check


def _problems(
    main: Way, judge: Judge, gates: Sequence[float], batch: Batch, take: Callable[[Way, Batch], Results]
) -> tuple[list[str], tuple[float, ...]]:
    first = take(main, batch)
    copies = [tensor.clone() for tensor in _tensors(first)]
    # the allocator hands these blocks to the second run; read as a float, FF in every byte is NaN
    _poison(first)
    del first
    second = take(main, batch)
    differing = sum(int((a != b).sum()) for a, b in zip(copies, _tensors(second), strict=True))
    unset = sum(int((~tensor.isfinite()).sum()) for tensor in _tensors(second))
    found = judge(batch, second)
    problems = [
        f"{differing} values differ between two runs" if differing else "",
        f"{unset} values are not finite, or were not written" if unset else "",
    ]
    for name, (db, gate) in zip(OUTPUTS, zip(found, gates, strict=True), strict=False):
        problems.append("" if db >= gate else f"{name} is {db:.1f} dB from the exact one, less than {gate:.1f}")
    return problems, found


def _poison(results: Results) -> None:
    for tensor in _tensors(results):
        tensor.untyped_storage().fill_(0xFF)  # pyright: ignore[reportAttributeAccessIssue]


def _tensors(results: Results) -> list[Tensor]:
    return [results.y, results.dx, *results.dw]


def memory_ways(main: Way, others: Mapping[str, Way]) -> dict[str, Way]:
    """Whose memory a row tells: ours, with the weight cast at any time, and bf16's."""
    return {"blockscale": main, **others, "bf16": plain_way()}
