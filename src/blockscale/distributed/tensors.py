"""The shard of a weight that FSDP2 gathers as codes: a wrapper subclass without a life of its own. Operators run on the
plain tensor inside."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from ..casts.shards import scales_from_amax
from ..formats.cast_spec import CastPlan
from ..formats.layout import code_row_bytes
from .gathered import GatheredWeight
from .shards import Place, runs_of_scales

if TYPE_CHECKING:
    from .weight_gather import WeightGather

_aten = torch.ops.aten


class Payload(NamedTuple):
    """What a gather passes from FSDP's first hook to its last.  plan: of the cast, in plain layout.  amax: of all
    blocks, int32 patterns [.., tiles, blocks], where scales are not gathered.  parts: bytes of scales and of the tensor
    scale on a single rank, where FSDP takes one tensor alone."""

    place: Place
    plan: CastPlan
    amax: Tensor | None
    parts: tuple[Tensor, ...] = ()

    def use(self) -> None:
        """Keep the tensors until the current stream has read them: they may be another stream's."""
        for each in (self.amax, *self.parts):
            if each is not None and each.is_cuda:
                each.record_stream(torch.cuda.current_stream(each.device))


# operators of FSDP, optimizers and checkpoints whose result is still the weight's shard
_STAYS_SHARDED = frozenset(
    {
        _aten.alias.default, _aten.as_strided.default, _aten.clone.default, _aten.copy_.default, _aten.detach.default,
        _aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor, _aten.split.Tensor,
        _aten.view.default, _aten.view_as.default, _aten._pin_memory.default, _aten._to_copy.default,
    }
)  # fmt: skip


class ShardedWeight(Tensor):
    """High-precision weight, or a shard of it, whose gather by FSDP2 is one of codes. Everything else about it is a
    plain tensor's: operators run on the plain tensor, and files hold that one."""

    tensor: Tensor
    how: WeightGather
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls: type[ShardedWeight], tensor: Tensor, gather: WeightGather) -> ShardedWeight:
        return Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: Tensor, gather: WeightGather) -> None:
        self.tensor, self.how = tensor, gather

    def __tensor_flatten__(self) -> tuple[list[str], WeightGather]:
        return ["tensor"], self.how

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], gather: WeightGather, size: Any, stride: Any) -> ShardedWeight:
        return ShardedWeight(inner["tensor"], gather)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = Parameter(self.tensor, self.requires_grad) if isinstance(self, Parameter) else self.tensor
        return plain.__reduce_ex__(protocol)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the shard: FSDP compares it to see whether it has padded this shard already."""
        return self.tensor.untyped_storage()

    def __deepcopy__(self, memo: dict[int, object]) -> Parameter:
        """A plain parameter: the copy of a model gathers its weights in their own dtype."""
        return Parameter(self.tensor.detach().clone(), requires_grad=self.requires_grad)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"ShardedWeight({self.tensor!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gathers: list[WeightGather] = []

        def plain(weight: ShardedWeight) -> Tensor:
            gathers.append(weight.how)
            return weight.tensor

        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for at, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[at] if at < len(args) else kwargs.get(argument.name)
                    pytree.tree_map_only(ShardedWeight, lambda each: each.how.note_write(each.tensor), written)
        args, kwargs = pytree.tree_map_only(ShardedWeight, plain, (args, kwargs))
        result = func(*args, **kwargs)
        if func not in _STAYS_SHARDED or (func is _aten.view.default and result.dim() == 1):
            return result  # FSDP keeps the flat shard as a plain tensor
        return pytree.tree_map_only(Tensor, lambda each: ShardedWeight(each, gathers[0]), result)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Payload]:
        """FSDP's hook before an all-gather: what this rank contributes."""
        return self.how.payload(self.tensor, mp_policy.param_dtype or self.dtype, module)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Payload,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[GatheredWeight, tuple[Tensor, ...]] | None:
        """FSDP's hook after an all-gather: the weight of its buffers, or with `out` its derived tensors again."""
        metadata.use()
        codes, scales, factor, derived = _whole(all_gather_outputs, metadata)
        if out is None:
            return GatheredWeight(codes, scales, factor, metadata.plan, metadata.place.shape, param_dtype), derived
        weight = out.to_local() if isinstance(out, DTensor) else out
        assert isinstance(weight, GatheredWeight)
        mine = weight.codes, weight.scales, weight.factor
        for old, new in zip(mine, (codes, scales, factor), strict=True):
            if old is not None and new is not None and any(new is each for each in derived):
                with torch.autograd._unsafe_preserve_version_counter(old):
                    old.copy_(new)
        return None


def _whole(outputs: tuple[Tensor, ...], payload: Payload) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Code bytes [.., N, row bytes], scale bytes and tensor scale of the whole weight, and those among them that are
    not views of FSDP's buffers."""
    place, plan, amax, parts = payload
    spec, shape = plan.spec, place.shape
    if place.is_plane:
        assert amax is not None
        codes = outputs[0].view(-1, *shape[1:]) if place.dim == 0 else outputs[0].view(shape)
        codes, wanted = codes[: shape[0]], code_row_bytes(spec, shape[-1])
        derived = [scales_from_amax(amax, plan).view(torch.uint8)]
        if wanted != shape[-1]:
            codes = pad(codes, (0, wanted - shape[-1]))
            derived.append(codes)
        return codes, derived[0], None, tuple(derived)
    codes, scales, *factors = (*outputs, *(each.clone() for each in parts))
    factor = None
    if factors:
        factor = factors[0].view(torch.float32)
        factor = factor if plan.grouped_amax else factor[0]
    if place.dim == len(shape) - 2 and place.chunk % spec.block[0] and place.ranks > 1:
        scales = torch.cat([scales[run] for run in runs_of_scales(place, spec.block[0])])
        return codes, scales, factor, (scales,)
    derived = (scales,) if factor is None else (scales, factor)
    return codes, scales, factor, derived if parts else ()
