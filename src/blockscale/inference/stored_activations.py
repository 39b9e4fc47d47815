"""How a checkpoint says that the inputs of its quantized layers are cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoints import Checkpoint
from ..errors import CheckpointError, refuse
from ..formats.cast_spec import CastSpec
from ..formats.spec import get_format

# the value of `activations` that asks the checkpoint
STORED = "stored"


def stored_activations(found: Checkpoint, format: str) -> CastSpec | None:
    """Cast of the input of a layer with weights in a format; None: not rounded, as for all weights of 4 and 6 bits.

    FP8 blocks and MXFP8 are multiplied by activations in the same family, with powers of two as scales where the
    checkpoint says `scale_fmt: "ue8m0"`. Weight-only models of 8 bits: compressed-tensors has groups without
    `input_activations`, modelopt an algorithm of this name (`fp8_pb_wo`).
    """
    spec = get_format(format)
    if spec.element.bits < 8:
        return None
    about: Mapping[str, Any] = found.config.get("quantization_config", {})
    if found.layout == "compressed_tensors" and not _casts_inputs(found, about):
        return None
    if spec.family == "mx":
        return CastSpec("mxfp8_e4m3")
    if found.layout == "modelopt":
        return None
    if about.get("activation_scheme", "dynamic") != "dynamic":
        _unknown(found, f"activation_scheme {about['activation_scheme']!r}", "activations are scaled as they come")
    return CastSpec("fp8_1x128", "pow2" if about.get("scale_fmt") == "ue8m0" else None)


def _casts_inputs(found: Checkpoint, about: Mapping[str, Any]) -> bool:
    """Whether the groups of a compressed-tensors config cast inputs: all of them, or none."""
    groups = about.get("config_groups") or {}
    values = groups.values() if isinstance(groups, dict) else ()
    casts = {bool(group.get("input_activations")) for group in values if isinstance(group, dict)}
    if len(casts) > 1:
        _unknown(found, "config_groups with and without input_activations", "all groups cast their inputs, or none")
    return True in casts


def _unknown(found: Checkpoint, what: str, rule: str) -> None:
    fix = 'pass activations=None, or a format such as "fp8_1x128"'
    refuse(f"{found.path / 'config.json'} has {what}", rule, fix, error=CheckpointError)
