"""A trained layer to time: its variants, which share parameters, the calls of one optimizer step, check and peers.

A step clears gradients, casts the weights if microbatches share the casts, and runs forward and backward of every
microbatch; the optimizer is not part of it. Inputs rotate from call to call, parameters do not, so that compiled
variants compile once. A weight that fits in L2 stays there in both precisions.

A layer is checked against the unquantized one in fp64: two runs on poisoned memory agree in every bit, all values are
finite, and SQNR of output and gradients reaches the recipe's gates on normal values. Peers are bf16, ours with other
weight casts, and torchao's blockwise and rowwise FP8, each compiled too; all take the parameters of the bf16 layer.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter

from ..autograd.recipe import Recipe, WeightCast, get_recipe
from ..autograd.weights import refresh_weights_, shared_weights
from ..formats.stochastic import rng_state
from ..nn import Linear
from .harness import NOT_COMPILED, Args, Case, Peer, Verdict, failure, random
from .peers import torchao

Build = Callable[[Module], Module]
Ours = Callable[[Recipe], Build]
FP8, MXFP8, NVFP4 = "fp8_blockwise", "mxfp8", "nvfp4"
# MXFP8 for the FP8 tensor cores of Hopper
MXFP8_NATIVE = "mxfp8_128x128"
RECIPES = {name: get_recipe(name) for name in (FP8, MXFP8, MXFP8_NATIVE, NVFP4)}
MICROBATCHES = 8
# SQNR gates in dB of output, dX and dW on normal values, against the unquantized linear layer
LINEAR_GATES = {
    FP8: (28.2, 28.2, 28.2), MXFP8: (28.0, 28.0, 28.0), MXFP8_NATIVE: (28.0, 28.0, 28.0), NVFP4: (16.2, 14.1, 14.6),
}  # fmt: skip
# of a SwiGLU MLP, with the worst dW; lower, since noise of several layers adds up
SWIGLU_GATES = {
    FP8: (23.6, 23.3, 23.2), MXFP8: (23.4, 23.1, 22.9), MXFP8_NATIVE: (23.4, 23.1, 22.9), NVFP4: (11.6, 9.8, 9.9),
}  # fmt: skip
BF16, TORCHAO, COMPILED = "bf16", "torchao", "compiled"
TORCHAO_COMPILED = f"{TORCHAO} {COMPILED}"
PER_STEP, TWICE, MAIN_GRAD = "cast per step", "cast twice", "fp32 main_grad"
# a bf16 GEMM has 56 dB, and an MLP rounds several times
BF16_DB = 45.0
# tolerance for the same formats as ours with another rounding of scales
NEAR_DB = 0.2
_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Variant:
    """A way to train a layer.

    build: makes a module from the bf16 one, with the same parameters.  refreshes: weights are cast at the start of a
    step.  main_grads: wgrad accumulates into fp32 buffers.  compile: compiles the module; None for eager.
    """

    build: Build
    refreshes: bool = False
    main_grads: bool = False
    compile: Callable[[Module], Module] | None = None


def plain_variant() -> Variant:
    """Variant of the bf16 layer itself."""
    return Variant(lambda plain: plain)


def our_variant(
    ours: Ours, recipe: Recipe, weight_cast: WeightCast = "forward", *, main_grads: bool = False
) -> Variant:
    """Variant of our layer by a recipe; weights that are cast once a step are cast at its start."""
    chosen = recipe.replace(name=recipe.name, weight_cast=weight_cast)
    return Variant(ours(chosen), refreshes=weight_cast == "step", main_grads=main_grads)


def variants_of(
    ours: Ours, recipe: Recipe, microbatches: int, *, twice: bool = False
) -> tuple[Variant, dict[str, Variant]]:
    """The timed variant, and ours with weights cast at other times or another accumulation of gradients.

    One microbatch casts its weights in the forward; several share the casts of their step.  twice: with one microbatch,
    add a variant that casts weights again in the backward.
    """
    if microbatches > 1:
        main, added = (our_variant(ours, recipe, "step", main_grads=main_grads) for main_grads in (False, True))
        return main, {MAIN_GRAD: added}
    others = {TWICE: our_variant(ours, recipe, "twice")} if twice else {}
    return our_variant(ours, recipe), others | {PER_STEP: our_variant(ours, recipe, "step")}


class BuiltLayer(NamedTuple):
    """A layer of one variant.  call: the module, compiled or not.  module: before compilation.  main_grads: fp32
    accumulators of the parameters' gradients, or None."""

    call: Callable[[Tensor], Tensor]
    module: Module
    parameters: list[Parameter]
    main_grads: list[Tensor | None]


class BuiltLayers:
    """A bf16 layer and its variants, each built at first use."""

    def __init__(self, plain: Module) -> None:
        self.plain = plain
        self._made: dict[Variant, BuiltLayer] = {}

    def of(self, variant: Variant) -> BuiltLayer:
        """The layer of a variant."""
        if variant not in self._made:
            module = variant.build(self.plain)
            call = module if variant.compile is None else variant.compile(module)
            parameters = list(module.parameters())
            buffers = [
                torch.zeros_like(each, dtype=torch.float32) if variant.main_grads else None for each in parameters
            ]
            self._made[variant] = BuiltLayer(call, module, parameters, buffers)
        return self._made[variant]


@dataclass(frozen=True, eq=False)
class Batch:
    """One input set: x [M, K], a leaf, and the gradient of the output dy [M, N]."""

    built: BuiltLayers
    x: Tensor
    dy: Tensor

    def another(self) -> Batch:
        """Another input set for the same layer."""
        x, dy = (normal(tuple(tensor.shape), tensor.device) for tensor in (self.x, self.dy))
        return replace(self, x=x.requires_grad_(), dy=dy)


class Results(NamedTuple):
    """Output, dX and gradients of the weights of one forward and backward."""

    y: Tensor
    dx: Tensor
    dw: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.y, self.dx, *self.dw]


Judge = Callable[[Batch, Results], tuple[float, ...]]


def make_batch(plain: Module, tokens: int, features: tuple[int, int], device: torch.device) -> Batch:
    """A layer with its first input set of normal values."""
    x, dy = (normal((tokens, size), device) for size in features)
    return Batch(BuiltLayers(plain), x.requires_grad_(), dy)


def normal_linear(in_features: int, out_features: int, device: torch.device, *, bias: bool = False) -> nn.Linear:
    """bf16 layer with normal weights, for which accuracy gates are stated."""
    layer = nn.Linear(in_features, out_features, bias=bias, device="meta")
    layer.weight = Parameter(normal((out_features, in_features), device) * in_features**-0.5)
    if bias:
        layer.bias = Parameter(normal((out_features,), device))
    return layer


def our_linear(recipe: Recipe) -> Build:
    """Our layer with the parameters of the plain one."""

    def build(plain: Module) -> Module:
        assert isinstance(plain, nn.Linear)
        # name and rng are for recipes with stochastic rounding
        layer = Linear(
            plain.in_features, plain.out_features, bias=False, device="meta", recipe=recipe, name="bench.linear",
            rng=rng_state(0, device=plain.weight.device),
        )  # fmt: skip
        layer.weight, layer.bias = plain.weight, plain.bias
        return layer

    return build


def normal(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Normal bf16 values; on a CPU held in fp32, since bf16 takes a hundred times longer on many CPUs."""
    values = random(shape, device)
    return values if values.is_cuda else values.float()


def step(variant: Variant, microbatches: int, batch: Batch) -> Results:
    """One timed step. Results are of the last microbatch, except gradients of weights, which are sums over all."""
    layer, x = batch.built.of(variant), batch.x
    _clear(layer)
    cast_weights(variant, batch)
    y = x
    for _ in range(microbatches):
        x.grad = None
        y = layer.call(x)
        y.backward(batch.dy)
    grads = [_grad(one) if main is None else main for one, main in zip(layer.parameters, layer.main_grads, strict=True)]
    return Results(y.detach(), _grad(x), grads)


def cast_weights(variant: Variant, batch: Batch) -> None:
    """Cast the weights if the variant casts them once a step."""
    if variant.refreshes:
        refresh_weights_(batch.built.of(variant).module)


def infer(variant: Variant, batch: Batch) -> Tensor:
    """Forward without gradients; call `cast_weights` before the first."""
    with torch.no_grad():
        return batch.built.of(variant).call(batch.x)


def infer_again(variant: Variant, batch: Batch) -> Results:
    """Cast the weights and run a forward without gradients; dX and dW of the result are empty."""
    cast_weights(variant, batch)
    y = infer(variant, batch)
    return Results(y, y.new_empty(0), [])


def _clear(layer: BuiltLayer) -> None:
    """Clear gradients; variants share parameters, but not fp32 accumulators."""
    for parameter, main_grad in zip(layer.parameters, layer.main_grads, strict=True):
        parameter.grad = None
        parameter.main_grad = None if main_grad is None else main_grad.zero_()  # pyright: ignore[reportAttributeAccessIssue]


def take(variant: Variant, batch: Batch) -> Results:
    """A step of one microbatch; its gradients are detached from the parameters."""
    found = step(variant, 1, batch)
    batch.x.grad = None
    for parameter in batch.built.of(variant).parameters:
        parameter.grad = None
    return found


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def saved_bytes(variant: Variant, batch: Batch) -> int:
    """Bytes saved for backward: each storage that the graph holds once, without parameters and weight casts that all
    microbatches share."""
    layer = batch.built.of(variant)
    cast_weights(variant, batch)
    shared = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters, *_shared_tensors(layer.module))}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer.call(batch.x)
    return sum(saved.values())


def _shared_tensors(module: Module) -> list[Tensor]:
    found: list[Tensor] = []
    for _, layer, name, shared in shared_weights(module):
        pair = shared.operands(getattr(layer, name), layer.recipe_now)  # pyright: ignore[reportArgumentType]
        for operand in pair or ():
            if operand is not None:
                found += [operand.data, operand.scale]
    return found


# ---- check -----------------------------------------------------------------------------------------------------------

OUTPUTS = ("y", "dx", "dw")


def checker(
    main: Variant,
    judge: Judge,
    gates: Sequence[float],
    kept: Mapping[str, Variant],
    how: str,
    take: Callable[[Variant, Batch], Results] = take,
) -> Callable[[Case, Args], Verdict]:
    """Check of the `main` variant.  gates: SQNR gates of the first outputs, one for each value of `judge`.  kept:
    variants whose saved bytes are reported."""

    def check(case: Case, args: Args) -> Verdict:
        batch: Batch = args[0]
        try:
            problems, found = _problems(main, judge, gates, batch, take)
            details = {f"{name}_db": db for name, db in zip(OUTPUTS, found, strict=False)}
            details |= {f"kept_bytes {name}": float(saved_bytes(variant, batch)) for name, variant in kept.items()}
        except Exception as error:  # an exception counts as a fault, and the suite continues
            return Verdict(0, how, failure(error))
        numbers = {name: value for name, value in details.items() if value == value}
        worst = min(found) if len(numbers) == len(details) else None
        return Verdict(0, how, "; ".join(problems), worst, numbers)

    return check


def _problems(
    main: Variant, judge: Judge, gates: Sequence[float], batch: Batch, take: Callable[[Variant, Batch], Results]
) -> tuple[list[str], tuple[float, ...]]:
    first = take(main, batch).tensors
    copies = [tensor.clone() for tensor in first]
    for tensor in first:  # the allocator gives these blocks to the second run; 0xFF in every byte is a NaN
        tensor.untyped_storage().fill_(0xFF)  # pyright: ignore[reportAttributeAccessIssue]
    del first, tensor  # pyright: ignore[reportPossiblyUnboundVariable]
    second = take(main, batch)
    differing = sum(int((a != b).sum()) for a, b in zip(copies, second.tensors, strict=True))
    unset = sum(int((~each.isfinite()).sum()) for each in second.tensors)
    found = judge(batch, second)
    problems = [f"{differing} values differ between two runs"] if differing else []
    problems += [f"{unset} values are not finite, or were not written"] if unset else []
    for name, db, gate in zip(OUTPUTS, found, gates, strict=False):
        if not db >= gate:
            problems.append(f"{name} is {db:.1f} dB from the exact one, less than {gate:.1f}")
    return problems, found


# ---- peers -----------------------------------------------------------------------------------------------------------


def compiled(variant: Variant, *, fullgraph: bool = False) -> Variant:
    """A variant through torch.compile, for one shape."""
    return replace(variant, compile=lambda module: torch.compile(module, fullgraph=fullgraph, dynamic=False))


def trained(
    variant: Variant, judge: Judge, gate: float | None, note: str = "", *, microbatches: int = 1, forward: bool = False
) -> Peer:
    """Another variant of the same layer as a peer.  gate: SQNR in dB that it must reach; None: not checked."""
    run = functools.partial(infer, variant) if forward else functools.partial(step, variant, microbatches)
    taken = infer_again if forward else take
    return Peer(run, note=note, gate_db=gate, accuracy=lambda batch: min(judge(batch, taken(variant, batch))))


def peers(others: Mapping[str, Variant], judge: Judge, gate_db: float, microbatches: int) -> dict[str, Peer | str]:
    """bf16, and ours with the weight cast at other times.  gate_db: SQNR that ours must reach."""
    found: dict[str, Peer | str] = {BF16: trained(plain_variant(), judge, BF16_DB, microbatches=microbatches)}
    ours = {name: trained(each, judge, gate_db, microbatches=microbatches) for name, each in others.items()}
    return found | ours


def slow_peers(
    main: Variant, sizes: Iterable[int], judge: Judge, gate_db: float, microbatches: int, *, compiling: bool
) -> dict[str, Peer | str]:
    """Peers of a dense layer that are compiled, or that autotune for every shape as torchao does.  main: our variant.

    sizes: features of its weights.  gate_db: SQNR that ours must reach.  compiling: whether they run.
    """
    blockwise, rowwise = Variant(each(_blockwise)), Variant(each(_rowwise))
    near, note = gate_db - NEAR_DB, "Float8BlockwiseLinear"
    slow = {
        f"{BF16} {COMPILED}": (compiled(plain_variant()), BF16_DB, ""),
        COMPILED: (compiled(main, fullgraph=True), gate_db, ""),
        TORCHAO: (blockwise, near, note),
        TORCHAO_COMPILED: (compiled(blockwise), near, note),
        f"rowwise {COMPILED}": (compiled(rowwise), None, "torchao.float8, recipe rowwise"),
    }
    found: dict[str, Peer | str] = dict.fromkeys(slow, NOT_COMPILED)
    if compiling:
        for name, (variant, gate, note) in slow.items():
            found[name] = trained(variant, judge, gate, note, microbatches=microbatches)
    if any(size % _BLOCK for size in sizes):
        found |= dict.fromkeys((TORCHAO, TORCHAO_COMPILED), f"not run: takes features in multiples of {_BLOCK} only")
    return found


def each(convert: Callable[[nn.Linear], nn.Module]) -> Build:
    """Conversion of a module from a conversion of linear layers: the module is one, or its children are."""

    def build(plain: nn.Module) -> nn.Module:
        if isinstance(plain, nn.Linear):
            return convert(plain)
        children: list[Any] = list(plain.children())
        return type(plain)(*map(convert, children))

    return build


def _blockwise(layer: nn.Linear) -> nn.Module:
    return torchao("blockwise_fp8_training.linear").Float8BlockwiseLinear.from_float(layer)


def _rowwise(layer: nn.Linear) -> nn.Module:
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    return float8.convert_to_float8_training(layer, config=config)
