"""How a checkpoint says that the inputs of its quantized layers are cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoints import Checkpoint
from ..errors import CheckpointError, refuse
from ..formats.cast_spec import CastSpec
from ..formats.spec import Format, get_format

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
    if found.layout == "compressed_tensors" and not _casts_inputs(found, about, spec):
        return None
    if spec.family == "mx":
        return CastSpec("mxfp8_e4m3")
    if found.layout == "modelopt":
        return None
    if about.get("activation_scheme", "dynamic") != "dynamic":
        _unknown(found, f"activation_scheme {about['activation_scheme']!r}", "activations are scaled as they come")
    return CastSpec("fp8_1x128", "pow2" if about.get("scale_fmt") == "ue8m0" else None)


def refuse_transforms(found: Checkpoint) -> None:
    """Raise for a checkpoint whose weights were rotated, and whose inputs are to be rotated in every call."""
    about = found.config.get("quantization_config")
    transforms = about.get("transform_config") if isinstance(about, dict) else None
    if transforms:
        what = f"{found.path / 'config.json'} has transform_config {str(transforms)[:200]}"
        rule = "inputs are multiplied as they are, and rotated weights need rotated inputs"
        refuse(what, rule, "load a checkpoint that was quantized without transforms", error=CheckpointError)


def _casts_inputs(found: Checkpoint, about: Mapping[str, Any], spec: Format) -> bool:
    """Whether the groups of a compressed-tensors config for a format cast inputs: all of them, or none."""
    groups = about.get("config_groups") or {}
    values = groups.values() if isinstance(groups, dict) else ()
    given = [group.get("input_activations") for group in values if isinstance(group, dict) and _may_hold(group, spec)]
    if len({bool(each) for each in given}) > 1:
        _unknown(found, "config_groups with and without input_activations", "all groups cast their inputs, or none")
    want = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32 if spec.family == "mx" else 128}
    for each in filter(None, given):
        fields: dict[str, object] = each if isinstance(each, dict) else {}
        dynamic = fields.get("dynamic")
        if {name: fields.get(name) for name in want} != want or not (dynamic is True or dynamic == "local"):
            rule = f"inputs of {spec.name} are cast as they come: {_in_words(want)}, dynamic True or 'local'"
            _unknown(found, f"input_activations {str(each)[:300]}", rule)
    return any(given)


def _may_hold(group: Mapping[str, Any], spec: Format) -> bool:
    """Whether weights of a group may be in an 8-bit format; True if the group does not say."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return True
    strategy = "group" if spec.family == "mx" else "block"
    return weights.get("num_bits", 8) == 8 and weights.get("strategy", strategy) == strategy


def _in_words(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in fields.items())


def _unknown(found: Checkpoint, what: str, rule: str) -> None:
    fix = 'pass activations=None, or a format such as "fp8_1x128"'
    refuse(f"{found.path / 'config.json'} has {what}", rule, fix, error=CheckpointError)
