"""The transformer that trainer, benchmarks and generation share: Llama's dense models and DeepSeek-V3's with experts.

    config.py       sizes                       transformer.py   blocks, model, loss, FLOPs per token
    attention.py    grouped queries, latent     recompute.py     selective activation recomputation
    cache.py        keys and values of earlier symbols
    hugging_face.py safetensors for any Llama loader

Names are resolved on first use: the command line reads sizes to print its help, and importing torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .config import ExpertsConfig, LatentConfig, ModelConfig

if TYPE_CHECKING:
    from .hugging_face import export as export
    from .transformer import Transformer as Transformer

_LAZY = {"Transformer": "transformer", "export": "hugging_face"}

__all__ = ["ExpertsConfig", "LatentConfig", "ModelConfig", "Transformer", "export"]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
