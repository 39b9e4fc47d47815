"""Tuned plans: files, valid entries, the problems they serve, and launches that take them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale.errors import OptionError
from blockscale.formats import BlockScaled
from blockscale.gemm import exact_mm, heuristics, tuned
from blockscale.gemm.heuristics import Plan, Problem
from blockscale.gemm.ops import gemm_request
from blockscale.hardware import Capability, compiling_for, gpu_name, sm_count

GPU, COUNT = "NVIDIA H200", 132
FILE = "nvidia-h200-132.jsonl"
PROBLEM = Problem(16, 4096, 7168, b_1x128=False, fp32_out=False, sms=COUNT)
HOPPER = Capability("cuda", 90)
SHIPPED = sorted(tuned.SHIPPED.glob("*.jsonl"))  # before a fixture looks elsewhere


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No plans of the user, and none shipped."""
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("BLOCKSCALE_TUNED", str(tmp_path / "own"))
    tuned.forget()
    yield tmp_path / "own"
    tuned.forget()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_plan_is_valid(path: Path) -> None:
    """A plan that is no longer a candidate would be ignored silently, and one that the model chooses is not needed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    gpu, count = lines[0]["gpu"], lines[0]["problem"]["sms"]
    found = tuned.read(path, gpu, count)
    assert path.name == tuned.file_name(gpu, count)
    assert len(found) == len(lines)
    for entry in found.values():
        assert entry.plan != heuristics.choose(entry.problem)[0]
        assert entry.us < 0.98 * entry.model_us
        assert entry.commit


def others(problem: Problem) -> list[Plan]:
    """Plans that the model does not choose."""
    chosen, _ = heuristics.choose(problem)
    return [plan for plan, _ in heuristics.candidates(problem) if plan != chosen]


def entry(problem: Problem = PROBLEM, which: int = 0, gpu: str = GPU) -> tuned.Entry:
    facts = (gpu, "3.6.0", "ptxas 12.9.86", "0.1.0", "abc1234", "2026-11-20T10:00:00Z")
    return tuned.Entry(problem, others(problem)[which], 12.4, (12.0, 12.5), 14.5, *facts)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    tuned.forget()


def changed(**fields: object) -> str:
    """A line with changed fields; None removes a field."""
    line = json.loads(entry().line) | fields
    return json.dumps({name: value for name, value in line.items() if value is not None})


# ---- problems served -------------------------------------------------------------------------------------------------


def test_a_stored_plan_is_taken_and_the_model_chooses_otherwise(folder: Path) -> None:
    stored = entry()
    tuned.store(folder / FILE, [stored])
    chosen = tuned.choose(PROBLEM, GPU)
    assert (chosen.plan, chosen.us, chosen.entry) == (stored.plan, 12.4, stored)
    for other in (replace(PROBLEM, m=4096), replace(PROBLEM, b_1x128=True), replace(PROBLEM, sms=114)):
        assert tuned.choose(other, GPU) == (*heuristics.choose(other), None)
    assert tuned.choose(PROBLEM, "NVIDIA H100").entry is None
    assert tuned.choose(PROBLEM, "").entry is None, "no GPU"


def test_an_entry_serves_problems_with_the_same_candidates(folder: Path) -> None:
    tuned.store(folder / FILE, [entry(), entry(replace(PROBLEM, m=100))])

    def served(**sizes: int) -> bool:
        return tuned.choose(replace(PROBLEM, **sizes), GPU).entry is not None

    assert [m for m in range(1, 300) if served(m=m)] == [*range(1, 17), *range(65, 129)]
    assert [k for k in range(16, 14336, 16) if served(k=k)] == list(range(7168 - 112, 7169, 16))
    assert [n for n in range(16, 8192, 16) if served(n=n)] == [4096]


@pytest.mark.parametrize("add", [False, True])
def test_problems_that_share_an_entry_have_the_same_candidates(add: bool) -> None:
    for n in (576, 7168):
        for k in (16, 128, 144, 2048, 7160, 18432):
            for m in (*range(1, 200), 255, 256, 257, 4033, 4095, 16384):
                problem = Problem(m, n, k, add, add, COUNT, add)
                standing = tuned.same_plans(problem)
                assert [plan for plan, _ in heuristics.candidates(problem)] == [
                    plan for plan, _ in heuristics.candidates(standing)
                ]
                assert tuned.same_plans(standing) == standing


# ---- files -----------------------------------------------------------------------------------------------------------


def test_entry_round_trips_through_its_line(folder: Path) -> None:
    problems = [PROBLEM, Problem(4096, 4096, 512, True, True, COUNT, accumulate=True)]
    stored = [entry(problem, which) for which, problem in enumerate(problems)]
    tuned.store(folder / FILE, stored)
    assert list(tuned.read(folder / FILE, GPU, COUNT).values()) == stored


def test_user_plans_override_shipped_ones(folder: Path) -> None:
    tuned.store(tuned.SHIPPED / FILE, [entry(which=1), entry(replace(PROBLEM, n=512))])
    assert tuned.choose(PROBLEM, GPU).plan == others(PROBLEM)[1]
    tuned.store(folder / FILE, [entry(which=0)])
    assert tuned.choose(PROBLEM, GPU).plan == others(PROBLEM)[0]
    assert tuned.choose(replace(PROBLEM, n=512), GPU).entry is not None


def test_storing_replaces_the_same_problem_and_keeps_every_other_line(folder: Path) -> None:
    foreign, broken = entry(gpu="NVIDIA H100").line, "not ours"
    write(folder / FILE, entry().line, foreign, broken, entry(replace(PROBLEM, n=512)).line)
    tuned.store(folder / FILE, [entry(replace(PROBLEM, m=1), which=1)])
    lines = (folder / FILE).read_text().splitlines()
    assert lines[:3] == [foreign, broken, entry(replace(PROBLEM, n=512)).line]
    assert lines[3:] == [entry(replace(PROBLEM, m=1), which=1).line], "same candidates as M = 16"
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_locations_of_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tuned.own_file(GPU, COUNT) == tmp_path / "own" / FILE
    monkeypatch.delenv("BLOCKSCALE_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tuned.own_file(GPU, COUNT) == tmp_path / "cache" / "blockscale" / "tuned" / FILE
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.own_file(GPU, COUNT) == tmp_path / ".cache" / "blockscale" / "tuned" / FILE
    monkeypatch.setenv("BLOCKSCALE_TUNED", "off")
    with pytest.raises(OptionError, match="BLOCKSCALE_TUNED=off"):
        tuned.own_file(GPU, COUNT)


def test_environment_variable_is_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuned.store(folder / FILE, [entry()])
    tuned.store(tuned.SHIPPED / FILE, [entry(replace(PROBLEM, n=512))])
    assert tuned.choose(PROBLEM, GPU).entry is not None
    monkeypatch.setenv("BLOCKSCALE_TUNED", "off")
    assert tuned.choose(PROBLEM, GPU).entry is None
    assert tuned.choose(replace(PROBLEM, n=512), GPU).entry is None
    monkeypatch.setenv("BLOCKSCALE_TUNED", str(tmp_path / "empty"))
    assert tuned.choose(PROBLEM, GPU).entry is None
    assert tuned.choose(replace(PROBLEM, n=512), GPU).entry is not None


# ---- invalid lines ---------------------------------------------------------------------------------------------------


def plan(**fields: object) -> dict[str, object]:
    return json.loads(entry().line)["plan"] | fields


def tile(**fields: object) -> dict[str, object]:
    return plan(tile=json.loads(entry().line)["plan"]["tile"] | fields)


def sizes(**fields: object) -> dict[str, object]:
    return json.loads(entry().line)["problem"] | fields


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("}{", "JSONDecodeError"),
        ("[]", "is not an entry"),
        ("{}", "KeyError: 'problem'"),
        ('"text"', "is not an entry"),
        (changed(us=None), "KeyError: 'us'"),
        (changed(spread_us=[1.0]), "is not an entry"),
        (changed(us="quick"), "could not convert"),
        (changed(us=float("nan")), "has times nan and 14.5"),
        (changed(model_us=-1), "has times 12.4 and -1.0"),
        (changed(problem=sizes(m=0)), "which are not all positive integers"),
        (changed(problem=sizes(k="7168")), "which are not all positive integers"),
        (changed(problem=sizes(depth=3)), "depth"),
        (changed(plan=tile(stages=7)), "is not considered for"),
        (changed(plan=tile(warps=8)), "warps"),
        (changed(plan=plan(ctas=1000)), "is not considered for"),
        (changed(plan=plan(waves="1")), "is not considered for"),
        (changed(plan=None), "KeyError: 'plan'"),
        (changed(gpu="NVIDIA H200 NVL"), "is for NVIDIA H200 NVL with 132 SMs, and this is NVIDIA H200"),
        (changed(problem=sizes(sms=78)), "with 78 SMs, and this is NVIDIA H200 with 132"),
    ],
)
def test_an_invalid_line_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture, line: str, says: str) -> None:
    good = entry(replace(PROBLEM, n=512))
    write(folder / FILE, good.line, "", line)
    with caplog.at_level(logging.WARNING, logger="blockscale"):
        for _ in range(3):
            assert tuned.choose(PROBLEM, GPU).entry is None
            assert tuned.choose(good.problem, GPU).entry == good
    (record,) = caplog.records
    text = record.getMessage()
    assert f"{FILE}: line 3 " in text
    assert says in text
    assert "Rule: " in text
    assert "Fix: delete what is named, tune again (blockscale tune), or set BLOCKSCALE_TUNED=off" in text


def test_many_invalid_lines_are_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder / FILE, "a", "b", "c", entry().line)
    assert tuned.choose(PROBLEM, GPU).entry is not None
    (record,) = caplog.records
    assert "line 1 " in record.getMessage()
    assert "and 2 more" in record.getMessage()


def test_an_unreadable_file_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    (folder / FILE).write_bytes(b"\xff\xfe\x00")
    assert tuned.choose(PROBLEM, GPU).entry is None
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    tuned.forget()
    assert tuned.choose(PROBLEM, GPU).entry is None
    assert all("cannot be read" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2


def test_the_librarys_own_plan_is_launched(folder: Path) -> None:
    """Equal numbers of another type would be another constant for the compiler."""
    write(folder / FILE, changed(plan=tile(warpgroups=float(entry().plan.tile.warpgroups))))
    taken = tuned.choose(PROBLEM, GPU)
    assert taken.entry is not None
    assert type(taken.plan.tile.warpgroups) is int


# ---- cost ------------------------------------------------------------------------------------------------------------


def test_a_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.store(folder / FILE, [entry()])
    reads: list[Path] = []
    real = Path.read_text

    def read_text(path: Path, *args: object, **named: object) -> str:
        reads.append(path)
        return real(path, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)
    for m in (1, 16, 64, 4096):
        tuned.choose(replace(PROBLEM, m=m), GPU)
    assert sorted(path.parent.name for path in reads) == ["own", "shipped"]
    before, asked = tuned._choose.cache_info(), tuned.entries.cache_info()
    for _ in range(100):
        tuned.choose(PROBLEM, GPU)
    assert len(reads) == 2
    assert tuned._choose.cache_info().hits == before.hits + 100, "one lookup"
    assert tuned.entries.cache_info() == asked


# ---- the launch ------------------------------------------------------------------------------------------------------


def operands(problem: Problem, device: str) -> tuple[BlockScaled, BlockScaled]:
    x, w = (
        torch.randn(rows, problem.k, device=device).bfloat16()
        if device != "meta"
        else torch.empty(rows, problem.k, dtype=torch.bfloat16, device=device)
        for rows in (problem.m, problem.n)
    )
    return bs.quantize(x, "fp8_1x128"), bs.quantize(w, "fp8_1x128" if problem.b_1x128 else "fp8_128x128")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans that are launched during the test."""
    _hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
    seen: list[Plan] = []
    real = _hopper.launch

    def launch(a: BlockScaled, b: BlockScaled, out: torch.Tensor, bias: None, *, accumulate: bool, plan: Plan) -> None:
        seen.append(plan)
        if not out.is_meta:
            real(a, b, out, bias, accumulate=accumulate, plan=plan)

    monkeypatch.setattr(_hopper, "launch", launch)
    return seen


@pytest.mark.parametrize("name", [GPU, "NVIDIA H100", ""])
def test_a_launch_takes_the_plan_only_on_that_gpu(folder: Path, launched: list[Plan], name: str) -> None:
    from blockscale.gemm import _hopper

    tuned.store(folder / FILE, [entry()])
    with compiling_for(HOPPER, COUNT, name):
        a, b = operands(PROBLEM, "meta")
        out = torch.empty(PROBLEM.m, PROBLEM.n, dtype=torch.bfloat16, device="meta")
        _hopper.scaled_mm(a, b, out, bias=None, accumulate=False)
        kernel = _hopper.precompile_key(gemm_request(a, b, torch.bfloat16, bias=False, accumulate=False))
    want = entry().plan if name == GPU else heuristics.choose(PROBLEM)[0]
    assert launched == [want]
    assert kernel[:2] == (want.tile, want.stream_k), "precompile compiles this plan"


def test_explain_shows_the_origin_of_the_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
    a, b = operands(replace(PROBLEM, m=9), "meta")
    away = str(bs.explain("gemm", a, b, on=HOPPER))
    monkeypatch.setattr(_hopper.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_hopper, "capability", lambda device: HOPPER)
    monkeypatch.setattr(_hopper, "sm_count", lambda device: COUNT)
    monkeypatch.setattr(_hopper, "gpu_name", lambda device: GPU)
    here = str(bs.explain("gemm", a, b, on=HOPPER))
    tuned.store(folder / FILE, [entry()])
    after = bs.explain("gemm", a, b, on=HOPPER)
    assert "by the model, which is fitted to one H200" in here
    assert "for an H200 with 132 SMs" in away
    assert "tuned" not in here + away
    assert entry().plan.label in str(after)
    times = "12.4 µs at M = 16, the model's plan 14.5"
    assert f"tuned on this GPU (2026-11-20, triton 3.6.0, ptxas 12.9.86: {times})" in str(after)
    assert after.taken is not None
    assert after.taken.forecast is not None
    assert after.taken.forecast.us == 12.4


@pytest.mark.gpu
@pytest.mark.sm90
def test_a_plan_tuned_on_the_gpu_is_launched(folder: Path, launched: list[Plan]) -> None:
    """Every plan of a small GEMM is correct and timed; the next call launches the stored one."""
    from blockscale.bench import tuning
    from blockscale.bench.harness import Budget
    from blockscale.bench.store import where
    from blockscale.diagnostics.quality import sqnr_db

    gpu = torch.device("cuda", torch.cuda.current_device())
    problem = Problem(200, 1024, 2048, False, False, sm_count(gpu))

    def measure(problem: Problem, plans: list[Plan]) -> dict[Plan, object]:
        return tuning.measure_plans(problem, plans, device=gpu, budget=Budget(3, 0.002))

    (outcome,) = tuning.tune([problem], measure)  # type: ignore[arg-type]
    assert outcome.faults == {}
    assert set(outcome.times) == {plan for plan, _ in tuning.plans_for(problem)}
    # whichever was fastest, keep one that the model would not choose
    other = next(plan for plan in outcome.times if plan != outcome.model)
    slow = replace(outcome.times[outcome.model], us=1e6, low=1e6, high=1e6)
    kept = tuning.entry_of(
        replace(outcome, times={outcome.model: slow, other: outcome.times[other]}), where(gpu, "test")
    )
    assert kept is not None
    assert kept.plan == other
    a, b = operands(problem, "cuda")
    before = bs.scaled_mm(a, b)
    tuned.store(tuned.own_file(gpu_name(gpu), problem.sms), [kept])
    launched.clear()
    after = bs.scaled_mm(a, b)
    assert launched == [other]
    for product in (before, after):
        assert sqnr_db(exact_mm(a, b), product) > 54
    assert "tuned on this GPU" in str(bs.explain("gemm", a, b))
