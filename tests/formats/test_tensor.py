"""`BlockScaled`: views, storage as docs/numerics.md describes it, pytree, repr."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import blockscale
from blockscale import BlockScaled
from blockscale.formats import FORMATS
from blockscale.formats.tensor import has_canonical_strides, is_row_slice, rows_of
from support.helpers import bits, codes_of, same_bits, same_operand, scales_of

ALL_LAYOUTS = [(name, layout) for name, spec in FORMATS.items() for layout in spec.layouts]
SHAPES = [(5, 33), (37, 130), (130, 37), (2, 5, 33), (2, 3, 18, 20)]


def source(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def storage(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of the buffer behind a view that starts at its first byte."""
    assert tensor.storage_offset() == 0
    return bits(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()))


# ---- storage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_codes_end_with_zero_codes(form: str, shape: tuple[int, ...], axis: int, device: torch.device) -> None:
    q = blockscale.quantize(source(*shape, device=device), form, axis=axis)
    spec, rows, length = FORMATS[form], shape[-3 - axis], shape[axis]
    shown = -(-length // 2) if spec.element.bits == 4 else length
    pitch = -(-shown // 16) * 16
    assert q.shape == shape
    assert (q.axis, q.length, q.rows) == (axis, length, rows)
    assert q.data.dtype == spec.data_dtype
    data = q.data if axis == -1 else q.data.mT
    assert data.shape == (*shape[:-2], rows, shown)
    assert data.stride()[-2:] == (pitch, 1)
    buffer = storage(q.data).reshape(-1, pitch)
    assert buffer.shape[0] == np.prod(shape[:-2], dtype=int) * rows
    same_bits(buffer[:, :shown], bits(data.view(torch.uint8)).reshape(-1, shown))
    assert not buffer[:, shown:].any()
    if spec.element.bits == 4 and length % 2:
        assert not (buffer[:, shown - 1] >> 4).any()


@pytest.mark.parametrize("axis", [-1, -2])
def test_plain_scales_are_row_major(axis: int, device: torch.device) -> None:
    for form, shape in (("mxfp4", (5, 2)), ("nvfp4", (5, 3)), ("nvfp4_16x16", (1, 3)), ("mxfp8_e4m3_128x128", (1, 1))):
        x = source(5, 40, device=device) if axis == -1 else source(40, 5, device=device)
        q = blockscale.quantize(x, form, axis=axis)
        scale = q.scale if axis == -1 else q.scale.mT
        assert scale.shape == shape
        assert scale.is_contiguous()
        assert scale.dtype == FORMATS[form].scale_dtype


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("rows", "length"), [(5, 300), (8, 128), (1, 1), (127, 257)])
def test_mn_major_strides(rows: int, length: int, axis: int, device: torch.device) -> None:
    x = source(rows, length, device=device)
    q = blockscale.quantize(x if axis == -1 else x.mT, "fp8_1x128", axis=axis)
    blocks, pitch = -(-length // 128), -(-rows // 4) * 4
    scale = q.scale if axis == -1 else q.scale.mT
    assert scale.shape == (rows, blocks)
    assert scale.stride() == (1, pitch)
    assert scale.data_ptr() % 16 == 0
    buffer = storage(q.scale).view(np.uint32).reshape(blocks, pitch)
    same_bits(buffer[:, :rows].T, scales_of(q))
    assert not buffer[:, rows:].any()


@pytest.mark.parametrize("axis", [-1, -2])
def test_grid_rows_are_padded_to_four_blocks(axis: int, device: torch.device) -> None:
    x = source(300, 600, device=device)
    q = blockscale.quantize(x if axis == -1 else x.mT, "fp8_128x128", axis=axis)
    scale = q.scale if axis == -1 else q.scale.mT
    assert scale.shape == (3, 5)
    assert scale.stride() == (8, 1)
    buffer = storage(q.scale).view(np.uint32).reshape(3, 8)
    assert not buffer[:, 5:].any()


def test_blocked_scales_are_flat_and_padded(device: torch.device) -> None:
    for form, columns in (("mxfp8_e4m3", 3), ("mxfp8_e4m3_128x128", 3), ("nvfp4", 6), ("nvfp4_16x16", 6)):
        q = blockscale.quantize(source(2, 130, 96, device=device), form, scale_layout="blocked")
        assert q.scale.shape == (2, 256 * (-(-columns // 4) * 4))
        assert q.scale.is_contiguous()


def test_nbytes(device: torch.device) -> None:
    x = source(32, 256, device=device)
    sizes = {form: blockscale.quantize(x, form).nbytes for form in FORMATS}
    assert sizes["mxfp8_e4m3"] == 32 * 256 + 32 * 8
    assert sizes["mxfp8_e4m3_128x128"] == 32 * 256 + 2
    assert sizes["mxfp6_e2m3"] == 32 * 256 + 32 * 8
    assert sizes["mxfp4"] == 32 * 128 + 32 * 8
    assert sizes["nvfp4"] == 32 * 128 + 32 * 16 + 4
    assert sizes["nvfp4_16x16"] == 32 * 128 + 2 * 16 + 4
    assert sizes["fp8_1x128"] == 32 * 256 + 32 * 2 * 4
    assert sizes["fp8_128x128"] == 32 * 256 + 2 * 4


# ---- views ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("form", "layout"), ALL_LAYOUTS)
def test_transposed_operand_moves_no_byte(form: str, layout: str, axis: int, device: torch.device) -> None:
    q = blockscale.quantize(source(2, 37, 70, device=device), form, axis=axis, scale_layout=layout)
    t = q.mT
    assert (t.shape, t.axis) == ((2, 70, 37), -3 - axis)
    assert t.data.data_ptr() == q.data.data_ptr()
    assert t.scale.data_ptr() == q.scale.data_ptr()
    assert (t.rows, t.length) == (q.rows, q.length)
    same_operand(t.mT, q)
    assert q.operand.axis == t.operand.axis == -1
    same_operand(q.operand, t.operand)
    same_bits(codes_of(q), codes_of(t))
    same_bits(scales_of(q), scales_of(t))
    back, turned = (blockscale.dequantize(v, torch.float32) for v in (q, t))
    same_bits(bits(turned), bits(back.mT))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(5, 33), (130, 300), (2, 17, 40), (32, 128)])
@pytest.mark.parametrize(("form", "layout"), ALL_LAYOUTS)
def test_with_layout_equals_casting_to_it(
    form: str, layout: str, shape: tuple[int, ...], axis: int, device: torch.device
) -> None:
    x = source(*shape, device=device)
    want = blockscale.quantize(x, form, axis=axis, scale_layout=layout)
    for first in FORMATS[form].layouts:
        q = blockscale.quantize(x, form, axis=axis, scale_layout=first)
        got = q.with_layout(layout)
        same_operand(got, want)
        assert got.scale.stride() == want.scale.stride()
        assert has_canonical_strides(got.operand)
        assert got.data.data_ptr() == q.data.data_ptr()
        assert (got is q) == (layout == first)
        same_operand(got.with_layout(first), q)
        same_bits(bits(blockscale.dequantize(got)), bits(blockscale.dequantize(q)))


def test_with_layout_of_a_transposed_operand(device: torch.device) -> None:
    q = blockscale.quantize(source(37, 300, device=device), "fp8_1x128")
    same_operand(q.mT.with_layout("plain"), q.with_layout("plain").mT)
    for form in ("nvfp4_16x16", "mxfp8_e4m3_128x128"):
        q = blockscale.quantize(source(37, 300, device=device), form)
        same_operand(q.mT.with_layout("blocked"), q.with_layout("blocked").mT)


def test_operand_with_k_groups(device: torch.device) -> None:
    offs = torch.tensor([3, 3, 40], dtype=torch.int32, device=device)
    x = source(45, 20, device=device)
    for form in ("mxfp4", "nvfp4", "fp8_1x128", "mxfp8_e5m2"):
        q = blockscale.quantize(x, form, axis=-2, offs=offs)
        length = 512  # round_up(45 + 3 * 127, 128)
        assert (q.shape, q.group_align, q.length, q.rows) == ((45, 20), 128, length, 20)
        assert q.data.shape == (length // FORMATS[form].codes_per_byte, 20)
        assert q.plain_scale().shape == (20, length // FORMATS[form].block[1])
        assert q.mT.length == length
        assert blockscale.quantize(x, form, axis=-1, offs=offs).group_align == 0


# ---- pytree and repr -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_pytree_round_trip(form: str, device: torch.device) -> None:
    q = blockscale.quantize(source(5, 33, device=device), form, axis=-2)
    leaves, spec = pytree.tree_flatten({"a": q, "b": 1})
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert len(tensors) == (3 if FORMATS[form].family == "nvfp4" else 2)
    back = pytree.tree_unflatten(leaves, spec)
    assert isinstance(back["a"], BlockScaled)
    same_operand(back["a"], q)
    assert back["a"].data is q.data
    moved = pytree.tree_map_only(torch.Tensor, torch.clone, q)
    same_operand(moved, q)
    assert moved.data.data_ptr() != q.data.data_ptr()


def test_it_is_frozen(device: torch.device) -> None:
    q = blockscale.quantize(source(2, 32, device=device), "mxfp4")
    with pytest.raises(AttributeError, match="cannot assign"):
        q.axis = -2  # pyright: ignore[reportAttributeAccessIssue]


def test_repr(device: torch.device) -> None:
    x = source(4, 32, device=device)
    where = str(x.device)
    assert repr(blockscale.quantize(x, "mxfp8_e4m3")) == (
        f"BlockScaled(mxfp8_e4m3 (4, 32), axis=-1, scale float8_e8m0fnu plain, {where})"
    )
    assert repr(blockscale.quantize(x, "nvfp4", axis=-2, hadamard=True, scale_layout="blocked")) == (
        f"BlockScaled(nvfp4 (4, 32), axis=-2, scale float8_e4m3fn blocked, global_scale (), hadamard=0xd7e8, {where})"
    )
    offs = torch.tensor([4], dtype=torch.int32, device=device)
    assert repr(blockscale.quantize(x, "fp8_1x128", axis=-2, offs=offs)) == (
        f"BlockScaled(fp8_1x128 (4, 32), axis=-2, scale float32 mn_major, groups padded to 128, {where})"
    )


def test_saved_and_loaded_without_trusting_the_file(tmp_path):
    q = blockscale.quantize(torch.randn(5, 33), "fp8_1x128")
    torch.save({"q": q}, tmp_path / "q.pt")
    loaded = torch.load(tmp_path / "q.pt", weights_only=True)["q"]
    assert (loaded.shape, loaded.scale.stride()) == (q.shape, q.scale.stride())
    assert torch.equal(blockscale.dequantize(loaded), blockscale.dequantize(q))


@pytest.mark.parametrize(
    ("format", "layout"),
    [("fp8_1x128", "mn_major"), ("fp8_1x128", "plain"), ("mxfp8_e4m3", "blocked"), ("mxfp4", "blocked")],
)
@pytest.mark.parametrize(("start", "stop"), [(0, 128), (128, 256), (256, 300), (128, 300), (4, 36), (3, 7), (0, 300)])
def test_rows_of_an_operand(format: str, layout: str, start: int, stop: int):
    """The rows that a cast of them alone has; without a copy where scales can be cut."""
    x = torch.randn(300, 512)
    q = blockscale.quantize(x, blockscale.CastSpec(format, scale_layout=layout))
    found, want = (
        rows_of(q, slice(start, stop)),
        blockscale.quantize(x[start:stop], blockscale.CastSpec(format, scale_layout=layout)),
    )
    same_operand(found, want)
    views = found.scale.untyped_storage().data_ptr() == q.scale.untyped_storage().data_ptr()
    whole_tiles = start % 128 == 0 and (stop % 128 == 0 or stop == 300)
    assert views == {"plain": True, "mn_major": start % 4 == 0, "blocked": whole_tiles}[layout]
    if layout == "mn_major":
        assert has_canonical_strides(found) == ((start, stop) == (0, 300) or not views)
        assert is_row_slice(found)
