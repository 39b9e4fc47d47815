"""From how many tokens on a layer is worth converting, by the model."""

from __future__ import annotations

from collections.abc import Callable

from .ceilings import Ceilings
from .model import BF16, TRAINING, Formats, LinearCost, Use, linear_cost, speedup

MOST_TOKENS = 1 << 20
CostOf = Callable[[int, int, int, Formats, Ceilings, Use], LinearCost]


def predicted_speedup(
    tokens: int, in_features: int, out_features: int, formats: Formats, ceilings: Ceilings, use: Use = TRAINING
) -> float:
    """Predicted speedup of a linear layer over bf16.

    >>> from blockscale.roofline import MEASURED
    >>> predicted_speedup(4096, 7168, 18432, BF16, MEASURED["h200"])
    1.0
    """
    low, high = (linear_cost(tokens, in_features, out_features, each, ceilings, use) for each in (formats, BF16))
    return speedup(low, high)


def advise(
    in_features: int,
    out_features: int,
    formats: Formats,
    ceilings: Ceilings,
    use: Use = TRAINING,
    *,
    margin: float = 1.0,
    most: int = MOST_TOKENS,
    cost: CostOf = linear_cost,
) -> int | None:
    """The fewest tokens from which on, up to `most`, the layer is more than `margin` times faster; None if never.

    cost: the layer's cost function: `linear_cost` or `swiglu_cost`.

    >>> from blockscale.roofline import MEASURED, ROLES
    >>> fp8 = dict.fromkeys(ROLES, "fp8_1x128") | {"fprop_w": "fp8_128x128", "dgrad_w": "fp8_128x128"}
    >>> advise(7168, 18432, fp8, MEASURED["h200"]), advise(7168, 18432, BF16, MEASURED["h200"])
    (251, None)
    """

    def pays(tokens: int) -> bool:
        low, high = (cost(tokens, in_features, out_features, each, ceilings, use) for each in (formats, BF16))
        return speedup(low, high) > margin

    if not pays(most):
        return None
    # halve down to the first count that does not pay, then bisect: a speedup may also fall with more tokens
    enough = most
    while enough > 1 and pays(enough // 2):
        enough //= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if pays(middle) else (enough, middle)
    return enough
