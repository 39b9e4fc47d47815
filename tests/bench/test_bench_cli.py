"""`blockscale bench` from the command line, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tyro", reason="the command line needs tyro, which is not installed")
pytest.importorskip("rich", reason="the command line needs rich, which is not installed")


from blockscale.bench import store
from blockscale.cli.main import main


def bench(*words: str) -> int:
    return main(["bench", *words])


def test_casts_on_a_cpu_say_what_they_are_and_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "casts.jsonl"
    assert bench("casts", "--device", "cpu", "--only", "fp8_1x128 axis", "--json", str(path)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "times the reference on a CPU" in text
    assert [row.case for row in store.read(path)] == ["fp8_1x128 axis -1 256x512", "fp8_1x128 axis -2 256x512"]


def test_fused_casts_run_beside_eager_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "casts.jsonl"
    assert bench("casts", "--device", "cpu", "--only", "quantize_both", "--json", str(path)) == 0
    rows = {row.case: row for row in store.read(path)}
    for name in ("swiglu_quantize_both", "swiglu_backward_quantize_both"):
        for case in (f"{name} 256x1024", f"{name} fp8_1x128 256x1024"):
            assert rows[case].wrong_bytes == 0
            assert "ratio" in rows[case].peers["eager"]
            assert "differs" not in rows[case].peers["eager"]["note"]
    assert "permute_quantize_both 256x512" in rows


def test_scales_as_products_read_them(tmp_path: Path):
    path = tmp_path / "casts.jsonl"
    assert bench("casts", "--device", "cpu", "--only", "both 256x512", "--json", str(path)) == 0
    plain, blocked = (row for row in store.read(path) if row.case.startswith("mxfp8_e4m3"))
    assert (plain.case, blocked.case) == ("mxfp8_e4m3 both 256x512", "mxfp8_e4m3 blocked scales both 256x512")
    assert blocked.wrong_bytes == 0
    assert blocked.bytes == plain.bytes  # nothing to pad at this size


def test_products_on_a_cpu_are_checked_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "gemm.jsonl"
    words = ("--device", "cpu", "--peers", "row hopper,bf16", "--json", str(path))
    assert bench("gemm", *words, "--only", "MX and NVFP4", "--quick") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("TFLOP/s", "% bound", "dB", "row hopper: refuses: runs on cuda"))
    rows = store.read(path)
    assert all({*row.peers} == {"bf16", "row hopper"} for row in rows)
    assert [row.case for row in rows] == [f"{name} @ {name} 16x256x256" for name in ("mxfp8_e4m3", "mxfp4", "nvfp4")]
    assert all(row.us and row.bound_us and row.sqnr_db and row.sqnr_db > 54 for row in rows)
    assert bench("gemm", *words, "--only", "nothing") != 0


def test_layers_on_a_cpu_are_checked_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "linear.jsonl"
    words = ("--device", "cpu", "--quick", "--peers", "bf16", "--json", str(path))
    assert bench("linear", *words, "--only", "fp8_blockwise M=") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("TFLOP/s", "dB", "bf16"))
    (row,) = store.read(path)
    assert row.case == "fp8_blockwise M=128 tiny 128->256"
    assert row.details["kept_bytes blockscale"] > 0
    assert bench("mlp", *words, "--only", "nothing") != 0


def test_mixtures_on_a_cpu_are_checked_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "moe.jsonl"
    words = ("moe", "--device", "cpu", "--quick", "--peers", "bf16", "--json", str(path))
    assert bench(*words, "--only", "tiny fprop|fp8_blockwise experts") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("TFLOP/s", "dB", "bf16"))
    groups = [(row.group, row.us is not None) for row in store.read(path)]
    assert groups == [("grouped products", True)] * 3 + [("experts", True)] * 2
    assert bench(*words, "--only", "nothing") != 0


def test_a_wrong_product_prints_no_speed_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("blockscale.bench.gemms.BF16_DB", 60.0)
    assert bench("gemm", "--device", "cpu", "--only", "mxfp4", "--peers", "none") == 1
    text = capsys.readouterr().out
    assert "WRONG mxfp4 @ mxfp4 16x256x256: the product is 5" in text
    assert "from the exact one, less than 60" in text


def test_a_wrong_kernel_prints_no_speed_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from blockscale.bench import harness

    monkeypatch.setattr(harness, "count_wrong", lambda ours, reference: 12)
    path = tmp_path / "casts.jsonl"
    assert bench("casts", "--device", "cpu", "--only", "mxfp4 axis -1", "--json", str(path)) == 1
    text = capsys.readouterr().out
    assert "WRONG mxfp4 axis -1 256x512: 12 bytes differ" in text
    (line,) = [line for line in text.splitlines() if "WRONG" in line and "bytes" not in line]
    assert not any(character.isdigit() for character in line.split("WRONG")[1])
    (row,) = store.read(path)
    assert row.us is None


def test_an_empty_selection_is_reported(capsys: pytest.CaptureFixture[str]):
    assert bench("casts", "--device", "cpu", "--only", "nothing") != 0
    captured = capsys.readouterr()
    assert "--only 'nothing'" in captured.out + captured.err
    assert "such as --only 'fp8_1x128 axis -1 256x512'" in " ".join((captured.out + captured.err).split())


def test_dispatch_times_calls_on_the_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("blockscale.bench.timing.HOST_CALLS", 2)
    assert bench("dispatch", "--device", "cpu") == 0
    assert "quantize_both mxfp8_e4m3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cast"], "casts"),
        (["linear", "--device", "cpu", "--peers", "torchoa"], "did you mean torchao"),
        (["dispatch", "--device", "cpu", "--peers", "copi"], "did you mean copy"),
    ],
)
def test_mistakes_are_explained(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    status: object
    try:
        status = bench(*words)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert says in capsys.readouterr().err
