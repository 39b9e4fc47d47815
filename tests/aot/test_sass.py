"""The comparison of SASS hashes: what a hash covers, that every case is stored, and that a difference is found."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton, which is not installed")

from aot.cases import LATER
from aot.compiled import CAN_COMPILE

if not CAN_COMPILE:
    pytest.skip("needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET", allow_module_level=True)
pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")

from aot.sass import GOLDEN, cases, hash_instructions, hashes_of, is_stored

LISTING = """
\t.headerflags\t@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe20000000800 */
        /*0010*/                   FADD R2, R3, R4 ;               /* 0x0000000403027221 */
"""
STORED = dict(line.rsplit(": ", 1) for line in GOLDEN.read_text().splitlines()[1:])


def test_a_hash_covers_instructions_and_nothing_else() -> None:
    hashed = hash_instructions(LISTING)
    assert hash_instructions(LISTING.replace("SM90", "SM100").replace("0x0000000403027221", "0x0")) == hashed
    assert hash_instructions(LISTING.replace("FADD R2", "FADD R5")) != hashed
    with pytest.raises(ValueError, match="no instructions"):
        hash_instructions("")


def test_every_case_is_stored_for_its_architectures() -> None:
    assert set(STORED) == {f"sm_{arch} {name}" for name, (arches, _) in cases().items() for arch in arches}


def test_another_kernel_or_none_is_a_difference() -> None:
    assert is_stored({"a b": None}, {"a b", "a c"})
    assert not is_stored({"a b": None, "a d": None}, {"a b", "a c"})
    assert not is_stored(None, {"a b"})
    assert not is_stored({"a b": None}, None)


@pytest.mark.skipif(LATER, reason="the stored hashes are of triton 3.6")
def test_a_kernel_has_its_stored_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the smallest; `make sass` compiles all of them."""
    monkeypatch.setenv("BLOCKSCALE_PTXAS", "default")  # which `hashes_of` sets
    assert hashes_of("epilogue pass bf16", 90) == STORED["sm_90 epilogue pass bf16"]
    assert hashes_of("epilogue pass bf16", 90) != STORED["sm_90 epilogue pass fp16"]
