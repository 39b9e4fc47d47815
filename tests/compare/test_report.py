"""The page: made from stored records alone, self-contained, and without speeds if the runs were on a CPU."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blockscale.cli.compare import STATUSES, status
from blockscale.cli.main import main
from blockscale.compare import page as pages
from blockscale.compare.comparison import BASELINE, CONTROL, NULL, Comparison, arms_of
from blockscale.compare.page import NO_MATPLOTLIB, page, write
from blockscale.compare.report import CPU_SPEED, answer, notes, speedups, summary, table
from blockscale.compare.rows import smooth
from blockscale.compare.stored import Stored
from support.small_runs import small

LAYER = {"layer": "layers.0.<mlp>", "x": 31.5, "w": None, "dy": 30.0, "fprop": 29.0, "dgrad": 28.5, "wgrad": 27.25}


# drawing takes half a second: pages of most tests have no picture
DRAW = pages._curves


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_curves", lambda found: "")


def stored(loss: float, speed: float, device: str, share: float, failed: str = "", steps: int = 400) -> Stored:
    config = {"name": "made up", "steps": steps, "batch": 2, "accumulate": 1, "data": {"sequence": 16}}
    about = {"config": config, "data_hash": "abc123", "parameters": 1000, "flop_share": share, "step": 0}
    end = {"stopped": "done", "loss": loss, "tokens_per_second": speed}
    end["peak_memory"] = 3 * 2**30 if device == "cuda" else None
    curve = {step: loss + 1 / step for step in (1, 2, 3, 4)}
    evaluations = {steps * part // 8: loss + 0.5 * (part < 8) for part in range(1, 9)}
    shares = {"products": 0.5, "casts": 0.1, "attention": 0.1, "other": 0.3}
    layers = [LAYER | {"clipped": 0.01, "underflow": 0.0}]
    where = {"device": device, "name": "a machine", "command": "blockscale compare tiny --steps 4 --recipes mxfp8"}
    return Stored(about, curve, evaluations, end, where, shares, layers, failed)


def made(
    device: str = "cpu",
    mxfp8: tuple[float, ...] = (2.001, 3.0015),
    failed: str = "",
    steps: int = 400,
    control: bool = False,
) -> Comparison:
    """A comparison with mxfp8 within its budget and nvfp4 worse, by default."""
    arms = arms_of(small(), ["mxfp8", "nvfp4"], control=control)
    losses = {
        BASELINE: (2.0, 3.0, 4.0),
        NULL: (2.0001, 3.0002, 4.0003),
        "mxfp8": mxfp8,
        "nvfp4": (2.1, 3.15, 4.2),
        CONTROL: (3.0, 4.5, 6.0),
    }
    speeds = {BASELINE: 100.0, NULL: 90.0, "mxfp8": 140.0, "nvfp4": 80.0, CONTROL: 70.0}
    count = len(mxfp8)
    runs = {
        arm.name: tuple(
            stored(
                each,
                speeds[arm.name],
                device,
                0.23 if arm.name == "nvfp4" else 0.9,
                failed if arm.name == "mxfp8" else "",
                steps,
            )
            for each in losses[arm.name][:count]
        )
        for arm in arms
    }
    return Comparison(arms, tuple(range(count)), runs)


def alone(found: Comparison) -> Comparison:
    """Without nvfp4."""
    return Comparison(found.arms[:3], found.seeds, found.runs)


def rows_of(found: Comparison) -> dict[str, dict[str, str]]:
    return {row["recipe"]: row for row in table(found)}


def test_the_table_has_what_the_runs_have():
    rows = rows_of(made("cuda"))
    assert list(rows) == ["bf16", "null", "mxfp8", "nvfp4"]
    assert rows["bf16"]["final loss"] == "2.5000"
    assert rows["bf16"]["verdict"] == rows["null"]["verdict"] == ""
    assert rows["mxfp8"]["gap to bf16"] == "+0.05 ± 0.00 %"
    assert rows["mxfp8"]["speedup"] == "1.40x"
    assert rows["mxfp8"]["peak memory"] == "3.00 GiB"
    assert rows["mxfp8"]["verdict"] == "within budget 0.25% (90% converted)"
    assert rows["nvfp4"]["gap to bf16"].startswith("+5.00")
    assert rows["nvfp4"]["verdict"] == "worse (23% converted)"


@pytest.mark.parametrize("steps", [4, 400])
def test_the_share_of_converted_flops_stands_beside_every_verdict(steps: int):
    """NVFP4 keeps blocks in bf16: on a small model its verdict covers a small share of the FLOPs."""
    found = made(steps=steps)
    assert [row["verdict"].rpartition(" (")[2] for row in table(found)[2:]] == ["90% converted)", "23% converted)"]
    assert "(23% converted)</td>" in page(found)


def test_a_run_that_failed_at_once_has_no_share():
    found = made(failed="loss nan")
    for run in found.runs["mxfp8"]:
        del run.about["flop_share"]
    assert rows_of(found)["mxfp8"]["verdict"] == "diverged (? converted)"
    assert page(found)


def first_sentence(text: str) -> str:
    found = re.search(r"</h1><p class='answer'>(.*?)</p>", text)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            made(),
            "No. mxfp8: within budget 0.25% (90% converted), gap +0.05 ± 0.00 %; "
            "nvfp4: worse (23% converted), gap +5.00 ± 0.00 %.",
        ),
        (
            made(steps=4),
            "Too short to tell: 4 steps, 4 evaluations and 2 seeds were run; a verdict needs 300 steps (--steps 300), "
            "and 3 seeds (--seeds 3) or 8 evaluations (--eval-every 37).",
        ),
        (
            made(steps=4, mxfp8=(2.2, 3.3, 4.4)),
            "No. mxfp8: worse (90% converted), gap +10.00 ± 0.00 %; nvfp4: too short to tell (23% converted), gap "
            "+5.00 ± 0.00 %. 4 steps, 4 evaluations and 3 seeds were run; a verdict needs 300 steps (--steps 300).",
        ),
        (
            made(failed="loss nan"),
            "No. mxfp8: diverged (90% converted), gap not finite; nvfp4: worse (23% converted), gap +5.00 ± 0.00 %.",
        ),
        (
            alone(made()),
            "Yes. mxfp8: within budget 0.25% (90% converted), gap +0.05 ± 0.00 %.",
        ),
        (
            alone(made(mxfp8=(2.0, 3.03))),
            "Undecided. mxfp8: undecided (90% converted), gap +0.50 ± 6.35 %.",
        ),
    ],
)
def test_the_first_sentence_answers_by_the_verdicts(found: Comparison, says: str):
    assert first_sentence(page(found)) == answer(found) == summary(found)[0] == says


def test_without_recipes_there_is_nothing_to_answer():
    found = made()
    plain = Comparison(found.arms[:2], found.seeds, found.runs)
    assert answer(plain) == "Only bf16 was run: there is no recipe to compare with it."
    assert page(plain)


def test_a_short_run_is_neither_green_nor_red():
    text = page(made(steps=4))
    assert text.count("<td class='left short'>too short to tell") == 2
    assert "class='left good'" not in text
    assert "class='left bad'" not in text
    long = page(made())
    assert "class='left good'>within budget" in long
    assert "class='left bad'>worse" in long
    assert "A short run shows gross errors" in text
    assert "A short run shows gross errors" not in long


def test_the_control_is_not_a_recipe():
    """The control must be worse; that changes neither the answer nor the exit status."""
    good = made("cuda", mxfp8=(2.001, 3.0015, 4.002), steps=4, control=True)
    assert rows_of(good)["broken"]["verdict"] == "worse (90% converted)"
    assert rows_of(good)["broken"]["speedup"] == ""
    assert any(note.startswith("broken: ") and "as it must" in note for note in notes(good))
    assert "broken" not in answer(good)
    assert "broken" not in speedups(good)
    assert status(good, require_verdict=False) == 0
    for run, loss in zip(good.runs[CONTROL], (2.0, 3.0, 4.0), strict=True):
        run.end["loss"] = loss
    assert any("this comparison would miss such a fault" in note for note in notes(good))


@pytest.mark.parametrize(
    ("found", "plain", "required"),
    [
        (made(), 1, 1),  # nvfp4 is worse
        (made(failed="loss nan"), 1, 1),
        (made(steps=4), 0, 3),
        (made(mxfp8=(2.001, 3.0015, 4.002)), 1, 1),
    ],
)
def test_the_status_is_that_of_the_verdicts(found: Comparison, plain: int, required: int):
    assert (status(found, require_verdict=False), status(found, require_verdict=True)) == (plain, required)
    verdict = found.verdicts()["mxfp8"]
    assert status(alone(found), require_verdict=True) == (1 if verdict.is_bad else 0 if verdict.is_good else 3)


def test_an_undecided_recipe_has_no_verdict():
    found = made(mxfp8=(2.0, 3.03))
    assert found.verdicts()["mxfp8"].kind == "undecided"
    assert (status(alone(found), require_verdict=False), status(alone(found), require_verdict=True)) == (0, 3)


def test_one_seed_says_that_it_is_one():
    said = " ".join(notes(made(mxfp8=(2.001,))))
    assert "One seed" in said
    assert "Student" not in said
    assert "±" not in rows_of(made(mxfp8=(2.001,)))["mxfp8"]["gap to bf16"]


def test_a_cpu_shows_no_speed_and_says_that_it_needs_a_gpu():
    on_cpu, on_gpu = made("cpu"), made("cuda")
    assert [*table(on_cpu)[0]] == ["recipe", "verdict", "gap to bf16", "final loss"]
    for text in (page(on_cpu), " ".join(summary(on_cpu))):
        assert CPU_SPEED in text
        assert not re.search(r"tokens/s|speedup|\dx\b|GiB|step(.|&#x27;)s time goes", text)
    assert speedups(on_gpu) == "Tokens/s beside bf16: mxfp8 1.40x, nvfp4 0.80x."
    text = page(on_gpu)
    assert CPU_SPEED not in text
    assert CPU_SPEED not in summary(on_gpu)
    assert all(said in text for said in (speedups(on_gpu), ">speedup</th>", "Where a step&#x27;s time goes"))


def test_runs_that_shared_a_gpu_show_no_speed():
    found = made("cuda")
    for runs in found.runs.values():
        for run in runs:
            run.arm["jobs"] = 2
    assert [*table(found)[0]] == ["recipe", "verdict", "gap to bf16", "final loss", "peak memory"]
    assert "Runs shared the machine" in speedups(found)


def test_noise_that_hides_a_budget_is_named():
    found = made()
    for run, loss in zip(found.runs[NULL], (2.01, 2.99), strict=True):
        run.end["loss"] = loss
    assert any("that verdict is unreliable" in note and "mxfp8" in note for note in notes(found))


def test_a_failed_run_is_on_the_page():
    text = page(made(failed="step 3: loss nan; first in layers.0"))
    assert "diverged" in text
    assert "first in layers.0" in text


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "_curves", DRAW)
    path = write(made(), tmp_path / "deep" / "report.html")
    text = path.read_text()
    parser = _Balance()
    parser.feed(text)
    assert parser.open == []
    outside = re.sub(r"src='data:image/svg\+xml;base64,[A-Za-z0-9+/=]+'", "", text)
    assert len(outside) < len(text)
    assert not re.search(r"(https?:)?//[a-z]|<script|<link|@import|url\(|src=", outside)
    assert "prefers-color-scheme: dark" in text
    assert "27.2 dB, wgrad of layers.0.&lt;mlp&gt;" in text
    assert "abc123" in text
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_curves_need_matplotlib_and_say_so(monkeypatch: pytest.MonkeyPatch):
    assert DRAW(made()) == DRAW(made()), "the same runs give the same picture"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert NO_MATPLOTLIB in DRAW(made())


def test_curves_are_drawn_of_runs_that_failed_at_once():
    found = made(failed="loss nan", control=True)
    for run in found.runs["mxfp8"]:
        run.losses.clear()
    assert "data:image/svg+xml" in DRAW(found)


def test_curves_are_smoothed_and_thinned():
    points = smooth([(step, 1.0) for step in range(1, 2001)])
    assert (points[-1][1], len(points) <= 400) == (1.0, True)
    assert smooth([(1, 4.0), (2, 2.0)]) == [(1.0, 4.0), (2.0, 2.0)]


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        write(made(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_two_steps_of_one_seed_are_too_short_to_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["compare", "tiny", "--recipes", "mxfp8", "--steps", "2", "--eval-every", "1", "--eval-batches", "1"]
    words += ["--batch", "2", "--sequence", "8", "--layers", "1", "--device", "cpu", "--out", str(tmp_path)]
    words += ["--recipe.keep-first", "0"]
    assert main([*words, "--budget", "50"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "run 3 of 3: mxfp8, seed 0" in said
    assert "too short to tell (" in said
    assert "within" not in said
    assert "a verdict needs 300 steps (--steps 300), and 3 seeds (--seeds 3) or 8 evaluations" in said
    assert "speedup" not in said
    assert "Speed needs a GPU" in said
    text = (tmp_path / "report.html").read_text()
    assert first_sentence(text).startswith("Too short to tell: 2 steps, 2 evaluations and 1 seed were run")
    # read again, and a script that needs an answer gets a status of its own
    assert main([*words, "--budget", "50", "--require-verdict"]) == 3
    assert "run 3 of 3" not in capsys.readouterr().out


def test_the_help_names_every_status(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["compare", "tiny", "--help"])
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert STATUSES in said
    pages = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    assert [number in STATUSES for number in ("0", "1", "2", "3", "130")] == [True] * 5
    assert re.findall(r"^\| (\d+) \|", pages, flags=re.MULTILINE) == ["0", "1", "2", "3", "130"]


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--budget", "0"], ["--recipes", "fp9"]])
def test_impossible_options_are_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", "tiny", *words, "--out", str(tmp_path)]) == 2
    assert "Fix:" in capsys.readouterr().err
