"""The page: made of stored figures alone, needs nothing from outside, and says what a CPU cannot tell."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from blockscale.cli.main import main
from blockscale.train.charts import Line, lines, nice
from blockscale.train.compare import BASELINE, NULL, Comparison, arms_of
from blockscale.train.report import CPU_SPEED, HEAD, notes, page, smooth, table, write
from blockscale.train.stored import Stored
from small_runs import small

LAYER = {"layer": "layers.0.<mlp>", "x": 31.5, "w": None, "dy": 30.0, "fprop": 29.0, "dgrad": 28.5, "wgrad": 27.25}


def stored(loss: float, speed: float, device: str, share: float, failed: str = "") -> Stored:
    config = {"name": "made up", "steps": 4, "batch": 2, "accumulate": 1, "data": {"sequence": 16}}
    about = {"config": config, "data_hash": "abc123", "parameters": 1000, "flop_share": share, "step": 0}
    end = {"stopped": "done", "loss": loss, "tokens_per_second": speed}
    end["peak_memory"] = 3 * 2**30 if device == "cuda" else None
    curve = {step: loss + 1 / step for step in (1, 2, 3, 4)}
    shares = {"products": 0.5, "casts": 0.1, "attention": 0.1, "other": 0.3}
    layers = [LAYER | {"clipped": 0.01, "underflow": 0.0}]
    return Stored(
        about, curve, {2: loss + 0.5, 4: loss}, end, {"device": device, "name": "a machine"}, shares, layers, failed
    )


def made(device: str = "cpu", mxfp8: tuple[float, ...] = (2.001, 3.0015), failed: str = "") -> Comparison:
    arms = arms_of(small(), ["mxfp8", "nvfp4"])
    losses = {BASELINE: (2.0, 3.0), NULL: (2.0001, 3.0002), "mxfp8": mxfp8, "nvfp4": (2.2, 3.3)}
    speeds = {BASELINE: 100.0, NULL: 90.0, "mxfp8": 140.0, "nvfp4": 80.0}
    count = len(mxfp8)
    runs = {
        name: tuple(
            stored(each, speeds[name], device, 0.9, failed if name == "mxfp8" else "") for each in values[:count]
        )
        for name, values in losses.items()
    }
    return Comparison(arms, tuple(range(count)), runs)


def test_the_table_has_what_the_runs_have():
    rows = {row[0]: dict(zip(HEAD, row, strict=True)) for row in table(made("cuda"))}
    assert list(rows) == ["bf16", "null", "mxfp8", "nvfp4"]
    assert rows["bf16"]["final loss"] == "2.5000"
    assert rows["bf16"]["verdict"] == rows["null"]["verdict"] == ""
    assert rows["mxfp8"]["gap to bf16"] == "+0.05 ± 0.00 %"
    assert rows["mxfp8"]["speedup"] == "1.40x"
    assert rows["mxfp8"]["peak memory"] == "3.00 GiB"
    assert rows["mxfp8"]["low FLOPs"] == "90%"
    assert rows["mxfp8"]["verdict"] == "within budget 0.25%"
    assert rows["nvfp4"]["gap to bf16"].startswith("+10.00")
    assert rows["nvfp4"]["verdict"] == "worse"


def test_one_seed_says_that_it_is_one():
    said = " ".join(notes(made(mxfp8=(2.001,))))
    assert "One seed" in said
    assert "Student" not in said
    assert "±" not in table(made(mxfp8=(2.001,)))[2][2]


def test_a_cpu_says_that_its_speed_means_nothing():
    assert CPU_SPEED in notes(made("cpu"))
    assert CPU_SPEED in page(made("cpu"))
    assert CPU_SPEED not in notes(made("cuda"))
    assert CPU_SPEED not in page(made("cuda"))


def test_noise_that_hides_a_budget_is_named():
    found = made()
    for run, loss in zip(found.runs[NULL], (2.01, 2.99), strict=True):
        run.end["loss"] = loss
    assert any("too much to trust" in note and "mxfp8" in note for note in notes(found))


def test_a_run_that_broke_down_is_on_the_page():
    text = page(made(failed="step 3: loss nan; first in layers.0"))
    assert "diverged" in text
    assert "first in layers.0" in text


class _Balance(HTMLParser):
    VOID = ("meta", "line", "rect", "circle", "polyline", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_axis_is_made_for_late_gaps():
    """A large early gap must not flatten the rest, and is cut off, not moved."""
    curve = Line("mxfp8", [(10.0, 9.0), (20.0, 0.5), (30.0, 0.4)], 1)
    whole, late = lines([curve], "gap"), lines([curve], "gap", late=1 / 3)
    assert ">8<" in whole
    assert ">8<" not in late
    assert ">0.5<" in late
    assert "clip-path='url(#plot)'" in late
    assert (whole.count("<circle"), late.count("<circle")) == (3, 2)


def test_the_page_is_whole_and_needs_nothing(tmp_path: Path):
    path = write(made(), tmp_path / "deep" / "report.html")
    text = path.read_text()
    parser = _Balance()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(https?:)?//[a-z]|<script|<link|@import|url\((?!#)|src=", text)
    assert "prefers-color-scheme: dark" in text
    assert "layers.0.&lt;mlp&gt;" in text
    assert "27.2 dB, wgrad of layers.0.&lt;mlp&gt;" in text
    assert "abc123" in text
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_curves_survive_what_is_no_number():
    assert "nothing to draw" in lines([Line("a", [(1, float("nan"))], 0)], "loss")
    assert "nan" not in lines([Line("a", [(1, 2.0), (2, float("nan")), (3, 1.0)], 0)], "loss")
    assert "inf" not in lines([Line("a", [(1, 2.0)], 0)], "loss", band=float("inf"))


def test_ticks_cover_and_are_round():
    assert nice(1.9, 6.2) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert nice(3.0, 3.0)[0] <= 3.0 <= nice(3.0, 3.0)[-1]
    assert smooth([(step, 1.0) for step in range(1, 2001)])[-1][1] == 1.0
    assert len(smooth([(step, 1.0) for step in range(1, 2001)])) <= 400


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        write(made(), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_the_command_runs_reads_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["compare", "tiny", "--recipes", "mxfp8", "--steps", "2", "--eval-every", "1", "--eval-batches", "1"]
    words += ["--batch", "2", "--sequence", "8", "--layers", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--budget", "50"]) == 0
    said = capsys.readouterr().out
    assert "run 3 of 3: mxfp8, seed 0" in said
    assert "speeds, memory and shares" in said
    assert (tmp_path / "report.html").exists()
    # read again, and a budget that nothing meets: the status says so
    status = main([*words, "--budget", "0.0000001"])
    again = capsys.readouterr().out
    assert "run 3 of 3" not in again
    assert (status == 1) == (" worse" in again)


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--budget", "0"], ["--recipes", "fp9"]])
def test_impossible_options_are_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", "tiny", *words, "--out", str(tmp_path)]) == 2
    assert "Fix:" in capsys.readouterr().err
