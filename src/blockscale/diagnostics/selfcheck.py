"""Checks of `doctor`, one format at a time: the backend of each operation and why, and whether its result is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..casts import dequantize, quantize, quantize_both
from ..casts.fused import (
    rmsnorm_quantize,
    rmsnorm_quantize_both,
    swiglu_backward_quantize_both,
    swiglu_quantize,
    swiglu_quantize_both,
)
from ..casts.permuted import permute_quantize_both, permute_quantize_columns, quantize_permute
from ..casts.transpose import transpose_codes
from ..errors import BackendError, OptionError
from ..formats.spec import PLAIN_DTYPES, get_format
from ..formats.tensor import BlockScaled
from ..gemm import exact_mm, scaled_mm
from ..grouped import scaled_grouped_mm, sort_by_expert
from ..grouped._reference import exact_grouped
from ..grouped.routing import clear_rows, combine_dots, combine_rows, permute_rows, place_rows
from ..hardware import capability
from ..registry import Explanation, operations, use_backend
from .explain import GROUPED, MOVES, WEIGHT_ONLY, explain_sizes, partner
from .quality import sqnr_db

# against the exact product rounded to the output dtype, Gaussian operands; sm_90's FP8 tensor cores accumulate with
# fewer bits, which moves some bf16 results by one unit in the last place
_GATE_DB = 80.0
# weight-only, bf16 output: products of more bits round in the fp32 sums, which moves a few results likewise
_GATE_ROUNDED_DB = 70.0
_GATE_FP8_CUDA_DB = {torch.float32: 77.0, torch.bfloat16: 57.0}


@dataclass(frozen=True)
class Choice:
    """One cell of the matrix: the backend of an operation in a format, and why not a kernel of higher priority."""

    operation: str
    format: str
    backend: str
    reason: str


@dataclass(frozen=True)
class Check:
    """One self-check: the comparison, whether it passed, and the figure."""

    name: str
    passed: bool
    detail: str


class Samples:
    """Small operands in every format: odd sizes, three groups with an empty one."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        self.x, self.w, self.experts, self.dy = randn(140, 272), randn(80, 272), randn(3, 80, 272), randn(140, 80)
        self.offs = torch.tensor([5, 5, 140], dtype=torch.int32, device=device)
        self.gate_up, self.grad, self.weight = randn(140, 512), randn(140, 256), randn(272)
        self.indices = torch.randint(-1, 140, (140,), generator=generator, dtype=torch.int32).to(device)
        self.gate_weights = torch.randn(140, generator=generator).to(device)


def _reason(explanation: Explanation) -> str:
    """Why the selected kernel is selected: its summary, and why better kernels for this device and format refused."""
    taken = explanation.taken
    if taken is None:
        return "; ".join(f"{each.backend} {each.reason}" for each in explanation.candidates)
    above = [each for each in explanation.candidates if each.priority > taken.priority and each.fits]
    passed_over = "; ".join(f"{each.backend} {each.reason}" for each in above)
    return f"{taken.summary}: {passed_over or 'the best for this device and format'}"


def _choices(name: str, samples: Samples) -> list[Choice]:
    without = {*MOVES, *(GROUPED if get_format(name).is_2d else ())}
    found = [_choice(operation, name, samples) for operation in operations() if operation not in without]
    return [*found, *(_choice(operation, "bf16", samples, weight=name) for operation in WEIGHT_ONLY)]


def move_choices(samples: Samples) -> list[Choice]:
    """The backends that permute and combine rows and transpose codes."""
    return [_choice(operation, ANY, samples) for operation in MOVES]


def _choice(operation: str, name: str, samples: Samples, *, weight: str | None = None) -> Choice:
    """Backend of an operation.  weight: format of a GEMM's right operand; the usual partner if not given."""
    (m, k), n, groups = samples.x.shape, samples.w.shape[0], samples.offs.shape[0]
    found = explain_sizes(operation, (m, n, k, groups), name, weight, on=capability(samples.x.device))
    name = name if weight is None else f"{name} @ {weight}"
    return Choice(operation, name, found.taken.backend if found.taken else "none", _reason(found))


def known_bytes(device: torch.device) -> list[Check]:
    """Casts whose bytes were worked out by hand (docs/numerics.md), one per family: the reference itself is checked."""
    cases = (
        ("mxfp8_e4m3", [3.5, -1.0, 0.3, 0.0], "78", "7ef06200"),
        ("fp8_1x128", [3.0, -1.0, 0.1, 1e-3], "b76ddb3b", "7ef15722"),
        ("mxfp4", [6.5, -5.0, 3.5, 2.5, 1.25, 0.75, 0.25, -0.25], "7f", "e7462280"),
        ("nvfp4", [3.0, -1.1, 0.4, 0.0], "7e", "c702"),
    )
    checks: list[Check] = []
    for name, values, scale, codes in cases:
        q = quantize(torch.tensor([values], device=device), name)
        got = (_hex(q.scale), _hex(q.data))
        checks.append(Check(f"known bytes, {name}", got == (scale, codes), f"scale {got[0]}, codes {got[1]}"))
    return checks


# the format of operations without one
ANY = "any"


def move_checks(samples: Samples) -> list[Check]:
    """Moves of rows and codes against the reference: bytes, and SQNR of dot products, whose summation order is free."""
    experts = samples.indices.abs()[:138].view(46, 3) % 5  # three of five experts for each of 46 tokens: 138 rows
    routing, x, y = sort_by_expert(experts, 5), samples.x[:46], samples.x[:138]
    gate_weights = samples.x[:46, :3].float()

    def cleared() -> Tensor:
        clear_rows(rows := y.clone(), routing.offs // 2)
        return rows

    def placed() -> Tensor:
        place_rows(x, rows, made := torch.zeros_like(y))
        return made

    tokens, rows = routing.permutation
    codes = x.contiguous().view(torch.uint8)

    with use_backend("reference"):
        dots = combine_dots(y, x, rows)
    return [
        _same_as_reference("permute_rows", ANY, lambda: [permute_rows(x, tokens, rows, gate_weights)]),
        _same_as_reference("combine_rows", ANY, lambda: [combine_rows(y, rows, gate_weights)]),
        _same_as_reference("clear_rows", ANY, lambda: [cleared()]),
        _same_as_reference("place_rows", ANY, lambda: [placed()]),
        _same_as_reference("transpose_codes", ANY, lambda: [transpose_codes(codes, codes.shape[1], 8)]),
        _close(f"combine_dots, {ANY}", dots, lambda: combine_dots(y, x, rows), _GATE_DB),
    ]


def _same_as_reference(operation: str, name: str, call: Callable[[], Sequence[BlockScaled | Tensor]]) -> Check:
    """Check that a call gives the bytes that the reference gives."""
    got = call()
    with use_backend("reference"):
        want = call()
    same = all(
        x is y or (x is not None and y is not None and torch.equal(_raw(x), _raw(y)))
        for a, b in zip(got, want, strict=True)
        for x, y in zip(_tensors(a), _tensors(b), strict=True)
    )
    return Check(f"{operation}, {name}", same, f"bytes {'equal' if same else 'differ from'} the reference")


def _tensors(result: BlockScaled | Tensor) -> tuple[Tensor | None, ...]:
    return (result,) if isinstance(result, Tensor) else (result.data, result.scale, result.global_scale)


def _close(title: str, exact: Tensor, call: Callable[[], Tensor], gate: float) -> Check:
    """Check the SQNR of a call against its exact result."""
    try:
        figure = sqnr_db(exact, call()).item()
    except (BackendError, OptionError) as error:  # a forced backend or ptxas that cannot run it
        return Check(title, False, str(error))
    return Check(title, figure >= gate, f"{figure:.1f} dB of at least {gate:.0f}")


def _raw(tensor: Tensor) -> Tensor:
    """All bytes of a tensor in row-major order. As uint8: torch cannot copy a strided FP4 tensor."""
    tensor = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _hex(tensor: Tensor) -> str:
    return bytes(_raw(tensor).cpu().tolist()).hex()


def _cast_checks(name: str, samples: Samples) -> list[Check]:
    """Selected casts against the reference, byte for byte."""

    def call() -> tuple[BlockScaled | Tensor, ...]:
        q = quantize(samples.x, name)
        return q, *quantize_both(samples.x, name, name)[:2], dequantize(q, torch.float32)

    return [_same_as_reference("cast", name, call)]


# Fused casts share code, and each takes seconds to compile: one format of every family is checked.
FUSED_FORMATS = ("fp8_1x128", "mxfp8_e4m3", "nvfp4")


def _fused_checks(name: str, samples: Samples) -> list[Check]:
    """Selected fused casts against the reference, byte for byte."""
    calls = _fused_casts(name, samples) if name in FUSED_FORMATS else {}
    return [_same_as_reference(operation, name, call) for operation, call in calls.items()]


def _product_checks(name: str, samples: Samples) -> list[Check]:
    """Selected products against exact ones."""
    row = quantize(samples.x, name)
    return [
        _close(f"{operation} {str(dtype)[6:]}, {name}", exact.to(dtype), partial(call, dtype), _gate(row, dtype))
        for operation, (call, exact) in _products(name, row, samples).items()
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _weight_only_checks(name: str, samples: Samples) -> list[Check]:
    """Selected weight-only products against exact ones."""
    weight, experts, offs = quantize(samples.w, name), quantize(samples.experts, name), samples.offs
    checks: list[Check] = []
    for plain, dtype in PLAIN_DTYPES.items():
        gates = {torch.float32: _GATE_DB} | ({torch.bfloat16: _GATE_ROUNDED_DB} if plain == "bf16" else {})
        x = (samples.x.float() / 3).to(dtype)  # a third has more bits than bf16
        calls: dict[str, tuple[Callable[[torch.dtype], Tensor], Tensor]] = {
            "gemm": (partial(scaled_mm, x, weight), exact_mm(x, weight)),
            "m_grouped": (partial(scaled_grouped_mm, x, experts, offs), exact_grouped(x, experts, offs)),
        }
        checks += [
            _close(f"{operation} {str(out)[6:]}, {plain} @ {name}", exact.to(out), partial(call, out), gate)
            for operation, (call, exact) in calls.items()
            for out, gate in gates.items()
        ]
    return checks


def _fused_casts(name: str, samples: Samples) -> dict[str, Callable[[], tuple[BlockScaled | Tensor, ...]]]:
    """Each fusion as one call of all its operators."""
    x, weight, gate_up, grad = samples.x, samples.weight, samples.gate_up, samples.grad
    found: dict[str, Callable[[], tuple[BlockScaled | Tensor, ...]]] = {
        "swiglu": lambda: (swiglu_quantize(gate_up, name), *swiglu_quantize_both(gate_up, name, name)),
        "swiglu_backward": lambda: swiglu_backward_quantize_both(grad, gate_up, name, name, hidden=name),
        "rmsnorm": lambda: (*rmsnorm_quantize(x, weight, name), *rmsnorm_quantize_both(x, weight, name, name)),
    }
    if not get_format(name).is_2d:
        indices, offs = samples.indices, samples.offs
        found["permute"] = lambda: (
            quantize_permute(x, indices, name),
            *permute_quantize_both(x, indices, offs, name, name),
            *permute_quantize_both(x, indices, offs, name, name, gate_weights=samples.gate_weights),
            permute_quantize_columns(x, indices, offs, name),
        )
    return found


def _products(
    name: str, row: BlockScaled, samples: Samples
) -> dict[str, tuple[Callable[[torch.dtype], Tensor], Tensor]]:
    """Each product as a function of its output dtype, and its exact value."""
    other, offs = quantize(samples.w, partner(name)), samples.offs
    found: dict[str, tuple[Callable[[torch.dtype], Tensor], Tensor]] = {
        "gemm": (lambda dtype: scaled_mm(row, other, dtype), exact_mm(row, other))
    }
    if not row.spec.is_2d:
        experts = quantize(samples.experts, partner(name))
        x_t = quantize(samples.x, name, axis=-2, offs=offs).mT
        dy_t = quantize(samples.dy, name, axis=-2, offs=offs).mT
        found["m_grouped"] = (
            lambda dtype: scaled_grouped_mm(row, experts, offs, dtype),
            exact_grouped(row, experts, offs),
        )
        found["k_grouped"] = (lambda dtype: scaled_grouped_mm(dy_t, x_t, offs, dtype), exact_grouped(dy_t, x_t, offs))
    return found


def _gate(operand: BlockScaled, dtype: torch.dtype) -> float:
    if operand.spec.family != "fp8" or capability(operand.device).device != "cuda":
        return _GATE_DB
    return _GATE_FP8_CUDA_DB[dtype]


PARTS: dict[str, Callable[[str, Samples], Sequence[Choice | Check]]] = {
    "backends": _choices,
    "casts": _cast_checks,
    "fused casts": _fused_checks,
    "products": _product_checks,
    "weight-only products": _weight_only_checks,
}
