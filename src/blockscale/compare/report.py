"""Table and sentences of a comparison, made from the verdicts alone, so that terminal and page say the same.

The first sentence says whether each recipe converges. The null run is bf16 with another reduction order.
"""

from __future__ import annotations

from .comparison import BASELINE, CONTROL, NULL, Arm, Comparison
from .statistics import LEAST_SEEDS, LEAST_STEPS, SHORT_RUN_BUDGETS, Verdict

CPU_SPEED = (
    "Speed needs a GPU: on a CPU low precision is emulated exactly and slower than bf16, so that speeds, memory and "
    "shares of time are not shown. Losses are valid: casts give the same bytes on every device."
)
NOT_TIMED = "Runs shared the machine (--jobs), so their speeds are not comparable and are not shown."


def answer(found: Comparison) -> str:
    """Whether the recipes converge, and the verdict on each: the first sentences of terminal and page."""
    verdicts = found.verdicts()
    if not verdicts:
        return "Only bf16 was run: there is no recipe to compare with it."
    leads = {"bad": "No", "short": "Too short to tell", "open": "Undecided", "good": "Yes"}
    lead = next(says for tone, says in leads.items() if any(each.tone == tone for each in verdicts.values()))
    short = dict.fromkeys(verdict.why for verdict in verdicts.values() if verdict.kind == "too short to tell")
    if all(verdict.kind == "too short to tell" for verdict in verdicts.values()):
        return f"{lead}: {'; '.join(short)}."
    each = [f"{arm.name}: {_said(found, arm)}, gap {found.gap(arm.name)}" for arm in found.arms if arm.is_recipe]
    return " ".join(f"{part}." for part in (lead, "; ".join(each), *short))


def _said(found: Comparison, arm: Arm) -> str:
    """Verdict on an arm in words, with the share of converted FLOPs; empty for the baseline and the null run."""
    verdict = found.verdict(arm)
    if verdict is None:
        return ""
    budget = f" {arm.budget:.2%}" if verdict.kind == "within budget" else ""
    return f"{verdict.kind}{budget} ({share(found, arm)} converted)"


def share(found: Comparison, arm: Arm) -> str:
    """Share of linear FLOPs that an arm has in low precision; "?" if no run of it recorded the share."""
    known = [run.about["flop_share"] for run in found.runs[arm.name] if "flop_share" in run.about]
    return f"{known[0]:.0%}" if known else "?"


def speedups(found: Comparison) -> str:
    """Tokens/s of each recipe over bf16's, or the reason why speed was not measured."""
    if not found.is_on_gpu:
        return CPU_SPEED
    if not found.is_timed:
        return NOT_TIMED
    base = found.tokens_per_second(BASELINE)
    recipes = [arm.name for arm in found.arms if arm.is_recipe and base]
    speeds = ", ".join(f"{name} {found.tokens_per_second(name) / base:.2f}x" for name in recipes)
    return f"Tokens/s beside bf16: {speeds}." if speeds else ""


def table(found: Comparison) -> list[dict[str, str]]:
    """One row for each arm, by column. Memory is shown on a GPU only, speed only if each run had the GPU to itself."""
    return [_row(found, arm) for arm in found.arms]


def _row(found: Comparison, arm: Arm) -> dict[str, str]:
    losses = [run.loss for run in found.runs[arm.name]]
    cells = {
        "recipe": arm.name,
        "verdict": _said(found, arm),
        "gap to bf16": "" if arm.name == BASELINE else str(found.gap(arm.name)),
        "final loss": f"{sum(losses) / len(losses):.4f}",
    }
    if found.is_on_gpu and found.is_timed:
        speed, base = found.tokens_per_second(arm.name), found.tokens_per_second(BASELINE)
        cells |= {"tokens/s": f"{speed:,.0f}", "speedup": f"{speed / base:.2f}x" if arm.is_recipe and base else ""}
    if found.is_on_gpu:
        memory = found.peak_memory(arm.name)
        cells["peak memory"] = "" if memory is None else f"{memory / 2**30:.2f} GiB"
    return cells


def notes(found: Comparison) -> list[str]:
    """Sentences below the table that explain it."""
    noise, null = found.noise, next(arm.says for arm in found.arms if arm.name == NULL)
    sentences = [
        f"null: {null}; run-to-run noise up to {100 * noise:.2g} %.",
        "converted: share of linear FLOPs in low precision; the rest runs in bf16.",
    ]
    if found.branch_at:
        sentences.append(
            f"All runs of a seed share bf16's run up to step {found.branch_at}; the first gap of a recipe is the "
            "effect of its forward on weights that bf16 trained."
        )
    if found.since:
        sentences.append(f"Recipes are in low precision from step {found.since} on, and bf16 before.")
    if len(found.seeds) == 1:
        sentences.append(
            "One seed has no confidence interval: its half width is three times the null run's largest gap in the "
            "second half of the run, or the drift of the recipe's own gap there if that is larger."
        )
    else:
        sentences.append(f"± is the 95 % interval of the mean of {len(found.seeds)} paired seeds (Student's t).")
    tight = [arm.name for arm in found.arms if arm.is_recipe and arm.budget and not noise <= arm.budget / 3]
    if tight:
        sentences.append(f"The noise is above a third of the budget of {', '.join(tight)}: that verdict is unreliable.")
    if any(verdict.kind == "too short to tell" for verdict in found.verdicts().values()):
        sentences.append(
            f"A short run shows gross errors: a run that diverges, and a gap above {SHORT_RUN_BUDGETS} budgets over "
            f"{LEAST_SEEDS} seeds or more. It does not show whether a recipe converges: run-to-run noise reaches its "
            f"final size after some {LEAST_STEPS} steps, and so does the effect of rounding."
        )
    for arm in found.arms:
        verdict = found.verdict(arm)
        if arm.name == CONTROL and verdict is not None:
            sentences.append(_control(found, arm, verdict))
        elif verdict is not None and verdict.kind != "too short to tell":  # `answer` explains that one
            sentences.append(f"{arm.name}: {verdict.kind}; {verdict.why}.")
        runs = zip(found.seeds, found.runs[arm.name], strict=True)
        sentences += [f"{arm.name}, seed {seed}: {run.failed}" for seed, run in runs if run.failed]
    return sentences


def _control(found: Comparison, arm: Arm, verdict: Verdict) -> str:
    result = "as it must: this comparison detects a fault of that size"
    if not verdict.is_bad:
        result = f"not worse ({verdict.why}): this comparison would miss such a fault"
    return f"{arm.name}: {arm.says}. It is {verdict.kind}, {found.gap(arm.name)}, {result}."


def summary(found: Comparison) -> list[str]:
    """Lines of the terminal below the table."""
    return [answer(found), *notes(found), *([] if found.is_on_gpu and found.is_timed else [speedups(found)])]
