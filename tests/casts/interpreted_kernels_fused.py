"""Triton fused casts in the interpreter against the reference, byte for byte.

    TRITON_INTERPRET=1 python tests/casts/interpreted_kernels_fused.py mxfp8_e4m3

Prints `cases values mismatches` and the first mismatches, as `interpreted.py` does for plain casts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import Case, compared, count_mismatches

from blockscale import rng_state
from blockscale.formats import FORMATS, CastSpec, Stochastic
from blockscale.formats.cast_spec import Cast, as_cast

THOROUGH = "ALL_TESTS" in os.environ
ENDS = torch.tensor([3, 3, 110], dtype=torch.int32)


def gates(rows: int, hidden: int, dtype: torch.dtype, *, finite: bool) -> Tensor:
    """[gate | up], bf16 or other.  finite: no NaN and Inf, which would make NVFP4's amax NaN and poison all codes."""
    x = torch.randn(rows, 2 * hidden) * 4
    x[3] = 0.0
    if not finite:
        x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -torch.inf
    x[4, :hidden], x[5, :hidden] = -100.0, 200.0
    return x.to(dtype)


def cases(name: str) -> Iterator[tuple[int, Case]]:
    form, spec = FORMATS[name], CastSpec(name)
    cast = as_cast(spec)
    sources = ((torch.bfloat16, 130, 256), (torch.float32, 40, 74), (torch.float16, 33, 95))
    # how a source is read does not depend on the format, and tiles of 128x128 and NVFP4's two passes are slow
    few = name.endswith("128x128") or (name == "nvfp4" and not THOROUGH)
    for dtype, rows, hidden in sources[: 1 if few else 3]:
        x = gates(rows, hidden, dtype, finite=form.family == "nvfp4" and dtype != torch.float16)
        yield x.numel(), compared(f"swiglu both {dtype}", "swiglu_quantize_both", x, cast, cast, None)
        for axis in (-1, -2):
            yield x.numel(), compared(f"swiglu {axis}", "swiglu_quantize", x, cast, axis, None)
    x, grad = gates(130, 256, torch.bfloat16, finite=form.family == "nvfp4"), torch.randn(130, 256).bfloat16()
    yield x.numel(), compared("swiglu backward", "swiglu_backward_quantize_both", grad, x, cast, cast, None, None)
    if not form.is_2d and form.family != "nvfp4":
        yield from three_operands(name)
    # H not a multiple of the tile: a tile holds gates and ups; how it is read does not depend on the format
    ragged = ((torch.bfloat16, 130, 192), (torch.float32, 40, 74)) if name == "fp8_1x128" or THOROUGH else ()
    for dtype, rows, width in ragged:
        x, grad = gates(rows, width, dtype, finite=form.family == "nvfp4"), torch.randn(rows, width).to(dtype)
        backward = compared(
            f"swiglu backward {width}", "swiglu_backward_quantize_both", grad, x, cast, cast, None, None
        )
        yield x.numel(), backward
    weight = torch.rand(300).bfloat16()
    for y in (torch.randn(2, 5, 300).bfloat16(), torch.randn(70, 300)):
        yield y.numel(), compared("rmsnorm", "rmsnorm_quantize", y, weight, 1e-5, cast)
        both = compared("rmsnorm both", "rmsnorm_quantize_both", y, weight, 1e-5, cast, cast, None)
        yield 2 * y.numel(), both
    if form.is_2d:
        return
    # a group has few more rows than a block: NVFP4's tiles of groups are small, and many
    tall = max(form.block) + 22
    x, ends = gates(tall, 128, torch.bfloat16, finite=False), torch.tensor([3, 3, tall - 10], dtype=torch.int32)
    stochastic = CastSpec(name, rounding=Stochastic(rng_state(4), "mlp"), role="wgrad_x")
    # computing NVFP4's amax is a second pass over many small tiles; one case is enough
    amax = torch.tensor(9.0) if form.family == "nvfp4" else None
    rounded = as_cast(stochastic)._replace(amax=amax)
    yield x.numel(), compared("swiglu groups", "swiglu_quantize_both", x, rounded, rounded, ends)
    scaled = cast._replace(amax=amax)
    tokens = torch.randn(50, 96).bfloat16()
    indices = torch.randint(-1, 50, (120,), dtype=torch.int32)
    for kind, given in ((torch.int32, None), (torch.int64, amax)):
        pair = cast._replace(amax=given), cast._replace(amax=given)
        args = tokens, indices.to(kind), None, *pair, ENDS
        yield 2 * 120 * 96, compared("permute", "permute_quantize_both", *args)
        for layout in form.layouts:
            copied = as_cast(CastSpec(name, scale_layout=layout))
            what = f"permute once {layout} {kind}"
            yield 120 * 96, compared(what, "quantize_permute", tokens, indices.to(kind), copied)
    # full tiles within a group, and padding positions
    long, many = torch.tensor([3, 3, 290], dtype=torch.int32), torch.randint(-1, 50, (310,), dtype=torch.int32)
    framed = torch.cat((torch.full((1, 96), 7.0), torch.randn(50, 96))).bfloat16()[1:]  # 7 before the first row
    for gate_weights in (None, torch.randn(310)):
        args = framed, many, gate_weights, scaled, scaled, long
        yield 2 * 310 * 96, compared("permute, long groups", "permute_quantize_both", *args)
    yield 310 * 96, compared("columns, long groups", "permute_quantize_columns", framed, many, scaled, long)
    wide = torch.randn(9, 1100)  # rows of more than one tile of codes, and a NaN amax, which poisons the row of zeros
    wide[7, 3] = torch.nan
    far = torch.randint(-1, 9, (130,))
    for layout in form.layouts:
        copied = as_cast(CastSpec(name, scale_layout=layout))
        yield 130 * 1100, compared(f"permute once, wide {layout}", "quantize_permute", wide, far, copied)
    if form.hadamard:  # -0.0 from a rotated row of zeros
        rotated = as_cast(CastSpec(name, hadamard=(1 << form.hadamard) - 1))
        yield 120 * 96, compared("permute once, rotated", "quantize_permute", tokens, indices, rotated)
        yield weighted_and_rotated(name, amax)
    yield 0, compared("permute once, nowhere", "quantize_permute", tokens, indices[:0], cast)
    all_padding = torch.full((120,), -1, dtype=torch.int32)
    args = tokens[:0], all_padding, None, scaled, scaled, ENDS
    yield 0, compared("no tokens", "permute_quantize_both", *args)
    if name == "fp8_1x128" or THOROUGH:
        yield from strided_inputs(cast, form.family == "nvfp4")


def weighted_and_rotated(name: str, amax: Tensor | None) -> tuple[int, Case]:
    """A rotation mixes a row's zeros with zeros past its last column; a negative factor flips the sign of the former
    only."""
    cast = as_cast(CastSpec(name, hadamard=True))._replace(amax=amax)
    x, ends = torch.randn(50, 70).bfloat16(), torch.tensor([3, 30], dtype=torch.int32)
    indices = torch.where(torch.arange(40) % 5 == 0, -1, torch.arange(40))
    args = x, indices, -torch.rand(40), cast, cast, ends
    return 2 * 40 * 70, compared("weighted, rotated", "permute_quantize_both", *args)


def three_operands(name: str) -> Iterator[tuple[int, Case]]:
    """SwiGLU's backward with `hidden`: one kernel writes all three operands if the formats are equal."""
    call, cast = "swiglu_backward_quantize_both", as_cast(name)
    # one row less than a tile, none, a full tile and the rest of its group, and rows outside all groups
    ends = torch.tensor([127, 127, 300], dtype=torch.int32)
    shapes = {"one matrix": ((130, 256), None), "two": ((2, 40, 128), None), "groups": ((320, 128), ends)}
    for what, ((*rows, hidden), offs) in shapes.items():
        x, grad = torch.randn(*rows, 2 * hidden).bfloat16(), torch.randn(*rows, hidden).bfloat16()
        x[..., 0, 0], x[..., 9, 1], grad[..., 20, 2] = torch.nan, torch.inf, -torch.inf
        yield x.numel(), compared(f"three operands, {what}", call, grad, x, cast, cast, cast, offs)
    for layout in cast.plan.spec.layouts:
        third = as_cast(CastSpec(name, scale_layout=layout))
        yield x.numel(), compared(f"three operands, {layout}", call, grad, x, cast, cast, third, offs)
    for other in ("mxfp4", "mxfp8_e5m2"):
        third = as_cast(other)
        yield x.numel(), compared(f"three operands, {other}", call, grad, x, cast, cast, third, offs)


def strided(vector: Tensor) -> Tensor:
    """The same vector with stride 2, other values in between."""
    return torch.stack((vector, torch.full_like(vector, 77)), 1)[:, 0]


def strided_inputs(cast: Cast, has_amax: bool) -> Iterator[tuple[int, Case]]:
    """Strided vectors and gradients; the gradient of a sum has strides of 0."""
    x = gates(130, 128, torch.bfloat16, finite=True)
    grads = (
        torch.randn(130, 256).bfloat16()[:, ::2],
        torch.randn(128, 130).bfloat16().mT,
        torch.ones((), dtype=torch.bfloat16).expand(130, 128),
    )
    for grad in grads:
        args = grad, x, cast, cast, None, None
        yield x.numel(), compared(f"swiglu backward {grad.stride()}", "swiglu_backward_quantize_both", *args)
    args = grads[0], x.mT.contiguous().mT, cast, cast, None, None
    yield x.numel(), compared("swiglu backward, gate_up transposed", "swiglu_backward_quantize_both", *args)
    four = torch.randn(2, 3, 40, 256).bfloat16().transpose(0, 1)
    args = torch.randn(3, 2, 40, 128).bfloat16(), four, cast, cast, None, None
    yield four.numel(), compared("swiglu backward, axes permuted", "swiglu_backward_quantize_both", *args)
    tokens, weight = torch.randn(110, 96).bfloat16(), strided(torch.rand(96))
    for w in (weight, weight.bfloat16().expand(96), torch.ones(()).expand(96)):
        yield tokens.numel(), compared("rmsnorm weight", "rmsnorm_quantize", tokens, w, 1e-5, cast)
    args = tokens, weight, 1e-5, cast, cast, strided(ENDS)
    yield tokens.numel(), compared("rmsnorm ends", "rmsnorm_quantize_both", *args)
    indices = strided(torch.randint(-1, 110, (120,), dtype=torch.int32))
    amaxes = (strided(torch.tensor([9.0, 8.0, 7.0])), torch.tensor(9.0).expand(3)) if has_amax else (None, None)
    row, col = (cast._replace(amax=amax) for amax in amaxes)
    args = tokens, indices, strided(torch.randn(120)), row, col, strided(ENDS)
    yield tokens.numel(), compared("permute indices", "permute_quantize_both", *args)
    args = tokens, indices, row, strided(ENDS)
    yield tokens.numel(), compared("permute columns indices", "permute_quantize_columns", *args)
    yield tokens.numel(), compared("permute once indices", "quantize_permute", tokens, indices, cast)


if __name__ == "__main__":
    raise SystemExit(count_mismatches(sys.argv[1:], cases))
