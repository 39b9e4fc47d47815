"""Draw every picture that is made from stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import headline_picture, picture, report_casts, report_headline, report_training, training_picture
from .store import Row
from .trainings import Training, convergences

FOLDER = Path("docs")


def draw_all(root: Path, rows: Sequence[Row], trainings: Sequence[Training]) -> list[Path]:
    """Draw the pictures whose rows are stored; returns their paths relative to `root`."""
    drawn: list[Path] = []
    if report_casts.main_rows(rows):
        drawn.append(FOLDER / report_casts.PICTURE)
        picture.draw(rows, root / drawn[-1])
    if convergences(trainings):
        drawn.append(FOLDER / report_training.PICTURE)
        training_picture.draw(convergences(trainings), root / drawn[-1])
    if report_headline.panels(rows, trainings):
        drawn.append(FOLDER / headline_picture.PICTURE)
        headline_picture.draw(rows, trainings, root / drawn[-1])
    if report_headline.loss_comparison(trainings):
        drawn.append(FOLDER / headline_picture.LOSS_PICTURE)
        headline_picture.draw_loss(trainings, root / drawn[-1])
    return drawn
