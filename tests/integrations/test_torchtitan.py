"""torchtitan's debug models by recipes, on a CPU and with torchtitan's own trainer; see support/titan_checks.py."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from blockscale.autograd import RECIPES

TESTS = Path(__file__).parent.parent
# started first, by any worker
pytestmark = pytest.mark.slow
MARK = "RESULT "
DEBUG_LINEARS = 30
SQUARE = ("fp8_blockwise", "fp8_blockwise_pow2", "mxfp8_128x128", "nvfp4")
POWERS_OF_TWO = ("fp8_blockwise_pow2", "mxfp8", "mxfp8_128x128")
Checked = Callable[..., dict[str, Any]]
Default = Callable[[str], Any]

try:
    importlib.metadata.version("torchtitan")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("torchtitan is not installed: pip install -e '.[titan]'", allow_module_level=True)


@pytest.fixture(scope="session")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """What titan_checks.py found, by name; several in one process, since torchtitan takes long to start. Workers of one
    run share what any of them has found."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def check(*names: str) -> dict[str, Any]:
        file = folder / f"titan-{'-'.join(names)}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(run_checks(names)))
        return json.loads(file.read_text())

    return check


def run_checks(names: Sequence[str]) -> dict[str, Any]:
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "support.titan_checks", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found |= json.loads(line.removeprefix(MARK))
    assert list(found) == list(names)
    return found


@pytest.fixture
def default(found: Default) -> Default:
    """The checks of every test run."""
    return found


def assert_close(losses: list[float], others: list[float], relative: float) -> None:
    assert losses == pytest.approx(others, rel=relative)
    assert losses != others, "nothing was converted"


# ---- which layers ----------------------------------------------------------------------------------------------------


def test_linear_layers_of_blocks_are_converted_and_the_head_is_not(default: Default):
    found = default("conversions")["llama3 debugmodel"]
    assert found["kinds"] == {"BlockScaledLinear": DEBUG_LINEARS}
    assert found["kept"] == {"lm_head": "not in fqns"}
    assert default("conversions")["llama3 8B"]["kinds"] == {"BlockScaledLinear": 5 * 32}


def test_a_layer_is_measured_as_ours_is(default: Default):
    theirs, ours = default("measured")
    assert theirs == ours
    assert 25 < ours["fprop"] < 35


def test_experts_are_converted_and_router_gates_are_not(default: Default):
    found = default("conversions")["deepseek_v3 debugmodel"]
    assert found["kinds"] == {"BlockScaledLinear": 4 * 6 + 3 + 3 * 5, "BlockScaledExperts": 5}
    gates = {f"layers.{layer}.moe.router.gate": "skip has *.router.*" for layer in range(1, 6)}
    assert found["kept"] == {"lm_head": "not in fqns"} | gates


def test_a_layer_of_another_kind_stays_with_a_reason(default: Default):
    found = default("conversions")["gpt_oss debugmodel"]
    assert found["kinds"] == {"BlockScaledLinear": 4, "BlockScaledGptOssGroupedExperts": 4}
    assert found["kept"]["layers.0.attention.wo"] == "a ScaledBiasRowwiseLinear, which may compute something else"


def test_four_bit_formats_keep_the_end_blocks(default: Default):
    kept = default("conversions")["nvfp4"]
    assert kept == {
        "layers.0.attention.wo": "first 2 of 6 blocks",
        "layers.1.attention.wo": "first 2 of 6 blocks",
        "layers.5.attention.wo": "last of 6 blocks",
    }
    nothing = default("conversions")["nothing but ends"]
    assert nothing["converted"] == 0
    assert "pass keep_first=0 and keep_last=0" in nothing["warnings"][0]


@pytest.mark.parametrize("model", ["llama3 8B", "llama3 debugmodel", "deepseek_v3 debugmodel", "gpt_oss debugmodel"])
def test_parameters_and_state_are_those_of_the_plain_model(default: Default, model: str):
    found = default("conversions")[model]
    assert found["same parameters"]
    assert found["same state"]
    assert found["casts"] == ["twice"]


def test_ready_made_runs_have_bf16_counterparts(default: Default):
    found = dict(default("configs"))
    assert found.pop("offered beside") == []
    layers = {
        "llama3_debug": DEBUG_LINEARS,
        "deepseek_v3_debug": 4 * 6 + 3 + 3 * 5 + 5,
        "llama3_8b": 5 * 32,
        "deepseek_v3_16b": 4 * 27 + 3 + 3 * 26 + 26,
    }
    low = {name: found.pop(name)["wires"] for name in list(found) if name.endswith("_low")}
    assert set(found) == {f"{model}_{recipe}" for model in layers for recipe in RECIPES}
    gathers = {f"{model}_{recipe}_low" for model in layers for recipe in SQUARE}
    dispatches = {f"deepseek_v3_{size}_{recipe}_low" for size in ("debug", "16b") for recipe in POWERS_OF_TWO}
    assert {name for name, (gather, _) in low.items() if gather == "low"} == gathers
    assert {name for name, (_, dispatch) in low.items() if dispatch == ["low"]} == dispatches
    assert set(low) == gathers | dispatches
    for model, count in layers.items():
        assert found[f"{model}_bf16"] == {
            "layers": 0,
            "recipes": [],
            "checkpointing": "BlockScaledAC.Config",
            "metrics": "MetricsProcessor.Config",
            "wires": [None, []],
        }
        for recipe in ("fp8_blockwise", "mxfp8", "mxfp8_wgrad_bf16", "mxfp6"):
            assert found[f"{model}_{recipe}"] == {
                "layers": count,
                "recipes": [recipe],
                "checkpointing": "BlockScaledAC.Config",
                "metrics": "BlockScaledMetrics.Config",
                "wires": [None, []],
            }
        assert 0 < found[f"{model}_nvfp4"]["layers"] < count


@pytest.mark.parametrize(
    ("plain", "low"),
    [("GroupedExperts", "BlockScaledExperts"), ("GptOssGroupedExperts", "BlockScaledGptOssGroupedExperts")],
)
def test_experts_compute_what_the_plain_ones_do(default: Default, plain: str, low: str):
    found = default("experts_alone")[plain]
    assert found["class"] == low
    for name, error in found["errors"].items():
        # MXFP8 has three mantissa bits; a wrong product would have an error of order 1
        assert 0.01 < error < 0.1, name


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
def test_a_llama_trains(default: Default, recipe: str):
    found, twin = default("llama")[recipe], default("llama")["bf16"]
    assert found["kinds"] == {"BlockScaledLinear": 5, "Linear": 1, "FusedQKVLinear": 1}
    assert twin["kinds"] == {"Linear": 6, "FusedQKVLinear": 1}
    assert found["head"] == "Linear"
    assert found["state"] == twin["state"]
    assert_close(found["losses"], twin["losses"], 2e-3)
    assert found["losses"][2] < found["losses"][1] < found["losses"][0]


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
def test_a_mixture_of_experts_trains(default: Default, recipe: str):
    found, twin = default("experts")[recipe], default("experts")["bf16"]
    kinds = {"BlockScaledLinear": 7, "BlockScaledExperts": 1, "Linear": 2, "RoutedExperts": 1}
    assert found["kinds"] == kinds
    assert found["state"] == twin["state"]
    assert_close(found["losses"], twin["losses"], 1.2e-3)
    assert found["losses"][1] < found["losses"][0]


def test_converter_and_override_are_the_same_to_the_last_digit(default: Default):
    assert default("llama")["override"]["kinds"] == default("llama")["fp8_blockwise"]["kinds"]
    assert default("llama")["override"]["losses"] == default("llama")["fp8_blockwise"]["losses"]
    assert default("experts")["override"]["kinds"] == default("experts")["mxfp8"]["kinds"]
    assert default("experts")["override"]["losses"] == default("experts")["mxfp8"]["losses"]


def test_checkpoints_go_from_plain_to_converted_and_back(default: Default):
    found, plain, low = default("checkpoints"), default("llama")["bf16"]["losses"], default("llama")["mxfp8"]["losses"]
    # the first steps are the one recipe's to the last digit; the third goes on from there
    assert found["bf16 to mxfp8"] == [*plain[:2], pytest.approx(low[2], rel=1e-3)]
    assert found["mxfp8 to bf16"] == [*low[:2], pytest.approx(plain[2], rel=1e-3)]
    assert plain[0] - plain[2] > 1e-2 * plain[0], "a run that begins again would pass"


def test_checkpointing_saves_products(default: Default):
    """Five products forward and ten backward in a step; forward ones again unless they are saved."""
    found = default("llama")
    assert found["stock"]["counts"]["scaled_mm"] == 20
    assert found["fp8_blockwise"]["counts"]["scaled_mm"] == 3 * 17
    assert found["kept"]["counts"]["scaled_mm"] == 15
    assert found["stock"]["losses"] == found["kept"]["losses"] == found["fp8_blockwise"]["losses"][:1]


@pytest.mark.long
def test_a_resumed_run_continues_stochastic_rounding(checked: Checked):
    """The fourth loss is the first that depends on the third step's random numbers."""
    found = checked("draws")["draws"]
    assert found["ticks"] == [[2], [4]]
    assert found["whole"]["ticks"] == [4]
    assert found["parts"] == found["whole"]["losses"]


@pytest.mark.long
def test_compiled_blocks_train(default: Default, checked: Checked):
    found = checked("compiled")["compiled"]
    assert found["losses"] == pytest.approx(default("llama")["fp8_blockwise"]["losses"], rel=1e-3)
    assert found["graphs"] == 2  # the block and the loss; three steps compile neither again


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_invalid_options_are_errors(default: Default):
    found = default("refusals")
    assert "no layer matches fqns=['*blocks.*']" in found["nothing matches"]
    assert "layers.0.attention.qkv_linear.wqkv" in found["nothing matches"]
    assert "fqns='*layers.0.*'. Rule: globs come in a list. Fix: fqns=['*layers.0.*']" in found["a glob alone"]
    assert "FSDP2" in found["step"]
    assert "use 'forward'" in found["step"]
    assert "did you mean" in found["recipe"]
    assert "does not pass the step to layers" in found["until"]
    assert "since=10 in torchtitan" in found["since"]
    assert "keep_last=1.5" in found["ends"]
    assert "layers.0.w1.weight (768, 256) in shards of 192 along axis 0" in found["pieces"]
    assert "a scale for every 128 values" in found["pieces"]
    assert found["pieces that fit"] == "nothing"
    assert "use BlockScaledConverter" in found["override that draws"]


def test_invalid_options_of_the_wire_are_errors(default: Default):
    found = default("refusals")
    assert "unknown gather 'bf16'" in found["gather"]
    assert "unknown dispatch 'fp4'" in found["payload"]
    assert "payload=\"low\" for recipe 'fp8_blockwise'" in found["low"]
    assert "fp8_blockwise_pow2" in found["low"]
    for case in ("no experts", "kept experts"):
        assert "dispatch='low' for a model without converted experts" in found[case]
    assert "beside HybridEPTokenDispatcher.Config at layers.1.moe.routed_experts" in found["other dispatcher"]
    assert "an activation of their own" in found["other activation"]
    assert "compiled blocks with dispatch" in found["compiled"]
    assert "compiled blocks with gather='low'" in found["compiled gather"]
    assert "--compile.components loss" in found["compiled gather"]
    assert "gather='low' for Linear" in found["no checkpointing"]
