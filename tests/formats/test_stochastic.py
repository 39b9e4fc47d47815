"""Stochastic rounding: random words as a function of (seed, tick, stream, group, position), and casts with them."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale import BlockScaled, CastSpec, Stochastic, dequantize, quantize, quantize_both, rng_state
from blockscale.errors import OptionError
from blockscale.formats import FORMATS, ROLES, stream_id
from blockscale.formats.hadamard import DEFAULT_MASKS
from blockscale.formats.stochastic import module_name, philox, random_words
from support.helpers import (
    FP8,
    ONE_D,
    bits,
    codes_of,
    expand,
    expect,
    golden,
    same_bits,
    same_cast,
    same_operand,
    scales_of,
)

NAME = "model.layers.0.mlp.down_proj"
SEED, TICK, ROLE = 0x0123456789ABCDEF, 7, "dgrad_dy"


# ---- the generator -------------------------------------------------------------------------------------------------


def words(i: NDArray, seed: int, tick: int, stream: int, group: int, device: torch.device) -> NDArray[np.uint32]:
    position = torch.from_numpy(np.asarray(i, np.int64)).to(device)
    got = random_words(position, rng_state(seed, tick, device), stream, group)
    assert got.dtype == torch.int64
    return bits(got).astype(np.uint32)


def test_philox_equals_the_oracle(device: torch.device, compared: Counter[str]) -> None:
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 1 << 32, (1 << 16, 4), dtype=np.int64)
    key = rng.integers(0, 1 << 32, (1 << 16, 2), dtype=np.int64)
    counter[:3], key[:3] = [[0] * 4, [0xFFFFFFFF] * 4, [1, 2, 3, 4]], [[0] * 2, [0xFFFFFFFF] * 2, [5, 6]]
    c, k = (tuple(torch.from_numpy(a).to(device).unbind(1)) for a in (counter, key))
    got = torch.stack(philox(c, k), dim=1)
    compared["numpy philox"] += same_bits(bits(got).astype(np.uint32), oracles.philox4x32(counter, key))


def test_words_use_every_field(device: torch.device, compared: Counter[str]) -> None:
    """Positions to the end of 50 bits, seeds with the top bit set, ticks over 32 bits, groups over 16."""
    rng = np.random.default_rng(1)
    i = np.concatenate((np.arange(4096), rng.integers(0, 1 << 50, 4096), [(1 << 34) - 1, 1 << 34, 1 << 44]))
    for seed, tick, stream, group in (
        (0, 0, 0, 0),
        (SEED, TICK, 0xD94C4802, 0),
        (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFF),
        (1 << 63, (1 << 40) + 3, 5, 255),
    ):
        want = oracles.sr_bits(i, seed, tick, stream, group)
        compared["numpy random words"] += same_bits(words(i, seed, tick, stream, group, device), want)


@pytest.mark.parametrize(
    "case",
    [c for c in golden("stochastic") if c["op"] in ("philox", "sr_bits", "stream")],
    ids=lambda case: case["name"],
)
def test_golden(case: dict, device: torch.device) -> None:
    want = case["expect"]
    if case["op"] == "philox":
        counter, key = (
            tuple(torch.tensor(word, dtype=torch.int64, device=device) for word in expand(case[field]))
            for field in ("counter", "key")
        )
        assert [int(word) for word in philox(counter, key)] == expand(want["words"])
    elif case["op"] == "sr_bits":
        seed, stream = int(case["seed"], 16), int(case["stream"], 16)
        assert words(case["i"], seed, case["tick"], stream, case["group"], device).tolist() == expand(want["words"])
    else:
        assert stream_id(case["module"], ROLES[case["role"]]) == int(want["stream"], 16)


@pytest.mark.parametrize("option", ["seed", "tick"])
@pytest.mark.parametrize("value", [1.5, 2.0, "3", None, True, torch.tensor(1.5), 1 << 64, -(1 << 63) - 1])
def test_state_is_made_of_whole_numbers(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"{option}=.*Rule: it is a whole number.*Fix: pass {option}=0"):
        rng_state(**{"seed": 0, option: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("where", [{"origin": (0, 1.5, 8)}, {"origin": (0.0, 0, 8)}, {"first_group": 1.0}])
def test_origins_of_shards_are_whole_numbers(where: dict[str, Any]) -> None:
    (name,) = where
    with pytest.raises(OptionError, match=f"{name}=.*whole number"):
        Stochastic(rng_state(0), "layer", **where).check()


def test_state_holds_seed_and_tick(device: torch.device) -> None:
    assert rng_state(7, 3, device).tolist() == [7, 3]
    assert rng_state(2**64 - 1, 0, device).tolist() == [-1, 0]
    assert rng_state(1 << 63, device=device).tolist() == [-(1 << 63), 0]
    assert rng_state(5, device=device).device.type == device.type


def test_roles_and_streams_equal_the_oracle() -> None:
    assert ROLES == ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
    for name in (NAME, "a", "module.module.x", "encoder.Größe"):
        for number, role in enumerate(ROLES):
            assert stream_id(name, role) == oracles.stream_id(name, number)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.layers.0", "layers.0"),
        ("_orig_mod.module.layers.0", "layers.0"),
        ("module.module.layers.0", "module.layers.0"),
        ("layers._fsdp_wrapped_module.0._checkpoint_wrapped_module.mlp._orig_mod", "layers.0.mlp"),
        ("layers.module.mlp", "layers.module.mlp"),
        ("my_orig_mod.mlp", "my_orig_mod.mlp"),
        ("module", ""),
    ],
)
def test_wrappers_do_not_change_a_module_name(name: str, plain: str) -> None:
    assert module_name(name) == oracles.plain_module_name(name) == plain
    assert stream_id(name, ROLE) == (zlib.crc32(plain.encode()) & 0xFFFFFF) << 8 | 2


# ---- casts against the oracle --------------------------------------------------------------------------------------


def stochastic(
    device: torch.device, name: str = NAME, seed: int = SEED, tick: int = TICK, **where: object
) -> Stochastic:
    return Stochastic(rng_state(seed, tick, device), name, **where)


def positions(shape: tuple[int, int], row0: int = 0, col0: int = 0, columns: int | None = None) -> NDArray[np.int64]:
    row, column = np.indices(shape)
    return (row + row0) * (shape[1] if columns is None else columns) + column + col0


def needs_ml_dtypes() -> None:
    pytest.importorskip("ml_dtypes", reason="the cast oracle encodes with ml_dtypes")


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", FORMATS)
def test_stochastic_casts_equal_the_oracle(form: str, axis: int, device: torch.device, compared: Counter[str]) -> None:
    """Every rule; the random word of an element depends on its position in the source, whichever axis is scaled."""
    needs_ml_dtypes()
    x = np.random.default_rng(2).standard_normal((150, 260)).astype(np.float32)
    R = oracles.sr_bits(positions(x.shape), SEED, TICK, stream_id(NAME, ROLE))
    for rule in FORMATS[form].rules:
        q = quantize(
            torch.from_numpy(x).to(device), form, axis=axis, scale_rule=rule, rounding=stochastic(device), role=ROLE
        )
        want = expect(x, form, rule, words=R) if axis == -1 else expect(x.T, form, rule, words=R.T)
        compared["exact stochastic casts"] += same_cast(q, want, rule)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(3, 20, 40), (2, 3, 17, 33)])
def test_leading_dimensions_are_flattened_into_rows(shape: tuple[int, ...], axis: int, device: torch.device) -> None:
    needs_ml_dtypes()
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    R = oracles.sr_bits(positions((x.size // shape[-1], shape[-1])), SEED, TICK, stream_id(NAME, ROLE)).reshape(shape)
    q = quantize(torch.from_numpy(x).to(device), "mxfp4", axis=axis, rounding=stochastic(device), role=ROLE)
    codes, scales = codes_of(q), scales_of(q)
    for index in np.ndindex(shape[:-2]):
        matrix, matrix_words = (x[index], R[index]) if axis == -1 else (x[index].T, R[index].T)
        want = expect(matrix, "mxfp4", "rceil", words=matrix_words)
        same_bits(codes[index], want.codes)
        same_bits(scales[index], want.scale)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_stochastic_and_rotated(form: str, axis: int, device: torch.device) -> None:
    """The random word depends on the position of the rotated value; positions continue in a rotated tail."""
    needs_ml_dtypes()
    size = FORMATS[form].hadamard
    x = np.random.default_rng(4).standard_normal((45, 71)).astype(np.float32)
    q = quantize(torch.from_numpy(x).to(device), form, axis=axis, rounding=stochastic(device), role=ROLE, hadamard=True)
    turned = oracles.hadamard(x if axis == -1 else np.ascontiguousarray(x.T), DEFAULT_MASKS[size], size)
    row, column = np.indices(turned.shape if axis == -1 else turned.T.shape)
    R = oracles.sr_bits(row * x.shape[1] + column, SEED, TICK, stream_id(NAME, ROLE))
    same_cast(q, expect(turned, form, q.spec.default_rule(stochastic=True), words=R if axis == -1 else R.T))


# ---- geometry does not matter --------------------------------------------------------------------------------------


def shard_of(q: BlockScaled, rows: slice, columns: slice) -> tuple[NDArray, NDArray]:
    """Codes and scales of a shard of the source; the scaled axis is split between blocks."""
    block = q.spec.block[1]
    across, along = (rows, columns) if q.axis == -1 else (columns, rows)
    blocks = slice(along.start // block, -(-along.stop // block))
    return codes_of(q)[across, along], scales_of(q)[across, blocks]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", ONE_D)
def test_shards_equal_the_unsharded_cast(form: str, axis: int, device: torch.device) -> None:
    """Split anywhere across, and between blocks along; NVFP4 shards are given the amax of the full tensor."""
    x = torch.randn(390, 394, device=device)
    amax = {"amax": x.abs().amax()} if form == "nvfp4" else {}
    full = quantize(x, form, axis=axis, rounding=stochastic(device), role=ROLE, **amax)
    for row0, row1 in ((0, 128), (128, 390)):
        for col0, col1 in ((0, 256), (256, 394)):
            r1, c0 = (row1, col0) if axis == -1 else (row1, col0 + 5)  # not at a block boundary where that is allowed
            r0 = row0 + 3 if axis == -1 else row0
            part = stochastic(device, origin=(r0, c0, 394))
            q = quantize(x[r0:r1, c0:col1], form, axis=axis, rounding=part, role=ROLE, **amax)
            codes, scales = shard_of(full, slice(r0, r1), slice(c0, col1))
            same_bits(codes_of(q), codes)
            same_bits(scales_of(q), scales)


def test_shards_far_into_a_huge_tensor(device: torch.device) -> None:
    """Positions past 2^34 reach the second counter word."""
    needs_ml_dtypes()
    columns, row0 = 1 << 20, 1 << 17
    x = np.random.default_rng(5).standard_normal((16, 64)).astype(np.float32)
    for col0 in (0, 96):
        q = quantize(
            torch.from_numpy(x).to(device),
            "mxfp4",
            rounding=stochastic(device, origin=(row0, col0, columns)),
            role=ROLE,
        )
        i = positions(x.shape, row0, col0, columns)
        assert i.min() >= 1 << 34
        R = oracles.sr_bits(i, SEED, TICK, stream_id(NAME, ROLE))
        same_cast(q, expect(x, "mxfp4", "rceil", words=R))


def test_both_axes_use_the_same_random_words(device: torch.device) -> None:
    """A tensor whose scales are all equal gets the same codes along either axis."""
    x = torch.rand(64, 64, device=device) * 5
    x.fill_diagonal_(6.0)
    x[torch.arange(64), (torch.arange(64) + 32) % 64] = 6.0
    row = quantize(x, "mxfp4", axis=-1, rounding=stochastic(device), role=ROLE)
    col = quantize(x, "mxfp4", axis=-2, rounding=stochastic(device), role=ROLE)
    assert set(scales_of(row).reshape(-1)) == set(scales_of(col).reshape(-1)) == {127}
    same_bits(codes_of(row), codes_of(col).T)


def test_quantize_both_rounds_as_two_casts_do(device: torch.device) -> None:
    x = torch.randn(40, 70, device=device)
    specs = [
        CastSpec("nvfp4", rounding=stochastic(device), role="dgrad_dy"),
        CastSpec("mxfp4", rounding=stochastic(device, tick=8), role="wgrad_dy", hadamard=True),
    ]
    row, col = quantize_both(x, *specs)
    same_operand(row, quantize(x, specs[0], axis=-1))
    same_operand(col, quantize(x, specs[1], axis=-2))


@pytest.mark.parametrize("form", ["mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_1x128"])
def test_repeatable_and_distinct(form: str, device: torch.device) -> None:
    """The same bytes again, also after a resume from seed and tick; others for another name, role, seed, tick."""
    x = torch.randn(64, 256, device=device)

    def codes(role: str = ROLE, **change: object) -> NDArray:
        return codes_of(quantize(x, form, rounding=stochastic(device, **change), role=role))

    base = codes()
    same_bits(codes(), base)
    same_bits(codes(name=f"module._orig_mod.{NAME}"), base)
    others = [codes(role="wgrad_dy"), codes(tick=8), codes(seed=SEED + 1), codes(seed=SEED + (1 << 32))]
    others += [codes(name=NAME + "2"), codes(origin=(1, 0, 256)), codes(origin=(0, 0, 257))]
    others.append(codes_of(quantize(x, form)))
    for other in others:
        assert 0.05 < (other != base).mean() < 0.9
    assert len({other.tobytes() for other in others}) == len(others)


def test_state_is_read_from_the_device(device: torch.device) -> None:
    """Advancing the tick in place changes the next cast; a cast does not advance it."""
    x, state = torch.randn(16, 64, device=device), rng_state(SEED, TICK, device)
    spec = CastSpec("mxfp4", rounding=Stochastic(state, NAME), role=ROLE)
    first = quantize(x, spec)
    assert state.tolist() == [SEED, TICK]
    state[1] += 1
    second = quantize(x, spec)
    same_operand(second, quantize(x, "mxfp4", rounding=stochastic(device, tick=TICK + 1), role=ROLE))
    assert not np.array_equal(codes_of(first), codes_of(second))


# ---- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "mxfp8_e5m2"])
def test_rows_count_from_the_start_of_their_group(form: str, axis: int, device: torch.device) -> None:
    needs_ml_dtypes()
    sizes, first_group = [31, 0, 129, 1], 5
    ends = np.cumsum(sizes)
    x = np.random.default_rng(6).standard_normal((ends[-1] + 4, 48)).astype(np.float32)
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    amax = {"amax": "group"} if form == "nvfp4" else {}
    q = quantize(
        torch.from_numpy(x).to(device),
        form,
        axis=axis,
        rounding=stochastic(device, first_group=first_group),
        role=ROLE,
        offs=offs,
        **amax,
    )
    codes, rule, start = codes_of(q), q.spec.default_rule(stochastic=True), 0
    for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        part = x[end - size : end]
        R = oracles.sr_bits(positions(part.shape), SEED, TICK, stream_id(NAME, ROLE), first_group + number)
        if axis == -1:
            want = expect(part, form, rule, words=R)
            same_bits(codes[end - size : end], want.codes, number)
        else:
            want = expect(part.T, form, rule, words=R.T)
            same_bits(codes[:, start : start + size], want.codes, number)
        start += -(-size // 128) * 128


@pytest.mark.parametrize("axis", [-1, -2])
def test_expert_parallel_shards_equal_the_whole(axis: int, device: torch.device) -> None:
    """A rank that holds experts 2 and 3 uses the random words that a single process uses for them."""
    x = torch.randn(200, 64, device=device)
    ends = [50, 60, 130, 200]
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    full = quantize(x, "nvfp4", axis=axis, rounding=stochastic(device), role=ROLE, offs=offs, amax="group")
    part = quantize(
        x[60:],
        "nvfp4",
        axis=axis,
        rounding=stochastic(device, first_group=2),
        role=ROLE,
        offs=(offs[2:] - 60).to(torch.int32),
        amax="group",
    )
    if axis == -1:
        same_bits(codes_of(part), codes_of(full)[60:])
    else:
        same_bits(codes_of(part)[:, :256], codes_of(full)[:, 256:512])
    same_bits(bits(part.global_scale), bits(full.global_scale)[2:])


# ---- the expectation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "rule"), [("mxfp4", "rceil"), ("nvfp4", "up"), ("mxfp8_e4m3", "rceil")])
def test_expectation_is_the_value_block_amax_included(form: str, rule: str, device: torch.device) -> None:
    """One row many times, so that each value is rounded with many words: within 4 standard errors of a binomial."""
    needs_ml_dtypes()
    samples = 1 << 14
    x = torch.randn(1, 64, device=device)
    q = quantize(x.expand(samples, 64), form, scale_rule=rule, rounding=stochastic(device), role=ROLE)
    scales = scales_of(q)
    assert (scales == scales[0]).all()
    if form == "nvfp4":
        step = oracles.decode(scales[0], "e4m3").astype(np.float64) * q.global_scale.item()
    else:
        step = oracles.e8m0_decode(scales[0]).astype(np.float64)
    element = q.spec.element
    levels = oracles.grid(element.name).astype(np.float64)
    wanted = np.abs(x.cpu().numpy()[0]).astype(np.float64) / np.repeat(step, q.spec.block[1])
    assert wanted.max() <= levels[-1] * (1 + 1e-6)  # the condition of being unbiased: nothing clips
    low = np.clip(np.searchsorted(levels, wanted, side="right") - 1, 0, len(levels) - 2)
    share = np.clip((wanted - levels[low]) / (levels[low + 1] - levels[low]), 0, 1)
    up = codes_of(q) & ((1 << (element.bits - 1)) - 1)
    up = up.astype(np.int64) - low
    assert set(np.unique(up)) == {0, 1}
    error = np.abs(up.mean(axis=0) - share)
    assert (error <= 4 * np.sqrt(share * (1 - share) / samples) + 1e-6).all()


@pytest.mark.parametrize("form", [*FP8, "mxfp6_e2m3"])
def test_exact_values_never_move(form: str, device: torch.device) -> None:
    q = quantize(torch.randn(20, 200, device=device), form, scale_rule="pow2" if form in FP8 else "rceil")
    x = dequantize(q, torch.float32)
    rounded = quantize(x, form, scale_rule="pow2" if form in FP8 else "rceil", rounding=stochastic(device), role=ROLE)
    same_bits(bits(dequantize(rounded, torch.float32)), bits(x))


def test_stochastic_rounding_without_a_role_is_refused(device: torch.device) -> None:
    x = torch.randn(2, 32, device=device)
    with pytest.raises(ValueError, match=re.escape("role='dgrad_dy'")):
        quantize(x, "mxfp4", rounding=stochastic(device))
