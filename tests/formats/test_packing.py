"""Packed codes: two FP4 a byte, four FP6 in three bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracles
from blockscale.formats import pack_fp4, pack_fp6, unpack_fp4, unpack_fp6
from support.helpers import bits, golden, same_bits, u8

PACKING = {
    "fp4": (pack_fp4, unpack_fp4, oracles.pack_fp4, 16),
    "fp6": (pack_fp6, unpack_fp6, oracles.pack_fp6, 64),
}


@pytest.mark.parametrize("kind", PACKING)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 6, 7, 31, 32, 33, 127, 130])
def test_packing_equals_the_oracle_and_round_trips(kind: str, length: int, device: torch.device) -> None:
    pack, unpack, oracle, codes = PACKING[kind]
    values = np.random.default_rng(length).integers(0, codes, (3, 5, length), dtype=np.uint8)
    packed = pack(torch.from_numpy(values).to(device))
    same_bits(bits(packed), oracle(values))
    same_bits(bits(unpack(packed, length)), values)


@pytest.mark.parametrize("kind", PACKING)
def test_every_code_at_every_place(kind: str, device: torch.device) -> None:
    pack, unpack, oracle, codes = PACKING[kind]
    places = 12 // PACKING[kind][3].bit_length() * 2
    values = np.zeros((codes, places, places), np.uint8)
    values[:, range(places), range(places)] = np.arange(codes)[:, None]
    packed = pack(torch.from_numpy(values).to(device))
    same_bits(bits(packed), oracle(values))
    same_bits(bits(unpack(packed, places)), values)


def test_packing_reads_strided_input(device: torch.device) -> None:
    codes = torch.arange(60, dtype=torch.uint8, device=device).view(6, 10)
    for pack, mask in ((pack_fp4, 15), (pack_fp6, 63)):
        turned = (codes & mask).mT
        same_bits(bits(pack(turned)), bits(pack(turned.contiguous())))


PACK_CASES = [case for case in golden("layouts") if case["op"] == "pack"]


@pytest.mark.parametrize("case", PACK_CASES, ids=lambda case: case["name"])
def test_golden(case: dict, device: torch.device) -> None:
    pack = PACKING[case["format"]][0]
    codes = torch.from_numpy(u8(case["codes"])).to(device)
    same_bits(bits(pack(codes)), u8(case["expect"]["packed"]))
