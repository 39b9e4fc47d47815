"""Pages with tables of stored rows. The same rows give the same bytes: no clock, no machine, no order of arrival.

A generated section stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; `update` rewrites all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from blockscale.bench.shapes import MODELS
from blockscale.bench.store import Row, read
from blockscale.bench.trainings import Training

from . import (
    casts,
    gemm,
    headline,
    index,
    layers,
    moe,
    overlap,
    overlap_models,
    speed,
    training,
)
from .tables import label

RESULTS = Path("benchmarks/results")
SUITES = ("casts", "gemm", "linear", "mlp", "moe", "dispatch", overlap.SUITE)
PAGES = (
    Path("README.md"),
    Path("docs/overlap.md"),
    *(Path("benchmarks") / f"{name}.md" for name in ("README", *SUITES[:-1], "training")),
)
GROUPS = (*casts.GROUPS, *gemm.GROUPS, *layers.GROUPS, *moe.GROUPS)


def load(folder: Path) -> list[Row]:
    """All stored rows of the suites, file by file, in the order of the tables."""
    files = [path for suite in SUITES for path in sorted(folder.glob(f"{suite}-*.jsonl"))]
    return [row for path in files for row in in_order(read(path))]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of the tables: by group, then by kind (GEMM), recipe and model (layers) or name (experts), then
    by shape. Rows of one suite may come from several runs."""

    def place(row: Row) -> tuple[int, str, list[int]]:
        group = GROUPS.index(row.group) if row.group in GROUPS else len(GROUPS)
        kind = label(row) if row.suite == "gemm" else ""
        if row.suite in layers.SUITES:
            model = next((index for index, name in enumerate(MODELS) if name in row.case), len(MODELS))
            kind = f"{row.format} {model}"
        if row.suite == moe.SUITE:
            kind = moe.place(row)
        return group, kind, row.shape

    return sorted(rows, key=place)


# sections made from rows of the suites
SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "casts": casts.casts_table,
    "casts-summary": casts.summary_table,
    "gemm": gemm.long_table,
    "gemm-summary": gemm.summary_table,
    "gemm-goals": gemm.goals_table,
    **{
        f"{suite}{part}": lambda rows, make=make, suite=suite: make([row for row in rows if row.suite == suite])
        for suite in layers.SUITES
        for part, make in (
            ("", layers.long_table),
            ("-summary", layers.summary_table),
            ("-goals", layers.goals_table),
        )
    },
    "moe": moe.long_table,
    "moe-linear": moe.linear_table,
    "moe-goals": moe.goals_table,
    "dispatch": casts.dispatch_table,
}

# sections with published and modelled figures, which need no rows
MODEL_SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "overlap-dense": overlap.dense_table,
    "overlap-experts": overlap.experts_table,
    "overlap-models": overlap_models.models_table,
}

# sections made from training runs
TRAINING_SECTIONS: dict[str, Callable[[Sequence[Training]], str]] = {
    "training": training.long_table,
    "training-goals": training.goals_table,
    "speed": speed.long_table,
    "speed-goals": speed.goals_table,
}

# sections made from both
COMMON_SECTIONS: dict[str, Callable[[Sequence[Row], Sequence[Training]], str]] = {
    "headline": headline.headline_table,
    "goals": index.goals_table,
    "runs": index.runs_table,
}


def render(page: str, rows: Sequence[Row], trainings: Sequence[Training] = ()) -> str:
    """The page with every generated section rewritten."""
    bodies = {name: section(rows) for name, section in (SECTIONS | MODEL_SECTIONS).items()}
    bodies |= {name: section(trainings) for name, section in TRAINING_SECTIONS.items()}
    bodies |= {name: section(rows, trainings) for name, section in COMMON_SECTIONS.items()}
    for name, body in bodies.items():
        pattern = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
        page = pattern.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", page)
    return page


def update(root: Path, rows: Sequence[Row], trainings: Sequence[Training] = ()) -> list[Path]:
    """Rewrite the pages of a checkout; returns those that changed."""
    changed: list[Path] = []
    for name in PAGES:
        path = root / name
        if path.exists() and (new := render(path.read_text(), rows, trainings)) != path.read_text():
            path.write_text(new)
            changed.append(name)
    return changed
