"""Hopper GEMM by another ptxas than Triton's: separate cache keys, no effect on other kernels, and logged failures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed")

import triton
import triton.language as tl
from triton import knobs

from aot.compiled import CAN_COMPILE, OTHER_PTXAS, compiled_for
from blockscale import quantize
from blockscale.errors import PtxasError
from blockscale.gemm import _ptxas, heuristics

_hopper = pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"),
    pytest.mark.slow,
]
SMALLEST = heuristics.data_parallel_plan(heuristics.TILES[-1], heuristics.Problem(128, 128, 128, False, False, 132))
X, W = quantize(torch.zeros(128, 256), "fp8_1x128"), quantize(torch.zeros(128, 256), "fp8_128x128")


def forget() -> None:
    """Clear this process's caches of choices and compiled kernels; files stay."""
    _ptxas.resolve.cache_clear()
    _ptxas._options.cache_clear()
    _hopper.scaled_mm_kernel.device_caches.clear()
    _theirs.device_caches.clear()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (_ptxas.SETTING, *_ptxas.TRITON_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_ptxas, "_failures", [])
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    forget()
    yield
    forget()


@triton.jit
def _theirs(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i) * 2.0 + 1.0)


def product() -> None:
    _hopper.launch(X, W, torch.empty(128, 128, dtype=torch.bfloat16), None, accumulate=False, plan=SMALLEST)


def theirs() -> None:
    _theirs[(1,)](torch.zeros(128), torch.zeros(128), 128, enable_fp_fusion=True)


def fake(path: Path, version: str, rest: str) -> str:
    """A ptxas that answers `--version`, and otherwise runs `rest`."""
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo V{version}; exit; fi\n{rest}\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Versions of ptxas that ran instead of Triton's own, in order."""
    versions: list[str] = []
    real = _ptxas.assemble

    def assemble(ptxas: _ptxas.Ptxas, *rest: Any) -> bytes:
        versions.append(ptxas.name)
        return real(ptxas, *rest)

    monkeypatch.setattr(_ptxas, "assemble", assemble)
    return versions


def test_each_ptxas_has_its_own_cache_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: list[str]) -> None:
    """Also a third with the same PTX version; with empty memory caches each finds its own on disk."""
    twin = fake(tmp_path / "ptxas", "12.9.41", f'exec {OTHER_PTXAS} "$@"')
    with compiled_for(90) as kernels:
        for _ in range(2):
            for setting in ("default", OTHER_PTXAS, twin):
                monkeypatch.setenv(_ptxas.SETTING, setting)
                product()
            forget()
        folders = {path.parent for path in Path(knobs.cache.dir).rglob("scaled_mm_kernel.cubin")}
    assert used == ["12.9.86", "12.9.41"], "compiled once each"
    assert len(folders) == 3
    default, newer, third, *again = kernels
    assert len({default.hash, newer.hash, third.hash}) == 3
    assert [kernel.hash for kernel in again] == [default.hash, newer.hash, third.hash]
    assert [kernel.asm["cubin"] for kernel in again] == [one.asm["cubin"] for one in (default, newer, third)]
    assert newer.asm["cubin"] == third.asm["cubin"] != default.asm["cubin"]
    assert default.metadata.shared == newer.metadata.shared


def test_the_ptx_is_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the PTX version, which an older ptxas may not know."""
    with compiled_for(90) as kernels:
        for setting in ("default", OTHER_PTXAS):
            monkeypatch.setenv(_ptxas.SETTING, setting)
            product()
    first, second = (kernel.asm["ptx"].split(".target")[1] for kernel in kernels)
    assert first == second


def test_other_kernels_are_unaffected(monkeypatch: pytest.MonkeyPatch, used: list[str]) -> None:
    monkeypatch.setenv(_ptxas.SETTING, OTHER_PTXAS)
    with compiled_for(90) as kernels:
        theirs()
        product()
        theirs()
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            forget()
            theirs()
        entries = list(Path(knobs.cache.dir).rglob("_theirs.cubin"))
    before, _, after, again = kernels
    assert before is after, "found in memory"
    assert before.hash == again.hash
    assert len(entries) == 1
    assert before.asm["cubin"] == again.asm["cubin"]
    assert used == ["12.9.86"]


def test_other_kernels_are_unaffected_during_a_launch(monkeypatch: pytest.MonkeyPatch, used: list[str]) -> None:
    """Another thread compiles during a launch of ours: its key may differ, its code may not."""
    monkeypatch.setenv(_ptxas.SETTING, OTHER_PTXAS)
    with compiled_for(90) as kernels:
        theirs()
        forget()
        with _ptxas._hooked:
            theirs()
            product()
        assert knobs.runtime.add_stages_inspection_hook is None
    before, during, _ = kernels
    assert before.asm["cubin"] == during.asm["cubin"]
    assert used == ["12.9.86"]


def test_an_existing_hook_stays(monkeypatch: pytest.MonkeyPatch, used: list[str]) -> None:
    seen: list[int] = []

    def hook(*args: Any) -> tuple[str, str]:
        seen.append(len(args))
        return "key", "hash"

    monkeypatch.setenv(_ptxas.SETTING, OTHER_PTXAS)
    with compiled_for(90):
        knobs.runtime.add_stages_inspection_hook = hook
        product()
    assert knobs.runtime.add_stages_inspection_hook is hook
    assert 5 in seen
    assert used == ["12.9.86"]
    with _ptxas._hooked:
        assert knobs.runtime.add_stages_inspection_hook() == ("key", "hash")


def test_hook_with_launches_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook stays until the last launch ends, and a hook that is set meanwhile stays."""
    hooked = _ptxas._Hooked()
    with hooked:
        with hooked:
            first = knobs.runtime.add_stages_inspection_hook
        assert knobs.runtime.add_stages_inspection_hook is first is not None
        later = _ptxas._Hook(first)
        knobs.runtime.add_stages_inspection_hook = later
        with hooked:
            assert knobs.runtime.add_stages_inspection_hook.earlier is later
            knobs.runtime.add_stages_inspection_hook = later
    assert knobs.runtime.add_stages_inspection_hook is later


def test_without_the_hook_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own ptxas does not know the marker."""
    monkeypatch.setenv(_ptxas.SETTING, OTHER_PTXAS)
    monkeypatch.setattr(_ptxas, "_hooked", contextlib.nullcontext())
    with compiled_for(90):
        with pytest.raises(Exception, match="blockscale-ptxas"):
            product()
        assert list(Path(knobs.cache.dir).rglob("*.cubin")) == []


def test_default_choice(monkeypatch: pytest.MonkeyPatch, used: list[str]) -> None:
    """With a driver and no variables: another ptxas for Triton 3.6, and Triton's own for 3.9."""
    monkeypatch.setattr(_ptxas, "cuda_driver", lambda: 13)
    wanted = {"3.6": ["12.9.86"], "3.9": []}
    release = ".".join(triton.__version__.split(".")[:2])
    if release not in wanted:
        pytest.skip(f"nothing is listed for Triton {release}")
    with compiled_for(90):
        product()
    assert used == wanted[release]


def test_a_failing_ptxas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The library's choice falls back to Triton's own and logs it; a forced one raises. Nothing is cached for it."""
    bad = fake(tmp_path / "ptxas", "12.9.86", "echo 'no room left' >&2; exit 7")
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    monkeypatch.setitem(_ptxas.ALLOWED, (release, (12, 9, 86)), "by hand")
    monkeypatch.setattr(_ptxas, "_places", lambda own, binaries: [("fake", bad)])
    monkeypatch.setattr(_ptxas, "cuda_driver", lambda: 13)
    with compiled_for(90) as kernels:
        with caplog.at_level(logging.WARNING, logger="blockscale"):
            product()
            product()
        assert len(list(Path(knobs.cache.dir).rglob("*.cubin"))) == 1
        assert kernels[0].hash == kernels[1].hash
        assert kernels[0].metadata.ptx_options is None
        assert [record.getMessage().count("no room left") for record in caplog.records] == [1], "logged once"
        assert "no room left" in str(_ptxas.choice())
        monkeypatch.setenv(_ptxas.SETTING, bad)
        with pytest.raises(PtxasError, match=r"status 7 .*no room left.* Fix: set BLOCKSCALE_PTXAS=default"):
            product()
