"""Draw every picture that is made from stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blockscale.autograd.recipe import get_recipe
from blockscale.bench import rooflines
from blockscale.bench.shapes import MODELS
from blockscale.bench.store import Row
from blockscale.bench.trainings import Training, convergences
from blockscale.roofline import MEASURED, NOMINAL, TRAINING

from . import (
    casts,
    casts_picture,
    headline,
    headline_picture,
    overlap_picture,
    roofline_picture,
    training,
    training_picture,
)

FOLDER = Path("docs")
# measured layers of the roofline, and the model whose layers are drawn
LAYERS = Path("benchmarks/results/linear-h200.jsonl")
MODEL = "DeepSeek-V3 671B"


def draw_all(root: Path, rows: Sequence[Row], trainings: Sequence[Training]) -> list[Path]:
    """Draw the pictures whose rows are stored, and that of overlap, which is modelled where none are; returns their
    paths relative to `root`."""
    drawn = [FOLDER / overlap_picture.PICTURE]
    overlap_picture.draw(rows, root / drawn[0])
    if casts.main_rows(rows):
        drawn.append(FOLDER / casts.PICTURE)
        casts_picture.draw(rows, root / drawn[-1])
    if convergences(trainings):
        drawn.append(FOLDER / training.PICTURE)
        training_picture.draw(convergences(trainings), root / drawn[-1])
    if headline.panels(rows, trainings):
        drawn.append(FOLDER / headline_picture.PICTURE)
        headline_picture.draw(rows, trainings, root / drawn[-1])
    if headline.loss_comparison(trainings):
        drawn.append(FOLDER / headline_picture.LOSS_PICTURE)
        headline_picture.draw_loss(trainings, root / drawn[-1])
    if times := roofline_picture.stored_times(root / LAYERS):
        drawn += [FOLDER / roofline_picture.PICTURE, FOLDER / roofline_picture.STEPS_PICTURE]
        layers, recipes = MODELS[MODEL], [get_recipe(name) for name in ("fp8_blockwise", "mxfp8", "nvfp4")]
        roofs = rooflines.Roofs(MEASURED["h200"], NOMINAL["h200"])
        roofline_picture.draw_speedups(layers, recipes, roofs, TRAINING, root / drawn[-2], times)
        largest = max(layers, key=lambda layer: layer[0] * layer[1])
        roofline_picture.draw_steps(largest, 4096, recipes, roofs.main, TRAINING, root / drawn[-1])
    return drawn
