"""Fused casts equal the cast of the activations that `test_activation.py` tests, and of gathered rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import CastSpec, Stochastic, quantize, quantize_both, rng_state
from blockscale.casts import activation
from blockscale.casts.fused import (
    rmsnorm_quantize,
    rmsnorm_quantize_both,
    swiglu_backward_quantize_both,
    swiglu_quantize,
    swiglu_quantize_both,
)
from blockscale.casts.permuted import permute_quantize_both, permute_quantize_columns, quantize_permute
from blockscale.formats import FORMATS
from support.helpers import ONE_D, all_bf16, bits, first_of, same_bits, same_operand
from support.products import assert_same_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [0, 1, 31, 127, 129]
EXTRA = 6


def ends_of(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)


def specs(device: torch.device) -> dict[str, CastSpec]:
    """One cast of each kind: every format and every option."""
    stochastic = Stochastic(rng_state(3, device=device), "layer")
    options = {
        "given amax": CastSpec("nvfp4", "up", amax=torch.tensor(2.0, device=device)),
        "rotated": CastSpec("mxfp4", hadamard=True),
        "stochastic": CastSpec("nvfp4", rounding=stochastic, role="dgrad_dy", hadamard=True),
        "blocked": CastSpec("mxfp8_e5m2", "floor", scale_layout="blocked", satfinite=True),
    }
    return {name: CastSpec(name) for name in FORMATS} | options


KINDS = list(specs(torch.device("cpu")))


# ---- SwiGLU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(150, 280), (5, 66), (2, 40, 50), (1, 2), (0, 64), (4, 0)])
def test_swiglu_is_the_cast_of_the_activation(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    gate_up, spec = torch.randn(shape, device=device).to(dtype), specs(device)[kind]
    before, h = bits(gate_up).copy(), activation.swiglu(gate_up)
    row, col = swiglu_quantize_both(gate_up, spec, spec)
    same_operand(row, quantize(h, spec))
    same_operand(col, quantize(h, spec, axis=-2))
    same_operand(swiglu_quantize(gate_up, spec), row)
    same_operand(swiglu_quantize(gate_up, spec, axis=-2), col)
    same_bits(bits(gate_up), before)


def test_swiglu_of_every_gate(device: torch.device) -> None:
    """All 65536 bf16 gates, non-finite ones too."""
    gate = all_bf16().view(256, 256).to(device)
    up = torch.randn(256, 256, device=device).bfloat16()
    gate_up = torch.cat((gate, up), dim=-1)
    for name in FORMATS:
        row, col = swiglu_quantize_both(gate_up, name, name)
        same_operand(row, quantize(activation.swiglu(gate_up), name))
        same_operand(col, quantize(activation.swiglu(gate_up), name, axis=-2))


@pytest.mark.parametrize("form", ONE_D)
def test_swiglu_of_groups(form: str, device: torch.device) -> None:
    """Rows after the last group have no effect."""
    gate_up, offs = torch.randn(sum(SIZES) + EXTRA, 88, device=device).bfloat16(), ends_of(SIZES, device)
    gate_up[-EXTRA:] = torch.nan
    spec = CastSpec(form, amax="group") if form == "nvfp4" else CastSpec(form)
    h = activation.swiglu(gate_up)
    row, col = swiglu_quantize_both(gate_up, spec, spec, offs=offs)
    want_row, want_col = quantize_both(h, spec, spec, offs=offs)
    same_operand(row, want_row)
    same_operand(col, want_col)
    same_operand(swiglu_quantize(gate_up, spec, axis=-2, offs=offs), col)
    assert (col.group_align, col.groups) == (128, len(SIZES))
    assert bs.dequantize(col, offs=offs)[: sum(SIZES)].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(150, 280), (5, 66), (2, 40, 50), (0, 64)])
def test_swiglu_backward_is_the_cast_of_the_gradients(shape: tuple[int, ...], kind: str, device: torch.device) -> None:
    spec = specs(device)[kind]
    for dtype in DTYPES:
        gate_up = torch.randn(shape, device=device).to(dtype)
        grad = torch.randn(*shape[:-1], shape[-1] // 2, device=device).to(dtype)
        want, h = activation.swiglu_backward(grad, gate_up), activation.swiglu(gate_up)
        row, col = swiglu_backward_quantize_both(grad, gate_up, spec, spec)
        same_operand(row, quantize(want, spec))
        same_operand(col, quantize(want, spec, axis=-2))
        again = swiglu_backward_quantize_both(grad, gate_up, spec, "mxfp4", hidden=spec)
        same_operand(again[0], row)
        same_operand(again[1], quantize(want, "mxfp4", axis=-2))
        same_operand(again[2], quantize(h, spec, axis=-2))


def test_swiglu_backward_of_groups(device: torch.device) -> None:
    rows, offs = sum(SIZES) + EXTRA, ends_of(SIZES, device)
    gate_up, grad = torch.randn(rows, 88, device=device), torch.randn(rows, 44, device=device)
    spec = CastSpec("nvfp4", amax="group")
    got = swiglu_backward_quantize_both(grad, gate_up, spec, "mxfp8_e4m3", hidden=spec, offs=offs)
    want = quantize_both(activation.swiglu_backward(grad, gate_up), spec, "mxfp8_e4m3", offs=offs)
    same_operand(got[0], want[0])
    same_operand(got[1], want[1])
    same_operand(got[2], quantize(activation.swiglu(gate_up), spec, axis=-2, offs=offs))


@pytest.mark.parametrize("name", ["fp8_1x128", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4"])
@pytest.mark.parametrize("shape", [(300, 512), (2, 256, 256), (sum(SIZES) + EXTRA, 256)])
def test_three_operands_of_one_format(shape: tuple[int, ...], name: str, device: torch.device) -> None:
    """Hidden sizes of full tiles, where one kernel writes all three; the last shape has long and short groups."""
    offs = ends_of(SIZES, device) if shape[0] == sum(SIZES) + EXTRA else None
    gate_up = torch.randn(shape, device=device).bfloat16()
    grad = torch.randn(*shape[:-1], shape[-1] // 2, device=device).bfloat16()
    got = swiglu_backward_quantize_both(grad, gate_up, name, name, hidden=name, offs=offs)
    want = quantize_both(activation.swiglu_backward(grad, gate_up), name, name, offs=offs)
    same_operand(got[0], want[0])
    same_operand(got[1], want[1])
    same_operand(got[2], quantize(activation.swiglu(gate_up), name, axis=-2, offs=offs))


def test_strides_do_not_matter(device: torch.device) -> None:
    x = torch.randn(256, 130, device=device).bfloat16().mT
    grad, weight = torch.randn(130, 256, device=device).bfloat16()[:, ::2], torch.randn(512, device=device)[::2]
    summed = grad[:1, :1].expand(130, 128)  # the gradient of a sum
    assert not any(tensor.is_contiguous() for tensor in (x, grad, weight, summed))
    calls: list[Callable[[Tensor, Tensor, Tensor], object]] = [
        lambda x, grad, weight: swiglu_quantize_both(x, "mxfp8_e4m3", "fp8_1x128"),
        lambda x, grad, weight: swiglu_backward_quantize_both(grad, x, "mxfp4", "nvfp4", hidden="mxfp4"),
        lambda x, grad, weight: rmsnorm_quantize_both(x, weight, "mxfp8_e4m3", "fp8_1x128"),
        lambda x, grad, weight: quantize_permute(x, torch.tensor([5, 5, 0], device=x.device), "mxfp4"),
    ]
    for call in calls:
        for dy in (grad, summed):
            assert_same_bits(call(x, dy, weight), call(x.contiguous(), dy.contiguous(), weight.contiguous()))


def test_one_rounding_differs_from_eager_torch() -> None:
    """Eager torch rounds silu(gate) to bf16 before the product."""
    gate_up = torch.randn(256, 512).bfloat16()
    gate, up = gate_up.chunk(2, dim=-1)
    fused, unfused = swiglu_quantize(gate_up, "mxfp8_e4m3"), quantize(torch.nn.functional.silu(gate) * up, "mxfp8_e4m3")
    differ = (bits(fused.data) != bits(unfused.data)).mean()
    assert 0.001 < differ < 0.05


# ---- RMSNorm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(150, 280), (5, 33), (2, 40, 50), (3, 1), (0, 64)])
def test_rmsnorm_is_the_cast_of_the_norm(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).bfloat16()
    want, want_rstd = activation.rmsnorm(x, weight, 1e-5)
    spec = specs(device)[kind]
    row, rstd = rmsnorm_quantize(x, weight, spec, eps=1e-5)
    same_operand(row, quantize(want, spec))
    same_bits(bits(rstd), bits(want_rstd))
    assert rstd.shape == shape[:-1]
    again, col, rstd = rmsnorm_quantize_both(x, weight, spec, spec, eps=1e-5)
    same_operand(again, row)
    same_operand(col, quantize(want, spec, axis=-2))
    same_bits(bits(rstd), bits(want_rstd))


def test_rmsnorm_of_groups_and_bad_rows(device: torch.device) -> None:
    """NaN poisons its row, an infinity its block."""
    x, offs = torch.randn(sum(SIZES), 96, device=device), ends_of(SIZES, device)
    x[7, 3], x[9, 40] = torch.nan, torch.inf
    weight = torch.ones(96, device=device)
    row, col, rstd = rmsnorm_quantize_both(x, weight, "mxfp8_e4m3", "mxfp8_e4m3", offs=offs)
    want = quantize_both(activation.rmsnorm(x, weight, 1e-6)[0], "mxfp8_e4m3", "mxfp8_e4m3", offs=offs)
    same_operand(row, want[0])
    same_operand(col, want[1])
    back = bs.dequantize(row)
    assert back[7].isnan().all()
    assert back[9].isnan().tolist() == [32 <= i < 64 for i in range(96)]
    assert (rstd[7].isnan(), rstd[9]) == (True, 0)


# ---- permutation ---------------------------------------------------------------------------------------------------


def permutation(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens of several experts each, some never used, with padding rows; ends of the groups."""
    indices = torch.randint(tokens, (sum(SIZES) + EXTRA,), device=device).to(dtype)
    indices[::7] = -1
    return indices, ends_of(SIZES, device)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ONE_D)
def test_permute_is_the_cast_of_the_gathered_rows(form: str, index_dtype: torch.dtype, device: torch.device) -> None:
    for dtype in DTYPES:
        x = torch.randn(90, 70, device=device).to(dtype)
        indices, offs = permutation(90, device, index_dtype)
        gathered = torch.where((indices < 0)[:, None], 0, x[indices.long()])
        for spec in (spec for spec in specs(device).values() if spec.format == form):
            row, col = permute_quantize_both(x, indices, offs, spec, spec)
            want_row, want_col = quantize_both(gathered, spec, spec, offs=offs)
            same_operand(row, want_row)
            same_operand(col, want_col)
            same_operand(permute_quantize_columns(x, indices, offs, spec), want_col)


@pytest.mark.parametrize("form", ONE_D)
def test_weighted_rows_are_rounded_before_the_cast(form: str, device: torch.device) -> None:
    """Each gathered row times its gate weight, in fp32 and rounded once; weights belong to positions, not to rows of x,
    and a row of zeros takes the sign of its weight."""
    indices, offs = permutation(90, device, torch.int32)
    weights = torch.randn(indices.shape, device=device) * 3
    for dtype in DTYPES:
        x = torch.randn(90, 70, device=device).to(dtype)
        gathered = torch.where((indices < 0)[:, None], 0, x[indices.long()])
        scaled = (gathered.float() * weights[:, None]).to(dtype)
        for spec in (spec for spec in specs(device).values() if spec.format == form):
            row, col = permute_quantize_both(x, indices, offs, spec, spec, gate_weights=weights)
            want_row, want_col = quantize_both(scaled, spec, spec, offs=offs)
            same_operand(row, want_row)
            same_operand(col, want_col)


def test_padding_rows_are_zero(device: torch.device) -> None:
    x, indices, offs = torch.full((4, 64), torch.nan, device=device), torch.full((5,), -1, device=device), [2, 3]
    row, col = permute_quantize_both(x, indices, ends_of(offs, device), "mxfp8_e4m3", "nvfp4")
    for q in (row, col, quantize_permute(x, indices, "fp8_1x128")):
        assert not bits(q.data.view(torch.uint8)).any()
    assert not bits(bs.dequantize(quantize_permute(x, indices, "mxfp4"))).any()


@pytest.mark.parametrize("form", ONE_D)
def test_rows_gathered_after_the_cast(form: str, device: torch.device) -> None:
    """The bytes of the cast of the gathered rows; NVFP4's amax is that of all tokens."""
    x = torch.randn(90, 70, device=device).bfloat16()
    x[13] *= 100  # a row that is not gathered
    indices, _ = permutation(90, device, torch.int64)
    indices[indices == 13] = 14
    gathered = torch.where((indices < 0)[:, None], 0, x[indices])
    amax = {"amax": x.abs().amax().float()} if form == "nvfp4" else {}
    for layout in FORMATS[form].layouts:
        got = quantize_permute(x, indices, CastSpec(form, scale_layout=layout))
        same_operand(got, quantize(gathered, form, scale_layout=layout, **amax))
    if FORMATS[form].hadamard:
        got = quantize_permute(x, indices, CastSpec(form, hadamard=True, **amax))
        same_operand(got, quantize(gathered, form, hadamard=True, **amax))


@pytest.mark.parametrize("form", ONE_D)
def test_no_tokens_and_no_positions(form: str, device: torch.device) -> None:
    none = torch.empty(0, 40, device=device)
    padding = torch.tensor([-1, -1, -1], device=device)
    zeros = torch.zeros(3, 40, device=device)
    for x, indices, sizes, want in (
        (none, padding, [1, 0, 2], zeros),
        (none, padding[:0], [0, 0], none),
        (torch.randn(5, 40, device=device), padding[:0], [0], none),
    ):
        offs = ends_of(sizes, device)
        row, col = permute_quantize_both(x, indices, offs, form, form)
        want_row, want_col = quantize_both(want, form, form, offs=offs)
        same_operand(row, want_row)
        same_operand(col, want_col)
        same_operand(permute_quantize_columns(x, indices, offs, form), want_col)
        if form != "nvfp4" or x.shape[0] == 0:
            same_operand(quantize_permute(x, indices, form), quantize(want, form))


# ---- torch.compile -------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[..., object]] = {
    "swiglu": lambda x, y: swiglu_quantize(x, "mxfp8_e4m3"),
    "swiglu both": lambda x, y: swiglu_quantize_both(x, "nvfp4", "fp8_1x128"),
    "swiglu backward": lambda x, y: swiglu_backward_quantize_both(y, x, "mxfp8_e5m2", "nvfp4"),
    "swiglu backward and hidden": lambda x, y: swiglu_backward_quantize_both(y, x, "mxfp4", "mxfp4", hidden="nvfp4"),
    "rmsnorm": lambda x, y: rmsnorm_quantize(x, x[0], "mxfp8_e4m3"),
    "rmsnorm both": lambda x, y: rmsnorm_quantize_both(x, x[0], "mxfp8_e4m3", "mxfp4", eps=1e-5),
    "permute both": lambda x, y: permute_quantize_both(
        x, torch.arange(9, device=x.device), torch.tensor([4, 9], dtype=torch.int32, device=x.device), "mxfp4", "nvfp4"
    ),
    "permute and weigh": lambda x, y: permute_quantize_both(
        x,
        torch.arange(9, device=x.device),
        torch.tensor([4, 9], dtype=torch.int32, device=x.device),
        "mxfp8_e4m3",
        "fp8_1x128",
        gate_weights=x[:9, 0].float(),
    ),
    "permute columns": lambda x, y: permute_quantize_columns(
        x, torch.arange(9, device=x.device), torch.tensor([4, 9], dtype=torch.int32, device=x.device), "mxfp8_e4m3"
    ),
    "permute": lambda x, y: quantize_permute(x, torch.arange(9, device=x.device), "fp8_1x128"),
}


STATIC = ("swiglu backward and hidden", "permute and weigh")  # fixed sizes are traced as any are, with fewer symbols


@pytest.mark.parametrize(
    ("name", "dynamic"),
    first_of(itertools.product(CALLS, (True, False)), lambda case: case[1] or case[0] in STATIC),
)
def test_compiled_without_graph_breaks(name: str, dynamic: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch._dynamo.config.patch(error_on_recompile=dynamic):
        for rows in (100, 116):  # both leave tails in blocks and in rows of codes
            x, y = torch.randn(rows, 96, device=device), torch.randn(rows, 48, device=device)
            assert_same_bits(compiled(x, y), CALLS[name](x, y))


# ---- bad input -----------------------------------------------------------------------------------------------------

X = torch.zeros(4, 64)
OFFS = torch.tensor([4], dtype=torch.int32)
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "odd last axis": (lambda: swiglu_quantize(X[:, :63], "mxfp4"), "shape (4, 63)"),
    "odd last axis, both": (lambda: swiglu_quantize_both(X[:, :63], "mxfp4", "mxfp4"), "shape (4, 63)"),
    "a vector": (lambda: swiglu_quantize(X[0], "mxfp4"), "gate_up has shape (64,)"),
    "axis": (lambda: swiglu_quantize(X, "mxfp4", axis=0), "axis=0"),
    "integers": (lambda: swiglu_quantize_both(X.int(), "mxfp4", "mxfp4"), "gate_up has dtype torch.int32"),
    "shape of grad": (
        lambda: swiglu_backward_quantize_both(X, X, "mxfp4", "mxfp4"),
        "grad has shape (4, 64) for gate_up (4, 64)",
    ),
    "dtype of grad": (
        lambda: swiglu_backward_quantize_both(X[:, :32].half(), X, "mxfp4", "mxfp4"),
        "grad is torch.float16, gate_up torch.float32",
    ),
    "device of grad": (
        lambda: swiglu_backward_quantize_both(X[:, :32].to("meta"), X, "mxfp4", "mxfp4"),
        "grad is on meta, gate_up on cpu",
    ),
    "group ends": (
        lambda: swiglu_quantize_both(X, "mxfp4", "mxfp4", offs=torch.tensor([9], dtype=torch.int32)),
        "offs is [9] for 4 rows",
    ),
    "shape of weight": (lambda: rmsnorm_quantize(X, X[0, :63], "mxfp4"), "weight has shape (63,) for x (4, 64)"),
    "dtype of weight": (lambda: rmsnorm_quantize(X, X[0].int(), "mxfp4"), "weight has dtype torch.int32"),
    "no columns": (lambda: rmsnorm_quantize(X[:, :0], X[0, :0], "mxfp4"), "x has shape (4, 0)"),
    "eps": (lambda: rmsnorm_quantize_both(X, X[0], "mxfp4", "mxfp4", eps=-1.0), "eps=-1.0"),
    "eps that is no number": (lambda: rmsnorm_quantize(X, X[0], "mxfp4", eps=float("nan")), "eps=nan"),
    "floating indices": (lambda: quantize_permute(X, X[0], "mxfp4"), "indices is torch.float32"),
    "a list of indices": (lambda: quantize_permute(X, [0, 1], "mxfp4"), "indices is list"),  # pyright: ignore[reportArgumentType]
    "a matrix of indices": (lambda: quantize_permute(X, torch.zeros(2, 2).int(), "mxfp4"), "shape (2, 2)"),
    "indices elsewhere": (
        lambda: quantize_permute(X, torch.zeros(2, dtype=torch.int32, device="meta"), "mxfp4"),
        "indices is on meta, x on cpu",
    ),
    "index too large": (lambda: quantize_permute(X, torch.tensor([0, 4]), "mxfp4"), "index 4 for 4 rows"),
    "index too small": (
        lambda: permute_quantize_both(X, torch.tensor([0, -2, 0, 0]), OFFS, "mxfp4", "mxfp4"),
        "index -2 for 4 rows",
    ),
    "ends past the positions": (
        lambda: permute_quantize_both(X, torch.tensor([0]), OFFS, "mxfp4", "mxfp4"),
        "offs is [4] for 1 rows",
    ),
    "no ends": (
        lambda: permute_quantize_both(X, torch.tensor([0]), None, "mxfp4", "mxfp4"),  # pyright: ignore[reportArgumentType]
        "offs is a NoneType",
    ),
    "a batch of tokens": (
        lambda: permute_quantize_both(X[None], torch.tensor([0]), OFFS, "mxfp4", "mxfp4"),
        "x has shape (1, 4, 64)",
    ),
    "weights of other rows": (
        lambda: permute_quantize_both(X, torch.zeros(4).int(), OFFS, "mxfp4", "mxfp4", gate_weights=torch.ones(3)),
        "gate_weights torch.float32 (3,) for 4 permuted rows",
    ),
    "narrow weights": (
        lambda: permute_quantize_both(
            X, torch.zeros(4).int(), OFFS, "mxfp4", "mxfp4", gate_weights=torch.ones(4).half()
        ),
        "gate_weights torch.float16",
    ),
    "columns without ends": (
        lambda: permute_quantize_columns(X, torch.tensor([0]), None, "mxfp4"),  # pyright: ignore[reportArgumentType]
        "offs is a NoneType",
    ),
    "tiles": (lambda: quantize_permute(X, torch.tensor([0]), "fp8_128x128"), "quantize_permute to fp8_128x128"),
    "stochastic rounding": (
        lambda: quantize_permute(
            X, torch.tensor([0]), CastSpec("mxfp4", rounding=Stochastic(rng_state(0), "a"), role="fprop_x")
        ),
        "stochastic rounding",
    ),
    "unknown format": (lambda: swiglu_quantize(X, "mxfp9"), "unknown format 'mxfp9'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, what = BAD[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    text = str(caught.value)
    assert what in text
    assert "Rule: " in text
    assert "Fix: " in text
