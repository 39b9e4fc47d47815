"""Sentences of a comparison: does each recipe converge, what is the speedup, and what a short run cannot tell.

They are made from the verdicts alone, so that terminal and page say the same. The null run is bf16 with another
reduction order.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from .comparison import BASELINE, CONTROL, NULL, Arm, Comparison
from .statistics import LEAST_SEEDS, LEAST_STEPS, SHORT_RUN_BUDGETS, Verdict

CPU_SPEED = (
    "Speed needs a GPU: on a CPU low precision is emulated exactly and slower than bf16, so that speeds, memory and "
    "shares of time are not shown. Losses are valid: casts give the same bytes on every device."
)
NOT_TIMED = "Runs shared the machine (--jobs), so their speeds are not comparable and are not shown."


def answer(found: Comparison) -> str:
    """One sentence that says whether each recipe converges, from its verdict."""
    judged = [(arm, verdict) for arm in found.arms if arm.is_recipe and (verdict := found.verdict(arm)) is not None]
    if not judged:
        return "Only bf16 was run: there is no recipe to compare with it."
    words = _Words(found)
    parts: list[str] = []
    for budget in dict.fromkeys(arm.budget for arm, verdict in judged if verdict.is_good):
        good = [arm for arm, verdict in judged if verdict.is_good and arm.budget == budget]
        parts.append(f"yes: {words.named(good)} stay{'s' * (len(good) == 1)} within {budget:.2%} of bf16")
    parts += [f"no: {words.named([arm])} {_bad(found, arm, verdict)}" for arm, verdict in judged if verdict.is_bad]
    undecided = [arm for arm, verdict in judged if verdict.kind == "undecided"]
    if undecided:
        parts.append(f"undecided: {words.named(undecided)}")
    short = {arm.name: (arm, verdict) for arm, verdict in judged if verdict.kind == "too short to tell"}
    for why in dict.fromkeys(verdict.why for _, verdict in short.values()):
        mine = [arm for arm, verdict in short.values() if verdict.why == why]
        about = "" if len(mine) == len(judged) else f" about {words.named(mine)}"
        parts.append(f"too short to tell{about}: {why}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _bad(found: Comparison, arm: Arm, verdict: Verdict) -> str:
    return "diverged" if verdict.kind == "diverged" else f"is worse than bf16 by {found.gap(arm.name)}"


class _Words:
    """Names of arms with their share of converted FLOPs; the first name explains the share."""

    def __init__(self, found: Comparison) -> None:
        self.found, self.is_first = found, True

    def named(self, arms: Sequence[Arm]) -> str:
        """Arms as a list in words."""
        names: list[str] = []
        for arm in arms:
            names.append(f"{arm.name} ({share(self.found, arm)}{' of its FLOPs converted' * self.is_first})")
            self.is_first = False
        return self.joined(names)

    @staticmethod
    def joined(names: Sequence[str]) -> str:
        """
        >>> _Words.joined(["a"]), _Words.joined(["a", "b", "c"])
        ('a', 'a, b and c')
        """
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


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
    speeds = [
        f"{arm.name} {found.tokens_per_second(arm.name) / base:.2f}x" for arm in found.arms if arm.is_recipe and base
    ]
    return f"Tokens/s beside bf16: {', '.join(speeds)}." if speeds else ""


def control_result(found: Comparison) -> str:
    """Verdict on the control arm in a sentence; empty if there is no control."""
    arm = next((each for each in found.arms if each.name == CONTROL), None)
    verdict = None if arm is None else found.verdict(arm)
    if arm is None or verdict is None:
        return ""
    what = f"{CONTROL}: {arm.says}"
    if verdict.is_bad:
        return f"{what}. It {_bad(found, arm, verdict)}, as it must: this comparison detects a fault of that size."
    return f"{what}. It is not worse ({verdict.kind}; {verdict.why}), so this comparison would miss such a fault."


def is_short(found: Comparison) -> bool:
    """Whether the comparison is too short for a verdict on some recipe."""
    return any(verdict.kind == "too short to tell" for verdict in found.verdicts().values())


def limits(found: Comparison) -> list[str]:
    """Sentences on what a short comparison shows and what it does not."""
    length = found.length(NULL)
    return [
        f"It shows gross errors: a run that diverges, and a gap above {SHORT_RUN_BUDGETS} budgets over {LEAST_SEEDS} "
        "seeds or more, are found at any length. Errors that accumulate slowly are not.",
        "It shows the quantization noise of each layer, below in decibels: that needs no long run.",
        f"It does not show whether a recipe converges. After {length.steps - length.shared_steps:,} steps, two bf16 "
        f"runs that differ in reduction order alone have a gap of {found.gap(NULL)}. Run-to-run noise reaches its "
        f"final size after some {LEAST_STEPS} steps, and so does the effect of rounding.",
    ]


def longer_command(found: Comparison) -> str:
    """The `blockscale compare` command that runs long enough for a verdict."""
    options = found.length(NULL).options(len(found.seeds))
    command = str(found.runs[BASELINE][0].where.get("command", ""))
    begins = "blockscale compare"
    is_ours = command.startswith(begins)
    written = with_options(command if is_ours else f"{begins} ...", options)
    # run records do not hold --out
    return written if found.out is None else f"{written} --out {shlex.quote(str(found.out))}"


def with_options(command: str, options: Mapping[str, int]) -> str:
    """A command line with the given values of some options, replaced or appended.

    >>> options = {"--steps": 300, "--eval-every": 50, "--seeds": 3}
    >>> with_options("blockscale compare tiny --steps 16 --eval-every=4", options)
    'blockscale compare tiny --steps 300 --eval-every=50 --seeds 3'
    """
    words, left = shlex.split(command), dict(options)
    for place, word in enumerate(words):
        option, mark, _ = word.partition("=")
        if option not in left or (not mark and place + 1 == len(words)):
            continue
        value = str(left.pop(option))
        if mark:
            words[place] = f"{option}={value}"
        else:
            words[place + 1] = value
    return " ".join([*map(shlex.quote, words), *(f"{option} {value}" for option, value in left.items())])


def duration(found: Comparison) -> str:
    """Estimated time of `longer_command` in parentheses, from the speeds of these runs; without evaluations."""
    options, config = found.length(NULL).options(len(found.seeds)), found.runs[BASELINE][0].about["config"]
    speeds = [found.tokens_per_second(arm.name) for arm in found.arms]
    if not all(speeds):
        return ""
    tokens = config["batch"] * config["accumulate"] * config["data"]["sequence"]
    tokens *= options["--steps"] * options["--seeds"]
    jobs = int(found.runs[BASELINE][0].arm.get("jobs", 1))
    minutes = max(1, round(sum(tokens / speed for speed in speeds) / jobs / 60))
    return f" (about {minutes} minute{'s' * (minutes > 1)} on this machine)"
