"""One seed of `make convergence`: recipes reach bf16's loss, gates find the faults that they claim, runs resume."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from blockscale.casts import _reference
from convergence import gates
from convergence.arms import ARMS, BASELINE, FAULTS, HONEST, NULL
from convergence.data import batch, standard_library
from convergence.model import SIZES
from convergence.report import NO, OPEN, YES, Report
from convergence.trainer import Trainer, regress

CPU = torch.device("cpu")
TINY = SIZES["tiny"]
# exactly the gates that find each fault: a gate that rejects everything is as useless as one that rejects nothing
FOUND_BY = {
    "wrong_axis": {"bytes", "product", "gradient"},
    "truncation": {"bytes", "product", "gradient"},
    "ties_away": {"bytes"},
    "floor": {"product"},
    "word_zero": {"bytes", "gradient"},
    "word_stuck": {"bytes"},
}


def start(name: str, seed: int = 0) -> Trainer:
    return Trainer(ARMS[name], seed, TINY, standard_library(), CPU)


@functools.cache
def transformer(name: str) -> float:
    run = start(name)
    first = float(run.advance())
    # log 256 is 5.5, the loss of an untrained model; the rest depends on the text of this Python's library
    assert 5.2 < first < 7
    while run.step < TINY.steps:
        run.advance()
    return run.validate()


@functools.cache
def regression(name: str) -> float:
    return regress(ARMS[name], seed=0, steps=50)


def gap(fit: Any, name: str) -> float:
    return fit(name) / fit(BASELINE) - 1


@pytest.mark.parametrize("fit", [regression, transformer])
def test_null_run_resolves_a_third_of_the_tightest_bound(fit: Any) -> None:
    assert abs(gap(fit, NULL)) < 0.004 / 3


@pytest.mark.parametrize("name", ["mxfp8", "fp8_blockwise"])
@pytest.mark.parametrize("fit", [regression, transformer])
def test_recipe_reaches_the_loss_of_bf16(fit: Any, name: str) -> None:
    assert fit(BASELINE) < (0.35 if fit is regression else 3.6)  # both start far above
    assert abs(gap(fit, name)) <= ARMS[name].bound


@pytest.mark.parametrize(
    ("fit", "name"), [(regression, "wrong_axis"), (regression, "truncation"), (transformer, "wrong_axis")]
)
def test_loss_rejects_gross_faults(fit: Any, name: str) -> None:
    assert not gap(fit, name) <= ARMS[name].bound


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_by_the_gates_that_claim_it(name: str) -> None:
    row = gates.measure(name, "tiny", "cpu")
    found = {gate for gate, passed in gates.passes(row).items() if not passed}
    assert found == FOUND_BY[name], row
    assert ARMS[name].fault.found_by in found


@pytest.mark.parametrize("name", [name for name in HONEST if name != BASELINE])
def test_recipe_passes_every_gate(name: str) -> None:
    row = gates.measure(name, "tiny", "cpu")
    assert all(gates.passes(row).values()), row


def test_fault_ends_with_its_arm() -> None:
    real = _reference.encode, _reference.pack_scale
    with ARMS["truncation"].active():
        assert _reference.encode is not real[0]
    assert (_reference.encode, _reference.pack_scale) == real


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_resumed_run_equals_the_unbroken_one(name: str) -> None:
    unbroken, stopped = start(name), start(name)
    losses = [float(unbroken.advance()) for _ in range(4)]
    first = [float(stopped.advance()) for _ in range(2)]
    resumed = start(name, seed=0)
    resumed.load(stopped.state())
    assert first + [float(resumed.advance()) for _ in range(2)] == losses
    for mine, theirs in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_tick_matters_to_a_resumed_run() -> None:
    """The test above needs stochastic rounding to differ in every step."""
    right, wrong = start("mxfp4"), start("mxfp4")
    right.advance()
    wrong.load(right.state())
    wrong.rng[1] = 0
    right.advance()
    wrong.advance()
    pairs = zip(right.model.parameters(), wrong.model.parameters(), strict=True)
    assert not all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_runs_of_one_seed_are_paired() -> None:
    one, other, unlike = start("bf16"), start("mxfp4"), start("mxfp4", seed=1)
    assert torch.equal(one.batch(), other.batch())
    assert not torch.equal(one.batch(), unlike.batch())
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_text_is_split_by_file() -> None:
    text = standard_library()
    assert len(text.train) > 8 * len(text.held_out) / 2 > 0
    piece = bytes(batch(text.held_out, 1, 200, seed=3)[0].tolist())
    assert piece in bytes(text.held_out.tolist())


def rows(gaps: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Runs whose gaps to a baseline of 2 nats are these, in percent."""
    table = {BASELINE: [0.0] * 5} | gaps
    return [
        {"kind": "run", "arm": name, "seed": seed, "first_loss": 5.5, "curve": [[10, 2 + 0.02 * value]], "final": 2.0}
        for name, values in table.items()
        for seed, value in enumerate(values)
    ]


QUIET, NOISY = [0.01, -0.02, 0.0, 0.02, -0.01], [0.3, -0.4, 0.1, 0.5, -0.2]


def test_verdicts() -> None:
    report = Report.of(
        rows({NULL: QUIET, "mxfp8": [0.1, 0.2, 0.1], "nvfp4": [3.4, 3.5, 3.6], "mxfp4": [1.0, 5.0, 8.0]})
    )
    assert report.gap("mxfp8").value == pytest.approx(0.004 / 3)
    assert [report.loss_gate(name) for name in ("mxfp8", "nvfp4", "mxfp4")] == [YES, NO, OPEN]
    assert report.found_by("nvfp4") == ["loss"]
    assert not report.is_good
    assert [verdict for *_, verdict in report.order()] == [YES, OPEN]


def test_nothing_is_judged_by_a_noisy_harness() -> None:
    report = Report.of(rows({NULL: NOISY, "mxfp8": [0.1] * 5, "truncation": [2.0], "mxfp4": [0.1] * 5}))
    assert [report.loss_gate(name) for name in ("mxfp8", "truncation", "mxfp4")] == [OPEN, OPEN, YES]


def test_wrong_order_is_against_us() -> None:
    report = Report.of(rows({NULL: QUIET, "nvfp4": [2.0, 2.1, 2.2], "mxfp4": [1.0, 1.1, 1.2]}))
    assert [verdict for *_, verdict in report.order()] == [NO]
    assert not report.is_good
