"""The page of a comparison: one self-contained HTML file, made from the stored run records.

Its first sentence answers the question of its title. Verdicts follow, then curves, shares of a step's time,
quantization noise, and how to repeat it. Curves are drawn by matplotlib; without it the page says so.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .comparison import BASELINE, CONTROL, NULL, Comparison
from .report import answer, notes, speedups, table
from .rows import smooth

PRODUCTS = ("fprop", "dgrad", "wgrad")
NO_MATPLOTLIB = "Curves need matplotlib: pip install matplotlib, then run the command again; finished runs are read."


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
    size = (
        f"{base.about['parameters'] / 1e6:,.2f}M parameters, {config['steps']} steps of {tokens:,} tokens, "
        f"{len(found.seeds)} paired seed{'s' * (len(found.seeds) > 1)}, {base.where.get('name', '')}"
    )
    body = [
        f"<h1>{escape(title)}</h1><p class='answer'>{escape(answer(found))}</p>",
        f"<p>{escape(speedups(found))}</p><p class='note'>{escape(size)}</p>",
        _section("Verdicts", _verdicts(found)),
        _section("Curves", _curves(found), "Gaps are to bf16's loss; the strip is the noise of the null run."),
        _time(found) if found.is_on_gpu else "",
        _layers(found),
        _section("How to run it again", _facts(found)),
    ]
    meta = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{escape(title)}</title>"
    top = f"<!doctype html><html lang='en'><head>{meta}<style>{style}</style></head>"
    return f"{top}<body>{''.join(body)}</body></html>\n"


def _section(title: str, body: str, note: str = "") -> str:
    shown = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{shown}{body}</section>"


def _table(rows: Sequence[Mapping[str, str]], classes: Sequence[str] = ()) -> str:
    """Rows with the same columns; the second column is text.  classes: of the second cell of each row."""
    text = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in rows[0]) + "</tr>"]
    for place, row in enumerate(rows):
        kinds = {1: f" class='left {classes[place]}'"} if classes else {}
        cells = (f"<td{kinds.get(at, '')}>{escape(cell)}</td>" for at, cell in enumerate(row.values()))
        text.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class='scroll'><table>{''.join(text)}</table></div>"


def _verdicts(found: Comparison) -> str:
    verdicts = [found.verdict(arm) for arm in found.arms]
    below = "".join(f"<li>{escape(note)}</li>" for note in notes(found))
    return (
        f"{_table(table(found), ['' if each is None else each.tone for each in verdicts])}<ul class='note'>{below}</ul>"
    )


def _curves(found: Comparison) -> str:
    """Training loss, gap over steps and size of the final gaps, as an image inside the page."""
    try:
        import matplotlib
    except ImportError:
        return f"<p>{NO_MATPLOTLIB}</p>"
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "blockscale", "font.size": 9}):
        figure = Figure(figsize=(12.5, 4.2), layout="constrained")
        loss, gap, size = figure.subplots(1, 3)
        for place, arm in enumerate(found.arms):
            colour = "0.55" if arm.name == NULL else f"C{place}"
            for at, run in enumerate(found.runs[arm.name]):
                look = {"alpha": 0.35} if at else {"label": arm.name}
                loss.plot(*_split(smooth(sorted(run.losses.items()))), color=colour, linewidth=1.2, **look)
            final = found.gap(arm.name)
            if arm.name == BASELINE or not final.is_finite:
                continue
            if arm.name != CONTROL:  # its gap would flatten all other curves
                along = [(step, 100 * each) for step, each in found.along(arm.name)]
                gap.plot(*_split(along), color=colour, label=arm.name, marker=".")
            size.errorbar(100 * final.mean, arm.name, xerr=100 * (final.error or 0), color=colour, fmt="o", capsize=3)
            if arm.budget is not None:
                size.plot([100 * arm.budget], [arm.name], color=colour, marker="|", markersize=14)
        if found.noise == found.noise:
            gap.axhspan(-100 * found.noise, 100 * found.noise, color="0.9", zorder=0)
        size.set_xscale("symlog", linthresh=0.01)
        for axes, title in (
            (loss, "training loss, nats per symbol; further seeds are faint"),
            (gap, "gap on held-out text, %, mean of the seeds"),
            (size, "final gap with its 95 % interval, %; | is the budget"),
        ):
            axes.set_title(title, fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in (loss, gap):
            axes.set_xlabel("step")
            axes.legend(frameon=False, fontsize=8)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return f"<img alt='curves' src='data:image/svg+xml;base64,{base64.b64encode(svg.getvalue()).decode()}'>"


def _split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _time(found: Comparison) -> str:
    runs = {arm.name: found.runs[arm.name][0].shares for arm in found.arms}
    rows = [{"recipe": name} | {k: f"{v:.1%}" for k, v in shares.items()} for name, shares in runs.items() if shares]
    note = "Shares of one step under the profiler: GEMMs (products), casts of this library, attention, everything else."
    return _section("Where a step's time goes", _table(rows), note) if rows else ""


def _layers(found: Comparison) -> str:
    rows = [_noise(arm.name, layers) for arm in found.arms if (layers := found.runs[arm.name][0].layers)]
    note = "SQNR in dB on one batch of the trained model: median of the layers for each GEMM, and the lowest of all."
    return _section("Quantization noise of the layers", _table(rows), note) if rows else ""


def _noise(name: str, layers: Sequence[dict[str, Any]]) -> dict[str, str]:
    known = {product: [(each[product], each["layer"]) for each in layers if each[product]] for product in PRODUCTS}
    medians = {
        key: f"{statistics.median(value for value, _ in each):.1f}" if each else "" for key, each in known.items()
    }
    least = min(((*each, product) for product, pairs in known.items() for each in pairs), default=None)
    return {"recipe": name} | medians | {"least": f"{least[0]:.1f} dB, {least[2]} of {least[1]}" if least else ""}


def _facts(found: Comparison) -> str:
    base = found.runs[BASELINE][0]
    facts = {"seeds": ", ".join(map(str, found.seeds)), "text": base.about["data_hash"], **base.where}
    facts |= {arm.name: arm.says for arm in found.arms}
    items = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    config, title = escape(json.dumps(base.about["config"], indent=1)), f"config of bf16, seed {found.seeds[0]}"
    return f"<dl>{items}</dl><details><summary>{title}</summary><pre>{config}</pre></details>"
