"""Layer suites: correct layers are timed, peers share parameters, and saved bytes are counted."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import blockscale.nn
from benchmarks.report.layers import roof_speedup
from blockscale.bench import accuracy, harness, layers, store, timing
from blockscale.bench.rooflines import Roofs
from blockscale.bench.suites import layers as suite
from blockscale.hardware import Capability, capability
from blockscale.roofline import MEASURED, NOMINAL

CPU = torch.device("cpu")
HOPPER = Capability("cuda", 90)
WHERE = store.where(CPU, "0.1.0", "test")
ROOFS = Roofs(MEASURED["h200"], NOMINAL["h200"])
LAYER = (128, 256)
SOME = frozenset({"bf16", "cast twice", "cast per step"})


def case(name: str = layers.FP8, peers: frozenset[str] = SOME, **named: Any) -> harness.Case:
    made = suite.linear_case(name, "tiny", LAYER, 128, suite.Setup(capability(CPU), ROOFS), **named)
    return harness.with_peers(made, peers)


def run(case: harness.Case, name: str = "linear") -> store.Row:
    budget = harness.Budget(rounds=1, seconds=1e-4)
    return harness.run_case(case, name, CPU, WHERE, budget, timing.Telemetry())


def batch() -> layers.Batch:
    return layers.make_batch(layers.normal_linear(*LAYER, CPU), 128, LAYER, CPU)


def variant(weight_cast: Any = "forward", name: str = layers.FP8) -> layers.Variant:
    return layers.our_variant(layers.our_linear, layers.RECIPES[name], weight_cast)


def test_every_case_is_listed_once():
    found = list(suite.linear_cases(HOPPER, ROOFS))
    names = [case.name for case in found]
    assert len(names) == len(set(names))
    assert list(dict.fromkeys(case.group for case in found)) == list(suite.LINEAR_GROUPS)
    assert sum(name.startswith("fp8_blockwise M=4096") for name in names) == 28
    assert sum(name.startswith("fp8_blockwise M=16384") for name in names) == 28
    for name in (
        "fp8_blockwise M=4096 DeepSeek-V3 671B 7168->18432",
        "fp8_blockwise 8 microbatches M=4096 DeepSeek 16B 10944->2048",
        "nvfp4 M=4096 DeepSeek-V3 671B 18432->7168",
        "fp8_blockwise host time M=16 256->256",
    ):
        assert name in names


def test_feed_forward_layers_have_every_peer():
    found = {case.name: case for case in suite.linear_cases(HOPPER, ROOFS)}
    for start in ("M=4096", "M=16384", "8 microbatches M=4096"):
        for layer in ("DeepSeek-V3 671B 7168->18432", "Llama3 70B 28672->8192", "Qwen3 32B 5120->25600"):
            beside = found[f"fp8_blockwise {start} {layer}"].peers
            assert {"bf16 compiled", "compiled", "torchao", "torchao compiled", "rowwise compiled"} <= set(beside)
            assert not any(isinstance(peer, str) for peer in beside.values())
    small = found["fp8_blockwise M=4096 Llama3 8B 4096->6144"]
    assert small.peers["torchao"] == small.peers["rowwise compiled"] == harness.NOT_COMPILED
    odd = found["fp8_blockwise M=4096 DeepSeek 16B 2048->10944"]
    assert "multiples of 128" in str(odd.peers["torchao"])
    assert odd.peers["torchao"] == odd.peers["torchao compiled"]


def test_a_row_has_speed_accuracy_memory_and_bound():
    row = run(case())
    assert not row.fault
    assert row.us is not None
    assert row.sqnr_db is not None
    assert row.sqnr_db >= 28.2
    assert {"bf16", "cast twice", "cast per step"} == {name for name, cell in row.peers.items() if "us" in cell}
    assert not any("note" in cell for cell in row.peers.values())
    # a cast of x with a 4-byte scale for 128 codes, and a cast of the weight if it is saved for backward too
    x = 128 * 128 * (1 + 4 / 128)
    assert row.details["kept_bytes cast twice"] == row.details["kept_bytes cast per step"] == x
    assert row.details["kept_bytes blockscale"] > x + 128 * 256
    assert row.details["kept_bytes bf16"] == 128 * 128 * 4  # fp32 here
    assert row.details["bf16_bound_us"] > 0
    assert row.bound_us is not None
    assert roof_speedup(row) == pytest.approx(row.details["bf16_bound_us"] / row.bound_us)


def test_microbatches_share_a_cast_and_times_are_of_one(monkeypatch: pytest.MonkeyPatch):
    counted: list[int] = []
    monkeypatch.setattr(layers, "refresh_weights_", lambda module: counted.append(1))
    one, shared = batch(), variant("step")
    result = layers.step(shared, 8, one)
    assert len(counted) == 1
    single = layers.take(variant("forward"), one)
    torch.testing.assert_close(result.dw[0], 8 * single.dw[0])
    assert torch.equal(result.dx, single.dx)
    assert one.built.of(shared).parameters[0] is one.built.plain.weight
    several = case(microbatches=8, peers=frozenset())
    assert (several.parts, several.flops) == (8, 6 * 128 * 128 * 256)
    whole = timing.Timing(80.0, 80.0, 80.0, "cpu", 1)
    assert whole.per_part(several.parts).us == 10.0


def test_variants_differ_in_weight_cast_and_accumulation():
    main, others = layers.variants_of(layers.our_linear, layers.RECIPES[layers.FP8], 1, twice=True)
    assert (main.refreshes, main.main_grads) == (False, False)
    assert {name: each.refreshes for name, each in others.items()} == {"cast twice": False, "cast per step": True}
    main, others = layers.variants_of(layers.our_linear, layers.RECIPES[layers.FP8], 8)
    assert (main.refreshes, main.main_grads) == (True, False)
    assert [(name, variant.refreshes, variant.main_grads) for name, variant in others.items()] == [
        ("fp32 main_grad", True, True)
    ]
    several = case(microbatches=8, peers=frozenset())
    assert several.name == "fp8_blockwise 8 microbatches M=128 tiny 128->256"
    one = case(peers=frozenset())
    assert one.bound_us is not None
    assert several.bound_us is not None
    assert several.bound_us < one.bound_us, "the roofline shares the cast too"


def test_a_wrong_layer_gets_no_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(layers.LINEAR_GATES, layers.FP8, (28.2, 60.0, 28.2))
    row = run(case(peers=frozenset()))
    assert row.us is None
    assert row.problem.startswith("dx is 28")


def test_a_layer_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch):
    def broken(self: object, x: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(blockscale.nn.Linear, "forward", broken)
    assert run(case(peers=frozenset())).problem == "fails: RuntimeError: no such kernel"


def test_a_peer_that_is_missing_is_a_note(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchao'")

    monkeypatch.setattr(layers, "torchao", missing)
    row = run(case(peers=frozenset({"bf16", "torchao"})))
    assert row.us is not None
    assert "No module named 'torchao'" in row.peers["torchao"]["note"]


def test_a_peer_that_computes_something_else_is_noted(monkeypatch: pytest.MonkeyPatch):
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    def doubled(plain: nn.Linear) -> nn.Module:
        layer = Doubled(plain.in_features, plain.out_features, bias=False, device="meta")
        layer.weight = plain.weight
        return layer

    monkeypatch.setattr(layers, "_blockwise", doubled)
    note = run(case(peers=frozenset({"torchao"}))).peers["torchao"]["note"]
    assert re.search(r"differs: -?0\.0 dB", note), note


def test_conversions_reach_every_layer_of_an_mlp():
    plain = suite.plain_unit((128, 256), CPU)
    seen: list[nn.Linear] = []
    built = layers.each(lambda layer: seen.append(layer) or layer)(plain)
    assert isinstance(built, suite.GatedUnit)
    assert seen == list(plain.children())
    assert all(a is b for a, b in zip(built.parameters(), plain.parameters(), strict=True))


def test_the_exact_mlp_has_no_error():
    one = layers.make_batch(suite.plain_unit((128, 256), CPU), 64, (128, 128), CPU)
    assert min(accuracy.judge_swiglu(one, layers.take(layers.plain_variant(), one))) > 100


def test_an_mlp_is_timed_beside_three_layers():
    one, several = (run(case, "mlp") for case in suite.mlp_cases(capability(CPU), ROOFS))
    assert not one.fault
    assert {"bf16", "cast per step"} == {name for name, cell in one.peers.items() if "us" in cell}
    assert one.details["kept_bytes cast per step"] < one.details["kept_bytes bf16"]
    assert not several.fault
    assert {"bf16", "fp32 main_grad"} == {name for name, cell in several.peers.items() if "us" in cell}
    assert several.group == "SwiGLU MLP, 8 microbatches"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_mlp_with_one_wrong_gradient_is_found(index: int):
    one = layers.make_batch(suite.plain_unit((128, 512), CPU), 384, (128, 128), CPU)
    right = layers.take(layers.plain_variant(), one)
    gradients = [dw * 1.1 if index == at else dw for at, dw in enumerate(right.dw)]
    *rest, worst = accuracy.judge_swiglu(one, right._replace(dw=gradients))
    assert min(rest) > 100
    assert 19 < worst < 21
    wrong_rows = accuracy.judge_swiglu(one, right._replace(y=right.y * 1.1, dx=right.dx * 1.1))
    assert max(wrong_rows[:2]) < 21


def test_every_mlp_is_listed_once():
    assert list(suite.UNITS) == ["DeepSeek-V3 671B", "DeepSeek 16B", "Llama3 8B", "Llama3 70B", "Qwen3 32B"]
    assert suite.UNITS["Llama3 70B"] == (8192, 28672)
    names = [case.name for case in suite.mlp_cases(HOPPER, ROOFS)]
    assert len(names) == len(set(names))
    fp8 = [name for name in names if name.startswith("fp8_blockwise MLP")]
    for start, count in (("M=4096", 5), ("M=16384", 5), ("8 microbatches M=4096", 5)):
        assert sum(name.startswith(f"fp8_blockwise MLP {start}") for name in fp8) == count
