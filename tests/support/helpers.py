"""What several test files share: tensors and operands as plain numpy bits, and the cast that the oracles expect."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import oracles
from blockscale.formats import FORMATS, BlockScaled

GOLDEN = Path(__file__).parents[1] / "golden"
QUICK_INTERPRETER = Path(__file__).with_name("quick_interpreter.py")
MX = [name for name, spec in FORMATS.items() if spec.family == "mx"]
NVFP4 = ["nvfp4", "nvfp4_16x16"]
FP8 = ["fp8_1x128", "fp8_128x128"]
ONE_D = [name for name, spec in FORMATS.items() if not spec.is_2d]
FORMAT_RULES = [(name, rule) for name, spec in FORMATS.items() for rule in spec.rules]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def first_of(values: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """Parameters of which `make test` runs those that are kept, and `make test-all` the others too."""
    return [value if kept(value) else pytest.param(*_several(value), marks=pytest.mark.sweep) for value in values]


def has_cpp_compiler() -> bool:
    """Whether torch.compile's inductor can build CPU code here."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)


# ---- bits ----------------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> NDArray[np.unsignedinteger]:
    """A tensor of any dtype and strides as unsigned integers of its element size, in its own shape."""
    width = tensor.element_size()
    raw = tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    return raw.cpu().numpy().view(f"u{width}")


def same_bits(got: NDArray, want: NDArray, what: object = "") -> int:
    """Assert equality of bit patterns and shapes; returns the number of values compared."""
    got, want = (v.view(f"u{v.dtype.itemsize}") if v.dtype.kind == "f" else v for v in (got, want))
    assert got.shape == want.shape, (what, got.shape, want.shape)
    if not np.array_equal(got, want):
        where = np.argwhere(got != want)
        first = tuple(where[0])
        raise AssertionError(
            f"{what}: {len(where)} of {got.size} differ, {first}: {got[first]:X}, want {want[first]:X}"
        )
    return int(got.size)


def source(x: NDArray[np.float32], dtype: str, device: torch.device) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """`x` as a tensor of `dtype`, and the exact fp32 values of that tensor, without any conversion by torch."""
    if dtype == "bf16":  # cut, not rounded: every pattern stays what it is
        cut = np.ascontiguousarray(x).view(np.uint32) >> 16
        tensor = torch.from_numpy(cut.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
        return tensor.to(device), (cut << 16).view(np.float32)
    if dtype == "fp16":
        with np.errstate(over="ignore", invalid="ignore"):
            half = x.astype(np.float16)
            return torch.from_numpy(half).to(device), half.astype(np.float32)
    return torch.from_numpy(np.array(x, np.float32)).to(device), np.array(x, np.float32)


def codes_of(q: BlockScaled) -> NDArray[np.uint8]:
    """One code per byte, scaled axis last, [..., rows, stored length]; unpacked by the oracle."""
    raw = bits(q.operand.data.view(torch.uint8))
    return oracles.unpack_fp4(raw, q.length) if q.spec.element.bits == 4 else raw


def scales_of(q: BlockScaled) -> NDArray[np.unsignedinteger]:
    """Bit patterns of the block scales, [..., row tiles, blocks]."""
    return bits(q.plain_scale())


def same_operand(got: BlockScaled, want: BlockScaled) -> None:
    """Assert that two operands agree in every byte that they show and in what they mean."""
    for name in ("format", "axis", "scale_layout", "shape", "group_align", "hadamard"):
        assert getattr(got, name) == getattr(want, name), name
    same_bits(bits(got.data), bits(want.data), "data")
    same_bits(bits(got.scale), bits(want.scale), "scale")
    assert (got.global_scale is None) == (want.global_scale is None)
    if got.global_scale is not None and want.global_scale is not None:
        same_bits(bits(got.global_scale), bits(want.global_scale), "global scale")


# ---- what the oracles make of a matrix -----------------------------------------------------------------------------


class Expected(NamedTuple):
    """Codes [rows, K], one per byte; scale bits on the block grid; bits of NVFP4's tensor scale."""

    codes: NDArray[np.uint8]
    scale: NDArray[np.unsignedinteger]
    tensor_scale: np.uint32 | None


def expect(
    x: NDArray[np.float32],
    form: str,
    rule: str,
    *,
    satfinite: bool = False,
    amax: np.float32 | float | None = None,
    words: NDArray | None = None,
) -> Expected:
    """The oracles' cast of a matrix [rows, K] with blocks along K; random `words` of its shape round stochastically."""
    spec = FORMATS[form]
    if spec.family == "nvfp4":
        S_dec, scale, codes = oracles.nvfp4_quantize(x, amax, rule, spec.block, words)
        return Expected(codes, scale, np.float32(S_dec).view(np.uint32))
    blocks = oracles.to_blocks(x, spec.block)
    if spec.family == "fp8":
        if words is None:
            scale, codes = oracles.fp8_quantize(blocks, rule)
        else:
            enc, scale = oracles.fp8_scales(oracles.block_amax(blocks), rule)
            codes = oracles.encode_sr(blocks * enc[..., None], "e4m3", oracles.to_blocks(words, spec.block))
        scale = scale.view(np.uint32)
    else:
        R = None if words is None else oracles.to_blocks(words, spec.block)
        scale, codes = oracles.mx_quantize(blocks, spec.element.name, rule, satfinite, R)
    return Expected(oracles.from_blocks(codes, spec.block, x.shape), scale, None)


def same_cast(q: BlockScaled, want: Expected, what: object = "") -> int:
    """Assert that an operand of rank 2 has the bytes that the oracles expect; returns the number of codes compared."""
    same_bits(scales_of(q), want.scale, (what, "scale"))
    if want.tensor_scale is not None:
        assert q.global_scale is not None
        assert bits(q.global_scale) == want.tensor_scale, (what, "tensor scale")
    return same_bits(codes_of(q), want.codes, (what, "codes"))


def expect_values(q: BlockScaled) -> NDArray[np.float32]:
    """What an operand of rank 2 with one tensor scale stands for, scaled axis last, by the oracles."""
    codes, scale, spec = codes_of(q), scales_of(q), q.spec
    if spec.family == "nvfp4":
        assert q.global_scale is not None
        return oracles.nvfp4_dequantize(bits(q.global_scale).view(np.float32).item(), scale, codes, spec.block)
    factor = scale.view(np.float32) if spec.family == "fp8" else oracles.e8m0_decode(scale)
    values = oracles.fp8_dequantize(factor, oracles.to_blocks(codes, spec.block), spec.element.name)
    return oracles.from_blocks(values, spec.block, codes.shape)


# ---- golden files --------------------------------------------------------------------------------------------------


@cache
def golden(stem: str) -> list[dict]:
    """The cases of one golden file."""
    return json.loads((GOLDEN / f"{stem}.json").read_text())["cases"]


def expand(tokens: str | list[str]) -> list[int]:
    """Hexadecimal entries as integers; `H*n` stands for n copies."""
    tokens = [tokens] if isinstance(tokens, str) else tokens
    return [int(t.partition("*")[0], 16) for t in tokens for _ in range(int(t.partition("*")[2] or 1))]


def f32(tokens: str | list[str]) -> NDArray[np.float32]:
    return np.array(expand(tokens), np.uint32).view(np.float32)


def u8(tokens: str | list[str]) -> NDArray[np.uint8]:
    return np.array(expand(tokens), np.uint8)


def all_bf16() -> torch.Tensor:
    """Every bf16 value, NaN and infinities among them."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def interpreted(program: Path, *arguments: str) -> tuple[int, int, int]:
    """Cases, values and mismatches that a program counts in Triton's interpreter, which is chosen at import."""
    server = _interpreter()
    with tempfile.NamedTemporaryFile("r") as printed:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([printed.name, 600, str(program), *arguments]) + "\n")
        server.stdin.flush()
        status, text = server.stdout.readline(), printed.read()
    assert status == "0\n", text
    cases, values, wrong = map(int, text.split()[:3])
    return cases, values, wrong


@cache
def _interpreter() -> subprocess.Popen[str]:
    """Imports torch and Triton once for all programs of a test worker, and ends with it."""
    command = [sys.executable, "-W", "ignore", str(QUICK_INTERPRETER)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
