"""Results of training runs as tables, goals and a picture, from made-up rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.report import index, pages, speed, training, training_picture
from blockscale.bench import trainings
from blockscale.bench.trainings import Convergence, Throughput, Training
from support.bench_rows import product

H200 = {
    "gpu": "NVIDIA H200",
    "commit": "abc1234",
    "command": "blockscale compare",
    "utc": "2026-11-16",
    "torch": "2.11",
}


def convergence(gap: float | None, **fields: object) -> Convergence:
    given = {
        "model": "125m", "arm": "fp8_blockwise", "says": "", "seeds": [0], "steps": 3000, "tokens_per_step": 32768,
        "parameters": 124_000_000, "flop_share": 0.998, "data_hash": "abc", "losses": [1.0], "gap": gap, "error": None,
        "noise": 0.001, "budget": 0.0025, "verdict": "within budget", "why": "", "curves": [[[1, 5.0], [2, 4.0]]],
        "along": [[1, 0.01], [2, 0.0]], "tokens_per_second": None, "peak_memory": None, "shares": {}, "where": H200,
    }  # fmt: skip
    return Convergence(**(given | fields))  # pyright: ignore[reportArgumentType]


def throughput(recipe: str, **fields: object) -> Throughput:
    given = {
        "model": "llama3-8b", "recipe": recipe, "compile": "blocks", "weight_cast": "forward", "layers": 32,
        "sequence": 8192, "batch": 1, "accumulate": 1, "recompute": "selective", "parameters": 8_000_000_000,
        "converted": 7_000_000_000, "flop_share": 0.93, "warm_up": 5, "timed": 15, "step_ms": 1000.0,
        "spread_ms": [995.0, 1005.0], "tokens_per_second": 8192.0, "peak_memory": 100 * 10**9,
        "shares": {"products": 0.7, "casts": 0.05, "attention": 0.15, "other": 0.1}, "where": H200,
    }  # fmt: skip
    return Throughput(**(given | fields))  # pyright: ignore[reportArgumentType]


def met(text: str, start: str) -> list[str]:
    """Cells of the only line that starts with `start`."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


FULL = "125m, fp8_blockwise, 3000 steps:"


def test_goals_without_runs_are_not_measured():
    for goals in (training.goals_table([]), speed.goals_table([])):
        lines = goals.splitlines()[2:]
        assert lines
        assert all("not measured yet" in line and "| yes |" not in line and "| no |" not in line for line in lines)
    assert "training.svg" not in training.long_table([])
    assert training.long_table([]) == speed.long_table([]) == "Not measured yet."
    on_cpu = convergence(0.0, where=H200 | {"gpu": "a CPU"})
    assert met(training.goals_table([on_cpu]), FULL)[1] == "not measured yet"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (convergence(0.0024), "yes"),
        (convergence(0.0026), "no"),
        (convergence(0.0026, noise=0.003), "within noise"),  # the null run has as large a gap
        (convergence(0.00254), "yes"),  # printed as 0.25 %
        (convergence(0.001, verdict="undecided", error=0.01), "mean only"),  # its interval is too wide
        (convergence(0.001, verdict="too short to tell"), "mean only"),
        (convergence(None, verdict="diverged"), "no"),
        (convergence(0.001, flop_share=0.5), "no"),  # half of it stayed in bf16
        (convergence(0.001, steps=300), "-"),
    ],
)
def test_goals_of_convergence(row: Convergence, says: str):
    assert met(training.goals_table([row]), FULL)[5] == says


def test_goals_by_length_and_recipe():
    rows = [
        convergence(0.019, arm="nvfp4", flop_share=0.7),
        convergence(0.021, arm="nvfp4", steps=300, seeds=[0, 1, 2, 3, 4], error=0.001),
    ]
    text = training.goals_table(rows)
    assert met(text, "125m, nvfp4, 3000 steps:")[1:6] == ["+1.90 %", "0.10 %", "70.0 %", "within budget", "yes"]
    assert met(text, "125m, nvfp4, 300 steps")[1] == "+2.10 ± 0.10 %"
    assert met(text, "125m, nvfp4, 300 steps")[5:8] == ["no", "5", "abc1234"]
    more = convergence(0.018, arm="nvfp4", seeds=[0, 1, 2], error=0.001)
    assert met(training.goals_table([*rows, more]), "125m, nvfp4, 3000 steps:")[1] == "+1.80 ± 0.10 %"
    late = "125m, nvfp4, 3000 steps, branched"
    assert met(text, late)[1] == "not measured yet"
    text = training.goals_table([convergence(0.001, arm="nvfp4", branch_at=1000)])
    assert met(text, late)[1] == "+0.10 %"
    assert met(text, "125m, nvfp4, 3000 steps:")[1] == "not measured yet"


def test_goals_of_runs_that_begin_in_bf16():
    """They have their own goal, whose share of FLOPs leaves out the steps in bf16."""
    late = "125m, fp8_blockwise, 3000 steps, 2 seeds, bf16 before step 300"
    row = convergence(0.001, seeds=[1, 2], error=0.001, since=300, flop_share=0.82)
    text = training.goals_table([row])
    assert met(text, late)[1:6] == ["+0.10 ± 0.10 %", "0.10 %", "82.0 %", "within budget", "yes"]
    assert met(text, FULL)[1] == "not measured yet"
    for fields, says in (({"flop_share": 0.8}, "no"), ({"since": 0}, "-"), ({"seeds": [1]}, "-")):
        assert met(training.goals_table([replace(row, **fields)]), late)[5] == says  # pyright: ignore[reportArgumentType]


def test_goals_of_throughput():
    bf16 = throughput("bf16")
    forward = throughput("fp8_blockwise", tokens_per_second=10240.0, peak_memory=101 * 10**9)
    step = throughput(
        "fp8_blockwise", weight_cast="step", tokens_per_second=10000.0, peak_memory=1147 * 10**8, shares={"casts": 0.08}
    )
    text = speed.goals_table([bf16, forward, step])
    start = "llama3-8b, weights cast"
    assert met(text, f"{start} in every forward, tokens/s")[1:5] == ["1.25x", "yes", "32", "8,192"]
    assert met(text, f"{start} in every forward, peak memory")[1:3] == ["1.01x", "no"]
    assert met(text, f"{start} in every forward, casts")[1:3] == ["5.0 %", "yes"]
    assert met(text, f"{start} once a step, tokens/s")[1:3] == ["1.22x", "no"]
    assert met(text, f"{start} once a step, peak memory")[1:3] == ["2.10 bytes", "yes"]
    assert met(text, f"{start} once a step, casts")[1:3] == ["8.0 %", "no"]
    same = speed.goals_table([bf16, replace(forward, peak_memory=100 * 10**9 + 4096)])
    assert met(same, f"{start} in every forward, peak memory")[1:3] == ["1.00x", "yes"], "4096 bytes are no miss"
    text = index.goals_table([product()], [bf16, forward])
    assert f"| {start} in every forward, tokens/s over bf16: 1.25x, 8,192 tokens per step |" in text
    # only with bf16 of the same size beside it
    assert met(speed.goals_table([bf16, replace(forward, layers=16)]), f"{start} in every forward, tok")[1] == (
        "not measured yet"
    )
    few = [replace(row, layers=8) for row in (bf16, forward)]
    assert met(speed.goals_table(few), f"{start} in every forward, tok")[2] == "-", "16 layers at least"


def test_tables_show_the_stored_lines():
    page = "<!-- bench:training -->\n<!-- /bench:training -->\n<!-- bench:speed -->\n<!-- /bench:speed -->\n"
    rows: list[Training] = [
        convergence(0.0, arm="bf16"),
        convergence(0.001, arm="null"),
        convergence(None, losses=[None]),
    ]
    mxfp8 = throughput("mxfp8", tokens_per_second=4096.0, kernel_ms=800.0)
    rows += [throughput("bf16"), mxfp8]
    text = pages.render(page, [], rows)
    assert "| null | 1.0000 | +0.10 % |" in text
    assert "| fp8_blockwise | no number | no number |" in text
    line = "| mxfp8 | blocks | forward | 1,000.0 | 1.0 % | 4,096 | 0.50x | 93.1 GiB | 1.00x | 80 % | 70.0 % | 5.0 % |"
    assert line in text
    assert pages.render(text, [], rows) == text
    # without bf16 that was captured too, there is nothing to compare with
    captured = replace(mxfp8, captured=True)
    assert "| mxfp8 | blocks, captured | forward | 1,000.0 | 1.0 % | 4,096 | - |" in pages.render(
        page, [], [*rows, captured]
    )


def test_the_picture_is_the_same_every_time(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which is not installed")
    rows = [convergence(0.0, arm=arm) for arm in ("bf16", "null", "mxfp8", "another")]
    rows.append(convergence(None, model="moe-500m", curves=[[]], along=[]))
    for name in ("one.svg", "two.svg"):
        training_picture.draw(rows, tmp_path / name)
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "two.svg").read_bytes()
    training_picture.draw([replace(row, along=[[1, 0.05], [2, 0.0]]) for row in rows], tmp_path / "two.svg")
    assert one != (tmp_path / "two.svg").read_bytes()


def test_branched_comparisons_are_pictured_beside_unbranched_ones():
    early, late = convergence(0.0, arm="bf16"), convergence(0.0, arm="bf16", branch_at=1000)
    shorter = replace(late, steps=2000)
    assert training.pictured([shorter, late, early]) == [[early], [late]]
    assert "one run up to step 1,000, 1 seed" in training.long_table([early, late])


@pytest.mark.parametrize(
    ("late", "noise", "reach"), [(0.01, 0.0, 1.3), (0.01, 0.015, 1.95), (0.01, 0.5, 2.6), (0, 0.5, 65)]
)
def test_gap_axis_fits_late_gaps(late: float, noise: float, reach: float):
    """A noise band of up to twice the gaps fits too; a wider band fills the panel."""
    figures = pytest.importorskip("matplotlib.figure", reason="the picture needs matplotlib, which is not installed")
    axes = figures.Figure().subplots()
    along = [[500, -0.09], [1000, late], [3000, late / 2]]
    null = convergence(0.0, arm="null", noise=noise, along=[[3000, 0.0]])
    training_picture._gaps(axes, [null, convergence(0.004, arm="mxfp8", along=along)])
    assert axes.get_ylim() == pytest.approx((-reach, reach))


def test_lines_of_another_setting_are_not_replaced(tmp_path: Path):
    file = tmp_path / "training-h200.jsonl"
    sizes = [{}, {"parameters": 5}, {"tokens_per_step": 5}, {"data_hash": "other"}]
    trainings.write(file, [convergence(0.001, **each) for each in sizes])
    assert len(trainings.read(file)) == 4
    assert len(training.comparisons(trainings.convergences(trainings.read(file)))) == 4
