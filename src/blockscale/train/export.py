"""Weights of a training run as a checkpoint of block-scaled weights, with the bytes that the run multiplies by.

Layers that the run converted are cast as its forward casts them: whole, so that parts of a fused layer (q, k and v;
gate and up) share its tensor scale, and then cut into the names of Hugging Face. Other weights keep their dtype.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casts import quantize
from ..checkpoints import write
from ..checkpoints.layouts import get_layout
from ..diagnostics.filters import load_filter
from ..errors import CheckpointError, check_name, refuse
from ..formats.cast_spec import CastSpec
from ..formats.spec import FORMATS
from ..formats.storage import operand_of
from ..formats.tensor import BlockScaled
from ..models.config import ExpertsConfig, LatentConfig, ModelConfig
from ..models.hugging_face import check_has_names, hugging_face_config, hugging_face_parts
from ..models.transformer import Transformer
from ..nn import quantize_
from . import checkpoint
from .config import RecipeConfig
from .corpus import expanded
from .run import recipe_of

NATIVE = "blockscale"


class Exported(NamedTuple):
    """What an export wrote.  checkpoint: it was read from.  weights: (name, format or dtype, shape)."""

    checkpoint: Path
    files: list[Path]
    weights: list[tuple[str, str, tuple[int, ...]]]


def export_run(source: Path, target: Path, layout: str = NATIVE, format: str | None = None) -> Exported:
    """Write a run's weights to a new folder: config.json, and safetensors with Hugging Face's names; beside them the
    run's tokenizer.json, if it had one that is still there.

    source: folder of a run, whose last checkpoint is taken, or a checkpoint in it.  format: of the layers that the run
    converted; None: that of the recipe's forward, cast by its scale rule; bf16: all weights are written in bf16.
    """
    get_layout(layout)
    if layout == "unquantized" and format is None:
        format = "bf16"
    if format is not None:
        check_name(format, (*FORMATS, "bf16"), "format")
    path = source if (source / checkpoint.ABOUT).exists() else checkpoint.latest(source)
    if path is None:
        rule = "a run that saved a checkpoint has step-* folders"
        fix = "name the folder that blockscale train --folder wrote"
        refuse(f"{source} has no checkpoint", rule, fix, error=CheckpointError)
    about = checkpoint.read_about(path)["config"]
    try:
        model, casts = _model(path, about), dict[str, CastSpec]()
        if format != "bf16":
            casts = _casts(model, RecipeConfig(**about["recipe"]), format)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        what, rule = f"{path / checkpoint.ABOUT} describes no run: {error!r}", "it is as blockscale train wrote it"
        refuse(what[:300], rule, "name another checkpoint", error=CheckpointError)
    if format == "bf16":
        model = model.bfloat16()
    config = hugging_face_config(model, model.embedding.weight.dtype)
    found: list[tuple[str, str, tuple[int, ...]]] = []

    def weights() -> Iterator[tuple[str, Tensor | BlockScaled]]:
        for name, value in exported_weights(model, casts):
            kind = value.format if isinstance(value, BlockScaled) else str(value.dtype).removeprefix("torch.")
            found.append((name, kind, tuple(value.shape)))
            yield name, value

    files = write(target, weights(), layout, config=config)
    if (tokenizer := about["data"].get("tokenizer")) and expanded(tokenizer).is_file():
        shutil.copyfile(expanded(tokenizer), target / "tokenizer.json")
    return Exported(path, files, found)


def _model(path: Path, about: dict[str, Any]) -> Transformer:
    """The model of a checkpoint with its weights, on the CPU."""
    sizes = dict(about["model"])
    for name, kind in (("latent", LatentConfig), ("experts", ExpertsConfig)):
        sizes[name] = None if sizes.get(name) is None else kind(**sizes[name])
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    config = ModelConfig(**{name: value for name, value in sizes.items() if name in known})
    dtype: torch.dtype = getattr(torch, about["parameters"])
    model = Transformer.build(config, about["data"]["sequence"], dtype=dtype)
    check_has_names(model)
    checkpoint.read_model(path, model.state_dict())
    return model


def _casts(model: Transformer, config: RecipeConfig, format: str | None) -> dict[str, CastSpec]:
    """Cast of each parameter that a run's recipe converts, by name."""
    recipe = recipe_of(config)
    if recipe.fprop is None:
        return {}
    keep_file = None if config.keep_file is None else Path(config.keep_file)
    filter_fn = None if keep_file is None else load_filter(keep_file, model, recipe)
    report = quantize_(model, recipe, filter_fn, keep_first=config.keep_first, keep_last=config.keep_last)
    spec = recipe.fprop.b.spec("fprop_w", None) if format is None else CastSpec(format)
    return {f"{layer.name}.weight": spec for layer in report.converted}


def exported_weights(model: Transformer, casts: dict[str, CastSpec]) -> Iterator[tuple[str, Tensor | BlockScaled]]:
    """Weights with Hugging Face's names, in the order of the model.  casts: by parameter; others are plain."""
    whole: tuple[str, BlockScaled] | None = None
    for name, parameter, rows in hugging_face_parts(model):
        value = model.get_parameter(parameter).detach()
        if parameter not in casts:
            yield name, (value if rows is None else value[rows]).clone()
            continue
        if whole is None or whole[0] != parameter:
            whole = parameter, quantize(value, casts[parameter])
        yield name, whole[1] if rows is None else _rows(name, whole[1], rows)


def _rows(name: str, q: BlockScaled, rows: slice) -> BlockScaled:
    """Some rows of a weight, with their bytes."""
    tile = q.spec.block[0]
    if rows.start % tile or (rows.stop % tile and rows.stop != q.shape[0]):
        refuse(
            f"{name} is rows {rows.start} to {rows.stop} of a layer in {q.format}",
            rule=f"parts of a fused layer begin at multiples of {tile} rows, where its blocks begin",
            fix='pass a format with blocks of one row, such as format="mxfp8_e4m3", or format="bf16"',
            error=CheckpointError,
        )
    codes = q.data.view(torch.uint8)[rows]
    scale = q.plain_scale()[rows.start // tile : -(-rows.stop // tile)]
    return operand_of(q.spec, codes, scale, q.global_scale, (codes.shape[0], q.shape[1]))
