"""Layouts: offsets of every code and scale, byte by byte, against the formulas; groups padded to 128."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracles
from blockscale.formats import FORMATS, padded_ends, padded_length
from blockscale.formats.layout import (
    code_bytes,
    code_row_bytes,
    locate,
    pack_scale,
    scale_buffer_shape,
    scale_counts,
    scale_view,
    scale_view_shape,
    unpack_scale,
)
from support.helpers import MX, bits, expand, golden, same_bits

SIZES = [(0, 64), (1, 1), (5, 33), (32, 128), (127, 300), (128, 512), (129, 517), (300, 600)]
"""(rows, length): on and off the 128x4 grid of the swizzle, with rows % 4 != 0 for mn_major."""
ALL_LAYOUTS = [(name, layout) for name, spec in FORMATS.items() for layout in spec.layouts]


def random_scales(form: str, rows: int, length: int, device: torch.device, lead: tuple[int, ...] = ()) -> torch.Tensor:
    """Scales with nonzero bytes, so that pads differ from scales."""
    spec = FORMATS[form]
    rng, shape = np.random.default_rng(rows * 1000 + length), (*lead, *scale_counts(spec, rows, length))
    if spec.family == "fp8":
        return torch.from_numpy(rng.random(shape, dtype=np.float32) + 1).to(device)
    return torch.from_numpy(rng.integers(1, 255, shape, dtype=np.uint8)).to(device).view(spec.scale_dtype)


@pytest.mark.parametrize(("rows", "length"), SIZES)
@pytest.mark.parametrize(("form", "layout"), ALL_LAYOUTS)
def test_every_layout_round_trips(form: str, layout: str, rows: int, length: int, device: torch.device) -> None:
    spec = FORMATS[form]
    for lead in ((), (2,), (2, 3)):
        plain = random_scales(form, rows, length, device, lead)
        buffer = pack_scale(spec, plain, rows, length, layout)
        assert buffer.is_contiguous()
        assert buffer.dtype == spec.scale_dtype
        assert buffer.shape == (*lead, *scale_buffer_shape(spec, rows, length, layout))
        view = scale_view(spec, buffer, rows, length, layout)
        assert view.data_ptr() == buffer.data_ptr()
        assert view.shape == (*lead, *scale_view_shape(spec, rows, length, layout))
        same_bits(bits(unpack_scale(spec, view, rows, length, layout)), bits(plain))


@pytest.mark.parametrize(("rows", "length"), SIZES[1:])
@pytest.mark.parametrize("form", [name for name, layout in ALL_LAYOUTS if layout == "blocked"])
def test_blocked_offsets(form: str, rows: int, length: int, device: torch.device) -> None:
    """Each scale at the offset of the formula, zeros elsewhere; scales of 2-D blocks are repeated per row."""
    spec = FORMATS[form]
    plain = random_scales(form, rows, length, device)
    got = bits(pack_scale(spec, plain, rows, length, "blocked"))
    granule = 32 if spec.family == "mx" else 16
    want = np.repeat(np.repeat(bits(plain), spec.block[0], axis=0), spec.block[1] // granule, axis=1)
    want = want[:rows, : -(-length // granule)]
    same_bits(got, oracles.swizzle_32_4_4(want))
    r, c = np.indices(want.shape)
    same_bits(got[oracles.blocked_offset(r, c, want.shape[1])], want)
    assert np.count_nonzero(got) == want.size


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 3), (128, 4), (129, 5), (300, 9), (512, 16)])
def test_blocked_equals_torch(rows: int, cols: int, device: torch.device) -> None:
    common = pytest.importorskip("torch.testing._internal.common_quantized", reason="torch's own swizzle for its tests")
    to_blocked = getattr(common, "to_blocked", None)
    if to_blocked is None:
        pytest.skip("this torch has no to_blocked")
    plain = random_scales("mxfp8_e4m3", rows, cols * 32, device)
    theirs = to_blocked(plain.view(torch.uint8)).reshape(-1)
    same_bits(bits(pack_scale(FORMATS["mxfp8_e4m3"], plain, rows, cols * 32, "blocked")), bits(theirs))


def test_blocked_leading_dimensions_are_independent(device: torch.device) -> None:
    plain = random_scales("mxfp4", 37, 200, device, (3,))
    buffer = bits(pack_scale(FORMATS["mxfp4"], plain, 37, 200, "blocked"))
    for index in range(3):
        same_bits(buffer[index], oracles.swizzle_32_4_4(bits(plain)[index]))


@pytest.mark.parametrize(("rows", "length"), SIZES[1:])
def test_mn_major_index(rows: int, length: int, device: torch.device) -> None:
    spec = FORMATS["fp8_1x128"]
    plain = random_scales("fp8_1x128", rows, length, device)
    buffer = pack_scale(spec, plain, rows, length, "mn_major")
    same_bits(bits(buffer), oracles.mn_major(bits(plain).view(np.float32)))
    view = scale_view(spec, buffer, rows, length, "mn_major")
    assert view.stride() == (1, -(-rows // 4) * 4)
    m, kb = np.indices(plain.shape)
    same_bits(bits(buffer).reshape(-1)[oracles.mn_major_index(m, kb, rows)], bits(plain))


def test_grid_rows_are_padded_to_four(device: torch.device) -> None:
    spec = FORMATS["fp8_128x128"]
    plain = random_scales("fp8_128x128", 300, 600, device)
    buffer = pack_scale(spec, plain, 300, 600, "grid")
    assert buffer.shape == (3, 8)
    same_bits(bits(buffer)[:, :5], bits(plain))
    assert not bits(buffer)[:, 5:].any()
    assert scale_view(spec, buffer, 300, 600, "grid").stride() == (8, 1)


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 129])
@pytest.mark.parametrize("form", FORMATS)
def test_code_rows_are_multiples_of_16_bytes(form: str, length: int) -> None:
    spec = FORMATS[form]
    packed = -(-length // 2) if spec.element.bits == 4 else length
    assert code_bytes(spec, length) == packed
    row = code_row_bytes(spec, length)
    assert row % 16 == 0
    assert packed <= row < packed + 16


def test_code_row_of_33_fp4() -> None:
    assert (code_bytes(FORMATS["mxfp4"], 33), code_row_bytes(FORMATS["mxfp4"], 33)) == (17, 32)


OFFSET_CASES = [case for case in golden("layouts") if case["op"] == "offset"]


@pytest.mark.parametrize("case", OFFSET_CASES, ids=lambda case: case["name"])
def test_golden(case: dict, device: torch.device) -> None:
    """A single nonzero scale in a zero matrix is stored at the golden offset."""
    form, layout, block = {"swizzle_32_4_4": (MX[0], "blocked", 32), "mn_major": ("fp8_1x128", "mn_major", 128)}[
        case["format"]
    ]
    rows = case.get("rows", 256)
    for (row, column), offset in zip(case["positions"], expand(case["expect"]["offsets"]), strict=True):
        plain = torch.zeros(rows, case["columns"], dtype=FORMATS[form].scale_dtype, device=device)
        plain.view(torch.uint8 if block == 32 else torch.float32)[row, column] = 1
        buffer = pack_scale(FORMATS[form], plain, rows, case["columns"] * block, layout)
        assert np.flatnonzero(bits(buffer)).tolist() == [offset]
        if "shape" in case["expect"]:
            assert list(buffer.shape) == case["expect"]["shape"]


# ---- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        ([0, 1, 31, 127, 129], [0, 0, 128, 256, 384]),
        ([128, 128], [0, 128]),
        ([0, 0, 0], [0, 0, 0]),
        ([129, 0, 1], [0, 256, 256]),
    ],
)
def test_padded_groups(sizes: list[int], starts: list[int], device: torch.device) -> None:
    offs = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)
    ends = padded_ends(offs)
    assert ends.dtype == torch.int64
    assert ends.tolist() == [start + -(-size // 128) * 128 for start, size in zip(starts, sizes, strict=True)]
    assert int(ends[-1]) <= padded_length(sum(sizes), len(sizes))


def test_padded_length() -> None:
    assert padded_length(288, 5) == 1024
    assert padded_length(0, 0) == 0
    assert padded_length(1, 0) == padded_length(1, 1) == 128
    for rows in range(1, 300, 7):
        for groups in range(1, 6):
            length = padded_length(rows, groups)
            assert length % 128 == 0
            assert length == -(-(rows + 127 * groups) // 128) * 128


def test_locate(device: torch.device) -> None:
    ends = torch.tensor([0, 3, 3, 7], device=device)
    group, index = locate(torch.arange(10, device=device), ends)
    assert group.tolist() == [1, 1, 1, 3, 3, 3, 3, 4, 4, 4]
    assert index.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    group, index = locate(torch.arange(3, device=device), ends[:0])
    assert (group.tolist(), index.tolist()) == ([0, 0, 0], [0, 1, 2])
