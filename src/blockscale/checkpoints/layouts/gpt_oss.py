"""gpt-oss's layout: MXFP4 experts, `*_blocks` [E, N, K/32, 16] and `*_scales` [E, N, K/32]; everything else in BF16.

Rows of gate and up alternate: row 2j of `gate_up_proj` is gate j, row 2j + 1 is up j, and so are biases. OpenAI's own
files have other names (`mlp1_weight.blocks`) and the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats.storage import to_tensors
from ...formats.tensor import BlockScaled
from ..files import Stored, damaged
from .layout import E8M0, FP4, Entry, Layout, Suffix, Written, cannot_hold, check_part, entries_of

_SUFFIXES = {"_scales": Suffix("scale", ("_blocks",), ""), ".scales": Suffix("scale", (".blocks",), "")}
_BLOCK = 16  # bytes
# modules that Transformers keeps in BF16
_KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


class GptOss(Layout):
    """`quant_method: "mxfp4"`."""

    name = "gpt_oss"
    formats = ("mxfp4",)

    def is_of(self, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> bool:
        method = config.get("quantization_config", {}).get("quant_method")
        blocks = any(name.endswith(("_blocks", ".blocks")) for name in stored)
        return method == "mxfp4" or (method is None and blocks)

    def entries(self, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Entry]:
        def entry(name: str, parts: dict[str, str]) -> Entry:
            data, scale = stored[parts["data"]], stored[parts["scale"]]
            if len(scale.shape) < 2 or 0 in scale.shape:
                damaged(
                    f"{scale.file}: {parts['scale']!r} is {scale.dtype} {scale.shape}", "experts have rows and blocks"
                )
            check_part(parts["data"], data, FP4, (*scale.shape, _BLOCK), name)
            check_part(parts["scale"], scale, E8M0, scale.shape, name)
            shape = (*scale.shape[:-1], scale.shape[-1] * 2 * _BLOCK)
            return Entry(name, "mxfp4", shape, parts, nbytes=data.nbytes + scale.nbytes)

        return entries_of(stored, _SUFFIXES, entry)

    def store(self, name: str, q: BlockScaled) -> dict[str, Tensor]:
        if q.format != "mxfp4" or len(q.shape) != 3 or q.shape[-1] % 32:
            cannot_hold(self.name, name, q, self.formats, " of experts [E, N, K] with whole blocks")
        tensors, _ = to_tensors(q)
        blocks = tensors["data"].unflatten(-1, (-1, _BLOCK))
        return {f"{name}_blocks": blocks, f"{name}_scales": tensors["scale"].view(torch.uint8)}

    def describe(self, written: Written) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        return {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": list(_KEPT)}}, {}
