"""Names that are checked without torch equal those of the tables that define them."""

from __future__ import annotations

import pytest

from blockscale import names
from blockscale.autograd import RECIPES, get_recipe
from blockscale.errors import UnknownNameError
from blockscale.formats import FORMATS
from blockscale.roofline.ceilings import NOMINAL
from blockscale.roofline.links import LINKS


def test_names_are_those_of_the_tables() -> None:
    assert tuple(RECIPES) == names.RECIPES
    assert tuple(FORMATS) == names.FORMAT_NAMES
    assert {name: family for family, each in names.FORMATS.items() for name in each} == {
        name: spec.family for name, spec in FORMATS.items()
    }
    assert tuple(NOMINAL) == names.MACHINES
    assert tuple(LINKS) == names.LINKS


@pytest.mark.parametrize(
    "name", [*names.RECIPES, "fp8_blockwise_wgrad_bf16", "mxfp8_fprop_dgrad_bf16", "mxfp8_wgrad_bf16_dgrad_bf16"]
)
def test_a_recipe_that_exists_is_accepted(name: str) -> None:
    """Also a name with some products unquantized."""
    assert get_recipe(name).name == name
    names.check_recipe(name)


@pytest.mark.parametrize(
    "name", ["fp9", "", "mxfp8_fprop_dgrad_wgrad_bf16", "fp8_blockwise_bf16", "fp9_wgrad_bf16", "mxfp8_wgrad_fp8"]
)
def test_a_recipe_that_does_not_exist_is_refused_with_the_same_words(name: str) -> None:
    with pytest.raises(UnknownNameError) as there:
        get_recipe(name)
    with pytest.raises(UnknownNameError) as here:
        names.check_recipe(name)
    assert str(here.value) == str(there.value)
