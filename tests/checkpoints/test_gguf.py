"""Damaged GGUF files: an error that names the file, in no time. What they hold is tested by the golden one."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
import torch

from blockscale import checkpoints
from blockscale.errors import CheckpointError

MXFP4, F32, Q4_0 = 39, 0, 2


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(tensors: list[bytes], data: bytes, values: list[bytes] | None = None, version: int = 3) -> bytes:
    """A GGUF file with 32 bytes of alignment."""
    values = values or []
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(values)) + b"".join(values + tensors)
    return head + b"\0" * (-len(head) % 32) + data


ONE = [tensor("a", (4,), F32, 0)]
DATA = struct.pack("<4f", 1, 2, 3, 4)
FILES = {
    "empty": (b"", "has 0 bytes"),
    "another file": (b"GGML" + bytes(28), "begins with b'GGML'"),
    "another version": (file(ONE, DATA, version=1), "version 1"),
    "cut in the header": (file(ONE, DATA)[:40], "ends within its header, at byte 40"),
    "cut in the data": (file(ONE, DATA[:-1]), r"'a' lies at bytes 64 to 80 of 79"),
    "an offset past the end": (file([tensor("a", (4,), F32, 1 << 40)], DATA), "'a' lies at bytes"),
    "a huge shape": (file([tensor("a", (1 << 62, 4), F32, 0)], DATA), "'a' has the shape"),
    "five axes": (file([tensor("a", (1,) * 5, F32, 0)], DATA), "'a' has 5 dimensions"),
    "the same name": (file(ONE * 2, DATA), "has 'a' twice"),
    "a name of scales": (file([tensor("a scales", (4,), F32, 0)], DATA), "a name of scales"),
    "a row": (file([tensor("a", (32,), MXFP4, 0)], bytes(32)), r"'a' is MXFP4 \(32,\)"),
    "an offset that is not aligned": (file([tensor("a", (4,), F32, 3)], DATA + bytes(8)), "'a' lies at offset 3"),
    "overlap": (file([tensor("a", (16,), F32, 0), tensor("b", (4,), F32, 32)], bytes(96)), "'b' lies at offset 32"),
    "one of two files": (file(ONE, DATA, [string("split.count") + struct.pack("<II", 4, 2)]), "is one of 2 files"),
    "countless empty names": (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0) + bytes(1 << 20), "twice"),
    "countless empty keys": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60) + bytes(1 << 20), "twice"),
    "half a block": (file([tensor("a", (48,), MXFP4, 0)], bytes(64)), r"'a' is MXFP4 \(48,\)"),
    "countless tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0) + bytes(64), r"ends within its header|twice"),
    "countless values": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60) + bytes(64), "twice"),
    "a long name": (struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q", 1 << 60), "ends within its header"),
    "a name that is no text": (file([struct.pack("<Q", 2) + b"\xff\xfe"], DATA), "no UTF-8"),
    "an unknown value": (file(ONE, DATA, [string("k") + struct.pack("<I", 77)]), "metadata of type 77"),
    "a huge array": (file(ONE, DATA, [string("k") + struct.pack("<IIQ", 9, 4, 1 << 60)]), "ends within its header"),
    "deep arrays": (file(ONE, DATA, [string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9]), "type 9"),
    "an alignment of 7": (file(ONE, DATA, [string("general.alignment") + struct.pack("<II", 4, 7)]), "alignment 7"),
}


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_named(kind: str, tmp_path: Path):
    content, said = FILES[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoints.open(path)
    assert str(path) in str(caught.value)
    assert time.monotonic() - start < 2


def test_the_undamaged_file_is_read(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file(ONE, DATA, [string("general.name") + struct.pack("<I", 8) + string("tiny")]))
    found = checkpoints.open(path)
    assert found["a"].tolist() == [1, 2, 3, 4]  # pyright: ignore[reportAttributeAccessIssue]
    assert found.config["general.name"] == "tiny"


def test_other_quantized_types_are_listed_and_not_read(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file([tensor("a", (32, 2), Q4_0, 0)], bytes(64)))
    found = checkpoints.open(path)
    assert found.entries["a"].dtype == "GGML type 2"
    assert found.entries["a"].shape == (2, 32)
    with pytest.raises(CheckpointError, match=r"'a' has GGML type 2\. Rule: plain tensors and MXFP4 are read"):
        _ = found["a"]


def test_scales_that_are_no_numbers_are_named(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file([tensor("a", (32, 2), MXFP4, 0)], bytes([255] + [0] * 16) + bytes(17)))
    with pytest.raises(CheckpointError, match="1 scales that are not finite"):
        _ = checkpoints.open(path)["a"]


def test_elements_of_a_block(tmp_path: Path):
    """Low nibbles are elements 0 to 15, high nibbles 16 to 31."""
    path = tmp_path / "model.gguf"
    block = bytes([127]) + bytes([0x72] * 8 + [0x41] * 8)
    path.write_bytes(file([tensor("a", (32, 1), MXFP4, 0)], block))
    from blockscale import dequantize

    values = dequantize(checkpoints.open(path)["a"], dtype=torch.float32)  # pyright: ignore[reportArgumentType]
    assert values.tolist() == [[1.0] * 8 + [0.5] * 8 + [6.0] * 8 + [2.0] * 8]
