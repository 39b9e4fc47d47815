"""Column operands from the codes of rows, against casts of the source."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.casts.requantize import count_underflows, keeps_values, requantize_columns
from blockscale.formats import FORMATS, BlockScaled, CastSpec
from blockscale.formats.cast_spec import as_cast
from blockscale.formats.decoding import decode_scale, spread
from support.helpers import expect, expect_values
from support.products import assert_same_bits, gaussian

KEPT = [("fp8_1x128", "pow2"), ("mxfp8_e4m3", "rceil"), ("mxfp8_e4m3", "ceil"), ("mxfp8_e5m2", "rceil")]
ROUNDED_TWICE = [
    ("fp8_1x128", "fp32"),
    ("mxfp8_e4m3", "floor"),
    ("mxfp8_e4m3", "even"),
    ("mxfp6_e2m3", "rceil"),
    ("mxfp4", "rceil"),
]


def columns_of(x: Tensor, spec: CastSpec, offs: Tensor | None = None) -> tuple[BlockScaled, BlockScaled]:
    """The row operand, and the columns requantized from it."""
    row = bs.quantize(x, spec)
    return row, requantize_columns(row, as_cast(spec), offs, torch.bfloat16)


def wgrad(dy: BlockScaled, x: BlockScaled) -> Tensor:
    return bs.scaled_mm(dy.operand, x.operand, torch.float32)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).double().norm() / want.double().norm())


def spread_rows(*shape: int) -> Tensor:
    """Rows whose magnitudes differ by up to 2^40 within every column block."""
    rng = torch.Generator().manual_seed(9)
    powers = torch.randint(-20, 21, (shape[0], 1), generator=rng)
    return (torch.randn(*shape, generator=rng) * torch.exp2(powers.float())).bfloat16()


@pytest.mark.parametrize(("format", "rule"), KEPT + ROUNDED_TWICE)
def test_weight_gradients_of_requantized_columns(format: str, rule: str):
    """Within 2e-7 of those of directly cast columns exactly where `keeps_values` says so."""
    spec = CastSpec(format, rule)
    x, dy = gaussian(256, 320), gaussian(256, 96, seed=1)
    want = wgrad(bs.quantize(dy, spec, axis=-2), bs.quantize(x, spec, axis=-2))
    off = relative(wgrad(columns_of(dy, spec)[1], columns_of(x, spec)[1]), want)
    assert keeps_values(format, rule) == ((format, rule) in KEPT)
    assert off <= 2e-7 if (format, rule) in KEPT else off > 2e-3


@pytest.mark.parametrize(("format", "rule"), KEPT)
def test_underflows_are_counted_and_bounded(format: str, rule: str):
    """Rows spread by 2^+-20: a value of the columns is off by a step of its block's smallest subnormal at most."""
    spec, element = CastSpec(format, rule), FORMATS[format].element
    x, dy = spread_rows(256, 160), spread_rows(256, 64)
    columns = {}
    for name, source in (("x", x), ("dy", dy)):
        row, col = columns_of(source, spec)
        direct = bs.quantize(source, spec, axis=-2)
        # an independent count: the oracles decode the rows and cast the columns
        values = expect_values(row)
        codes = expect(np.ascontiguousarray(values.T), format, rule).codes.T
        lost = int(((values != 0) & ((codes & 0x7F) == 0)).sum())
        assert lost > 1000, "the data shows nothing"
        found = count_underflows(row, col, None)
        assert (found.dtype, int(found)) == (torch.int64, lost)
        got, want = (bs.dequantize(each, torch.float32) for each in (col, direct))
        step = element.min_subnormal * spread(decode_scale(direct), direct.spec, direct.rows, direct.length).mT
        assert ((got - want).abs() <= step).all()
        columns[name] = (got.double(), want.double(), step.double())
    (x_got, x_want, x_step), (dy_got, dy_want, dy_step) = columns["x"], columns["dy"]
    bound = dy_step.mT @ x_want.abs() + dy_got.abs().mT @ x_step
    assert ((dy_got.mT @ x_got - dy_want.mT @ x_want).abs() <= bound * (1 + 1e-12)).all()
    # what underflows is small beside the largest values of its block
    assert relative(dy_got.mT @ x_got, dy_want.mT @ x_want) < 1e-4


@pytest.mark.parametrize(("format", "rule"), KEPT[:2])
@pytest.mark.parametrize("ends", [[5, 5, 140], [1, 130, 300], [0, 0, 0]])
def test_groups_and_odd_sizes(format: str, rule: str, ends: list[int]):
    """Every group as if it were alone; rows past the last group count for nothing."""
    spec, offs = CastSpec(format, rule), torch.tensor(ends, dtype=torch.int32)
    x = spread_rows(300, 72)
    row, col = columns_of(x, spec, offs)
    decoded = bs.dequantize(row, torch.float32)
    assert_same_bits(col.data, bs.quantize(decoded, spec, axis=-2, offs=offs).data)
    lost, start = 0, 0
    for end in ends:
        if end > start:
            part, part_col = columns_of(x[start:end], spec)
            lost += int(count_underflows(part, part_col, None))
            assert torch.equal(
                bs.dequantize(col, torch.float32, offs=offs)[start:end], bs.dequantize(part_col, torch.float32)
            )
        start = end
    assert int(count_underflows(row, col, offs)) == lost


@pytest.mark.parametrize(("format", "rule"), KEPT[:2])
def test_zeros_and_values_that_are_not_finite(format: str, rule: str):
    """Zeros stay zero and are no underflow. A block with NaN or an infinity is lost in the rows and stays lost."""
    spec, along = CastSpec(format, rule), FORMATS[format].block[1]
    row, col = columns_of(torch.zeros(130, 40), spec)
    assert not bs.dequantize(col, torch.float32).any()
    assert not int(count_underflows(row, col, None))
    for special in (float("nan"), float("inf")):
        x = gaussian(256, 256)
        x[130, 3] = special
        row, col = columns_of(x, spec)
        lost = torch.zeros(256, 256, dtype=torch.bool)
        lost[130 // along * along : (130 // along + 1) * along, :along] = True
        assert torch.equal(~bs.dequantize(col, torch.float32).isfinite(), lost)
        assert not int(count_underflows(row, col, None))


def test_compiled():
    spec, x = CastSpec("mxfp8_e4m3"), spread_rows(64, 96)
    row, want = columns_of(x, spec)

    def call(q: BlockScaled) -> tuple[BlockScaled, Tensor]:
        col = requantize_columns(q, as_cast(spec), None, torch.bfloat16)
        return col, count_underflows(q, col, None)

    col, lost = torch.compile(call, fullgraph=True, backend="aot_eager")(row)
    assert_same_bits(col.data, want.data)
    assert int(lost) == int(count_underflows(row, want, None))
