"""Weights that are codes and scales: their operands, and those of views of them, are casts of the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.autograd.operands import Casts
from blockscale.distributed.gathered import CodedWeight, GatheredWeight
from blockscale.distributed.weight_gather import plan_of
from blockscale.formats.cast_spec import CastSpec
from blockscale.formats.spec import get_format
from support.products import assert_same_bits

RECIPES = {"fp8_blockwise": ("plain", "grid"), "mxfp8_128x128": ("plain", "blocked"), "nvfp4": ("plain", "blocked")}


def gathered(weight: Tensor, name: str) -> GatheredWeight:
    plan = plan_of(bs.get_recipe(name), weight)
    assert not isinstance(plan, str)
    q = bs.quantize(weight, spec_of(name, weight, "plain"))
    codes, scales = (each.contiguous().view(torch.uint8) for each in (q.data, q.scale))
    return GatheredWeight(codes, scales, q.global_scale, plan, tuple(weight.shape), weight.dtype)


def spec_of(name: str, weight: Tensor, layout: str) -> CastSpec:
    plan = Casts(bs.get_recipe(name)).quantized_spec("fprop_w", weight).plan
    amax = "group" if plan.grouped_amax else "tensor"
    return CastSpec(plan.format, plan.rule, amax=amax, scale_layout=layout)


def check(name: str, coded: Tensor, values: Tensor) -> None:
    assert isinstance(coded, CodedWeight)
    assert (coded.shape, coded.stride()) == (values.shape, values.stride())
    for layout in RECIPES[name]:
        for axis, operand in ((-1, coded.row_operand(layout)), (-2, coded.column_operand(layout))):
            want = bs.quantize(values, spec_of(name, values, layout), axis=axis)
            assert (operand.shape, operand.scale_layout, operand.axis) == (want.shape, layout, axis)
            assert_same_bits(operand.data, want.data)
            assert_same_bits(operand.scale, want.scale)
            if want.global_scale is not None:
                assert_same_bits(operand.global_scale, want.global_scale)


@pytest.mark.parametrize("name", RECIPES)
def test_operands_are_casts_of_the_values(name: str):
    for shape in ((192, 320), (3, 192, 320)):
        weight = torch.randn(shape)
        check(name, gathered(weight, name), weight)


@pytest.mark.parametrize("name", RECIPES)
def test_a_transposed_weight_swaps_its_operands(name: str):
    weight = torch.randn(2, 64, 192)
    coded = gathered(weight, name)
    check(name, coded.mT, weight.mT)
    check(name, coded.mT.mT, weight)


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8_128x128"])
def test_two_weights_of_whole_blocks_are_joined(name: str):
    first, second = torch.randn(2, 128, 192), torch.randn(2, 64, 192)
    coded = torch.cat((gathered(first, name), gathered(second, name)), dim=1)
    check(name, coded, torch.cat((first, second), dim=1))


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8_128x128"])
def test_gates_and_ups_are_one_matrix(name: str):
    weight = torch.randn(2, 128, 192)
    coded = gathered(weight, name)
    check(name, coded.flatten(0, 1), weight.flatten(0, 1))
    assert coded.flatten(0, 1).codes.data_ptr() == coded.codes.data_ptr()


def test_no_scale_is_copied_where_the_layout_has_the_same_bytes():
    spec = get_format("fp8_128x128")
    for blocks, is_view in ((4, True), (3, False)):
        coded = gathered(torch.randn(128, blocks * spec.block[1]), "fp8_blockwise")
        assert (coded.row_operand("grid").scale.data_ptr() == coded.scales.data_ptr()) is is_view


VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "blocks with rows of both": lambda one, other: torch.cat((one[:, :64], other), dim=1),
    "joined along another axis": lambda one, other: torch.cat((one, other), dim=0),
    "other axes swapped": lambda one, other: one.transpose(0, 1),
    "rows in another order": lambda one, other: one.view(-1, 128),
}


@pytest.mark.parametrize("label", VIEWS)
def test_other_views_are_of_the_values(label: str):
    weights = [gathered(torch.randn(2, 128, 192), "fp8_blockwise") for _ in range(2)]
    got = VIEWS[label](weights[0], weights[1])
    assert type(got) is Tensor
    assert_same_bits(got, VIEWS[label](*(each.decoded() for each in weights)))
