"""Transposed codes: the kernel against the reference, its machine code, and pads that are zero."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blockscale.casts.transpose import transpose_codes
from support import helpers
from support.products import assert_same_bits


@pytest.mark.slow
def test_interpreted_kernel_equals_the_reference() -> None:
    pytest.importorskip("triton", reason="needs triton, which is not installed")
    cases, values, wrong = helpers.interpreted(Path(__file__).parent / "interpreted_transpose.py")
    assert cases == 12
    assert values > 300_000
    assert wrong == 0


def byte_by_byte(codes: Tensor, length: int, bits: int) -> Iterator[int]:
    """Codes of the transpose, one after the other."""
    for column in range(length):
        for row in codes.tolist():
            yield row[column] if bits == 8 else row[column // 2] >> (4 * (column % 2)) & 15


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rows", "length"), [(3, 5), (16, 2), (1, 1), (33, 18)])
def test_every_code_and_zeros_in_the_pads(rows: int, length: int, bits: int) -> None:
    codes = torch.randint(0, 256, (rows, -(-length * bits // 8)), dtype=torch.uint8)
    out = transpose_codes(codes, length, bits)
    assert (out.shape[0], out.shape[1] % 16) == (length, 0)
    flat = out if bits == 8 else torch.stack((out & 15, out >> 4), dim=-1).flatten(-2)
    assert flat[:, :rows].flatten().tolist() == list(byte_by_byte(codes, length, bits))
    assert not flat[:, rows:].any()


def test_twice_is_once() -> None:
    codes = torch.randint(0, 256, (2, 48, 80), dtype=torch.uint8)
    assert_same_bits(transpose_codes(transpose_codes(codes, 80, 8), 48, 8), codes)
