"""Triton's `dequantize` in the interpreter against the reference, byte for byte; a script like `interpreted.py`.

    TRITON_INTERPRET=1 python tests/casts/interpreted_dequantize.py [format ...]

Prints `cases values mismatches` and the first mismatches. Codes and scales are mostly random bytes, with special values
among them: no cast writes most of them, but an operand may come from elsewhere.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

assert os.environ.get("TRITON_INTERPRET") == "1"
os.environ["BLOCKSCALE_POISON"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import blockscale as bs  # noqa: E402
from blockscale.casts import _triton_dequantize  # noqa: E402
from blockscale.formats import FORMATS, BlockScaled, Format  # noqa: E402

Case = tuple[str, BlockScaled, Tensor | None, torch.dtype]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECIAL_BYTES = [0x00, 0x01, 0x02, 0x7E, 0x7F, 0x80, 0x81, 0xFD, 0xFE, 0xFF]
SPECIAL_VALUES = [0.0, -0.0, 1.0, -1.0, 2.0**-126, 1e-44, 3e38, torch.inf, -torch.inf, torch.nan]
ENDS = torch.tensor([3, 3, 140], dtype=torch.int32)


def cast(x: Tensor, spec: Format, axis: int, **options: object) -> BlockScaled:
    with bs.use_backend("reference"):
        return bs.quantize(x, spec.name, axis=axis, **options)  # pyright: ignore[reportArgumentType]


def noise(spec: Format, shape: tuple[int, ...], axis: int, layout: str) -> BlockScaled:
    """Operand of random codes, all codes included, under scales of every kind."""
    q = cast(torch.zeros(shape), spec, axis, scale_layout=layout)
    q.data.view(torch.uint8).random_(0, 256)
    if q.scale.dtype == torch.float32:
        wide = torch.randn(q.scale.shape) * torch.exp2(torch.randint(-120, 120, q.scale.shape))
        special = torch.tensor(SPECIAL_VALUES)[torch.randint(len(SPECIAL_VALUES), q.scale.shape)]
        q.scale.copy_(torch.where(torch.rand(q.scale.shape) < 0.5, wide, special))
    else:
        scale = q.scale.view(torch.uint8)
        usual = torch.randint(0, 256, scale.shape, dtype=torch.uint8)
        special = torch.tensor(SPECIAL_BYTES, dtype=torch.uint8)[torch.randint(len(SPECIAL_BYTES), scale.shape)]
        scale.copy_(torch.where(torch.rand(scale.shape) < 0.7, usual, special))
    return q if q.global_scale is None else replace(q, global_scale=torch.tensor(1.7e-3))


def without_pads(q: BlockScaled) -> BlockScaled:
    """Copy without pads: dense rows in the order of the source's axes, unaligned."""
    raw = q.data.view(torch.uint8)
    moved = torch.zeros(raw.numel() + 1, dtype=torch.uint8)[1:].view(raw.shape).copy_(raw)
    scale = q.scale if q.scale_layout == "blocked" else q.scale.clone(memory_format=torch.contiguous_format)
    return replace(q, data=moved.view(q.data.dtype), scale=scale)


def plain(spec: Format) -> Iterator[Case]:
    for axis, layout in itertools.product((-1, -2), spec.layouts):
        many = noise(spec, (70, 200), axis, layout)
        for dtype in DTYPES if layout == spec.default_layout else DTYPES[:1]:
            yield "noise", many, None, dtype
    for axis in (-1, -2):
        yield "matrices", noise(spec, (2, 2, 17, 34), axis, spec.layouts[1]), None, torch.bfloat16
    for shape, axis in (((8, 1024), -1), ((128, 128), -2)):
        for dtype in DTYPES[::2]:
            yield "full tiles", noise(spec, shape, axis, spec.default_layout), None, dtype
    for axis in (-1, -2):
        odd = noise(spec, (33, 95), axis, spec.default_layout)
        yield "odd", odd, None, torch.float16
        yield "without pads", without_pads(odd), None, torch.bfloat16
        yield "transposed", odd.mT, None, torch.float32
        yield "one value", noise(spec, (1, 1), axis, spec.default_layout), None, torch.bfloat16
        if odd.global_scale is not None:
            for value in SPECIAL_VALUES[axis == -2 :: 2]:
                yield f"tensor scale {value}", replace(odd, global_scale=torch.tensor(value)), None, torch.float32
            matrices = noise(spec, (2, 2, 20, 50), axis, spec.default_layout)
            yield (
                "scale per matrix",
                replace(matrices, global_scale=torch.tensor([0.3, torch.nan])),
                None,
                torch.bfloat16,
            )


def grouped(spec: Format) -> Iterator[Case]:
    """Groups, with empty ones and rows outside all groups; padded operands also transposed."""
    x = torch.randn(150, 41) * torch.exp2(torch.randint(-9, 9, (150, 1)))
    options: list[dict[str, object]] = [{"scale_layout": spec.layouts[1]}]
    options += [{"hadamard": True}] if spec.hadamard else []
    options += [{"amax": "group"}, {"amax": "group", "hadamard": True}] if spec.family == "nvfp4" else []
    for option, axis in itertools.product(options, (-1, -2)):
        q = cast(x, spec, axis, offs=ENDS, **option)
        yield f"groups {option}", q, ENDS, torch.bfloat16
        yield f"groups {option} transposed", q.mT, ENDS, torch.float32
    for ends in (ENDS[:0], torch.tensor([150], dtype=torch.int32)):
        yield f"{len(ends)} groups", cast(x, spec, -2, offs=ends), ends, torch.float16


def rotated(spec: Format) -> Iterator[Case]:
    for axis, shape in itertools.product((-1, -2), ((37, 75), (2, 32, 64))):
        for mask in (True, 1 << (spec.hadamard - 1) | 5):
            q = cast(torch.randn(shape), spec, axis, hadamard=mask)
            yield f"rotated {mask}", q, None, torch.float32 if mask is True else torch.bfloat16


def cases(spec: Format) -> Iterator[Case]:
    yield from plain(spec)
    if not spec.is_2d and spec.name not in ("mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2"):  # as mxfp8_e4m3
        yield from grouped(spec)
    if not spec.is_2d and spec.hadamard:
        yield from rotated(spec)


def main(names: list[str]) -> int:
    assert _triton_dequantize.INTERPRETED
    torch.manual_seed(0)
    count = values = 0
    wrong: list[str] = []
    for name in names:
        for what, q, offs, dtype in cases(FORMATS[name]):
            with bs.use_backend("reference"):
                want = bs.dequantize(q, dtype, offs=offs)
            with bs.use_backend("triton"):
                got = bs.dequantize(q, dtype, offs=offs)
            count, values = count + 1, values + want.numel()
            if not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                wrong.append(
                    f"{q} {what} {dtype}: {int((got.view(torch.uint8) != want.view(torch.uint8)).sum())} bytes off"
                )
    print(count, values, len(wrong))
    print("\n".join(wrong[:10]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or list(FORMATS)))
