"""Causes of a gap: known gradient errors are measured correctly, and a run writes its rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import causes
from blockscale.train import ModelConfig
from support.small_runs import small


def test_known_gradient_errors_are_measured():
    generator = torch.Generator().manual_seed(0)
    base = [{"w": torch.randn(64, 64, generator=generator)} for _ in range(6)]
    same = torch.randn(64, 64, generator=generator)
    noise = [torch.randn(64, 64, generator=generator) for _ in range(6)]
    bias = causes.compared([{"w": each["w"] + 0.1 * same} for each in base], base)
    assert bias["error"] == pytest.approx(0.1, rel=0.1)
    assert bias["common"] == pytest.approx(1.0)
    free = causes.compared([{"w": each["w"] + 0.1 * mine} for each, mine in zip(base, noise, strict=True)], base)
    assert free["error"] == pytest.approx(0.1, rel=0.1)
    assert abs(free["common"]) < 0.05
    assert abs(causes.common(base)) < 0.05
    short = causes.compared([{"w": 0.98 * each["w"]} for each in base], base)
    assert short["length"] == pytest.approx(-0.02)


def test_a_run_writes_its_rows(tmp_path, monkeypatch, capsys):
    tiny = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, hidden=48)
    config = small(model=tiny, steps=4, batch=4)
    monkeypatch.setattr(
        causes, "get_preset", lambda name: replace(config, optimizer=replace(config.optimizer, warmup=0.5))
    )
    out = tmp_path / "causes.jsonl"
    for arm in ("dgrad", "since"):
        causes.main(["tiny", "--recipe", "mxfp4", "--arm", arm, "--at", "1", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["kind"], row["arm"]) for row in rows] == [
        ("gradients", "dgrad"),
        ("losses", "dgrad"),
        ("gradients", "since"),
        ("losses", "since"),
    ]
    by = rows[0]["by"]
    assert 0 < rows[0]["gradient_common"] < 1
    assert by["all"]["error"] > max(by[each]["error"] for each in causes.PRODUCTS) > 0.02
    # fprop of the first arm is bf16, of the second MXFP4: evaluated in that precision the loss is the run's own
    assert rows[1]["loss"] == pytest.approx(rows[1]["losses"]["bf16"], rel=1e-5)
    assert rows[3]["loss"] == pytest.approx(rows[3]["losses"]["mxfp4"], rel=1e-5)
    assert rows[3]["losses"]["mxfp4"] != rows[3]["losses"]["bf16"]
    assert "dgrad, seed 0: loss" in capsys.readouterr().out
