"""The control arm: MXFP8 with a fault in its casts, which a comparison that can see anything must call worse.

The null shows what a gap may be by chance, the control what a mistake does: a comparison whose control is not worse has
not shown that it would notice one.
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
# operations that end in the reference's cast, which has the fault
_CASTS = ("cast", "cast_both", "swiglu", "swiglu_both", "swiglu_backward_both", "rmsnorm", "rmsnorm_both")


@contextmanager
def broken_casts() -> Generator[None]:
    """Within it casts of this process are wrong. They run by the reference on every device."""
    real = _reference.encode

    def encode(v: Tensor, element: Any, words: Tensor | None = None) -> Tensor:
        return real(v * 0.25, element, words)

    _reference.encode = encode
    try:
        with use_backend(**dict.fromkeys(_CASTS, "reference")):
            yield
    finally:
        _reference.encode = real
