"""Tensors of more than 2^31 values on a GPU: 32-bit offsets would overflow.

Blocks are local, so the cast of a slice equals the slice of the cast. Slices at the beginning, around the 2^31st value
and at the end are compared with the reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import BlockScaled, CastSpec
from blockscale.formats.layout import ceil_div

LIMIT = 1 << 31
NAMES = ["fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "nvfp4"]
COLUMNS = 1 << 15
ROWS = LIMIT // COLUMNS + 1000  # the last tile is not full, and codes along the rows have pads
EXPERTS = (33, 2048 + 128, 1 << 15)
NEEDED = 40 << 30
TITLE = "the reference, Triton casts past 2^31 values"


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    if torch.cuda.is_available() and free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of GPU memory, {free >> 30} are free")
    yield
    torch.cuda.empty_cache()


def spec_of(name: str) -> CastSpec:
    """NVFP4 gets a supplied amax: that of a slice would differ."""
    return CastSpec(name, amax=torch.tensor(6.0, device="cuda")) if name == "nvfp4" else CastSpec(name)


def slices(rows: int, columns: int) -> list[slice]:
    """Full blocks of rows: the first, those around the 2^31st value, and the last."""
    middle, last = LIMIT // columns // 128 * 128, (rows - 1) // 128 * 128
    return [slice(0, 256), slice(middle - 128, middle + 128), slice(last, rows)]


def same(got: Tensor, want: Tensor) -> int:
    assert got.shape == want.shape
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.view(as_integers), want.view(as_integers))
    return got.numel()


def same_rows(got: BlockScaled, want: BlockScaled, where: slice) -> int:
    """Compare codes and scales of those rows of the source with the cast of the rows alone."""
    (across, along), per_byte = got.spec.block, got.spec.codes_per_byte
    data, scale = got.operand.data.view(torch.uint8), got.operand.plain_scale()
    if got.axis == -1:
        data, scale = data[where], scale[where.start // across : ceil_div(where.stop, across)]
    else:
        data = data[:, where.start // per_byte : ceil_div(where.stop, per_byte)]
        scale = scale[:, where.start // along : ceil_div(where.stop, along)]
    same(scale, want.operand.plain_scale())
    return same(data, want.operand.data.view(torch.uint8)) * per_byte


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_past_32_bits(name: str, compared: Counter[str]) -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > LIMIT
    spec = spec_of(name)
    for cast in (
        lambda: (bs.quantize(x, spec), bs.quantize(x, spec, axis=-2)),
        lambda: bs.quantize_both(x, spec, spec)[:2],
    ):
        with bs.use_backend("triton"):
            operands = cast()
        for where in slices(ROWS, COLUMNS):
            for q in operands:
                with bs.use_backend("reference"):
                    want = bs.quantize(x[where], spec, axis=q.axis)
                compared[TITLE] += same_rows(q, want, where)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_decodes_past_32_bits(name: str, compared: Counter[str]) -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    spec = spec_of(name)
    for axis in (-1, -2):
        with bs.use_backend("triton"):
            values = bs.dequantize(bs.quantize(x, spec, axis=axis))
        for where in slices(ROWS, COLUMNS):
            with bs.use_backend("reference"):
                want = bs.dequantize(bs.quantize(x[where], spec, axis=axis))
            compared["the reference, Triton dequantize past 2^31 values"] += same(values[where], want)
        del values


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_experts_past_32_bits(name: str, compared: Counter[str]) -> None:
    count, rows, columns = EXPERTS
    x = torch.randn(EXPERTS, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > LIMIT
    spec, boundary = spec_of(name), LIMIT // (rows * columns)
    with bs.use_backend("triton"):
        row, col = bs.quantize_both(x, spec, spec)[:2]
        values = bs.dequantize(row)
    for expert in (0, boundary, count - 1):
        for q in (row, col):
            with bs.use_backend("reference"):
                want = bs.quantize(x[expert], spec, axis=q.axis)
            same(q.operand.plain_scale()[expert], want.operand.plain_scale())
            got, codes = q.operand.data.view(torch.uint8)[expert], want.operand.data.view(torch.uint8)
            compared[TITLE] += same(got, codes) * q.spec.codes_per_byte
            if q.axis == -1:
                with bs.use_backend("reference"):
                    compared[TITLE] += same(values[expert], bs.dequantize(want))
