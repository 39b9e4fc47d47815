"""Peers of casts: the same casts in plain torch, eager and compiled, and torchao's kernels.

A peer returns the parts of its operands, (codes, scales[, tensor scale]) each, scaled axis last; `as_operands` makes
operands of them, so that they can be decoded and compared with ours. torchao is imported on demand, never installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats.spec import get_format
from ..formats.tensor import BlockScaled
from ..hardware import capability
from .harness import NOT_COMPILED, Peer

Parts = tuple[Tensor, ...]
# midpoints between the eight magnitudes of E2M1; ties that round up are moved down by one ulp
_FP4_MIDPOINTS = (0.25, 0.74999994, 1.25, 1.7499999, 2.5, 3.4999998, 5.0)
# torchao's kernels address with 32 bits
_TORCHAO_MOST = 2**31
# plain torch keeps several fp32 copies of its input
_EAGER_MOST = 2**29


def as_operands(format: str, parts: tuple[Parts, ...]) -> tuple[BlockScaled, ...]:
    """Operands from the parts of a peer: plain scales, scaled axis last."""
    spec = get_format(format)

    def dress(codes: Tensor, scale: Tensor, top: Tensor | None = None) -> BlockScaled:
        shape = (*codes.shape[:-1], codes.shape[-1] * spec.codes_per_byte)
        data, scale = codes.view(spec.data_dtype), scale.view(spec.scale_dtype)
        return BlockScaled(data, scale, top, format, -1, "plain", shape)

    return tuple(dress(*operand) for operand in parts)


# in plain torch


def plain_cast(x: Tensor, format: str, axis: int, amax: Tensor | None = None) -> Parts:
    """A cast in plain torch: block maxima, scales, division, rounding."""
    spec = get_format(format)
    across, along = spec.block
    blocks = (x if axis == -1 else x.mT).float().unflatten(-1, (-1, along)).unflatten(-3, (-1, across))
    block_amax = blocks.abs().amax((-3, -1), keepdim=True).clamp(min=1e-30)
    rest: Parts = ()
    if spec.family == "fp8":
        stored = scale = block_amax / 448
    elif spec.family == "mx":
        e4m3 = spec.element.name == "e4m3"
        power = torch.ceil(torch.log2(block_amax / 448)) if e4m3 else torch.floor(torch.log2(block_amax / 3.5))
        stored, scale = (power + 127).to(torch.uint8), torch.exp2(power)
    else:
        top = (x.abs().amax().float() if amax is None else amax) / 2688
        stored = (block_amax / 6 / top).clamp(max=448).to(torch.float8_e4m3fn)
        scale, rest = stored.float() * top, (top,)
    scaled = (blocks / scale).flatten(-2).flatten(-3, -2)
    codes = _plain_fp4(scaled) if spec.codes_per_byte == 2 else scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.contiguous(), stored.squeeze(-1).squeeze(-2), *rest


@functools.cache
def _midpoints(device: torch.device) -> Tensor:
    """Midpoints on the device, cached: a copy from the host cannot be captured."""
    return torch.tensor(_FP4_MIDPOINTS, device=device)


def _plain_fp4(values: Tensor) -> Tensor:
    codes = (
        torch.bucketize(values.contiguous().abs(), _midpoints(values.device)).to(torch.uint8)
        | (values < 0).to(torch.uint8) << 3
    )
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def plain_dequantize(q: BlockScaled) -> Tensor:
    """8-bit codes times the scales of their blocks, in bf16."""
    across, along = q.spec.block
    blocks = q.data.float().unflatten(-1, (-1, along)).unflatten(-3, (-1, across))
    values = blocks * q.plain_scale().float()[..., :, None, :, None]
    return values.flatten(-2).flatten(-3, -2).bfloat16()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for one shape; compiles on the first call."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def casts(
    format: str, axes: tuple[int, ...], x_numel: int, names: frozenset[str], *, compiling: bool
) -> Mapping[str, Peer | str]:
    """The named peers of a cast along those axes, called with x and, for NVFP4, its amax; a string is the reason why a
    peer does not run.

    compiling: whether to include peers that have to be compiled.
    """

    def plain(x: Tensor, amax: Tensor | None = None) -> tuple[Parts, ...]:
        return tuple(plain_cast(x, format, axis, amax) for axis in axes)

    def view(parts: tuple[Parts, ...]) -> tuple[BlockScaled, ...]:
        return as_operands(format, parts)

    found: dict[str, Peer | str] = {}
    if "eager" in names:
        found["eager"] = Peer(plain, view) if x_numel <= _EAGER_MOST else "not run: takes too much memory"
    if "compile" in names:
        found["compile"] = Peer(compiled(plain), view) if compiling else NOT_COMPILED
    if "torchao" in names:
        found["torchao"] = _torchao_peer(format, axes, x_numel, view, compiling=compiling)
    return found


def decodes(names: frozenset[str], *, compiling: bool) -> Mapping[str, Peer | str]:
    """The named peers of `dequantize` for 8-bit formats."""
    found: dict[str, Peer | str] = {}
    if "eager" in names:
        found["eager"] = Peer(plain_dequantize)
    if "compile" in names:
        found["compile"] = Peer(compiled(plain_dequantize)) if compiling else NOT_COMPILED
    return found


# torchao


def torchao(module: str) -> Any:
    """A module of torchao.prototype; ImportError if there is none."""
    return importlib.import_module(f"torchao.prototype.{module}")


def _torchao_peer(
    format: str, axes: tuple[int, ...], x_numel: int, view: Callable[[Any], object], *, compiling: bool
) -> Peer | str:
    if x_numel >= _TORCHAO_MOST:
        return "not run: its offsets are 32-bit"
    if format not in _TORCHAO or (format == "nvfp4" and axes != (-1,)):
        return "has none"
    try:
        names, runs = zip(*(_TORCHAO[format](axis) for axis in axes), strict=True)
    except ImportError as error:
        return f"not importable: {error}"
    note = ", ".join(dict.fromkeys(names))
    if "compiled" in note and not compiling:
        return NOT_COMPILED
    return Peer(lambda x, amax=None: tuple(run(x, amax) for run in runs), view, note)


# name of one of torchao's casts, and the cast, called with x and the tensor amax or None
_Cast = tuple[str, Callable[[Tensor, Tensor | None], Parts]]


def _torchao_fp8_rows(axis: int) -> _Cast:
    name = "triton_fp8_blockwise_act_quant" + ("_lhs" if axis == -1 else "_transposed_lhs")
    cast = getattr(torchao("blockwise_fp8_training.kernels"), name)
    return name, lambda x, amax: cast(x)


def _torchao_fp8_tiles(axis: int) -> _Cast:
    """Matrices use the casts of the dense layer, which return column-major views; experts use DeepGEMM's."""
    side = "_transposed_rhs" if axis == -1 else "_rhs"
    name = f"triton_fp8_blockwise_weight_quant{side}"
    cast = getattr(torchao("blockwise_fp8_training.kernels"), name)
    grouped = f"triton_fp8_blockwise_weight_quant_grouped{side}_deepgemm"
    cast_experts = getattr(torchao("blockwise_fp8_training.deepgemm_quant"), grouped)

    def run(x: Tensor, amax: Tensor | None) -> Parts:
        if x.dim() == 3:
            return cast_experts(x.mT)
        codes, scale = cast(x)
        return codes.mT, scale.mT

    return f"{name} (experts: grouped, deepgemm)", run


def _torchao_mxfp8(axis: int) -> _Cast:
    """torchao's Triton casts from sm_100 on; elsewhere compiled `to_mx`, as in torchao's own layers."""
    if torch.cuda.is_available() and capability("cuda").sm >= 100:
        name = "triton_to_mxfp8_dim0" if axis == -1 else "triton_to_mxfp8_dim1"
        cast = getattr(torchao("mx_formats.kernels"), name)

        def run(x: Tensor, amax: Tensor | None) -> Parts:
            codes, scale = cast(x)
            return (codes, scale) if axis == -1 else (codes.mT, scale)

        return name, run
    to_mx = torchao("mx_formats.mx_tensor").to_mx
    rule = torchao("mx_formats.config").ScaleCalculationMode.RCEIL

    def convert(x: Tensor) -> Parts:
        scale, codes = to_mx(x if axis == -1 else x.mT.contiguous(), torch.float8_e4m3fn, 32, rule)
        return codes, scale

    program = compiled(convert)
    return "to_mx, compiled", lambda x, amax: program(x)


def _torchao_nvfp4(axis: int) -> _Cast:
    quantize = torchao("mx_formats.nvfp4_tensor").nvfp4_quantize

    def convert(x: Tensor, amax: Tensor | None = None) -> Parts:
        top = (x.abs().amax().float() if amax is None else amax) / 2688
        scale, codes = quantize(x, 16, top)
        return codes, scale, top

    return "nvfp4_quantize, compiled", compiled(convert)


_TORCHAO: Mapping[str, Callable[[int], _Cast]] = {
    "fp8_1x128": _torchao_fp8_rows,
    "fp8_128x128": _torchao_fp8_tiles,
    "mxfp8_e4m3": _torchao_mxfp8,
    "nvfp4": _torchao_nvfp4,
}
