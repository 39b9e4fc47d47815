"""Block-scaled formats: element codes, scales, memory layouts, and the container `BlockScaled`."""

from .cast_spec import CastPlan, CastSpec, as_cast_spec
from .elements import decode, encode, grid
from .hadamard import rotate, rotate_back
from .layout import padded_ends, padded_length
from .packing import pack_fp4, pack_fp6, unpack_fp4, unpack_fp6
from .spec import ELEMENTS, FORMATS, Element, Format, get_format
from .stochastic import ROLES, Stochastic, rng_state, stream_id
from .tensor import BlockScaled

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "ROLES",
    "BlockScaled",
    "CastPlan",
    "CastSpec",
    "Element",
    "Format",
    "Stochastic",
    "as_cast_spec",
    "decode",
    "encode",
    "get_format",
    "grid",
    "pack_fp4",
    "pack_fp6",
    "padded_ends",
    "padded_length",
    "rng_state",
    "rotate",
    "rotate_back",
    "stream_id",
    "unpack_fp4",
    "unpack_fp6",
]
