"""Text: sorted, deduplicated, split by content, tokenized atomically; batches repeat."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from blockscale.errors import DataError
from blockscale.train import DataConfig
from blockscale.train.corpus import collect, contents
from blockscale.train.data import _prepared, load


@pytest.fixture(autouse=True)
def _forget() -> None:
    _prepared.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    for place in range(40):
        path = root / f"part{place % 3}" / f"{place:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"file {place}: " + "words and more words, " * (place + 3))
    return root


def config(folder: Path, **changes) -> DataConfig:
    return DataConfig(str(folder), sequence=16, cache=folder.parent / "cache", **changes)


def test_files_are_sorted_and_split_by_content(folder: Path):
    before = collect(str(folder), 0.2)
    assert before.train == sorted(before.train)
    assert 2 <= len(before.held_out) <= 16
    assert set(before.train).isdisjoint(before.held_out)
    assert len(before.train) + len(before.held_out) == 40
    # a renamed file stays in its part, and new files move no other
    moved = before.held_out[0].rename(folder / "zzz.txt")
    (folder / "aaa.txt").write_text("something else altogether")
    after = collect(str(folder), 0.2)
    assert moved in after.held_out
    assert set(before.train) <= set(after.train)


def test_copies_count_once_and_the_hash_sees_content(folder: Path):
    before = collect(str(folder), 0.2)
    shutil.copy(folder / "part0" / "00.txt", folder / "zz.txt")
    assert collect(str(folder), 0.2).hash == before.hash
    (folder / "part0" / "00.txt").write_text("changed")
    assert collect(str(folder), 0.2).hash != before.hash


def test_files_that_are_no_text_are_left_out(folder: Path):
    before = collect(str(folder), 0.2)
    (folder / "binary.txt").write_bytes(b"abc\0def")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "empty.txt").write_text("  \n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.txt").write_text("cached")
    assert collect(str(folder), 0.2) == before


def test_no_text(tmp_path: Path):
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    with pytest.raises(DataError, match="no text in"):
        collect(str(tmp_path), 0.1)
    with pytest.raises(DataError, match="a file or folder that exists"):
        collect(str(tmp_path / "nowhere"), 0.1)


def test_one_file_is_cut(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {place}\n" for place in range(500)))
    corpus = collect(str(path), 0.1)
    train, held_out = (b"".join(contents(corpus, part)) for part in ("train", "held_out"))
    assert train + held_out == path.read_bytes()
    assert len(held_out) == pytest.approx(0.1 * len(train + held_out), abs=2)


@pytest.mark.parametrize("before", range(4))
def test_a_cut_lies_between_characters(before: int, tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_text("x" * before + "日本語" * 1001)
    corpus = collect(str(path), 0.1)
    parts = [b"".join(contents(corpus, part)) for part in ("train", "held_out")]
    assert "".join(part.decode() for part in parts) == path.read_text()
    assert len(parts[1]) == pytest.approx(0.1 * path.stat().st_size, abs=4)


def test_the_hash_of_a_cut_file_is_stable(tmp_path: Path):
    """For a file without multibyte characters at the cut; checkpoints identify their text by it."""
    path = tmp_path / "book.txt"
    path.write_text("line\n" * 500)
    mark = hashlib.sha256(path.read_bytes()).digest()
    assert collect(str(path), 0.1).hash == hashlib.sha256(b"0.1\0" + mark).hexdigest()[:16]


def test_a_file_that_changes_while_it_is_read_is_noticed(folder: Path):
    corpus = collect(str(folder), 0.1)
    corpus.train[0].write_text("something else")
    with pytest.raises(DataError, match="changed while it was read"):
        list(contents(corpus, "train"))


def test_a_file_that_changes_between_runs_of_a_process_is_read_again(folder: Path):
    first = load(config(folder))
    assert load(config(folder)) is first
    (folder / "part0" / "00.txt").write_text("something else")
    assert load(config(folder)).hash != first.hash


def test_symbols_are_the_bytes(folder: Path):
    found = load(config(folder))
    corpus = collect(str(folder), 0.1)
    for part in ("train", "held_out"):
        expected = b"".join(text + b"\0" for text in contents(corpus, part))
        assert bytes(getattr(found, part).tolist()) == expected
    assert found.vocabulary == 256


def test_batches_are_functions_of_seed_and_step(folder: Path):
    found = load(config(folder))
    one = found.batch(1, 7, 0, 4, 1, 16)
    assert one.shape == (4, 17)
    assert one.dtype == torch.int64
    assert torch.equal(one, found.batch(1, 7, 0, 4, 1, 16))
    assert not torch.equal(one, found.batch(1, 8, 0, 4, 1, 16))
    assert not torch.equal(one, found.batch(2, 7, 0, 4, 1, 16))
    # microbatches are parts of the same batch
    parts = [found.batch(1, 7, micro, 2, 2, 16) for micro in range(2)]
    assert torch.equal(torch.cat(parts), one)
    text = bytes(found.train.tolist())
    assert all(bytes(row.tolist()) in text for row in one)


def test_validation_covers_the_held_out_text(folder: Path):
    found = load(config(folder))
    batches = [found.validation(place, 3, 4, 16) for place in range(3)]
    text = bytes(found.held_out.tolist())
    assert bytes(batches[0][0].tolist()) == text[:17]
    assert text.endswith(bytes(batches[-1][-1].tolist()))


def test_cached_text_is_reused(folder: Path):
    first = load(config(folder))
    (cached,) = (folder.parent / "cache").iterdir()
    written = os.stat(cached / "train.bin").st_mtime_ns
    _prepared.cache_clear()
    again = load(config(folder))
    assert again.hash == first.hash == cached.name
    assert os.stat(cached / "train.bin").st_mtime_ns == written
    assert json.loads((cached / "about.json").read_text())["files"]["train"] > 20


@pytest.mark.parametrize("damage", ["cut", "gone", "empty", "nothing in it", "nothing about it"])
def test_damaged_cached_text_is_tokenized_again(folder: Path, damage: str):
    before = load(config(folder))
    expected = before.train.clone(), before.held_out.clone(), before.hash
    (cached,) = (folder.parent / "cache").iterdir()
    match damage:
        case "cut":
            with (cached / "train.bin").open("r+b") as file:
                file.truncate(100)
        case "gone":
            (cached / "held_out.bin").unlink()
        case "empty":
            (cached / "about.json").write_text("")
        case "nothing in it":
            (cached / "about.json").write_text("{}")
        case _:
            (cached / "about.json").unlink()
    _prepared.cache_clear()
    after = load(config(folder))
    assert torch.equal(after.train, expected[0])
    assert torch.equal(after.held_out, expected[1])
    assert after.hash == expected[2]


def test_text_shorter_than_a_sequence(folder: Path):
    with pytest.raises(DataError, match="longer than one sequence"):
        load(DataConfig(str(folder), sequence=100_000, cache=folder.parent / "cache"))


def test_a_cache_that_cannot_be_written(folder: Path):
    blocked = folder.parent / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match="could not be tokenized"):
        load(DataConfig(str(folder), cache=blocked))


def test_the_standard_library_is_there():
    found = load(DataConfig())
    assert len(found.train) > 1_000_000
    assert len(found.held_out) > 100_000
    assert found.train.dtype == torch.uint8


def test_tokenizers_that_are_missing_or_wrong(folder: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load(config(folder, tokenizer=tmp_path / "none.json"))
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    with pytest.raises(DataError, match="leave it out to train on bytes"):
        load(config(folder, tokenizer=wrong))


def test_a_tokenizer(folder: Path, tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "file": 1, "words": 2, "and": 3, "more": 4, ",": 5, ":": 6, "</s>": 7}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    found = load(config(folder, tokenizer=tmp_path / "tokenizer.json"))
    assert found.vocabulary == 8
    assert found.train.dtype == torch.int32
    assert int((found.train == 7).sum()) == len(collect(str(folder), 0.1).train)
    assert found.bytes_per_symbol > 3
    gap = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | {"</s>": 300}, unk_token="[UNK]"))
    gap.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    gap.save(str(tmp_path / "gap.json"))
    assert load(config(folder, tokenizer=tmp_path / "gap.json")).vocabulary == 301, "unused ids count"


@pytest.mark.parametrize("source", ["", " ", "~nobody-of-that-name/text"])
def test_missing_sources_are_refused(source: str, tmp_path: Path):
    with pytest.raises(DataError, match="a file or folder that exists"):
        load(DataConfig(source, sequence=16, cache=tmp_path))


def test_a_validation_part_of_separators_is_refused(tmp_path: Path):
    """Every file is cut at its end, and there are more separators than a sequence has symbols."""
    for place in range(40):
        (tmp_path / f"{place}.txt").write_text(f"words and words {place}\n")
    with pytest.raises(DataError, match="the validation text has only separators"):
        load(DataConfig(str(tmp_path), sequence=16, held_out=1e-9, cache=tmp_path.parent / "cache"))
