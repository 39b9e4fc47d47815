"""This library's own layout: every format, of weights of any number of dimensions, with the bytes of training.

A weight `w` has its codes under its own name, block scales as `w_scale`, NVFP4's tensor scale as `w_global_scale`; FP6
codes are packed. config.json names the format of each weight: `quantization_config.formats[format] = [names]`. As in
layout `deepseek`, `scale_fmt: "ue8m0"` says that all scales of FP8 blocks are powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import check_name
from ...formats.checks import all_ints
from ...formats.layout import code_bytes, scale_counts
from ...formats.spec import FORMATS, Format, get_format
from ...formats.storage import to_tensors
from ...formats.tensor import BlockScaled
from ..files import Stored, damaged, dtype_name
from .layout import (
    E8M0,
    Entry,
    Layout,
    Suffix,
    Written,
    cannot_hold,
    check_global_scale,
    check_part,
    code_shape,
    entries_of,
)

_SUFFIXES = {
    "_global_scale": Suffix("global_scale", ("",), "", or_plain=True),
    "_scale": Suffix("scale", ("",), "", or_plain=True),
}
_VERSION = 1


class Native(Layout):
    """`quant_method: "blockscale"`."""

    name = "blockscale"
    formats = tuple(FORMATS)

    def is_of(self, config: Mapping[str, Any], stored: Mapping[str, Stored]) -> bool:
        return config.get("quantization_config", {}).get("quant_method") == "blockscale"

    def entries(self, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Entry]:
        about = config.get("quantization_config", {})
        if about.get("version") != _VERSION:
            rule, fix = f"this version reads layout version {_VERSION}", "install a newer Blockscale"
            damaged(f"config.json has quantization_config.version {about.get('version')}", rule, fix)
        formats = _formats(about)
        shapes = about.get("shapes", {})
        if not isinstance(shapes, dict):
            damaged(f"config.json has quantization_config.shapes {str(shapes)[:200]}", "it has shapes by name")

        def entry(name: str, parts: dict[str, str]) -> Entry:
            if name not in formats:
                damaged(f"config.json has no format of {name}", "quantization_config.formats names each weight")
            spec = get_format(formats[name])
            data, scale = stored[parts["data"]], stored[parts["scale"]]
            shape = _checked(shapes[name], name) if name in shapes else _shape(spec, data)
            width = -(-shape[-1] // 4) * 3 if spec.element.bits == 6 else code_bytes(spec, shape[-1])
            codes = (dtype_name(spec.data_dtype) if spec.element.bits == 8 else "U8",)
            scales = {"mx": E8M0, "nvfp4": ("F8_E4M3",), "fp8": ("F32",)}[spec.family]
            check_part(parts["data"], data, codes, (*shape[:-1], width), name)
            check_part(parts["scale"], scale, scales, (*shape[:-2], *scale_counts(spec, shape[-2], shape[-1])), name)
            check_global_scale(name, parts, stored, shape)
            if ("global_scale" in parts) != (spec.family == "nvfp4"):
                damaged(f"{data.file}: {name} is {spec.name} with parts {', '.join(parts)}", "NVFP4 has a tensor scale")
            return Entry(name, spec.name, shape, parts, nbytes=sum(stored[part].nbytes for part in parts.values()))

        found = entries_of(stored, _SUFFIXES, entry)
        lost = [name for name in formats if name not in found or found[name].format is None]
        if lost:
            damaged(f"config.json has a format of {lost[0]}, which has no scales", "a quantized weight has its scales")
        return found

    def store(self, name: str, q: BlockScaled) -> dict[str, Tensor]:
        if q.hadamard is not None or q.group_align:
            cannot_hold(self.name, name, q, self.formats, ", neither rotated nor padded for groups")
        tensors, _ = to_tensors(q)
        scale = tensors["scale"]
        found = {name: tensors["data"], f"{name}_scale": scale}
        if scale.dtype == torch.float8_e8m0fnu:  # older readers have no such dtype
            found[f"{name}_scale"] = scale.view(torch.uint8)
        return found if q.global_scale is None else found | {f"{name}_global_scale": q.global_scale}

    def describe(self, written: Written) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        formats: dict[str, list[str]] = {}
        for name, format in written.formats.items():
            if format is not None:
                formats.setdefault(format, []).append(name)
        about: dict[str, Any] = {"quant_method": "blockscale", "version": _VERSION, "formats": formats}
        odd = {name: list(written.shapes[name]) for name in written.formats if _is_odd(written, name)}
        about |= {"shapes": odd} if odd else {}
        about |= {"scale_fmt": "ue8m0"} if written.rules == {"pow2"} else {}
        return {"quantization_config": about}, {}


def _is_odd(written: Written, name: str) -> bool:
    """Whether the bytes of a weight's codes do not tell their number."""
    format, length = written.formats[name], written.shapes[name][-1:]
    return format is not None and bool(length[0] % {4: 2, 6: 4, 8: 1}[get_format(format).element.bits])


def _formats(about: Mapping[str, Any]) -> dict[str, str]:
    """Format by weight, from quantization_config."""
    found: dict[str, str] = {}
    formats = about.get("formats", {})
    lists = isinstance(formats, dict) and all(isinstance(names, list) for names in formats.values())
    if not lists or not all(isinstance(name, str) for names in formats.values() for name in names):
        damaged(f"config.json has quantization_config.formats {str(formats)[:200]}", "it has lists of names by format")
    for format, names in formats.items():
        check_name(format, FORMATS, "format")
        found |= dict.fromkeys(names, format)
    return found


def _checked(shape: object, name: str) -> tuple[int, ...]:
    """A shape of config.json."""
    if not isinstance(shape, list) or len(shape) < 2 or not all_ints(shape):
        damaged(f"config.json has the shape {str(shape)[:200]} of {name}", "a shape is a list of two or more sizes")
    return tuple(shape)


def _shape(spec: Format, data: Stored) -> tuple[int, ...]:
    """Shape of values by their codes, for lengths that are not odd."""
    shape = code_shape(data)
    if len(shape) < 2:
        damaged(f"{data.file}: codes of shape {data.shape}", "a quantized weight has rows and columns")
    values = shape[-1] // 3 * 4 if spec.element.bits == 6 else shape[-1] * spec.codes_per_byte
    return (*shape[:-1], values)
