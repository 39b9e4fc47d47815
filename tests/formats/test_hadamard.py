"""The random Hadamard rotation: bits against the oracle, its inverse, and products that do not change."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

import oracles
from blockscale.formats import rotate, rotate_back
from blockscale.formats.hadamard import DEFAULT_MASKS
from support.helpers import bits, expand, f32, golden, same_bits

pytest.importorskip("ml_dtypes", reason="the oracle rounds to bf16 with ml_dtypes")


def test_default_masks() -> None:
    assert DEFAULT_MASKS == oracles.HADAMARD_MASKS == {16: 0xD7E8, 32: 0x6627E8D5}


@pytest.mark.parametrize("mask", ["default", 0, -1, 0x1234])
@pytest.mark.parametrize("size", [16, 32])
def test_rotation_equals_the_oracle(size: int, mask: int | str, device: torch.device, compared: Counter[str]) -> None:
    number = DEFAULT_MASKS[size] if mask == "default" else int(mask) & ((1 << size) - 1)
    x = oracles.random_blocks(4000, 2 * size, seed=size)
    x = x[np.abs(x).max(axis=1) < 2.0**120]  # no overflow here: NaN has no fixed payload
    got = rotate(torch.from_numpy(x).to(device), size, number)
    compared["numpy hadamard"] += same_bits(bits(got), oracles.hadamard(x, number, size))


@pytest.mark.parametrize("length", [0, 1, 5, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("size", [16, 32])
def test_tail_groups_are_padded_with_zeros(size: int, length: int, device: torch.device) -> None:
    x = np.random.default_rng(length).standard_normal((3, length)).astype(np.float32)
    got = bits(rotate(torch.from_numpy(x).to(device), size, DEFAULT_MASKS[size]))
    assert got.shape == (3, -(-length // size) * size)
    if length:
        same_bits(got, oracles.hadamard(x, DEFAULT_MASKS[size], size))


@pytest.mark.parametrize("size", [16, 32])
def test_nan_and_overflow_poison_their_group_and_no_other(size: int, device: torch.device) -> None:
    x = torch.ones(1, 3 * size, device=device)
    x[0, size + 3] = torch.nan
    x[0, 2 * size :] = torch.finfo(torch.float32).max
    got = rotate(x, size, 0)[0].view(3, size)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()
    assert not got[2].isfinite().all()


@pytest.mark.parametrize("size", [16, 32])
def test_rotating_back_in_the_written_order(size: int, device: torch.device) -> None:
    """fp32 butterflies, the factor, the signs, and no bf16: bits, by numpy."""
    mask = DEFAULT_MASKS[size]
    x = np.random.default_rng(7).standard_normal((50, 3 * size)).astype(np.float32)
    y = x.reshape(50, 3, size).copy()
    stride = 1
    while stride < size:
        for low in (i for i in range(size) if not i & stride):
            a, b = y[..., low].copy(), y[..., low + stride].copy()
            y[..., low], y[..., low + stride] = a + b, a - b
        stride *= 2
    signs = np.array([-1 if mask >> i & 1 else 1 for i in range(size)], np.float32)
    want = (y * np.uint32(0x3E800000 if size == 16 else 0x3E3504F3).view(np.float32) * signs).reshape(x.shape)
    same_bits(bits(rotate_back(torch.from_numpy(x).to(device), size, mask)), want)


@pytest.mark.parametrize("size", [16, 32])
def test_rotating_back_undoes_the_rotation(size: int, device: torch.device) -> None:
    """Exactly for small integers in groups of 16; up to the roundings for groups of 32, whose factor is irrational."""
    x = torch.randint(-4, 5, (64, 4 * size), device=device).float()
    back = rotate_back(rotate(x, size, DEFAULT_MASKS[size]), size, DEFAULT_MASKS[size])
    if size == 16:
        assert torch.equal(back, x)
    else:
        assert (back - x).abs().max() < 4 * size**0.5 * 2.0**-8
    assert not torch.equal(rotate_back(rotate(x, size, DEFAULT_MASKS[size]), size, 0), x)


def test_product_is_preserved(device: torch.device) -> None:
    """Both operands rotated along the contraction dimension: integers in groups of 16, so exactly, bits and all."""
    a = torch.randint(-3, 4, (8, 64), device=device).double()
    b = torch.randint(-3, 4, (8, 64), device=device).double()
    rotated = [rotate(t.float(), 16, DEFAULT_MASKS[16]).double() for t in (a, b)]
    assert torch.equal(rotated[0] @ rotated[1].mT, a @ b.mT)
    assert not torch.equal(rotated[0] @ b.mT, a @ b.mT)


@pytest.mark.parametrize("case", golden("hadamard"), ids=lambda case: case["name"])
def test_golden(case: dict, device: torch.device) -> None:
    x = torch.from_numpy(f32(case["x"])).to(device)
    got = bits(rotate(x, case["group"], int(case["mask"], 16)))
    want = np.array(expand(case["expect"]["bf16"]), np.uint32) << 16
    nan = np.isnan(want.view(np.float32))
    same_bits(got[~nan], want[~nan])
    assert np.isnan(got[nan].view(np.float32)).all()
