"""What a recipe does to each layer of a model, on one batch: noise of its operands and of its three products, for each
expert too, and what that noise does to the loss.

`sample` runs the batch once more beside training, with hooks that are gone when it returns: training's own steps are
never touched, so they may be compiled, captured or fused, and their results do not change by a bit. What it finds stays
on the device until it is read.

Damage is a guess of the loss that a layer's forward noise costs, in nats: half the mean over tokens of (g . noise)^2,
where g is the gradient of the summed loss by the layer's result. That is the second-order term for a loss that is a
log-likelihood, with its curvature estimated by squared gradients (docs/diagnostics.md has the limits).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError, message
from ..formats.stochastic import module_name
from ..grouped import Routing
from ..nn import GroupedLinear, Linear
from ..nn.convert import ROOT
from .figures import LOWEST, Seen, Sums, layer_sums

# rows of a call that are looked at, evenly spread, and at least so many for each expert; multiples of every block
ROWS, EXPERT_ROWS = 512, 32
# of what is exact: JSON has no infinity
EXACT_DB = 300.0
_OPERANDS = {"x": "fprop_x", "w": "fprop_w", "dy": "dgrad_dy"}


@dataclass(frozen=True)
class OperandNumerics:
    """One cast.  sqnr: decibels.  clipped: share of values beyond the largest code of their block.  underflow: share of
    nonzero values that became zero; None where a rotation moves values.  scales: block scales by exponent."""

    sqnr: float | None
    clipped: float | None
    underflow: float | None
    scales: dict[int, int]


@dataclass(frozen=True)
class ExpertNumerics:
    """One expert.  rows: of the batch.  The rest as for a layer; None for an expert without rows."""

    rows: int
    fprop: float | None
    dgrad: float | None
    wgrad: float | None
    clipped: float
    underflow: float
    damage: float


@dataclass(frozen=True)
class LayerNumerics:
    """One layer.  x, w, dy: decibels of its operands in the forward and in dgrad.  fprop, dgrad, wgrad: of its
    products.  clipped, underflow: the largest share among its operands.  damage: nats of loss that fprop's noise may
    cost.  gradient: norm of its weight's gradient.  operands: each cast by its role, such as "wgrad_dy".  experts: of
    a layer that has some.  None: not in low precision, or not seen."""

    layer: str
    x: float | None = None
    w: float | None = None
    dy: float | None = None
    fprop: float | None = None
    dgrad: float | None = None
    wgrad: float | None = None
    clipped: float = 0.0
    underflow: float = 0.0
    damage: float = 0.0
    gradient: float = 0.0
    operands: dict[str, OperandNumerics] = field(default_factory=dict[str, OperandNumerics])
    experts: tuple[ExpertNumerics, ...] = ()


@dataclass(frozen=True)
class Numerics:
    """A model on one batch.  loss: of the batch."""

    loss: float
    layers: tuple[LayerNumerics, ...]


@dataclass
class Sample:
    """What was found, on the device.  tokens: terms that the loss is the mean of.  shares: of each layer's rows."""

    loss: Tensor
    tokens: int
    sums: dict[str, Sums]
    shares: dict[str, float]

    def read(self) -> Numerics:
        """Wait for the device, and make decibels and shares of sums."""
        flat = [value for sums in self.sums.values() for value in sums.values()]
        numbers = iter(torch.cat([self.loss.double().reshape(1), *flat]).tolist())
        loss = next(numbers)
        layers: list[LayerNumerics] = []
        for name, sums in self.sums.items():
            found = {key: [next(numbers) for _ in range(value.numel())] for key, value in sums.items()}
            layers.append(_layer(name, found, 0.5 * self.tokens / self.shares[name]))
        return Numerics(loss, tuple(layers))


def layer_numerics(
    model: torch.nn.Module, loss: Callable[[], Tensor], *, tokens: int | None = None
) -> list[LayerNumerics]:
    """Measure every layer in low precision, see `sample`.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))
    >>> _ = bs.quantize_(model, "mxfp8", filter_fn=lambda module, name: True)
    >>> found = layer_numerics(model, lambda: model(torch.randn(64, 128)).square().mean())
    >>> [each.layer for each in found], 25 < found[0].fprop < 35
    (['0', '2'], True)
    """
    return list(sample(model, loss, tokens=tokens).read().layers)


def sample(model: torch.nn.Module, loss: Callable[[], Tensor], *, tokens: int | None = None) -> Sample:
    """Run a batch forward and backward, not compiled, and measure every layer in low precision.

    loss: runs the batch and returns a mean.  tokens: how many terms it is the mean of; by default the rows of the first
    layer. Gradients, buffers and generators are left as they were; the host does not wait for the device.
    """
    _check_no_steps(model)
    layers = {module_name(name) or ROOT: each for name, each in model.named_modules() if _is_low(each)}
    seen: dict[str, Seen] = {}
    calls: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(_untouched(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(_watch(name, seen, calls), with_kwargs=True).remove)
        with torch.enable_grad():
            value = loss()
            value.backward()
        with torch.no_grad():
            # in the order of the model, whatever the order of calls
            sums = {name: layer_sums(layer, seen[name]) for name, layer in layers.items() if name in seen}
    return Sample(value.detach(), tokens or next(iter(calls), 1), sums, {name: seen[name].share for name in sums})


# ---- watching --------------------------------------------------------------------------------------------------------


def _check_no_steps(model: torch.nn.Module) -> None:
    """Raise where a backward is more than that: hooks that step a parameter when its gradient is there."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise OptionError(
                message(
                    f"a sample of a model whose {name} has a hook behind its gradient",
                    rule="a sample leaves the model as it was, and such a hook may be an optimizer's step",
                    fix="take the sample before hooks are registered, or remove them meanwhile",
                )
            )


def _is_low(module: torch.nn.Module) -> bool:
    return isinstance(module, Linear | GroupedLinear) and module.recipe_now.is_low


def _watch(name: str, seen: dict[str, Seen], calls: list[int]) -> Callable[..., None]:
    def look(module: torch.nn.Module, args: Any, named: dict[str, Any], output: Tensor) -> None:
        # recomputed in the backward, or used twice: the first call counts of those that gradients come back to, which
        # is the second where a checkpoint ran the first without them
        if name in seen and (seen[name].has_gradient or not output.requires_grad):
            return
        given = (*args, *named.values())
        x: Tensor = getattr(given[0], "source", given[0]).detach()
        x = x.reshape(-1, x.shape[-1])
        if not x.shape[0]:
            return
        calls.append(x.shape[0])
        found, step = _rows_of(x, given[1]) if isinstance(module, GroupedLinear) else _dense_rows(x)
        seen[name] = found
        found.has_gradient = output.requires_grad
        if output.requires_grad:
            output.register_hook(lambda dy: setattr(found, "dy", _every(dy.detach(), step)))

    return look


def _every(x: Tensor, step: int) -> Tensor:
    return x.reshape(-1, x.shape[-1])[::step].contiguous()


def _dense_rows(x: Tensor) -> tuple[Seen, int]:
    step = _step(x.shape[0], ROWS)
    rows = _every(x, step)
    return Seen(rows, torch.full((1,), x.shape[0], device=x.device), _share(rows, x.shape[0])), step


def _rows_of(x: Tensor, where: Tensor | Routing) -> tuple[Seen, int]:
    """Of experts: every n-th of the sorted rows, so every n-th of each expert's."""
    offs = where.offs if isinstance(where, Routing) else where
    total = where.tokens.shape[0] if isinstance(where, Routing) else x.shape[0]
    step = _step(total, max(ROWS, EXPERT_ROWS * offs.shape[0]))
    rows = x[where.tokens[::step]] if isinstance(where, Routing) else _every(x, step)
    load = torch.diff(offs, prepend=offs.new_zeros(1))
    return Seen(rows, load, _share(rows, total), (offs + (step - 1)) // step), step


def _step(rows: int, most: int) -> int:
    return max(1, -(-rows // most))


def _share(rows: Tensor, total: int) -> float:
    return rows.shape[0] / max(1, total)


@contextmanager
def _untouched(model: torch.nn.Module) -> Generator[None]:
    """Whatever a forward and backward change is as before: gradients, buffers such as loads, and generators."""
    parameters = [(each, each.grad, getattr(each, "main_grad", None)) for each in model.parameters()]
    buffers = [(each, each.clone()) for each in model.buffers()]
    gpus = {each.device for each, _, _ in parameters if each.is_cuda}
    for parameter, _, buffer in parameters:
        parameter.grad = None
        if buffer is not None:
            parameter.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for parameter, gradient, buffer in parameters:
            parameter.grad = gradient
            if buffer is not None:
                parameter.main_grad = buffer  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            for each, before in buffers:
                each.copy_(before)


# ---- sums to numbers -------------------------------------------------------------------------------------------------


def _layer(name: str, sums: dict[str, list[float]], nats: float) -> LayerNumerics:
    operands = {role: _operand(sums, role) for role in sorted({key[:-7] for key in sums if key.endswith(".scales")})}
    products = {product: _decibels(sums, product) for product in ("fprop", "dgrad", "wgrad")}
    grouped = len(sums["load"]) > 1
    return LayerNumerics(
        name,
        **{letter: operands[role].sqnr if role in operands else None for letter, role in _OPERANDS.items()},
        **products,
        clipped=max((each.clipped or 0.0 for each in operands.values()), default=0.0),
        underflow=max((each.underflow or 0.0 for each in operands.values()), default=0.0),
        damage=nats * sum(sums.get("damage", ())),
        gradient=sum(sums.get("gradient", ())),
        operands=operands,
        experts=tuple(_expert(sums, at, nats) for at in range(len(sums["load"]))) if grouped else (),
    )


def _operand(sums: dict[str, list[float]], role: str) -> OperandNumerics:
    counts = enumerate(map(int, sums[f"{role}.scales"]), LOWEST)
    return OperandNumerics(
        _decibels(sums, role),
        _portion(sums, role, "clipped", "values"),
        _portion(sums, role, "underflow", "nonzero"),
        {exponent: count for exponent, count in counts if count},
    )


def _expert(sums: dict[str, list[float]], at: int, nats: float) -> ExpertNumerics:
    one = {key: values[at : at + 1] for key, values in sums.items() if len(values) == len(sums["load"])}
    rows = int(one["load"][0])
    roles = {key.partition(".")[0] for key in one if key.endswith(".values")}
    lost = {
        lost: max((_portion(one, role, lost, of) or 0.0 for role in roles), default=0.0)
        for lost, of in (("clipped", "values"), ("underflow", "nonzero"))
    }
    decibels = {product: _decibels(one, product) for product in ("fprop", "dgrad", "wgrad")}
    return ExpertNumerics(rows, **decibels, **lost, damage=nats * sum(one.get("damage", ())))


def _portion(sums: dict[str, list[float]], role: str, part: str, whole: str) -> float | None:
    if f"{role}.{part}" not in sums:
        return None
    return sum(sums[f"{role}.{part}"]) / max(1.0, sum(sums[f"{role}.{whole}"]))


def _decibels(sums: dict[str, list[float]], what: str) -> float | None:
    """Of signal over noise; None where there is no signal, or no number."""
    if f"{what}.signal" not in sums:
        return None
    signal, noise = sum(sums[f"{what}.signal"]), sum(sums[f"{what}.noise"])
    if not (0 < signal < math.inf) or not math.isfinite(noise):
        return None
    return EXACT_DB if noise == 0 else min(EXACT_DB, 10 * math.log10(signal / noise))
