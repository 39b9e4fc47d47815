"""`BlockScaled`: codes, scales and their format, as a plain frozen dataclass.

It is not a tensor subclass, so it intercepts no torch function. It is registered with pytree, so it passes through
compiled graphs. The scaled axis is contiguous in memory; `axis=-2` is the transposed view of a buffer whose rows hold
the codes of a column. `shape` is the logical shape of the source; `data` may be shorter (two FP4 codes a byte) or
longer (a rotated tail, padded groups) along the scaled axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import AxisError, DtypeError, LayoutError, refuse
from .cast_spec import CastPlan, check_mask
from .checks import all_ints, check_device, in_words, is_dense
from .layout import (
    GROUP_ALIGN,
    code_bytes,
    pack_scale,
    round_up,
    scale_view,
    scale_view_shape,
    shorten,
    unpack_scale,
)
from .spec import FORMATS, Format, check_layout, get_format, partners_of


@dataclass(frozen=True, eq=False, repr=False)
class BlockScaled:
    """A tensor in a block-scaled format.

    data: codes in torch's own dtype (`uint8`, one code a byte, for FP6).  scale: decode factors in `scale_layout`.
    global_scale: NVFP4's fp32 factor, [] or one per group.  axis: the axis that blocks run along, -1 or -2.
    group_align: 128 when groups of tokens were padded to start there, else 0, and groups their number.  hadamard: sign
    mask of a rotated operand, else None.
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    format: str
    axis: int
    scale_layout: str
    shape: tuple[int, ...]
    group_align: int = 0
    hadamard: int | None = None
    groups: int = 0

    @property
    def spec(self) -> Format:
        return get_format(self.format)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def mT(self) -> BlockScaled:
        """The transposed operand: strides and axis are swapped, no byte moves."""
        scale = self.scale if self.scale_layout == "blocked" else self.scale.mT
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return replace(self, data=self.data.mT, scale=scale, axis=-3 - self.axis, shape=shape)

    @property
    def operand(self) -> BlockScaled:
        """The same values with the scaled axis last, as products and kernels take them."""
        return self if self.axis == -1 else self.mT

    @property
    def length(self) -> int:
        """Stored codes along the scaled axis, tails of rotated groups and padding between token groups included."""
        logical = self.shape[self.axis]
        if self.group_align:
            return self.data.shape[self.axis] * self.spec.codes_per_byte
        return logical if self.hadamard is None else round_up(logical, self.spec.hadamard)

    @property
    def rows(self) -> int:
        """Size of the unscaled one of the last two axes."""
        return self.shape[-3 - self.axis]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, without pads."""
        tensors = [self.data, self.scale] + ([] if self.global_scale is None else [self.global_scale])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def plain_scale(self) -> Tensor:
        """Scales of the operand as [..., row tiles, blocks], whatever their layout."""
        operand = self.operand
        return unpack_scale(self.spec, operand.scale, self.rows, self.length, self.scale_layout)

    def with_layout(self, layout: str) -> BlockScaled:
        """The same values with scales in another layout; copies scale bytes unless the layout is the same."""
        if isinstance(layout, str) and layout == self.scale_layout:  # pyright: ignore[reportUnnecessaryIsInstance]
            return self
        check_layout(self.spec, layout)
        buffer = pack_scale(self.spec, self.plain_scale(), self.rows, self.length, layout)
        scale = scale_view(self.spec, buffer, self.rows, self.length, layout, transposed=self.axis == -2)
        return replace(self, scale=scale, scale_layout=layout)

    def to(self, device: torch.device | str) -> BlockScaled:
        """The same values on another device, in the same layout."""
        check_device(device)
        where = torch.device(device)
        global_scale = None if self.global_scale is None else self.global_scale.to(where)
        return replace(self, data=_move(self.data, where), scale=_move(self.scale, where), global_scale=global_scale)

    def __repr__(self) -> str:
        if not (is_dense(self.data) and is_dense(self.scale) and isinstance(self.shape, tuple)):  # pyright: ignore[reportUnnecessaryIsInstance]
            return f"BlockScaled({self.format}, data {in_words(self.data)}, scale {in_words(self.scale)})"
        extras = [f"axis={self.axis}", f"scale {str(self.scale.dtype)[6:]} {self.scale_layout}"]
        if isinstance(self.global_scale, Tensor):
            extras.append(f"global_scale {tuple(self.global_scale.shape)}")
        if self.hadamard is not None:
            extras.append(f"hadamard={self.hadamard:#x}" if type(self.hadamard) is int else "hadamard of no mask")
        if self.group_align:
            extras.append(f"groups padded to {self.group_align}")
        return f"BlockScaled({self.format} {tuple(self.shape)}, {', '.join(extras)}, {self.device})"


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy with the same strides; `Tensor.to` would drop the pads."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    steps = zip(raw.shape, raw.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if raw.numel() else 0
    return raw.as_strided((extent,), (1,)).to(device).as_strided(raw.shape, raw.stride()).view(tensor.dtype)


def _flatten(q: BlockScaled) -> tuple[list[Tensor], tuple[object, ...]]:
    meta = (q.format, q.axis, q.scale_layout, q.shape, q.group_align, q.hadamard, q.groups)
    return [q.data, q.scale] if q.global_scale is None else [q.data, q.scale, q.global_scale], meta


def _unflatten(leaves: Sequence[Tensor], meta: tuple[object, ...]) -> BlockScaled:
    data, scale, *rest = leaves
    return BlockScaled(data, scale, rest[0] if rest else None, *meta)  # pyright: ignore[reportArgumentType]


pytree.register_pytree_node(
    BlockScaled,
    _flatten,  # pyright: ignore[reportArgumentType]
    _unflatten,  # pyright: ignore[reportArgumentType]
    serialized_type_name="blockscale.BlockScaled",
)

# so that torch.load(weights_only=True) reads saved operands
torch.serialization.add_safe_globals([BlockScaled])


def check_axis(axis: int) -> None:
    """Raise unless the axis is one of the last two."""
    if not isinstance(axis, int) or axis not in (-1, -2):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"axis={in_words(axis)}",
            rule="blocks run along one of the last two axes, named from the end",
            fix="use axis=-1 (blocks along the last axis) or axis=-2",
            error=AxisError,
        )


def assemble(
    plan: CastPlan,
    buffers: tuple[Tensor, Tensor, Tensor | None],
    shape: Sequence[int],
    axis: int,
    *,
    groups: int | None = None,
) -> BlockScaled:
    """Wrap the contiguous buffers of a cast in a `BlockScaled`: views only.

    buffers: codes, scales, tensor scale (ignored unless NVFP4), scaled axis last.  shape: of the source.  groups:
    number of padded groups, None without padding.
    """
    spec, (data, scale, global_scale) = plan.spec, buffers
    padded = groups is not None
    length = data.shape[-1] * spec.codes_per_byte if padded else plan.stored_length(shape[axis])
    data = shorten(data, code_bytes(spec, length))
    scale = scale_view(spec, scale, shape[-3 - axis], length, plan.layout, transposed=axis == -2)
    return BlockScaled(
        data if axis == -1 else data.mT,
        scale,
        global_scale if spec.family == "nvfp4" else None,
        plan.format,
        axis,
        plan.layout,
        tuple(shape),
        GROUP_ALIGN if padded else 0,
        plan.hadamard,
        groups or 0,
    )


def check_is_block_scaled(q: object, name: str, taker: str, partner: object = None) -> None:
    """Raise unless q is a BlockScaled.  partner: the other operand of a product, which selects the suggested format."""
    if not isinstance(q, BlockScaled):
        beside = partner.format if isinstance(partner, BlockScaled) else None
        format = partners_of(beside)[0] if isinstance(beside, str) and beside in FORMATS else "mxfp8_e4m3"
        refuse(
            f"{name} is a {type(q).__name__}",
            rule=f"{taker} takes BlockScaled operands",
            fix=f"cast it first: blockscale.quantize({name}, {format!r})",
            error=DtypeError,
        )


def check_block_scaled(q: BlockScaled, name: str = "operand") -> None:
    """Raise unless data, scale and global scale have the dtypes, shapes and device that the format requires."""
    spec = q.spec
    check_axis(q.axis)
    check_layout(spec, q.scale_layout)
    _check_record(q, name)
    lead, rows, length = tuple(q.shape[:-2]), q.rows, q.length
    # compared in their stored order: putting the scaled axis last would cost views
    order = 1 if q.axis == -1 else -1
    codes = (rows, code_bytes(spec, length))[::order]
    scales = scale_view_shape(spec, rows, length, q.scale_layout)[::order]
    _check_part(name, "data", q.data, spec.data_dtype, (*lead, *codes), q)
    _check_part(name, "scale", q.scale, spec.scale_dtype, (*lead, *scales), q)
    has_global = q.global_scale is not None
    if has_global != (spec.family == "nvfp4"):
        refuse(
            f"{name}.global_scale is {'given' if has_global else 'missing'} for {q.format}",
            rule="NVFP4 has an fp32 tensor scale and no other format has",
            fix="make operands with blockscale.quantize",
            error=LayoutError,
        )
    factor = q.global_scale
    if factor is not None and not (
        is_dense(factor) and factor.dtype == torch.float32 and factor.dim() <= 1 and factor.device == q.device
    ):
        refuse(
            f"{name}.global_scale is {_with_device(factor)}",
            rule=f"the tensor scale is float32, [] or one per group, on {q.device}",
            fix="make operands with blockscale.quantize",
            error=LayoutError,
        )


def _check_record(q: BlockScaled, name: str) -> None:
    """Raise unless an operand's shape, groups and rotation are valid."""
    if not isinstance(q.data, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule, fix = "codes are a torch tensor", "make operands with blockscale.quantize"
        refuse(f"{name}.data is {in_words(q.data)}", rule, fix, error=LayoutError)
    if not isinstance(q.shape, tuple) or len(q.shape) < 2 or not all_ints(q.shape):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "an operand has the shape that it was cast from, as a tuple of two or more sizes"
        refuse(f"{name}.shape is {_brief(q.shape)}", rule, fix="pass tuple(x.shape) of its source", error=LayoutError)
    aligned = type(q.group_align) is int and q.group_align in (0, GROUP_ALIGN)
    if not aligned or not all_ints((q.groups,)):
        refuse(
            f"{name} has group_align={_brief(q.group_align)} and groups={_brief(q.groups)}",
            rule=f"groups of tokens are padded to {GROUP_ALIGN} or, with 0, not at all; groups is their number",
            fix="cast with offs and axis=-2, which sets both",
            error=LayoutError,
        )
    if q.hadamard is not None:
        check_mask(q.spec, q.hadamard)


def _brief(value: object) -> str:
    return repr(value) if isinstance(value, tuple | list) else in_words(value)


def _with_device(value: object) -> str:
    return f"{in_words(value)} on {value.device}" if isinstance(value, Tensor) else in_words(value)


def _check_part(
    name: str, part: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], q: BlockScaled
) -> None:
    if is_dense(tensor) and tensor.dtype == dtype and tensor.shape == shape and tensor.device == q.device:
        return
    refuse(
        f"{name}.{part} is {_with_device(tensor)}",
        rule=f"{q.format} {tuple(q.shape)} with axis={q.axis} and {q.scale_layout} scales keeps its {part}"
        f" as {dtype} {shape} on {q.device}",
        fix="make operands with blockscale.quantize, or give BlockScaled the shape it was cast from",
        error=LayoutError,
    )


def flatten_operand(q: BlockScaled) -> tuple[Tensor, Tensor, Tensor | None, str, int]:
    """Operator arguments of an operand: codes, scales, tensor scale, all that is constant as text (`mxfp4 plain`), and
    the length of the scaled axis. The codes do not tell it: a byte holds two FP4 codes, and groups and rotations pad.

    One-byte codes and scales are passed as uint8: inductor cannot handle FP4 and E8M0 as inputs of operators that
    mutate, and not every collective supports FP8. In eager mode with plain tensors the views are skipped.
    """
    kind = f"{q.format} {q.scale_layout}"
    if q.axis == -2:
        kind += " transposed"
    if q.group_align:
        kind += " padded"
    if q.hadamard is not None:
        kind += f" hadamard={q.hadamard:#x}"
    data, scale = q.data, q.scale
    if torch.compiler.is_compiling() or type(data) is not Tensor:
        data, scale = as_bytes(data), as_bytes(scale)
    return data, scale, q.global_scale, kind, q.shape[q.axis]


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor of one-byte elements as uint8; any other as it is."""
    return _viewed(tensor, torch.uint8) if tensor.element_size() == 1 else tensor


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View as another dtype; a view costs microseconds, so it is skipped if the dtype is the same."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


@functools.cache
def _parse_kind(kind: str) -> tuple[Format, str, int, int, int | None]:
    """Format, scale layout, axis, group_align and hadamard from the text of `flatten_operand`."""
    name, layout, *words = kind.split(" ")
    mask = next((int(word[len("hadamard=") :], 16) for word in words if word.startswith("hadamard=")), None)
    axis, align = -2 if "transposed" in words else -1, GROUP_ALIGN if "padded" in words else 0
    return get_format(name), layout, axis, align, mask


def operand_from_flat(data: Tensor, scale: Tensor, global_scale: Tensor | None, kind: str, length: int) -> BlockScaled:
    """Inverse of `flatten_operand`, without the number of groups; codes and scales have the dtypes they came in."""
    spec, layout, axis, align, mask = _parse_kind(kind)
    shape = (*data.shape[:-1], length) if axis == -1 else (*data.shape[:-2], length, data.shape[-1])
    return BlockScaled(data, scale, global_scale, spec.name, axis, layout, shape, align, mask)


def as_stored(q: BlockScaled) -> BlockScaled:
    """An operand from `operand_from_flat` as kernels take it: codes and scales, which may have come as bytes, in the
    dtypes of the format, and the length of the codes: a shard along the scaled axis is shorter than the operand."""
    spec, axis, shape, data, scale = q.spec, q.axis, q.shape, q.data, q.scale
    length = data.shape[axis] * spec.codes_per_byte
    if length >= shape[axis] and data.dtype == spec.data_dtype and scale.dtype == spec.scale_dtype:
        return q
    if length < shape[axis]:
        shape = (*shape[:-1], length) if axis == -1 else (*shape[:-2], length, shape[-1])
    data, scale = _viewed(data, spec.data_dtype), _viewed(scale, spec.scale_dtype)
    return replace(q, data=data, scale=scale, shape=shape)


def from_parts(
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    kind: str,
    shape: tuple[int, ...],
    *,
    axis: int = -1,
    group_align: int = 0,
    hadamard: int | None = None,
    groups: int = 0,
) -> BlockScaled:
    """Operand from its tensors and the text of `flatten_operand`, given the other fields."""
    name, layout, *_ = kind.split(" ")
    spec = get_format(name)
    data, scale = _viewed(data, spec.data_dtype), _viewed(scale, spec.scale_dtype)
    return BlockScaled(data, scale, global_scale, spec.name, axis, layout, shape, group_align, hadamard, groups)


def rows_of(q: BlockScaled, span: slice) -> BlockScaled:
    """Rows of an operand [M, K] with scales in its layout: views where rows of scales can be cut there, else scales are
    converted.

    >>> import blockscale as bs
    >>> rows_of(bs.quantize(torch.ones(256, 128), "mxfp8_e4m3"), slice(128, 256)).shape
    (128, 128)
    """
    layout, rows = q.scale_layout, span.stop - span.start
    if layout == "blocked" and not (span.start % 128 or (rows % 128 and span.stop != q.shape[0])):
        width = q.scale.shape[0] // -(-q.shape[0] // 128)  # scales of 128 rows
        scale = q.scale[span.start // 128 * width : -(-span.stop // 128) * width]
    elif layout == "plain" or (layout == "mn_major" and span.start % 4 == 0):
        scale = q.scale[span]
    else:
        return rows_of(q.with_layout("plain"), span).with_layout(layout)
    return replace(q, data=q.data[span], scale=scale, shape=(rows, q.shape[-1]))


def is_row_slice(q: BlockScaled) -> bool:
    """Whether scales are rows of larger ones that TMA can address: their columns start at multiples of 16 bytes."""
    return (
        q.scale_layout == "mn_major"
        and q.scale.stride(-2) == 1
        and q.scale.stride(-1) % 4 == 0
        and q.scale.data_ptr() % 16 == 0
    )


def has_canonical_strides(q: BlockScaled) -> bool:
    """Whether scales have the strides of their layout; copies made elsewhere may not."""
    rows, blocks = q.scale.shape[-2:] if q.scale.dim() > 1 else (0, 0)
    if q.scale_layout == "mn_major":
        return q.scale.stride(-2) == 1 and q.scale.stride(-1) == round_up(rows, 4)
    if q.scale_layout == "grid":
        return q.scale.stride(-1) == 1 and q.scale.stride(-2) == round_up(blocks, 4)
    return q.scale.is_contiguous()
