"""`blockscale generate`: text of models of bytes, of a tokenizer and of symbols, and its errors."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockscale import checkpoints, inference
from blockscale.cli.main import main
from blockscale.models import Transformer
from blockscale.models.hugging_face import hugging_face_config, hugging_face_tensors
from blockscale.train import DataConfig, train
from support.small_runs import DENSE, small

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")
pytest.importorskip("safetensors", reason="checkpoints are read by safetensors")


def written(folder: Path, vocabulary: int = 256) -> Path:
    model = Transformer.build(replace(DENSE, vocabulary=vocabulary), 32)
    weights = ((name, each.detach().clone()) for name, each in hugging_face_tensors(model))
    checkpoints.write(folder, weights, "blockscale", config=hugging_face_config(model, torch.float32))
    return folder


def text_after(folder: Path, symbols: list[int], count: int, **options: float) -> list[int]:
    model, _ = inference.load(folder, device="cpu")
    return inference.generate(model, torch.tensor([symbols]), count, **options)[0].tolist()  # pyright: ignore[reportArgumentType]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["generate", *words, "--device", "cpu"]) == 0
    return capsys.readouterr().out


def test_bytes_go_on_from_a_prompt_and_control_characters_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = written(tmp_path / "model")
    want = bytes(text_after(folder, list(b"def f"), 20, end=0)).partition(b"\0")[0].decode(errors="replace")
    found = said(capsys, str(folder), "--prompt", "def f", "--new-tokens", "20")
    assert found.startswith("def f")
    assert len(found) == len(want) + 1
    assert all(a == b or a == "\N{REPLACEMENT CHARACTER}" for a, b in zip(found, want, strict=False))
    assert all(each.isprintable() or each in "\n\t" for each in found)


def test_symbols_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = written(tmp_path / "model", vocabulary=40)
    words = (str(folder), "--tokens", "1,2,3", "--new-tokens", "9", "--temperature", "1", "--top-k", "8", "--seed", "4")
    want = text_after(folder, [1, 2, 3], 9, temperature=1.0, top_k=8, seed=4)
    assert said(capsys, *words) == ",".join(map(str, want)) + "\n"


def test_the_tokenizer_in_the_folder_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer.json is read by Hugging Face's package")
    folder = written(tmp_path / "model", vocabulary=40)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(40)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    want = text_after(folder, [5, 6], 4)
    assert said(capsys, str(folder), "--prompt", "w5 w6", "--new-tokens", "4") == " ".join(f"w{n}" for n in want) + "\n"


def test_the_prompt_is_encoded_whole_and_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Neither truncation, padding nor a template of training changes it."""
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer.json is read by Hugging Face's package")
    folder = written(tmp_path / "model", vocabulary=40)
    names = {f"w{n}": n for n in range(39)} | {"</s>": 39}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s> </s>", special_tokens=[("</s>", 39)])
    made.enable_truncation(3)
    made.enable_padding(length=9)
    made.save(str(folder / "tokenizer.json"))
    want = text_after(folder, [5, 6, 7, 8], 4, end=39)
    want = want[: 4 + want[4:].index(39)] if 39 in want[4:] else want
    found = said(capsys, str(folder), "--prompt", "w5 w6 w7 w8", "--new-tokens", "4")
    assert found == " ".join(f"w{n}" for n in want) + "\n"
    assert main(["generate", str(folder), "--prompt", "w5 \udcff", "--device", "cpu"]) == 2
    assert r"--prompt 'w5 \udcff'. Rule: it is text in UTF-8. Fix: " in capsys.readouterr().err


def test_bytes_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are read as bytes, and printed as far as the encoding of the output has them."""
    folder, out = written(tmp_path / "model"), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["generate", str(folder), "--prompt", "a\udcffb", "--new-tokens", "1", "--device", "cpu"]) == 0
    out.flush()
    assert out.buffer.getvalue().startswith(b"a?b")  # pyright: ignore[reportAttributeAccessIssue]


def test_an_exported_run_has_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizers = pytest.importorskip("tokenizers", reason="a tokenizer.json is read by Hugging Face's package")
    text, named = tmp_path / "text.txt", tmp_path / "made.json"
    text.write_text("w1 w2 w3 w4 " * 300)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(40)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(named))
    data = DataConfig(str(text), named, sequence=16, cache=tmp_path / "cache")
    config = small("bf16", steps=1, folder=tmp_path / "run", model=replace(DENSE, vocabulary=40), data=data)
    train(config)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == named.read_bytes()
    capsys.readouterr()
    assert said(capsys, str(tmp_path / "out"), "--prompt", "w1 w2", "--new-tokens", "3").startswith("w1 w2 w")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "neither --prompt nor --tokens. Rule: exactly one"),
        (["--prompt", "a", "--tokens", "1"], "--prompt and --tokens. Rule: exactly one"),
        (["--prompt", "a"], "--prompt for a model of 40 symbols. Rule: text becomes symbols by its tokenizer"),
        (["--tokens", "1,40"], "symbol 40. Rule: the model has symbols 0 to 39"),
        (["--tokens", "1", "--new-tokens", "0"], "--new-tokens 0. Rule: symbols are added one by one"),
        (["--tokens", "1", "--temperature", "-1"], "--temperature -1.0. Rule: it is 0 or more"),
        (["--tokens", "1", "--top-k", "0"], "--top-k 0. Rule: a symbol is drawn from one or more"),
        (["--tokens", "1", "--new-tokens", "33"], "--new-tokens 33 after 1. Rule: the model has 32 positions"),
        (["--tokens", "1", "--device", "tpu"], "--device tpu. Rule: a device is cpu, cuda or cuda:0"),
    ],
)
def test_errors_name_value_rule_and_fix(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = written(tmp_path / "model", vocabulary=40)
    assert main(["generate", str(folder), *words]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"blockscale: {error}")
    assert " Fix: " in found


def test_a_damaged_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tokenizers", reason="a tokenizer.json is read by Hugging Face's package")
    folder = written(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps({"model": 7}))
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    assert "tokenizer.json: " in capsys.readouterr().err
