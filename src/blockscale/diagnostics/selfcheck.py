"""Checks of `doctor`, one format at a time: the backend of each operation and why, and whether its result is right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from ..errors import BackendError, OptionError
from ..formats.spec import get_format
from ..formats.tensor import BlockScaled
from ..gemm import exact_mm, scaled_mm
from ..grouped import Routing, scaled_grouped_mm, sort_by_expert
from ..grouped._reference import exact_grouped
from ..grouped.routing import clear_rows, combine_dots, combine_rows, permute_rows
from ..hardware import capability
from ..registry import Explanation, use_backend
from .explain import explain
from .quality import sqnr_db

# against the exact product rounded to the output dtype, Gaussian operands; sm_90's FP8 tensor cores accumulate with
# fewer bits, which moves some bf16 results by one unit in the last place
_GATE_DB = 80.0
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


def compiles_a_cast(samples: Samples) -> bool:
    """Whether a first kernel had to be compiled: it was neither in memory nor in the cache on disk."""
    if samples.x.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    missing: list[bool] = []

    def listen(*, cache_hit: bool, **_: object) -> None:
        missing.append(not cache_hit)

    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        quantize(samples.x, "mxfp8_e4m3")
    return any(missing)


def partner(name: str) -> str:
    """The format of a layer's weights if its activations have the format `name`."""
    beside = {"fp8_1x128": "fp8_128x128", "fp8_128x128": "fp8_1x128", "mxfp8_e4m3_128x128": "mxfp8_e4m3"}
    return beside.get(name, name)


def _reason(explanation: Explanation) -> str:
    """Why the selected kernel is selected: its summary, and why better kernels for this device and format refused."""
    taken = explanation.taken
    if taken is None:
        return "; ".join(f"{each.backend} {each.reason}" for each in explanation.candidates)
    above = [each for each in explanation.candidates if each.priority > taken.priority and each.fits]
    passed_over = "; ".join(f"{each.backend} {each.reason}" for each in above)
    return f"{taken.summary}: {passed_over or 'the best for this device and format'}"


def _choices(name: str, samples: Samples) -> list[Choice]:
    q = quantize(samples.x, name)
    other = quantize(samples.w, partner(name))
    found = {
        "cast": explain("cast", samples.x, name),
        "cast_both": explain("cast_both", samples.x, name, name),
        "dequantize": explain("dequantize", q),
        "gemm": explain("gemm", q, other),
    }
    fused = {
        "swiglu": explain("swiglu", samples.gate_up, name),
        "swiglu_both": explain("swiglu_both", samples.gate_up, name, name),
        "swiglu_backward_both": explain("swiglu_backward_both", samples.grad, samples.gate_up, name, name),
        "rmsnorm": explain("rmsnorm", samples.x, samples.weight, name),
        "rmsnorm_both": explain("rmsnorm_both", samples.x, samples.weight, name, name),
    }
    if not q.spec.is_2d:
        tokens = quantize(samples.x, name, axis=-2, offs=samples.offs).mT
        found["m_grouped"] = explain("grouped", q, quantize(samples.experts, partner(name)), samples.offs)
        found["k_grouped"] = explain("grouped", tokens, tokens, samples.offs)
        fused["permute"] = explain("permute", samples.x, samples.indices, name)
        fused["permute_both"] = explain("permute_both", samples.x, samples.indices, samples.offs, name, name)
        fused["permute_columns"] = explain("permute_columns", samples.x, samples.indices, samples.offs, name)
    choices: list[Choice] = []
    for operation, explanation in (found | fused).items():
        backend = explanation.taken.backend if explanation.taken else "none"
        choices.append(Choice(operation, name, backend, _reason(explanation)))
    return choices


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


def _routing(samples: Samples) -> Routing:
    """Three of five experts for each of 46 tokens: 138 rows."""
    experts = samples.indices.abs()[:138].view(46, 3) % 5
    return sort_by_expert(experts, 5)


def move_choices(samples: Samples) -> list[Choice]:
    """The backends that permute and combine rows."""
    _, rows = _routing(samples).permutation
    x, y = samples.x[:46], samples.x[:138]
    found = {
        "permute_rows": explain("permute_rows", x, rows),
        "combine_rows": explain("combine_rows", y, rows),
        "combine_dots": explain("combine_dots", y, x, rows),
        "clear_rows": explain("clear_rows", y),
    }
    return [
        Choice(name, ANY, each.taken.backend if each.taken else "none", _reason(each)) for name, each in found.items()
    ]


def move_checks(samples: Samples) -> list[Check]:
    """Moves of rows against the reference: bytes, and SQNR of dot products, whose summation order is free."""
    routing, x, y = _routing(samples), samples.x[:46], samples.x[:138]
    gate_weights = samples.x[:46, :3].float()

    def moved() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        permuted, cleared = permute_rows(x, routing.tokens, routing.rows, gate_weights), y.clone()
        clear_rows(cleared, routing.offs // 2)
        return (
            permuted,
            combine_rows(y, routing.rows, gate_weights),
            combine_dots(y, x, routing.rows),
            cleared,
        )

    got = moved()
    with use_backend("reference"):
        want = moved()
    figure = sqnr_db(want[2], got[2]).item()
    return [
        _equality("permute_rows", ANY, torch.equal(_raw(got[0]), _raw(want[0]))),
        _equality("combine_rows", ANY, torch.equal(_raw(got[1]), _raw(want[1]))),
        _equality("clear_rows", ANY, torch.equal(_raw(got[3]), _raw(want[3]))),
        Check(f"combine_dots, {ANY}", figure >= _GATE_DB, f"{figure:.1f} dB of at least {_GATE_DB:.0f}"),
    ]


def _raw(tensor: Tensor) -> Tensor:
    """All bytes of a tensor in row-major order. As uint8: torch cannot copy a strided FP4 tensor."""
    tensor = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _hex(tensor: Tensor) -> str:
    return bytes(_raw(tensor).cpu().tolist()).hex()


def _cast_checks(name: str, samples: Samples) -> list[Check]:
    """Selected casts against the reference, byte for byte."""
    row, col = quantize_both(samples.x, name, name)[:2]
    with use_backend("reference"):
        want_row, want_col = quantize(samples.x, name), quantize(samples.x, name, axis=-2)
        want_values = dequantize(want_row, torch.float32)
    same = _same_bytes(row, want_row) and _same_bytes(col, want_col)
    same = same and _same_bytes(quantize(samples.x, name), want_row)
    same = same and torch.equal(dequantize(row, torch.float32), want_values)
    return [_equality("cast", name, same)]


def _fused_checks(name: str, samples: Samples) -> list[Check]:
    """Selected fused casts against the reference, byte for byte."""
    checks: list[Check] = []
    for operation, call in _fused_casts(name, samples).items() if name in FUSED_FORMATS else ():
        got = call()
        with use_backend("reference"):
            want = call()
        same = all(_same_result(a, b) for a, b in zip(got, want, strict=True))
        checks.append(_equality(operation, name, same))
    return checks


def _product_checks(name: str, samples: Samples) -> list[Check]:
    """Selected products against exact ones."""
    row = quantize(samples.x, name)
    checks: list[Check] = []
    for operation, (call, exact) in _products(name, row, samples).items():
        for dtype in (torch.float32, torch.bfloat16):
            title, gate = f"{operation} {str(dtype)[6:]}, {name}", _gate(row, dtype)
            try:
                figure = sqnr_db(exact.to(dtype), call(dtype)).item()
            except (BackendError, OptionError) as error:  # a forced backend or ptxas that cannot run it
                checks.append(Check(title, False, str(error)))
                continue
            checks.append(Check(title, figure >= gate, f"{figure:.1f} dB of at least {gate:.0f}"))
    return checks


# Fused casts share code, and each takes seconds to compile: one format of every family is checked.
FUSED_FORMATS = ("fp8_1x128", "mxfp8_e4m3", "nvfp4")


def _equality(operation: str, name: str, same: bool) -> Check:
    return Check(f"{operation}, {name}", same, f"bytes {'equal' if same else 'differ from'} the reference")


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


def _same_result(a: BlockScaled | Tensor, b: BlockScaled | Tensor) -> bool:
    if isinstance(a, BlockScaled) and isinstance(b, BlockScaled):
        return _same_bytes(a, b)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(_raw(a), _raw(b))


def _same_bytes(a: BlockScaled, b: BlockScaled) -> bool:
    pairs = ((a.data, b.data), (a.scale, b.scale), (a.global_scale, b.global_scale))
    return all(x is y or (x is not None and y is not None and torch.equal(_raw(x), _raw(y))) for x, y in pairs)


PARTS: dict[str, Callable[[str, Samples], Sequence[Choice | Check]]] = {
    "backends": _choices,
    "casts": _cast_checks,
    "fused casts": _fused_checks,
    "products": _product_checks,
}
