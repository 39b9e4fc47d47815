"""`blockscale roofline`: roofline times of a model's layers in bf16 and by recipe, and measured times beside them;
models of several GPUs (`roofline_ranks.py`), of overlapped communication (`roofline_overlap.py`) and of inference
(`roofline_inference.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import check_name
from ..names import LINKS, MACHINES
from . import arguments, roofline_inference, roofline_overlap, roofline_ranks
from .options import parse_words

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..autograd.recipe import Recipe
    from ..bench.rooflines import Layer, RoofRow, Roofs, Times
    from ..roofline import Use

What = Literal["linear", "mlp", "experts", "fsdp", "tp", "ep"]
# speedup from which a conversion is worth it
MARGIN = 1.1
DEFAULT_MACHINE, DEFAULT_LINK = "h200", "nvlink4"


def main(words: list[str]) -> int:
    """Parse the options, which are others for overlap and inference, and run it."""
    if words[:1] == ["overlap"]:
        return parse_words(roofline_overlap.run, "roofline overlap", words[1:])
    if words[:1] == ["inference"]:
        return parse_words(roofline_inference.run, "roofline inference", words[1:])
    return parse_words(run, "roofline", words)


def run(
    what: What = "linear",
    /,
    model: str | None = None,
    shapes: tuple[str, ...] = (),
    tokens: int = 4096,
    experts: int | None = None,
    recipes: tuple[str, ...] = ("fp8_blockwise", "mxfp8", "nvfp4"),
    machine: str | None = None,
    inference: bool = False,
    microbatches: int = 1,
    weight_cast: Literal["forward", "twice", "step"] | None = None,
    bias: bool = False,
    accumulate: bool = False,
    measure: bool = False,
    advise: bool = False,
    ranks: int | None = None,
    link: str | None = None,
) -> int:
    """Show the roofline time of each layer of a model in bf16 and by recipe: bytes and FLOPs of every cast and GEMM at
    the ceilings of the machine, the speedup that follows, and the step that takes longest.

    Args:
        what: linear: each layer by itself. mlp: the gated MLPs among them, with the activation fused into casts.
            experts: the gated MLPs of a mixture of experts, with the casts of all their weights. fsdp, tp, ep: a model
            of a training step on several GPUs, not measured: communication beside compute. overlap and inference have
            options of their own (blockscale roofline overlap --help): communication hidden behind a product; a
            decoding step and a prefill.
        model: A model by name, such as deepseek-v3 (the default) or llama3-8b.
        shapes: The layers instead of a model, each N,K: out and in features of a weight, separated by spaces or ;
        tokens: Tokens per forward.
        experts: Experts on this GPU, if the model is expert-parallel; with --shapes, their number.
        recipes: Recipes to compare with bf16, separated by spaces or commas.
        machine: A short name such as h200 or b200; by default the GPU of this machine, else h200.
        inference: Forward only, with weights cast beforehand.
        microbatches: Forwards per optimizer step; with more than one, weights are cast once per step.
        weight_cast: When to cast weights: in every forward, twice (again in the backward), or once per step.
        bias: Layers with a bias.
        accumulate: Accumulate weight gradients in fp32 buffers.
        measure: Also measure the ceilings of this GPU and every layer; needs a GPU.
        advise: Also show from how many tokens on each layer is worth converting.
        ranks: GPUs of fsdp, tp and ep; 8 by default.
        link: Link between them, nvlink4 by default, as in an H200; see docs/roofline.md.
    """
    names = [name for name in arguments.recipes(recipes) if name != "bf16"]
    arguments.at_least(1, tokens, "--tokens", "a forward has at least one")
    arguments.at_least(1, microbatches, "--microbatches", "a step has at least one")
    given = {"--weight-cast": weight_cast, "--microbatches": microbatches > 1, "--accumulate": accumulate}
    for flag in (flag for flag, is_given in given.items() if inference and is_given):
        rule = "inference casts no weights and has no gradients"
        arguments.refuse(f"{flag} with --inference", rule, f"leave {flag} or --inference out")
    if advise and not names:
        arguments.refuse("--advise with bf16 alone", "it advises on other recipes", "--recipes fp8_blockwise --advise")
    if machine is not None:
        check_name(machine, MACHINES, "machine")
    if link is not None:
        check_name(link, LINKS, "link")
    if what in roofline_ranks.PARALLEL:
        alone = {"--shapes": shapes, "--experts": experts, "--weight-cast": weight_cast, "--bias": bias}
        alone |= {"--inference": inference, "--microbatches": microbatches > 1, "--accumulate": accumulate}
        alone |= {"--measure": measure, "--advise": advise}
        for flag in (flag for flag, value in alone.items() if value):
            arguments.refuse(f"{flag} with {what}", "several GPUs are modelled by presets", f"leave {flag} out")
        count = 8 if ranks is None else ranks
        arguments.at_least(1, count, "--ranks", "a step runs on at least one GPU")
        console = arguments.wide_console()
        main = _roofs(console, machine, measure=False)[0].main
        return roofline_ranks.show(console, what, model, tokens, names, main, count, link or DEFAULT_LINK)
    for flag in (flag for flag, value in {"--ranks": ranks, "--link": link}.items() if value is not None):
        arguments.refuse(
            f"{flag} with {what}", "a layer by itself is on one GPU", f"blockscale roofline fsdp {flag} ..."
        )
    if what == "experts":
        subject = _mixture(model, shapes, tokens, experts)
    elif experts is None:
        subject = _layers(what, model, shapes, tokens)
    else:
        arguments.refuse(f"--experts with {what}", "only a mixture has experts", "blockscale roofline experts")
    if measure and what != "linear":
        arguments.refuse(f"--measure of {what}", "only linear layers can be measured", "blockscale roofline linear")
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..autograd.recipe import get_recipe
        from ..bench import rooflines
        from ..roofline import Use

    chosen = [get_recipe(name) for name in names]
    cast = weight_cast or ("step" if microbatches > 1 else "forward")
    use = Use(not inference, microbatches, cast, bias, accumulate=accumulate)
    roofs, device = _roofs(console, machine, measure=measure)
    times = {} if device is None else _timed(console, subject.layers, tokens, names, device, use)
    cost = rooflines.cost_of(what, subject.experts)
    rows = rooflines.rows_of(subject.layers, subject.rows, chosen, roofs, use, cost, times)
    console.print(f"{subject.name}, {tokens:,} tokens, {_use_text(use)}")
    for roof in filter(None, (roofs.main, roofs.nominal)):
        console.print(f"[dim]{roof} ({roof.source})[/]", soft_wrap=True)
    console.print(_table(rows))
    for note in rooflines.notes_of(chosen, roofs.main):
        console.print(f"[dim]{note}[/]")
    if advise:
        console.print(_advice(subject.layers, chosen, roofs, use, what))
    return 0


class _Subject(NamedTuple):
    """Subject of the table.  layers: (K, N) of each layer, or (features, hidden) of each gated MLP.  rows: rows of all
    experts together."""

    name: str
    layers: list[Layer]
    rows: int
    experts: int = 1


def _mixture(model: str | None, shapes: Sequence[str], tokens: int, experts: int | None) -> _Subject:
    """Experts of a model, or of given shapes; a token has one row for each of its experts."""
    from ..bench.shapes import MIXTURES, model_name

    if experts is not None:
        arguments.at_least(1, experts, "--experts", "a mixture has at least one")
    if shapes:
        if experts is None:
            fix = "--experts 8 --shapes 2048,7168"
            arguments.refuse("--shapes of experts without their number", "each expert has its own weights", fix)
        layers = [(k, n) for n, k in arguments.layers(model, shapes, "roofline experts")]
        return _Subject(f"given experts, {_each(experts, tokens)}", layers, tokens, experts)
    name = model_name(model or "deepseek-v3", MIXTURES, "model with experts")
    mixture = MIXTURES[name]
    count, rows = experts or mixture.experts, tokens * mixture.top_k
    title = f"{name}, {mixture.top_k} for each token of {_each(count, rows)}"
    return _Subject(title, [(mixture.features, mixture.hidden)], rows, count)


def _each(experts: int, rows: int) -> str:
    return f"{experts} experts with {rows / experts:,.0f} rows each"


def _layers(what: What, model: str | None, shapes: Sequence[str], tokens: int) -> _Subject:
    from ..bench.shapes import mlps, model_name

    model = "deepseek-v3" if model is None and not shapes else model
    pairs = [(k, n) for n, k in arguments.layers(model, shapes, f"roofline {what}")]
    found = pairs if what == "linear" else mlps(pairs)
    if not found:
        rule = "a gated MLP is a layer that widens and one that narrows back"
        arguments.refuse(
            f"{model or ' '.join(shapes)} without a gated MLP", rule, "blockscale roofline mlp --model llama3-8b"
        )
    return _Subject(model_name(model) if model is not None else "given layers", found, tokens)


def _use_text(use: Use) -> str:
    if not use.training:
        return "forward only, weights cast beforehand"
    when = {"forward": "in every forward", "twice": "in forward and backward", "step": "once a step"}[use.weight_cast]
    shared = f" of {use.microbatches} microbatches" if use.weight_cast == "step" else ""
    return f"forward and backward, weights cast {when}{shared}"


def _roofs(console: Console, machine: str | None, *, measure: bool) -> tuple[Roofs, torch.device | None]:
    """Ceilings of the machine, and the GPU to measure on (None without --measure)."""
    import torch

    from ..bench.rooflines import Roofs, find_roofs
    from ..hardware import gpu_name
    from ..roofline import ceilings

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    here = None if device is None else ceilings.machine_of(gpu_name(device))
    if not measure:
        named = machine or here or DEFAULT_MACHINE
        sheet, known = ceilings.nominal(named), ceilings.measured(named)
        return (Roofs(sheet) if known is None else Roofs(known, sheet)), None
    if device is not None and machine not in (None, here):
        fix = f"leave --machine out, or leave --measure out for {machine}"
        arguments.refuse(f"--measure with --machine {machine}", f"only this GPU can be measured: {here}", fix)
    with console.status("measuring the ceilings of this machine ..."):
        found = None if device is None else find_roofs(device)
    if found is None:
        rule = "ceilings and layers are measured on the GPU of this machine, of sm_80 or newer, and torch finds none"
        arguments.refuse("--measure without a GPU", rule, "run it there, or leave --measure out: the model needs none")
    return found, device


def _timed(
    console: Console, layers: Sequence[Layer], tokens: int, recipes: Sequence[str], device: torch.device, use: Use
) -> Times:
    """Measure every layer in bf16 and by every recipe."""
    from ..bench import rooflines

    found: Times = {}
    texts = [*(f"{k} -> {n}" for k, n in layers), ""]
    with arguments.progress(console, len(layers), texts[0]) as advance:
        timed = rooflines.time_layers(layers, tokens, recipes, device, use)
        for text, times in zip(texts[1:], timed, strict=True):
            found |= times
            advance(text)
    return found


def _table(rows: Sequence[RoofRow]) -> Table:
    seen, two = any(row.us is not None for row in rows), any(row.nominal is not None for row in rows)
    headings = ["bound µs", "speedup", *(["nominal"] if two else []), "casts"]
    headings += ["measured µs", "speedup", "of roof", *(["of nominal"] if two else [])] if seen else []
    table = arguments.table("", ("layer", "recipe", *headings, "longest step, bound by"), headings, padding=0)
    before = None
    for row in rows:
        if before not in (None, row.layer):
            table.add_section()
        first = "" if row.layer == before else f"{row.layer[0]} -> {row.layer[1]}"
        table.add_row(first, *_cells(row, seen=seen, two=two), style="dim" if row.recipe == "bf16" else None)
        before = row.layer
    return table


def _cells(row: RoofRow, *, seen: bool, two: bool) -> list[str]:
    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    def share(speedup: float | None) -> str:
        return "-" if row.measured is None or speedup is None else f"{row.measured / speedup:.0%}"

    cells = [row.recipe, f"{row.cost.seconds * 1e6:,.0f}", times(row.roof), *([times(row.nominal)] if two else [])]
    cells.append(f"{row.casting:.0%}")
    if seen:
        cells += ["-" if row.us is None else f"{row.us:,.0f}", times(row.measured), share(row.roof)]
        cells += [share(row.nominal)] if two else []
    most = row.cost.largest
    return [*cells, f"{most.name} {most.seconds / row.cost.seconds:.0%}, {most.bound}"]


def _advice(layers: Sequence[Layer], recipes: Sequence[Recipe], roofs: Roofs, use: Use, what: What) -> Table:
    from ..bench.rooflines import cost_of
    from ..roofline import advise

    # all costs of experts are proportional to their number
    per, cost = " per expert" if what == "experts" else "", cost_of(what)
    title = f"worth converting from this many tokens{per} (in parentheses: for a speedup above {MARGIN - 1:.0%})"
    table = arguments.table(title, ("layer", *(recipe.name for recipe in recipes)))

    def cell(layer: Layer, recipe: Recipe) -> str:
        found = [advise(*layer, recipe.formats(), roofs.main, use, margin=each, cost=cost) for each in (1.0, MARGIN)]
        first, second = ("never" if count is None else f"{count:,}" for count in found)
        return first if found[0] is None else f"{first} ({second})"

    for layer in layers:
        table.add_row(f"{layer[0]} -> {layer[1]}", *(cell(layer, recipe) for recipe in recipes))
    return table
