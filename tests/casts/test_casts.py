"""Properties of casts beyond their bytes: both operands, groups, ranks, strides, empties, idempotence, poisoning."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale import BlockScaled, CastSpec, dequantize, quantize, quantize_both
from blockscale.formats import FORMATS
from blockscale.formats.hadamard import DEFAULT_MASKS
from blockscale.formats.layout import padded_length
from blockscale.library import empty
from support.helpers import (
    FORMAT_RULES,
    MX,
    NVFP4,
    ONE_D,
    bits,
    codes_of,
    expect,
    expect_values,
    same_bits,
    same_cast,
    same_operand,
    scales_of,
)

SIZES = [0, 1, 31, 127, 129]
"""Tokens of each group in the grouped tests, with a few rows after the last group that belong to none."""
EXTRA_ROWS = 6
ROTATING = ["mxfp4", "nvfp4"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def needs_ml_dtypes() -> None:
    pytest.importorskip("ml_dtypes", reason="the cast oracles encode with ml_dtypes")


def ends_of(sizes: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)


# ---- both operands at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(150, 140), (5, 33), (2, 40, 50), (0, 64)])
@pytest.mark.parametrize("form", FORMATS)
def test_both_equals_two_casts(form: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(shape, device=device, dtype=dtype)
    before = bits(x).copy()
    row, col = quantize_both(x, form, form)
    same_operand(row, quantize(x, form, axis=-1))
    same_operand(col, quantize(x, form, axis=-2))
    same_bits(bits(x), before)


def test_both_with_options_of_their_own(device: torch.device) -> None:
    x = torch.randn(70, 90, device=device, dtype=torch.bfloat16)
    pairs = [
        (CastSpec("mxfp8_e4m3", "floor", scale_layout="blocked"), CastSpec("mxfp8_e5m2", satfinite=True)),
        (CastSpec("nvfp4", "up", amax=torch.tensor(2.0, device=device)), CastSpec("nvfp4_16x16")),
        (CastSpec("fp8_1x128", "pow2"), CastSpec("fp8_128x128", scale_layout="plain")),
        (CastSpec("mxfp4", hadamard=True), CastSpec("nvfp4", hadamard=0x1234)),
    ]
    for row_spec, col_spec in pairs:
        row, col = quantize_both(x, row_spec, col_spec)
        same_operand(row, quantize(x, row_spec, axis=-1))
        same_operand(col, quantize(x, col_spec, axis=-2))


def exact_sum(columns: np.ndarray) -> np.ndarray:
    """fp32 of the exact sum over rows."""
    return np.array([math.fsum(column) for column in columns.T.astype(np.float64)], np.float64).astype(np.float32)


def test_colsum(device: torch.device) -> None:
    """One rounding: sums that cancel in fp32 come out right."""
    x = np.random.default_rng(0).standard_normal((300, 40)) * 2.0 ** np.random.default_rng(1).integers(0, 20, (300, 40))
    x = x.astype(np.float32)
    x[0, 0], x[150, 0], x[1:150, 0] = 2.0**40, -(2.0**40), 2.0**-5
    row, col, total = quantize_both(torch.from_numpy(x).to(device), "mxfp8_e4m3", "fp8_1x128", colsum=True)
    assert total.dtype == torch.float32
    same_bits(bits(total), exact_sum(x))
    same_operand(row, quantize(torch.from_numpy(x).to(device), "mxfp8_e4m3"))
    same_operand(col, quantize(torch.from_numpy(x).to(device), "fp8_1x128", axis=-2))


def test_colsum_of_bf16_and_of_a_batch(device: torch.device) -> None:
    x = torch.randn(3, 50, 20, device=device, dtype=torch.bfloat16)
    _, _, total = quantize_both(x, "mxfp4", "mxfp4", colsum=True)
    assert total.shape == (3, 20)
    for index in range(3):
        same_bits(bits(total[index]), exact_sum(x[index].float().cpu().numpy()))


def test_colsum_of_groups(device: torch.device) -> None:
    offs = ends_of(SIZES, device)
    x = np.random.default_rng(2).standard_normal((sum(SIZES) + EXTRA_ROWS, 40)).astype(np.float32)
    x[-EXTRA_ROWS:] = np.nan
    _, _, total = quantize_both(torch.from_numpy(x).to(device), "mxfp8_e4m3", "mxfp8_e4m3", offs=offs, colsum=True)
    assert total.shape == (len(SIZES), 40)
    for group, (end, size) in enumerate(zip(np.cumsum(SIZES), SIZES, strict=True)):
        same_bits(bits(total[group]), exact_sum(x[end - size : end]))


# ---- groups of tokens ----------------------------------------------------------------------------------------------


def grouped_source(rng_seed: int = 3, columns: int = 44) -> np.ndarray:
    rng = np.random.default_rng(rng_seed)
    x = rng.standard_normal((sum(SIZES) + EXTRA_ROWS, columns)) * 2.0 ** rng.integers(-6, 6, (1, columns))
    return x.astype(np.float32)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, 1e30])
@pytest.mark.parametrize("form", ONE_D)
def test_k_groups_start_at_multiples_of_128(form: str, bad: float | None, device: torch.device) -> None:
    """Each group is the cast of its own rows, then zeros; rows after the last group have no effect."""
    needs_ml_dtypes()
    x, offs, spec = grouped_source(), ends_of(SIZES, device), FORMATS[form]
    if bad is not None:
        x[-EXTRA_ROWS:] = bad
    options = {"amax": "group"} if form == "nvfp4" else {}
    q = quantize(torch.from_numpy(x).to(device), form, axis=-2, offs=offs, **options)
    length = padded_length(len(x), len(SIZES))
    codes, scales, block = codes_of(q), scales_of(q), spec.block[1]
    assert codes.shape == (44, length)
    zero_scale = expect(np.zeros((44, block), np.float32), form, spec.default_rule()).scale[0, 0]
    start, end = 0, 0
    for number, size in enumerate(SIZES):
        part, end = x[end : end + size], end + size
        room = -(-size // 128) * 128
        if size:
            want = expect(part.T, form, spec.default_rule())
            same_bits(codes[:, start : start + size], want.codes, number)
            used = want.scale.shape[1]
            same_bits(scales[:, start // block : start // block + used], want.scale, number)
            assert not codes[:, start + size : start + room].any()
            assert (scales[:, start // block + used : (start + room) // block] == zero_scale).all()
        if form == "nvfp4":
            want_amax = np.uint32(0x3F800000) if size == 0 else want.tensor_scale
            assert bits(q.global_scale)[number] == want_amax
        start += room
    assert start == 640
    assert not codes[:, start:].any()
    assert (scales[:, start // block :] == zero_scale).all()


@pytest.mark.parametrize("scope", ["tensor", "group", "given"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_nvfp4_amax_of_groups(axis: int, scope: str, device: torch.device) -> None:
    """One amax for all groups, one for each, or supplied ones; rows outside all groups never count."""
    needs_ml_dtypes()
    x, offs = grouped_source(4), ends_of(SIZES, device)
    x[-EXTRA_ROWS:] = np.inf
    inside = x[: sum(SIZES)]
    given = np.array([7, 0.5, 3, 100, 1e-3], np.float32)
    amax = torch.from_numpy(given).to(device) if scope == "given" else scope
    q = quantize(torch.from_numpy(x).to(device), "nvfp4", axis=axis, offs=offs, amax=amax)
    amaxes = bits(q.global_scale)
    assert amaxes.shape == (() if scope == "tensor" else (len(SIZES),))
    start, end = 0, 0
    for number, size in enumerate(SIZES):
        part, end = inside[end : end + size], end + size
        amax_value = {"tensor": np.abs(inside).max(), "group": None, "given": given[number]}[scope]
        want = expect(part if axis == -1 else part.T, "nvfp4", "nearest", amax=amax_value)
        assert (amaxes if scope == "tensor" else amaxes[number]) == want.tensor_scale
        if axis == -1:
            same_bits(codes_of(q)[end - size : end], want.codes)
            same_bits(scales_of(q)[end - size : end], want.scale)
        else:
            same_bits(codes_of(q)[:, start : start + size], want.codes)
            same_bits(scales_of(q)[:, start // 16 : start // 16 + want.scale.shape[1]], want.scale)
        start += -(-size // 128) * 128


@pytest.mark.parametrize("form", ONE_D)
def test_m_groups_leave_rows_where_they_are(form: str, device: torch.device) -> None:
    x = torch.from_numpy(grouped_source()).to(device)
    offs = ends_of([*SIZES, EXTRA_ROWS], device)
    same_operand(quantize(x, form, offs=offs), quantize(x, form))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("form", "hadamard"), [(f, False) for f in ONE_D] + [(f, True) for f in ROTATING])
def test_decoding_groups(form: str, hadamard: bool, axis: int, device: torch.device) -> None:
    """Every group decodes to its rows; k-grouped rows outside all groups decode to zero."""
    x, offs = grouped_source(5), ends_of(SIZES, device)
    tensor = torch.from_numpy(x).to(device)
    options = {"hadamard": hadamard} | ({"amax": "group"} if form == "nvfp4" else {})
    q = quantize(tensor, form, axis=axis, offs=offs, **options)
    for dtype in DTYPES:
        back = dequantize(q, dtype, offs=offs)
        assert back.shape == x.shape
        end = 0
        for size in SIZES:
            part, end = tensor[end : end + size], end + size
            alone = quantize(part, form, axis=axis, hadamard=hadamard)
            same_bits(bits(back[end - size : end]), bits(dequantize(alone, dtype)), size)
        if axis == -2:
            assert not bits(back[end:]).any()


@pytest.mark.parametrize("form", ROTATING)
def test_k_groups_rotate_each_group_on_its_own(form: str, device: torch.device) -> None:
    needs_ml_dtypes()
    x, offs, size_h = grouped_source(6), ends_of(SIZES, device), FORMATS[form].hadamard
    x[-EXTRA_ROWS:] = np.nan
    options = {"amax": "group"} if form == "nvfp4" else {}
    q = quantize(torch.from_numpy(x).to(device), form, axis=-2, offs=offs, hadamard=True, **options)
    start, end = 0, 0
    for size in SIZES:
        part, end = x[end : end + size], end + size
        if size:
            turned = oracles.hadamard(np.ascontiguousarray(part.T), DEFAULT_MASKS[size_h], size_h)
            want = expect(turned, form, FORMATS[form].default_rule())
            same_bits(codes_of(q)[:, start : start + turned.shape[1]], want.codes)
        start += -(-size // 128) * 128


@pytest.mark.parametrize("sizes", [[0], [0, 0, 0], [5], [128, 0], [0, 128]])
@pytest.mark.parametrize("form", ONE_D)
def test_few_and_empty_groups(form: str, sizes: list[int], device: torch.device) -> None:
    x = torch.randn(sum(sizes), 20, device=device)
    offs = ends_of(sizes, device)
    row, col = quantize_both(x, form, form, offs=offs)
    same_operand(row, quantize(x, form, axis=-1, offs=offs))
    same_operand(col, quantize(x, form, axis=-2, offs=offs))
    assert dequantize(col, offs=offs).shape == dequantize(row, offs=offs).shape == x.shape
    same_bits(bits(dequantize(row, offs=offs)), bits(dequantize(quantize(x, form))))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", ONE_D)
def test_no_groups_at_all(form: str, axis: int, device: torch.device) -> None:
    """offs of length zero: every row is outside all groups."""
    x, offs = torch.randn(5, 40, device=device), ends_of([], device)
    back = dequantize(quantize(x, form, axis=axis, offs=offs), offs=offs)
    assert back.shape == x.shape
    if axis == -2:
        assert not bits(back).any()


def test_groups_of_tokens_refuse_2d_blocks(device: torch.device) -> None:
    x, offs = torch.randn(8, 32, device=device), ends_of([8], device)
    for form in ("nvfp4_16x16", "fp8_128x128", "mxfp8_e4m3_128x128"):
        with pytest.raises(ValueError, match="2-D block"):
            quantize(x, form, offs=offs)


# ---- ranks, strides, empties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(3, 20, 50), (2, 3, 17, 33), (1, 2, 1, 5, 7)])
@pytest.mark.parametrize("form", FORMATS)
def test_higher_ranks_are_stacks_of_matrices(
    form: str, shape: tuple[int, ...], axis: int, device: torch.device
) -> None:
    """Blocks and tiles never span two matrices; NVFP4 has one amax for all matrices."""
    x = torch.randn(shape, device=device)
    q = quantize(x, form, axis=axis)
    back = dequantize(q, torch.float32)
    amax = {"amax": x.abs().amax()} if form in NVFP4 else {}
    codes, scales = codes_of(q), scales_of(q)
    for index in np.ndindex(shape[:-2]):
        part = quantize(x[index], form, axis=axis, **amax)
        same_bits(codes[index], codes_of(part))
        same_bits(scales[index], scales_of(part))
        same_bits(bits(back[index]), bits(dequantize(part, torch.float32)))
    if form in NVFP4:
        same_bits(bits(q.global_scale), bits(part.global_scale))


def odd_views(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = torch.randn(120, 140, device=device, dtype=dtype)
    return {
        "transposed": base.mT,
        "every other column": base[:, ::2],
        "every other row": base[1::2],
        "inner window": base[3:77, 5:71],
        "expanded rows": base[:1].expand(40, 140),
        "expanded columns": base[:, :1].expand(120, 50),
        "permuted batch": base.view(4, 30, 140).permute(1, 0, 2),
        "permuted matrices": base.view(4, 30, 140).permute(2, 0, 1),
    }


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", FORMATS)
def test_strided_inputs(form: str, axis: int, device: torch.device) -> None:
    """The same bytes as a contiguous copy, and the input is left as it was."""
    for dtype in (torch.bfloat16, torch.float32):
        for name, x in odd_views(device, dtype).items():
            before, strides = bits(x).copy(), x.stride()
            assert not x.is_contiguous(), name
            same_operand(quantize(x, form, axis=axis), quantize(x.contiguous(), form, axis=axis))
            same_bits(bits(x), before, name)
            assert x.stride() == strides
            if axis == -1:
                for got, want in zip(
                    quantize_both(x, form, form), quantize_both(x.contiguous(), form, form), strict=True
                ):
                    same_operand(got, want)


@pytest.mark.parametrize("form", FORMATS)
def test_inputs_are_not_modified(form: str, device: torch.device) -> None:
    x = torch.randn(40, 60, device=device)
    x[3, 4], x[5, 6], x[7] = torch.nan, -torch.inf, -0.0
    before = bits(x).copy()
    for axis in (-1, -2):
        q = quantize(x, form, axis=axis)
        parts = [bits(t).copy() for t in (q.data, q.scale)]
        dequantize(q)
        same_bits(bits(q.data), parts[0])
        same_bits(bits(q.scale), parts[1])
    quantize_both(x, form, form, colsum=True)
    same_bits(bits(x), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_narrow_inputs_are_widened_exactly(form: str, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(40, 60, device=device).to(dtype)
    for axis in (-1, -2):
        same_operand(quantize(x, form, axis=axis), quantize(x.float(), form, axis=axis))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (0, 5, 33), (3, 0, 33), (3, 5, 0)])
@pytest.mark.parametrize("form", FORMATS)
def test_empty_tensors(form: str, shape: tuple[int, ...], axis: int, device: torch.device) -> None:
    x = torch.empty(shape, device=device)
    for layout in FORMATS[form].layouts:
        q = quantize(x, form, axis=axis, scale_layout=layout)
        assert q.shape == shape
        assert q.data.numel() == 0
        assert not bits(q.scale).any()  # at most padding
        back = dequantize(q, torch.float32)
        assert (back.shape, back.dtype) == (shape, torch.float32)
        if form in NVFP4:
            assert bits(q.global_scale) == 0x3F800000
    row, col, total = quantize_both(x, form, form, colsum=True)
    assert (row.shape, col.shape) == (shape, shape)
    assert total.shape == (*shape[:-2], shape[-1])
    assert not bits(total).any()


# ---- rotation through the public functions -------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("mask", [True, 3, 0xBEEF])
@pytest.mark.parametrize("form", ROTATING)
def test_rotated_casts(form: str, mask: bool | int, axis: int, device: torch.device) -> None:
    """The amax is taken after the rotation; the tail group is stored in full; decoding rotates back and truncates."""
    needs_ml_dtypes()
    size = FORMATS[form].hadamard
    number = DEFAULT_MASKS[size] if mask is True else int(mask)
    for rows, length in ((5, 70), (37, 64), (3, 1)):
        x = np.random.default_rng(7).standard_normal((rows, length)).astype(np.float32)
        tensor = torch.from_numpy(x).to(device)
        q = quantize(tensor if axis == -1 else tensor.mT, form, axis=axis, hadamard=mask)
        assert q.hadamard == number
        assert q.length == -(-length // size) * size
        turned = oracles.hadamard(x, number, size)
        same_cast(q, expect(turned, form, FORMATS[form].default_rule()))
        stored = dequantize(q, torch.float32, rotated=True)
        stored = stored if axis == -1 else stored.mT
        same_bits(bits(stored), expect_values(q))
        # the way back: butterflies, factor, signs, in fp32
        y = stored.cpu().numpy().reshape(rows, -1, size).copy()
        stride = 1
        while stride < size:
            for low in (i for i in range(size) if not i & stride):
                a, b = y[..., low].copy(), y[..., low + stride].copy()
                y[..., low], y[..., low + stride] = a + b, a - b
            stride *= 2
        signs = np.array([-1 if number >> i & 1 else 1 for i in range(size)], np.float32)
        want = (y * np.float32(size**-0.5) * signs).reshape(rows, -1)[:, :length]
        back = dequantize(q, torch.float32)
        same_bits(bits(back if axis == -1 else back.mT), np.ascontiguousarray(want))
        assert np.linalg.norm(want - x) < 0.2 * np.linalg.norm(x) + 1e-6


# ---- idempotence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["floor", "even", "rceil", "ceil"])
@pytest.mark.parametrize("form", MX)
def test_mx_casts_are_idempotent(form: str, rule: str, device: torch.device) -> None:
    """The same values wherever the decode is finite; under floor and even the same bytes."""
    needs_ml_dtypes()
    edges = oracles.edge_blocks(FORMATS[form].element.name).values()
    x = torch.from_numpy(np.concatenate([oracles.random_blocks(2000), *edges])).to(device)
    if FORMATS[form].is_2d:  # a NaN would poison its whole block
        x = torch.randn(300, 400, device=device) * torch.randint(-30, 30, (300, 400), device=device).exp2()
    q = quantize(x, form, scale_rule=rule)
    back = dequantize(q, torch.float32)
    finite = back.isfinite().all(-1)
    assert finite.float().mean() > 0.9
    again = quantize(back[finite], form, scale_rule=rule)
    same_bits(bits(dequantize(again, torch.float32)), bits(back[finite]))
    keep = finite.cpu().numpy()
    if FORMATS[form].is_2d:
        assert keep.all()
        keep = slice(None)
    if rule in ("floor", "even"):
        same_bits(codes_of(again), codes_of(q)[keep])
        same_bits(scales_of(again), scales_of(q)[keep])
    else:
        assert (scales_of(again) <= scales_of(q)[keep]).all()


@pytest.mark.parametrize(("form", "rule"), FORMAT_RULES)
def test_only_two_dimensional_scales_commute_with_the_transpose(form: str, rule: str, device: torch.device) -> None:
    """dequant(quant(W^T)) == dequant(quant(W))^T bit for bit with 2-D blocks, and not with 1-D blocks."""
    w = torch.randn(150, 280, device=device) * torch.randint(-30, 1, (150, 1), device=device).exp2()
    there = dequantize(quantize(w, form, scale_rule=rule), torch.float32)
    for turned in (
        dequantize(quantize(w.mT, form, scale_rule=rule), torch.float32).mT,
        dequantize(quantize(w, form, axis=-2, scale_rule=rule), torch.float32),
    ):
        assert np.array_equal(bits(turned), bits(there)) == FORMATS[form].is_2d
    if FORMATS[form].is_2d:
        q, t = quantize(w, form, scale_rule=rule), quantize(w.mT, form, scale_rule=rule)
        same_bits(codes_of(t), codes_of(q).T)
        same_bits(scales_of(t), scales_of(q).T)


def test_transposing_the_result_is_not_casting_the_transpose(device: torch.device) -> None:
    """`.mT` transposes the operand and its axis; a cast along the other axis gives other values."""
    x = torch.randn(64, 64, device=device)
    assert not torch.equal(dequantize(quantize(x, "mxfp4").mT), dequantize(quantize(x.mT, "mxfp4")))
    same_operand(quantize(x, "mxfp4").mT, quantize(x.mT, "mxfp4", axis=-2))


# ---- poisoning -----------------------------------------------------------------------------------------------------


def poison_cases(block: int) -> list[tuple[int, int, float]]:
    """(row, position along the scaled axis, value): first, middle and last lane of the second block."""
    lanes = (block, block + block // 2, 2 * block - 1)
    return [(row, lane, bad) for row in (0, 2) for lane in lanes for bad in (math.nan, math.inf, -math.inf)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "fp8_1x128"])
def test_a_bad_value_poisons_its_block(form: str, axis: int, dtype: torch.dtype, device: torch.device) -> None:
    spec = FORMATS[form]
    block = spec.block[1]
    clean = torch.randn(3, 3 * block, device=device, dtype=dtype)
    base = quantize(clean if axis == -1 else clean.mT, form, axis=axis)
    for row, lane, bad in poison_cases(block):
        x = clean.clone()
        x[row, lane] = bad
        q = quantize(x if axis == -1 else x.mT, form, axis=axis)
        want_codes, want_scales = codes_of(base).copy(), scales_of(base).copy()
        want_codes[row, block : 2 * block] = spec.element.nan_code
        want_scales[row, 1] = 0x7FC00000 if form == "fp8_1x128" else 0xFF
        same_bits(codes_of(q), want_codes)
        same_bits(scales_of(q), want_scales)
        values = dequantize(q, torch.float32)
        values = values if axis == -1 else values.mT
        expected = torch.zeros_like(x, dtype=torch.bool)
        expected[row, block : 2 * block] = True
        assert torch.equal(values.isnan(), expected)
        assert (bits(values)[expected.cpu().numpy()] == 0x7FC00000).all()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", NVFP4)
def test_a_bad_value_poisons_an_nvfp4_tensor_or_its_block(form: str, axis: int, device: torch.device) -> None:
    """The tensor if its amax is taken from the data, the block (16x16) if the amax is supplied."""
    across, along = FORMATS[form].block
    clean = torch.randn(40, 3 * along, device=device)
    amax = torch.tensor(4.0, device=device)
    base = quantize(clean if axis == -1 else clean.mT, form, axis=axis, amax=amax)
    for row, lane, bad in poison_cases(along):
        x = clean.clone()
        x[row + 18, lane] = bad
        q = quantize(x if axis == -1 else x.mT, form, axis=axis)
        assert bits(q.global_scale) == 0x7FC00000
        assert set(scales_of(q).reshape(-1)) == {0x7F}
        assert set(codes_of(q).reshape(-1)) == {7}
        assert (bits(dequantize(q, torch.float32)) == 0x7FC00000).all()
        q = quantize(x if axis == -1 else x.mT, form, axis=axis, amax=amax)
        tile = (row + 18) // across
        want_codes, want_scales = codes_of(base).copy(), scales_of(base).copy()
        want_codes[tile * across : (tile + 1) * across, along : 2 * along] = 7
        want_scales[tile, 1] = 0x7F
        same_bits(codes_of(q), want_codes)
        same_bits(scales_of(q), want_scales)
        assert bits(q.global_scale) == bits(base.global_scale)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("position", [(128, 128), (200, 250), (255, 130)])
def test_a_bad_value_poisons_its_tile(position: tuple[int, int], axis: int, device: torch.device) -> None:
    x = torch.randn(300, 300, device=device)
    base = quantize(x, "fp8_128x128", axis=axis)
    for bad in (math.nan, math.inf, -math.inf):
        x[position] = bad
        q = quantize(x, "fp8_128x128", axis=axis)
        want_codes, want_scales = codes_of(base).copy(), scales_of(base).copy()
        want_codes[128:256, 128:256] = 0x7F
        want_scales[1, 1] = 0x7FC00000
        same_bits(codes_of(q), want_codes)
        same_bits(scales_of(q), want_scales)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", MX)
def test_satfinite_keeps_infinities(form: str, axis: int, device: torch.device) -> None:
    """Inf becomes the largest value under scale FE; NaN still poisons; finite blocks are unchanged."""
    element, (across, along) = FORMATS[form].element, FORMATS[form].block
    x = torch.randn(4 * across, 2 * along, device=device)
    plain = quantize(x if axis == -1 else x.mT, form, axis=axis)
    x[0, 3], x[across, along + 8] = torch.inf, -torch.inf
    x[2 * across, 5], x[2 * across, 6] = torch.nan, torch.inf
    q = quantize(x if axis == -1 else x.mT, form, axis=axis, satfinite=True)
    scales = scales_of(q)

    def block(of: BlockScaled, i: int, j: int) -> NDArray[np.uint8]:
        return codes_of(of)[i * across : (i + 1) * across, j * along : (j + 1) * along].reshape(-1)

    largest = {"e4m3": 0x7E, "e5m2": 0x7B}.get(element.name, element.nan_code)
    assert (scales[0, 0], scales[1, 1], scales[2, 0]) == (0xFE, 0xFE, 0xFF)
    assert (block(q, 0, 0)[3], block(q, 1, 1)[8]) == (largest, largest | 1 << (element.bits - 1))
    assert not (np.delete(block(q, 0, 0), 3) & ((1 << (element.bits - 1)) - 1)).any()
    assert set(block(q, 2, 0)) == {element.nan_code}
    for i, j in ((0, 1), (1, 0), (2, 1), (3, 0), (3, 1)):
        same_bits(block(q, i, j), block(plain, i, j))
        assert scales[i, j] == scales_of(plain)[i, j]


def test_poison_shows_what_is_not_written(device: torch.device) -> None:
    """Tests run with poisoned outputs: bytes that a kernel does not write are FF, not zero."""
    assert set(bits(empty((4, 4), torch.float32, device)).reshape(-1)) == {0xFFFFFFFF}
    buffers = torch.ops.blockscale.quantize(
        torch.zeros(3, 5, device=device), "fp8_1x128 fp32 mn_major", None, None, -1, None
    )
    assert not bits(buffers[0]).any()
    assert bits(buffers[1]).tolist() == [[0x3F800000] * 3 + [0]]
