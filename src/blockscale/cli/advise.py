"""`blockscale advise`: the layers to keep in bf16 for a loss budget, and the cost in speed.

The first word is the folder of a run, whose numerics are read, or a preset, which is built and measured on one batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import check_name
from ..names import MACHINES
from ..train.config import RecipeConfig, RunConfig
from ..train.presets import PRESETS, get_preset
from . import arguments
from .options import parse_words
from .train import DEFAULT, RunOptions, check_run, hides

if TYPE_CHECKING:
    from ..diagnostics.advice import Advice


@dataclass(frozen=True)
class AdviceOptions:
    """Budgets, target machine and output of the advice."""

    budget: float = 0.25
    """Accepted loss gap in percent."""
    gradient_budget: float = 10.0
    """Accepted gradient noise in percent of the gradient's energy."""
    machine: str = "h200"
    """GPU to predict the speed for."""
    tokens: int = 4096
    """Tokens per microbatch to predict the speed for."""
    top: int = 20
    """Layers shown; 0: all."""
    out: Path | None = None
    """File for the advice, for `blockscale train --keep-file` and `load_filter`."""
    json: bool = False
    """Print the advice as JSON."""
    keep_unmeasured: bool = False
    """Keep layers in bf16 that were not measured."""


@dataclass(frozen=True)
@hides("since")
class AdvisedRecipe(RecipeConfig):
    """Precision of the linear layers, from the first step on; see docs/recipes.md."""


@dataclass(frozen=True)
@hides("optimizer steps log_every eval_every eval_batches save_every keep profile numerics_every tensorboard export")
class Options(RunOptions, AdviceOptions):
    """A preset with the options of `blockscale train`, and those of the advice. One batch is measured, so options for
    steps, learning rates, reports and checkpoints are hidden."""

    recipe: AdvisedRecipe = field(default_factory=AdvisedRecipe)


def main(words: list[str]) -> int:
    """Parse a folder or a preset, and print the advice."""
    words = list(words)
    name = words.pop(0) if words and not words[0].startswith("-") else DEFAULT
    about = f"First word: a folder of a run with numerics.jsonl, or a preset ({', '.join(PRESETS)})."
    folder = Path(name)
    if name not in PRESETS and not folder.exists() and len(folder.parts) > 1:
        rule = "the first word is a folder of a run with numerics.jsonl, or a preset"
        arguments.refuse(f"no folder {name}", rule, "blockscale train 125m --folder out/125m --numerics-every 1000")
    if name not in PRESETS and folder.exists():
        return run(parse_words(AdviceOptions(), f"advise {name}", words, about, PRESETS), folder)
    return run(parse_words(Options.of(get_preset(name)), f"advise {name}", words, about, PRESETS))


def run(wanted: AdviceOptions, folder: Path | None = None) -> int:
    """Read or measure the numerics, and print the advice."""
    _check(wanted)
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..diagnostics import advise
        from ..diagnostics.store import read

    if folder is not None:
        stored = read(folder)
        report, samples = stored.report, [stored.samples[step] for step in sorted(stored.samples)]
    else:
        assert isinstance(wanted, Options)
        report, samples = _measure(wanted.config)
    found = advise(
        report,
        samples,
        budget=wanted.budget / 100,
        gradient_budget=wanted.gradient_budget / 100,
        keep_unmeasured=wanted.keep_unmeasured,
        tokens=wanted.tokens,
        machine=wanted.machine,
    )
    if wanted.out is not None:
        found.save(wanted.out)
    if wanted.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        _show(console, found, wanted)
    return 0


def _check(wanted: AdviceOptions) -> None:
    for name in ("budget", "gradient_budget"):
        value = getattr(wanted, name)
        if not 0 < value < float("inf"):
            option = f"--{name.replace('_', '-')}"
            arguments.refuse(
                f"{option} {value:g}", "it is in percent, above zero", f"{option} {getattr(AdviceOptions, name):g}"
            )
    for name, least in (("tokens", 1), ("top", 0)):
        if getattr(wanted, name) < least:
            what, fix = (f"--{name} {getattr(each, name)}" for each in (wanted, AdviceOptions))
            arguments.refuse(what, f"it is {least} or more", fix)
    check_name(wanted.machine, MACHINES, "machine")
    arguments.check_writable(wanted.out, "--out")
    if isinstance(wanted, Options):
        check_run(wanted.config)
        if wanted.resume and wanted.folder is not None and not any(wanted.folder.glob("step-*/run.json")):
            rule = "with --resume the last checkpoint of a run is measured"
            fix = "name the folder of a run, or leave --resume out"
            arguments.refuse(f"no checkpoint in {wanted.folder}", rule, fix)


def _measure(config: RunConfig) -> tuple[Any, list[Any]]:
    """Report and one numerics sample of a preset's model, new or from its last checkpoint."""
    from ..train.checkpoint import latest, read_about
    from ..train.checks import check
    from ..train.loop import as_configured
    from ..train.numerics import sample_run
    from ..train.run import Run

    found = latest(config.folder) if config.resume and config.folder is not None else config.start
    if found is not None:  # the checkpoint may be from a longer run
        config = replace(config, steps=max(config.steps, read_about(found)["step"] + 1))
    check(config)
    with as_configured(config):
        run = Run(config)
        return run.report, [sample_run(run).read()]


def _show(console: Any, found: Advice, wanted: AdviceOptions) -> None:
    figures = ("loss gap %", "gradient noise %", "saves µs")
    table = arguments.table("", ("layer", *figures, "advice", "measured"), figures)
    shown = found.ranked[: wanted.top or None]
    for each in shown:
        advice = "[yellow]keep bf16[/]" if each.kept else "quantize"
        numbers = f"{100 * each.gap:.4f}", f"{100 * each.gradient:.3f}", f"{1e6 * each.wins:.1f}"
        table.add_row(each.layer, *numbers, advice, each.says)
    console.print(table)
    rest = len(found.ranked) - len(shown)
    lines = [f"and {rest} more layers (--top 0 shows all)"] if rest else []
    lines += [
        f"{found.recipe}: keep {len(found.keep)} of {len(found.ranked)} layers in bf16"
        if found.keep
        else f"{found.recipe}: all {len(found.ranked)} layers are within the budgets",
        _before_after("predicted gap of the loss", found.gaps, wanted.budget),
        _before_after("gradient noise over energy", found.gradients, wanted.gradient_budget),
        f"linear layers: {found.speedups[1]:.2f}x bf16's speed as advised, {found.speedups[0]:.2f}x with all "
        f"quantized (roofline, {wanted.machine.upper()}, {wanted.tokens} tokens)",
    ]
    if found.speedups[0] < 1:
        where = f"{wanted.machine.upper()} with {wanted.tokens} tokens"
        lines.append(f"[yellow]{found.recipe} is slower than bf16 on {where}, by the roofline[/]")
    if found.unmeasured:
        lines.append(_unmeasured_line(found))
    if wanted.out is not None:
        lines.append(f"wrote {wanted.out}: blockscale train ... --keep-file {wanted.out}")
    for line in lines:
        console.print(line, highlight=False)


def _unmeasured_line(found: Advice) -> str:
    names = ", ".join(found.unmeasured[:4]) + (f" and {len(found.unmeasured) - 4} more" if found.unmeasured[4:] else "")
    what = f"not measured: {names} ({100 * found.unmeasured_share:.1f} % of the converted FLOPs)"
    if {*found.unmeasured} & {*found.low}:
        return f"[yellow]{what}; they stay quantized, and the figures exclude them (--keep-unmeasured)[/]"
    return f"{what}; kept in bf16"


def _before_after(what: str, values: tuple[float, float], budget: float) -> str:
    before, after = (f"{100 * value:.3f} %" for value in values)
    return f"{what}: {before}{'' if before == after else f', as advised {after}'} (budget {budget:g} %)"
