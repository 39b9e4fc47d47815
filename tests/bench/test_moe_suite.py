"""MoE suite: loads, grouped GEMMs and layers that are checked before they are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.report.moe import GROUPS
from blockscale.bench import accuracy, expert_layers, gemms, grouped, harness, layers, shapes, store
from blockscale.bench.gemms import judge, sqnr_db
from blockscale.bench.grouped import Grouped, make_k_grouped, make_m_grouped, pick_groups
from blockscale.bench.layers import FP8, RECIPES
from blockscale.bench.rooflines import Roofs
from blockscale.bench.shapes import LOADS, group_sizes
from blockscale.bench.suites import moe
from blockscale.bench.suites.layers import Setup
from blockscale.bench.timing import Telemetry
from blockscale.hardware import Capability
from blockscale.roofline import MEASURED, NOMINAL, Ceilings

CPU = torch.device("cpu")
HOPPER = Capability("cuda", 90)
WHERE = store.where(CPU, "0.1.0", "test")
ROOFS = Roofs(MEASURED["h200"], NOMINAL["h200"])
CEILINGS = Ceilings("", "hopper", 4e12, 7e14, 1.4e15, None, "")
HERE = Capability("cpu", 0)
FORMATS = ("fp8_1x128", "fp8_128x128")
SIZES = (5, 0, 130, 17)


@pytest.fixture(autouse=True)
def same_values() -> None:
    """Seed of the values: gates are stated for many rows, and tiny layers miss them with some seeds."""
    harness._generator.cache_clear()


def run(case: harness.Case) -> store.Row:
    return harness.run_case(case, "moe", CPU, WHERE, harness.Budget(rounds=1, seconds=1e-4), Telemetry())


def product(name: str) -> harness.Case:
    (problem,) = [problem for problem in moe.problems(HERE) if problem.name == name]
    return moe.case(problem, HERE, CEILINGS)


def linear_case(*peers: str, **named: Any) -> harness.Case:
    return harness.with_peers(moe.linear_case(FP8, 4, 128, (128, 256), Setup(HERE, ROOFS), **named), peers)


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_every_case_is_listed_once():
    found = list(moe.cases(HOPPER, CEILINGS, ROOFS))
    names = [case.name for case in found]
    assert len(names) == len(set(names))
    assert list(dict.fromkeys(case.group for case in found)) == list(moe.GROUPS) == list(GROUPS)
    for name in (
        "equal groups fprop E=64 16640x8192x5120",
        "equal groups dgrad E=1 16640x5120x8192",
        "equal groups wgrad fp32 += E=8 2048x7168x32768",
        "DeepSeek-V3 671B fprop E=256 zipf 32768x2048x7168",
        "DeepSeek-V3 671B shard wgrad E=32 worst 2048x7168x32768",
        "gpt-oss 120B fprop E=128 worst 32768x2880x2880",
        "Qwen3 30B-A3B dgrad E=128 balanced 32768x2048x768",
        "fp8_blockwise M=16640 E=64 5120->8192",
        "fp8_blockwise 8 microbatches M=16640 E=1 5120->8192",
        "mxfp8 forward M=16640 E=16 5120->8192",
        "fp8_blockwise experts M=32768 DeepSeek-V3 671B shard E=32 zipf 7168x2048",
        "fp8_blockwise mixture M=4096 DeepSeek 16B E=64 top-6 2048x1408",
    ):
        assert name in names
    for case in found:
        assert case.flops is not None
        if case.group == moe.GROUP:
            assert case.name.endswith(shapes.text(case.shape))
            assert case.flops == 2 * shapes.numel(case.shape)


def test_gemms_of_the_reference_run_only_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    def no_rows(request: Any) -> Any:
        return SimpleNamespace(backend="reference")

    monkeypatch.setattr(moe, "select", no_rows)
    monkeypatch.setattr(moe, "backends", lambda *facts: "hopper, reference")
    assert not list(moe.cases(HOPPER, CEILINGS, ROOFS))
    assert list(moe.cases(HERE, CEILINGS, ROOFS))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("rows", "experts", "most"), [(32768, 256, 4096), (7, 3, 3), (100, 1, 100), (64, 64, 1)])
def test_loads(load: Any, rows: int, experts: int, most: int):
    found = group_sizes(rows, experts, load, most)
    assert (len(found), sum(found)) == (experts, rows)
    assert min(found) >= 0
    if load != "worst":
        assert max(found) <= most
    if load == "balanced":
        assert max(found) - min(found) <= 1


def test_zipf_is_skewed_and_spread_over_the_experts():
    found = group_sizes(32768, 256, "zipf", 4096)
    # the first two are limited by the number of tokens; the third has (10/3)^1.2 times the rows of the tenth
    ranks = sorted(found, reverse=True)
    assert ranks[:2] == [4096, 4096]
    assert ranks[2] / ranks[9] == pytest.approx((10 / 3) ** 1.2, rel=0.01)
    assert list(found) != ranks
    assert found == group_sizes(32768, 256, "zipf", 4096), "the same in every run"


def test_bytes_of_products_are_counted_by_hand():
    problem = moe.Problem("x", "fprop", 4, 256, 128, 384, "worst")
    a, b = 256 * 384 + 4 * 256 * 3, 128 * 384 + 4 * 3  # a 4-byte scale for 128 values, or for a 128x128 block
    assert moe.moved_bytes(problem) == a + b + 2 * 256 * 128
    balanced = dataclasses.replace(problem, load="balanced")
    assert moe.moved_bytes(balanced) == a + 4 * b + 2 * 256 * 128
    wgrad = dataclasses.replace(balanced, what="wgrad", kind=moe.VECTORS)
    operands = 256 * (128 + 384) + 4 * 2 * (128 + 384)
    assert moe.moved_bytes(wgrad) == operands + 2 * 4 * 128 * 384
    assert moe.moved_bytes(dataclasses.replace(wgrad, output=moe.ADDED)) == operands + 2 * 4 * 4 * 128 * 384


# ---- products --------------------------------------------------------------------------------------------------------


def operands(kind: str, dtype: torch.dtype = torch.bfloat16) -> Grouped:
    if kind == "m":
        return make_m_grouped(SIZES, 256, 160, FORMATS, CPU, dtype)
    return make_k_grouped(SIZES, 256, 160, (FORMATS[0],) * 2, CPU, dtype, accumulate=kind == "k +=")


@pytest.mark.parametrize("kind", ["m", "k", "k +="])
def test_correct_grouped_gemms_pass_and_wrong_ones_do_not(kind: str):
    dtype = torch.float32 if kind == "k +=" else torch.bfloat16
    one = operands(kind, dtype)
    assert judge(grouped.multiply, one).problem == ""

    def broken(change: Callable[[Tensor], object]) -> str:
        def multiply(made: Grouped) -> Tensor:
            out = grouped.multiply(made)
            change(out)
            return out

        return judge(multiply, one).problem

    rows = slice(5, 135) if kind == "m" else 2
    assert "dB from the exact one" in broken(lambda out: out[rows].mul_(1.1))
    assert "not finite, or were not written" in broken(lambda out: out[-1].fill_(torch.nan))
    if kind == "k +=":
        assert "were not added to" in broken(lambda out: out[2, :3].zero_())


@pytest.mark.parametrize("kind", ["m", "k"])
def test_accuracy_of_peers_is_of_their_own_operands(kind: str):
    one = operands(kind)
    assert one.plain_accuracy(grouped.plain) > 100
    codes_x, scale_x, codes_w, scale_w = one.rowwise
    whole = []
    for group, (start, end) in enumerate(one.spans):
        if kind == "m":
            left = codes_x[start:end].double() * scale_x[start:end]
            whole.append(left @ (codes_w[group].double() * scale_w[group]).mT)
        else:
            by_x, by_w = (scale.view(len(SIZES), -1)[group][:, None] for scale in (scale_x, scale_w))
            whole.append((codes_x[:, start:end].double() * by_x) @ (codes_w[:, start:end].double() * by_w).mT)
    exact = torch.cat(whole) if kind == "m" else torch.stack(whole)
    assert one.rowwise_accuracy(lambda _: exact) > 200
    plain = grouped.plain(one)
    assert 28 < sqnr_db(plain, exact) < 40, "rowwise codes are near the values that they stand for"


def test_equal_groups_have_the_same_rows():
    for kind in ("m", "k"):
        one = operands(kind)
        assert one.with_equal_groups.sizes == (38, 38, 38, 38)
        assert one.with_equal_groups.offs.tolist() == [38, 76, 114, 152]
        assert one.with_equal_groups.accuracy(grouped.multiply) > 54
        assert one.with_equal_groups.x is one.x


def test_compared_groups():
    assert pick_groups((0, 4, 0, 2), 8) == [1, 3]
    found = pick_groups([*range(1, 300), 1000, 3, *range(5, 100)], 16)
    assert len(found) == 16
    assert {0, 299} <= set(found), "the smallest and the largest"


def test_a_product_is_timed_beside_equal_groups_and_bf16():
    row = run(product("tiny fprop E=4 zipf 80x128x256"))
    assert not row.fault
    assert row.us is not None
    # 40, 20, 12 and 8 rows, at most 16 compared of each
    assert row.checked.startswith("52 rows of 4 groups")
    assert {"balanced", "bf16"} == {name for name, cell in row.peers.items() if "us" in cell}
    added = run(product("equal groups wgrad fp32 += E=4 128x256x160"))
    assert (added.fault, added.dtype) == ("", "float32")
    assert added.sqnr_db is not None
    assert added.sqnr_db > 100
    assert "balanced" not in product("tiny fprop E=4 balanced 80x128x256").peers


def test_decoding_is_timed_beside_bf16():
    row = run(product("decoding fprop E=4 balanced 16x128x256"))
    assert not row.fault
    assert {"bf16"} == {name for name, cell in row.peers.items() if "us" in cell}


def test_unsupported_group_sizes_become_a_note():
    peers = {case.name: case.peers for case in moe.cases(HOPPER, CEILINGS, ROOFS)}
    assert "multiples of 16 rows" in str(peers["equal groups wgrad E=64 8192x5120x16640"][gemms.FAST])
    for name in ("equal groups wgrad E=16 8192x5120x16640", "equal groups fprop E=64 16640x8192x5120"):
        assert not isinstance(peers[name][gemms.FAST], str)


# ---- layers ----------------------------------------------------------------------------------------------------------


def linear_batch() -> layers.Batch:
    return layers.make_batch(expert_layers.plain_linear(SIZES, 128, 64, CPU), sum(SIZES), (128, 64), CPU)


def experts_batch() -> layers.Batch:
    return layers.make_batch(expert_layers.plain_experts(SIZES, 128, 64, CPU), sum(SIZES), (128, 128), CPU)


def mixture_batch() -> layers.Batch:
    plain = expert_layers.plain_mixture(shapes.Mixture(4, 2, 128, 64), CPU)
    return layers.make_batch(plain, 40, (128, 128), CPU)


JUDGED = {
    "linear": (linear_batch, accuracy.judge_linear, expert_layers.our_linear),
    "experts": (experts_batch, accuracy.judge_swiglu, expert_layers.our_experts),
    "mixture": (mixture_batch, accuracy.judge_mixture, expert_layers.our_mixture),
}


@pytest.mark.parametrize("name", JUDGED)
def test_layers_in_high_precision_are_exact(name: str):
    make, judge_layer, ours = JUDGED[name]
    one = make()
    assert min(judge_layer(one, layers.take(layers.plain_variant(), one))) > 100
    found = layers.take(layers.our_variant(ours, RECIPES[FP8]), one)
    assert all(20 < db < 35 for db in judge_layer(one, found))
    assert [dw.shape for dw in found.dw] == [each.shape for each in one.built.plain.parameters()]


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("part", range(3))
def test_an_error_in_one_expert_is_detected(name: str, part: int):
    make, judge_layer, _ = JUDGED[name]
    one = make()
    found = layers.take(layers.plain_variant(), one)
    wrong = (found.y[-17:], found.dx[-17:], found.dw[-1][2])[part]
    wrong.mul_(1.5)
    assert judge_layer(one, found)[part] < 20


def test_variants_share_their_parameters():
    for make, _, ours in JUDGED.values():
        one = make()
        form = one.built.of(layers.our_variant(ours, RECIPES[FP8]))
        assert all(a is b for a, b in zip(form.parameters, one.built.plain.parameters(), strict=True))


def test_a_grouped_linear_has_speed_accuracy_memory_and_bound():
    row = run(linear_case("bf16", "cast per step"))
    assert not row.fault
    assert row.us is not None
    assert {"bf16", "cast per step"} == {name for name, cell in row.peers.items() if "us" in cell}
    assert not any("note" in cell for cell in row.peers.values())
    assert row.details["dw_db"] > 28.2
    assert row.details["kept_bytes cast per step"] < row.details["kept_bytes blockscale"]
    assert row.bound_us is not None
    several = linear_case(microbatches=8)
    assert (several.parts, several.flops) == (8, 6 * 128 * 128 * 256)
    assert several.bound_us is not None
    assert several.bound_us < row.bound_us, "a cast that is shared"


def test_a_forward_alone_reads_weights_that_were_cast_before(monkeypatch: pytest.MonkeyPatch):
    case = linear_case("bf16", forward=True)
    counted: list[int] = []
    real = layers.refresh_weights_
    monkeypatch.setattr(layers, "refresh_weights_", lambda module: counted.append(1) or real(module))
    row = run(case)
    assert not row.fault
    assert list(row.details)[-1:] == ["y_db"]
    assert "us" in row.peers["bf16"]
    assert len(counted) == 2, "in both runs of the check, and not in what is timed"


def test_a_wrong_layer_gets_no_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(layers.LINEAR_GATES, FP8, (60.0, 28.2, 28.2))
    for case in (linear_case(), linear_case(forward=True)):
        row = run(case)
        assert row.us is None
        assert row.problem.startswith("y is 28")


def test_a_mixture_is_timed_with_its_router():
    (case,) = [
        case
        for case in moe.layer_cases(HERE, ROOFS)
        if case.name == "fp8_blockwise mixture M=64 tiny E=4 top-2 128x128"
    ]
    row = run(case)
    assert not row.fault
    assert row.shape == [64, 128, 128]
    assert "host_syncs" not in row.details, "there is no device to wait for"
    assert row.peers["bf16"]["sqnr_db"] > 100


def test_torchao_pads_only_where_it_must(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def multiply(x: Tensor, weight: Tensor, offs: Tensor, *, pad_token_groups_for_grouped_mm: bool) -> Tensor:
        asked.append(pad_token_groups_for_grouped_mm)
        return functional.grouped_mm(x, weight, offs=offs)

    fake = SimpleNamespace(_to_fp8_rowwise_then_scaled_grouped_mm=multiply)
    monkeypatch.setattr(expert_layers, "torchao", lambda name: fake)
    for groups in (SIZES, (16, 0, 32, 128)):
        plain = expert_layers.plain_linear(groups, 128, 64, CPU)
        expert_layers.torchao_linear("rowwise")(plain)(torch.randn(sum(groups), 128))
    assert asked == [True, False]


def test_a_peer_that_leaves_values_unwritten_is_noted():
    case = product("tiny fprop E=4 worst 80x128x256")
    lazy = harness.Peer(lambda o: grouped.multiply(o) * torch.nan, accuracy=lambda o: float("nan"), note="lazy")
    cell = run(dataclasses.replace(case, peers={"lazy": lazy})).peers["lazy"]
    assert cell["note"] == "differs: not all of its values are finite; lazy"
    assert "sqnr_db" not in cell
    assert cell["us"] > 0
