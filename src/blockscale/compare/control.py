"""Control arm: MXFP8 with a fault in its casts. A comparison with enough statistical power calls it worse.

The null run (bf16 with another reduction order) shows the gaps that chance produces, the control shows the gap of a
real error. If the control is not worse, the comparison has not shown that it would detect one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..casts import _reference
from ..registry import use_backend

CONTROL, CONTROL_RECIPE = "broken", "mxfp8"
SAYS = "mxfp8 whose casts make every value a quarter of what it is, as a scale that is off by two exponents does"
# operations whose reference backend ends in `_reference.encode`, which has the fault
_CASTS = ("cast", "cast_both", "swiglu", "swiglu_both", "swiglu_backward_both", "rmsnorm", "rmsnorm_both")


@contextmanager
def broken_casts() -> Generator[None]:
    """Context in which casts of this process scale values by 1/4. They use the reference backend on every device."""
    real = _reference.encode

    def encode(v: Tensor, element: Any, words: Tensor | None = None) -> Tensor:
        return real(v * 0.25, element, words)

    _reference.encode = encode
    try:
        with use_backend(**dict.fromkeys(_CASTS, "reference")):
            yield
    finally:
        _reference.encode = real
