"""Reproducible stochastic rounding: random words from a counter (Philox), not from the state of a generator.

The word of an element is a pure function of (seed, tick, stream, group, position), so it does not depend on launch
geometry, sharding, recomputation or a resume, and nothing but the seed needs saving. Philox4x32-10 (Salmon et al.
2011), the same function as `tl.philox`.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError, check_name, refuse
from ..tracing import constant_when_compiled
from .checks import all_ints, check_device, check_int, check_text, in_words, is_dense

ROLES = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def module_name(name: str) -> str:
    """Module name that seeds a stream: wrapper components and one leading `module` are dropped.

    >>> module_name("module._orig_mod.layers.0.mlp")
    'layers.0.mlp'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts and parts[0] == "module" else parts)


@constant_when_compiled
def stream_id(name: str, role: str) -> int:
    """The 32-bit stream of one operand of one layer.

    >>> hex(stream_id("model.layers.0.mlp.down_proj", "dgrad_dy"))
    '0xd94c4802'
    """
    check_name(role, ROLES, "role")
    return (zlib.crc32(module_name(name).encode()) & 0xFFFFFF) << 8 | ROLES.index(role)


def rng_state(seed: int, tick: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Seed and tick as the int64 tensor [2] that stochastic casts read on the device.

    tick = optimizer_step * micro_batches + micro_batch; advance it in place between casts that must differ.

    >>> rng_state(7, tick=3)
    tensor([7, 3])
    """
    seed, tick = check_seed(seed), whole_number(tick, "tick")
    check_device(device)
    signed = (seed & (2**64 - 1)) - (2**64 if seed & 2**63 else 0)
    return torch.tensor([signed, tick], dtype=torch.int64, device=device)


def whole_number(value: object, name: str, end: int = 2**63) -> int:
    """value as an int; raises for bools and tensors, and outside [-2^63, end).

    >>> whole_number(7, "tick")
    7
    """
    number = end
    with contextlib.suppress(TypeError):
        number = end if isinstance(value, Tensor | bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    if -(2**63) <= number < end:
        return number
    rule = f"it is a whole number from -2^63 to 2^{end.bit_length() - 1} - 1"
    refuse(f"{name}={in_words(value)}", rule, f"pass {name}=0, or any other int")


def check_seed(seed: object) -> int:
    """The seed as a signed or unsigned 64-bit int."""
    return whole_number(seed, "seed", end=2**64)


@dataclass(frozen=True, eq=False)
class Stochastic:
    """Stochastic rounding: seed and tick on the device, the layer's name, and the origin of a shard.

    origin: (first row, first column, columns of the full tensor) of a shard; None if the tensor is not sharded.
    first_group: global index of the first group (expert) when the cast is grouped.
    """

    state: Tensor
    name: str
    origin: tuple[int, int, int] | None = None
    first_group: int = 0

    def check(self) -> None:
        """Raise unless state, name, origin and first_group are valid."""
        if not isinstance(self.state, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(
                f"stochastic state is a {type(self.state).__name__}",
                rule="seed and tick are one int64 tensor of shape [2]",
                fix="make it with blockscale.rng_state(seed, tick, device)",
                error=DtypeError,
            )
        placed = type(self.origin) is tuple and len(self.origin) == 3 and all_ints(self.origin)
        if self.origin is not None and not placed:
            refuse(
                f"origin={self.origin if type(self.origin) is tuple else in_words(self.origin)}",
                "a shard starts at (row, column) of a tensor with these columns: whole numbers, not negative",
                "pass (first row, first column, columns of the full tensor)",
            )
        rule = "groups are counted from 0 and share 16 bits of the counter: a whole number, the global index"
        check_int(self.first_group, "first_group", rule, most=65535)
        check_text(self.name, "name", "layers.0.mlp.down_proj")
        if not is_dense(self.state) or self.state.dtype != torch.int64 or self.state.shape != (2,):
            refuse(
                f"stochastic state is {in_words(self.state)}",
                rule="seed and tick are one int64 tensor of shape [2] on the operand's device",
                fix="make it with blockscale.formats.rng_state(seed, tick, device)",
                error=ShapeError,
            )
        if not self.name:
            refuse(
                "stochastic rounding without a name",
                "random words are per layer, so the cast must know the layer's fully qualified name",
                "pass Stochastic(state, name='layers.0.mlp.down_proj')",
            )


def _multiply_high_low(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two 32-bit halves of factor * x for int64 words below 2^32, without leaving int64."""
    low_half, high_half = x & 0xFFFF, x >> 16
    low = factor * low_half
    middle = factor * high_half + (low >> 16)
    return middle >> 16, ((middle << 16) | (low & 0xFFFF)) & _MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32 with ten rounds; int64 tensors holding 32-bit words, broadcast together.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(int(word)) for word in philox((zero,) * 4, (zero, zero))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_high_low(_MULTIPLIER_0, c0)
        high1, low1 = _multiply_high_low(_MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return [c0, c1, c2, c3]


def random_words(position: Tensor, state: Tensor, stream: int, group: Tensor | int = 0) -> Tensor:
    """int64 positions [...] -> int64 words in [0, 2^32), one per position.

    position: row * columns + column in the full source tensor.  group: global expert index, 0 when dense.
    """
    seed, tick = state[0], state[1]
    key = (seed & _MASK, seed >> 32 & _MASK)
    group = torch.as_tensor(group, dtype=torch.int64, device=position.device)
    upper = (group << 16 | position >> 34) & _MASK
    counter = (position >> 2 & _MASK, upper, tick & _MASK, torch.full_like(tick, stream))
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1)
    return words.gather(-1, (position & 3).expand(words.shape[:-1]).unsqueeze(-1)).squeeze(-1)
