"""Shared parts of the layer suites: check of a case, bytes saved for backward, and roofline bounds.

A layer is checked against the unquantized one in fp64: two runs on poisoned memory agree in every bit, all values are
finite, and SQNR of output and gradients reaches the recipe's gates on normal values.
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
from ..layers import Batch, Ours, Results, Variant, our_variant, plain_variant, saved_bytes, take
from ..rooflines import Roofs

FP8, MXFP8, NVFP4 = "fp8_blockwise", "mxfp8", "nvfp4"
# MXFP8 for the FP8 tensor cores of Hopper
MXFP8_NATIVE = "mxfp8_128x128"
RECIPES: Mapping[str, Recipe] = {
    FP8: get_recipe(FP8),
    MXFP8: get_recipe(MXFP8),
    MXFP8_NATIVE: get_recipe(MXFP8_NATIVE),
    NVFP4: get_recipe(NVFP4),
}
OUTPUTS = ("y", "dx", "dw")


class Variants(NamedTuple):
    """Variants of the layer of a row.

    main: the timed variant.  others: ours with weights cast at other times, or another accumulation of gradients.  use:
    of the layer in a step, for the roofline.  label: precedes the sizes in a name.
    """

    main: Variant
    others: dict[str, Variant]
    use: Use
    label: str


def variants_of(ours: Ours, recipe: Recipe, microbatches: int, *, twice: bool = False) -> Variants:
    """Variants of our layer. One microbatch casts its weights in the forward; several share the casts of their step.
    twice: with one microbatch, add a variant that casts weights again in the backward."""
    if microbatches > 1:
        main, added = (our_variant(ours, recipe, "step", main_grads=main_grads) for main_grads in (False, True))
        use = Use(microbatches=microbatches, weight_cast="step")
        return Variants(main, {MAIN_GRAD: added}, use, f"{microbatches} microbatches ")
    others = {TWICE: our_variant(ours, recipe, "twice")} if twice else {}
    return Variants(our_variant(ours, recipe), others | {PER_STEP: our_variant(ours, recipe, "step")}, Use(), "")


def find_roofs(device: torch.device) -> Roofs | None:
    """Ceilings of this machine, measured now with the bandwidth of a copy, and its specification; None without a GPU
    that has tensor cores."""
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
    """Lower bounds of a layer (M, K, N) by the recipe and in bf16, by both ceilings, and the main ceilings."""
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
    """Backends of fprop, dgrad and wgrad.  products: their (M, N, K).  groups: number of experts, if grouped."""
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
    main: Variant,
    judge: Judge,
    gates: Sequence[float],
    kept: Mapping[str, Variant],
    how: str,
    take: Callable[[Variant, Batch], Results] = take,
) -> Callable[[Case, Args], Verdict]:
    """Check of the `main` variant.  gates: SQNR gates of the first outputs, one for each value of `judge`.  kept:
    variants whose saved bytes are reported."""

    def check(case: Case, args: Args) -> Verdict:
        batch: Batch = args[0]
        try:
            problems, found = _problems(main, judge, gates, batch, take)
            details = {f"{name}_db": db for name, db in zip(OUTPUTS, found, strict=False)}
            details |= {f"kept_bytes {name}": float(saved_bytes(variant, batch)) for name, variant in kept.items()}
        except Exception as error:  # an exception counts as a fault, and the suite continues
            return Verdict(0, how, failure(error))
        numbers = {name: value for name, value in details.items() if value == value}
        worst = min(found) if len(numbers) == len(details) else None
        return Verdict(0, how, "; ".join(text for text in problems if text), worst, numbers)

    return check


def _problems(
    main: Variant, judge: Judge, gates: Sequence[float], batch: Batch, take: Callable[[Variant, Batch], Results]
) -> tuple[list[str], tuple[float, ...]]:
    first = take(main, batch)
    copies = [tensor.clone() for tensor in _tensors(first)]
    # the allocator gives these blocks to the second run; 0xFF in every byte is a NaN
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


def memory_variants(main: Variant, others: Mapping[str, Variant]) -> dict[str, Variant]:
    """Variants whose saved bytes a row reports: ours, with every time of the weight cast, and bf16."""
    return {"blockscale": main, **others, "bf16": plain_variant()}
