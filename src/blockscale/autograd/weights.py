"""Weights that are cast once per optimizer step, and shared by all microbatches until the next one.

A stale weight would train a model on numbers that it no longer has, so sharing begins only when somebody says who keeps
it fresh: `attach(optimizer, model)` casts again after every step of that optimizer, fused or not, `refresh_weights_`
does it by hand. Version counters alone cannot be trusted (fused optimizers, `.data` and replayed graphs do not count),
but where they do count they are heeded: a weight that is seen to have changed is cast again. So is one that another
optimizer has stepped, that was loaded or moved. A parameter that took its place is not shared until the next refresh.
A weight made in inference mode counts no changes: it is not shared, and every forward casts it.
What nobody can see is a write to `weight.data` outside of an optimizer, and in compiled code any write outside of one:
then call `invalidate` or `refresh_weights_`. BLOCKSCALE_CHECK_WEIGHTS=1 compares all bytes in every forward that is not
compiled.

Operands keep their storage, which is refreshed in place: compiled graphs and CUDA graphs go on reading what is fresh,
and a refresh between a forward and its backward is an error. Cost: 2 bytes for each element of an 8-bit weight.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .. import env
from ..casts import ops
from ..errors import OptionError, StaleWeightError, message
from ..formats.checks import check_model
from ..formats.tensor import assemble
from .operands import Casts, Pair, Resolved
from .recipe import Recipe
from .stamps import Stamp, stamp_of, storage_of

if TYPE_CHECKING:
    from torch.nn import Module

_CHECK = "BLOCKSCALE_CHECK_WEIGHTS"
_SHARED: weakref.WeakSet[SharedWeight] = weakref.WeakSet()
# models that an optimizer keeps fresh; both may go away
_ATTACHED: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[Module]]] = weakref.WeakKeyDictionary()


class SharedWeight:
    """The operands of one weight [N, K], or of the weights [E, N, K] of experts, and whether they are those of its
    present values.

    transposed: the parameter is stored as [.., K, N].  Not part of a module's state: copies and pickles of it start
    closed, that is, sharing nothing.
    """

    def __init__(self, *, transposed: bool = False) -> None:
        self._transposed = transposed
        # no weak reference: swap_tensors takes no tensor that has one
        self._weight: Tensor | None = None
        self._stamp: Stamp | None = None
        # the weight's memory, held so that no later values are given its address
        self._storage: torch.UntypedStorage | None = None
        # asked by compiled code, so not to be told from what changes with every step
        self.is_open = False
        self.is_valid = False
        self._shape = torch.Size()
        self._recipe: Recipe | None = None
        self._specs: tuple[Resolved | None, Resolved | None] = (None, None)
        self._buffers: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._pair: Pair = (None, None)
        self.casts = 0

    def __deepcopy__(self, memo: dict[int, object]) -> SharedWeight:
        return SharedWeight(transposed=self._transposed)

    def __reduce__(self) -> tuple[Callable[..., SharedWeight], tuple[()]]:
        return functools.partial(SharedWeight, transposed=self._transposed), ()

    def operands(self, weight: Tensor, recipe: Recipe) -> Pair | None:
        """What a forward takes; None: it casts by itself, as long as nobody keeps operands fresh."""
        if not self.is_open:
            return None
        if self._weight is not weight:  # nobody has said who keeps this one fresh
            return None
        if torch.compiler.is_compiling():  # the owner refreshes in place what a graph reads
            return self._pair if self.is_valid and self._recipe == recipe else None
        stamp = stamp_of(weight)
        if stamp is None:
            return None
        if not (self.is_valid and self._stamp == stamp and self._recipe == recipe):
            self.refresh(weight, recipe)
        elif env.flag(_CHECK):
            self._compare(weight)
        return self._pair

    @torch.no_grad()
    def refresh(self, weight: Tensor, recipe: Recipe) -> None:
        """Cast the weight again, into the same storage where it still fits. Opens the sharing."""
        check_can_be_shared(weight)
        casts = Casts(recipe)
        specs = casts.spec("fprop_w", weight), casts.spec("dgrad_w", weight)
        fits = self._weight is weight and self._shape == weight.shape and self._recipe == recipe
        device = self._buffers[0][0].device if self._buffers else None
        # an evaluation may be the first to need what a backward will use
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

    def _allocate(self, weight: Tensor, specs: tuple[Resolved | None, Resolved | None]) -> None:
        self._specs = specs
        made: list[tuple[Tensor, Tensor, Tensor | None]] = []
        row, col = specs
        if row is not None and col is not None:
            texts, nothing = (row[1].text(), col[1].text()), (None,) * 4
            results = ops.quantize_both(weight, *texts, *nothing, None, False)
            made = [results[0:3], results[3:6]]
        else:
            for spec, axis in ((row, -1), (col, -2)):
                if spec is not None:
                    made.append(ops.quantize(weight, spec[1].text(), axis, None, None, None))
        self._buffers = made
        filled = iter(made)
        pair = [
            None if spec is None else assemble(spec[1], next(filled), weight.shape, axis)
            for spec, axis in ((row, -1), (col, -2))
        ]
        self._pair = (pair[0], pair[1])

    def _rewrite(self, weight: Tensor) -> None:
        row, col = self._specs
        if row is not None and col is not None:
            first, second = self._buffers
            ops.requantize_both_(*_given(first), *_given(second), weight, row[1].text(), col[1].text())
        elif row is not None:
            ops.requantize_(*_given(self._buffers[0]), weight, row[1].text(), -1)
        elif col is not None:
            ops.requantize_(*_given(self._buffers[0]), weight, col[1].text(), -2)

    def invalidate(self) -> None:
        """The operands are no longer those of the weight: the next forward casts again."""
        self.is_valid, self._storage = False, None

    def steps_with(self, params: set[int]) -> bool:
        """Whether its weight is among these."""
        return self._weight is not None and id(self._weight) in params

    def _compare(self, weight: Tensor) -> None:
        fresh = SharedWeight()
        fresh._allocate(weight.detach().mT if self._transposed else weight.detach(), self._specs)
        for mine, new in zip(self._buffers, fresh._buffers, strict=True):
            for kept, made in zip(mine, new, strict=True):
                if kept is not None and made is not None and not torch.equal(_bytes(kept), _bytes(made)):
                    raise StaleWeightError(
                        message(
                            f"a shared cast of a weight {tuple(weight.shape)} is not that of its values",
                            rule="whoever writes to weight.data outside of an attached optimizer has to say so",
                            fix="call blockscale.refresh_weights_(model) after the write",
                        )
                    )


def _given(buffers: tuple[Tensor, Tensor, Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Buffers as an operator that writes them takes them: bytes, since not every pass of a compiler knows FP4."""
    data, scale, factor = buffers
    return _bytes(data), _bytes(scale) if scale.element_size() == 1 else scale, _none_if_empty(factor)


def _none_if_empty(factor: Tensor | None) -> Tensor | None:
    return None if factor is None or factor.numel() == 0 else factor


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def check_can_be_shared(weight: Tensor) -> None:
    """Raise for weights whose changes are not counted, or whose whole is not here."""
    if weight.is_inference():
        raise OptionError(
            message(
                f"a shared cast of a weight {tuple(weight.shape)} that was made in inference mode",
                rule="torch counts no changes of such a tensor, so a cast could be stale without anybody knowing",
                fix="make or move the model outside of torch.inference_mode, or use weight_cast='forward'",
            )
        )
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    if isinstance(weight, DTensor):
        _refuse(weight)


def _refuse(weight: Tensor) -> None:
    raise OptionError(
        message(
            f"a shared cast of a sharded weight {tuple(weight.shape)}",
            rule="only a shard of it is here between steps, and what a forward gathers is gone after it",
            fix="use weight_cast='twice' under FSDP: nothing is kept that it would free",
        )
    )


def _check_not_gathered(model: Module) -> None:
    """Raise for layers within FSDP, which gathers weights into the same tensors again and again, counting nothing.
    Between a forward and its backward they look whole; between steps they may have no memory at all."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody shards: nothing to import for
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel):
            for _, layer, name, _ in shared_weights(module):
                _refuse(getattr(layer, name))


# ---- who keeps weights fresh -----------------------------------------------------------------------------------------


def shared_weights(model: Module) -> list[tuple[str, Module, str, SharedWeight]]:
    """The layers of a model whose recipe shares the cast of a weight: a layer's name, the layer, the name of its
    parameter, and the cast."""
    found: list[tuple[str, Module, str, SharedWeight]] = []
    for name, module in model.named_modules():
        # its own: what wraps a layer (torch.compile, checkpoint_wrapper) answers for it too
        shared = vars(module).get("shared_weight")
        several = {"weight": shared} if isinstance(shared, SharedWeight) else vars(module).get("shared_weights")
        if isinstance(several, dict):
            found += ((name, module, each, cast) for each, cast in several.items() if isinstance(cast, SharedWeight))
    return found


def refresh_weights_(model: Module) -> int:
    """Cast every weight of a model again whose recipe says weight_cast="step"; how many there were.

    Call it after the optimizer, or let `attach` do so. Before the first call nothing is shared.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> report = bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step"))
    >>> bs.refresh_weights_(model)
    2
    """
    return len(_refresh(model))


def _refresh(model: Module, left: Container[int] = ()) -> list[int]:
    """Cast a model's weights again, but for those of the parameters `left`; ids of what is fresh then."""
    check_model(model, "layers of a torch.nn.Module share the casts of their weights")
    _check_not_gathered(model)
    done: list[int] = []
    for _, module, name, shared in shared_weights(model):
        weight = getattr(module, name)
        if id(weight) not in left or not shared.is_valid:
            shared.refresh(weight, module.recipe_now)  # pyright: ignore[reportArgumentType]
        done.append(id(shared))
    return done


def invalidate(model: Module) -> None:
    """Say that weights were written to behind everybody's back: the next forward casts them again.

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
    """Cast the weights of a model now, and after every step of this optimizer. Where several are attached to a model,
    each has those casts made again whose weights it steps. A model without a layer that follows a recipe is an error;
    one without a low-precision recipe that says weight_cast="step" gets a warning, since there is nothing to do then,
    and so does an optimizer that holds none of the model's parameters.

    >>> import blockscale as bs
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> report = bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step"))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> bs.attach(optimizer, model)
    """
    if not isinstance(optimizer, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            message(
                f"attach to a {type(optimizer).__name__}",
                rule="a torch optimizer tells when it has stepped, others do not",
                fix="call refresh_weights_(model) after every step yourself",
            )
        )
    refresh_weights_(model)
    _check_there_is_something(optimizer, model)
    known = (each() for each in _ATTACHED.get(optimizer, ()))
    others = [each for each in known if each is not None and each is not model]
    _ATTACHED[optimizer] = [weakref.ref(each) for each in (*others, model)]


def _check_there_is_something(optimizer: Optimizer, model: Module) -> None:
    """Raise or warn where an optimizer would have no cast to keep fresh."""
    found = [vars(module).get("recipe") for module in model.modules()]
    recipes = [each for each in found if isinstance(each, Recipe)]
    if not recipes:
        raise OptionError(
            message(
                f"attach to a {type(model).__name__} without a layer that follows a recipe",
                rule="an optimizer keeps the casts of weights fresh, and plain layers have none",
                fix="call blockscale.quantize_(model, recipe) first, with a recipe that says weight_cast='step', and "
                "print what it returns: it may have kept every layer, and says why",
            )
        )
    casting = [each for each in recipes if each.is_quantized]
    if not any(each.weight_cast == "step" for each in casting):
        said = " and ".join(sorted({repr(each.weight_cast) for each in casting}))
        names = " and ".join(sorted({each.name.rstrip("*") for each in recipes}))  # "*": changed by replace
        what = f"have weight_cast={said}" if casting else f"are in high precision ({names})"
        name = casting[0].name.rstrip("*") if casting else "mxfp8"
        _warn(
            f"attach has nothing to do: the {len(casting or recipes)} layers that follow a recipe {what}",
            rule="weights are cast once per optimizer step where a low-precision recipe says weight_cast='step'",
            fix=f"convert with get_recipe({name!r}).replace(weight_cast='step'), or leave attach out",
        )
    elif _params(optimizer).isdisjoint(map(id, model.parameters())):
        _warn(
            f"attach to an optimizer ({type(optimizer).__name__}) that holds none of the model's parameters",
            rule="casts are made again after a step of the optimizer that writes the weights",
            fix="attach the optimizer that was made with model.parameters(); ignore this warning if this one steps "
            "copies of them and writes those back",
        )


def _warn(what: str, *, rule: str, fix: str) -> None:
    """Warn at the line that calls `attach`."""
    warnings.warn(message(what, rule=rule, fix=fix), stacklevel=4)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Of any optimizer: models attached to it are refreshed, other weights that it has are cast when next needed."""
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
        fresh.update(_refresh(model, left=others - params))
    for shared in _SHARED:
        if id(shared) not in fresh and shared.steps_with(params):
            shared.invalidate()


def _params(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _attached_to(model: Module) -> list[Optimizer]:
    return [each for each, models in _ATTACHED.items() if any(known() is model for known in models)]


register_optimizer_step_post_hook(_after_step)
