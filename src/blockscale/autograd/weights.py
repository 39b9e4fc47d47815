"""Weights that are cast once per optimizer step, and shared by all microbatches until the next one.

A stale cast would silently train a model on old weights, so a cast is shared only once a refresh is set up:
`attach(optimizer, model)` casts again after every step of that optimizer, fused or not; `refresh_weights_` casts by
hand. Version counters are not enough (fused optimizers, `.data` and replayed graphs do not increment them), but a
change that they show is heeded: the weight is cast again. So is a weight that another optimizer has stepped, or that
was loaded or moved. A parameter that replaces another is not shared until the next refresh. A weight made in inference
mode has no version counter: it is not shared, and every forward casts it.
Not detected are writes to `weight.data` outside of an optimizer, and in compiled code any write outside of one: call
`invalidate` or `refresh_weights_` after them. BLOCKSCALE_CHECK_WEIGHTS=1 compares all bytes in every eager forward.

Operands are refreshed in place: compiled graphs and CUDA graphs read the new values, and a refresh between a forward
and its backward is an error. Cost: 2 bytes for each element of an 8-bit weight.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .. import env
from ..casts import ops
from ..errors import StaleWeightError, message, refuse
from ..formats.cast_spec import Cast, flatten_cast
from ..formats.checks import check_model
from ..formats.tensor import assemble
from ..library import OPERATORS
from .operands import Casts, Pair
from .recipe import Recipe
from .stamps import Stamp, stamp_of, storage_of

if TYPE_CHECKING:
    from torch.nn import Module

CHECK = "BLOCKSCALE_CHECK_WEIGHTS"
_SHARED: weakref.WeakSet[SharedWeight] = weakref.WeakSet()
# optimizer -> models whose casts it refreshes; neither is kept alive
_ATTACHED: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[Module]]] = weakref.WeakKeyDictionary()


class SharedWeight:
    """Row and column operand of a weight [N, K] or [E, N, K], cast once per optimizer step.

    transposed: the parameter is stored as [.., K, N].  is_open: whether operands are shared, from the first refresh on.
    is_valid: whether they are casts of the present values. Not part of a module's state: copies and pickles are not
    open.
    """

    # whether the weight may be a shard, which is cast before it is gathered
    takes_shards: ClassVar[bool] = False

    def __init__(self, *, transposed: bool = False) -> None:
        self._transposed = transposed
        # no weak reference: swap_tensors refuses tensors with weak references
        self._weight: Tensor | None = None
        self._stamp: Stamp | None = None
        # held so that the weight's address is not reused
        self._storage: torch.UntypedStorage | None = None
        # plain bools: compiled code guards on them, and the stamp changes with every step
        self.is_open = False
        self.is_valid = False
        self._shape = torch.Size()
        self._recipe: Recipe | None = None
        self._specs: tuple[Cast | None, Cast | None] = (None, None)
        self._buffers: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._pair: Pair = (None, None)
        self.casts = 0

    def __deepcopy__(self, memo: dict[int, object]) -> SharedWeight:
        return SharedWeight(transposed=self._transposed)

    def __reduce__(self) -> tuple[Callable[..., SharedWeight], tuple[()]]:
        return functools.partial(SharedWeight, transposed=self._transposed), ()

    def operands(self, weight: Tensor, recipe: Recipe) -> Pair | None:
        """Operands for a forward; None if the forward has to cast the weight itself."""
        if not self.is_open:
            return None
        if self._weight is not weight:  # another parameter, which no refresh has seen
            return None
        if torch.compiler.is_compiling():  # the graph reads operands that are refreshed in place
            return self._pair if self.is_valid and self._recipe == recipe else None
        stamp = stamp_of(weight)
        if stamp is None:
            return None
        if not (self.is_valid and self._stamp == stamp and self._recipe == recipe):
            self.refresh(weight, recipe)
        elif env.flag(CHECK):
            self._compare(weight)
        return self._pair

    @torch.no_grad()
    def refresh(self, weight: Tensor, recipe: Recipe) -> None:
        """Cast the weight again, into the same storage if it fits. Operands are shared from here on."""
        check_can_be_shared(weight)
        casts = Casts(recipe)
        specs = casts.spec("fprop_w", weight), casts.spec("dgrad_w", weight)
        fits = self._weight is weight and self._shape == weight.shape and self._recipe == recipe
        device = self._buffers[0][0].device if self._buffers else None
        # the first refresh may happen during an evaluation, and a backward reads its operands later
        with torch.inference_mode(False):
            source = weight.mT if self._transposed else weight
            if not fits or device != weight.device:
                self._allocate(source, specs)
            else:
                self._rewrite(source)
        self._weight, self._shape, self._recipe = weight, weight.shape, recipe
        self._stamp, self._storage = stamp_of(weight), storage_of(weight)
        self.is_open = self.is_valid = True
        self.casts += 1
        _SHARED.add(self)

    def _allocate(self, weight: Tensor, specs: tuple[Cast | None, Cast | None]) -> None:
        self._specs = specs
        buffers: list[tuple[Tensor, Tensor, Tensor | None]] = []
        row, col = specs
        if row is not None and col is not None:
            results = OPERATORS["quantize_both"](weight, *flatten_cast(row), *flatten_cast(col), None, False)
            buffers = [results[0:3], results[3:6]]
        else:
            for spec, axis in ((row, -1), (col, -2)):
                if spec is not None:
                    buffers.append(OPERATORS["quantize"](weight, *flatten_cast(spec), axis, None))
        self._buffers = buffers
        filled = iter(buffers)
        pair = [
            None if spec is None else assemble(spec.plan, next(filled), weight.shape, axis)
            for spec, axis in ((row, -1), (col, -2))
        ]
        self._pair = (pair[0], pair[1])

    def _rewrite(self, weight: Tensor) -> None:
        row, col = self._specs
        if row is not None and col is not None:
            first, second = self._buffers
            ops.requantize_both_(*_writable(first), *_writable(second), weight, row, col)
        elif row is not None:
            ops.requantize_(*_writable(self._buffers[0]), weight, row, -1)
        elif col is not None:
            ops.requantize_(*_writable(self._buffers[0]), weight, col, -2)

    def invalidate(self) -> None:
        """Mark the operands as stale: the next forward casts again."""
        self.is_valid, self._storage = False, None

    def steps_with(self, params: set[int]) -> bool:
        """Whether the weight is among these parameters, by id."""
        return self._weight is not None and id(self._weight) in params

    def _compare(self, weight: Tensor) -> None:
        fresh = SharedWeight()
        fresh._allocate(weight.detach().mT if self._transposed else weight.detach(), self._specs)
        for mine, new in zip(self._buffers, fresh._buffers, strict=True):
            for old, recast in zip(mine, new, strict=True):
                if old is not None and recast is not None and not torch.equal(_bytes(old), _bytes(recast)):
                    refuse(
                        f"a shared cast of a weight {tuple(weight.shape)} is not the cast of its present values",
                        rule="a write to weight.data outside of an attached optimizer needs a refresh after it",
                        fix="call blockscale.refresh_weights_(model) after the write",
                        error=StaleWeightError,
                    )


def _writable(buffers: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Buffers as arguments of a requantize operator: as bytes, since not every compiler pass knows FP4."""
    data, scale, factor = buffers
    return _bytes(data), _bytes(scale) if scale.element_size() == 1 else scale, _none_if_empty(factor)


def _none_if_empty(factor: Tensor | None) -> Tensor | None:
    return None if factor is None or factor.numel() == 0 else factor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def check_can_be_shared(weight: Tensor) -> None:
    """Raise for weights without a version counter, and for sharded weights."""
    if weight.is_inference():
        refuse(
            f"a shared cast of a weight {tuple(weight.shape)} that was made in inference mode",
            rule="such a tensor has no version counter, so a stale cast could not be detected",
            fix="make or move the model outside of torch.inference_mode, or use weight_cast='forward'",
        )
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    if isinstance(weight, DTensor):
        _refuse(weight)


def _refuse(weight: Tensor) -> None:
    refuse(
        f"a shared cast of a sharded weight {tuple(weight.shape)}",
        rule="between steps a rank has only its shard, and the gathered weight is freed after each forward",
        fix="call blockscale.distributed.gather_low_(model) before fully_shard, which quantizes shards, or use "
        "weight_cast='twice': it saves no operand of the gathered weight",
    )


def _check_not_gathered(model: Module) -> None:
    """Raise for layers within FSDP, which gathers weights into the same tensors without incrementing a version counter.
    Between a forward and its backward they look whole; between steps they may have no memory."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # FSDP is not in use, so it is not imported
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
            for _, layer, name, shared in shared_weights(module):
                if not shared.takes_shards:
                    _refuse(getattr(layer, name))


# ---- refreshing weights ----------------------------------------------------------------------------------------------


def shared_weights(model: Module) -> list[tuple[str, Module, str, SharedWeight]]:
    """Weights of a model whose cast is shared by a step: name of the layer, layer, name of the parameter, cast."""
    found: list[tuple[str, Module, str, SharedWeight]] = []
    for name, module in model.named_modules():
        # vars: getattr of a wrapper (torch.compile, checkpoint_wrapper) finds the layer's attribute too
        shared = vars(module).get("shared_weight")
        several = {"weight": shared} if isinstance(shared, SharedWeight) else vars(module).get("shared_weights")
        if isinstance(several, dict):
            found += ((name, module, each, cast) for each, cast in several.items() if isinstance(cast, SharedWeight))
    return found


def refresh_weights_(model: Module) -> int:
    """Cast again every weight whose recipe has weight_cast="step"; returns their number.

    Call it after the optimizer's step, or use `attach`. Before the first call nothing is shared.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> report = bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step"))
    >>> bs.refresh_weights_(model)
    2
    """
    return len(_refresh(model))


def _refresh(model: Module, exclude: Container[int] = ()) -> list[int]:
    """Cast a model's weights again; returns the ids of their casts.  exclude: ids of parameters to leave if valid."""
    check_model(model, "layers of a torch.nn.Module share the casts of their weights")
    _check_not_gathered(model)
    done: list[int] = []
    for _, module, name, shared in shared_weights(model):
        weight = getattr(module, name)
        if id(weight) not in exclude or not shared.is_valid:
            shared.refresh(weight, module.recipe_now)  # pyright: ignore[reportArgumentType]
        done.append(id(shared))
    return done


def invalidate(model: Module) -> None:
    """Mark the shared casts of a model as stale: the next forward casts its weights again.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> report = bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step"))
    >>> layers = bs.refresh_weights_(model)
    >>> _ = model[0].weight.data.mul_(2)
    >>> bs.invalidate(model)
    """
    check_model(model, "layers of a torch.nn.Module share the casts of their weights")
    for *_, shared in shared_weights(model):
        shared.invalidate()


def attach(optimizer: Optimizer, model: Module) -> None:
    """Cast the weights of a model now, and after every step of this optimizer.

    If several optimizers are attached to a model, each refreshes the weights that it steps. A model in which no layer
    has a recipe is an error. A model without a quantized recipe with weight_cast="step" gets a warning, since there is
    nothing to do, and so does an optimizer that holds none of the model's parameters.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> report = bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step"))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> bs.attach(optimizer, model)
    """
    if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"attach to a {type(optimizer).__name__}",
            rule="attach uses the step hooks of a torch optimizer",
            fix="call refresh_weights_(model) after every step yourself",
        )
    refresh_weights_(model)
    _check_has_weights(optimizer, model)
    known = (each() for each in _ATTACHED.get(optimizer, ()))
    others = [each for each in known if each is not None and each is not model]
    _ATTACHED[optimizer] = [weakref.ref(each) for each in (*others, model)]


def _check_has_weights(optimizer: Optimizer, model: Module) -> None:
    """Raise or warn if the optimizer would have no cast to refresh."""
    found = [vars(module).get("recipe") for module in model.modules()]
    recipes = [each for each in found if isinstance(each, Recipe)]
    if not recipes:
        refuse(
            f"attach to a {type(model).__name__} in which no layer has a recipe",
            rule="an attached optimizer refreshes the casts of weights, and plain layers have none",
            fix="call blockscale.quantize_(model, recipe) first, with a recipe that has weight_cast='step', and "
            "print the report: it lists the layers that were not converted, and why",
        )
    quantized = [each for each in recipes if each.is_quantized]
    if not any(each.weight_cast == "step" for each in quantized):
        said = " and ".join(sorted({repr(each.weight_cast) for each in quantized}))
        names = " and ".join(sorted({each.name.rstrip("*") for each in recipes}))  # "*": changed by replace
        what = f"have weight_cast={said}" if quantized else f"are unquantized ({names})"
        name = quantized[0].name.rstrip("*") if quantized else "mxfp8"
        _warn(
            f"attach has nothing to do: the {len(quantized or recipes)} layers with a recipe {what}",
            rule="weights are cast once per optimizer step if a quantized recipe has weight_cast='step'",
            fix=f"convert with get_recipe({name!r}).replace(weight_cast='step'), or leave attach out",
        )
    elif _params(optimizer).isdisjoint(map(id, model.parameters())):
        _warn(
            f"attach to an optimizer ({type(optimizer).__name__}) that holds none of the model's parameters",
            rule="weights are cast again after a step of the optimizer that writes them",
            fix="attach the optimizer that was made with model.parameters(); ignore this warning if this one steps "
            "copies of them and writes those back",
        )


def _warn(what: str, *, rule: str, fix: str) -> None:
    """Warn at the line that calls `attach`."""
    warnings.warn(message(what, rule=rule, fix=fix), stacklevel=4)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Step hook of every optimizer: refresh attached models, invalidate the other shared casts of its parameters."""
    if not _SHARED and optimizer not in _ATTACHED:
        return
    params = _params(optimizer)
    fresh: set[int] = set()
    for known in _ATTACHED.get(optimizer, ()):
        model = known()
        if model is None:
            continue
        others: set[int] = set()
        for other in _attached_to(model):
            if other is not optimizer:
                others |= _params(other)
        fresh.update(_refresh(model, exclude=others - params))
    for shared in _SHARED:
        if id(shared) not in fresh and shared.steps_with(params):
            shared.invalidate()


def _params(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _attached_to(model: Module) -> list[Optimizer]:
    return [each for each, models in _ATTACHED.items() if any(known() is model for known in models)]


register_optimizer_step_post_hook(_after_step)
