"""Performance goals, and the verdict of the stored rows on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .tables import EMPTY, HasWhere, commit, mean, table

YES, NO, NOT_MEASURED = "yes", "no", "-"
NOT_YET = "not measured yet"
# decimals that tables show; figures are judged with one more
_DIGITS = {"x": 2, " bytes": 2}
R = TypeVar("R", bound=HasWhere)


@dataclass(frozen=True)
class Goal(Generic[R]):
    """Target of a set of rows: the figure of every row satisfies `met`, their geometric mean reaches `least_mean`.

    command: measures the rows.  about: selects them.  figure: value of one row, None if the row lacks it.  sets: rows
    that are judged together; by default all.  words: figure and verdict of a single row in words, where more than its
    figure decides.
    """

    what: str
    goal: str
    command: str
    about: Callable[[R], bool]
    figure: Callable[[R], float | None]
    met: Callable[[float], bool] | None = None
    unit: str = "x"
    least_mean: float | None = None
    digits: int | None = None
    sets: Callable[[list[R]], list[list[R]]] = lambda rows: [rows]
    words: Callable[[R], tuple[str, str]] | None = None

    @property
    def text(self) -> str:
        return f"{self.what}: {self.goal}"

    def verdicts(self, rows: Sequence[R]) -> list[Verdict]:
        """Verdict of each set of rows that the goal is about; empty if there are none."""
        mine = [row for row in rows if self.about(row) and (self.words or self.figure(row) is not None)]
        return [self._verdict(members) for members in self.sets(mine)] if mine else []

    def _verdict(self, rows: list[R]) -> Verdict:
        if self.words is not None:
            (row,) = rows
            return Verdict(self, *self.words(row), rows)
        figures = [figure for row in rows if (figure := self.figure(row)) is not None]
        digits = _DIGITS.get(self.unit, 0) if self.digits is None else self.digits
        met, shown = judge(figures, self.met, digits) if self.met else (True, digits)
        low, high = (f"{pick(figures):.{shown}f}" for pick in (min, max))
        text = f"{low}{self.unit}" if low == high else f"{low} to {high}{self.unit}"
        if self.least_mean is not None:
            average = round(mean(figures), digits + 1)
            met = met and average >= self.least_mean
            text += f", mean {average:.{digits + 1}f}{self.unit}"
        return Verdict(self, text, YES if met else NO, rows)


@dataclass(frozen=True)
class Verdict:
    """A goal, the figures of rows in words, and whether they meet it."""

    goal: Goal[Any]
    figure: str
    met: str
    rows: Sequence[Any] = ()


def judge(figures: Sequence[float], met: Callable[[float], bool], digits: int) -> tuple[bool, int]:
    """Whether all figures meet a goal, and how many decimals show it.

    Figures are rounded to `digits + 1` decimals first: a smaller difference is below what a run resolves, so it is no
    miss. The last decimal is shown only where the verdict depends on it.

    >>> judge([1.00000004], lambda figure: figure <= 1, 2)
    (True, 2)
    >>> judge([1.446], lambda figure: figure >= 1.45, 2)
    (False, 3)
    """
    fine, coarse = ([met(round(figure, decimals)) for figure in figures] for decimals in (digits + 1, digits))
    return all(fine), digits if fine == coarse else digits + 1


def at_least(least: float) -> Callable[[float], bool]:
    """Condition of a goal."""
    return lambda figure: figure >= least


def at_most(most: float) -> Callable[[float], bool]:
    """Condition of a goal."""
    return lambda figure: figure <= most


def verdicts(goals: Sequence[Goal[R]], rows: Sequence[R], *, unmeasured: bool = False) -> list[Verdict]:
    """Verdicts of all goals.  unmeasured: also of those without rows."""
    missing = (lambda goal: [Verdict(goal, NOT_YET, NOT_MEASURED)]) if unmeasured else (lambda goal: [])
    return [found for goal in goals for found in goal.verdicts(rows) or missing(goal)]


def goals_table(found: Sequence[Verdict]) -> str:
    """Verdicts as a table."""
    if not found:
        return EMPTY
    lines: list[list[str]] = []
    for each in found:
        commits = ", ".join(dict.fromkeys(commit(row) for row in each.rows))
        lines.append([each.goal.text, each.figure, each.met, commits, f"`{each.goal.command}`"])
    return table(("goal", "figure", "met", "commit", "command"), lines)
