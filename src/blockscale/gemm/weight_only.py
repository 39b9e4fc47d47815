"""Weight-only GEMM: a plain left operand [M, K] times a block-scaled weight [N, K].mT. Request, operator, checks.

Kernels are registered under the operation `gemm`, with the dtype of the left operand as its format: ("bf16", "mxfp4").
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..casts.checks import FLOAT_DTYPES
from ..errors import DtypeError, ShapeError, refuse
from ..formats.checks import check_tensor, in_words
from ..formats.layout import cuts_evenly, cuts_length
from ..formats.spec import PLAIN_DTYPES
from ..formats.tensor import BlockScaled, has_canonical_strides
from ..hardware import capability, current_cuda_device
from ..library import SUM, Sharding, define_op, empty
from ..registry import Request, select
from .ops import check_devices, check_lengths, check_operand, check_ungrouped, cut_rows

PLAIN_NAME_OF = {dtype: name for name, dtype in PLAIN_DTYPES.items()}


def weight_only_request(x: Tensor, w: BlockScaled, dtype: torch.dtype, *, bias: bool) -> Request:
    """Registry request of a weight-only GEMM. A plain operand has no scale layout."""
    formats, layouts = (PLAIN_NAME_OF[x.dtype], w.format), ("", w.scale_layout)
    shape = (x.shape[0], w.rows, w.length)
    return Request("gemm", capability(w.device), formats, shape, dtype, layouts, weight_only_options(w, bias=bias))


def weight_only_options(w: BlockScaled, *, bias: bool) -> frozenset[str]:
    """Options of a request: bias, strided (scales without the strides of their layout)."""
    options = ("bias", bias), ("strided", not has_canonical_strides(w))
    return frozenset(name for name, on in options if on)


def weight_only_flops(x: Tensor, w: BlockScaled, *rest: object) -> int:
    """FLOPs, 2 M N K."""
    return 2 * x.shape[0] * w.rows * x.shape[1]


def _shard(parts: int, x: Tensor, w: BlockScaled, bias: Tensor | None, out_dtype: torch.dtype) -> Iterator[Sharding]:
    """M, N, and K, as `scaled_mm`."""
    if cuts_evenly(x.shape[0], parts):
        yield Sharding({"x": 0}, (0,))
    if columns := cut_rows(parts, "w", w):
        yield Sharding(columns | {"bias": 0}, (1,))
    if bias is None and cuts_length(w.spec, w.length, w.scale_layout, parts):
        yield Sharding({"x": 1, "w": 1, "w_scale": 1}, (SUM,))


def _allocate(x: Tensor, w: BlockScaled, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return empty((x.shape[0], w.rows), out_dtype, w.device)


@define_op(fake=_allocate, flops=weight_only_flops, sharding=_shard)
def weight_only_mm(x: Tensor, w: BlockScaled, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [M, K] @ w [N, K].mT."""
    out = _allocate(x, w, bias, out_dtype)
    kernel = select(weight_only_request(x, w, out_dtype, bias=bias is not None))
    with current_cuda_device(out.device):  # kernels go to the current device
        w = w.with_layout(kernel.layouts.get(w.format, w.scale_layout))
        kernel.launch(x, w, out, bias=bias, accumulate=False)
    return out


# ---- checks --------------------------------------------------------------------------------------------------------


def check_weight_only(x: Tensor, w: BlockScaled, rank: int) -> None:
    """Raise unless a weight-only product takes these operands.  rank: of the weight."""
    check_tensor(x, "a", "products")
    if isinstance(w, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "the right operand of a product is BlockScaled"
        fix = "quantize the weight: blockscale.quantize(b, 'mxfp8_e4m3'), or use torch.mm(a, b.mT)"
        refuse(f"a and b are plain tensors: {in_words(x)}, {in_words(w)}", rule, fix, error=DtypeError)
    if x.dtype not in FLOAT_DTYPES:
        rule = "a plain left operand is bfloat16, float16 or float32"
        refuse(f"a has dtype {x.dtype}", rule, "convert it first, for example a.bfloat16()", error=DtypeError)
    if x.dim() != 2:
        rule, fix = "a left operand has rank 2", "pass a.flatten(0, -2), and unflatten the result"
        refuse(f"a has shape {tuple(x.shape)}", rule, fix, error=ShapeError)
    check_operand(w, "b", rank)
    check_devices(x, w)
    check_lengths(x, w)
    if w.hadamard is not None:
        rule = "a rotation cancels only when both operands have it"
        fix = "cast the weight without hadamard, or cast a with the same hadamard option"
        refuse(f"b has Hadamard mask {w.hadamard}, and a is a plain tensor", rule, fix)
    if rank == 2:
        check_ungrouped(w, "b")
    elif w.group_align:
        rule, fix = "a weight has no groups of tokens", "cast it without offs"
        refuse(f"b is {w}", rule, fix)


def check_no_accumulator(accumulate: object) -> None:
    """Raise if a weight-only product is to be added to a buffer.  accumulate: None or False if it is not."""
    if accumulate is not None and accumulate is not False:
        rule, fix = "accumulate takes products of two BlockScaled operands", "add the result yourself"
        refuse("accumulate with a plain left operand", rule, fix)
