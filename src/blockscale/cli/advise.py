"""`blockscale advise`: the layers of a run to keep in bf16 for a loss budget, and the cost in speed."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import check_name
from ..names import MACHINES
from . import arguments

if TYPE_CHECKING:
    from rich.console import Console

    from ..diagnostics.advice import Advice


def run(
    folder: Path,
    /,
    budget: float = 0.25,
    gradient_budget: float = 10.0,
    machine: str = "h200",
    tokens: int = 4096,
    top: int = 20,
    out: Path | None = None,
    json: bool = False,
    keep_unmeasured: bool = False,
) -> int:
    """Show which layers of a run to keep in bf16 so that the predicted loss gap and gradient noise stay within budgets,
    and what that costs in speed.

    Args:
        folder: Folder of a run with numerics.jsonl, from blockscale train --numerics-every.
        budget: Accepted loss gap in percent.
        gradient_budget: Accepted gradient noise in percent of the gradient's energy.
        machine: GPU to predict the speed for.
        tokens: Tokens per microbatch to predict the speed for.
        top: Layers shown; 0: all.
        out: File for the advice, for `blockscale train --keep-file` and `load_filter`.
        json: Print the advice as JSON.
        keep_unmeasured: Keep layers in bf16 that were not measured.
    """
    if not folder.exists():
        rule = "it is the folder of a run with numerics.jsonl"
        arguments.refuse(f"no folder {folder}", rule, "blockscale train 125m --folder out/125m --numerics-every 1000")
    for option, value, usual in (("--budget", budget, 0.25), ("--gradient-budget", gradient_budget, 10)):
        if not 0 < value < float("inf"):
            arguments.refuse(f"{option} {value:g}", "it is in percent, above zero", f"{option} {usual:g}")
    arguments.at_least(1, tokens, "--tokens", "a forward has at least one")
    arguments.at_least(0, top, "--top", "it is a number of layers, or 0 for all")
    check_name(machine, MACHINES, "machine")
    arguments.check_writable(out, "--out")
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..diagnostics import advise
        from ..diagnostics.store import read

    stored = read(folder)
    found = advise(
        stored.report,
        [stored.samples[step] for step in sorted(stored.samples)],
        budget=budget / 100,
        gradient_budget=gradient_budget / 100,
        keep_unmeasured=keep_unmeasured,
        tokens=tokens,
        machine=machine,
    )
    if out is not None:
        found.save(out)
    if json:
        print(json_module.dumps(found.to_dict(), indent=1))
        return 0
    _show(console, found, top)
    where = f"{machine.upper()}, {tokens} tokens"
    lines = [
        _before_after("predicted gap of the loss", found.gaps, budget),
        _before_after("gradient noise over energy", found.gradients, gradient_budget),
        f"linear layers: {found.speedups[1]:.2f}x bf16's speed as advised, {found.speedups[0]:.2f}x with all "
        f"quantized (roofline, {where})",
    ]
    if found.speedups[0] < 1:
        lines.append(f"[yellow]{found.recipe} is slower than bf16 by the roofline ({where})[/]")
    if found.unmeasured:
        lines.append(_unmeasured_line(found))
    if out is not None:
        lines.append(f"wrote {out}: blockscale train ... --keep-file {out}")
    console.print("\n".join(lines), highlight=False)
    return 0


def _show(console: Console, found: Advice, top: int) -> None:
    """Print the first `top` layers, or all for 0, and how many stay in bf16."""
    figures = ("loss gap %", "gradient noise %", "saves µs")
    table = arguments.table("", ("layer", *figures, "advice", "measured"), figures)
    shown = found.ranked[: top or None]
    for each in shown:
        advice = "[yellow]keep bf16[/]" if each.kept else "quantize"
        numbers = f"{100 * each.gap:.4f}", f"{100 * each.gradient:.3f}", f"{1e6 * each.wins:.1f}"
        table.add_row(each.layer, *numbers, advice, each.says)
    console.print(table)
    count = len(found.ranked)
    if count > len(shown):
        console.print(f"and {count - len(shown)} more layers (--top 0 shows all)", highlight=False)
    kept = (
        f"keep {len(found.keep)} of {count} layers in bf16"
        if found.keep
        else f"all {count} layers are within the budgets"
    )
    console.print(f"{found.recipe}: {kept}", highlight=False)


def _unmeasured_line(found: Advice) -> str:
    names = ", ".join(found.unmeasured[:4]) + (f" and {len(found.unmeasured) - 4} more" if found.unmeasured[4:] else "")
    what = f"not measured: {names} ({100 * found.unmeasured_share:.1f} % of the converted FLOPs)"
    if {*found.unmeasured} & {*found.low}:
        return f"[yellow]{what}; they stay quantized, and the figures exclude them (--keep-unmeasured)[/]"
    return f"{what}; kept in bf16"


def _before_after(what: str, values: tuple[float, float], budget: float) -> str:
    before, after = (f"{100 * value:.3f} %" for value in values)
    return f"{what}: {before}{'' if before == after else f', as advised {after}'} (budget {budget:g} %)"
