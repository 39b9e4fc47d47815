"""How one weight is gathered as codes, and the exchange of maxima that all weights of a model share."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.functional import pad
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .. import env
from ..autograd.dtensor import local
from ..autograd.operands import Casts
from ..autograd.recipe import Recipe
from ..autograd.weights import CHECK, SharedWeight
from ..casts.shards import block_amax, cast_rows
from ..errors import ShardingError, StaleWeightError, refuse
from ..formats.cast_spec import Cast, CastPlan
from ..formats.layout import ceil_div
from ..formats.scales import magnitude_bits
from ..nn.recipe_module import RecipeModule
from .agreement import check_same_call
from .collectives import ranks_of
from .shards import Place, edges, exchanged_tiles, place_of
from .tensors import Payload, ShardedWeight

_EXCHANGES: weakref.WeakSet[AmaxExchange] = weakref.WeakSet()


class AmaxExchange:
    """Maxima of blocks that straddle shards, for all weights of a model in one MAX all-reduce per process group.

    It runs at the first gather after a step of an optimizer that holds one of the weights, after a refresh, and after
    the start of the model's forward, unless a step shares all casts. Every rank takes the same decision, since it
    depends on calls alone, never on values or counted writes.  count: of all-reduces.
    """

    def __init__(self, model: Module, gathers: Sequence[WeightGather]) -> None:
        # weak: a weight's gather holds its exchange, and must go with the weight and not at a later collection
        self._gathers = [weakref.ref(gather) for gather in gathers]
        for gather in gathers:
            gather.use(self)
        self.is_stale = True
        self.count = 0
        self._model = weakref.ref(model)
        self._before_forward = _BeforeForward(self)
        self._hook = model.register_forward_pre_hook(self._before_forward)
        self._is_first = False
        _EXCHANGES.add(self)

    @property
    def gathers(self) -> list[WeightGather]:
        """The gathers whose weights still exist, in the same order on every rank."""
        found = (gather() for gather in self._gathers)
        return [gather for gather in found if gather is not None]

    def before_forward(self, model: Module) -> None:
        """A forward begins: maxima are stale, unless a step shares all casts. Copies of the model have the hook."""
        if model is self._model() and not all(gather.is_open for gather in self.gathers):
            self.is_stale = True

    def after_step(self, params: set[int]) -> None:
        """A step of an optimizer that holds these parameters, by id: casts and maxima of those among them are stale."""
        for gather in self.gathers:
            if id(gather.parameter_now()) in params:
                self.is_stale = True
                if gather.shared is not None:
                    gather.shared.invalidate()

    def refresh(self) -> None:
        """Exchange maxima if they are stale. Called by every gather."""
        if not self._is_first:
            # FSDP's own hook, which gathers the root's weights, was put before this one
            self._hook.remove()
            model = self._model()
            if model is not None:  # `gather_low_` may have been given a container that is gone
                self._hook = model.register_forward_pre_hook(self._before_forward, prepend=True)
            self._is_first = True
        if self.is_stale:
            self.run()

    @torch.no_grad()
    def run(self) -> None:
        """Exchange the maxima of all weights that are sharded now; a weight that is whole keeps its own."""
        self.is_stale = False
        groups: dict[dist.ProcessGroup, list[tuple[WeightGather, list[Tensor]]]] = {}
        for gather in self.gathers:
            found = gather.sharded()
            if found is None:
                continue
            slots = gather.own_maxima(found)
            if slots:
                groups.setdefault(found.place.group, []).append((gather, slots))
        for group, found in groups.items():
            # shards that are offloaded to the CPU communicate from the GPU
            flat = torch.cat([slot.flatten().to(found[0][0].device) for _, slots in found for slot in slots])
            what = "maxima of weights", *(tuple(slot.shape) for _, slots in found for slot in slots)
            check_same_call(ranks_of(group), flat.device, *what)
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
            self.count += 1
            parts = iter(flat.split([slot.numel() for _, slots in found for slot in slots]))
            for gather, slots in found:
                gather.take_maxima([next(parts).view_as(slot) for slot in slots])


def _tensor_amax(x: Tensor) -> Tensor:
    """amax of a tensor as an int32 bit pattern [1]; 0 without elements."""
    if not x.numel():
        return torch.zeros(1, dtype=torch.int32, device=x.device)
    low, high = torch.aminmax(x)
    return magnitude_bits(torch.stack((low, high)).float()).amax().view(1)


Stamp = tuple[int, ...]


class ShardNow(NamedTuple):
    """The shard of a weight.  place: in the whole.  tensor: in high precision.  stamp: its writes and its address."""

    place: Place
    tensor: Tensor
    stamp: Stamp


class WeightGather:
    """How one weight is gathered.

    name: in the model.  parameter: name in its layer.  exchange: of the model.  shared: cast that a step shares, None
    without weight_cast="step".  plan: cast of the first gather, in plain layout.  tiles: row tiles whose maxima are
    exchanged.  maxima: of their blocks, int32 patterns [.., tiles, blocks].  amax: NVFP4's of the tensor, int32 pattern
    [1].  stamp: of the shard when they were exchanged.  cached: payload that the gathers of a step share.
    """

    exchange: AmaxExchange
    device = "cpu"

    def __init__(self, name: str, module: RecipeModule, parameter: str) -> None:
        self.name, self.parameter = name, parameter
        weight = module.get_parameter(parameter)
        self._shape = tuple(local(weight).shape)
        self._inner = weight.placements if isinstance(weight, DTensor) else ()
        self._module = weakref.ref(module)
        self.shared: ShardedCast | None = None
        self.plan: CastPlan | None = None
        self._recipe: Recipe | None = None
        self.tiles: tuple[int, ...] = ()
        self.maxima: Tensor | None = None
        self.amax: Tensor | None = None
        self.stamp: Stamp = ()
        self._dtype: torch.dtype | None = None
        self._writes = self._address = 0
        self.cached: tuple[Stamp, tuple[Tensor, ...]] | None = None

    def use(self, exchange: AmaxExchange) -> None:
        """Take maxima from this exchange."""
        self.exchange = exchange
        module = self._module()
        if module is not None and module.recipe.weight_cast == "step":
            self.shared = ShardedCast(exchange, module.shared_cast(self.parameter))
            module.share_through(self.parameter, self.shared)

    def __deepcopy__(self, memo: dict[int, object]) -> WeightGather:
        """Itself: compilers copy what they guard on."""
        return self

    def parameter_now(self) -> Tensor | None:
        """The parameter that is registered now: the shard's or, while it is gathered, the whole."""
        module = self._module()
        return None if module is None else module._parameters.get(self.parameter)

    def note_write(self, tensor: Tensor) -> None:
        """A tensor is written in place: count it if it is this shard or a view of it."""
        self._writes += tensor.untyped_storage().data_ptr() == self._address

    @property
    def is_open(self) -> bool:
        """Whether a step shares its cast."""
        return self.shared is not None and self.shared.is_open

    @property
    def is_shared(self) -> bool:
        """Whether later gathers of this step take this step's cast."""
        return self.shared is not None and self.is_open and self.shared.is_valid

    def sharded(self) -> ShardNow | None:
        """The weight's shard as it is now; None while it is whole, or if FSDP does not shard it."""
        param = self.parameter_now()
        if not isinstance(param, DTensor):
            return None
        with torch.inference_mode(False), torch.no_grad():
            shard = param.to_local()
        if not isinstance(shard, ShardedWeight):
            return None
        # writes reach the tensor below autograd, where no version counter moves
        self._address = shard.tensor.untyped_storage().data_ptr()
        place = place_of(param, self._shape, self._inner)
        return ShardNow(place, shard.tensor, (self._writes, self._address))

    def cast_plan(self) -> CastPlan:
        """The cast of the weight by its layer's present recipe; the same at every gather."""
        module = self._module()
        if not isinstance(module, RecipeModule):
            refuse(
                f"{self.name} after its layer was unquantized",
                "gather_low_ prepares the weights of quantized layers",
                "call unquantize_ before gather_low_",
            )
        if self.plan is not None and module.recipe_now is self._recipe:
            return self.plan
        found = plan_of(module.recipe_now, getattr(module, self.parameter))
        if isinstance(found, str) or (self.plan is not None and found != self.plan):
            refuse(
                f"the recipe of {self.name} has changed to {module.recipe_now}",
                rule="FSDP allocates its buffers at the first gather, so the cast of the weight never changes",
                fix="set the recipe before gather_low_ and fully_shard, or leave this layer out of gather_low_",
            )
        self.plan, self._recipe = found, module.recipe_now
        return found

    def own_maxima(self, shard: ShardNow) -> list[Tensor]:
        """This rank's part of what is exchanged; the same shapes on every rank."""
        plan = self.plan or self.cast_plan()
        (place, local, self.stamp), spec = shard, plan.spec
        self.device = place.device
        slots: list[Tensor] = []
        self.tiles = exchanged_tiles(place, spec.block[0])
        if self.tiles:
            blocks, rows = ceil_div(place.shape[-1], spec.block[1]), place.rows()
            slot = local.new_zeros((*place.shape[:-2], len(self.tiles), blocks), dtype=torch.int32)
            first, size = place.span(place.rank)
            mine = slot[first : first + size] if place.dim == 0 and len(place.shape) == 3 else slot
            if mine.numel() and rows.size:
                for part in edges(rows, spec.block[0], whole=place.is_plane):
                    found = block_amax(local[..., part.first - rows.first : part.end - rows.first, :], spec, part)
                    at = self.tiles.index(part.tiles(spec).start)
                    mine[..., at : at + len(part.tiles(spec)), :] = found
            slots.append(slot)
        if spec.family == "nvfp4" and not plan.grouped_amax:
            slots.append(_tensor_amax(local))
        return slots

    def take_maxima(self, slots: list[Tensor]) -> None:
        """Store the exchanged maxima."""
        self.maxima = slots.pop(0) if self.tiles else None
        self.amax = slots.pop(0) if slots else None

    def payload(
        self, local: Tensor, dtype: torch.dtype, module: Module | None = None
    ) -> tuple[tuple[Tensor, ...], Payload]:
        """Code bytes of this rank's shard, with scales and tensor scale where FSDP takes several tensors.

        dtype: that the weight is rounded to before its cast.  module: of the weight that FSDP gathers.
        """
        if module is not self._module():
            refuse(
                f"a weight of a {type(module).__name__} that is the tensor of {self.name} in another model",
                "a gathered weight belongs to the model that gather_low_ was given",
                "load state dicts of such models with assign=False",
            )
        if self._dtype not in (None, dtype):
            refuse(
                f"{self.name} in {dtype}, and before in {self._dtype}",
                "FSDP allocates its buffers at the first gather, so the dtype never changes",
                "convert the model before its first forward",
            )
        self._dtype = dtype
        found = self.sharded()
        assert found is not None, "FSDP gathers sharded parameters"
        place, plan = found.place, self.cast_plan()
        if not self.stamp:  # sharded after the last exchange
            self.exchange.is_stale = True
        self.exchange.refresh()
        amax = None if self.maxima is None else _rounded(self.maxima, dtype)
        if place.is_plane and plan.spec.family == "nvfp4":
            refuse(
                f"{self.name} {place.shape} in {place.ranks} shards along dimension {place.dim}",
                rule=f"codes of {plan.format} are gathered in equal shards of dimension 0, since FSDP takes no "
                "other payload than a tensor of the shard's shape",
                fix="shard dimension 0 over a number of ranks that divides it, or call gather_low_ without it",
                error=ShardingError,
            )
        self._check_unchanged(found.stamp)
        if self.is_shared and self.cached is not None and self.cached[0] == found.stamp:
            parts = self.cached[1]
            if env.flag(CHECK):
                self._compare(parts, local.to(dtype), place, plan)
        else:
            parts = self._cast(local.to(dtype), place, plan)
            if self.shared is not None and self.is_open:
                self.shared.is_valid, self.cached = True, (found.stamp, parts)
                self.shared.casts += 1
        if place.ranks == 1:
            return parts[:1], Payload(place, plan, amax, parts[1:])
        return parts, Payload(place, plan, amax)

    def _compare(self, parts: tuple[Tensor, ...], local: Tensor, place: Place, plan: CastPlan) -> None:
        """Raise unless a shared cast is that of the present values; all ranks exchange maxima again."""
        self.exchange.run()
        for old, new in zip(parts, self._cast(local, place, plan), strict=True):
            if not torch.equal(old, new):
                refuse(
                    f"the shared cast of {self.name} is not the cast of its present values",
                    "a write to weight.data outside of an attached optimizer needs a refresh after it",
                    "call blockscale.refresh_weights_(model) after the write, on every rank",
                    StaleWeightError,
                )

    def _check_unchanged(self, stamp: Stamp) -> None:
        """Raise if a counted write reached the shard after its maxima were exchanged."""
        if (self.maxima is None and self.amax is None) or stamp == self.stamp:
            return
        refuse(
            f"{self.name} was written after the ranks exchanged the maxima of its blocks",
            rule="they are exchanged after a step of an optimizer, and before a forward of the model if no step "
            "shares its casts",
            fix="call the model whose weights gather_low_ was given, not a part of it, and with weight_cast='step' "
            "blockscale.refresh_weights_(model) after the write; on every rank",
            error=StaleWeightError,
        )

    def _cast(self, local: Tensor, place: Place, plan: CastPlan) -> tuple[Tensor, ...]:
        """Code bytes, and where FSDP takes them bytes of scales and of the tensor scale."""
        spec, rows = plan.spec, place.rows()
        tensor_amax = None if self.amax is None else _rounded(self.amax, local.dtype).view(torch.float32)[0]
        first, last = (self._maxima_of(tile, place, local.dtype) for tile in _ends(rows.tiles(spec)))
        codes, scales, factor = cast_rows(local, Cast(plan, None, tensor_amax), rows, first, last)
        if place.is_plane:
            codes = codes[..., : place.shape[-1]]
            lacking = place.chunk - codes.shape[0] if place.dim == 0 else 0
            return (pad(codes, (0, 0) * (codes.dim() - 1) + (0, lacking)).contiguous(),)
        if place.dim == len(place.shape) - 2:
            most = max(len(place.rows(rank).tiles(spec)) for rank in range(place.ranks))
            scales = pad(scales, (0, 0, 0, most - scales.shape[0]))
        return codes, scales, *(() if factor is None else (factor.view(-1).view(torch.uint8),))

    def _maxima_of(self, tile: int, place: Place, dtype: torch.dtype) -> Tensor | None:
        """Exchanged maxima of a row tile of this rank's matrices; None if the tile's are not exchanged."""
        if self.maxima is None or tile not in self.tiles:
            return None
        first, size = place.span(place.rank)
        mine = self.maxima[first : first + size] if place.dim == 0 and len(place.shape) == 3 else self.maxima
        return _rounded(mine[..., self.tiles.index(tile), :], dtype)


def _ends(tiles: range) -> tuple[int, int]:
    """The first and the last tile; -1 for none."""
    return (tiles[0], tiles[-1]) if tiles else (-1, -1)


def _rounded(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bit patterns of maxima of values that are rounded to a dtype: rounding keeps their order."""
    return magnitude_bits(bits.view(torch.float32).to(dtype).float())


class ShardedCast(SharedWeight):
    """Cast of a shard that is shared by the gathers of a step: marks what is stale, and the next gather casts again."""

    takes_shards = True

    def __init__(self, exchange: AmaxExchange, before: SharedWeight | None) -> None:
        super().__init__(transposed=before is not None and before._transposed)  # which copies of the model need
        self._exchange = exchange

    def operands(self, weight: Tensor, recipe: Recipe) -> None:
        """None: the gathered weight has its operands with it."""

    def refresh(self, weight: Tensor, recipe: Recipe) -> None:
        # the weight is not held: its shard holds this cast, and no collector frees a cycle through a tensor
        self.is_open = True
        self.invalidate()

    def invalidate(self) -> None:
        super().invalidate()
        self._exchange.is_stale = True


def plan_of(recipe: Recipe, weight: Tensor) -> CastPlan | str:
    """The cast that serves fprop and dgrad of a weight, in plain layout, or the reason why none does."""
    if recipe.since or recipe.until:
        return "its recipe changes with the step, and FSDP's buffers do not"
    if recipe.fprop is None or recipe.dgrad is None:
        return "fprop or dgrad multiplies it unquantized"
    casts = Casts(recipe)
    fprop, dgrad = casts.quantized_spec("fprop_w", weight).plan, casts.quantized_spec("dgrad_w", weight).plan
    if not fprop.spec.is_2d:
        return f"{fprop.format} has 1-D blocks: forward and backward would gather different codes"
    plain = replace(fprop, layout="plain")
    if plain != replace(dgrad, layout="plain"):
        return f"fprop and dgrad cast it differently: {fprop.text()} and {dgrad.text()}"
    return plain


@torch.compiler.disable
def _start_forward(exchange: AmaxExchange, model: Module) -> None:
    exchange.before_forward(model)


class _BeforeForward:
    """Forward hook of a model, which pickles and copies as a hook that does nothing."""

    def __init__(self, exchange: AmaxExchange | None = None) -> None:
        self._exchange = exchange

    def __call__(self, model: Module, args: Any) -> None:
        if self._exchange is not None:
            _start_forward(self._exchange, model)  # pyright: ignore[reportCallIssue]

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Step hook of every optimizer."""
    if _EXCHANGES:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for exchange in _EXCHANGES:
            exchange.after_step(params)


register_optimizer_step_post_hook(_after_step)
