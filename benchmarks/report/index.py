"""Index of the benchmarks: every goal with its verdict, and the runs that the tables are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from blockscale.bench.store import Row
from blockscale.bench.trainings import Throughput, Training, convergences, throughputs

from . import casts, gemm, layers, moe, speed, training
from .goals import NO, NOT_MEASURED, YES, Verdict
from .tables import EMPTY, machine, table

STATES = {YES: "met", NO: "missed", NOT_MEASURED: "not measured"}
# suites whose page is elsewhere
PAGES = {"overlap": "../docs/overlap.md"}
# neither met nor missed: the noise of the runs covers the goal
OPEN = "open"


def verdicts(rows: Sequence[Row], trainings: Sequence[Training]) -> dict[str, list[Verdict]]:
    """Verdicts by the link to their page; pages without goals are left out."""
    by_suite = {suite: layers.verdicts([row for row in rows if row.suite == suite]) for suite in layers.SUITES}
    found = {
        "[casts](casts.md)": casts.verdicts(rows),
        "[GEMM](gemm.md)": gemm.verdicts(rows),
        "[linear layers](linear.md)": by_suite["linear"],
        "[SwiGLU MLPs](mlp.md)": by_suite["mlp"],
        "[experts](moe.md)": moe.verdicts(rows),
        "[training steps](training.md#throughput)": speed.verdicts(trainings),
        "[training loss](training.md#loss)": training.verdicts(trainings),
    }
    return {page: theirs for page, theirs in found.items() if theirs}


def goals_table(rows: Sequence[Row], trainings: Sequence[Training]) -> str:
    """Number of goals met, missed, open and not measured by page, then every goal."""
    if not rows:
        return EMPTY
    found = verdicts(rows, trainings)
    states = (STATES[YES], STATES[NO], OPEN, STATES[NOT_MEASURED])
    counts = {page: Counter(STATES.get(each.met, OPEN) for each in theirs) for page, theirs in found.items()}
    lines = [[page, *(str(count[state]) for state in states)] for page, count in counts.items()]
    total = sum(counts.values(), Counter[str]())
    lines.append(["all", *(str(total[state]) for state in states)])
    parts = [table(["goals", *states], lines)]
    for page, theirs in found.items():
        parts.append(table([page, "figure", "met"], [[_text(each), each.figure, each.met] for each in theirs]))
    return "\n\n".join(parts)


def _text(verdict: Verdict) -> str:
    """A goal; of training steps, with the tokens of the step that is judged."""
    sizes = [f", {speed.tokens_per_step(row):,} tokens per step" for row in verdict.rows if isinstance(row, Throughput)]
    return "".join([verdict.goal.text, *sizes])


def runs_table(rows: Sequence[Row], trainings: Sequence[Training]) -> str:
    """Rows, machine, versions, commits and dates of each suite."""
    if not rows:
        return EMPTY
    groups: dict[str, list[Row] | list[Training]] = {}
    for suite in dict.fromkeys(row.suite for row in rows):
        groups[f"[{suite}]({PAGES.get(suite, f'{suite}.md')})"] = [row for row in rows if row.suite == suite]
    groups["[training](training.md), throughput"] = list(throughputs(trainings))
    groups["[training](training.md), loss"] = list(convergences(trainings))
    lines: list[list[str]] = []
    for page, theirs in groups.items():
        where = [each.where for each in theirs]
        commits = dict.fromkeys(part for at in where for part in str(at.get("commit") or "none").split("; "))
        dates = sorted({str(at.get("utc"))[:10] for at in where})
        span = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "-"
        machines = "<br>".join(dict.fromkeys(machine(each) for each in theirs)) or "-"
        lines.append([page, str(len(theirs)), machines, ", ".join(commits) or "-", span])
    return table(["suite", "rows", "machine", "commits", "dates"], lines)
