"""`define_op`: definition of a PyTorch operator from one typed function.

Schema from the type hints, one body for every device (it selects a kernel from the registry), a fake that allocates and
does nothing else, a FLOP formula, and a sharding rule for DTensor, which never gathers. All of them take the same
arguments: a parameter of type `BlockScaled` or `Cast` is flattened to the tensors, text and numbers of the schema and
rebuilt behind it (`EXPANSIONS`). `Library.define` + `impl` costs about half of `torch.library.custom_op` per call and
is just as opaque to torch.compile. Autograd lives above the operators, once. A call skips the dispatcher if nothing
intercepts it: the dispatcher takes longer than a small kernel.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args, get_origin

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import register_flop_formula

from . import env, launch
from .errors import BlockscaleError, ShardingError, refuse
from .formats.cast_spec import Cast, cast_from_flat, flatten_cast
from .formats.checks import PLAIN_TYPES, check_tensor
from .formats.tensor import BlockScaled, as_stored, flatten_operand, operand_from_flat
from .launch import run_recorded
from .launch.recording import BODIES

NAMESPACE = "blockscale"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
OPERATORS: dict[str, OpOverload] = {}
SUM = "sum"


class Expansion(NamedTuple):
    """How a parameter of an operator crosses the schema: as several flat arguments.

    arguments: suffix of the name, and type, of each.  flatten: their values.  rebuild: the inverse of `flatten`.
    """

    arguments: Mapping[str, Any]
    flatten: Callable[[Any], tuple[Any, ...]]
    rebuild: Callable[..., Any]


_OPERAND = {"": Tensor, "_scale": Tensor, "_global": Tensor | None, "_kind": str, "_length": int}
_CAST = Expansion({"": str, "_state": Tensor | None, "_amax": Tensor | None}, flatten_cast, cast_from_flat)
EXPANSIONS: dict[Any, Expansion] = {
    BlockScaled: Expansion(_OPERAND, flatten_operand, operand_from_flat),
    Cast: _CAST,
    Cast | None: _CAST,
}


class Parameters(NamedTuple):
    """Parameters of an operator: flat in the schema, whole in its body.

    schema: signature with flat parameters.  flatten: whole arguments -> tuple of flat ones.  rebuild: the inverse.
    """

    schema: inspect.Signature
    flatten: Callable[..., tuple[Any, ...]]
    rebuild: Callable[..., tuple[Any, ...]]


PARAMETERS: dict[str, Parameters] = {}


def _parameters(body: Callable[..., Any]) -> Parameters:
    """Parameters of a body. Both functions are compiled from text, as namedtuple's are: a loop takes a microsecond."""
    signature = inspect.signature(body, eval_str=True)
    flat: list[inspect.Parameter] = []
    flattened: list[str] = []
    rebuilt: list[str] = []
    scope: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        expansion = EXPANSIONS.get(parameter.annotation)
        if expansion is None:
            flat.append(parameter)
            flattened.append(name)
            rebuilt.append(name)
            continue
        parts = [parameter.replace(name=name + end, annotation=kind) for end, kind in expansion.arguments.items()]
        flat += parts
        flattened.append(f"*flatten_{name}({name})")
        rebuilt.append(f"rebuild_{name}({', '.join(part.name for part in parts)})")
        scope |= {f"flatten_{name}": expansion.flatten, f"rebuild_{name}": expansion.rebuild}
    flat_names = ", ".join(parameter.name for parameter in flat)
    return Parameters(
        signature.replace(parameters=flat, return_annotation=_without_optional(signature.return_annotation)),
        eval(f"lambda {', '.join(signature.parameters)}: ({', '.join(flattened)},)", scope),
        eval(f"lambda {flat_names}: ({', '.join(rebuilt)},)", scope),
    )


def _without_optional(result: Any) -> Any:
    """Result type with Tensor for every Tensor | None: schemas have no optional results."""
    if get_origin(result) is not tuple:
        return result
    return tuple[*(Tensor if part == Tensor | None else part for part in get_args(result))]


@dataclass(frozen=True)
class Sharding:
    """One way to compute an operator in equal shards, one per rank.

    inputs: the sharded dimension of a flat argument, by name; arguments without an entry are replicated.  outputs: the
    sharded dimension of each result, None for a replicated result, SUM for partial sums.
    """

    inputs: Mapping[str, int]
    outputs: tuple[int | str | None, ...] = ()


ShardingRule = Callable[..., Iterable[Sharding]]


def replicated(parts: int, *args: object) -> Iterable[Sharding]:
    """No sharding: every tensor is replicated."""
    return ()


def define_op(
    name: str | None = None,
    *,
    fake: Callable[..., object] = lambda *args: None,
    wrap: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
    sharding: ShardingRule = replicated,
    mutates: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: turn a function of tensors, operands, casts, strings and numbers into an operator that PyTorch can
    trace.

    Call the result by position. It calls the operator if a mode, tracer or subclass intercepts it, else the body alone
    (see `_direct`). A body may return None for a result that was not requested; the operator returns an empty tensor.

    name: of the operator, by default the body's.  The others take the body's arguments.  fake: allocates the outputs
    and nothing else.  wrap: makes the result of a call from the tensors that the body returned, its first argument.
    flops: number of FLOPs; reads only shapes.  sharding: takes the number of shards first and reads only shapes; yields
    shardings with the bytes or a SUM of the unsharded call; to replicate everything is always allowed.  mutates: names
    of flat arguments written in place.
    """

    def define(body: Callable[..., Any]) -> Callable[..., Any]:
        known = name or body.__name__
        parameters = PARAMETERS[known] = _parameters(body)
        flatten, rebuild = parameters.flatten, parameters.rebuild
        schema = torch.library.infer_schema(_prototype(body, parameters.schema), mutates_args=mutates)
        _LIBRARY.define(known + schema, tags=(torch.Tag.pt2_compliant_tag,))
        packet = getattr(getattr(torch.ops, NAMESPACE), known)
        op = OPERATORS[known] = packet.default
        key, places = op._schema.name, _tensor_places(op)

        def flat_body(*flat: Any) -> Any:
            return body(*[as_stored(each) if type(each) is BlockScaled else each for each in rebuild(*flat)])

        def shielded(*flat: Any) -> Any:
            with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
                return flat_body(*flat)

        def run(*flat: Any) -> Any:
            with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
                return _tensors_of(run_recorded(key, places, flat, flat_body, flat))

        BODIES[op] = shielded
        _LIBRARY.impl(known, run, "CompositeExplicitAutograd")
        # results never require grad, so a backward through a bare operator raises; torch would only warn
        _LIBRARY.impl(known, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(op, lambda *flat: _tensors_of(fake(*rebuild(*flat))), lib=_LIBRARY)
        if (count := flops) is not None:
            register_flop_formula(packet, get_raw=True)(lambda *flat, out_val=None: count(*rebuild(*flat)))
        _register_sharding(op, lambda shards, **flat: sharding(shards, *rebuild(**flat)))
        # the dispatcher bumps the version of an argument that is written in place
        call = (lambda *args: op(*flatten(*args))) if mutates else _direct(op, body, flatten, wrap)
        return functools.wraps(body)(call)

    return define


def _register_sharding(op: OpOverload, rule: ShardingRule) -> None:
    """Register the shardings of an operator with DTensor. If none fits the placements, raise: DTensor would gather.

    Not deferred: the decorators of torch.compiler have imported DTensor already; the rest takes 15 ms.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    schema = op._schema
    arguments = {argument.name: str(argument.type) for argument in schema.arguments}
    results = len(schema.returns)

    def placement(dim: int | str | None) -> Placement:
        return Shard(dim) if isinstance(dim, int) else Replicate() if dim is None else Partial(SUM)

    @register_sharding(op)
    def _(*args: Any, **named: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        given: dict[str, Any] = dict(zip(arguments, args, strict=False)) | named
        tensors = {name for name, value in given.items() if "Tensor" in arguments[name] and value is not None}
        # all ranks of the mesh: several mesh dimensions may shard the same tensor dimension
        shards = next(given[name] for name in arguments if name in tensors).mesh.size()
        shardings = (Sharding({}, (None,) * results), *rule(shards, **given))
        _check_placements(schema.name, {name: given[name] for name in arguments if name in tensors}, shardings)
        return [
            (
                [placement(dim) for dim in sharding.outputs],
                [placement(sharding.inputs.get(name)) if name in tensors else None for name in given],
            )
            for sharding in shardings
        ]

    # register_sharding's cache key starts at the first integer argument, but the text before it matters too
    info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=list(arguments), needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = info


def _check_placements(name: str, specs: Mapping[str, Any], shardings: Iterable[Sharding]) -> None:
    """Raise unless some sharding needs no communication. Taking a shard of a replicated tensor needs none.

    specs: DTensorSpec of each tensor argument, by name.
    """
    placed = {each: spec.placements for each, spec in specs.items()}
    for dim in range(len(next(iter(placed.values())))):
        here = {each: placements[dim] for each, placements in placed.items()}
        if not any(_is_local(here, sharding) for sharding in shardings):
            shapes = ", ".join(f"{each} {tuple(spec.shape)} placed {spec.placements}" for each, spec in specs.items())
            refuse(
                f"{name.partition('::')[2]} of {shapes}",
                rule="shards are computed where their bytes are those of the whole, and an operand is never "
                "gathered unasked",
                fix="redistribute(placements=[Replicate()]) what is to be gathered, or shard along whole blocks",
                error=ShardingError,
            )


def _is_local(placed: Mapping[str, Any], sharding: Sharding) -> bool:
    return all(
        placement.is_replicate() or (name in sharding.inputs and placement.is_shard(sharding.inputs[name]))
        for name, placement in placed.items()
    )


def _prototype(body: Callable[..., Any], schema: inspect.Signature) -> Callable[..., Any]:
    """Function with the name of the body and this signature, for `infer_schema`."""

    @functools.wraps(body)
    def prototype() -> None: ...

    prototype.__signature__ = schema  # pyright: ignore[reportAttributeAccessIssue]
    return prototype


def _tensor_places(op: OpOverload) -> list[int]:
    return [at for at, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]


def _tensors_of(results: Any) -> Any:
    """Results of a body with an empty tensor for each that is None."""
    if not isinstance(results, tuple):
        return results
    device = results[0].device
    return tuple(empty((0,), torch.float32, device) if result is None else result for result in results)


# ---- the direct path -------------------------------------------------------------------------------------------------


def _bits(*names: str) -> int:
    """Dispatch keys as a bit mask."""
    keys = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return functools.reduce(lambda bits, key: bits | key.raw_repr(), keys, 0)


# Whatever intercepts calls in the dispatcher has a dispatch key outside this list: of the thread (modes, functorch,
# tracing) or of a tensor (subclasses, wrappers, other devices and layouts, lazy negation).
_INTERCEPTING = ~_bits(
    *("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "BackendSelect")
)
_thread_keys = torch._C._dispatch_tls_local_include_set
_tensor_keys = torch._C._dispatch_keys
_function_modes = torch._C._len_torch_function_stack
_is_profiling = torch._C._autograd._profiler_enabled  # pyright: ignore[reportAttributeAccessIssue]
_is_autocasting = torch._C._is_any_autocast_enabled


def _thread_needs_dispatcher() -> bool:
    return bool(_function_modes() or _is_profiling() or _thread_keys().raw_repr() & _INTERCEPTING)


def needs_dispatcher(tensors: Sequence[Tensor]) -> bool:
    """Whether a mode, transform, tracer, profiler or tensor subclass intercepts an operator on these tensors."""
    if torch.compiler.is_compiling() or _thread_needs_dispatcher():
        return True
    for each in tensors:  # noqa: SIM110, any() takes twice as long
        if type(each) not in PLAIN_TYPES or _tensor_keys(each).raw_repr() & _INTERCEPTING:
            return True
    return False


def _direct(
    op: OpOverload,
    body: Callable[..., Any],
    flatten: Callable[..., tuple[Any, ...]],
    wrap: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """The operator, or its body alone for plain CPU and CUDA tensors without a mode, transform, tracer or profiler. The
    dispatcher and its way back into Python cost more than the whole body.

    The body takes operands whole. It runs without autocast (it would lower the precision of matrix products) and
    without autograd (a bias or a column sum would record part of a graph).
    """
    name, places = op._schema.name, _tensor_places(op)

    def call(*args: Any) -> Any:
        flat = flatten(*args)
        # first, because the checks below cannot be traced
        if torch.compiler.is_compiling():
            results = op(*flat)
        else:
            # the mode of a recording sees what the body does
            intercepted = _thread_needs_dispatcher() and launch.recorder() is None
            requires_grad = False
            for at in places:
                tensor = flat[at]
                if tensor is not None:
                    if type(tensor) not in PLAIN_TYPES or _tensor_keys(tensor).raw_repr() & _INTERCEPTING:
                        intercepted = True
                        break
                    requires_grad = requires_grad or tensor.requires_grad
            if intercepted:
                results = _dispatched(op, flat, places)
            elif _is_autocasting() or (requires_grad and torch.is_grad_enabled()):
                with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
                    results = run_recorded(name, places, flat, body, args)
            else:
                results = run_recorded(name, places, flat, body, args)
        return results if wrap is None else wrap(results, *args)

    return call


def _dispatched(op: OpOverload, flat: Sequence[Any], places: Iterable[int]) -> Any:
    """The operator's result. Raises for sparse and nested tensors: no kernel reads tensors without strides. A
    BlockscaleError that DTensor wraps is raised as itself."""
    for at in places:
        if flat[at] is not None:
            check_tensor(flat[at], op._schema.arguments[at].name, "casts and products")
    try:
        return op(*flat)
    except RuntimeError as error:
        if isinstance(error.__cause__, BlockscaleError):
            raise error.__cause__ from None
        raise


# read once: tests and debugging sessions set it before the import
_POISON = env.flag("BLOCKSCALE_POISON")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised output. With BLOCKSCALE_POISON every byte is FF, so a value that a kernel does not write is NaN."""
    out = launch.empty(shape, dtype, device)
    if _POISON and not torch.compiler.is_compiling():
        out.view(-1).view(torch.uint8).fill_(0xFF)
    return out
