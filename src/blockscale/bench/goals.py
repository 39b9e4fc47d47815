"""Goals, and what stored rows say of them: one line each, with the commit that was measured and the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .store import Row
from .tables import EMPTY, table


@dataclass(frozen=True)
class Goal:
    """What rows are meant to reach: those that it is about, the figure of each, and whether it is enough.

    command: what `blockscale bench` runs for it.
    """

    what: str
    goal: str
    command: str
    about: Callable[[Row], bool]
    figure: Callable[[Row], float | None]
    met: Callable[[float], bool]
    unit: str = "x"


def goals_table(goals: Sequence[Goal], rows: Sequence[Row]) -> str:
    """Every goal whose rows are among those that were timed."""
    lines = [line for goal in goals if (line := _line(goal, rows)) is not None]
    return table(["goal", "figure", "met", "commit", "command"], lines) if lines else EMPTY


def _line(goal: Goal, rows: Sequence[Row]) -> list[str] | None:
    mine = [(row, figure) for row in rows if goal.about(row) and (figure := goal.figure(row)) is not None]
    if not mine:
        return None
    low, high = (f"{pick(figure for _, figure in mine):.{2 if goal.unit == 'x' else 0}f}" for pick in (min, max))
    text = f"{low}{goal.unit}" if low == high else f"{low} to {high}{goal.unit}"
    commits = ", ".join(dict.fromkeys(str(row.where.get("commit")) for row, _ in mine))
    met = all(goal.met(figure) for _, figure in mine)
    return [f"{goal.what}: {goal.goal}", text, "yes" if met else "no", commits, f"`blockscale bench {goal.command}`"]
