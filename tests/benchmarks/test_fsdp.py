"""The program that times FSDP2 with weights gathered as codes: a dry run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from benchmarks import fsdp

SMALL = "--preset tiny --layers 1 --sequence 128 --check-steps 2 --warm-up 1 --steps 1 --turns 1 --arms 0 4 --out"


@pytest.mark.slow
def test_losses_do_not_depend_on_the_gather(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "rows.jsonl"
    assert fsdp.main([*SMALL.split(), str(file)]) == 0
    assert "losses of 2 steps: the same bits" in capsys.readouterr().out
    values, codes = map(json.loads, file.read_text().splitlines())
    assert values["arm"] == {"codes": False, "weight_cast": "forward"}
    assert codes["arm"] == {"codes": True, "weight_cast": "step"}
    assert values["losses"] == codes["losses"]
    assert len(set(values["losses"])) == 2
    assert len(codes["ms"]) == 1
    assert codes["where"]["command"].startswith("python -m benchmarks.fsdp --preset tiny --layers 1")


def test_losses_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = [fsdp.Found(arm, [1.0], [loss]) for arm, loss in zip(fsdp.ARMS[:2], (2.0, 2.0000002), strict=True)]
    monkeypatch.setattr(fsdp, "measure", lambda options, device: found)
    assert fsdp.main([]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
