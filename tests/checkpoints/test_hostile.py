"""Damaged and hostile checkpoints: an error that names the file and the tensor, in no time, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import blockscale as bs
from blockscale import checkpoints
from blockscale.errors import CheckpointError
from support.checkpoints import header_of, random, safetensors_bytes, weights_of, write_raw

pytest.importorskip("safetensors", reason="checkpoints are read by safetensors")

TWO = header_of([("a", "F32", [2], 8), ("b.weight", "BF16", [2, 2], 8)])
DATA = b"\0" * 16


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return TWO | {name: TWO[name] | fields}


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "of 0 bytes has a header"),
    "a header longer than its file": (
        safetensors_bytes(TWO, DATA, length=1 << 62),
        "has a header of 4,611,686,018,427",
    ),
    "no JSON": (safetensors_bytes(b"{abc"), "its header is no JSON"),
    "no object": (safetensors_bytes(b"[1]"), "its header is a list"),
    "too deep": (safetensors_bytes(b"[" * 100_000), "its header is no JSON"),
    "truncated": (safetensors_bytes(TWO, DATA[:-1]), r"'b\.weight' BF16 \(2, 2\) lies at bytes 8 to 16 of 15"),
    "bytes after the last tensor": (safetensors_bytes(TWO, DATA + b"\0"), "has 1 bytes after its last tensor"),
    "overlap": (safetensors_bytes(changed("b.weight", data_offsets=[4, 12]), DATA), r"'b\.weight' .* after 8"),
    "a hole": (
        safetensors_bytes(changed("b.weight", data_offsets=[12, 20]), DATA + b"\0" * 4),
        r"'b\.weight' .* after 8",
    ),
    "a size that is not its shape's": (safetensors_bytes(changed("a", shape=[3]), DATA), r"'a' F32 \(3,\)"),
    "a huge shape": (safetensors_bytes(changed("a", shape=[1 << 61, 1 << 61]), DATA), "'a' is"),
    "a negative size": (safetensors_bytes(changed("a", shape=[-2]), DATA), "'a' is"),
    "a size that is no number": (safetensors_bytes(changed("a", shape=["2"]), DATA), "'a' is"),
    "a size that is a flag": (safetensors_bytes(changed("a", shape=[True, 2]), DATA), "'a' is"),
    "a dtype that is a list": (safetensors_bytes(changed("a", dtype=[]), DATA), "'a' is"),
    "no values of huge axes": (
        safetensors_bytes({"a": {"dtype": "F32", "shape": [1 << 61, 1 << 61, 0], "data_offsets": [0, 0]}}),
        "'a' is",
    ),
    "countless axes": (safetensors_bytes(changed("a", shape=[1 << 59] * 60_000), DATA), "'a' is"),
    "half a byte": (
        safetensors_bytes({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, DATA[:3]),
        "'a' is",
    ),
    "half a character": (
        safetensors_bytes(b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"0"),
        "is",
    ),
    "an unknown dtype": (safetensors_bytes(changed("a", dtype="F99"), DATA), "'a' is .*F99"),
    "no offsets": (safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}, DATA), "'a' is"),
    "no fields": (safetensors_bytes({"a": 7}, DATA), "'a' is 7"),
    "a name twice": (
        safetensors_bytes(json.dumps(TWO).replace("b.weight", "a").encode(), DATA),
        "has 'a' twice",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files_are_named(kind: str, tmp_path: Path):
    content, said = FILES[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoints.open(tmp_path)
    assert str(path) in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_the_undamaged_file_is_read(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(TWO, DATA))
    assert list(checkpoints.open(tmp_path)) == ["a", "b.weight"]


def sharded(folder: Path) -> dict[str, Any]:
    """A checkpoint in several files; returns its index."""
    checkpoints.write(folder, weights_of("deepseek").items(), "deepseek", shard_bytes=4000)
    return json.loads((folder / "model.safetensors.index.json").read_text())


def with_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        index = sharded(folder)
        change(index["weight_map"])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def without_a_shard(folder: Path) -> None:
    sharded(folder)
    next(folder.glob("model-00002-*")).unlink()


def without_a_shard_and_index(folder: Path) -> None:
    without_a_shard(folder)
    (folder / "model.safetensors.index.json").unlink()


def the_same_tensor_in_two_shards(folder: Path) -> None:
    sharded(folder)
    first, second = (next(folder.glob(f"model-0000{at}-*")) for at in (1, 2))
    second.write_bytes(first.read_bytes())
    (folder / "model.safetensors.index.json").unlink()


def not_text(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_bytes(b"\xff\xfe")


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (without_a_shard, r"model-00002-of-0000\d\.safetensors is missing"),
    "a missing shard, no index": (without_a_shard_and_index, r"model-00002-of-0000\d\.safetensors is missing"),
    "overlapping shards": (the_same_tensor_in_two_shards, r"model-00002-of-\S+ and \S+model-00001-\S+ both have"),
    "a path": (with_index(lambda names: names.update(x="../../etc/passwd")), "has 'x' in '../../etc/passwd'"),
    "an absolute path": (with_index(lambda names: names.update(x="/etc/passwd")), "has 'x' in '/etc/passwd'"),
    "a path of another system": (with_index(lambda names: names.update(x="..\\x")), "has 'x' in"),
    "a name of 5000 characters": (with_index(lambda names: names.update(x="x" * 5000)), "has 'x' in"),
    "no name": (with_index(lambda names: names.update(x="")), "has 'x' in ''"),
    "a number": (with_index(lambda names: names.update(x=7)), "has 'x' in 7"),  # pyright: ignore[reportArgumentType]
    "a tensor that is nowhere": (
        with_index(lambda names: names.update(x=min(names.values()))),
        r"has no 'x', which .* has there \(1 tensors are missing\)",
    ),
    "a tensor that is not named": (
        with_index(lambda names: names.pop("model.norm.weight")), "has 'model.norm.weight', which"
    ),
    "an empty index": (with_index(lambda names: names.clear()), "has no weight_map"),
    "an index that is no text": (not_text, "model.safetensors.index.json"),
    "nothing": (lambda folder: None, "has no safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_damaged_folders_are_named(kind: str, tmp_path: Path):
    prepare, said = FOLDERS[kind]
    prepare(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        checkpoints.open(tmp_path)


q = bs.quantize(random(64, 64), "mxfp8_e4m3")
RIGHT = {"up.weight": q.data, "up.weight_scale_inv": q.scale.view(torch.uint8)}
PARTS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no scales": ({"up.weight_scale_inv": None}, r"'up\.weight' is F8_E4M3 \(64, 64\) without scales"),
    "no codes": ({"up.weight": None}, r"has 'up\.weight_scale_inv' without codes"),
    "scales of another shape": (
        {"up.weight_scale_inv": RIGHT["up.weight_scale_inv"][:, :1]}, r"'up\.weight_scale_inv' is U8"
    ),
    "scales of another dtype": ({"up.weight_scale_inv": torch.ones(64, 2, dtype=torch.int64)}, r"_scale_inv' is I64"),
    "codes of another dtype": ({"up.weight": torch.ones(64, 64)}, r"'up\.weight' is F32 \(64, 64\)"),
    "codes without rows": ({"up.weight": RIGHT["up.weight"].flatten()}, "codes of shape"),
    "codes of nothing": ({"up.weight": RIGHT["up.weight"][:0]}, "codes of shape"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTS)
def test_parts_that_do_not_fit_are_named(kind: str, tmp_path: Path):
    change, said = PARTS[kind]
    tensors = {name: each for name, each in (RIGHT | change).items() if each is not None}
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoints.open(write_raw(tmp_path, tensors, {"quantization_config": {"quant_method": "mxfp8"}}))
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("layout", ["deepseek", "gpt_oss", "compressed_tensors", "modelopt", "blockscale"])
def test_scales_that_are_no_numbers_are_named(layout: str, tmp_path: Path):
    """One byte of each scale tensor in turn; the rest of the checkpoint is read."""
    checkpoints.write(tmp_path / "right", weights_of(layout).items(), layout)
    right = checkpoints.open(tmp_path / "right")
    for name, entry in right.entries.items():
        for role in set(entry.parts) - {"data"}:
            part = entry.parts[role]
            tensors = {each: right._read(each) for each in right.stored}  # pyright: ignore[reportPrivateUsage]
            wrong = tensors[part].clone().reshape(-1)
            if wrong.element_size() == 1:
                wrong.view(torch.uint8)[-1] = 0xFF
            else:
                wrong[-1] = torch.nan
            tensors[part] = wrong.view(tensors[part].shape)
            found = checkpoints.open(write_raw(tmp_path / "wrong", tensors, right.config))
            with pytest.raises(CheckpointError, match="1 scales that are not finite") as caught:
                _ = found[name]
            assert repr(part) in str(caught.value)
            for other in found.keys() - {name}:
                _ = found[other]


def test_patterns_of_a_config_are_not_run(tmp_path: Path):
    """A pattern that would take years on these names, and one that is none."""
    folder = tmp_path / "model"
    checkpoints.write(
        folder, {f"{'a' * 60}.weight": bs.quantize(random(64, 64), "mxfp4")}.items(), "compressed_tensors"
    )
    config = json.loads((folder / "config.json").read_text())
    about = config["quantization_config"]
    about["ignore"] = ["re:(a+)+$", "re:("]
    about["config_groups"]["group_0"]["targets"] = ["re:(a|a)*b"]
    (folder / "config.json").write_text(json.dumps(config))
    start = time.monotonic()
    checkpoints.convert(folder, tmp_path / "new", "deepseek")
    assert time.monotonic() - start < 5


def native(**fields: Any) -> str:
    return json.dumps({"quantization_config": {"quant_method": "blockscale", "version": 1} | fields})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[]", r"config\.json is a list"),
        ('{"a": 1, "a": 2}', r"config\.json has 'a' twice"),
        ("{", r"config\.json is no JSON"),
        ("[" * 100_000, r"config\.json is no JSON"),
        ('{"quantization_config": 7}', "quantization_config of type int"),
        ('{"quantization_config": {"quant_method": "awq"}}', "has quant_method 'awq'"),
        ('{"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}', r"block_size \[64, 64\]"),
        (native(version=2), "version 2"),
        (native(formats=7), "formats 7"),
        (native(formats={"mxfp4": 7}), "formats"),
        (native(formats={"mxfp4": [[1]]}), "formats"),
        (native(formats={"mxfp5": []}), "mxfp5"),
        (native(formats={"mxfp4": ["y"]}), "of y, which"),
        (native(formats={"mxfp4": ["x"]}), "of x, which"),
        (native(shapes=7), "shapes 7"),
    ],
)
def test_hostile_configs_are_named(config: str, said: str, tmp_path: Path):
    write_raw(tmp_path, {"x": torch.ones(4)})
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(bs.errors.BlockscaleError, match=said) as caught:
        checkpoints.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_code_is_neither_run_nor_copied(tmp_path: Path):
    folder, ran = tmp_path / "model", tmp_path / "ran"
    checkpoints.write(folder, weights_of("deepseek").items(), "deepseek", config={"auto_map": {"AutoModel": "m.Model"}})
    (folder / "m.py").write_text(f"open({str(ran)!r}, 'w')")
    (folder / "tokenizer.json").write_text("{}")

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(ran),)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch()))
    report = checkpoints.convert(folder, tmp_path / "new", "blockscale")
    assert report.files_left_out == ["m.py", "pytorch_model.bin"]
    assert "files left out: m.py, pytorch_model.bin" in str(report)
    assert (tmp_path / "new" / "tokenizer.json").exists()
    assert not (tmp_path / "new" / "m.py").exists()
    assert not ran.exists()


def test_a_file_larger_than_memory_is_opened_and_read_in_parts(tmp_path: Path):
    size = 1 << 40
    header = json.dumps(header_of([("large", "U8", [size], size), ("small", "F32", [2], 8)])).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        try:
            file.truncate(8 + len(header) + size + 8)
        except OSError:
            pytest.skip("this file system has no files of 1 TB")
        file.seek(8 + len(header) + size)
        file.write(struct.pack("<2f", 3.0, 4.0))
    found = checkpoints.open(tmp_path)
    assert found["small"].tolist() == [3.0, 4.0]
    assert found.entries["large"].nbytes == size


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path):
    write_raw(tmp_path, {"x": torch.ones(4)})
    found = checkpoints.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: 'x' of 16 bytes could not be read"):
        _ = found["x"]
