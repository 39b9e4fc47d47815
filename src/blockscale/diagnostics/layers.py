"""Quantization error of each layer of a model on one batch: noise of its operands and of its three products, for each
expert too, and the effect of that noise on the loss.

`sample` runs an extra forward and backward with temporary hooks. Training steps stay as they are, so they may be
compiled, captured or fused, and their results do not change by a bit. The sums stay on the device until they are read.

Damage estimates the increase of the loss by a layer's forward noise, in nats: half the mean over tokens of
(g . noise)^2, where g is the gradient of the summed loss with respect to the layer's output. It is the second-order
term of a log-likelihood loss, with its curvature estimated by squared gradients (docs/diagnostics.md has the limits).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..autograd.recipe import PRODUCTS
from ..errors import refuse
from ..formats.stochastic import module_name
from ..nn import GroupedLinear
from ..nn.convert import ROOT
from ..nn.recipe_module import RecipeModule
from .call_capture import calls_with_gradient, capture_calls, clear_gradients, restored_state
from .error_sums import Sums, layer_sums

# stands for exact results, and negated for NaN and infinity: JSON has neither
EXACT_DB = 300.0
LOST_NATS = 1e30
_OPERANDS = {"x": "fprop_x", "w": "fprop_w", "dy": "dgrad_dy"}


@dataclass(frozen=True)
class OperandNumerics:
    """One cast.

    sqnr: dB.  clipped: share of values beyond the largest code of their block.  underflow: share of nonzero values that
    became zero. Both are None for a rotated operand.
    """

    sqnr: float | None
    clipped: float | None
    underflow: float | None


@dataclass(frozen=True, kw_only=True)
class ErrorFigures:
    """Figures of a layer, or of one of its experts. None means not quantized, or not measured.

    fprop, dgrad, wgrad: SQNR in dB of its products, -300 if the noise is not finite.  clipped, underflow: the largest
    share among its operands.  damage: estimated increase of the loss by fprop's noise in nats, 1e30 if not finite, None
    if the layer got no gradient.  operands: each cast by its role, such as "wgrad_dy".
    """

    fprop: float | None = None
    dgrad: float | None = None
    wgrad: float | None = None
    clipped: float = 0.0
    underflow: float = 0.0
    damage: float | None = None
    operands: dict[str, OperandNumerics] = field(default_factory=dict[str, OperandNumerics])


@dataclass(frozen=True)
class ExpertNumerics(ErrorFigures):
    """One expert.  rows: its rows of the batch; without any, only its weight has figures."""

    rows: int


@dataclass(frozen=True)
class LayerNumerics(ErrorFigures):
    """One layer.

    x, w, dy: SQNR in dB of its operands in fprop and dgrad.  gradient: norm of its weight's gradient.  experts: of a
    grouped layer.
    """

    layer: str
    x: float | None = None
    w: float | None = None
    dy: float | None = None
    gradient: float = 0.0
    experts: tuple[ExpertNumerics, ...] = ()


@dataclass(frozen=True)
class Numerics:
    """A model on one batch.  loss: of the batch."""

    loss: float
    layers: tuple[LayerNumerics, ...]


@dataclass
class Sample:
    """Sums on the device.  tokens: number of terms that the loss is the mean of.  sums: by layer."""

    loss: Tensor
    tokens: int
    sums: dict[str, Sums]

    def read(self) -> Numerics:
        """Copy the sums to the host, which waits for the device, and convert them to decibels and shares."""
        flat = [value.flatten().to(self.loss.device) for sums in self.sums.values() for value in sums.values()]
        numbers = iter(torch.cat([self.loss.double().reshape(1), *flat]).tolist())
        loss = next(numbers)
        layers: list[LayerNumerics] = []
        for name, sums in self.sums.items():
            found = {key: [next(numbers) for _ in range(value.numel())] for key, value in sums.items()}
            layers.append(_layer(name, found, 0.5 * self.tokens))
        return Numerics(loss, tuple(layers))


def layer_numerics(
    model: torch.nn.Module, loss: Callable[[], Tensor], *, tokens: int | None = None
) -> list[LayerNumerics]:
    """Numerics of every quantized layer, see `sample`.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))
    >>> _ = bs.quantize_(model, "mxfp8", filter_fn=lambda module, name: True)
    >>> found = layer_numerics(model, lambda: model(torch.randn(64, 128)).square().mean())
    >>> [each.layer for each in found], 25 < found[0].fprop < 35
    (['0', '2'], True)
    """
    return list(sample(model, loss, tokens=tokens).read().layers)


def sample(model: torch.nn.Module, loss: Callable[[], Tensor], *, tokens: int | None = None) -> Sample:
    """Run a batch forward and backward in eager mode, and measure every quantized layer.

    loss: runs the batch and returns the mean loss.  tokens: the number of terms of that mean; by default the rows of
    the first layer. Gradients, buffers and generators are restored; the host does not wait for the device. With a
    sharded model every rank measures its own rows, and all ranks must take the sample together.
    """
    layers = _layers_of(model)
    _check(layers, loss, tokens)
    with restored_state(model) as before_backward:
        with capture_calls(layers) as (calls, rows), torch.compiler.set_stance("force_eager"), torch.enable_grad():
            value = loss()
            _check_loss(value)
            before_backward(value)
            clear_gradients(calls)
            value.backward()
        with torch.no_grad():
            # in the order of the model, not of the calls
            sums = {
                name: layer_sums(each, calls_with_gradient(calls[name]))
                for name, each in layers.items()
                if calls.get(name)
            }
    return Sample(value.detach(), tokens or next(iter(rows), 1), sums)


def _layers_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Quantized layers with one weight, by name."""
    low = {
        module_name(name) or ROOT: each
        for name, each in model.named_modules()
        if isinstance(each, RecipeModule) and each.recipe_now.is_quantized
    }
    layers: dict[str, torch.nn.Module]
    layers = {name: each for name, each in low.items() if isinstance(each, torch.nn.Linear | GroupedLinear)}
    if low and not layers:
        name, layer = next(iter(low.items()))
        refuse(
            f"{name} is a {type(layer).__name__}, and no other layer is quantized",
            "layers with one weight can be measured, not experts in a module of another library",
            "compare losses instead: blockscale compare",
        )
    return layers


def _check(layers: dict[str, torch.nn.Module], loss: object, tokens: int | None) -> None:
    if not callable(loss):
        rule = "loss is a function that runs a batch, so that hooks see its layers"
        refuse(f"loss={type(loss).__name__}", rule, "pass lambda: loss_of(model(batch))")
    if tokens is not None and tokens < 1:
        refuse(f"tokens={tokens}", "a loss is the mean of one term at least", "leave it out")
    bare = next((name for name, each in layers.items() if any(p.is_meta for p in each.parameters())), None)
    if bare is not None:
        refuse(
            f"{bare} is on the meta device",
            "a sample runs the model",
            "move it to a device with to_empty and load its weights first",
        )


def _check_loss(value: object) -> None:
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        what = f"{tuple(value.shape)}, {'with' if value.requires_grad else 'without'} a gradient"
    rule = "it is a scalar that requires grad: the mean loss over tokens"
    refuse(f"loss() returned {what}", rule, "return the loss itself, not detached")


# ---- sums to numbers -------------------------------------------------------------------------------------------------


def _layer(name: str, sums: dict[str, list[float]], nats: float) -> LayerNumerics:
    operands, groups = _operands(sums), len(sums["load"])
    return LayerNumerics(
        name,
        **{letter: operands[role].sqnr if role in operands else None for letter, role in _OPERANDS.items()},
        **_figures(sums, operands, nats),
        gradient=sum(sums.get("gradient", ())),
        experts=tuple(_expert(sums, at, nats) for at in range(groups)) if groups > 1 else (),
    )


def _expert(sums: dict[str, list[float]], at: int, nats: float) -> ExpertNumerics:
    """Numerics of one group. Sums without a value per group, such as the norm of the gradient, are left out."""
    groups = len(sums["load"])
    sizes = {key: len(values) // groups for key, values in sums.items()}
    own = {key: values[at * sizes[key] : (at + 1) * sizes[key]] for key, values in sums.items() if sizes[key]}
    operands, rows = _operands(own), int(own["load"][0])
    if not rows:
        operands = {role: each for role, each in operands.items() if role.endswith("_w")}
    return ExpertNumerics(rows, **_figures(own, operands, nats))


def _figures(sums: dict[str, list[float]], operands: dict[str, OperandNumerics], nats: float) -> dict[str, Any]:
    """Fields of `ErrorFigures`."""
    figures: dict[str, Any] = {product: _decibels(sums, product) for product in PRODUCTS} | {"operands": operands}
    for name in ("clipped", "underflow"):
        figures[name] = max((getattr(each, name) or 0.0 for each in operands.values()), default=0.0)
    if "damage" in sums:
        damage = nats * sum(sums["damage"])
        figures["damage"] = damage if math.isfinite(damage) else LOST_NATS
    return figures


def _operands(sums: dict[str, list[float]]) -> dict[str, OperandNumerics]:
    roles = [key.removesuffix(".signal") for key in sorted(sums) if key.endswith(".signal") and "_" in key]
    return {
        role: OperandNumerics(
            _decibels(sums, role),
            _portion(sums, role, "clipped", "values"),
            _portion(sums, role, "underflow", "nonzero"),
        )
        for role in roles
    }


def _portion(sums: dict[str, list[float]], role: str, part: str, whole: str) -> float | None:
    if f"{role}.{part}" not in sums:
        return None
    return sum(sums[f"{role}.{part}"]) / max(1.0, sum(sums[f"{role}.{whole}"]))


def _decibels(sums: dict[str, list[float]], what: str) -> float | None:
    """SQNR in dB; None without a signal."""
    if f"{what}.signal" not in sums:
        return None
    signal, noise = sum(sums[f"{what}.signal"]), sum(sums[f"{what}.noise"])
    if signal == 0:
        return None
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -EXACT_DB
    return EXACT_DB if noise == 0 else max(-EXACT_DB, min(EXACT_DB, 10 * math.log10(signal / noise)))
