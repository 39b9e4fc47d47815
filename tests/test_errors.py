"""Bad input: each gets an error of the right class that gives the value, the rule and the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale import errors
from blockscale.errors import (
    AxisError,
    BackendError,
    BlockscaleError,
    DeviceError,
    DtypeError,
    LayoutError,
    MissingPackageError,
    OptionError,
    PairError,
    PtxasError,
    ShapeError,
    StaleWeightError,
    UnknownNameError,
    VersionError,
    message,
)
from blockscale.formats import FORMATS, BlockScaled, CastSpec, Stochastic, get_format, rng_state, stream_id
from blockscale.formats.spec import LEGAL_PAIRS
from blockscale.gemm import exact_mm
from support.products import offsets

X = torch.ones(8, 64)
X3 = torch.ones(3, 8, 64)
OFFS = offsets([2, 0, 6])
STATE = rng_state(0)


def q(name: str = "mxfp8_e4m3", x: Tensor = X, **options: object) -> BlockScaled:
    return bs.quantize(x, name, **options)


def tokens(name: str = "mxfp8_e4m3", x: Tensor = X, offs: Tensor = OFFS, **options: object) -> BlockScaled:
    """A k-grouped operand."""
    return bs.quantize(x, name, axis=-2, offs=offs, **options).mT


def stochastic(
    name: str = "layer", state: Tensor = STATE, role: str | None = "dgrad_dy", **options: object
) -> BlockScaled:
    return bs.quantize(X, "mxfp4", rounding=Stochastic(state, name), role=role, **options)


Case = tuple[str, Callable[[], object], type[BlockscaleError], str]

CASTS: list[Case] = [
    ("int", lambda: q(x=torch.ones(8, 64, dtype=torch.int32)), DtypeError, "x has dtype torch.int32"),
    ("bool", lambda: q(x=torch.ones(8, 64, dtype=torch.bool)), DtypeError, "torch.bool"),
    ("float64", lambda: q(x=X.double()), DtypeError, "x has dtype torch.float64"),
    ("complex", lambda: q(x=X.to(torch.complex64)), DtypeError, "torch.complex64"),
    ("fp8 source", lambda: q(x=X.to(torch.float8_e4m3fn)), DtypeError, "torch.float8_e4m3fn"),
    ("rank 1", lambda: q(x=torch.ones(64)), ShapeError, "x has shape (64,)"),
    ("rank 0", lambda: q(x=torch.ones(())), ShapeError, "x has shape ()"),
    ("both, rank 1", lambda: bs.quantize_both(torch.ones(64), "mxfp4", "mxfp4"), ShapeError, "x has shape (64,)"),
    ("both, int", lambda: bs.quantize_both(torch.ones(8, 8, dtype=torch.int8), "mxfp4", "mxfp4"), DtypeError, "int8"),
    ("axis 0", lambda: q(axis=0), AxisError, "axis=0"),
    ("axis 1", lambda: q(axis=1), AxisError, "axis=1"),
    ("axis -3", lambda: q(x=X3, axis=-3), AxisError, "axis=-3"),
    ("unknown format", lambda: q("mxfp8_e4m4"), UnknownNameError, "did you mean mxfp8_e4m3"),
    ("bare mxfp8", lambda: q("mxfp8"), UnknownNameError, "mxfp8_e4m3"),
    ("upper case", lambda: q("NVFP4"), UnknownNameError, "did you mean nvfp4"),
    ("no format", lambda: q(None), UnknownNameError, "unknown format None"),
    ("get_format", lambda: get_format("fp8_1x182"), UnknownNameError, "fp8_1x128"),
    ("unknown rule", lambda: q(scale_rule="rceill"), UnknownNameError, "did you mean rceil"),
    ("rule of another family", lambda: q(scale_rule="pow2"), OptionError, "'pow2' does not exist for mxfp8_e4m3"),
    ("nvfp4 rule", lambda: q("nvfp4", scale_rule="floor"), OptionError, "nvfp4 takes nearest or up"),
    ("fp8 rule", lambda: q("fp8_1x128", scale_rule="up"), OptionError, "fp8_1x128 takes fp32 or pow2"),
    ("unknown layout", lambda: q(scale_layout="blokced"), UnknownNameError, "did you mean blocked"),
    ("layout of another", lambda: q(scale_layout="grid"), OptionError, "'grid' does not exist for mxfp8_e4m3"),
    ("mn_major for 128x128", lambda: q("fp8_128x128", scale_layout="mn_major"), OptionError, "grid or plain"),
    ("with_layout", lambda: q().with_layout("mn_major"), OptionError, "'mn_major' does not exist for mxfp8_e4m3"),
    ("unknown rounding", lambda: q(rounding="nearestt"), UnknownNameError, "did you mean nearest"),
    ("hadamard on mxfp8", lambda: q(hadamard=True), OptionError, "Hadamard transform asked for mxfp8_e4m3"),
    ("hadamard on mxfp6", lambda: q("mxfp6_e2m3", hadamard=True), OptionError, "asked for mxfp6_e2m3"),
    ("hadamard on fp8", lambda: q("fp8_1x128", hadamard=True), OptionError, "asked for fp8_1x128"),
    ("hadamard on 16x16", lambda: q("nvfp4_16x16", hadamard=True), OptionError, "asked for nvfp4_16x16"),
    ("mask too large", lambda: q("nvfp4", hadamard=0x10000), OptionError, "sign mask 0x10000 for nvfp4"),
    ("mask too large, 32", lambda: q("mxfp4", hadamard=1 << 32), OptionError, "sign mask 0x100000000 for mxfp4"),
    ("negative mask", lambda: q("mxfp4", hadamard=-1), OptionError, "sign mask -0x1"),
    ("amax on MX", lambda: q(amax="group"), OptionError, "amax given for mxfp8_e4m3"),
    ("amax tensor on MX", lambda: q(amax=torch.ones(())), OptionError, "amax given for mxfp8_e4m3"),
    ("amax on FP8", lambda: q("fp8_1x128", amax=torch.ones(())), OptionError, "amax given for fp8_1x128"),
    ("unknown scope", lambda: q("nvfp4", amax="groups"), UnknownNameError, "did you mean group"),
    ("amax dtype", lambda: q("nvfp4", amax=torch.ones((), dtype=torch.float64)), OptionError, "torch.float64 ()"),
    ("amax rank", lambda: q("nvfp4", amax=torch.ones(1, 1)), OptionError, "(1, 1)"),
    ("amax device", lambda: q("nvfp4", amax=torch.ones((), device="meta")), OptionError, "on meta"),
    ("amax per group, no groups", lambda: q("nvfp4", amax="group"), OptionError, "shape (8, 64)"),
    ("amax vector, no groups", lambda: q("nvfp4", amax=torch.ones(3)), OptionError, "shape (8, 64)"),
    ("amax count", lambda: q("nvfp4", x=X3, amax=torch.ones(2)), ShapeError, "2 maxima for 3 groups"),
    ("amax count, offs", lambda: q("nvfp4", amax=torch.ones(2), offs=OFFS), ShapeError, "2 maxima for 3 groups"),
    ("satfinite on nvfp4", lambda: q("nvfp4", satfinite=True), OptionError, "satfinite given for nvfp4"),
    ("satfinite on fp8", lambda: q("fp8_128x128", satfinite=True), OptionError, "satfinite given for fp8_128x128"),
    ("stochastic without name", lambda: stochastic(name=""), OptionError, "stochastic rounding without a name"),
    ("stochastic without role", lambda: stochastic(role=None), OptionError, "stochastic rounding without a role"),
    ("unknown role", lambda: stochastic(role="dgrad_yd"), UnknownNameError, "or dgrad_dy"),
    ("stream", lambda: stream_id("layer", "dgrad"), UnknownNameError, "dgrad_dy"),
    ("state dtype", lambda: stochastic(state=torch.zeros(2)), ShapeError, "stochastic state is torch.float32 (2,)"),
    ("state shape", lambda: stochastic(state=torch.zeros(3, dtype=torch.int64)), ShapeError, "torch.int64 (3,)"),
    ("state device", lambda: stochastic(state=rng_state(0, device="meta")), DeviceError, "is on meta, x on cpu"),
    ("options beside a spec", lambda: q(CastSpec("mxfp4"), hadamard=True), OptionError, "hadamard"),
    ("offs int64", lambda: q(offs=OFFS.long()), ShapeError, "offs is torch.int64 (3,)"),
    ("offs float", lambda: q(offs=OFFS.float()), ShapeError, "offs is torch.float32 (3,)"),
    ("offs rank", lambda: q(offs=OFFS[None]), ShapeError, "offs is torch.int32 (1, 3)"),
    ("offs descending", lambda: q(offs=OFFS.flip(0)), ShapeError, "offs is [8, 2, 2] for 8 rows"),
    ("offs negative", lambda: tokens(offs=OFFS - 3), ShapeError, "offs is [-1, -1, 5] for 8 rows"),
    ("offs beyond the rows", lambda: tokens(offs=OFFS + 1), ShapeError, "offs is [3, 3, 9] for 8 rows"),
    ("offs device", lambda: q(offs=OFFS.to("meta")), ShapeError, "on meta"),
    ("offs for rank 3", lambda: q(x=X3, offs=OFFS), ShapeError, "offs given for a rank-3 tensor"),
    ("offs for 2-D blocks", lambda: q("nvfp4_16x16", offs=OFFS), OptionError, "offs given for nvfp4_16x16"),
    ("offs for MX 128x128", lambda: tokens("mxfp8_e4m3_128x128"), OptionError, "offs given for mxfp8_e4m3_128x128"),
    ("offs for 128x128", lambda: tokens("fp8_128x128"), OptionError, "offs given for fp8_128x128"),
    ("plan", lambda: CastSpec("mxfp4", "even", hadamard=1 << 40).plan(), OptionError, "sign mask"),
    ("decode dtype", lambda: bs.dequantize(q(), torch.float64), DtypeError, "dtype=torch.float64"),
    ("decode a tensor", lambda: bs.dequantize(X), DtypeError, "Tensor"),
    ("decode groups without offs", lambda: bs.dequantize(tokens().mT), OptionError, "without offs"),
    ("decode scales without offs", lambda: bs.dequantize(q("nvfp4", offs=OFFS, amax="group")), OptionError, "offs"),
    ("decode offs dtype", lambda: bs.dequantize(tokens().mT, offs=OFFS.long()), ShapeError, "torch.int64"),
    (
        "rotated groups",
        lambda: bs.dequantize(tokens("mxfp4", hadamard=True), offs=OFFS, rotated=True),
        OptionError,
        "rotated=True",
    ),
]

PRODUCTS: list[Case] = [
    ("plain tensors", lambda: bs.scaled_mm(X, X), DtypeError, "quantize(b, 'mxfp8_e4m3'), or use torch.mm(a, b.mT)"),
    ("plain a of float64", lambda: bs.scaled_mm(X.double(), q()), DtypeError, "a has dtype torch.float64"),
    ("plain a of integers", lambda: bs.scaled_mm(X.int(), q()), DtypeError, "a has dtype torch.int32"),
    ("plain a, sparse", lambda: bs.scaled_mm(X.to_sparse(), q()), DtypeError, "a has layout torch.sparse_coo"),
    ("plain a of rank 3", lambda: bs.scaled_mm(X3, q()), ShapeError, "pass a.flatten(0, -2)"),
    ("plain a, K", lambda: bs.scaled_mm(X[:, 1:], q()), ShapeError, "have K = 63 and 64"),
    ("plain a, device", lambda: bs.scaled_mm(X.to("meta"), q()), DeviceError, "a is on meta, b on cpu"),
    ("plain a, rank of b", lambda: bs.scaled_mm(X, q(x=X3)), ShapeError, "b has shape (3, 8, 64)"),
    ("plain a, axis of b", lambda: bs.scaled_mm(X[:, :8], q(x=X[:, :8]).mT), AxisError, "pass b.mT"),
    ("plain a, rotated b", lambda: bs.scaled_mm(X, q("mxfp4", hadamard=True)), OptionError, "without hadamard"),
    ("plain a, k-grouped b", lambda: bs.scaled_mm(X, tokens()), ShapeError, "have K"),
    ("plain a, out", lambda: bs.scaled_mm(X, q(), torch.float64), DtypeError, "out_dtype=torch.float64"),
    ("plain a, bias", lambda: bs.scaled_mm(X, q(), bias=torch.ones(7)), ShapeError, "bias is torch.float32 (7,)"),
    ("plain a, None", lambda: bs.scaled_mm(X, None), DtypeError, "b is a NoneType"),
    (
        "plain a, accumulate",
        lambda: bs.scaled_mm(X, q(), accumulate=torch.ones(8, 8)),
        OptionError,
        "accumulate with a plain left operand",
    ),
    (
        "plain a, scales of groups",
        lambda: bs.scaled_mm(X, q("nvfp4", offs=OFFS, amax="group")),
        OptionError,
        "without groups",
    ),
    ("plain b", lambda: bs.scaled_mm(q(), X), DtypeError, "pass the weight second"),
    ("None", lambda: bs.scaled_mm(q(), None), DtypeError, "b is a NoneType"),
    ("exact, plain", lambda: exact_mm(X.double(), q()), DtypeError, "a has dtype torch.float64"),
    ("exact, plain b", lambda: exact_mm(q(), X), DtypeError, "b is a Tensor"),
    ("K", lambda: bs.scaled_mm(q(), q(x=torch.ones(8, 65))), ShapeError, "have K = 64 and 65"),
    ("exact, K", lambda: exact_mm(q(), q(x=torch.ones(8, 65))), ShapeError, "have K = 64 and 65"),
    ("rank 3", lambda: bs.scaled_mm(q(x=X3), q()), ShapeError, "a has shape (3, 8, 64)"),
    ("axis of a", lambda: bs.scaled_mm(q(axis=-2), q()), AxisError, "a (8, 64) is scaled along axis -2"),
    ("axis of b", lambda: bs.scaled_mm(q(), q(axis=-2)), AxisError, "b (8, 64) is scaled along axis -2"),
    ("square, transposed", lambda: bs.scaled_mm(q(x=X[:, :8]), q(x=X[:, :8]).mT), AxisError, "pass b.mT"),
    ("float64 out", lambda: bs.scaled_mm(q(), q(), torch.float64), DtypeError, "out_dtype=torch.float64"),
    ("fp8 out", lambda: bs.scaled_mm(q(), q(), torch.float8_e4m3fn), DtypeError, "out_dtype=torch.float8_e4m3fn"),
    ("bias size", lambda: bs.scaled_mm(q(), q(), bias=torch.ones(7)), ShapeError, "bias is torch.float32 (7,)"),
    ("bias rank", lambda: bs.scaled_mm(q(), q(), bias=torch.ones(1, 8)), ShapeError, "(1, 8)"),
    ("bias dtype", lambda: bs.scaled_mm(q(), q(), bias=torch.ones(8).double()), ShapeError, "torch.float64 (8,)"),
    ("bias device", lambda: bs.scaled_mm(q(), q(), bias=torch.ones(8, device="meta")), ShapeError, "on meta"),
    (
        "acc dtype",
        lambda: bs.scaled_mm(q(), q(), accumulate=torch.ones(8, 8).half()),
        ShapeError,
        "accumulate is torch.float16 (8, 8)",
    ),
    (
        "acc overlap",
        lambda: bs.scaled_mm(q(), q(), accumulate=torch.zeros(1, 8).expand(8, 8)),
        OptionError,
        "accumulate (8, 8) has strides (0, 1)",
    ),
    (
        "acc overlap of strides",
        lambda: bs.scaled_mm(q(), q(), accumulate=torch.zeros(64).as_strided((8, 8), (4, 1))),
        OptionError,
        "accumulate (8, 8) has strides (4, 1)",
    ),
    (
        "grouped acc overlap",
        lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, accumulate=torch.zeros(1, 8).expand(8, 8)),
        OptionError,
        "accumulate (8, 8) has strides (0, 1)",
    ),
    ("acc shape", lambda: bs.scaled_mm(q(), q(), accumulate=torch.ones(8, 9)), ShapeError, "float32 (8, 9)"),
    ("acc device", lambda: bs.scaled_mm(q(), q(), accumulate=torch.ones(8, 8, device="meta")), ShapeError, "on meta"),
    (
        "bias and acc",
        lambda: bs.scaled_mm(q(), q(), bias=torch.ones(8), accumulate=torch.ones(8, 8)),
        OptionError,
        "bias and accumulate together",
    ),
    ("rotation on one side", lambda: bs.scaled_mm(q("mxfp4", hadamard=True), q("mxfp4")), OptionError, "b None"),
    (
        "two rotations",
        lambda: bs.scaled_mm(q("nvfp4", hadamard=5), q("nvfp4", hadamard=6)),
        OptionError,
        "a has Hadamard mask 5, b 6",
    ),
    ("k-grouped in a dense product", lambda: bs.scaled_mm(tokens(), tokens()), OptionError, "groups padded to 128"),
    (
        "scales per group in a dense product",
        lambda: bs.scaled_mm(q("nvfp4", offs=OFFS, amax="group"), q("nvfp4")),
        OptionError,
        "global_scale (3,)",
    ),
    ("two devices", lambda: bs.scaled_mm(q(), q(x=X.to("meta"))), DeviceError, "a is on cpu, b on meta"),
]

GROUPED: list[Case] = [
    ("plain tensors", lambda: bs.scaled_grouped_mm(X, X3, OFFS), DtypeError, "a and b are plain tensors"),
    ("plain a, k-grouped", lambda: bs.scaled_grouped_mm(X, q(), OFFS), ShapeError, "this operand has rank 3"),
    ("plain a, offs count", lambda: bs.scaled_grouped_mm(X, q(x=X3), OFFS[:2]), ShapeError, "2 group ends for 3"),
    ("plain a, offs dtype", lambda: bs.scaled_grouped_mm(X, q(x=X3), OFFS.long()), ShapeError, "torch.int64 (3,)"),
    ("plain a, rows", lambda: bs.scaled_grouped_mm(X, q(x=X3), OFFS + 1), ShapeError, "[3, 3, 9] for 8 rows"),
    (
        "plain a, starts",
        lambda: bs.scaled_grouped_mm(X, q(x=X3), OFFS, starts=OFFS.long()),
        ShapeError,
        "starts is torch.int64 (3,)",
    ),
    (
        "plain a, bias",
        lambda: bs.scaled_grouped_mm(X, q(x=X3), OFFS, bias=torch.ones(8)),
        ShapeError,
        "bias is torch.float32 (8,)",
    ),
    (
        "plain a, accumulate",
        lambda: bs.scaled_grouped_mm(X, q(x=X3), OFFS, accumulate=torch.ones(8, 8)),
        OptionError,
        "accumulate with a plain left operand",
    ),
    (
        "plain a, rotated weights",
        lambda: bs.scaled_grouped_mm(X, q("nvfp4", x=X3, hadamard=True), OFFS),
        OptionError,
        "without hadamard",
    ),
    ("plain b", lambda: bs.scaled_grouped_mm(q(), X3, OFFS), DtypeError, "b is a Tensor"),
    ("K", lambda: bs.scaled_grouped_mm(q(x=X[:, :63]), q(x=X3), OFFS), ShapeError, "have K = 63 and 64"),
    ("rank of a", lambda: bs.scaled_grouped_mm(q(x=X3), q(x=X3), OFFS), ShapeError, "a has shape (3, 8, 64)"),
    ("axis of b", lambda: bs.scaled_grouped_mm(q(), q(x=X3, axis=-2), OFFS), AxisError, "scaled along axis -2"),
    ("offs dtype", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS.long()), ShapeError, "offs is torch.int64 (3,)"),
    ("offs rank", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS[None]), ShapeError, "torch.int32 (1, 3)"),
    ("offs device", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS.to("meta")), ShapeError, "on meta"),
    ("offs descending", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS.flip(0)), ShapeError, "[8, 2, 2] for 8 rows"),
    ("offs beyond the rows", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS + 1), ShapeError, "[3, 3, 9] for 8 rows"),
    (
        "2-D blocks in the rows",
        lambda: bs.scaled_grouped_mm(q("fp8_128x128"), q("fp8_1x128", x=X3), OFFS),
        OptionError,
        "a is BlockScaled(fp8_128x128 (8, 64)",
    ),
    ("offs count", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS[:2]), ShapeError, "2 group ends for 3 matrices"),
    (
        "scales of a",
        lambda: bs.scaled_grouped_mm(q("nvfp4", offs=OFFS[1:], amax="group"), q("nvfp4", x=X3), OFFS),
        ShapeError,
        "3 group ends for a, which was cast with 2 groups",
    ),
    (
        "k-grouped rows in an m-grouped product",
        lambda: bs.scaled_grouped_mm(tokens(x=torch.ones(64, 8)), q(x=X3), OFFS),
        OptionError,
        "groups padded to 128",
    ),
    ("k-grouped, no offs", lambda: bs.scaled_grouped_mm(q(), q(), OFFS), OptionError, "axis=-2, offs=offs"),
    ("k-grouped, one side", lambda: bs.scaled_grouped_mm(tokens(), q(axis=-2).mT, OFFS), OptionError, "b is"),
    (
        "k-grouped, other groups",
        lambda: bs.scaled_grouped_mm(tokens(), tokens(), OFFS[:2]),
        ShapeError,
        "cast with 3 groups",
    ),
    ("k-grouped offs", lambda: bs.scaled_grouped_mm(tokens(), tokens(), OFFS.long()), ShapeError, "torch.int64"),
    (
        "k-grouped tokens",
        lambda: bs.scaled_grouped_mm(tokens(), tokens(x=torch.ones(9, 64)), OFFS),
        ShapeError,
        "have K = 8 and 9",
    ),
    (
        "k-grouped bias",
        lambda: bs.scaled_grouped_mm(tokens(), tokens(), OFFS, bias=torch.ones(3, 64)),
        OptionError,
        "bias in a k-grouped product",
    ),
    (
        "k-grouped starts",
        lambda: bs.scaled_grouped_mm(tokens(), tokens(), OFFS, starts=OFFS),
        OptionError,
        "starts in a k-grouped product",
    ),
    ("starts list", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, starts=[0, 2, 2]), DtypeError, "starts is a list"),
    (
        "starts dtype",
        lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, starts=OFFS.long()),
        ShapeError,
        "starts is torch.int64 (3,)",
    ),
    (
        "starts count",
        lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, starts=OFFS[:2]),
        ShapeError,
        "each of the 3 groups",
    ),
    (
        "starts device",
        lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, starts=OFFS.to("meta")),
        ShapeError,
        "on meta",
    ),
    (
        "starts in another group",
        lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, starts=OFFS - 2),
        ShapeError,
        "offs is [2, 2, 8] and starts is [0, 0, 6] for 8 rows",
    ),
    ("bias shape", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, bias=torch.ones(8)), ShapeError, "float32 (8,)"),
    (
        "bias and acc",
        lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, bias=torch.ones(3, 8), accumulate=torch.ones(8, 8)),
        OptionError,
        "bias and accumulate together",
    ),
    (
        "acc shape",
        lambda: bs.scaled_grouped_mm(tokens(), tokens(), OFFS, accumulate=torch.ones(64, 64)),
        ShapeError,
        "accumulate is torch.float32 (64, 64)",
    ),
    ("out dtype", lambda: bs.scaled_grouped_mm(q(), q(x=X3), OFFS, torch.int8), DtypeError, "out_dtype=torch.int8"),
    (
        "rotations",
        lambda: bs.scaled_grouped_mm(tokens("mxfp4", hadamard=True), tokens("mxfp4"), OFFS),
        OptionError,
        "Hadamard mask",
    ),
]


def _with(name: str = "mxfp8_e4m3", **changes: object) -> BlockScaled:
    return replace(q(name), **changes)


OPERANDS: list[Case] = [
    ("scale shape", lambda: _with(scale=q().scale[:, :1]), LayoutError, "scale is torch.float8_e8m0fnu (8, 1)"),
    ("scale dtype", lambda: _with(scale=torch.ones(8, 2)), LayoutError, "scale is torch.float32 (8, 2)"),
    ("scale bytes", lambda: _with(scale=q().scale.view(torch.uint8)), LayoutError, "scale is torch.uint8 (8, 2)"),
    ("scale device", lambda: _with(scale=q().scale.to("meta")), LayoutError, "(8, 2) on meta"),
    ("data dtype", lambda: _with(data=q().data.view(torch.uint8)), LayoutError, "data is torch.uint8 (8, 64)"),
    ("data shape", lambda: _with(data=q().data[:, :63]), LayoutError, "data is torch.float8_e4m3fn (8, 63)"),
    ("unpacked fp4", lambda: _with("mxfp4", data=torch.zeros(8, 64, dtype=torch.uint8)), LayoutError, "torch.uint8"),
    ("logical shape", lambda: _with(shape=(8, 63)), LayoutError, "keeps its data as torch.float8_e4m3fn (8, 63)"),
    ("wrong layout name", lambda: _with(scale_layout="plainn"), UnknownNameError, "did you mean plain"),
    ("layout it is not in", lambda: _with(scale_layout="blocked"), LayoutError, "(512,)"),
    ("wrong axis", lambda: _with(axis=0), AxisError, "axis=0"),
    ("axis it was not cast along", lambda: _with(axis=-2), LayoutError, "axis=-2"),
    ("wrong format", lambda: _with(format="mxfp8_e5m2"), LayoutError, "keeps its data as torch.float8_e5m2"),
    ("unknown format", lambda: _with(format="mxfp9"), UnknownNameError, "unknown format 'mxfp9'"),
    (
        "global scale missing",
        lambda: _with("nvfp4", global_scale=None),
        LayoutError,
        "global_scale is missing for nvfp4",
    ),
    ("global scale extra", lambda: _with(global_scale=torch.ones(())), LayoutError, "is given for mxfp8_e4m3"),
    ("global scale dtype", lambda: _with("nvfp4", global_scale=torch.ones(()).half()), LayoutError, "torch.float16 ()"),
    ("global scale rank", lambda: _with("nvfp4", global_scale=torch.ones(1, 1)), LayoutError, "(1, 1)"),
    ("global scale device", lambda: _with("nvfp4", global_scale=torch.ones((), device="meta")), LayoutError, "on meta"),
]

NAMES: list[Case] = [
    ("explain", lambda: bs.explain("gem", q(), q()), UnknownNameError, "did you mean gemm"),
    ("explain operands", lambda: bs.explain("gemm", q()), OptionError, "explain('gemm') with operands (BlockScaled)"),
    ("explain plain", lambda: bs.explain("gemm", X, X), OptionError, "(Tensor, Tensor)"),
    ("explain format", lambda: bs.explain("cast", X, "mxfp5"), UnknownNameError, "mxfp4"),
    ("backend", lambda: bs.use_backend("tortch").__enter__(), UnknownNameError, "did you mean torch"),
    ("doctor's device", lambda: bs.doctor([1.0]), DeviceError, "a device is cpu"),
    ("doctor's workers", lambda: bs.doctor("cpu", workers=0), OptionError, "workers=0"),
    ("doctor's callback", lambda: bs.doctor("cpu", on_check=3), OptionError, "on_check is 3"),
    ("operation", lambda: bs.use_backend(gmm="torch").__enter__(), UnknownNameError, "unknown operation 'gmm'"),
]


def run(case: Case) -> str:
    """Check that a call fails as it should; the text of its error."""
    _, call, kind, text = case
    with pytest.raises(BlockscaleError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert text in message
    # what was wrong, then the rule, then the fix, each a sentence
    assert re.fullmatch(r".+[.?!] Rule: .+[.?!] Fix: .+[.?!]", message, re.DOTALL), message
    return message


def advised(text: str, before: str) -> list[str]:
    """The formats that an error proposes."""
    return re.search(re.escape(before) + r"(.+)\.$", text)[1].split(" or ")


@pytest.mark.parametrize("case", CASTS, ids=lambda case: case[0])
def test_casts(case):
    run(case)


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case[0])
def test_products(case):
    run(case)


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case[0])
def test_grouped_products(case):
    run(case)


@pytest.mark.parametrize("case", OPERANDS, ids=lambda case: case[0])
@pytest.mark.parametrize("use", ["scaled_mm", "dequantize"])
def test_operands_made_by_hand(case, use):
    name, make, kind, text = case

    def call() -> object:
        operand = make()
        if use == "dequantize":
            return bs.dequantize(operand)
        sound = q("nvfp4") if operand.format == "nvfp4" else q()
        return bs.scaled_mm(operand, sound)

    run((name, call, kind, text))


@pytest.mark.parametrize("case", NAMES, ids=lambda case: case[0])
def test_names(case):
    run(case)


@pytest.mark.parametrize("pair", [(a, b) for a in FORMATS for b in FORMATS if (a, b) not in LEGAL_PAIRS], ids="@".join)
def test_illegal_pairs(pair):
    a, b = q(pair[0]), q(pair[1])
    text = run(("dense", lambda: bs.scaled_mm(a, b), PairError, f"no product of {pair[0]} with {pair[1]}"))
    for name in advised(text, "cast the second operand to "):
        assert (pair[0], name) in LEGAL_PAIRS
        assert bs.scaled_mm(a, q(name)).shape == (8, 8)


@pytest.mark.parametrize("pair", [(a, b) for a in FORMATS for b in FORMATS if (a, b) not in LEGAL_PAIRS], ids="@".join)
def test_illegal_pairs_of_grouped_products(pair):
    """2-D blocks of rows are refused before the formats are compared: no partner would help."""
    a, experts = q(pair[0]), q(pair[1], x=X3)
    if FORMATS[pair[0]].is_2d:
        text = run(("2-D", lambda: bs.scaled_grouped_mm(a, experts, OFFS), OptionError, "would span groups"))
        for name in advised(text, "cast a with 1-D blocks: "):
            assert bs.scaled_grouped_mm(q(name), experts, OFFS).shape == (8, 8)
        return
    text = run(("pair", lambda: bs.scaled_grouped_mm(a, experts, OFFS), PairError, f"no product of {pair[0]}"))
    for name in advised(text, "cast the second operand to "):
        assert bs.scaled_grouped_mm(a, q(name, x=X3), OFFS).shape == (8, 8)


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_advised_for_a_plain_operand_goes_with_its_partner(name):
    """The advice for a tensor that was not cast is a format that the other operand can be multiplied with."""
    partner = q(name)
    text = run(("plain", lambda: bs.scaled_mm(partner, X), DtypeError, "b is a Tensor"))
    cast = bs.quantize(X, re.search(r"quantize\(b, '(\w+)'\)", text)[1])
    assert bs.scaled_mm(partner, cast).shape == (8, 8)
    assert bs.scaled_mm(X, partner).shape == (8, 8), "the other advice: the weight second"


def test_the_number_of_illegal_pairs():
    """100 pairs: 36 MX, 4 NVFP4 and 3 FP8 ones are legal."""
    assert len(LEGAL_PAIRS) == 43
    assert ("fp8_128x128", "fp8_128x128") not in LEGAL_PAIRS


def test_a_forced_backend_that_cannot_run_raises():
    a = q("fp8_1x128")
    with bs.use_backend(gemm="torch"):
        run(("forced", lambda: bs.scaled_mm(a, a), BackendError, "backend 'torch' cannot run gemm fp8_1x128"))


def test_bad_input_leaves_the_accumulator_unchanged():
    acc = torch.ones(8, 8)
    with pytest.raises(ShapeError):
        bs.scaled_mm(q(), q(x=torch.ones(8, 65)), accumulate=acc)
    assert torch.equal(acc, torch.ones(8, 8))


# ---- the classes themselves ----------------------------------------------------------------------------------------


def test_every_error_is_a_value_error_or_a_not_implemented_error():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BlockscaleError)]
    kinds.remove(BlockscaleError)
    assert len(kinds) == 23
    missing = {PairError, BackendError, PtxasError, MissingPackageError, VersionError, errors.TransformError}
    assert {kind for kind in kinds if issubclass(kind, NotImplementedError)} == missing
    others = {errors.RankError}  # failures of other processes: RuntimeError
    assert {kind for kind in kinds if issubclass(kind, ValueError)} == set(kinds) - missing - others
    assert all(kind.__doc__ for kind in kinds)


def test_every_error_is_raised_somewhere_here():
    cases = [*CASTS, *PRODUCTS, *GROUPED, *OPERANDS, *NAMES]
    # the last by tests/autograd/test_weights_writes.py
    raised = {kind for _, _, kind, _ in cases} | {PairError, BackendError, StaleWeightError}
    # by test_transforms.py and test_activation.py there
    raised |= {errors.TransformError, errors.StaleActivationError}
    # by tests/train
    raised |= {errors.CheckpointError, errors.DataError, errors.NonFiniteError, errors.OutOfMemoryError}
    raised |= {errors.ProcessError}
    # by tests/autograd/test_tensor_parallel.py and tests/test_sharding.py
    raised |= {errors.ShardingError}
    # by tests/distributed/test_expert_parallel.py and test_failures.py
    raised |= {errors.CapacityError, errors.RankError}
    # by tests/integrations
    raised |= {MissingPackageError, VersionError}
    assert raised == set(BlockscaleError.__subclasses__())


def test_message_of_three_sentences():
    assert message("what", rule="a rule", fix="a fix?") == "what. Rule: a rule. Fix: a fix?"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("mxfp4", None),
        ("mxpf4", "did you mean mxfp4"),
        ("zzz", "pick a format"),
        (7, "unknown format 7"),
        (None, "None"),
    ],
)
def test_check_name(given, want):
    known = ["mxfp4", "nvfp4"]
    if want is None:
        errors.check_name(given, known, "format")
        return
    with pytest.raises(UnknownNameError, match=want) as caught:
        errors.check_name(given, known, "format")
    assert "a format is one of mxfp4, nvfp4" in str(caught.value)


# ---- input that looks bad and is fine ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_strides_do_not_matter(device, name):
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).to(device)
    strided = torch.empty(24, 80, device=device)[:, ::2]
    strided.copy_(x)
    for source, plain in ((strided, x), (x.mT, x.mT.contiguous()), (x[:1].expand(24, 40), x[:1].repeat(24, 1))):
        for axis in (-1, -2):
            got, want = bs.quantize(source, name, axis=axis), bs.quantize(plain, name, axis=axis)
            assert torch.equal(bs.dequantize(got), bs.dequantize(want))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_inf_are_data(device, name):
    """Not an error: values that share the scale become NaN, others do not."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(300, 300, device=device)
        x[0, 0] = bad
        values = bs.dequantize(bs.quantize(x, name), torch.float32)
        if FORMATS[name].family == "nvfp4":
            assert values.isnan().all()
        else:
            across, along = FORMATS[name].block
            assert values[:across, :along].isnan().all()
            assert values.isnan().sum() == across * along


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 64), (0, 4, 64)], ids=str)
def test_empty_tensors_work(device, name, shape):
    for axis in (-1, -2):
        operand = bs.quantize(torch.ones(shape, device=device), name, axis=axis)
        assert operand.shape == shape
        assert bs.dequantize(operand).shape == shape


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: bs.quantize([[1.0]], "mxfp4"), "x is a list"),
        (lambda: bs.quantize(X, "mxfp4", offs=[1]), "offs is a list"),
        (lambda: bs.scaled_mm(q(), q(), bias=[1.0]), "bias is a list"),
        (lambda: bs.scaled_mm(q(), q(), bias=1), "bias is 1"),
        (lambda: bs.quantize(1, "mxfp4"), "x is 1"),
    ],
    ids=["x", "offs", "bias", "a number as bias", "a number as x"],
)
def test_lists_are_not_tensors(call, text):
    with pytest.raises(DtypeError, match=text):
        call()


def test_measure_refuses_what_it_cannot_compare():
    from blockscale.diagnostics import measure

    with pytest.raises(OptionError, match="rotated"):
        measure(X, bs.quantize(X, "mxfp4", hadamard=True))
