"""Blockscale: block-scaled low precision (FP8 blockwise, MXFP8, MXFP6, MXFP4, NVFP4) for PyTorch.

Public names are resolved on first use, because importing torch takes seconds and `blockscale --help` must not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> where it lives
_PUBLIC = {
    "quantize": "casts",
    "quantize_both": "casts",
    "dequantize": "casts",
    "swiglu_quantize": "casts.fused",
    "swiglu_quantize_both": "casts.fused",
    "swiglu_backward_quantize_both": "casts.fused",
    "rmsnorm_quantize": "casts.fused",
    "rmsnorm_quantize_both": "casts.fused",
    "permute_quantize_both": "casts.permuted",
    "permute_quantize_columns": "casts.permuted",
    "quantize_permute": "casts.permuted",
    "scaled_mm": "gemm",
    "Routing": "grouped",
    "scaled_grouped_mm": "grouped",
    "sort_by_expert": "grouped",
    "Recipe": "autograd",
    "activation": "autograd",
    "attach": "autograd",
    "combine": "autograd",
    "get_recipe": "autograd",
    "invalidate": "autograd",
    "permute": "autograd",
    "refresh_weights_": "autograd",
    "route": "autograd",
    "ConversionReport": "nn",
    "advance_": "nn",
    "quantize_": "nn",
    "set_step_": "nn",
    "unquantize_": "nn",
    "BlockScaled": "formats",
    "CastSpec": "formats",
    "Stochastic": "formats",
    "rng_state": "formats",
    "use_backend": "registry",
    "explain": "diagnostics",
    "doctor": "diagnostics",
}
_KERNEL_PACKAGES = ("casts", "gemm", "grouped")
_SUBMODULES = (
    "autograd", "casts", "diagnostics", "errors", "formats", "gemm", "grouped", "hardware", "nn", "registry",
    "roofline", "train",
)  # fmt: skip

__all__ = [
    "__version__",
    "BlockScaled",
    "CastSpec",
    "ConversionReport",
    "Recipe",
    "Routing",
    "Stochastic",
    "activation",
    "advance_",
    "attach",
    "combine",
    "dequantize",
    "doctor",
    "explain",
    "get_recipe",
    "invalidate",
    "permute",
    "permute_quantize_both",
    "permute_quantize_columns",
    "quantize",
    "quantize_",
    "quantize_both",
    "quantize_permute",
    "refresh_weights_",
    "rmsnorm_quantize",
    "rmsnorm_quantize_both",
    "rng_state",
    "route",
    "scaled_grouped_mm",
    "scaled_mm",
    "set_step_",
    "sort_by_expert",
    "swiglu_backward_quantize_both",
    "swiglu_quantize",
    "swiglu_quantize_both",
    "unquantize_",
    "use_backend",
]

if TYPE_CHECKING:
    from .autograd import Recipe as Recipe
    from .autograd import activation as activation
    from .autograd import attach as attach
    from .autograd import combine as combine
    from .autograd import get_recipe as get_recipe
    from .autograd import invalidate as invalidate
    from .autograd import permute as permute
    from .autograd import refresh_weights_ as refresh_weights_
    from .autograd import route as route
    from .casts import dequantize as dequantize
    from .casts import quantize as quantize
    from .casts import quantize_both as quantize_both
    from .casts.fused import rmsnorm_quantize as rmsnorm_quantize
    from .casts.fused import rmsnorm_quantize_both as rmsnorm_quantize_both
    from .casts.fused import swiglu_backward_quantize_both as swiglu_backward_quantize_both
    from .casts.fused import swiglu_quantize as swiglu_quantize
    from .casts.fused import swiglu_quantize_both as swiglu_quantize_both
    from .casts.permuted import permute_quantize_both as permute_quantize_both
    from .casts.permuted import permute_quantize_columns as permute_quantize_columns
    from .casts.permuted import quantize_permute as quantize_permute
    from .diagnostics import doctor as doctor
    from .diagnostics import explain as explain
    from .formats import BlockScaled as BlockScaled
    from .formats import CastSpec as CastSpec
    from .formats import Stochastic as Stochastic
    from .formats import rng_state as rng_state
    from .gemm import scaled_mm as scaled_mm
    from .grouped import Routing as Routing
    from .grouped import scaled_grouped_mm as scaled_grouped_mm
    from .grouped import sort_by_expert as sort_by_expert
    from .nn import ConversionReport as ConversionReport
    from .nn import advance_ as advance_
    from .nn import quantize_ as quantize_
    from .nn import set_step_ as set_step_
    from .nn import unquantize_ as unquantize_
    from .registry import use_backend as use_backend


def __getattr__(name: str) -> object:
    if name in _PUBLIC or name == "registry":
        # kernels register when their package is imported, and a caller may force a backend of any of them
        for package in _KERNEL_PACKAGES:
            importlib.import_module(f".{package}", __name__)
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value  # cached: this lookup takes longer than a kernel launch
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'blockscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC, *_SUBMODULES])
