"""GEMMs through PyTorch: the block-scaled F.scaled_mm where there is one, else an exact upcast to bf16.

FP8 blockwise on sm_90 and MXFP8, MXFP4 and NVFP4 on sm_100 call `F.scaled_mm`. Everywhere else a code times its block
scale is exact in bf16 (scale bytes 0A to EF; see docs/numerics.md), so MX and NVFP4 are an ordinary bf16 GEMM of
exact operands with fp32 accumulation. FP8 with fp32 scales is not exact in bf16 and has no such kernel. Weight-only
GEMMs decode the weight to bf16 where that is exact and the left operand is bf16, else to fp32.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.decoding import decode_blocks
from ..formats.spec import BF16_EXACT_PAIRS, FORMATS, LEGAL_PAIRS, WEIGHT_ONLY_PAIRS
from ..formats.tensor import BlockScaled
from ..library import empty
from ..registry import Request, kernel
from .ops import apply_tensor_scales, decoded, exact_bf16, finish, reject_fp8_of_vendor

try:
    from ._finish import finish_at_once
except ImportError:  # builds of torch without triton
    finish_at_once = None

FP8_PAIRS = sorted(pair for pair in LEGAL_PAIRS if FORMATS[pair[0]].family == "fp8")
# the blocked layout repeats scales of 2-D blocks, as 1x32 and 1x16
_MXFP8 = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3_128x128")
_NVFP4 = ("nvfp4", "nvfp4_16x16")
# F.scaled_mm refuses E5M2 by E5M2
_MXFP8_PAIRS = [(a, b) for a in _MXFP8 for b in _MXFP8 if {a, b} != {"mxfp8_e5m2"}]
_BLACKWELL_PAIRS = [*_MXFP8_PAIRS, *((a, b) for a in _NVFP4 for b in _NVFP4)]


@kernel(
    "gemm",
    "torch",
    sm=(90, 90),
    formats=FP8_PAIRS,
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    priority=20,
    reject=reject_fp8_of_vendor,
)
def scaled_mm_hopper(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """F.scaled_mm: FP8 blockwise GEMM of the vendor library"""
    direct = not accumulate and bias is None and out.dtype != torch.float16 and out.is_contiguous()
    if direct:
        _vendor_mm(a, b, out)
    else:
        product = empty((a.rows, b.rows), torch.float32, out.device)
        _vendor_mm(a, b, product)
        _finish(product, a, b, out, bias, accumulate=accumulate)


def _vendor_mm(a: BlockScaled, b: BlockScaled, out: Tensor) -> None:
    """Out variant of the operator behind F.scaled_mm: a copy of the output would cost up to a quarter of the GEMM."""
    scales = [_hopper_scale(a)], [_hopper_recipe(a).value], [], [_hopper_scale(b)], [_hopper_recipe(b).value], []
    torch.ops.aten._scaled_mm_v2.out(a.data, b.data.mT, *scales, None, out.dtype, out=out)


def _hopper_recipe(operand: BlockScaled) -> functional.ScalingType:
    return functional.ScalingType.BlockWise128x128 if operand.spec.is_2d else functional.ScalingType.BlockWise1x128


def _hopper_scale(operand: BlockScaled) -> Tensor:
    """1x128: [rows, blocks], rows contiguous; 128x128: [blocks padded to 4, row tiles], blocks contiguous."""
    if not operand.spec.is_2d:
        return operand.scale
    tiles, padded = operand.scale.shape[0], operand.scale.stride(0)
    return operand.scale.as_strided((padded, tiles), (1, padded))


def _reject_blackwell(request: Request) -> str | None:
    _, n, k = request.shape
    if 0 in request.shape:
        return "takes no empty operands"
    if n % 16 or k % 32:
        return f"wants N in multiples of 16 and K of 32, these are {n} and {k}"
    return None


@kernel(
    "gemm",
    "torch_sm100",
    sm=(100, 103),
    formats=_BLACKWELL_PAIRS,
    layouts=dict.fromkeys((*_MXFP8, *_NVFP4), "blocked"),
    priority=5,
    reject=_reject_blackwell,
    forced_only=True,  # it has never run
)
def scaled_mm_blackwell(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """F.scaled_mm: MXFP8 or NVFP4 GEMM of the vendor library"""
    # NVFP4's tensor scales are applied here, one after the other: the product of the two could underflow
    _finish(_blocked_mm(a, b, torch.float32), a, b, out, bias, accumulate=accumulate)


def _reject_mxfp4(request: Request) -> str | None:
    if request.options & {"bias", "accumulate"}:
        return "returns bf16, and a bias or `out +=` would round a second time"
    if not _has_mxfp4():
        return "needs a torch that was built with its optional library of FP4 GEMMs (MSLK)"
    return _reject_blackwell(request)


@functools.cache
def _has_mxfp4() -> bool:
    """Whether this torch was built with the library of its MXFP4 GEMM, under either name."""
    built_with = torch.__config__.show()
    return "USE_MSLK" in built_with or "USE_FBGEMM_GENAI" in built_with


@kernel(
    "gemm",
    "torch_sm100",
    sm=(100, 103),
    formats=[("mxfp4", "mxfp4")],
    dtypes=(torch.bfloat16,),
    layouts={"mxfp4": "blocked"},
    priority=5,
    reject=_reject_mxfp4,
    forced_only=True,  # it has never run
)
def scaled_mm_mxfp4(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """F.scaled_mm: MXFP4 GEMM of a torch built with MSLK"""
    assert bias is None
    assert not accumulate
    out.copy_(_blocked_mm(a, b, torch.bfloat16))


def _blocked_mm(a: BlockScaled, b: BlockScaled, dtype: torch.dtype) -> Tensor:
    """F.scaled_mm of operands with blocked scales, without tensor scales."""
    scaling, swizzle = functional.ScalingType, functional.SwizzleType.SWIZZLE_32_4_4
    recipe = scaling.BlockWise1x32 if a.global_scale is None else scaling.BlockWise1x16
    return functional.scaled_mm(
        a.data,
        b.data.mT,
        scale_a=a.scale,
        scale_recipe_a=recipe,
        scale_b=b.scale,
        scale_recipe_b=recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=dtype,
    )


@kernel("gemm", "torch", devices=("cpu", "cuda"), formats=BF16_EXACT_PAIRS, priority=10)
def scaled_mm_upcast(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """exact upcast, then the vendor library's bf16 GEMM with fp32 accumulation"""
    if not out.is_cuda:
        product = apply_tensor_scales(decode_blocks(a) @ decode_blocks(b).mT, a, b)
        return finish(product, out, bias, accumulate=accumulate)
    x, y = exact_bf16(a), exact_bf16(b).mT
    if not accumulate and bias is None and a.global_scale is None and _write_bf16_mm(x, y, out):
        return None
    return _finish(torch.mm(x, y, out_dtype=torch.float32), a, b, out, bias, accumulate=accumulate)


def _write_bf16_mm(x: Tensor, y: Tensor, out: Tensor) -> bool:
    """bf16 GEMM with fp32 accumulation into `out`; False, and nothing written, if the library has none for it."""
    if not out.is_contiguous() or out.dtype == torch.float16:
        return False
    if out.dtype == torch.float32:
        torch.ops.aten.mm.dtype_out(x, y, torch.float32, out=out)
    else:
        _rounded_mm(x, y, out)
    return True


@kernel("gemm", "torch", devices=("cpu", "cuda"), formats=WEIGHT_ONLY_PAIRS, priority=10)
def weight_only_mm(x: Tensor, w: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """weight decoded, then the vendor library's GEMM: in bf16 if both are exact there, else in fp32"""
    assert not accumulate
    if not out.is_cuda:
        return finish(decoded_product(x, w), out, bias, accumulate=False)
    if x.dtype == torch.bfloat16 and w.spec.family != "fp8":
        y = exact_bf16(w).mT
        if bias is None and w.global_scale is None and _write_bf16_mm(x, y, out):
            return None
        product = torch.mm(x, y, out_dtype=torch.float32)
    else:
        product = _fp32_mm(x.float(), decoded(w, torch.float32).mT)
    return finish(apply_tensor_scales(product, w), out, bias, accumulate=False)


def decoded_product(x: Tensor, w: BlockScaled) -> Tensor:
    """x [M, K] @ w [N, K].mT on a CPU: fp32 [M, N]."""
    return apply_tensor_scales(_fp32_mm(x.float(), decode_blocks(w).mT), w)


def _finish(
    product: Tensor, a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool
) -> None:
    """Epilogue: tensor scales, bias, rounding or `out +=`; in one pass if Triton is installed."""
    if finish_at_once is None or not out.is_cuda:
        return finish(apply_tensor_scales(product, a, b), out, bias, accumulate=accumulate)
    scales = None if a.global_scale is None or b.global_scale is None else (a.global_scale, b.global_scale)
    return finish_at_once(product, out, bias, accumulate=accumulate, scales=scales)


def _fp32_mm(x: Tensor, y: Tensor) -> Tensor:
    """fp32 GEMM in IEEE arithmetic, even if the user allows TF32 or bf16 for fp32 operands."""
    backend = torch.backends.cuda if x.is_cuda else torch.backends.mkldnn
    with _ieee(backend.matmul):  # pyright: ignore[reportAttributeAccessIssue]
        return x @ y


_SETTING = threading.Lock()


@contextlib.contextmanager
def _ieee(backend: Any) -> Generator[None]:
    """Context without reduced precision of fp32 GEMMs; the lock as in `_rounded_mm`.

    A setting that is inherited from `torch.backends` stays inherited: torch's getter does not tell, but a setting that
    is unset reads as what it inherits.
    """
    with _SETTING:  # a thread that holds it has changed the setting for its own product
        allowed = backend.fp32_precision
    if allowed in ("none", "ieee"):
        yield
        return
    with _SETTING:
        before, backend.fp32_precision = backend.fp32_precision, "none"
        inherited, backend.fp32_precision = backend.fp32_precision == before, "ieee"
        try:
            yield
        finally:
            backend.fp32_precision = "none" if inherited else before


def _rounded_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    """bf16 GEMM with fp32 accumulation and one rounding. By default cuBLAS may reduce split-K partials in bf16; that is
    off during this call, and the lock keeps two threads from restoring each other's setting."""
    matmul, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    with _SETTING:
        before, split_k = getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)  # older torch has one setting
        setattr(matmul, name, False if split_k is None else (False, split_k))
        try:
            torch.mm(x, y, out=out)
        finally:
            setattr(matmul, name, before if split_k is None else (before, split_k))
