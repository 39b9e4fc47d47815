"""Measured ceilings of this machine, and layers beside the roofline: least times, predicted and measured speedups.

A GEMM takes at least the longer of its memory time and its compute time. Both rates are measured at the start of a
benchmark: data sheets give clocks that no machine sustains.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..autograd.recipe import Recipe, get_recipe
from ..hardware import capability, gpu_name
from ..roofline import (
    BF16,
    NOMINAL,
    Ceilings,
    CostOf,
    LinearCost,
    Use,
    architecture_of,
    engine_for,
    linear_cost,
    machine_of,
    speedup,
    swiglu_cost,
)
from ..roofline.ceilings import Architecture
from .gemms import make_operands, plain, rowwise
from .harness import random
from .layers import Batch, cast_weights, infer, make_batch, normal_linear, our_linear, our_variant, plain_variant, step
from .shapes import MAIN, SQUARE, TINY, TINY_PRODUCT, numel
from .timing import Call, Slice, input_sets, measure, prepare

Layer = tuple[int, int]  # (K, N)
# (layer, tokens, recipe) -> µs
Times = dict[tuple[Layer, int, str], float]
BASELINE = "bf16"


# ---- ceilings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roofs:
    """Ceilings of a machine.  main: measured if available, else the specification.  nominal: the specification; None if
    it is main or unknown."""

    main: Ceilings
    nominal: Ceilings | None = None


def find_roofs(device: torch.device) -> Roofs | None:
    """Ceilings of this machine, measured now with the bandwidth of a copy, and its specification; None without a GPU
    that has tensor cores."""
    if device.type != "cuda" or architecture_of(capability(device).sm) is None:
        return None
    main = measure_ceilings(device, rounds=11, seconds=0.02, by_copy=True)
    return Roofs(main, NOMINAL.get(machine_of(gpu_name(device)) or ""))


def measure_ceilings(
    device: torch.device, *, rounds: int = 5, seconds: float = 0.004, by_copy: bool = False
) -> Ceilings:
    """Memory bandwidth by a copy or a sum, FLOP/s by the vendor's GEMMs, timed in turns; less than a second on a GPU.

    by_copy: the bandwidth of a copy, which reads and writes equal parts, even if a sum is faster. On a CPU tensors are
    tiny, and its one rate stands for bf16.
    """
    shape, product = (MAIN, SQUARE) if device.type == "cuda" else (TINY, TINY_PRODUCT)
    source = random(shape, device)
    target = torch.empty_like(source)
    operands = make_operands(product, ("fp8_1x128", "fp8_128x128"), device, accumulate=False)

    def ready(call: Callable[[], object]) -> Slice:
        return prepare([call], device, seconds=seconds)

    # larger than L2, so that one input set is enough
    slices = {"copy": ready(lambda: target.copy_(source)), "sum": ready(lambda: source.sum(dtype=torch.float32))}
    slices["bf16"] = ready(lambda: plain(operands))
    with contextlib.suppress(RuntimeError, NotImplementedError):  # no FP8 tensor cores, or no such GEMM in this torch
        slices["fp8"] = ready(lambda: rowwise(operands, fast=True))
    us = {name: timing.us for name, timing in measure(slices, rounds=rounds).items()}
    copied, summed = 2 * 2 * numel(shape) / us["copy"] * 1e6, 2 * numel(shape) / us["sum"] * 1e6
    rates = {name: 2 * numel(product) / us[name] * 1e6 for name in ("bf16", "fp8") if name in us}
    name = gpu_name(device) if device.type == "cuda" else "CPU"
    architecture = architecture_of(capability(device).sm) or "ampere"
    return as_ceilings(name, architecture, copied if by_copy else max(copied, summed), rates)


def as_ceilings(gpu: str, architecture: Architecture, bandwidth: float, rates: Mapping[str, float]) -> Ceilings:
    """Measured ceilings from bytes/s and FLOP/s. FP4 is not measured: its rate is FP8's times the ratio of the two in
    the specification.

    >>> as_ceilings("NVIDIA B200", "blackwell", 7e12, {"bf16": 1.8e15, "fp8": 3.6e15}).fp4
    7200000000000000.0
    """
    sheet, fp8, fp4 = NOMINAL.get(machine_of(gpu) or ""), rates.get("fp8"), None
    source = "measured here: copy or sum, and the vendor's products at 8192^3"
    if sheet is not None and sheet.fp4 is not None and sheet.fp8 is not None and fp8 is not None:
        fp4, source = fp8 * sheet.fp4 / sheet.fp8, f"{source}; fp4 from fp8 by the specification"
    return Ceilings(gpu, architecture, bandwidth, rates["bf16"], fp8, fp4, source, measured=True)


def bound_us(ceilings: Ceilings, flops: int, moved: int, units: str) -> float:
    """Least time in µs: the longer of compute time on those units (bf16's if they do not exist) and memory time.

    >>> bound_us(Ceilings("", "ampere", 4e12, 7e14, None, None, ""), 1_400_000_000, 4_000_000, "fp8")
    2.0
    """
    rate: float = getattr(ceilings, units) or ceilings.bf16
    return 1e6 * max(flops / rate, moved / ceilings.bandwidth)


# ---- measured layers -------------------------------------------------------------------------------------------------


def time_layers(
    layers: Sequence[Layer],
    tokens: int,
    recipes: Sequence[str],
    device: torch.device,
    use: Use,
    *,
    rounds: int = 11,
    seconds: float = 0.03,
) -> Iterator[Times]:
    """For each layer the times of bf16 and of every recipe, timed in turns in CUDA graphs: the roofline has no launch
    overhead. If a weight is cast once a step, a call is the cast and all microbatches with accumulated gradients, in
    bf16 too, and the time is of one microbatch."""
    parts = use.microbatches if use.training and use.weight_cast == "step" else 1
    for layer in layers:
        k, n = layer
        first = make_batch(normal_linear(k, n, device, bias=use.bias), tokens, layer, device)
        count = input_sets(2 * (tokens * k + n * k + tokens * n), device)
        sets = [first, *(first.another() for _ in range(count - 1))]

        def calls(name: str, sets: Sequence[Batch] = sets) -> list[Call]:
            weight_cast = use.weight_cast if use.training else "step"
            variant = plain_variant() if name == BASELINE else our_variant(our_linear, get_recipe(name), weight_cast)
            if use.training:
                return [functools.partial(step, variant, parts, one) for one in sets]
            cast_weights(variant, sets[0])
            return [functools.partial(infer, variant, one) for one in sets]

        names = dict.fromkeys((BASELINE, *recipes))
        found = measure({name: prepare(calls(name), device, seconds=seconds) for name in names}, rounds=rounds)
        yield {(layer, tokens, name): timing.us / parts for name, timing in found.items()}


# ---- rows of the table -----------------------------------------------------------------------------------------------


def cost_of(what: str, experts: int = 1) -> CostOf:
    """Cost function of a linear layer, of an MLP, or of experts; tokens of experts are the rows of all of them."""
    return linear_cost if what == "linear" else functools.partial(swiglu_cost, experts=experts)


@dataclass(frozen=True)
class RoofRow:
    """One layer and recipe.  cost: by the main ceilings.  roof, nominal: predicted speedups.  us, measured: measured
    time and speedup."""

    layer: Layer
    recipe: str
    cost: LinearCost
    roof: float
    nominal: float | None
    us: float | None
    measured: float | None

    @property
    def casting(self) -> float:
        """Share of the predicted time in steps without FLOPs, such as casts."""
        return sum(step.seconds for step in self.cost.steps if not step.flops) / self.cost.seconds


def rows_of(
    layers: Sequence[Layer],
    tokens: int,
    recipes: Sequence[Recipe],
    roofs: Roofs,
    use: Use,
    cost: CostOf = linear_cost,
    times: Times | None = None,
) -> list[RoofRow]:
    """Rows of each layer: bf16 first, then the recipes."""

    def row(layer: Layer, recipe: Recipe) -> RoofRow:
        def predicted(roof: Ceilings) -> float:
            low, high = (cost(tokens, *layer, formats, roof, use) for formats in (recipe.formats(), BF16))
            return speedup(low, high)

        us, baseline = ((times or {}).get((layer, tokens, name)) for name in (recipe.name, BASELINE))
        return RoofRow(
            layer,
            recipe.name,
            cost(tokens, *layer, recipe.formats(), roofs.main, use),
            predicted(roofs.main),
            None if roofs.nominal is None else predicted(roofs.nominal),
            us,
            None if us is None or baseline is None else baseline / us,
        )

    return [row(layer, recipe) for layer in layers for recipe in (get_recipe(BASELINE), *recipes)]


def notes_of(recipes: Iterable[Recipe], ceilings: Ceilings) -> list[str]:
    """Notes on GEMMs of a recipe that this architecture does not run on matching tensor cores."""
    pairs = {"fprop": ("fprop_x", "fprop_w"), "dgrad": ("dgrad_dy", "dgrad_w"), "wgrad": ("wgrad_dy", "wgrad_x")}
    found: list[str] = []
    for recipe in recipes:
        formats = recipe.formats()
        said: dict[str, list[str]] = {}
        for product, (a, b) in pairs.items():
            note = engine_for(ceilings.architecture, formats[a], formats[b]).note
            if note:
                said.setdefault(note, []).append(product)
        for note, products in said.items():
            which = "" if len(products) == len(pairs) else f" {' and '.join(products)}"
            found.append(f"{recipe.name}{which} on {ceilings.architecture.capitalize()}: {note}")
    return found
