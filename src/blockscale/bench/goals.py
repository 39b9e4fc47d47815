"""Performance goals, and the verdict of the stored rows on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .store import Row
from .tables import EMPTY, mean, table

YES, NO, NOT_MEASURED = "yes", "no", "-"
HEAD = ("goal", "figure", "met", "commit", "command")
# decimals that tables show; figures are judged with one more
_DIGITS = {"x": 2, " %": 0, " TFLOP/s": 0}


@dataclass(frozen=True)
class Goal:
    """Target of a set of rows: the figure of every row satisfies `met`, their geometric mean reaches `least_mean`.

    about: selects the rows.  figure: value of one row, None if the row lacks it.  command: arguments of `blockscale
    bench` that measure the rows.
    """

    what: str
    goal: str
    command: str
    about: Callable[[Row], bool]
    figure: Callable[[Row], float | None]
    met: Callable[[float], bool] | None = None
    unit: str = "x"
    least_mean: float | None = None


@dataclass(frozen=True)
class Verdict:
    """One goal, the figures of its rows, and whether they meet it.  command: the full command line."""

    goal: str
    figure: str
    met: str
    commit: str
    command: str

    @property
    def cells(self) -> list[str]:
        """Cells of a table line, as in `HEAD`."""
        return [self.goal, self.figure, self.met, self.commit, f"`{self.command}`"]


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


def verdict(goal: Goal, rows: Sequence[Row]) -> Verdict | None:
    """Verdict of the timed rows that the goal is about; None if there are none."""
    mine = [(row, figure) for row in rows if goal.about(row) and (figure := goal.figure(row)) is not None]
    if not mine:
        return None
    figures = [figure for _, figure in mine]
    digits = _DIGITS.get(goal.unit, 0)
    met, shown = judge(figures, goal.met, digits) if goal.met else (True, digits)
    low, high = (f"{pick(figures):.{shown}f}" for pick in (min, max))
    text = f"{low}{goal.unit}" if low == high else f"{low} to {high}{goal.unit}"
    if goal.least_mean is not None:
        average = round(mean(figures), digits + 1)
        met = met and average >= goal.least_mean
        text += f", mean {average:.{digits + 1}f}{goal.unit}"
    commits = ", ".join(dict.fromkeys(str(row.where.get("commit")) for row, _ in mine))
    return Verdict(f"{goal.what}: {goal.goal}", text, YES if met else NO, commits, f"blockscale bench {goal.command}")


def verdicts(goals: Sequence[Goal], rows: Sequence[Row]) -> list[Verdict]:
    """Verdicts of all goals with timed rows."""
    return [found for goal in goals if (found := verdict(goal, rows)) is not None]


def goals_table(found: Sequence[Verdict]) -> str:
    """Verdicts as a table."""
    return table(HEAD, [each.cells for each in found]) if found else EMPTY
