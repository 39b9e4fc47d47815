"""`load`: a checkpoint as a model whose layers multiply by the stored codes and scales, without decoding them.

The model is made on the meta device and filled layer by layer: beside it, the tensors of one layer are in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import checkpoints
from ..casts import FLOAT_DTYPES
from ..checkpoints import Checkpoint
from ..errors import CheckpointError, refuse
from ..formats.cast_spec import CastSpec, as_cast_spec
from ..formats.checks import check_flag, in_words
from ..formats.tensor import BlockScaled
from ..hardware import named_device
from ..models.attention import rotary_table
from ..models.config import ModelConfig
from ..models.hugging_face import hugging_face_parts, read_config
from ..models.transformer import Block, Transformer
from ..nn import Linear, SwiGLU
from ..nn.report import Converted, Other, Skipped
from .frozen_layer import FrozenLayer, fprop_recipe
from .linear import QuantizedLinear
from .mlp import QuantizedSwiGLU
from .report import FrozenReport, model_bytes
from .split_linear import SplitLinear, join_rows, reason_against_joining
from .stored_activations import STORED, refuse_transforms, stored_activations


class Loaded(NamedTuple):
    """A loaded model, and what was done with its weights."""

    model: Transformer
    report: FrozenReport


class Part(NamedTuple):
    """A weight of a checkpoint.  shape: that a parameter of the model wants of it."""

    name: str
    shape: tuple[int, ...]


@torch.no_grad()
def load(
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str,
    activations: str | CastSpec | None = STORED,
    strict: bool = True,
) -> Loaded:
    """The transformer of a checkpoint in any of `checkpoints.LAYOUTS` with Hugging Face's names: dense Llama or Qwen3.

    activations: "stored": as the checkpoint says, and not rounded for weights of 4 and 6 bits; a format: of the inputs
    of all frozen layers; None: not rounded.  The output head's are never rounded.
    strict: raise for tensors that the model has no place for; False: name them in the report.  Frequencies of rotations
    (`rotary_emb.inv_freq`) are left out if they are those of rope_theta.

    q, k and v, and gate and up, become one layer if they have one format and one tensor scale. Else they stay apart,
    and the report says so: no weight is rounded again.

    >>> import tempfile
    >>> from blockscale import checkpoints, models, quantize
    >>> from blockscale.models.hugging_face import hugging_face_config, hugging_face_tensors
    >>> model = models.Transformer.build(models.ModelConfig(layers=1), 64)
    >>> weights = ((name, quantize(each, "mxfp4") if "proj" in name else each.detach().contiguous())
    ...     for name, each in hugging_face_tensors(model))
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> _ = checkpoints.write(folder, weights, "blockscale", config=hugging_face_config(model, torch.float32))
    >>> loaded = load(folder, device="cpu")
    >>> loaded.model.layers[0].attention.qkv
    QuantizedLinear(in_features=128, out_features=256, bias=False, weights=mxfp4, activations=None)
    """
    device = named_device(device)
    check_flag(strict, "strict")
    if not isinstance(folder, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(f"folder is {in_words(folder)}", "it is the path of a checkpoint", "pass a str or a pathlib.Path")
    found = checkpoints.open(folder)
    refuse_transforms(found)
    where = found.path / "config.json"
    config, positions = read_config(found.config, where)
    if config.layers > len(found):
        what = f"{where} has num_hidden_layers {config.layers:,} for {len(found):,} tensors"
        refuse(what, "a layer has several", "name the folder of a whole checkpoint", error=CheckpointError)
    model = Transformer.build(config, positions, device="meta")
    wanted = _wanted(model)
    left_out = _check_tensors(found, wanted, config, strict=strict)
    reader = _Reader(found, device, activations)
    for parameter, parts in wanted.items():
        place, _, name = parameter.rpartition(".")
        reader.fill(model, place, name, parts)
    model.tie()
    for block in model.layers:
        assert isinstance(block, Block)
        _fuse_activation(block)
    model.table = rotary_table(model.sequence, config.head_width, config.rope_theta, device)
    model.requires_grad_(False)
    return Loaded(model.eval(), reader.report(model, left_out))


def _wanted(model: Transformer) -> dict[str, list[Part]]:
    """The parts of each parameter of a model."""
    found: dict[str, list[Part]] = {}
    for name, parameter, rows in hugging_face_parts(model):
        shape = model.get_parameter(parameter).shape
        whole = shape if rows is None else (rows.stop - rows.start, *shape[1:])
        found.setdefault(parameter, []).append(Part(name, tuple(whole)))
    return found


def _check_tensors(
    found: Checkpoint, wanted: Mapping[str, Sequence[Part]], config: ModelConfig, *, strict: bool
) -> list[str]:
    """Raise unless the checkpoint has the tensors of a model in their shapes; returns the names of all others."""
    names = {part.name for parts in wanted.values() for part in parts}
    for part in (part for parts in wanted.values() for part in parts):
        entry = found.entries.get(part.name)
        if entry is None:
            rule, fix = "the sizes of its config.json ask for it", "name the folder of a whole checkpoint"
            refuse(f"{found.path} has no {part.name}", rule, fix, error=CheckpointError)
        if entry.shape != part.shape:
            file = found.stored[entry.parts["data"]].file
            rule = f"by the sizes of its config.json it is {part.shape}"
            refuse(f"{file}: {part.name} is {entry.shape}", rule, "restore both files", error=CheckpointError)
        if entry.format is not None and (part.name.endswith("norm.weight") or "embed_tokens" in part.name):
            file = found.stored[entry.parts["data"]].file
            rule, fix = "embeddings and norms are read, not multiplied", "convert it with blockscale convert-checkpoint"
            refuse(f"{file}: {part.name} is {entry.format}", rule, fix, error=CheckpointError)
    others = [name for name in found if name not in names and not _is_rotary(found, name, config)]
    if others and strict:
        file = found.stored[found.entries[others[0]].parts["data"]].file
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        rule = "the model has no place for it, and without it may compute something else"
        fix = "pass strict=False if it may be left out, such as scales of activations"
        refuse(f"{file} has {others[0]}{more}", rule, fix, error=CheckpointError)
    return others


def _is_rotary(found: Checkpoint, name: str, config: ModelConfig) -> bool:
    """Whether a tensor holds the frequencies of rotations, as older exports of Llama do; raises if they are others than
    the model's."""
    if not name.endswith("rotary_emb.inv_freq"):
        return False
    value, width = found[name], config.head_width
    want = config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float64) / -width)
    if isinstance(value, Tensor) and value.shape == want.shape and value.dtype in FLOAT_DTYPES:
        kind = torch.finfo(value.dtype)
        # powers in fp32 are off by a few units in the last place
        if torch.allclose(value.cpu().double(), want, rtol=max(kind.eps, 1e-5), atol=kind.tiny * kind.eps):
            return True
    file = found.stored[name].file
    rule = f"rotations have {width // 2} frequencies by rope_theta {config.rope_theta:g} of its config.json"
    fix = "load it with Hugging Face Transformers"
    refuse(f"{file}: {name} has others", rule, fix, error=CheckpointError)


class _Reader:
    """Fills a model on the meta device from a checkpoint, and keeps account of it."""

    def __init__(self, found: Checkpoint, device: torch.device, activations: str | CastSpec | None) -> None:
        self._found, self._device, self._activations = found, device, activations
        if activations is not None and activations != STORED:
            as_cast_spec(activations).plan()
        self._frozen: list[Converted] = []
        self._kept: list[Skipped] = []
        self._others: dict[str, Other] = {}
        self._formats: dict[str, None] = {}

    def fill(self, model: Transformer, place: str, parameter: str, parts: Sequence[Part]) -> None:
        """Put the weights of one parameter in their place."""
        values = [self._read(part.name) for part in parts]
        module = model.get_submodule(place)
        why = reason_against_joining(values)
        if why is not None:
            names = [part.name.removesuffix(".weight").rpartition(".")[2] for part in parts]
            made = SplitLinear({name: self._layer(place, [each]) for name, each in zip(names, values, strict=True)})
            model.set_submodule(place, made)
            return self._note(place, values, f"{', '.join(names)} kept apart: {why}")
        if isinstance(values[0], BlockScaled):
            model.set_submodule(place, self._layer(place, values))
        else:
            module.register_parameter(parameter, nn.Parameter(_joined(values), requires_grad=False))
        return self._note(place, values, "") if isinstance(module, Linear) else self._count(module, values)

    def _read(self, name: str) -> Tensor | BlockScaled:
        value = self._found[name]
        if isinstance(value, Tensor) and value.dtype not in FLOAT_DTYPES:
            file = self._found.stored[name].file
            rule, fix = "plain weights are bfloat16, float16 or float32", "convert it first"
            refuse(f"{file}: {name} is {value.dtype}", rule, fix, error=CheckpointError)
        return value.to(self._device)

    def _layer(self, place: str, values: Sequence[Tensor | BlockScaled]) -> nn.Module:
        """A layer of joined rows."""
        operands = [each for each in values if isinstance(each, BlockScaled)]
        if operands:
            weight = join_rows(operands)
            return QuantizedLinear.from_operand(weight, None, self._cast(place, weight.format))
        weight = _joined(values)
        layer = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", recipe="bf16")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    def _cast(self, place: str, format: str) -> str | CastSpec | None:
        """Cast of the input of a layer with weights in a format."""
        if place == "head" or self._activations is None:
            return None
        return stored_activations(self._found, format) if self._activations == STORED else self._activations

    def _note(self, place: str, values: Sequence[Tensor | BlockScaled], note: str) -> None:
        """Report a linear layer."""
        sizes = values[0].shape[-1], sum(each.shape[0] for each in values)
        formats = dict.fromkeys(each.format for each in values if isinstance(each, BlockScaled))
        if not formats:
            stored = f"stored in {' and '.join(dict.fromkeys(str(each.dtype)[6:] for each in values))}"  # pyright: ignore[reportAttributeAccessIssue]
            self._kept.append(Skipped(place, stored, *sizes, math.prod(sizes)))
            return
        kinds = [fprop_recipe(format, self._cast(place, format)).name for format in formats]
        self._formats |= dict.fromkeys(kinds)
        words = f"weights {' and '.join(kinds)}", note
        self._frozen.append(Converted(place, *sizes, math.prod(sizes), "; ".join(filter(None, words))))

    def _count(self, module: nn.Module, values: Sequence[Tensor | BlockScaled]) -> None:
        """Report a parameter of a module that is no linear layer."""
        kind = type(module).__name__
        self._others[kind] = self._others.get(kind, Other(kind, 0, 0)).plus(sum(math.prod(v.shape) for v in values))

    def report(self, model: Transformer, left_out: Sequence[str]) -> FrozenReport:
        """What was loaded."""
        first = fprop_recipe(next(iter(self._formats), "nothing"), None)
        warnings = [f"left out: {', '.join(left_out)}"] if left_out else []
        if not self._frozen:
            warnings.append("the checkpoint has no quantized weights of linear layers")
        size = sum(each.nbytes for each in self._found.entries.values())
        return FrozenReport(
            first.replace(name="; ".join(self._formats) or "unquantized"),
            tuple(self._frozen),
            tuple(self._kept),
            tuple(self._others.values()),
            tuple(warnings),
            size,
            model_bytes(model),
        )


def _joined(values: Sequence[Tensor | BlockScaled]) -> Tensor:
    tensors = [each for each in values if isinstance(each, Tensor)]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _fuse_activation(block: Block) -> None:
    """Give a block whose MLP casts the inputs of both layers the frozen MLP, whose activation is that of training."""
    mlp = block.mlp
    assert isinstance(mlp, SwiGLU)
    layers = [each for each in mlp.modules() if isinstance(each, nn.Linear | FrozenLayer)]
    if all(isinstance(each, FrozenLayer) and each.activations is not None for each in layers):
        block.mlp = QuantizedSwiGLU(mlp.gate_up, mlp.down)  # pyright: ignore[reportAttributeAccessIssue]
