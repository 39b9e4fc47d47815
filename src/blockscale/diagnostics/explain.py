"""`explain`: which kernel serves a call on this machine, and why the others do not."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import casts as casts  # imported so that their rows are in the table
from .. import gemm as gemm
from .. import grouped as grouped
from ..casts.ops import cast_request, dequantize_request
from ..errors import OptionError, check_name, message
from ..formats.cast_spec import CastSpec, as_cast_spec
from ..formats.tensor import BlockScaled
from ..gemm.ops import gemm_request
from ..grouped.ops import grouped_request
from ..registry import Explanation, explain_request

OPERATIONS = ("cast", "cast_both", "dequantize", "gemm", "grouped")


def explain(
    op: str,
    *operands: Tensor | BlockScaled | str | CastSpec,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    accumulate: bool = False,
) -> Explanation:
    """Every kernel for one call, best first, with the reason it was refused; print the result.

    Operands are those of the call: `explain("cast", x, "mxfp4")`, `explain("cast_both", x, "nvfp4", "nvfp4")`,
    `explain("dequantize", q)`, `explain("gemm", a, b)`, `explain("grouped", a, b, offs)`.

    >>> import blockscale as bs
    >>> q = bs.quantize(torch.randn(8, 64), "mxfp8_e4m3")
    >>> explain("gemm", q, q).taken.backend
    'torch'
    """
    check_name(op, OPERATIONS, "operation")
    match op, operands:
        case ("cast", [Tensor() as x, str() | CastSpec() as spec]):
            request = cast_request("cast", x, (as_cast_spec(spec).plan(),))
        case ("cast_both", [Tensor() as x, str() | CastSpec() as row, str() | CastSpec() as col]):
            request = cast_request("cast_both", x, (as_cast_spec(row).plan(), as_cast_spec(col).plan()))
        case ("dequantize", [BlockScaled() as q]):
            request = dequantize_request(q, out_dtype)
        case ("gemm", [BlockScaled() as a, BlockScaled() as b]):
            request = gemm_request(a, b, out_dtype, bias=bias, accumulate=accumulate)
        case ("grouped", [BlockScaled() as a, BlockScaled() as b, Tensor() as offs]):
            request = grouped_request(a, b, offs.shape[0], out_dtype, bias=bias, accumulate=accumulate)
        case _:
            given = ", ".join(type(operand).__name__ for operand in operands)
            raise OptionError(
                message(
                    f"explain({op!r}) with operands ({given})",
                    rule="operands are those of the call itself",
                    fix="for example explain('gemm', a, b) with two results of quantize",
                )
            )
    return explain_request(request)
