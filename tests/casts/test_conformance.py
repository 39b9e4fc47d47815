"""Every format x scale rule x input type x axis, byte for byte against the oracles; then decoding, likewise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale import BlockScaled, dequantize, quantize, quantize_both
from blockscale.casts import ops
from blockscale.casts.fused import rmsnorm_quantize, swiglu_quantize
from blockscale.casts.permuted import quantize_permute
from blockscale.errors import OptionError
from blockscale.formats import FORMATS, CastSpec
from blockscale.formats.cast_spec import Cast
from oracles.inputs import EDGE_K, EDGE_ROWS
from support.helpers import (
    FORMAT_RULES,
    FP8,
    MX,
    NVFP4,
    bits,
    codes_of,
    expect,
    expect_values,
    same_bits,
    same_cast,
    scales_of,
    source,
)

pytest.importorskip("ml_dtypes", reason="the cast oracles encode with ml_dtypes")

F32 = NDArray[np.float32]
AXES = [-1, -2]
DTYPES = ["bf16", "fp16", "fp32"]
BLOCKS_PER_ROW = 8


def cast(x: F32, dtype: str, device: torch.device, form: str, axis: int, **options: object) -> tuple[BlockScaled, F32]:
    """A matrix with the scaled axis last, cast along `axis` of a contiguous tensor; and the values that were cast."""
    tensor, exact = source(x if axis == -1 else np.ascontiguousarray(x.T), dtype, device)
    return quantize(tensor, form, axis=axis, **options), exact if axis == -1 else exact.T


# ---- inputs --------------------------------------------------------------------------------------------------------


def all_patterns(dtype: str) -> F32:
    """Every pattern of a 16-bit type (every bf16 one for fp32 too), spread over blocks in three ways.

    In their order (one exponent a block), interleaved (all exponents beside each other, so most blocks are poisoned or
    dominated by one value), and in bands of neighbouring exponents with unrelated mantissas.
    """
    if dtype == "fp16":
        with np.errstate(invalid="ignore"):  # signalling NaN
            values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    else:
        values = oracles.all_bf16()
    rng = np.random.default_rng(0)
    bands = values.reshape(64, 1024)
    bands = np.concatenate([band[rng.permutation(1024)] for band in bands])
    return np.concatenate((values, values.reshape(256, 256).T.reshape(-1), bands))


def wide_random(count: int, block: int, dtype: str, seed: int) -> F32:
    """Gaussian blocks whose magnitudes cover the range of the dtype, and long-tailed blocks."""
    if dtype != "fp16":
        return oracles.random_blocks(count, block, seed=seed, bf16=dtype == "bf16")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, block)) * 2.0 ** rng.integers(-24, 14, (count, 1))
    x[::3] *= 2.0 ** -rng.integers(0, 12, x[::3].shape)
    return x.astype(np.float32)


def matrix(values: F32, block: int) -> F32:
    """Values as rows of a few blocks each."""
    width = block * BLOCKS_PER_ROW
    return np.append(values.reshape(-1), np.zeros(-values.size % width, np.float32)).reshape(-1, width)


# ---- formats with 1-D blocks and no tensor scale -------------------------------------------------------------------

MX_1D = [form for form in MX if not FORMATS[form].is_2d]
ONE_D = [(form, rule) for form, rule in FORMAT_RULES if form in MX_1D or form == "fp8_1x128"]


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "rule"), ONE_D)
def test_blocks(form: str, rule: str, dtype: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    """Half a million values for each 8-bit case: wide random blocks, every 16-bit pattern, edge blocks."""
    spec = FORMATS[form]
    element, block = spec.element.name, spec.block[1]
    edges = oracles.fp8_edge_blocks(block) if spec.family == "fp8" else oracles.edge_blocks(element, block)
    count = (1 << 19 if element in ("e4m3", "e5m2") else 1 << 17) // block
    random = wide_random(count, block, dtype, seed=len(form) + axis)
    x = matrix(np.concatenate([p.reshape(-1) for p in (random, all_patterns(dtype), *edges.values())]), block)
    q, exact = cast(x, dtype, device, form, axis, scale_rule=rule)
    compared[f"ml_dtypes cast {form}"] += same_cast(q, expect(exact, form, rule), (form, rule, dtype, axis))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rule", oracles.MX_RULES)
@pytest.mark.parametrize("form", MX)
def test_satfinite(form: str, rule: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    edges = oracles.edge_blocks(FORMATS[form].element.name).values()
    x = matrix(np.concatenate([p.reshape(-1) for p in edges]), 32)
    if FORMATS[form].is_2d:
        x = tiles(oracles.edge_blocks("e4m3", 128)["nonfinite"], 128, 4)
    for dtype in ("bf16", "fp32"):
        q, exact = cast(x, dtype, device, form, axis, scale_rule=rule, satfinite=True)
        compared[f"ml_dtypes cast {form}"] += same_cast(q, expect(exact, form, rule, satfinite=True))
        assert (scales_of(q) == 0xFE).any()


@pytest.mark.parametrize("rule", oracles.MX_RULES)
@pytest.mark.parametrize("form", MX_1D)
def test_blocks_equal_gfloat(form: str, rule: str, device: torch.device, compared: Counter[str]) -> None:
    """The public cast against the specification itself, block by block."""
    pytest.importorskip("gfloat", reason="the specification oracle is gfloat")
    element = FORMATS[form].element.name
    edges = [group[:: max(1, len(group) // 25)] for group in oracles.edge_blocks(element).values()]
    x = np.concatenate([*edges, oracles.random_blocks(80, seed=9)])
    q, _ = cast(x, "fp32", device, form, -1, scale_rule=rule)
    for row, byte, codes in zip(x, scales_of(q)[:, 0], codes_of(q), strict=True):
        want_byte, want_codes = oracles.gfloat_mx_block(row, element, rule)
        assert byte == want_byte, row
        compared[f"gfloat cast {form}"] += same_bits(codes, want_codes, row)


@pytest.mark.parametrize("rule", oracles.MX_RULES)
def test_tiles_equal_gfloat(rule: str, device: torch.device, compared: Counter[str]) -> None:
    """A full tile and short ones to its right and below it, each one block of the specification."""
    pytest.importorskip("gfloat", reason="the specification oracle is gfloat")
    form = "mxfp8_e4m3_128x128"
    x = oracles.random_blocks(130, 131, seed=9)
    x *= 2.0 ** -np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True)))  # else all rows but one would round to zero
    x[128:] *= 448
    q, _ = cast(x, "fp32", device, form, -1, scale_rule=rule)
    for i, rows in enumerate((slice(0, 128), slice(128, 130))):
        for j, columns in enumerate((slice(0, 128), slice(128, 131))):
            byte, codes = oracles.gfloat_mx_block(x[rows, columns].reshape(-1), "e4m3", rule)
            assert scales_of(q)[i, j] == byte
            got = np.ascontiguousarray(codes_of(q)[rows, columns]).reshape(-1)
            compared[f"gfloat cast {form}"] += same_bits(got, codes, (i, j))


# ---- tiles of 128 x 128 --------------------------------------------------------------------------------------------


def tiles(blocks: F32, side: int, per_row: int) -> F32:
    """One tile per block: the block in one row or column of it, the rest a quarter as large or zero."""
    rng = np.random.default_rng(1)
    out = np.zeros((len(blocks), side, side), np.float32)
    for number, (tile, block) in enumerate(zip(out, blocks, strict=True)):
        amax = np.abs(block).max()
        if number % 3 and np.isfinite(amax):
            tile[:] = rng.uniform(-0.25, 0.25, (side, side)) * amax
        line = number * 37 % side
        tile[(line, slice(None)) if number % 2 else (slice(None), line)] = block
    out = np.concatenate((out, np.zeros((-len(out) % per_row, side, side), np.float32)))
    rows = len(out) // per_row
    return out.reshape(rows, per_row, side, side).swapaxes(1, 2).reshape(rows * side, per_row * side)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "rule"), [(form, rule) for form, rule in FORMAT_RULES if form.endswith("128x128")])
def test_tiles(form: str, rule: str, dtype: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    """Edge maxima, random magnitudes and non-finite values in tiles, cut so that edge tiles are short both ways."""
    groups = (oracles.fp8_edge_blocks(128) if form in FP8 else oracles.edge_blocks("e4m3", 128)).items()
    edges = [group[:: max(1, len(group) // (12 if name == "nonfinite" else 4))] for name, group in groups]
    blocks = np.concatenate((*edges, wide_random(24, 128, dtype, seed=3)))
    x = tiles(blocks, 128, 8)[:-39, :-53]
    q, exact = cast(x, dtype, device, form, axis, scale_rule=rule)
    compared[f"ml_dtypes cast {form}"] += same_cast(q, expect(exact, form, rule))


# ---- NVFP4 ---------------------------------------------------------------------------------------------------------


def nvfp4_matrices(form: str, dtype: str) -> dict[str, F32]:
    """Tensors whose block amaxes are down to 2^-24 of the tensor's amax, over the full range of tensor amaxes."""
    rng = np.random.default_rng(4)
    across = FORMATS[form].block[0]
    out = {}
    exponents = (-14, -3, 0, 9) if dtype == "fp16" else (-140, -126, -110, -60, -8, 0, 31, 90, 123)
    for exponent in exponents:
        x = rng.standard_normal((32 * across // 4 + 32, 640))
        quiet = 2.0 ** -rng.integers(0, 25, (x.shape[0] // across, 40))
        x *= np.repeat(np.repeat(quiet, across, axis=0), 16, axis=1)
        out[f"2^{exponent}"] = np.ldexp(x, exponent).astype(np.float32)
    out["t3"] = rng.standard_t(3, (96, 320)).astype(np.float32)
    patterns = all_patterns(dtype)
    patterns = np.where(np.isfinite(patterns), patterns, np.float32(0))
    out["all patterns"] = patterns.reshape(-1, 256)[: 3 * 256]
    return out


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", FORMATS["nvfp4"].rules)
@pytest.mark.parametrize("form", NVFP4)
def test_nvfp4(form: str, rule: str, dtype: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    for name, x in nvfp4_matrices(form, dtype).items():
        q, exact = cast(x, dtype, device, form, axis, scale_rule=rule)
        compared[f"ml_dtypes cast {form}"] += same_cast(q, expect(exact, form, rule), name)
        # a supplied amax above, at and below that of the data, so that scales and codes saturate
        for factor in (16.0, 1.0, 0.01):
            top = np.float32(min(float(np.abs(exact).max()) * factor, 3e38))
            q, _ = cast(x, dtype, device, form, axis, scale_rule=rule, amax=torch.tensor(top, device=device))
            want = expect(exact, form, rule, amax=top)
            compared[f"ml_dtypes cast {form}"] += same_cast(q, want, (name, factor))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", FORMATS["nvfp4"].rules)
@pytest.mark.parametrize("form", NVFP4)
def test_nvfp4_every_pattern_under_a_supplied_amax(
    form: str, rule: str, dtype: str, axis: int, device: torch.device, compared: Counter[str]
) -> None:
    """Non-finite values poison only their block if the amax is supplied; a non-finite amax poisons everything."""
    x = all_patterns(dtype).reshape(-1, 256)
    for top in (1.0, 6.1e-5, 3e38, 1e-38, 1e-42, 2.0**-149, 0.0, np.inf, np.nan):
        amax = torch.tensor(top, dtype=torch.float32, device=device)
        q, exact = cast(x, dtype, device, form, axis, scale_rule=rule, amax=amax)
        want = expect(exact, form, rule, amax=np.float32(top))
        compared[f"ml_dtypes cast {form}"] += same_cast(q, want, top)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rule", FORMATS["nvfp4"].rules)
@pytest.mark.parametrize("form", NVFP4)
def test_nvfp4_a_negative_amax_poisons_its_tensor(
    form: str, rule: str, axis: int, device: torch.device, compared: Counter[str]
) -> None:
    """Below -0.0, which is zero. Through the operator: `quantize` checks values on a CPU and raises."""
    x = torch.randn(48, 40, device=device)
    exact = x.cpu().numpy() if axis == -1 else x.cpu().numpy().T
    plan = CastSpec(form, rule).plan()
    for top, meant in ((-2.5, np.nan), (-1e-42, np.nan), (-np.inf, np.nan), (-0.0, 0.0)):
        q = ops.cast(x, Cast(plan, amax=torch.tensor(top, device=device)), axis, None)
        compared[f"ml_dtypes cast {form}"] += same_cast(q, expect(exact, form, rule, amax=np.float32(meant)), top)


def test_nvfp4_a_negative_amax_of_a_group_poisons_that_group(device: torch.device) -> None:
    x, tops = torch.randn(3, 20, 50, device=device), torch.tensor([2.0, -2.0, 3.0], device=device)
    plan = CastSpec("nvfp4", amax="group").plan()
    q = ops.cast(x, Cast(plan, amax=tops), -1, None)
    assert dequantize(q).isnan().flatten(1).all(1).tolist() == [False, True, False]
    assert dequantize(q).isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_nvfp4_a_negative_amax_is_refused_on_the_cpu() -> None:
    """On a GPU the check would synchronize: there the result is NaN, as that of the operator is."""
    x, spec = torch.randn(8, 64), CastSpec("nvfp4", amax=torch.tensor(-2.0))
    calls: list[Callable[[], object]] = [
        lambda: quantize(x, spec),
        lambda: quantize(torch.randn(2, 8, 64), "nvfp4", amax=torch.tensor([1.0, -2.0])),
        lambda: quantize_both(x, spec, spec),
        lambda: swiglu_quantize(x, spec),
        lambda: rmsnorm_quantize(x, torch.ones(64), spec),
        lambda: quantize_permute(x, torch.arange(8), spec),
    ]
    for call in calls:
        with pytest.raises(OptionError, match=r"amax has -2\.0.*a maximum of magnitudes is not negative.*x\.abs\(\)"):
            call()
    assert quantize(x, "nvfp4", amax=torch.tensor(-0.0)).shape == (8, 64)


def test_nvfp4_a_negative_amax_gives_nan_in_compiled_code() -> None:
    """Compiled code cannot check values either: the result is NaN."""
    torch._dynamo.reset()

    def call(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(x, "nvfp4", amax=top))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert compiled(torch.randn(8, 64), torch.tensor(-2.0)).isnan().all()
    assert not compiled(torch.randn(8, 64), torch.tensor(2.0)).isnan().any()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rule", FORMATS["nvfp4"].rules)
@pytest.mark.parametrize("form", NVFP4)
def test_nvfp4_edge_tensors(form: str, rule: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    for name, (x, top) in oracles.nvfp4_edge_tensors().items():
        options = {} if top is None else {"amax": torch.tensor(top, device=device)}
        q, exact = cast(x, "fp32", device, form, axis, scale_rule=rule, **options)
        compared[f"ml_dtypes cast {form}"] += same_cast(q, expect(exact, form, rule, amax=top), name)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("form", NVFP4)
def test_nvfp4_one_scale_per_leading_index(form: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    """amax="group" over the leading axis, with a tensor amax in every binade of fp32; then the same ones supplied."""
    rng = np.random.default_rng(5)
    exponents = np.arange(-149, 128, 4)
    x = rng.uniform(-1, 1, (len(exponents), 20, 50)) * 2.0 ** -rng.integers(0, 12, (len(exponents), 20, 50))
    x = np.ldexp(x, exponents[:, None, None]).astype(np.float32)
    tensor = torch.from_numpy(x).to(device)
    supplied = torch.from_numpy(np.abs(x).max(axis=(1, 2))).to(device)
    for amax in ("group", supplied):
        q = quantize(tensor, form, axis=axis, amax=amax)
        codes, scales, tops = codes_of(q), scales_of(q), bits(q.global_scale)
        assert tops.shape == (len(exponents),)
        for index, part in enumerate(x):
            want = expect(part if axis == -1 else part.T, form, "nearest")
            same_bits(scales[index], want.scale)
            assert tops[index] == want.tensor_scale
            compared[f"ml_dtypes cast {form}"] += same_bits(codes[index], want.codes)
    one = quantize(tensor, form, axis=axis)
    top = np.abs(x).max()
    for index, part in enumerate(x):
        want = expect(part if axis == -1 else part.T, form, "nearest", amax=top)
        assert bits(one.global_scale) == want.tensor_scale
        same_bits(codes_of(one)[index], want.codes)


# ---- tails ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("form", "rule"), FORMAT_RULES)
def test_tails(form: str, rule: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    """Every awkward length; a short last block behaves as if padded with zeros."""
    rng = np.random.default_rng(6)
    for number, length in enumerate(EDGE_K):
        dtype = DTYPES[number % 3]
        x = (rng.standard_normal((7, length)) * 2.0 ** rng.integers(-9, 9, (7, length))).astype(np.float32)
        q, exact = cast(x, dtype, device, form, axis, scale_rule=rule)
        compared[f"ml_dtypes cast {form}"] += same_cast(q, expect(exact, form, rule), length)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("form", ["nvfp4_16x16", "fp8_128x128", "mxfp8_e4m3_128x128", "mxfp8_e4m3"])
def test_edge_tiles(form: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    """Awkward sizes in both directions at once."""
    rng = np.random.default_rng(7)
    for rows in EDGE_ROWS:
        for length in (1, 15, 17, 130):
            x = (rng.standard_normal((rows, length)) * 2.0 ** rng.integers(-9, 9, (rows, 1))).astype(np.float32)
            q, exact = cast(x, "fp32", device, form, axis)
            want = expect(exact, form, FORMATS[form].default_rule())
            compared[f"ml_dtypes cast {form}"] += same_cast(q, want, (rows, length))


# ---- dequantise ----------------------------------------------------------------------------------------------------


def operand(form: str, codes: NDArray, scale: NDArray, top: float | None, device: torch.device) -> BlockScaled:
    """An operand made by hand from unpacked codes [rows, K] and plain scales."""
    spec = FORMATS[form]
    raw = oracles.pack_fp4(codes) if spec.codes_per_byte == 2 else codes
    return BlockScaled(
        torch.from_numpy(np.ascontiguousarray(raw)).to(device).view(spec.data_dtype),
        torch.from_numpy(np.ascontiguousarray(scale)).to(device).view(spec.scale_dtype),
        None if top is None else torch.tensor(top, dtype=torch.float32, device=device),
        form,
        -1,
        "plain",
        codes.shape,
    )


def check_decode(q: BlockScaled) -> int:
    """All three output dtypes, direct and transposed. NaN codes under a finite scale decode to some NaN."""
    want = expect_values(q)
    scale = scales_of(q).view(np.float32) if q.spec.family == "fp8" else oracles.e8m0_decode(scales_of(q))
    free = np.isnan(want)
    if q.spec.family != "nvfp4":
        spread = np.repeat(np.repeat(scale, q.spec.block[0], 0), q.spec.block[1], 1)[: want.shape[0], : want.shape[1]]
        free &= ~np.isnan(spread)
    else:
        free[:] = False
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = {torch.bfloat16: oracles.to_bf16(want), torch.float16: want.astype(np.float16)}
    rounded[torch.float32] = want
    for dtype, values in rounded.items():
        for turned in (False, True):
            got = dequantize(q.mT if turned else q, dtype)
            assert got.dtype == dtype
            if turned:
                got = got.mT
            assert got.cpu().isnan().numpy()[free].all()
            same_bits(bits(got)[~free], values[~free], (q, dtype))
    return want.size * 3


@pytest.mark.parametrize("form", MX)
def test_decode_every_scale_byte_and_code(form: str, device: torch.device, compared: Counter[str]) -> None:
    """All 256 scale bytes, 00 01 7E 7F FD FE FF included, times all codes of the element, specials included."""
    codes = np.arange(256, dtype=np.uint8) & ((1 << FORMATS[form].element.bits) - 1)
    if FORMATS[form].is_2d:  # two rows of a tile hold all codes
        codes, scale = np.tile(codes.reshape(2, 128), (1, 256)), np.arange(256, dtype=np.uint8)[None, :]
    else:
        codes, scale = np.tile(codes, (256, 1)), np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    compared[f"ml_dtypes dequantize {form}"] += check_decode(operand(form, codes, scale, None, device))


@pytest.mark.parametrize("form", FP8)
def test_decode_fp8(form: str, device: torch.device, compared: Counter[str]) -> None:
    """Scales of every binade, the powers of two of bytes 00 01 7E 7F FD FE and the canonical NaN included."""
    rng = np.random.default_rng(8)
    across = FORMATS[form].block[0]
    powers = np.ldexp(np.float32(1), np.array([0x00, 0x01, 0x7E, 0x7F, 0xFD, 0xFE]) - 127)
    random = rng.integers(0, 0x7F800000, 2042 if across == 1 else 40, dtype=np.uint32).view(np.float32)
    scale = np.concatenate((powers, [oracles.NAN32, np.float32(0)], random)).astype(np.float32)
    scale = np.stack((scale, scale[::-1]), axis=1)
    rows = len(scale) * across
    codes = np.tile(np.arange(256, dtype=np.uint8), (rows, 1)) if across == 1 else rng.integers(0, 256, (rows, 256))
    q = operand(form, codes.astype(np.uint8), scale, None, device)
    compared[f"ml_dtypes dequantize {form}"] += check_decode(q)


@pytest.mark.parametrize("form", NVFP4)
def test_decode_nvfp4(form: str, device: torch.device, compared: Counter[str]) -> None:
    """All block scale bytes times all codes, under tensor scales from 2^-126 to FLT_MAX and NaN."""
    across = FORMATS[form].block[0]
    codes = np.tile(np.arange(16, dtype=np.uint8), (16 * across, 16))
    scale = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for top in (1.0, 2.0**-126, 3.7e-4, 1e-30, 1.5e33, 3.4028235e38, np.nan):
        compared[f"ml_dtypes dequantize {form}"] += check_decode(operand(form, codes, scale, top, device))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("form", "rule"), FORMAT_RULES)
def test_decode_of_casts(form: str, rule: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    x = oracles.random_blocks(150, 300, seed=10)
    x[np.abs(x) > 1e30] = 0
    x[140] = np.nan if FORMATS[form].family != "nvfp4" else 0
    q, _ = cast(x, "fp32", device, form, axis, scale_rule=rule)
    compared[f"ml_dtypes dequantize {form}"] += check_decode(q.operand)
    back = dequantize(q, torch.float32)
    assert back.shape == (x.shape if axis == -1 else x.T.shape)
