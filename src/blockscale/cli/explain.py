"""`blockscale explain`: the table of kernels for one call, also for a GPU that is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..hardware import Capability
    from ..registry import Explanation, Request

Operation = Literal["cast", "cast_both", "dequantize", "gemm", "m_grouped", "k_grouped"]


def run(
    operation: Operation,
    /,
    a: str = "mxfp8_e4m3",
    b: str | None = None,
    m: int = 4096,
    n: int = 4096,
    k: int = 4096,
    groups: int = 8,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    device: str | None = None,
    bias: bool = False,
    accumulate: bool = False,
) -> int:
    """Show every kernel for one call: which is taken, and why the others are refused.

    Args:
        operation: What is called. A cast takes M x K, a product M x K with N x K.
        a: Format of the tensor, or of the product's first operand.
        b: Format of the second operand; the natural partner of the first when left out.
        m: Rows of the first operand (N of a k-grouped product's result).
        n: Rows of the second operand.
        k: Contracted length.
        groups: Number of groups of a grouped product.
        dtype: Input of a cast, output of everything else.
        device: cpu, cuda, or an architecture such as sm_90 that need not be here; default: what is here.
        bias: Whether a bias is added.
        accumulate: Whether the product is added into an fp32 buffer.
    """
    from rich.console import Console

    from ..diagnostics.explain import explain_request

    request = _request(operation, a, b, (m, n, k, groups), dtype, device, bias=bias, accumulate=accumulate)
    explanation = explain_request(request)
    _show(Console(), explanation)
    return 0 if explanation.taken else 1


def _request(
    operation: Operation,
    a: str,
    b: str | None,
    size: tuple[int, int, int, int],
    dtype: str,
    device: str | None,
    *,
    bias: bool,
    accumulate: bool,
) -> Request:
    import torch

    from ..diagnostics.doctor import partner
    from ..formats.spec import check_pair, get_format
    from ..registry import Request

    where = _capability(device)
    m, n, k, groups = size
    first = get_format(a)
    if operation in ("cast", "cast_both", "dequantize"):
        names = (a, b or a) if operation == "cast_both" else (a,)
        shape: tuple[int, ...] = (m, k)
    else:
        names = (a, b or (a if operation == "k_grouped" else partner(a)))
        check_pair(*names)
        shape = (m, n, k) if operation == "gemm" else (m, n, k, groups)
    layouts = tuple(get_format(name).default_layout for name in names)
    options = frozenset(name for name, on in (("bias", bias), ("accumulate", accumulate)) if on)
    assert first.name == a
    return Request(operation, where, names, shape, getattr(torch, dtype), layouts, options)


def _capability(device: str | None) -> Capability:
    import torch

    from ..errors import DeviceError, message
    from ..hardware import Capability, capability, default_device

    if device is None:
        return capability(default_device())
    if device.startswith("sm_") and device[3:].isdigit():
        return Capability("cuda", int(device[3:]))
    try:
        where = torch.device(device)
    except RuntimeError as error:
        text = message(f"device {device!r}", rule="a device is cpu, cuda or sm_NN", fix="try sm_90")
        raise DeviceError(text) from error
    if where.type == "cuda" and not torch.cuda.is_available():
        rule = "cuda asks about the GPU of this machine"
        raise DeviceError(message("no CUDA device here", rule=rule, fix="name an architecture: sm_90"))
    return capability(where)


def _show(console: object, explanation: Explanation) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(title=str(explanation.request), title_justify="left")
    for heading in ("", "backend", "what it is", "verdict"):
        table.add_column(heading)
    for row in explanation.candidates:
        converts = "".join(f"; converts {text}" for text in row.conversions)
        style = "bold green" if row.taken else "dim"
        table.add_row("->" if row.taken else "", row.backend, row.summary, row.reason + converts, style=style)
    console.print(table)
