"""Checks of the arguments of casts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, ShapeError, refuse
from ..formats.cast_spec import Cast, CastSpec, as_cast, check_amax
from ..formats.checks import check_tensor, in_words
from ..formats.tensor import BlockScaled
from ..library import needs_dispatcher

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_source(x: Tensor, name: str) -> None:
    """Raise unless x is a dense floating-point matrix or a batch of them."""
    check_tensor(x, name, "casts")
    if x.dtype not in FLOAT_DTYPES:
        rule, fix = "casts take bfloat16, float16 or float32", f"convert it first, for example {name}.float()"
        refuse(f"{name} has dtype {x.dtype}", rule, fix, error=DtypeError)
    if x.dim() < 2:
        rule, fix = "casts take tensors of rank 2 or more", f"add an axis, for example {name}[None]"
        refuse(f"{name} has shape {tuple(x.shape)}", rule, fix, error=ShapeError)


def resolve_cast(x: Tensor, spec: str | CastSpec, offs: Tensor | None) -> Cast:
    """Resolve a spec and check it against the tensor to cast."""
    cast = as_cast(spec)
    plan, state, amax = cast
    if offs is None and state is None and amax is None and not plan.grouped_amax:
        return cast  # the checks below concern only these
    check_offs(offs, x.device, x.dim())
    check_amax(amax, x.device)
    if amax is not None and amax.device.type == "cpu" and not needs_dispatcher((amax,)):
        _check_signs(amax)
    if state is not None and state.device != x.device:
        rule, fix = "seed and tick are read where the cast runs", "make the state with rng_state(seed, tick, x.device)"
        refuse(f"the stochastic state is on {state.device}, x on {x.device}", rule, fix, error=DeviceError)
    if offs is not None and plan.spec.is_2d:
        rule = "a 2-D block would span groups; groups of tokens take formats with 1-D blocks"
        fix = "use mxfp8_e4m3, nvfp4 or fp8_1x128 for grouped activations"
        refuse(f"offs given for {plan.format}", rule, fix)
    groups = 0 if amax is None else amax.dim()
    if (plan.grouped_amax or groups) and offs is None and x.dim() != 3:
        rule = "groups are the leading axis of a rank-3 tensor, or are given by offs"
        fix = "pass offs, or amax='tensor'"
        refuse(f"an amax per group for shape {tuple(x.shape)}", rule, fix)
    if groups and amax is not None:
        want = x.shape[0] if offs is None else offs.shape[0]
        if amax.shape[0] != want:
            refuse(f"{amax.shape[0]} maxima for {want} groups", rule="one per group", fix="pass [G]", error=ShapeError)
    return cast


def _check_signs(amax: Tensor) -> None:
    """Raise for a negative amax. On the CPU only: on a GPU the check would synchronize, and the cast gives NaN."""
    lowest = float(amax.min()) if amax.numel() else 0.0
    if lowest < 0:
        rule = "a maximum of magnitudes is not negative (on a GPU, and while tracing, the cast gives NaN)"
        fix = "pass x.abs().amax().float()"
        refuse(f"amax has {lowest}", rule, fix)


def check_offs(offs: Tensor | None, device: torch.device, rank: int, *, required: bool = False) -> None:
    """Raise unless group ends are an int32 vector on the operand's device."""
    if offs is None and not required:
        return
    if not isinstance(offs, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        fix = "pass torch.tensor(offs, dtype=torch.int32)"
        refuse(f"offs is a {type(offs).__name__}", rule="group ends are an int32 tensor", fix=fix, error=DtypeError)
    if rank != 2:
        refuse(
            f"offs given for a rank-{rank} tensor",
            rule="groups are rows of a matrix",
            fix="flatten to 2-D",
            error=ShapeError,
        )
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.device != device:
        rule = f"group ends are an int32 vector on {device}, inclusive ends as in torch's grouped_mm"
        fix = "pass sizes.cumsum(0).to(torch.int32)"
        refuse(f"offs is {in_words(offs)} on {offs.device}", rule, fix, error=ShapeError)


def check_group_count(q: BlockScaled, offs: Tensor | None, name: str) -> None:
    """Raise unless offs has as many ends as the operand has padded groups or tensor scales."""
    if offs is None:
        return
    scales = q.global_scale.shape[0] if q.global_scale is not None and q.global_scale.dim() else None
    for count in (q.groups if q.group_align else None, scales):
        if count is not None and count != offs.shape[0]:
            what = f"{offs.shape[0]} group ends for {name}, which was cast with {count} groups"
            rule, fix = "an operand is read with the offs that it was cast with", "pass those"
            refuse(what, rule, fix, error=ShapeError)


def check_same_device(first: Tensor, first_name: str, second: Tensor, second_name: str) -> None:
    """Raise unless two tensors are on one device."""
    if first.device != second.device:
        what = f"{first_name} is on {first.device}, {second_name} on {second.device}"
        rule, fix = "all inputs of a cast are on one device", f"pass {first_name}.to({second_name}.device)"
        refuse(what, rule, fix, error=DeviceError)
