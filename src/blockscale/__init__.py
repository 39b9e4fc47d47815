"""Blockscale: block-scaled low precision (FP8 blockwise, MXFP8, MXFP6, MXFP4, NVFP4) for PyTorch.

Public names are resolved on first use, because importing torch takes seconds and `blockscale --help` must not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public names by the module they live in
_PUBLIC = {
    "casts": ("dequantize", "quantize", "quantize_both"),
    "casts.fused": (
        "rmsnorm_quantize", "rmsnorm_quantize_both", "swiglu_backward_quantize_both", "swiglu_quantize",
        "swiglu_quantize_both",
    ),
    "casts.permuted": ("permute_quantize_both", "permute_quantize_columns", "quantize_permute"),
    "gemm": ("PackedWeight", "pack_weight", "scaled_mm"),
    "grouped": ("Routing", "scaled_grouped_mm", "sort_by_expert"),
    "autograd": (
        "Recipe", "activation", "attach", "combine", "get_recipe", "invalidate", "permute", "refresh_weights_", "route",
    ),
    "nn": ("ConversionReport", "advance_", "quantize_", "set_step_", "unquantize_"),
    "formats": ("BlockScaled", "CastSpec", "Stochastic", "rng_state"),
    "registry": ("use_backend",),
    "diagnostics": ("doctor", "explain"),
}  # fmt: skip
_MODULE = {name: module for module, names in _PUBLIC.items() for name in names}
_KERNEL_PACKAGES = ("casts", "gemm", "grouped")
_SUBMODULES = (
    "autograd", "casts", "checkpoints", "diagnostics", "distributed", "errors", "formats", "gemm", "grouped",
    "hardware", "inference", "nn", "registry", "roofline", "train",
)  # fmt: skip

__all__ = [
    "__version__", "BlockScaled", "CastSpec", "ConversionReport", "PackedWeight", "Recipe", "Routing", "Stochastic",
    "activation", "advance_", "attach", "combine", "dequantize", "doctor", "explain", "get_recipe", "invalidate",
    "pack_weight", "permute",
    "permute_quantize_both", "permute_quantize_columns", "quantize", "quantize_", "quantize_both", "quantize_permute",
    "refresh_weights_", "rmsnorm_quantize", "rmsnorm_quantize_both", "rng_state", "route", "scaled_grouped_mm",
    "scaled_mm", "set_step_", "sort_by_expert", "swiglu_backward_quantize_both", "swiglu_quantize",
    "swiglu_quantize_both", "unquantize_", "use_backend",
]  # fmt: skip

if TYPE_CHECKING:
    from .autograd import Recipe, activation, attach, combine, get_recipe, invalidate, permute, refresh_weights_, route
    from .casts import dequantize, quantize, quantize_both
    from .casts.fused import (
        rmsnorm_quantize,
        rmsnorm_quantize_both,
        swiglu_backward_quantize_both,
        swiglu_quantize,
        swiglu_quantize_both,
    )
    from .casts.permuted import permute_quantize_both, permute_quantize_columns, quantize_permute
    from .diagnostics import doctor, explain
    from .formats import BlockScaled, CastSpec, Stochastic, rng_state
    from .gemm import PackedWeight, pack_weight, scaled_mm
    from .grouped import Routing, scaled_grouped_mm, sort_by_expert
    from .nn import ConversionReport, advance_, quantize_, set_step_, unquantize_
    from .registry import use_backend


def __getattr__(name: str) -> object:
    if name in _MODULE or name == "registry":
        # kernels register when their package is imported, and a caller may force a backend of any of them
        for package in _KERNEL_PACKAGES:
            importlib.import_module(f".{package}", __name__)
    if name in _MODULE:
        value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
        globals()[name] = value  # cached: this lookup takes longer than a kernel launch
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'blockscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE, *_SUBMODULES])
