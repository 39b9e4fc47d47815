"""Roofline time of a SwiGLU MLP: y = (silu(x G.mT) * (x U.mT)) D.mT, with gate and up in one product.

Quantized, the activation is fused into the casts. Forward: reads gate_up [M, 2H] once and writes the operand [M, H] of
the next product. Backward: reads the gradient [M, H] and gate_up once, writes both operands of the gradient, and
recomputes the wgrad operand of the down projection. In bf16 forward and backward are one kernel each with the fewest
bytes, which eager torch does not reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .ceilings import Ceilings
from .model import TRAINING, Formats, Layer, LinearCost, Step, Use, check_formats, stored_bytes


def swiglu_cost(
    tokens: int,
    features: int,
    hidden: int,
    formats: Formats,
    ceilings: Ceilings,
    use: Use = TRAINING,
    *,
    experts: int = 1,
) -> LinearCost:
    """Casts, products and activations of features -> 2 * hidden -> features.

    experts: as for `linear_cost`; without routing and without the sum over a token's experts.

    >>> from blockscale.roofline import BF16, INFERENCE, MEASURED
    >>> [step.name for step in swiglu_cost(4096, 7168, 18432, BF16, MEASURED["h200"], INFERENCE).steps]
    ['up fprop', 'swiglu', 'down fprop']
    """
    check_formats(formats)
    up = Layer("up ", tokens, features, 2 * hidden, formats, ceilings, use, experts)
    down = Layer("down ", tokens, hidden, features, formats, ceilings, use, experts)
    steps = [*up.cast_input(), *up.forward(), _activation(up), *down.forward()]
    if use.training:
        steps += [*down.cast_gradient(), *down.backward(), _gradient(up), *up.backward()]
    return LinearCost(tuple(steps))


def _activation(up: Layer) -> Step:
    """[M, 2H] to the fprop operand of the down projection; the backward recomputes its wgrad operand."""
    half, source = up.m * up.n // 2, up.use.source_bytes
    format = up.formats["fprop_x"]
    written = _written(half, (format,), source)
    if up.use.training and up.formats["wgrad_x"] is None and format is not None:
        written += half * source  # saved in bf16: the backward does not recompute it
    return replace(up, name="").moved("swiglu", up.reads((format,)) * 2 * half * source + written)


def _gradient(up: Layer) -> Step:
    """[M, H] and [M, 2H] to both operands of [M, 2H], and the wgrad operand of the down projection."""
    half, source = up.m * up.n // 2, up.use.source_bytes
    gradients, again = (up.formats["dgrad_dy"], up.formats["wgrad_dy"]), up.formats["wgrad_x"]
    read = up.reads((*gradients, again)) * 3 * half * source
    written = _written(2 * half, gradients, source) + (0 if again is None else stored_bytes(half, again))
    return replace(up, name="").moved("swiglu backward", read + written)


def _written(values: int, formats: Sequence[str | None], source: int) -> float:
    """Bytes written: each quantized operand, and one bf16 copy however many products read it."""
    low = sum(stored_bytes(values, format) for format in formats if format is not None)
    return low + (values * source if None in formats else 0)
