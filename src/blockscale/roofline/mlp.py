"""The least time of a SwiGLU MLP: y = (silu(x G.mT) * (x U.mT)) D.mT, gate and up being one product.

In low precision the activation is part of the casts: forward, gates and ups [M, 2H] are read once and the operand of
the next product [M, H] is written; backward, the gradient [M, H] and [M, 2H] are read once and both operands of the
gradient are written, and the operand that the weight gradient of the next layer needs, made again from what is read
anyway. In bf16 the two are one kernel each that read and write as much as they must, which eager torch does not reach.
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

    experts: as for `linear_cost`; routing and the sum over a token's experts are not part of it.

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
    """[M, 2H] to the operand of the next product; the other one is made in the backward."""
    half, source = up.m * up.n // 2, up.use.source_bytes
    format = up.formats["fprop_x"]
    written = _written(half, (format,), source)
    if up.use.training and up.formats["wgrad_x"] is None and format is not None:
        written += half * source  # it stays in bf16, and nobody makes it again
    return replace(up, name="").moved("swiglu", up.reads((format,)) * 2 * half * source + written)


def _gradient(up: Layer) -> Step:
    """[M, H] and [M, 2H] to both operands of [M, 2H], and the activation's for the weight gradient."""
    half, source = up.m * up.n // 2, up.use.source_bytes
    gradients, again = (up.formats["dgrad_dy"], up.formats["wgrad_dy"]), up.formats["wgrad_x"]
    read = up.reads((*gradients, again)) * 3 * half * source
    written = _written(2 * half, gradients, source) + (0 if again is None else stored_bytes(half, again))
    return replace(up, name="").moved("swiglu backward", read + written)


def _written(values: int, formats: Sequence[str | None], source: int) -> float:
    """Each operand in low precision, and one in bf16 however many products read it."""
    low = sum(stored_bytes(values, format) for format in formats if format is not None)
    return low + (values * source if None in formats else 0)
