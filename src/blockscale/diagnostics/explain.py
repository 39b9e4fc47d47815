"""`explain`: which kernel serves a call on this machine, and why the others do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..casts import quantize
from ..casts.checks import check_group_count, check_offs, check_source, resolve_cast
from ..casts.fused import check_gate_up, check_grad, check_norm, hidden_like
from ..casts.ops import cast_request, dequantize_request
from ..casts.permuted import check_copied_rows, check_permutation, permuted_like
from ..casts.transpose import transpose_request
from ..errors import check_name, refuse
from ..formats.cast_spec import CastSpec
from ..formats.checks import check_flag, check_kind
from ..formats.spec import PLAIN_DTYPES
from ..formats.tensor import BlockScaled, check_block_scaled
from ..gemm.ops import check_dense, check_output, gemm_request
from ..gemm.packed import PackedWeight
from ..gemm.packed_ops import check_packed, packed_request
from ..gemm.weight_only import check_no_accumulator, check_weight_only, weight_only_request
from ..grouped import check_grouped, check_weight_only_grouped
from ..grouped.ops import grouped_request
from ..grouped.routing import rows_request
from ..grouped.weight_only import weight_only_grouped_request
from ..hardware import Capability
from ..registry import Explanation, Request, explain_request

FUSED = (
    "swiglu", "swiglu_both", "swiglu_backward_both", "rmsnorm", "rmsnorm_both", "permute", "permute_both",
    "permute_columns",
)  # fmt: skip
MOVES = ("permute_rows", "combine_rows", "combine_dots", "clear_rows", "place_rows", "transpose_codes")
OPERATIONS = ("cast", "cast_both", "dequantize", "gemm", "grouped", *FUSED, *MOVES)


# operations that take a plain left operand
WEIGHT_ONLY = ("gemm", "m_grouped")
# operations that take no 2D formats
GROUPED = ("m_grouped", "k_grouped", "permute", "permute_both", "permute_columns")


def explain(
    op: str,
    *operands: Tensor | BlockScaled | PackedWeight | str | CastSpec,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    accumulate: bool = False,
    offs: Tensor | None = None,
    starts: Tensor | None = None,
    on: Capability | None = None,
) -> Explanation:
    """Every kernel for one call, best first, with the reason it was refused; print the result.

    Operands are those of the call, and are checked as the call would: `explain("cast", x, "mxfp4")`,
    `explain("cast_both", x, "nvfp4", "nvfp4")`, `explain("dequantize", q)`, `explain("gemm", a, b)`,
    `explain("grouped", a, b, offs)`; a of a product may be a plain tensor; for fused casts too:
    `explain("swiglu_both", gate_up, "nvfp4", "nvfp4")`, `explain("rmsnorm", x, weight, "mxfp4")`,
    `explain("permute_both", x, indices, offs, "mxfp4", "mxfp4")`; for moves of rows with the rows [T, k] of a routing:
    `explain("combine_rows", y, routing.rows)`.  on: another device, such as `Capability("cuda", 90)`; operands may then
    be on the meta device.  out_dtype: with accumulate, that of the buffer.

    >>> import blockscale as bs
    >>> q = bs.quantize(torch.randn(8, 64), "mxfp8_e4m3")
    >>> explain("gemm", q, q).taken.backend
    'torch'
    """
    check_name(op, OPERATIONS, "operation")
    check_output(out_dtype)
    for flag, value in (("bias", bias), ("accumulate", accumulate)):
        check_flag(value, flag)
    check_kind(on, Capability, "on", "another device is given by its capability", "pass on=Capability('cuda', 90)")
    _check_groups(op, offs, starts)
    match op, operands:
        case ("cast", [Tensor() as x, str() | CastSpec() as spec]):
            check_source(x, "x")
            request = cast_request(op, x, (resolve_cast(x, spec, offs).plan,), offs)
        case ("cast_both", [Tensor() as x, str() | CastSpec() as row, str() | CastSpec() as col]):
            check_source(x, "x")
            plans = (resolve_cast(x, row, offs).plan, resolve_cast(x, col, offs).plan)
            request = cast_request(op, x, plans, offs)
        case ("dequantize", [BlockScaled() as q]):
            check_block_scaled(q, "q")
            check_offs(offs, q.device, len(q.shape))
            check_group_count(q, offs, "q")
            request = dequantize_request(q, out_dtype, offs)
        case ("gemm", [BlockScaled() as a, BlockScaled() as b]):
            check_dense(a, b)
            request = gemm_request(a, b, out_dtype, bias=bias, accumulate=accumulate)
        case ("gemm", [Tensor() as x, BlockScaled() as w]):
            check_weight_only(x, w, rank=2)
            check_no_accumulator(accumulate)
            request = weight_only_request(x, w, out_dtype, bias=bias)
        case ("grouped", [Tensor() as x, BlockScaled() as w, Tensor() as ends]):
            check_weight_only_grouped(x, w, ends, starts)
            check_no_accumulator(accumulate)
            options = {"bias": bias, "starts": starts is not None}
            request = weight_only_grouped_request(x, w, ends.shape[0], out_dtype, **options)
        case ("gemm", [Tensor() | BlockScaled() as x, PackedWeight() as w]):
            check_no_accumulator(accumulate)
            request = packed_request(check_packed(x, w), w, out_dtype, bias=bias)
        case ("grouped", [BlockScaled() as a, BlockScaled() as b, Tensor() as ends]):
            check_grouped(a, b, ends, starts)
            options = {"bias": bias, "accumulate": accumulate, "starts": starts is not None}
            request = grouped_request(a, b, ends.shape[0], out_dtype, **options)
        case ("permute_rows" | "combine_rows" | "place_rows", [Tensor() as x, Tensor() as rows]):
            request = rows_request(op, x, rows)
        case ("clear_rows", [Tensor() as x]):
            request = rows_request(op, x, None)
        case ("combine_dots", [Tensor() as x, Tensor() as grad, Tensor() as rows]):
            request = rows_request(op, x, rows, grad)
        case ("transpose_codes", [Tensor() as codes]):
            request = transpose_request(codes, codes.shape[-1], 8)
        case _ if op in FUSED and (fused := _fused_request(op, operands, offs)) is not None:
            request = fused
        case _:
            given = ", ".join(type(operand).__name__ for operand in operands)
            refuse(
                f"explain({op!r}) with operands ({given})",
                "operands are those of the call itself",
                "for example explain('gemm', a, b) with two results of quantize",
            )
    return explain_request(request if on is None else replace(request, capability=on))


def _check_groups(op: str, offs: Tensor | None, starts: Tensor | None) -> None:
    """Raise for offs or starts with an operation that takes none."""
    takers = {"offs": ("cast", "cast_both", "dequantize", *FUSED), "starts": ("grouped",)}
    for name, given in (("offs", offs), ("starts", starts)):
        if given is not None and op not in takers[name]:
            fix = "pass the ends as an operand: explain('grouped', a, b, offs)" if op == "grouped" else "leave it out"
            refuse(f"{name} for explain({op!r})", f"this call takes no {name}", fix)


def _fused_request(op: str, operands: Sequence[object], offs: Tensor | None) -> Request | None:
    """The request of a fused cast, or None for operands that are not those of the call."""
    tensors = list(itertools.takewhile(lambda operand: isinstance(operand, Tensor), operands))
    specs = [operand for operand in operands[len(tensors) :] if isinstance(operand, str | CastSpec)]
    casts = (2, 3) if op == "swiglu_backward_both" else (2,) if op.endswith("_both") else (1,)
    if len(tensors) + len(specs) != len(operands) or len(specs) not in casts:
        return None
    match op, tensors:
        case ("swiglu" | "swiglu_both", [Tensor() as gate_up]):
            check_gate_up(gate_up)
            source, like = gate_up, hidden_like(gate_up)
        case ("swiglu_backward_both", [Tensor() as grad, Tensor() as gate_up]):
            check_gate_up(gate_up)
            check_grad(grad, gate_up)
            source, like = gate_up, gate_up
        case ("rmsnorm" | "rmsnorm_both", [Tensor() as x, Tensor() as weight]):
            check_norm(x, weight, 0.0)
            source, like = x, x
        case ("permute", [Tensor() as x, Tensor() as indices]):
            check_permutation(x, indices)
            source, like = x, x
        case ("permute_both" | "permute_columns", [Tensor() as x, Tensor() as indices, Tensor() as ends]):
            check_permutation(x, indices)
            check_offs(ends, x.device, x.dim(), required=True)
            source, like, offs = x, permuted_like(x, indices), ends
        case _:
            return None
    plans = tuple(resolve_cast(source, spec, offs).plan for spec in specs)
    if op == "permute":
        check_copied_rows(plans[0])
    return cast_request(op, like, plans, offs)


def partner(name: str) -> str:
    """The format of a layer's weights if its activations have the format `name`, or, weight-only, are plain."""
    beside = dict.fromkeys(PLAIN_DTYPES, "mxfp8_e4m3")
    beside |= {"fp8_1x128": "fp8_128x128", "fp8_128x128": "fp8_1x128", "mxfp8_e4m3_128x128": "mxfp8_e4m3"}
    return beside.get(name, name)


def explain_sizes(
    op: str, size: tuple[int, int, int, int], a: str, b: str | None = None, *, dtype: torch.dtype = torch.bfloat16,
    bias: bool = False, accumulate: bool = False, on: Capability,
) -> Explanation:  # fmt: skip
    """`explain` of a call with operands of these sizes, without memory.

    op: an operation of the registry.  size: M, N, K, groups.  a, b: formats; b is the usual partner of a by default. A
    plain left operand of a GEMM is bf16, fp16 or fp32.
    dtype: of the source of a cast, of the output of everything else.
    """
    m, n, k, groups = size

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def indices(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    offs, rows = indices(groups), indices(m, groups)
    tensors: dict[str, list[Tensor]] = {
        "cast": [empty(m, k)],
        "swiglu": [empty(m, 2 * k)],
        "swiglu_backward": [empty(m, k), empty(m, 2 * k)],
        "rmsnorm": [empty(m, k), empty(k)],
        "permute": [empty(m, k), indices(n), *([] if op == "permute" else [offs])],
        "permute_columns": [empty(m, k), indices(n), offs],
        "permute_rows": [empty(m, k), rows],
        "combine_rows": [empty(m * groups, k), rows],
        "combine_dots": [empty(m * groups, k), empty(m, k), rows],
        "clear_rows": [empty(m, k)],
        "place_rows": [empty(m, k), rows],
        "transpose_codes": [torch.empty(n, k, dtype=torch.uint8, device="meta")],
    }

    def left() -> Tensor | BlockScaled:
        return empty(m, k).to(PLAIN_DTYPES[a]) if a in PLAIN_DTYPES else quantize(empty(m, k), a)

    operands: list[Tensor | BlockScaled]
    match op.removesuffix("_both"):
        case plain if plain in tensors:
            operands = [*tensors[plain]]
        case "dequantize":
            operands = [quantize(empty(m, k), a)]
        case "gemm":
            operands = [left(), quantize(empty(n, k), b or partner(a))]
        case "m_grouped":
            operands = [left(), quantize(empty(groups, n, k), b or partner(a)), offs]
        case _:
            tokens = [(m, a), (n, b or a)]
            operands = [quantize(empty(k, rows), name, axis=-2, offs=offs).mT for rows, name in tokens]
            operands.append(offs)
    is_cast = op in ("cast", "cast_both", *FUSED)
    formats = [a, b or a][: 2 if op.endswith("_both") else 1] if is_cast else []
    name = "grouped" if op in ("m_grouped", "k_grouped") else op
    return explain(name, *operands, *formats, out_dtype=dtype, bias=bias, accumulate=accumulate, on=on)
