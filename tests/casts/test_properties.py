"""Casts of any shape, magnitude and option against the oracles, with inputs that hypothesis makes up and shrinks."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale import Stochastic, dequantize, quantize, rng_state
from blockscale.formats import FORMATS, stream_id
from blockscale.formats.hadamard import DEFAULT_MASKS
from support.helpers import FORMAT_RULES, ONE_D, bits, codes_of, expect, expect_values, same_bits, same_cast, source

pytest.importorskip("ml_dtypes", reason="the cast oracles encode with ml_dtypes")
pytest.importorskip("hypothesis", reason="the inputs are made up by hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# a device is the same for every example; examples are the same in every run
SETTINGS = settings(
    deadline=None,
    max_examples=100,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Matrix(NamedTuple):
    """A recipe for a matrix: small enough to print, rich enough to fill."""

    rows: int
    columns: int
    seed: int
    low: int
    high: int
    special: tuple[float, ...]
    patterns: bool

    def values(self) -> NDArray[np.float32]:
        rng = np.random.default_rng(self.seed)
        shape = (self.rows, self.columns)
        if self.patterns:  # any bits at all, NaN and Inf thinned out to a few
            x = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
            x = np.where(np.isfinite(x) | (rng.random(shape) < 0.01), x, np.float32(0))
        else:
            exponent = rng.integers(self.low, self.high + 1, shape)
            with np.errstate(over="ignore"):
                x = np.ldexp(rng.uniform(-2, 2, shape), exponent).astype(np.float32)
            x[~np.isfinite(x)] = 1.0
        for value in self.special:
            x[rng.integers(self.rows), rng.integers(self.columns)] = value
        return x


SPECIAL = st.sampled_from([0.0, -0.0, 448.0, 6.0, -7.5, 3.5, 2.0**-149, -(2.0**-127), 3.4e38, np.inf, -np.inf, np.nan])
EXPONENTS = st.tuples(st.integers(-150, 127), st.integers(0, 30)).map(lambda t: (t[0], min(t[0] + t[1], 127)))
MATRICES = st.builds(
    lambda rows, columns, seed, exponents, special, patterns: Matrix(
        rows, columns, seed, *exponents, tuple(special), patterns
    ),
    st.integers(1, 40),
    st.integers(1, 300),
    st.integers(0, 1 << 16),
    EXPONENTS,
    st.lists(SPECIAL, max_size=3),
    st.booleans(),
)
AXES = st.sampled_from([-1, -2])
DTYPES = st.sampled_from(["bf16", "fp16", "fp32"])


@SETTINGS
@given(
    recipe=MATRICES,
    form_rule=st.sampled_from(FORMAT_RULES),
    dtype=DTYPES,
    axis=AXES,
    satfinite=st.booleans(),
    amax=st.one_of(st.none(), st.floats(0, 2.0**127, width=32)),
    layout=st.integers(0, 1),
)
def test_any_cast(
    recipe: Matrix,
    form_rule: tuple[str, str],
    dtype: str,
    axis: int,
    satfinite: bool,
    amax: float | None,
    layout: int,
    device: torch.device,
    compared: Counter[str],
) -> None:
    """Codes, scales and decoded values of a cast with options drawn at random."""
    form, rule = form_rule
    spec = FORMATS[form]
    options: dict[str, object] = {"scale_layout": spec.layouts[layout]}
    expected: dict[str, object] = {}
    if spec.family == "mx":
        options["satfinite"] = expected["satfinite"] = satfinite
    if spec.family == "nvfp4" and amax is not None:
        options["amax"] = torch.tensor(amax, dtype=torch.float32, device=device)
        expected["amax"] = np.float32(amax)
    x, exact = source(recipe.values(), dtype, device)
    q = quantize(x, form, axis=axis, scale_rule=rule, **options)
    want = expect(exact if axis == -1 else exact.T, form, rule, **expected)
    compared["ml_dtypes casts by hypothesis"] += same_cast(q, want)
    values = dequantize(q, torch.float32)
    same_bits(bits(values if axis == -1 else values.mT), expect_values(q))


@SETTINGS
@given(
    recipe=MATRICES,
    form=st.sampled_from(list(FORMATS)),
    axis=AXES,
    seed=st.integers(0, (1 << 64) - 1),
    tick=st.integers(0, 1 << 40),
    origin=st.one_of(st.none(), st.tuples(st.integers(0, 1 << 24), st.integers(0, 1000), st.integers(1300, 1 << 22))),
    role=st.sampled_from(["fprop_x", "dgrad_dy", "wgrad_x"]),
    hadamard=st.booleans(),
)
def test_any_stochastic_cast(
    recipe: Matrix,
    form: str,
    axis: int,
    seed: int,
    tick: int,
    origin: tuple[int, int, int] | None,
    role: str,
    hadamard: bool,
    device: torch.device,
    compared: Counter[str],
) -> None:
    x = recipe.values()
    x[~np.isfinite(x) | (np.abs(x) > 1e37)] = 1.0  # a rotation that overflows is tested elsewhere
    size = FORMATS[form].hadamard
    hadamard = hadamard and form in ("mxfp4", "nvfp4")
    q = quantize(
        torch.from_numpy(x).to(device),
        form,
        axis=axis,
        rounding=Stochastic(rng_state(seed, tick, device), "layers.3.mlp", origin),
        role=role,
        hadamard=hadamard,
    )
    turned = x if axis == -1 else np.ascontiguousarray(x.T)
    if hadamard:
        turned = oracles.hadamard(turned, DEFAULT_MASKS[size], size)
    row0, col0, columns = origin or (0, 0, x.shape[1])
    row, column = np.indices(turned.shape if axis == -1 else turned.T.shape)
    words = oracles.sr_bits((row + row0) * columns + column + col0, seed, tick, stream_id("layers.3.mlp", role))
    rule = FORMATS[form].default_rule(stochastic=True)
    want = expect(turned, form, rule, words=words if axis == -1 else words.T)
    compared["exact stochastic casts by hypothesis"] += same_cast(q, want)


@SETTINGS
@given(
    sizes=st.lists(st.one_of(st.integers(0, 5), st.integers(100, 270)), min_size=1, max_size=5),
    extra=st.integers(0, 5),
    columns=st.integers(1, 40),
    form=st.sampled_from(ONE_D),
    axis=AXES,
    seed=st.integers(0, 1000),
)
def test_any_groups(
    sizes: list[int],
    extra: int,
    columns: int,
    form: str,
    axis: int,
    seed: int,
    device: torch.device,
    compared: Counter[str],
) -> None:
    """Each group of a grouped cast is the cast of its rows alone, at its place; decoding brings it back."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sum(sizes) + extra, columns)).astype(np.float32)
    x[sum(sizes) :] = np.nan
    offs = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)
    options = {"amax": "group"} if form == "nvfp4" else {}
    q = quantize(torch.from_numpy(x).to(device), form, axis=axis, offs=offs, **options)
    back = dequantize(q, torch.float32, offs=offs)
    codes, start, end = codes_of(q), 0, 0
    for size in sizes:
        part, end = x[end : end + size], end + size
        want = expect(part if axis == -1 else part.T, form, FORMATS[form].default_rule())
        place = (slice(end - size, end), slice(None)) if axis == -1 else (slice(None), slice(start, start + size))
        compared["ml_dtypes casts by hypothesis"] += same_bits(codes[place], want.codes)
        alone = quantize(torch.from_numpy(part).to(device), form, axis=axis)
        same_bits(bits(back[end - size : end]), bits(dequantize(alone, torch.float32)))
        start += -(-size // 128) * 128
    if axis == -2:
        assert not bits(back[end:]).any()
