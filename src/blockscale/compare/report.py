"""Report of a comparison: one self-contained HTML file, made from the stored run records.

The first sentence answers the question of its title. Verdicts follow, then the sizes of the gaps, curves, shares of a
step's time, quantization noise per layer, and the command to repeat it. Terminal and page share the figures of `table`.
The null run is bf16 with another reduction order.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..train.breakdown import KINDS
from .answer import (
    CPU_SPEED,
    NOT_TIMED,
    answer,
    control_result,
    duration,
    is_short,
    limits,
    longer_command,
    share,
    speedups,
)
from .charts import Interval, Line, bars, interval_chart, lines
from .comparison import BASELINE, CONTROL, NULL, Arm, Comparison
from .statistics import resolves
from .stored import Stored

PRODUCTS = ("fprop", "dgrad", "wgrad")
_OPTION = re.compile(r"--[a-z][\w.-]*(?: [\w.,@]+)?")
_DECIBELS = ("x", "w", "dy", *PRODUCTS)


def head(found: Comparison) -> list[str]:
    """Names of the columns. Memory is shown on a GPU only, speed only if each run had the GPU to itself."""
    speed = ["tokens/s", "speedup"] if _is_timed(found) else []
    return ["recipe", "verdict", "gap to bf16", "final loss", *speed, *(["peak memory"] if found.is_on_gpu else [])]


def _is_timed(found: Comparison) -> bool:
    return found.is_on_gpu and found.is_timed


def table(found: Comparison) -> list[list[str]]:
    """One row for each arm, with the columns of `head`."""
    return [_row(found, arm) for arm in found.arms]


def _row(found: Comparison, arm: Arm) -> list[str]:
    runs = found.runs[arm.name]
    loss = sum(run.loss for run in runs) / len(runs)
    cells = [
        arm.name,
        _verdict_cell(found, arm),
        "" if arm.name == BASELINE else str(found.gap(arm.name)),
        f"{loss:.4f}",
    ]
    if _is_timed(found):
        speed, base = found.tokens_per_second(arm.name), found.tokens_per_second(BASELINE)
        cells += [f"{speed:,.0f}", f"{speed / base:.2f}x" if arm.is_recipe and base else ""]
    if found.is_on_gpu:
        memory = [run.end["peak_memory"] for run in runs if run.end.get("peak_memory") is not None]
        cells.append(f"{max(memory) / 2**30:.2f} GiB" if memory else "")
    return cells


def _verdict_cell(found: Comparison, arm: Arm) -> str:
    """Verdict with the share of converted FLOPs."""
    verdict = found.verdict(arm)
    if verdict is None:
        return ""
    budget = f" {arm.budget:.2%}" if verdict.kind == "within budget" else ""
    return f"{verdict.kind}{budget} ({share(found, arm)} converted)"


def notes(found: Comparison) -> list[str]:
    """Sentences below the table that explain it."""
    null = next(arm for arm in found.arms if arm.name == NULL)
    many, noise = len(found.seeds), found.noise
    sentences = [
        f"null: {null.says}; run-to-run noise up to {100 * noise:.2g} %.",
        "converted: share of linear FLOPs in low precision; the rest runs in bf16.",
    ]
    if found.branch_at:
        sentences.append(
            f"All runs of a seed share bf16's run up to step {found.branch_at}; the first gap of a recipe is the "
            "effect of its forward on weights that bf16 trained."
        )
    if found.since:
        sentences.append(f"Recipes are in low precision from step {found.since} on, and bf16 before.")
    if many == 1:
        sentences.append(
            "One seed: gaps have no confidence interval. Its half width is taken as three times the null run's "
            "largest gap in the second half of the run, or as the drift of the recipe's own gap there if that is "
            "larger. Two or more seeds give an interval."
        )
    else:
        sentences.append(f"± is the 95 % confidence interval of the mean of {many} paired seeds (Student's t).")
    tight = [arm.name for arm in found.arms if arm.is_recipe and arm.budget and not resolves(noise, arm.budget)]
    if tight:
        sentences.append(f"The noise is above a third of the budget of {', '.join(tight)}: that verdict is unreliable.")
    for arm in found.arms:
        verdict = found.verdict(arm) if arm.is_recipe else None
        if verdict is not None and verdict.kind != "too short to tell":  # `answer` explains that one
            sentences.append(f"{arm.name}: {verdict.kind}; {verdict.why}.")
        sentences += [f"{arm.name}, seed {seed}: {run.failed}" for seed, run in _runs(found, arm) if run.failed]
    if found.is_on_gpu and not found.is_timed:
        sentences.append(NOT_TIMED)
    return [*sentences, *filter(None, [control_result(found)])]


def summary(found: Comparison) -> list[str]:
    """Lines of the terminal below the table: the answer, the notes, and a longer command if it was too short."""
    speed = [] if found.is_on_gpu else [CPU_SPEED]
    longer = [f"For an answer{duration(found)}: {longer_command(found)}"] if is_short(found) else []
    return [answer(found), *notes(found), *speed, *longer]


def _runs(found: Comparison, arm: Arm) -> Sequence[tuple[int, Stored]]:
    return list(zip(found.seeds, found.runs[arm.name], strict=True))


def write(found: Comparison, path: Path) -> Path:
    """Write the page atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(page(found))
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def page(found: Comparison) -> str:
    """The page as HTML."""
    base = found.runs[BASELINE][0]
    config = base.about["config"]
    title = f"{config['name']}: does it still converge, and what is gained?"
    style = Path(__file__).with_name("page.css").read_text()
    tokens = config["batch"] * config["accumulate"] * config["data"]["sequence"]
    together = f"bf16 up to step {found.branch_at}, " if found.branch_at else ""
    size = (
        f"{base.about['parameters'] / 1e6:,.2f}M parameters, {config['steps']} steps of {tokens:,} tokens, "
        f"{together}{len(found.seeds)} paired seed{'s' if len(found.seeds) > 1 else ''}, {base.where.get('name', '')}"
    )
    body = [
        f"<h1>{escape(title)}</h1><p class='answer'>{_text(answer(found))}</p>",
        f"<p>{_text(speedups(found))}</p><p class='note'>{escape(size)}</p>",
        _section("Verdicts", _verdicts(found)),
        _limits(found) if is_short(found) else "",
        _sizes(found),
        f"<div class='pair'>{_curves(found)}</div>",
        _time(found) if found.is_on_gpu else "",
        _layers(found),
        _section("How to run it again", _facts(found)),
    ]
    meta = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
    return (
        f"<!doctype html><html lang='en'><head>{meta}<style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _text(sentence: str) -> str:
    """Escaped text with each command-line option in a <code> element."""
    return _OPTION.sub(r"<code>\g<0></code>", escape(sentence))


def _section(title: str, body: str, note: str = "") -> str:
    shown = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{shown}{body}</section>"


def _verdicts(found: Comparison) -> str:
    rows: list[str] = []
    for arm, cells in zip(found.arms, table(found), strict=True):
        verdict = found.verdict(arm)
        kind = "" if verdict is None else verdict.tone
        name, text, *figures = map(escape, cells)
        row = f"<td>{name}</td><td class='left {kind}'>{text}</td>"
        rows.append(row + "".join(f"<td>{each}</td>" for each in figures))
    below = "".join(f"<li>{escape(note)}</li>" for note in notes(found))
    return f"{_table(head(found), rows, left=('verdict',))}<ul class='note'>{below}</ul>"


def _limits(found: Comparison) -> str:
    items = "".join(f"<li>{_text(each)}</li>" for each in limits(found))
    command = f"<p>For an answer{duration(found)}:</p><p class='command'>{_text(longer_command(found))}</p>"
    return _section("What this run can and cannot show", f"<ul>{items}</ul>{command}")


def _sizes(found: Comparison) -> str:
    rows: list[Interval] = []
    for place, arm in enumerate(found.arms):
        gap, budget = found.gap(arm.name), None if arm.budget is None else 100 * arm.budget
        if arm.name != BASELINE and gap.is_finite:
            rows.append(Interval(arm.name, 100 * gap.mean, 100 * (gap.error or 0.0), place, budget))
    note = "Absolute gap to bf16's final loss with its 95 % interval; logarithmic. The mark is the budget."
    return _section("How large the gaps are", interval_chart(rows), note)


def _table(names: Sequence[str], rows: Sequence[str], left: Sequence[str] = ()) -> str:
    top = "".join(f"<th class='{'left' * (each in left)}'>{escape(each)}</th>" for each in names)
    return f"<div class='scroll'><table><tr>{top}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table></div>"


def _curves(found: Comparison) -> str:
    training: list[Line] = []
    gaps: list[Line] = []
    for place, arm in enumerate(found.arms):
        runs = found.runs[arm.name]
        training += [
            Line(arm.name, smooth(sorted(run.losses.items())), place, faint=at > 0) for at, run in enumerate(runs)
        ]
        # the control's gap would flatten all other curves
        if arm.name not in (BASELINE, CONTROL) and all(not run.failed for run in runs):
            along = [(float(step), 100 * gap) for step, gap in found.along(arm.name)]
            gaps.append(Line(arm.name, along, place, dashed=arm.name == NULL))
    return _section(
        "Training loss", lines(training, "training loss"), "Nats per symbol, smoothed; further seeds are faint."
    ) + _section(
        "Gap to bf16 over time",
        lines(gaps, "gap to bf16", unit=" %", band=100 * found.noise, late=1 / 3),
        "On held-out text, mean of the seeds; the strip is the null run's noise at the end. The axis is scaled to the "
        "last two thirds of the run.",
    )


def smooth(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Running mean over a fortieth of the run, thinned to at most some 400 points."""
    reach = max(1, len(points) // 40)
    means: list[tuple[float, float]] = []
    for at in range(len(points)):
        near = [y for _, y in points[max(0, at - reach + 1) : at + 1]]
        means.append((float(points[at][0]), sum(near) / len(near)))
    return means[:: max(1, len(means) // 400)]


def _time(found: Comparison) -> str:
    rows = [(arm.name, found.runs[arm.name][0].shares) for arm in found.arms if found.runs[arm.name][0].shares]
    note = "Shares of one step under the profiler: GEMMs (products), casts of this library, attention, everything else."
    return _section("Where a step's time goes", bars(rows, KINDS), note)


def _layers(found: Comparison) -> str:
    arms = {arm.name: layers for arm in found.arms if (layers := found.runs[arm.name][0].layers)}
    if not arms:
        return ""
    note = (
        "Signal to quantization noise ratio in dB on one batch of the trained model; half the error is 6 dB more. The "
        "median of the layers for each of the three GEMMs, and the lowest of all."
    )
    rows = [
        f"<td>{escape(name)}</td>" + "".join(f"<td>{each}</td>" for each in _medians(layers)) + _least(layers)
        for name, layers in arms.items()
    ]
    table = _table(("recipe", *PRODUCTS, "least"), rows, left=("least",))
    return _section(
        "Quantization noise of each layer", table + "".join(_all_layers(*each) for each in arms.items()), note
    )


def _medians(layers: Sequence[dict[str, Any]]) -> list[str]:
    known = [[each[product] for each in layers if each[product] is not None] for product in PRODUCTS]
    return [f"{statistics.median(each):.1f}" if each else "" for each in known]


def _least(layers: Sequence[dict[str, Any]]) -> str:
    found = [(each[product], each["layer"], product) for each in layers for product in PRODUCTS if each[product]]
    lowest = min(found, default=None)
    return f"<td class='left'>{f'{lowest[0]:.1f} dB, {lowest[2]} of {escape(lowest[1])}' if lowest else ''}</td>"


def _all_layers(name: str, layers: Sequence[dict[str, Any]]) -> str:
    names = ("layer", *_DECIBELS, "clipped", "underflow")
    rows = [f"<td>{escape(each['layer'])}</td>" + "".join(_cells(each)) for each in layers]
    title = f"<summary>{escape(name)}: operands and GEMMs of {len(rows)} layers, in dB</summary>"
    note = "<p class='note'>Clipped, underflow: the largest share among the layer's operands.</p>"
    return f"<details>{title}{_table(names, rows)}{note}</details>"


def _cells(layer: dict[str, Any]) -> list[str]:
    decibels = [
        "" if (value := layer[key]) is None or not math.isfinite(value) else f"{value:.1f}" for key in _DECIBELS
    ]
    return [f"<td>{each}</td>" for each in (*decibels, f"{layer['clipped']:.2%}", f"{layer['underflow']:.2%}")]


def _facts(found: Comparison) -> str:
    base = found.runs[BASELINE][0]
    recipes = ",".join(arm.name for arm in found.arms if arm.name not in (NULL, CONTROL))
    facts = {
        "recipes": recipes,
        "seeds": ", ".join(map(str, found.seeds)),
        "text": base.about["data_hash"],
        **base.where,
    }
    items = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    arms = "".join(f"<dt>{escape(arm.name)}</dt><dd>{escape(arm.says)}</dd>" for arm in found.arms)
    config = escape(json.dumps(base.about["config"], indent=1))
    summary = f"<summary>config of bf16, seed {found.seeds[0]}</summary>"
    return f"<dl>{items}</dl><dl>{arms}</dl><details>{summary}<pre>{config}</pre></details>"
