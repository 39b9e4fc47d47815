"""Errors are reported before torch is imported, before any output, and before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import blockscale
from blockscale.cli.main import main

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")

WRONG: list[tuple[str, str]] = [
    ("doctor --workers 0", "--workers 0"),
    ("doctor --device gpu", "--device gpu"),
    ("explain gem", "invalid choice 'gem'"),
    ("explain gemm --a mxpf8", "unknown format"),
    ("explain gemm --a mxfp4 --b nvfp4", "no product of mxfp4 with nvfp4"),
    ("explain gemm --a bf16 --b bf16", "unknown format 'bf16'"),
    ("explain k_grouped --a bf16", "unknown format 'bf16'"),
    ("explain gemm --a bf16 --accumulate", "--accumulate with --a bf16"),
    ("explain gemm --m -1", "--m -1"),
    ("explain gemm --device sm_", "--device sm_"),
    ("explain gemm --m 99999999999999999999", "--m 99999999999999999999"),
    ("explain gemm --m 268435456 --k 268435456 --groups 65536", "fit in 64 bits"),
    ("explain cast --b nvfp4", "--b with cast"),
    ("explain cast --bias", "--bias with cast"),
    ("explain rmsnorm --accumulate", "--accumulate with rmsnorm"),
    ("explain permute_rows --a mxfp4", "--a with permute_rows"),
    ("bench nonsense", "invalid choice 'nonsense'"),
    ("bench casts --device gpu", "--device gpu"),
    ("tune --compile-only", "neither a model"),
    ("tune --compile-only llama9", "unknown model"),
    ("tune --compile-only --shapes 512x512", "--shapes 512x512"),
    ("tune --compile-only llama3-8b --formats mxfp4@nvfp4", "no product"),
    ("tune --compile-only llama3-8b -m 0", "--m 0"),
    ("tune --compile-only llama3-8b -m 99999999999999999999", "up to 2**28"),
    ("tune --compile-only --shapes 99999999999999999999,8", "up to 2**28"),
    ("tune --compile-only llama3-8b --workers 0", "--workers 0"),
    ("tune --shapes x", "--shapes x"),
    ("tune llama3-8b --formats mxfp4@mxfp4", "--formats mxfp4@mxfp4"),
    ("tune llama3-8b --budget nan", "--budget nan"),
    ("train unknownpreset", "unknown preset"),
    ("train tiny --steps 0", "--steps 0"),
    ("train tiny --recipe nonsense", "unknown recipe"),
    ("train tiny --recipe.weights nonsense", "unknown format"),
    ("train tiny --recipe bf16 --recipe.weights mxfp4", "--recipe.weights mxfp4 with bf16"),
    ("train tiny --source nowhere/at/all", "data source"),
    ("train tiny --tokenizer nowhere.json", "--tokenizer nowhere.json"),
    ("train tiny --keep-file nowhere.json", "--keep-file nowhere.json"),
    ("train tiny --start nowhere", "--start nowhere"),
    ("train tiny --device gpu", "--device gpu"),
    ("train tiny --resume", "--resume without a folder"),
    ("compare tiny --steps 0", "--steps 0"),
    ("compare tiny --recipes nonsense", "unknown recipe"),
    ("compare tiny --recipes fp8_blockwise_wgrad_bf17", "unknown recipe"),
    ("compare tiny --seeds 0", "--seeds 0"),
    ("compare tiny --budget 0", "--budget 0"),
    ("compare tiny --recipes bf16 --require-verdict", "--require-verdict with --recipes bf16"),
    ("compare tiny --seeds 99999999999999999999999", "--seeds 99999999999999999999999"),
    ("compare tiny --steps 99999999999999999999999", "--steps 99999999999999999999999"),
    ("compare tiny --seed 18446744073709551615 --seeds 2", "--seed 18446744073709551615 with --seeds 2"),
    ("train tiny --seed 99999999999999999999", "--seed 99999999999999999999"),
    ("train tiny --steps 99999999999999999999999", "--steps 99999999999999999999999"),
    ("train tiny --eval-every 99999999999999999999999", "--eval-every 99999999999999999999999"),
    ("speed tiny --timed 99999999999999999999999", "--timed 99999999999999999999999"),
    ("compare unknownpreset", "unknown preset"),
    ("speed tiny --recipes nonsense", "unknown recipe"),
    ("speed tiny --compiles nonsense", "invalid choice 'nonsense'"),
    ("speed tiny --weight-casts nonsense", "invalid choice 'nonsense'"),
    ("speed tiny --timed 1", "--timed 1"),
    ("speed tiny --batch 0", "--batch 0"),
    ("advise nowhere/at/all", "no folder nowhere/at/all"),
    ("advise . --machine h300", "unknown machine"),
    ("advise . --budget 0", "--budget 0"),
    ("roofline --shapes x", "--shapes x"),
    ("roofline --recipes nonsense", "unknown recipe"),
    ("roofline --machine h300", "unknown machine"),
    ("roofline --model llama9", "unknown model"),
    ("roofline --tokens 0", "--tokens 0"),
    ("roofline mlp --measure", "--measure of mlp"),
    ("roofline --inference --weight-cast step", "--weight-cast with --inference"),
    ("roofline --inference --microbatches 2", "--microbatches with --inference"),
    ("roofline --inference --accumulate", "--accumulate with --inference"),
    ("roofline --recipes bf16 --advise", "--advise with bf16 alone"),
    ("roofline overlap --machine h300", "unknown machine"),
    ("roofline overlap --payload nvfp4", "invalid choice 'nvfp4'"),
    ("roofline overlap --tp 0", "--tp 0"),
    ("roofline overlap --ep 2", "--ep 2 with all_gather_mm"),
    ("roofline overlap --flux --m 8", "--m with --flux"),
]
HARNESS = """
import contextlib, io, json, sys
import blockscale
from blockscale.cli.main import main
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words.split())
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([words, status, out.getvalue(), err.getvalue(), "torch" in sys.modules]), flush=True)
    if "torch" in sys.modules:
        break
"""


def test_invalid_options_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """The import takes seconds. All cases in one process, which stops at the first that imports torch."""
    ran = subprocess.run(
        [sys.executable, "-c", HARNESS],
        input=json.dumps([words for words, _ in WRONG]),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(blockscale.__file__).parents[1])},
    )
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    for (words, says), (asked, status, out, err, has_torch) in zip(WRONG, found, strict=False):
        assert words == asked
        assert not has_torch, words
        assert (status, out) == (2, ""), words
        assert err.startswith("blockscale: "), words
        assert says in err, words
        assert all(part in err for part in ("Rule: ", "Fix: ")), words
    assert len(found) == len(WRONG), ran.stderr
    assert not any(tmp_path.iterdir())


FILES = {
    "bench casts --device cpu --json": ".jsonl",
    "tune llama3-8b --out": ".json",
    "compare tiny --rows": ".jsonl",
    "speed tiny --rows": ".jsonl",
    "advise . --out": ".json",
}
FOLDERS = ("train tiny --folder", "train tiny --export", "train tiny --data.cache", "compare tiny --out", "speed --out")


@pytest.mark.parametrize("words", [*FILES, *FOLDERS])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths below a file, a folder in place of a file, and a file in place of a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    suffix = FILES.get(words, "")
    (tmp_path / f"folder{suffix}").mkdir()
    monkeypatch.setattr("blockscale.cli.arguments.plain_console", lambda: pytest.fail("it began"))
    taken = f"folder{suffix}" if suffix else "file"
    for path in (f"file/x{suffix}", f"file/deeper/x{suffix}", taken):
        assert main([*words.split(), path]) == 2, path
        said = capsys.readouterr()
        assert said.out == ""
        assert f"{words.split()[-1]} {path}" in said.err
        assert "Rule: " in said.err
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["file", f"folder{suffix}"])


@pytest.mark.parametrize("content", ["{nonsense\n", '{"kind": "other"}\n', "7\n"])
def test_a_file_of_another_kind_is_refused_before_any_work(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    monkeypatch.setattr("blockscale.cli.bench._cases", lambda *found: pytest.fail("it began"))
    assert main(["bench", "casts", "--device", "cpu", "--json", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{path} has other lines" in said.err
    assert path.read_text() == content


def test_an_empty_only_text_selects_no_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "casts", "--device", "cpu", "--only", "nothing|"]) == 2
    assert "--only 'nothing|'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("tune --compile-only llama3-8b --dry-run --device cpu", 2, "pass --device sm_90"),
        ("tune llama3-8b --dry-run --device cpu", 2, "--device cpu is no GPU of this machine"),
    ],
)
def test_dry_run_without_a_gpu_names_the_fix(
    words: str, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    assert main(words.split()) == status
    assert says in capsys.readouterr().err
