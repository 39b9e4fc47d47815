"""Description of a cast: `CastSpec` for users, `CastPlan` for operators.

A `CastSpec` holds the options of one operand's cast. It is resolved (defaults filled in, options checked) to a
`CastPlan`. Operators take the plan as text, such as `nvfp4 up plain hadamard=0xd7e8 stream=0xd94c4802`, and tensors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import check_name, refuse
from .checks import check_flag, in_words, is_dense
from .hadamard import DEFAULT_MASKS
from .spec import Format, check_layout, check_rule, get_format
from .stochastic import ROLES, Stochastic, stream_id


@dataclass(frozen=True, eq=False)
class CastSpec:
    """Options of one operand's cast.

    format: one of the ten names.  scale_rule, scale_layout: None takes the format's default.
    rounding: "nearest", or `Stochastic(state, name)`, which also needs `role`.
    hadamard: True (the default sign mask) or a sign mask; FP4 formats with 1-D blocks only.
    role: the operand's place in a layer, such as "dgrad_dy".
    amax: NVFP4 only. "tensor" (one amax), "group" (one per group or leading index), or the amax itself as an fp32
    tensor [] or [G], for shards that reduced it first.
    satfinite: MX only. Infinities become the largest value instead of poisoning their block.

    >>> CastSpec("mxfp4").plan().text()
    'mxfp4 even plain'
    """

    format: str
    scale_rule: str | None = None
    rounding: str | Stochastic = "nearest"
    hadamard: bool | int = False
    role: str | None = None
    amax: str | Tensor = "tensor"
    satfinite: bool = False
    scale_layout: str | None = None

    def plan(self) -> CastPlan:
        """Defaults filled in and every option checked against the format."""
        if self.role is not None and not (isinstance(self.role, str) and self.role in ROLES):  # pyright: ignore[reportUnnecessaryIsInstance]
            check_name(self.role, ROLES, "role")
        return self._resolve() if torch.compiler.is_compiling() else self._plan

    @functools.cached_property
    def _plan(self) -> CastPlan:
        if isinstance(self.rounding, Stochastic):
            return self._resolve()
        scope = self.amax if isinstance(self.amax, str) else None
        # repr distinguishes types (0 is not False), and invalid values need not be hashable
        key = repr(
            (self.format, self.scale_rule, self.rounding, self.hadamard, scope, self.satfinite, self.scale_layout)
        )
        cached = _CACHED_PLANS.get(key)
        if cached is None:
            cached = _CACHED_PLANS[key] = self._resolve()
        return cached

    @functools.cached_property
    def _cast(self) -> Cast:
        return Cast(self.plan(), self.state, self.amax_tensor)

    def _resolve(self) -> CastPlan:
        spec = get_format(self.format)
        stochastic = isinstance(self.rounding, Stochastic)
        rule = spec.default_rule(stochastic=stochastic) if self.scale_rule is None else self.scale_rule
        check_rule(spec, rule)
        layout = spec.default_layout if self.scale_layout is None else self.scale_layout
        check_layout(spec, layout)
        if isinstance(self.amax, str):
            check_name(self.amax, ("tensor", "group"), "amax scope")
        if spec.family != "nvfp4" and not (isinstance(self.amax, str) and self.amax == "tensor"):
            refuse(f"amax given for {spec.name}", "only NVFP4 has a tensor scale", "leave amax out")
        check_flag(self.satfinite, "satfinite")
        if self.satfinite and spec.family != "mx":
            refuse(f"satfinite given for {spec.name}", "satfinite is an MX option", "leave it out")
        mask = _hadamard_mask(spec, self.hadamard)
        stream, origin, first_group = None, None, 0
        if isinstance(self.rounding, Stochastic):
            self.rounding.check()
            if self.role is None:
                refuse(
                    "stochastic rounding without a role",
                    "every operand of a layer has its own stream of random words",
                    "pass role='dgrad_dy' (or another of fprop_x, fprop_w, dgrad_w, wgrad_dy, wgrad_x)",
                )
            stream = stream_id(self.rounding.name, self.role)
            origin, first_group = self.rounding.origin, self.rounding.first_group
        else:
            _check_rounding(self.rounding)
        grouped_amax = isinstance(self.amax, str) and self.amax == "group"
        return CastPlan(spec.name, rule, layout, mask, self.satfinite, grouped_amax, stream, origin, first_group)

    @property
    def state(self) -> Tensor | None:
        """Seed and tick; None without stochastic rounding."""
        return self.rounding.state if isinstance(self.rounding, Stochastic) else None

    @property
    def amax_tensor(self) -> Tensor | None:
        """The amax if the caller supplies it, else None."""
        return None if isinstance(self.amax, str) else self.amax


# cache of plans: callers make equal specs anew for every call
_CACHED_PLANS: dict[str, CastPlan] = {}


def _check_rounding(rounding: str) -> None:
    if isinstance(rounding, str) and rounding == "stochastic":  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            "rounding='stochastic'",
            "random words need a seed, a tick and the name of the layer",
            "pass rounding=Stochastic(rng_state(seed), name='layers.0.mlp.down_proj') and a role",
        )
    check_name(rounding, ("nearest",), "rounding")


def _hadamard_mask(spec: Format, hadamard: bool | int) -> int | None:
    if hadamard is False:
        return None
    mask = DEFAULT_MASKS.get(spec.hadamard, 0) if hadamard is True else hadamard
    check_mask(spec, mask)
    return mask


def check_mask(spec: Format, mask: int) -> None:
    """Raise unless a format has rotations, and this is the sign mask of one."""
    if spec.hadamard == 0 or spec.is_2d:
        refuse(
            f"Hadamard transform asked for {spec.name}",
            "it exists for mxfp4 (groups of 32) and nvfp4 with 1x16 blocks (groups of 16)",
            "leave hadamard out",
        )
    if not isinstance(mask, int) or mask in (0, 1, 16, 32):  # pyright: ignore[reportUnnecessaryIsInstance]
        refuse(
            f"hadamard={in_words(mask)}",
            "it is True, False or a sign mask; this looks like a switch or a group size",
            f"pass hadamard=True: groups of {spec.hadamard} with mask {DEFAULT_MASKS[spec.hadamard]:#x}",
        )
    if not 0 <= mask < 1 << spec.hadamard:
        refuse(
            f"Hadamard sign mask {mask:#x} for {spec.name}",
            f"the mask has one bit for each of the {spec.hadamard} values of a group",
            "pass hadamard=True for the default mask",
        )


@dataclass(frozen=True)
class CastPlan:
    """A resolved cast: everything about it that is not a tensor. Made by `CastSpec.plan` or `CastPlan.parse`."""

    format: str
    rule: str
    layout: str
    hadamard: int | None = None
    satfinite: bool = False
    grouped_amax: bool = False
    stream: int | None = None
    origin: tuple[int, int, int] | None = None
    first_group: int = 0

    def __hash__(self) -> int:
        # plans are part of cache keys; a str caches its hash, a dataclass would hash nine fields each time
        return hash(self._cached_text)

    @property
    def spec(self) -> Format:
        return get_format(self.format)

    def stored_length(self, length: int) -> int:
        """Codes stored along the scaled axis: a rotated tail group is padded to full length."""
        return length if self.hadamard is None else length + -length % self.spec.hadamard

    def text(self) -> str:
        """The plan as text, the form that operators take."""
        return self._text() if torch.compiler.is_compiling() else self._cached_text

    @functools.cached_property
    def _cached_text(self) -> str:
        return self._text()

    def _text(self) -> str:
        words = [self.format, self.rule, self.layout]
        if self.hadamard is not None:
            words.append(f"hadamard={self.hadamard:#x}")
        if self.satfinite:
            words.append("satfinite")
        if self.grouped_amax:
            words.append("grouped_amax")
        if self.stream is not None:
            words.append(f"stream={self.stream:#x}")
        if self.origin is not None:
            words.append(f"origin={self.origin[0]},{self.origin[1]},{self.origin[2]}")
        if self.first_group:
            words.append(f"first_group={self.first_group}")
        return " ".join(words)

    @staticmethod
    @functools.cache
    def parse(text: str) -> CastPlan:
        """The inverse of `text`."""
        form, rule, layout, *rest = text.split(" ")
        options = {name: value for name, _, value in (word.partition("=") for word in rest)}
        row, column, columns = options["origin"].split(",") if "origin" in options else ("", "", "")
        return CastPlan(
            form,
            rule,
            layout,
            hadamard=int(options["hadamard"], 16) if "hadamard" in options else None,
            satfinite="satfinite" in options,
            grouped_amax="grouped_amax" in options,
            stream=int(options["stream"], 16) if "stream" in options else None,
            origin=(int(row), int(column), int(columns)) if "origin" in options else None,
            first_group=int(options.get("first_group", "0")),
        )


class Cast(NamedTuple):
    """A resolved cast with its tensors, as operators take it.

    state: seed and tick of stochastic rounding.  amax: supplied by the caller, [] or [G].
    """

    plan: CastPlan
    state: Tensor | None = None
    amax: Tensor | None = None


def flatten_cast(cast: Cast | None) -> tuple[str, Tensor | None, Tensor | None]:
    """Operator arguments of a cast: its plan as text, empty without a cast, and its tensors."""
    return ("", None, None) if cast is None else (cast.plan.text(), cast.state, cast.amax)


def cast_from_flat(text: str, state: Tensor | None, amax: Tensor | None) -> Cast | None:
    """Inverse of `flatten_cast`."""
    return Cast(CastPlan.parse(text), state, amax) if text else None


_DEFAULT_SPECS: dict[str, CastSpec] = {}


def as_cast_spec(spec: str | CastSpec) -> CastSpec:
    """A bare format name means that format with its defaults."""
    if isinstance(spec, CastSpec):
        return spec
    # an invalid value need not be hashable
    if torch.compiler.is_compiling() or not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return CastSpec(spec)
    cached = _DEFAULT_SPECS.get(spec)
    if cached is None:
        cached = _DEFAULT_SPECS[spec] = CastSpec(spec)
    return cached


def as_cast(spec: str | CastSpec) -> Cast:
    """The resolved cast of a spec, every option checked against the format."""
    spec = as_cast_spec(spec)
    if torch.compiler.is_compiling():
        return Cast(spec.plan(), spec.state, spec.amax_tensor)
    return spec._cast  # pyright: ignore[reportPrivateUsage]


def check_amax(amax: Tensor | None, device: torch.device) -> None:
    """Raise unless a supplied amax is an fp32 scalar or vector on the operand's device."""
    if amax is None:
        return
    if not isinstance(amax, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "a supplied amax is a float32 tensor, so that the host does not synchronize"
        refuse(f"amax is a {type(amax).__name__}", rule, "pass x.abs().amax().float()")
    if not is_dense(amax) or amax.dtype != torch.float32 or amax.dim() > 1 or amax.device != device:
        refuse(
            f"amax is {in_words(amax)} on {amax.device}",
            f"a supplied amax is float32, [] for the tensor or [G] for its groups, on {device}",
            "pass x.abs().amax().float(), max-reduced over ranks where the tensor is sharded",
        )
