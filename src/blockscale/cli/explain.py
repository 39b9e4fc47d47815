"""`blockscale explain`: every registered kernel for one call, also for a GPU that is not on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..errors import check_name
from ..names import FORMAT_NAMES, PLAIN_NAMES, check_pair
from . import arguments

if TYPE_CHECKING:
    from rich.console import Console

    from ..hardware import Capability
    from ..registry import Explanation

Operation = Literal[
    "cast", "cast_both", "dequantize", "gemm", "m_grouped", "k_grouped",
    "swiglu", "swiglu_both", "swiglu_backward_both", "rmsnorm", "rmsnorm_both", "permute", "permute_both",
    "permute_columns", "permute_rows", "combine_rows", "combine_dots", "clear_rows", "place_rows", "transpose_codes",
]  # fmt: skip


DEFAULT = "mxfp8_e4m3"
# operations without formats
MOVES = ("permute_rows", "combine_rows", "combine_dots", "clear_rows", "place_rows", "transpose_codes")
PRODUCTS = ("gemm", "m_grouped", "k_grouped")
# operations that take a plain left operand
WEIGHT_ONLY = ("gemm", "m_grouped")


def run(
    operation: Operation,
    /,
    a: str = DEFAULT,
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
    """Show every kernel for one call: which is taken, and why the others are not; for GEMMs with a model also the tile,
    the predicted time, and the roofline bound.

    Args:
        operation: The operation. A cast takes M x K, a GEMM M x K and N x K, SwiGLU gate and up of M x K each, a
            permutation N of M rows. permute_rows and combine_rows move rows from M tokens to G experts and back,
            combine_dots is the gradient of the gate weights, clear_rows zeroes rows of no group, place_rows writes
            arriving tokens where their experts read them, transpose_codes turns
            N x K bytes of codes.
        a: Format of the tensor, or of the first operand of a GEMM. bf16, fp16 and fp32 are a plain first operand
            (gemm, m_grouped).
        b: Format of the second operand; default: the usual partner of the first, or the same for two casts.
        m: Rows of the first operand (N of a k-grouped result).
        n: Rows of the second operand; rows of the result of a permutation.
        k: Contracted length; tokens of a k-grouped GEMM.
        groups: Groups of a grouped GEMM or of permuted rows; experts per token for permute_rows and combine_rows.
        dtype: Input dtype of a cast, output dtype of everything else.
        device: cpu, cuda, or an architecture such as sm_90, which need not be present; default: the device present.
        bias: Add a bias.
        accumulate: Accumulate into a buffer of that dtype.
    """
    arguments.check_device(device, is_architecture=True)
    for flag, size in (("--m", m), ("--n", n), ("--k", k), ("--groups", groups)):
        arguments.at_least(0, size, flag, "sizes are not negative")
    if max(m, n, 1) * max(k, 1) * max(groups, 1) >= 2**59:
        rule = "the size of all groups must fit in 64 bits"
        arguments.refuse(f"--m {m} --n {n} --k {k} --groups {groups}", rule, "pass smaller sizes")
    given = {"--a": a != DEFAULT, "--b": b is not None, "--bias": bias, "--accumulate": accumulate}
    _check_used(operation, {flag for flag, is_given in given.items() if is_given})
    is_plain = operation in WEIGHT_ONLY and a in PLAIN_NAMES
    for name in (*(() if is_plain else (a,)), *(() if b is None else (b,))):
        check_name(name, FORMAT_NAMES, "format")
    if is_plain and accumulate:
        rule = "accumulate takes products of two block-scaled operands"
        arguments.refuse(f"--accumulate with --a {a}", rule, "leave --accumulate out")
    if b is not None and operation in PRODUCTS and not is_plain:
        check_pair(a, b)
    import torch

    from ..diagnostics.explain import explain_sizes

    explanation = explain_sizes(
        operation, (m, n, k, groups), a, b,
        dtype=getattr(torch, dtype), bias=bias, accumulate=accumulate, on=_capability(device),
    )  # fmt: skip
    _show(arguments.plain_console(), explanation)
    return 0 if explanation.taken else 1


def _check_used(operation: Operation, given: set[str]) -> None:
    """Raise for options that the operation does not take."""
    unused = {"--a": operation in MOVES, "--b": operation not in PRODUCTS and not operation.endswith("_both")}
    unused |= dict.fromkeys(("--bias", "--accumulate"), operation not in PRODUCTS)
    for flag in [flag for flag in sorted(given) if unused[flag]]:
        rule = "only GEMMs have it" if flag in ("--bias", "--accumulate") else "it has no such operand"
        arguments.refuse(f"{flag} with {operation}", rule, f"leave {flag} out")


def _capability(device: str | None) -> Capability:
    from ..hardware import Capability, capability, default_device, named_device

    if device is None:
        return capability(default_device())
    if device.startswith("sm_"):
        return Capability("cuda", int(device[3:]))
    return capability(named_device(device))


def _show(console: Console, explanation: Explanation) -> None:
    from rich.table import Table

    table = Table(title=str(explanation.request), title_justify="left")
    for heading in ("", "backend", "kernel", "verdict"):
        table.add_column(heading)
    for row in explanation.candidates:
        converts = "".join(f"; converts {text}" for text in row.conversions)
        style = "bold green" if row.taken else "dim"
        table.add_row("->" if row.taken else "", row.backend, row.summary, row.reason + converts, style=style)
    console.print(table)
    taken = explanation.taken
    if taken is not None and taken.forecast is not None:
        forecast = taken.forecast
        figures = Table.grid(padding=(0, 2))
        figures.add_row("configuration", forecast.configuration)
        figures.add_row("predicted", forecast.predicted)
        figures.add_row("bound", forecast.bound)
        if forecast.note:
            figures.add_row("", forecast.note, style="dim")
        console.print(figures)
