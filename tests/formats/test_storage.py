"""Operands as plain tensors and back: the same bytes, in memory that kernels take."""

from __future__ import annotations

import json

import pytest
import torch

import blockscale as bs
from blockscale.errors import BlockscaleError
from blockscale.formats import FORMATS, BlockScaled
from blockscale.formats.storage import from_tensors, to_tensors
from support.checkpoints import check_equal


def stored(q: BlockScaled) -> BlockScaled:
    """The operand after its way through JSON and new tensors."""
    tensors, fields = to_tensors(q)
    assert all(each.is_contiguous() for each in tensors.values())
    copies = {name: each.clone() for name, each in tensors.items()}
    return from_tensors(copies, json.loads(json.dumps(fields)), scale_layout=q.scale_layout)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", FORMATS)
def test_operands_come_back(format: str, axis: int):
    for shape in ((100, 72), (130, 300), (2, 33, 160)):
        for layout in FORMATS[format].layouts:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            q = bs.quantize(x, format, axis=axis).with_layout(layout)
            check_equal(stored(q), q)


@pytest.mark.parametrize("format", [name for name, spec in FORMATS.items() if not spec.is_2d])
def test_padded_groups_come_back(format: str):
    offs = torch.tensor([5, 70, 100], dtype=torch.int32)
    q = bs.quantize(torch.randn(100, 64, generator=torch.Generator().manual_seed(0)), format, axis=-2, offs=offs)
    found = stored(q)
    assert found.groups == q.groups
    assert torch.equal(bs.dequantize(found, offs=offs), bs.dequantize(q, offs=offs))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_rotated_operands_come_back(format: str):
    x = torch.randn(40, 72, generator=torch.Generator().manual_seed(0))
    q = bs.quantize(x, bs.CastSpec(format, hadamard=True))
    assert q.length > 72, "a rotated tail is longer than its source"
    check_equal(stored(q), q)


def test_stored_tensors_are_as_short_as_they_can_be():
    tensors, _ = to_tensors(bs.quantize(torch.ones(3, 72), "mxfp4", scale_layout="blocked"))
    assert {name: tuple(each.shape) for name, each in tensors.items()} == {"data": (3, 36), "scale": (3, 3)}
    tensors, _ = to_tensors(bs.quantize(torch.ones(3, 72), "mxfp6_e2m3"))
    assert tensors["data"].shape == (3, 54)


def test_parts_that_do_not_fit_are_refused():
    tensors, fields = to_tensors(bs.quantize(torch.ones(3, 72), "mxfp4"))
    with pytest.raises(BlockscaleError, match="an operand without scale"):
        from_tensors({"data": tensors["data"]}, fields)
    with pytest.raises(BlockscaleError, match="an operand without shape"):
        from_tensors(tensors, {"format": "mxfp4"})
    with pytest.raises(BlockscaleError, match=r"codes \(3, 35\)"):
        from_tensors(tensors | {"data": tensors["data"][:, :35]}, fields)
    tensors_of_nvfp4, fields_of_nvfp4 = to_tensors(bs.quantize(torch.ones(3, 72), "nvfp4"))
    with pytest.raises(BlockscaleError, match="global_scale is missing"):
        from_tensors({name: tensors_of_nvfp4[name] for name in ("data", "scale")}, fields_of_nvfp4)
    with pytest.raises(BlockscaleError, match="scale layout 'grid' does not exist"):
        from_tensors(tensors, fields, scale_layout="grid")
