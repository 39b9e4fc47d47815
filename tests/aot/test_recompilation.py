"""M never causes a recompilation: the tests count Triton's cache keys, and only the last one compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

from triton import knobs

from aot.compiled import CAN_COMPILE, compiled_for
from blockscale import quantize
from blockscale.formats import BlockScaled
from blockscale.gemm import heuristics
from blockscale.hardware import Capability, compiling_for
from blockscale.registry import Request

_hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
pytestmark = pytest.mark.skipif(
    not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"
)

# one row, odd and even counts, multiples of 4 and of 16, around the edges of tiles and of waves
TOKENS = sorted({1, 2, 3, 15, 16, 17, 31, 100, 777, 1000, 1111, 3000, 6000, *(
    size + step for size in (64, 128, 192, 256, 512, 1024, 2048, 4096, 8192) for step in (-1, 0, 1)
)})  # fmt: skip
WEIGHTS = ((6144, 4096), (28672, 4096), (4096, 14336), (7168, 2048), (2112, 7168), (576, 2048))  # (N, K)
# tiles, with stream-K or without, and the smallest ones also with loads of 16 rows
MOST_KERNELS = 2 * (len(heuristics.TILES) + 2)


@contextmanager
def keys() -> Iterator[set[str]]:
    """Cache keys of the kernels that launches in this context would compile."""
    seen: set[str] = set()

    def note(*, key: str, **_: object) -> bool:
        seen.add(key)
        return True  # do not compile

    _hopper.scaled_mm_kernel.device_caches.clear()  # from other tests of this process
    with compiled_for(90), compiling_for(Capability("cuda", 90)), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        yield seen


def empty(rows: int, length: int, name: str) -> BlockScaled:
    return quantize(torch.empty(rows, length, device="meta"), name)


def product(m: int, n: int, k: int, weight: str, dtype: torch.dtype, *, accumulate: bool = False) -> None:
    a, b = empty(m, k, "fp8_1x128"), empty(n, k, weight)
    _hopper.scaled_mm(a, b, torch.empty(m, n, dtype=dtype, device="meta"), bias=None, accumulate=accumulate)


def variant(m: int, n: int, k: int, weight: str, dtype: torch.dtype, *, accumulate: bool = False) -> Any:
    options = frozenset({"accumulate"} if accumulate else ())
    return _hopper.precompile_key(
        Request("gemm", Capability("cuda", 90), ("fp8_1x128", weight), (m, n, k), dtype, (), options)
    )


@pytest.mark.parametrize("weight", ["fp8_128x128", "fp8_1x128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_kernel_per_plan_for_any_m(weight: str, dtype: torch.dtype) -> None:
    """Over all layers together: neither M, nor K, nor the strides of scales need another kernel of the same plan."""
    with keys() as seen:
        cases = [(m, n, k, weight, dtype) for n, k in WEIGHTS for m in TOKENS]
        for case in cases:
            product(*case)
        plans = {variant(*case) for case in cases}
    assert len(seen) == len(plans) <= MOST_KERNELS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_kernel_per_plan_for_wgrad(dtype: torch.dtype) -> None:
    """K is the number of tokens, any number."""
    tokens = [m for m in range(1, 8193, 7) if m % 256 < 64 or m < 256]
    with keys() as seen:
        cases = [(n, k, m, "fp8_1x128", dtype) for n, k in WEIGHTS for m in tokens]
        for case in cases:
            product(*case, accumulate=True)
        plans = {variant(*case, accumulate=True) for case in cases}
    assert len(seen) == len(plans) <= MOST_KERNELS


def test_the_count_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a kernel that specializes on M has a key for each class."""
    m = next(p for p in _hopper.scaled_mm_kernel.params if p.name == "M")
    _hopper.scaled_mm_kernel.device_caches.clear()
    monkeypatch.setattr(m, "do_not_specialize", False)
    with keys() as seen:
        for tokens in (17, 31, 32):
            product(tokens, 4096, 4096, "fp8_128x128", torch.bfloat16)
    _hopper.scaled_mm_kernel.device_caches.clear()
    assert len(seen) == 2


@pytest.mark.slow
def test_one_compilation_serves_every_m() -> None:
    """The same with compilation: one cubin on disk."""
    _hopper.scaled_mm_kernel.device_caches.clear()
    with compiled_for(90), compiling_for(Capability("cuda", 90)):
        for m in (17, 32, 33, 47, 64):
            product(m, 256, 512, "fp8_128x128", torch.bfloat16)
        made = list(Path(knobs.cache.dir).rglob("scaled_mm_kernel.cubin"))
    _hopper.scaled_mm_kernel.device_caches.clear()
    assert len(made) == 1
