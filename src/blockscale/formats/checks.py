"""Argument checks for the whole library: dense tensors, integers, flags, devices, dtypes, models.

A bad value is refused where it is given, with the value, the rule and the fix, not where it would fail later.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ..errors import DeviceError, DtypeError, message, refuse

if TYPE_CHECKING:
    from collections.abc import Iterable

# the types of nearly all arguments; subclasses take the slower isinstance check
PLAIN_TYPES = (Tensor, Parameter)


def in_words(value: object) -> str:
    """Short description of a value for error messages, without a tensor's elements.

    >>> in_words(torch.ones(2, 3)), in_words([1.0]), in_words(None)
    ('torch.float32 (2, 3)', 'a list', 'None')
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Tensor) and not value.is_nested:
        return f"{value.dtype} {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def is_dense(x: object) -> bool:
    """Whether x is a strided torch tensor: not sparse, not nested. torch.compile accepts only those, and does not trace
    `layout` in a backward."""
    if type(x) not in PLAIN_TYPES and not isinstance(x, Tensor):
        return False
    return torch.compiler.is_compiling() or (x.layout == torch.strided and not x.is_nested)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def overlaps(x: Tensor) -> bool:
    """Whether elements of a dense tensor may share memory, as those of an expanded one do.

    >>> overlaps(torch.zeros(1, 4).expand(3, 4)), overlaps(torch.zeros(4, 6)[:, ::2].mT)
    (True, False)
    """
    if x.is_contiguous():
        return False
    end = 0
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step <= end:
            return True
        end += step * (size - 1)
    return False


def check_tensor(x: object, name: str, taker: str) -> None:
    """Raise unless x is a dense, unquantized torch tensor.  taker: plural noun for the message (casts, layers)."""
    if is_dense(x):
        return
    if not isinstance(x, Tensor):
        if type(x).__name__ == "BlockScaled":  # whose file imports this one
            fix = f"pass blockscale.dequantize({name}), or the tensor that it was cast from"
            refuse(f"{name} is {x}", rule=f"{taker} take high-precision tensors", fix=fix, error=DtypeError)
        refuse(
            f"{name} is {in_words(x)}",
            rule=f"{taker} take torch tensors",
            fix=f"pass torch.tensor({name})",
            error=DtypeError,
        )
    fix = f"pass torch.nested.to_padded_tensor({name}, 0.0)" if x.is_nested else f"pass {name}.to_dense()"
    what = "is a nested tensor" if x.is_nested else f"has layout {x.layout}"
    refuse(f"{name} {what}", rule=f"{taker} take dense tensors", fix=fix, error=DtypeError)


def check_int(value: object, name: str, rule: str, *, least: int = 0, most: int = 2**63 - 1) -> None:
    """Raise unless value is an integer from `least` to `most`; bools are refused."""
    if not _is_whole(value) or not least <= value <= most:  # pyright: ignore[reportOperatorIssue]
        bounds = f"of {least} or more" if most == 2**63 - 1 else f"from {least} to {most}"
        refuse(f"{name}={in_words(value)}", rule, f"pass an int {bounds}")


def check_sizes(**sizes: object) -> None:
    """Raise unless all are sizes of a layer: integers of 0 or more."""
    for name, size in sizes.items():
        check_int(size, name, f"{name} is a size, a whole number")


def check_number(value: object, name: str, rule: str, fix: str) -> None:
    """Raise unless it is a finite number."""
    # plain types first: torch.compile cannot trace the check against numbers.Real
    real = isinstance(value, int | float) or isinstance(value, numbers.Real)  # noqa: SIM101
    if isinstance(value, bool) or not real or not -math.inf < value < math.inf:  # pyright: ignore[reportOperatorIssue]
        refuse(f"{name}={in_words(value)}", rule, fix)


def check_flag(value: object, name: str) -> None:
    """Raise unless it is True or False."""
    if not isinstance(value, bool):
        refuse(f"{name}={in_words(value)}", f"{name} is True or False", f"pass {name}=True or leave it out")


def check_text(value: object, name: str, example: str) -> None:
    """Raise unless it is text."""
    if not isinstance(value, str):
        refuse(f"{name}={in_words(value)}", f"{name} is text", f"pass {name}={example!r}")


def check_device(device: object) -> None:
    """Raise unless device is valid for torch and, if a GPU, exists on this machine."""
    try:
        made = torch.device(device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (TypeError, ValueError, RuntimeError):
        rule = "a device is a torch.device, or its name"
        raise DeviceError(message(f"device {in_words(device)}", rule=rule, fix="pass 'cpu' or 'cuda'")) from None
    if made.type == "cuda" and torch.cuda.is_available() and (made.index or 0) >= torch.cuda.device_count():
        rule = f"GPUs are numbered from 0, and torch sees {torch.cuda.device_count()} here"
        refuse(f"device {in_words(device)}", rule, fix="pass 'cuda' or 'cuda:0'", error=DeviceError)


def check_place(device: object, dtype: object) -> None:
    """Raise unless parameters can have this device and dtype; None is torch's default."""
    if device is not None:
        check_device(device)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        refuse(
            f"dtype={in_words(dtype)}",
            rule="parameters are in a floating-point dtype",
            fix="pass dtype=torch.bfloat16, or leave it out",
            error=DtypeError,
        )


def check_model(model: object, rule: str) -> None:
    """Raise unless model is a torch.nn.Module."""
    if not isinstance(model, Module):
        refuse(f"a model that is a {type(model).__name__}", rule, "pass the model itself, a torch.nn.Module")


def check_kind(value: object, kind: type, name: str, rule: str, fix: str) -> None:
    """Raise unless value is None or an instance of `kind`."""
    if value is not None and not isinstance(value, kind):
        refuse(f"{name} is {in_words(value)}", rule, fix)


def check_pair_of(values: object, name: str, rule: str) -> None:
    """Raise unless it is a tuple of two."""
    if not isinstance(values, tuple) or len(values) != 2:
        refuse(f"{name} is {in_words(values)}", rule, f"pass {name}=(None, None)")


def all_ints(values: Iterable[object]) -> bool:
    """Whether all are integers of 0 or more."""
    return all(_is_whole(each) and each >= 0 for each in values)  # pyright: ignore[reportOperatorIssue]


def _is_whole(value: object) -> bool:
    """Whether value is an integer, symbolic integers included; bools are not."""
    if isinstance(value, int):  # first: torch.compile cannot trace the check against numbers.Integral
        return not isinstance(value, bool)
    return isinstance(value, numbers.Integral | torch.SymInt)
