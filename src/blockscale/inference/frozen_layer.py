"""`FrozenLayer`: base class of layers whose weight is codes and scales, as buffers.

Buffers have the tensors of an operand in the layout that kernels read. A `state_dict` has the stored form of
`formats/storage.py` under the names of checkpoint layout `blockscale`: codes as `weight`, block scales as
`weight_scale`, NVFP4's tensor scale as `weight_global_scale`. Conversions of a module's dtype leave both as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..autograd.operands import Casts, needed_grads
from ..autograd.recipe import Operand, Product, Recipe
from ..casts import FLOAT_DTYPES, quantize
from ..errors import DeviceError, DtypeError, LayoutError, ShapeError, refuse
from ..formats.cast_spec import CastSpec, as_cast_spec
from ..formats.checks import check_tensor, in_words
from ..formats.layout import code_bytes, scale_counts
from ..formats.packing import pack_fp6, unpack_fp6
from ..formats.spec import Format, get_format
from ..formats.storage import operand_of
from ..formats.tensor import BlockScaled, as_bytes, check_block_scaled, check_is_block_scaled, from_parts

# buffers of a weight
PARTS = ("weight", "weight_scale", "weight_global_scale")


class FrozenLayer(nn.Module):
    """A layer with a quantized weight [N, K] or [E, N, K] and its bias [N] or [E, N], all buffers.

    format, weight_shape: of the weight.  scale_layout: of its scales in memory.  recipe: only the formats of fprop,
    whose `a` casts the input; None of them for a weight-only layer, which does not round its input.
    """

    AXES: ClassVar[str]  # of the weight
    weight: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor | None
    bias: Tensor | None
    format: str
    weight_shape: tuple[int, ...]
    scale_layout: str
    recipe: Recipe

    @classmethod
    def from_operand(
        cls, weight: BlockScaled, bias: Tensor | None = None, activations: str | CastSpec | None = None
    ) -> Self:
        """The layer with a weight that is quantized already; its tensors are not copied."""
        layer = cls.__new__(cls)
        layer.set_weight(weight, bias, activations)
        return layer

    def set_weight(self, weight: BlockScaled, bias: Tensor | None, activations: str | CastSpec | None) -> None:
        """Take an operand and a bias as buffers."""
        check_weight(weight)
        if len(weight.shape) != len(self.AXES.split(",")):
            rule = f"the weight of this layer is {self.AXES}"
            refuse(f"weight is {weight}", rule, "pass one of this shape", error=ShapeError)
        check_bias_of(bias, weight)
        super().__init__()
        self.recipe = fprop_recipe(weight.format, activations)
        self.format, self.weight_shape = weight.format, weight.shape
        self.scale_layout = self._wanted_layout(weight.data)
        for name in (*PARTS, "bias"):
            self.register_buffer(name, None)
        self._hold(weight.operand)
        self.bias = None if bias is None else bias.detach()

    @property
    def in_features(self) -> int:
        return self.weight_shape[-1]

    @property
    def out_features(self) -> int:
        return self.weight_shape[-2]

    @property
    def activations(self) -> Operand | None:
        """How the input is cast; None in a weight-only layer."""
        return self.recipe.operand("fprop_x")

    @property
    def operand(self) -> BlockScaled:
        """The weight as a product takes it: views of the buffers."""
        kind = f"{self.format} {self.scale_layout}"
        return from_parts(self.weight, self.weight_scale, self.weight_global_scale, kind, self.weight_shape)

    @property
    def casts(self) -> Casts:
        """The casts of a call."""
        return Casts(self.recipe)

    def check_input(self, x: Tensor) -> None:
        """Raise unless the layer takes an input [..., K]."""
        check_tensor(x, "x", "frozen layers")
        if x.dtype not in FLOAT_DTYPES:
            rule = "frozen layers take bfloat16, float16 or float32"
            refuse(f"x is {x.dtype}", rule, fix="convert it", error=DtypeError)
        if not x.dim() or x.shape[-1] != self.weight_shape[-1]:
            what = f"x {tuple(x.shape)} for a weight {self.weight_shape}"
            rule = f"the last axis of x has the {self.weight_shape[-1]} input features"
            refuse(what, rule, fix="pass the input of this layer", error=ShapeError)
        if x.device != self.weight.device:
            what = f"x is on {x.device}, the weight on {self.weight.device}"
            refuse(what, rule="both are on one device", fix="move one", error=DeviceError)
        if needed_grads(x, self.weight, None).x:
            rule = "it is frozen: it computes no gradients"
            fix = "call it under torch.no_grad(), or train with quantize_"
            refuse(f"{type(self).__name__} with an input that requires a gradient", rule, fix)

    # ---- stored form -------------------------------------------------------------------------------------------------

    def _wanted_layout(self, like: Tensor) -> str:
        """The scale layout that products of this layer read on that tensor's device."""
        wanted = None if like.is_meta else self.casts.spec("fprop_w", like)
        return get_format(self.format).default_layout if wanted is None else wanted.plan.layout

    def _hold(self, q: BlockScaled) -> None:
        """Take the tensors of an operand as buffers."""
        q = q.with_layout(self.scale_layout)
        data = q.data if q.spec.element.bits == 8 else as_bytes(q.data)
        scale = as_bytes(q.scale) if q.spec.family == "mx" else q.scale
        for name, part in zip(PARTS, (data, scale, q.global_scale), strict=True):
            self._buffers[name] = None if part is None else part.detach()

    def _stored(self) -> dict[str, Tensor]:
        """The stored form of the weight; views of the buffers unless these have pads or another layout."""
        q = self.operand
        codes = pack_fp6(self.weight) if q.spec.element.bits == 6 else self.weight.contiguous()
        scale = q.plain_scale().contiguous()
        found = {"weight": codes, "weight_scale": scale.view(self.weight_scale.dtype)}
        return found if q.global_scale is None else found | {"weight_global_scale": q.global_scale}

    def _take_stored(self, stored: Mapping[str, Tensor]) -> None:
        """Take the stored form as buffers, in the layout for its device."""
        spec, codes = get_format(self.format), stored["weight"]
        if spec.element.bits == 6:
            codes = unpack_fp6(codes, self.weight_shape[-1])
        self.scale_layout = self._wanted_layout(codes)
        factor = stored.get("weight_global_scale")
        self._hold(operand_of(spec, codes, stored["weight_scale"], factor, self.weight_shape, self.scale_layout))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Codes and scales are moved as bytes: a conversion to another floating dtype is not theirs."""
        before, stored = dict(self._buffers), self._stored()
        try:
            for name, part in stored.items():
                self._buffers[name] = part.reshape(-1).view(torch.uint8)
            result = super()._apply(fn, recurse)
            moved: dict[str, Tensor] = {}
            for name, part in stored.items():
                found = self._buffers[name]
                if found is None or found.dtype != torch.uint8:
                    rule = "codes and scales keep their bytes"
                    fix = "use .to(dtype), .half(), .float() or .bfloat16(), which convert the bias alone"
                    refuse(f"{name} converted to {in_words(found)}", rule, fix, error=DtypeError)
                moved[name] = found.view(part.dtype).view(part.shape)
            self._take_stored(moved)
        except BaseException:
            self._buffers.update(before)
            raise
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Attributes with all codes and scales as bytes: pickles of torch hold no float8."""
        buffers = {name: None if each is None else as_bytes(each) for name, each in self._buffers.items()}
        return vars(self) | {"_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hold(self.operand)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        about = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if about is not None:  # the two MXFP6 formats have tensors of one dtype and shape
            about["format"] = self.format
        for name, part in self._stored().items():
            destination[prefix + name] = part

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **named: Any
    ) -> None:
        before, stored = dict(self._buffers), self._stored()
        saved = local_metadata.get("format", self.format)
        if saved != self.format and prefix + "weight" in state_dict:
            rule, fix = "codes mean other values in another format", f"make the layer with weights={saved!r}"
            refuse(f"{prefix}weight is {saved} for a layer of {self.format}", rule, fix, error=DtypeError)
        for name, part in stored.items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and given.dtype != part.dtype:
                rule = f"{name} of {self.format} is stored as {part.dtype}, and no value is converted"
                fix = "load a state_dict of a frozen layer, or a checkpoint with blockscale.inference.load"
                refuse(f"{prefix}{name} is {in_words(given)}", rule, fix, error=DtypeError)
        self._buffers.update(stored)
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **named)
            self._take_stored({name: part for name in stored if (part := self._buffers[name]) is not None})
        except BaseException:
            self._buffers.update(before)
            raise
        if not local_metadata.get("assign_to_params_buffers", False):
            self._keep(before)

    def _keep(self, before: Mapping[str, Tensor | None]) -> None:
        """Copy loaded values into the buffers of before, whose addresses graphs may have captured."""
        for name in PARTS:
            old, new = before[name], self._buffers[name]
            if old is not None and new is not None and old.shape == new.shape and old.device == new.device:
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                self._buffers[name] = old

    def extra_repr(self) -> str:
        cast = self.activations
        return f"bias={self.bias is not None}, weights={self.format}, activations={cast and cast.format}"


def fprop_recipe(weights: str, activations: str | CastSpec | None) -> Recipe:
    """A recipe of fprop alone; raises unless these formats have a product."""
    if activations is None:
        return Recipe(f"{weights}, activations unquantized")
    spec = as_cast_spec(activations)
    plan = spec.plan()
    if plan.stream is not None or plan.hadamard is not None or plan.satfinite or spec.amax_tensor is not None:
        rule = "activations of frozen layers are cast to a format by a scale rule, to nearest"
        refuse(f"activations={spec}", rule, "pass the name of a format, or CastSpec(format, scale_rule)")
    made = Operand(spec.format, spec.scale_rule)
    return Recipe(f"{weights}, activations {made}", Product(made, Operand(weights)))


def quantize_weight(weight: Tensor, weights: str | CastSpec) -> BlockScaled:
    """The operand of a weight [N, K] or [E, N, K]; NVFP4's tensor scale is that of each expert."""
    spec = as_cast_spec(weights)
    if weight.dim() == 3 and get_format(spec.format).family == "nvfp4" and spec.amax_tensor is None:
        spec = replace(spec, amax="group")
    return quantize(weight.detach(), spec)


def zero_operand(weights: str | CastSpec, shape: tuple[int, ...], device: torch.device | str | None) -> BlockScaled:
    """An operand of zeros, to be loaded into."""
    spec: Format = as_cast_spec(weights).plan().spec
    codes = torch.zeros(*shape[:-1], code_bytes(spec, shape[-1]), dtype=torch.uint8, device=device)
    dtype = spec.scale_dtype if spec.scale_dtype == torch.float32 else torch.uint8
    scale = torch.zeros(*shape[:-2], *scale_counts(spec, *shape[-2:]), dtype=dtype, device=device)
    factor = torch.ones(shape[:-2], device=device, dtype=torch.float32) if spec.family == "nvfp4" else None
    return operand_of(spec, codes, scale, factor, shape)


def check_weight(weight: BlockScaled) -> None:
    """Raise unless an operand is a weight: blocks along inputs, neither rotated nor padded for groups."""
    check_is_block_scaled(weight, "weight", "a frozen layer")
    check_block_scaled(weight, "weight")
    if weight.axis != -1 or weight.hadamard is not None or weight.group_align:
        rule = "blocks of a frozen weight run along its inputs, neither rotated nor padded for groups"
        refuse(f"weight is {weight}", rule, "pass quantize(weight, format)", error=LayoutError)


def check_bias_of(bias: Tensor | None, weight: BlockScaled) -> None:
    """Raise unless a bias has a number for each output of a weight."""
    if bias is None:
        return
    check_tensor(bias, "bias", "frozen layers")
    shape = weight.shape[:-1]
    if bias.shape != shape or bias.dtype not in FLOAT_DTYPES or bias.device != weight.device:
        rule = f"a bias is {tuple(shape)} in bfloat16, float16 or float32 on {weight.device}"
        refuse(f"bias is {in_words(bias)} on {bias.device}", rule, "pass one number for each output", error=ShapeError)


def shaped(y: Tensor, x: Tensor) -> Tensor:
    """A result [M, N] with the leading axes of the input."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
