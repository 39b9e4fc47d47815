"""What a comparison answers, in sentences: does it still converge, what is won, and what a short run cannot tell.

Made from the verdicts alone, so that terminal and page say the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from .compare import BASELINE, CONTROL, NULL, Arm, Comparison
from .statistics import FAR, LEAST_SEEDS, LEAST_STEPS, Verdict

CPU_SPEED = (
    "Speed needs a GPU: on a CPU low precision is emulated exactly and slower than bf16, so that speeds, memory and "
    "shares of time are not shown. Losses count: casts give the same bytes on every device."
)
NOT_TIMED = "Runs shared the machine (--jobs), so their speeds mean nothing and are not shown."


def answer(found: Comparison) -> str:
    """Whether each recipe converges, by its verdict: one sentence."""
    said = [(arm, verdict) for arm in found.arms if arm.is_recipe and (verdict := found.verdict(arm)) is not None]
    if not said:
        return "Only bf16 was run: there is no recipe to compare with it."
    words = _Words(found)
    parts: list[str] = []
    for budget in dict.fromkeys(arm.budget for arm, verdict in said if verdict.is_good):
        good = [arm for arm, verdict in said if verdict.is_good and arm.budget == budget]
        parts.append(f"yes: {words.named(good)} stay{'s' * (len(good) == 1)} within {budget:.2%} of bf16")
    parts += [f"no: {words.named([arm])} {_bad(found, arm, verdict)}" for arm, verdict in said if verdict.is_bad]
    undecided = [arm for arm, verdict in said if verdict.kind == "undecided"]
    if undecided:
        parts.append(f"undecided: {words.named(undecided)}")
    short = {arm.name: (arm, verdict) for arm, verdict in said if verdict.kind == "too short to tell"}
    for why in dict.fromkeys(verdict.why for _, verdict in short.values()):
        mine = [arm for arm, verdict in short.values() if verdict.why == why]
        about = "" if len(mine) == len(said) else f" about {words.named(mine)}"
        parts.append(f"too short to tell{about}: {why}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _bad(found: Comparison, arm: Arm, verdict: Verdict) -> str:
    return "diverged" if verdict.kind == "diverged" else f"is worse than bf16 by {found.gap(arm.name)}"


class _Words:
    """Names of arms with their share of converted FLOPs; the first says what the share is."""

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
    """Share of linear FLOPs that an arm has in low precision; "?" if all of its runs broke down before they told it."""
    known = [run.about["flop_share"] for run in found.runs[arm.name] if "flop_share" in run.about]
    return f"{known[0]:.0%}" if known else "?"


def won(found: Comparison) -> str:
    """Speed beside bf16, where it was measured; else why there is none."""
    if not found.is_on_gpu:
        return CPU_SPEED
    if not found.is_timed:
        return NOT_TIMED
    base = found.tokens_per_second(BASELINE)
    speeds = [
        f"{arm.name} {found.tokens_per_second(arm.name) / base:.2f}x" for arm in found.arms if arm.is_recipe and base
    ]
    return f"Tokens/s beside bf16: {', '.join(speeds)}." if speeds else ""


def controlled(found: Comparison) -> str:
    """What the control came to; empty without one."""
    arm = next((each for each in found.arms if each.name == CONTROL), None)
    verdict = None if arm is None else found.verdict(arm)
    if arm is None or verdict is None:
        return ""
    what = f"{CONTROL}: {arm.says}"
    if verdict.is_bad:
        return f"{what}. It {_bad(found, arm, verdict)}, as it must: a fault of that size is seen."
    return f"{what}. It is not found worse ({verdict.kind}; {verdict.why}), so such a fault would not be seen here."


def is_short(found: Comparison) -> bool:
    """Whether a recipe has no verdict for want of length."""
    return any(verdict.kind == "too short to tell" for verdict in found.verdicts().values())


def limits(found: Comparison) -> list[str]:
    """What a short comparison shows and what it does not, in sentences."""
    length = found.length(NULL)
    return [
        f"It shows what is grossly wrong: a run that diverges, and a gap above {FAR} budgets over {LEAST_SEEDS} seeds "
        "or more, are found at any length. What adds up slowly is not.",
        "It shows what casts do to each layer of the model, below in decibels: that needs no long run.",
        f"It does not show whether a recipe converges. After {length.steps - length.parted:,} steps of two runs that "
        f"differ in the order of sums alone, the gap is {found.gap(NULL)}: chance has not grown yet to what it is from "
        f"some {LEAST_STEPS} steps on, and neither has what rounding adds up to.",
    ]


def for_an_answer(found: Comparison) -> str:
    """The command whose runs are long enough."""
    options = found.length(NULL).options(len(found.seeds))
    told = str(found.runs[BASELINE][0].where.get("command", ""))
    begins = "blockscale compare"
    is_ours = told.startswith(begins)
    written = longer(told if is_ours else f"{begins} ...", options)
    # records leave it out
    return written if found.out is None else f"{written} --out {shlex.quote(str(found.out))}"


def longer(command: str, options: Mapping[str, int]) -> str:
    """A command with other values of some options.

    >>> longer("blockscale compare tiny --steps 16 --eval-every=4", {"--steps": 300, "--eval-every": 50, "--seeds": 3})
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
    """How long that command takes here, in parentheses, by the speeds of these runs; evaluations are left out."""
    options, config = found.length(NULL).options(len(found.seeds)), found.runs[BASELINE][0].about["config"]
    speeds = [found.tokens_per_second(arm.name) for arm in found.arms]
    if not all(speeds):
        return ""
    tokens = config["batch"] * config["accumulate"] * config["data"]["sequence"]
    tokens *= options["--steps"] * options["--seeds"]
    jobs = int(found.runs[BASELINE][0].arm.get("jobs", 1))
    minutes = max(1, round(sum(tokens / speed for speed in speeds) / jobs / 60))
    return f" (about {minutes} minute{'s' * (minutes > 1)} on this machine)"
