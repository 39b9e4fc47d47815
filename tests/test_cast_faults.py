"""Recipes pass the gates of support/cast_faults.py, and each injected fault is found by the gates that claim it."""

from __future__ import annotations

import functools

import pytest

from blockscale.casts import _reference
from support.cast_faults import FAULTS, RECIPES, found_by, injected, regress

# exactly the gates that find each fault: a gate that rejects everything is as useless as one that rejects nothing
FOUND_BY = {
    "wrong_axis": {"bytes", "product", "gradient"},
    "truncation": {"bytes", "product", "gradient"},
    "ties_away": {"bytes"},
    "floor": {"product"},
    "word_zero": {"bytes", "gradient"},
    "word_stuck": {"bytes"},
}
# largest relative gap of the error to bf16's, after that many steps
BOUNDS, STEPS = {"mxfp8": 0.004, "fp8_blockwise": 0.008}, 24


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_by_the_gates_that_claim_it(name: str):
    assert found_by(FAULTS[name]) == FOUND_BY[name]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_passes_every_gate(name: str):
    assert found_by(RECIPES[name]) == set()


def test_fault_ends_with_its_context():
    real = _reference.encode, _reference.pack_scale
    with injected(FAULTS["truncation"]):
        assert _reference.encode is not real[0]
    assert (_reference.encode, _reference.pack_scale) == real


@functools.cache
def error(name: str) -> float:
    if name in ("bf16", "null"):
        return regress("bf16", STEPS, parts=1 if name == "bf16" else 2)
    arm = (RECIPES | FAULTS)[name]
    with injected(arm):
        return regress(arm.recipe, STEPS)


def gap(name: str) -> float:
    return error(name) / error("bf16") - 1


def test_the_null_run_resolves_a_third_of_the_tightest_bound():
    assert error("bf16") < 0.35  # it starts far above
    assert abs(gap("null")) < min(BOUNDS.values()) / 3


@pytest.mark.parametrize("name", BOUNDS)
def test_recipe_fits_as_well_as_bf16(name: str):
    assert abs(gap(name)) <= BOUNDS[name]


@pytest.mark.parametrize("name", ["wrong_axis", "truncation"])
def test_the_fit_rejects_gross_faults(name: str):
    assert not gap(name) <= BOUNDS["mxfp8"]
