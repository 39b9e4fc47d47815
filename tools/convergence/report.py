"""Report of the runs: gaps to bf16 with standard errors, and verdicts that may fail.

A gap is (loss - bf16's loss) / bf16's loss of the same seed on validation text, averaged over seeds. Its error is the
standard error over seeds; for a single seed, the largest standard deviation of a recipe with as many bits. A verdict is
"yes" or "NO" only if the error does not change it, else "open". No gap is judged unless the null run (fp32 GEMMs) is
below a third of its bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import gates
from .arms import ARMS, BASELINE, FAULTS, HONEST, NULL

ORDER = (("mxfp8", "nvfp4"), ("nvfp4", "mxfp4"), ("nvfp4_backward", "nvfp4"))
YES, NO, OPEN = "yes", "**NO**", "open"


@dataclass(frozen=True)
class Mean:
    """Mean of `seeds` values.  error: standard error; for a single value its expected standard deviation."""

    value: float
    error: float
    seeds: int

    @staticmethod
    def of(values: Sequence[float], spread: float = 0.0) -> Mean:
        spread = statistics.stdev(values) if len(values) > 1 else spread
        return Mean(statistics.fmean(values), spread / len(values) ** 0.5, len(values))

    def is_below(self, bound: float, errors: float = 1) -> str:
        """Whether the mean is below a bound by `errors` standard errors: yes, NO or open."""
        if self.value + errors * self.error <= bound:
            return YES
        return NO if self.value - errors * self.error > bound else OPEN

    def __str__(self) -> str:
        return f"{100 * self.value:+.3f} ± {100 * self.error:.3f}"


@dataclass(frozen=True)
class Report:
    """Rows of one machine, one size and one text.  runs: arm to seed to row.  gates: arm to row.  regression: report of
    the regression, which has no gates."""

    runs: dict[str, dict[int, dict[str, Any]]]
    gates: dict[str, dict[str, Any]]
    regression: Report | None = None

    @staticmethod
    def of(rows: Sequence[dict[str, Any]]) -> Report:
        """Report of stored rows; later rows replace earlier ones of the same arm and seed."""
        found: dict[str, dict[str, dict[int, dict[str, Any]]]] = {
            kind: {name: {} for name in ARMS} for kind in ("run", "regression", "gates")
        }
        for row in rows:
            found[row["kind"]][row["arm"]][row["seed"]] = row
        checked = {name: row for name, seeds in found["gates"].items() for row in seeds.values()}
        return Report(found["run"], checked, Report(found["regression"], {}))

    def gaps(self, name: str, point: int = -1) -> dict[int, float]:
        """Gap of each seed at a point of the curve; a regression has only its end."""
        base = self.runs[BASELINE]
        pairs = (
            (seed, _loss(row, point), _loss(base[seed], point)) for seed, row in self.runs[name].items() if seed in base
        )
        return {seed: mine / theirs - 1 for seed, mine, theirs in sorted(pairs)}

    def gap(self, name: str, point: int = -1) -> Mean | None:
        """Mean gap of an arm; None without runs."""
        gaps = self.gaps(name, point).values()
        if not gaps:
            return None
        alike = (self.gaps(other, point).values() for other in HONEST if ARMS[other].bits == ARMS[name].bits)
        spread = 0.0 if len(gaps) > 1 else max((statistics.stdev(each) for each in alike if len(each) > 1), default=0.0)
        return Mean.of([*gaps], spread)

    def resolves(self, bound: float) -> bool:
        """Whether the null run's gap plus its error is below a third of a bound; else the harness cannot judge."""
        null = self.gap(NULL)
        return null is not None and null.seeds > 1 and abs(null.value) + null.error <= bound / 3

    def loss_gate(self, name: str) -> str:
        """Whether the gap is within its bound: yes, NO or open."""
        gap, bound = self.gap(name), ARMS[name].bound
        if gap is None or bound is None or not self.resolves(bound):
            return OPEN
        return gap.is_below(bound)

    def found_by(self, name: str) -> list[str]:
        """Gates that reject an arm."""
        row = self.gates.get(name)
        early = [] if row is None else [gate for gate, passed in gates.passes(row).items() if not passed]
        return [*early, *(["loss"] if self.loss_gate(name) == NO else [])]

    def first_loss_error(self, bits: int) -> float:
        """Largest relative difference of the first loss to bf16's, over arms without a fault."""
        pairs = (
            (row["first_loss"], self.runs[BASELINE][seed]["first_loss"])
            for name in HONEST
            if ARMS[name].bits == bits
            for seed, row in self.runs[name].items()
            if seed in self.runs[BASELINE]
        )
        return max((abs(mine / theirs - 1) for mine, theirs in pairs), default=0.0)

    def first_losses_agree(self, bits: int) -> bool:
        """Whether the first losses of arms with that many bits are within their limit."""
        return self.first_loss_error(bits) <= gates.FIRST_LOSS[bits]

    def order(self) -> list[tuple[str, str, Mean, str]]:
        """(smaller arm, larger arm, paired difference, verdict by two standard errors) of each expected order."""
        found: list[tuple[str, str, Mean, str]] = []
        for smaller, larger in ORDER:
            mine, theirs = self.gaps(smaller), self.gaps(larger)
            if differences := [mine[seed] - theirs[seed] for seed in mine if seed in theirs]:
                mean = Mean.of(differences)
                found.append((smaller, larger, mean, mean.is_below(0, errors=2) if len(differences) > 1 else OPEN))
        return found

    @property
    def is_good(self) -> bool:
        """Whether no verdict fails: arms without a fault pass, faults are found, and no expected order is reversed."""
        honest = all(not self.found_by(name) for name in HONEST)
        faults = all(ARMS[name].fault.found_by in self.found_by(name) for name in FAULTS if name in self.gates)  # pyright: ignore[reportOptionalMemberAccess]
        start = all(self.first_losses_agree(bits) for bits in gates.FIRST_LOSS)
        order = [*self.order(), *(self.regression.order() if self.regression else ())]
        return honest and faults and start and all(verdict != NO for *_, verdict in order)

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, head, rows) of all tables."""
        return [
            self._recipes(),
            self._faults(),
            self._order(),
            *([self.regression._errors()] if self.regression else []),
        ]

    def _recipes(self) -> tuple[str, list[str], list[list[str]]]:
        head = ["arm", "seeds", "loss", "gap, %", "bound, %", "within", "cosine", "norms", "outliers, dB", "gates"]
        body: list[list[str]] = []
        for name in HONEST:
            runs, row, bound = self.runs[name], self.gates.get(name, {}), ARMS[name].bound
            if not runs:
                continue
            loss = statistics.fmean(run["final"] for run in runs.values())
            gap = "" if name == BASELINE else str(self.gap(name))
            limits = ["", ""] if bound is None else [f"{100 * bound:.1f}", self.loss_gate(name)]
            early = [*_figures(row), "pass" if all(gates.passes(row).values()) else NO] if row else [""] * 4
            body.append([f"`{name}`", str(len(runs)), f"{loss:.4f}", gap, *limits, *early])
        return "Recipes", head, body

    def _faults(self) -> tuple[str, list[str], list[list[str]]]:
        head = ["fault", "what it is", "gap, %", "cosine", "norms", "outliers, dB", "found by"]
        body: list[list[str]] = []
        for name in FAULTS:
            row, found, arm = self.gates.get(name), self.found_by(name), ARMS[name]
            if row is None or arm.fault is None:
                continue
            claimed = arm.fault.found_by
            words = [f"*{gate}*" if gate == claimed else gate for gate in found]
            words += [] if claimed in found else [f"{NO}: not by {claimed}"]
            body.append([f"`{name}`", arm.says, str(self.gap(name) or ""), *_figures(row), ", ".join(words)])
        return "Faults", head, body

    def _order(self) -> tuple[str, list[str], list[list[str]]]:
        problems = {"": self, ", regression": self.regression}
        body = [
            [f"`{a}` below `{b}`{words}", str(mean), verdict]
            for words, report in problems.items()
            for a, b, mean, verdict in (report.order() if report else ())
        ]
        null, tightest = self.gap(NULL), min(arm.bound for arm in ARMS.values() if arm.bound is not None)
        says = YES if self.resolves(tightest) else OPEN
        body.append([f"null below a third of {100 * tightest:.1f} %", "" if null is None else str(null), says])
        for bits, limit in gates.FIRST_LOSS.items():
            holds = YES if self.first_losses_agree(bits) else NO
            largest = f"at most {100 * self.first_loss_error(bits):.2f}"
            body.append([f"first loss within {100 * limit:.1f} % of bf16's, {bits} bits", largest, holds])
        return "Order and validity", ["claim", "paired difference, %", "holds"], body

    def _errors(self) -> tuple[str, list[str], list[list[str]]]:
        body: list[list[str]] = []
        for name, runs in self.runs.items():
            if runs:
                error = statistics.fmean(run["final"] for run in runs.values())
                gap = "" if name == BASELINE else str(self.gap(name) or "")
                body.append([f"`{name}`", str(len(runs)), f"{error:.4f}", gap])
        return "Regression", ["arm", "seeds", "squared error", "gap, %"], body

    def show(self, console: Console) -> None:
        """Print all tables to a terminal."""
        for title, head, body in self.tables():
            table = Table(*head, title=title, title_justify="left")
            for row in body:
                table.add_row(*(cell.replace("`", "").replace("*", "") for cell in row))
            console.print(table)

    def write(self, page: Path, mark: str) -> None:
        """Write the tables as markdown between the page's marks for this machine."""
        begin, end = f"<!-- convergence:{mark} -->", f"<!-- /convergence:{mark} -->"
        text = page.read_text()
        if begin not in text:
            return
        run = next(iter(self.runs[BASELINE].values()))
        facts, steps = run["where"], run["curve"][-1][0]
        lines = [
            f"{facts['gpu']}; torch {facts['torch']}, Python {facts['python']}; commit {facts['commit']}; "
            f"{facts['utc'][:10]}. Size `{run['size']}`: {run['parameters']:,} parameters, {steps} steps; text "
            f"`{run['data']}`."
        ]
        for title, head, body in self.tables():
            lines += ["", f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))]
        before, rest = text.split(begin)
        page.write_text("\n".join([before + begin, *lines, end + rest.split(end)[1]]))


def _loss(row: dict[str, Any], point: int) -> float:
    return row["curve"][point][1] if "curve" in row else row["final"]


def _figures(row: dict[str, Any]) -> list[str]:
    outliers = row["outliers_db"]
    return [f"{row['cosine']:.4f}", f"{row['norms']:.3f}", "" if outliers is None else f"{outliers:.1f}"]
