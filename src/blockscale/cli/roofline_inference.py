"""`blockscale roofline inference`: least time of a decoding step and of a prefill, by the format of the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..errors import check_name
from ..names import FORMAT_NAMES, MACHINES, check_pair
from . import arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ..roofline import Ceilings, LinearCost
    from ..roofline.inference import ServedModel, Serving

BF16, STORED = "bf16", "stored"
# what checkpoints of these weights cast activations to; others are weight-only
STORED_ACTIVATIONS = {"fp8_128x128": "fp8_1x128"}
_HEAD = ("weights @ activations", "batch", "GB read", "µs", "tokens/s", "each", "over bf16", "longest part, bound by")
_PREFILL = ("weights @ activations", "prompts", "ms", "tokens/s", "over bf16", "longest part, bound by")


def run(
    model: str = "llama3-8b",
    weights: tuple[str, ...] = ("mxfp4", "mxfp8_e4m3", "fp8_128x128"),
    activations: str = STORED,
    batch: tuple[int, ...] = (1, 16, 64),
    context: int = 1024,
    prompt: int | None = None,
    machine: str = "h200",
    roof: Literal["measured", "nominal"] = "measured",
) -> int:
    """Show the least time of a decoding step by the format of the weights: bytes of weights, touched experts and cache
    over the bandwidth, FLOPs over the rate of the tensor cores, and the batch up to which memory is the bound. A model,
    not measured: launches, norms, routers and the host are left out.

    Args:
        model: llama3-8b, llama3-70b, qwen3-8b, qwen3-32b, qwen3-30b, gpt-oss-20b, gpt-oss-120b or deepseek-v3.
        weights: Formats of the weights beside bf16, separated by spaces or commas. Head and cache stay in bf16.
        activations: stored: FP8 blockwise weights multiply FP8 activations, others are weight-only. bf16: all are
            weight-only. A format: inputs of products are cast to it.
        batch: Requests that are decoded together.
        context: Tokens of each request in the cache.
        prompt: Also show a prefill of this many tokens for each request.
        machine: A short name such as h200 or b200.
        roof: measured: rates of plain kernels on such a machine, where it was measured. nominal: its specification.
    """
    arguments.at_least(0, context, "--context", "a cache has tokens, or none")
    if prompt is not None:
        arguments.at_least(1, prompt, "--prompt", "a prefill has at least one token")
    batches = arguments.numbers(batch, "--batch")
    check_name(machine, MACHINES, "machine")
    names = [name for name in dict.fromkeys(weights) if name != BF16]
    for name in names:
        check_name(name, FORMAT_NAMES, "format")
    if activations not in (STORED, BF16):
        check_name(activations, FORMAT_NAMES, "format")
        if not names:
            rule = "a product with bf16 weights multiplies bf16"
            arguments.refuse(f"--activations {activations} with bf16 weights alone", rule, "name a format in --weights")
        for name in names:
            check_pair(activations, name)
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..bench.shapes import model_name
        from ..roofline import ceilings
        from ..roofline.inference import SERVED_MODELS, Serving, turning_batch

    full = model_name(model, SERVED_MODELS, "model")
    sizes, known = SERVED_MODELS[full], ceilings.measured(machine)
    roofs = ceilings.nominal(machine) if known is None or roof == "nominal" else known
    served = [Serving(), *(Serving(name, _activations(name, activations)) for name in names)]
    console.print(f"{full}, {sizes.parameters / 1e9:,.1f} billion parameters, {context:,} tokens of context: a model")
    console.print(f"[dim]{roofs} ({roofs.source})[/]", soft_wrap=True)
    console.print(_decoding(sizes, served, batches, context, roofs))
    if prompt is not None:
        console.print(_prefills(sizes, served, batches, prompt, roofs))
    turns = ", ".join(f"{_text(each)} {turning_batch(each, roofs):,.0f}" for each in served)
    console.print(f"rows up to which memory bounds a product: {turns}", soft_wrap=True)
    return 0


def _activations(weights: str, activations: str) -> str | None:
    """Format of the activations beside such weights; None: bf16."""
    if activations == STORED:
        return STORED_ACTIVATIONS.get(weights)
    return None if activations == BF16 else activations


def _decoding(
    sizes: ServedModel, served: Sequence[Serving], batches: Sequence[int], context: int, roofs: Ceilings
) -> Table:
    """Table of decoding steps: for each batch, bf16 and then the formats."""
    from ..roofline.inference import decode_cost

    table = arguments.table("a decoding step", _HEAD, _HEAD[1:-1], padding=0)
    for batch in batches:
        table.add_section()
        costs = [decode_cost(sizes, replace(each, batch=batch, context=context), roofs) for each in served]
        for each, cost in zip(served, costs, strict=True):
            rate = batch / cost.seconds
            cells = f"{batch:,}", f"{cost.bytes / 1e9:,.2f}", f"{cost.seconds * 1e6:,.0f}", f"{rate:,.0f}"
            over = f"{costs[0].seconds / cost.seconds:.2f}x"
            table.add_row(_text(each), *cells, f"{rate / batch:,.0f}", over, _longest(cost))
    return table


def _prefills(
    sizes: ServedModel, served: Sequence[Serving], batches: Sequence[int], prompt: int, roofs: Ceilings
) -> Table:
    """Table of prefills into an empty cache."""
    from ..roofline.inference import prefill_cost

    table = arguments.table(f"a prefill of {prompt:,} tokens into an empty cache", _PREFILL, _PREFILL[1:-1], padding=0)
    for batch in batches:
        table.add_section()
        costs = [prefill_cost(sizes, replace(each, batch=batch, context=0), prompt, roofs) for each in served]
        for each, cost in zip(served, costs, strict=True):
            cells = f"{batch:,}", f"{cost.seconds * 1e3:,.1f}", f"{batch * prompt / cost.seconds:,.0f}"
            table.add_row(_text(each), *cells, f"{costs[0].seconds / cost.seconds:.2f}x", _longest(cost))
    return table


def _text(serving: Serving) -> str:
    return f"{serving.weights or BF16} @ {serving.activations or BF16}"


def _longest(cost: LinearCost) -> str:
    most = cost.largest
    return f"{most.name} {most.seconds / cost.seconds:.0%}, {most.bound}"
