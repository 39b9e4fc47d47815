"""Dispatch: host time of one call, on a tensor so small that the device is never the bottleneck.

Beside it the floor of a call: an allocation with a copy, and the launch of an empty kernel. On a CPU there is no
launch, and a row is the whole call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...casts import dequantize, quantize, quantize_both
from ...casts.ops import dequantize_request
from ...formats.cast_spec import CastSpec
from ...registry import select
from ..harness import Case, check_whole, random
from ..peers import Peer
from .common import cast_backend

SHAPE = (128, 128)
FORMATS = ("fp8_1x128", "mxfp8_e4m3", "nvfp4")


def cases(device: torch.device) -> Iterator[Case]:
    """Every public cast in three formats."""
    for format in FORMATS:
        yield _cast("quantize", format, device)
    for format in FORMATS:
        yield _cast("quantize_both", format, device)
    for format in FORMATS:
        yield _dequantize(format, device)


def _cast(name: str, format: str, device: torch.device) -> Case:
    """Case of a cast. Specs are made once, as in a layer; NVFP4 gets its amax, so that every call is one launch."""
    amax = torch.full((), 4.0, device=device)
    spec = CastSpec(format, amax=amax) if format == "nvfp4" else CastSpec(format)
    if name == "quantize":
        return _case(name, format, lambda x: quantize(x, spec), lambda x: cast_backend("cast", x, spec), device)
    backend = lambda x: cast_backend("cast_both", x, spec, spec)  # noqa: E731
    return _case(name, format, lambda x: quantize_both(x, spec, spec), backend, device)


def _dequantize(format: str, device: torch.device) -> Case:
    q = quantize(random(SHAPE, device), format)

    def backend(x: Tensor) -> str:
        return select(dequantize_request(q, torch.bfloat16)).backend

    return _case("dequantize", format, lambda x: dequantize(q), backend, device)


def _case(
    name: str, format: str, run: Callable[[Tensor], Any], backend: Callable[[Tensor], str], device: torch.device
) -> Case:
    return Case(
        name=f"{name} {format}",
        group="host time of a call" if device.type == "cuda" else "whole call on a CPU",
        format=format,
        axis="both" if name == "quantize_both" else "-1",
        shape=SHAPE,
        make=lambda device: (random(SHAPE, device),),
        run=run,
        backend=backend,
        check=check_whole,
        peers=_floor(device),
        host=True,
    )


def _floor(device: torch.device) -> dict[str, Peer | str]:
    """Floor of a call: peers that compute something else and are not compared."""
    least: dict[str, Peer | str] = {"copy": Peer(lambda x: torch.empty_like(x).copy_(x), compared=False)}
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from ._launch import launch

            least["triton launch"] = Peer(launch, compared=False)
    return least
