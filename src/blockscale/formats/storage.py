"""Operands as plain tensors, and back: what files and state dicts hold.

The stored form is the same on every device: codes [..., rows, bytes] and scales [..., row tiles, blocks], the scaled
axis last, row-major, without pads. In memory rows of codes start at multiples of 16 bytes and scales have the layout
that kernels read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import LayoutError, refuse
from .checks import all_ints, in_words
from .layout import code_bytes, code_row_bytes, pack_scale, scale_counts, scale_view, shorten
from .packing import pack_fp6, unpack_fp6
from .spec import Format, check_layout, get_format
from .tensor import BlockScaled, as_bytes, check_axis, check_block_scaled

_FIELDS = ("format", "axis", "shape", "group_align", "hadamard", "groups")


def to_tensors(q: BlockScaled) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of an operand by name (codes as `data`, `scale`, for NVFP4 `global_scale`), and its other fields as JSON
    values. FP6 codes are packed four to three bytes; everything else keeps its bytes.

    >>> import blockscale as bs
    >>> tensors, fields = to_tensors(bs.quantize(torch.ones(4, 64), "mxfp4"))
    >>> {name: tuple(each.shape) for name, each in tensors.items()}, fields["shape"]
    ({'data': (4, 32), 'scale': (4, 2)}, [4, 64])
    """
    check_block_scaled(q)
    codes = q.operand.data.view(torch.uint8)
    if q.spec.element.bits == 6:
        data = pack_fp6(codes)
    else:
        data = codes.contiguous().view(q.spec.data_dtype if q.spec.element.bits == 8 else torch.uint8)
    # axes of size 1 may have any stride, which files do not take
    scale = as_bytes(q.plain_scale()).clone(memory_format=torch.contiguous_format)
    found = {"data": data, "scale": scale.view(q.scale.dtype)}
    if q.global_scale is not None:
        found["global_scale"] = q.global_scale
    return found, {name: getattr(q, name) if name != "shape" else list(q.shape) for name in _FIELDS}


def from_tensors(
    tensors: Mapping[str, Tensor], fields: Mapping[str, Any], *, scale_layout: str | None = None
) -> BlockScaled:
    """Inverse of `to_tensors`; the same bytes.  scale_layout: the format's default if not given.

    >>> import blockscale as bs
    >>> q = bs.quantize(torch.ones(4, 64), "mxfp4")
    >>> bool((bs.dequantize(from_tensors(*to_tensors(q))) == 1).all())
    True
    """
    lacking = {"data", "scale"} - tensors.keys() or {"format", "shape"} - fields.keys()
    if lacking:
        rule = "an operand has data and scale, and fields format and shape"
        refuse(f"an operand without {', '.join(sorted(lacking))}", rule, "pass what to_tensors returned", LayoutError)
    spec, axis = get_format(fields["format"]), fields.get("axis", -1)
    check_axis(axis)
    if not isinstance(fields["shape"], list | tuple) or not all_ints(fields["shape"]) or tensors["data"].dim() < 2:
        what = f"an operand of shape {in_words(fields['shape'])} with data {in_words(tensors['data'])}"
        refuse(what, "an operand has two or more axes", "pass what to_tensors returned", LayoutError)
    shape = tuple(fields["shape"])
    codes, scale = as_bytes(tensors["data"]), tensors["scale"]
    if spec.element.bits == 6:
        length = shape[axis] if not fields.get("group_align") else codes.shape[-1] // 3 * 4
        codes = unpack_fp6(codes, length)
    layout = scale_layout or spec.default_layout
    check_layout(spec, layout)
    rows, length = codes.shape[-2], codes.shape[-1] * spec.codes_per_byte
    if not fields.get("group_align") and fields.get("hadamard") is None:
        length = shape[axis]
    q = operand_of(spec, codes, scale, tensors.get("global_scale"), (*codes.shape[:-2], rows, length), layout)
    if axis == -2:
        q = q.mT
    others = {name: fields[name] for name in ("group_align", "hadamard", "groups") if fields.get(name) is not None}
    found = BlockScaled(
        q.data, q.scale, q.global_scale, q.format, axis, layout, shape,
        others.get("group_align", 0), others.get("hadamard"), others.get("groups", 0),
    )  # fmt: skip
    check_block_scaled(found)
    return found


def operand_of(
    spec: Format,
    codes: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    shape: tuple[int, ...],
    layout: str | None = None,
) -> BlockScaled:
    """Operand with the scaled axis last, from stored codes and scales. Codes are copied only if rows need pads.

    codes: [..., rows, bytes], of any dtype of one byte.  scale: [..., row tiles, blocks], of the format's dtype, or
    bytes.  shape: [..., rows, K].
    """
    layout = layout or spec.default_layout
    (rows, length), lead = shape[-2:], shape[:-2]
    stored = as_bytes(codes)
    width = code_bytes(spec, length)
    tiles = scale_counts(spec, rows, length)
    if stored.shape != (*lead, rows, width) or scale.shape != (*lead, *tiles):
        refuse(
            f"codes {tuple(codes.shape)} and scales {tuple(scale.shape)} for {spec.name} {tuple(shape)}",
            rule=f"codes are {(*lead, rows, width)} bytes and scales {(*lead, *tiles)}",
            fix="pass both as they are stored, without pads",
            error=LayoutError,
        )
    extra = code_row_bytes(spec, length) - width
    data = shorten(pad(stored, (0, extra)) if extra else stored.contiguous(), width)
    typed = scale if scale.dtype == spec.scale_dtype else as_bytes(scale).view(spec.scale_dtype)
    packed = scale_view(spec, pack_scale(spec, typed, rows, length, layout), rows, length, layout)
    return BlockScaled(data.view(spec.data_dtype), packed, global_scale, spec.name, -1, layout, tuple(shape))
