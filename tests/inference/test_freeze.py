"""`freeze_`: the bits of the recipe's forward, memory of weights returned, a report that leaves nothing out."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale.autograd import RECIPES
from blockscale.errors import BlockscaleError, PairError, ShardingError
from blockscale.inference import (
    QuantizedExperts,
    QuantizedGroupedLinear,
    QuantizedLinear,
    QuantizedSwiGLU,
    freeze_,
)
from blockscale.nn import GroupedExperts, GroupedLinear, Linear, MoE, SwiGLU

QUANTIZED = sorted(name for name in RECIPES if name != "bf16")
ENDS = torch.tensor([3, 3, 7, 10], dtype=torch.int32)


class Everything(nn.Module):
    """Every kind of layer with a recipe, with tail blocks."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.up = Linear(100, 72, recipe=recipe, name="up")
        self.mlp = SwiGLU(72, 40, bias=True, recipe=recipe, name="mlp")
        self.grouped = GroupedLinear(4, 72, 88, recipe=recipe, name="grouped")
        self.experts = GroupedExperts(experts=4, dim=88, hidden=40, bias=True, recipe=recipe, name="experts")
        self.moe = MoE(dim=88, hidden=48, experts=4, top_k=2, shared=32, recipe=recipe, name="moe")
        self.head = nn.Linear(88, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[10, 100] -> [10, 32]."""
        return self.head(self.moe(self.experts(self.grouped(self.mlp(self.up(x)), ENDS), ENDS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_frozen_models_compute_the_bits_of_their_recipe(recipe: str, dtype: torch.dtype):
    torch.manual_seed(0)
    model, x = Everything(recipe).to(dtype), torch.randn(10, 100, dtype=dtype)
    with torch.no_grad():
        want = model(x)
    report = freeze_(model)
    assert torch.equal(model(x), want)
    assert not hasattr(model.up, "recipe_now")
    names = ["up", "mlp.gate_up", "mlp.down", "grouped", "experts.gate_up", "experts.down", "moe.experts.gate_up"]
    assert [each.name for each in report.converted] == [
        *names, "moe.experts.down", "moe.shared.gate_up", "moe.shared.down"
    ]  # fmt: skip
    reasons = {each.name: each.reason for each in report.skipped}
    assert reasons == {"moe.router": "router: its scores are in fp32", "head": "output head"}
    assert isinstance(model.up, QuantizedLinear)
    assert isinstance(model.grouped, QuantizedGroupedLinear)
    if recipe != "mxfp8_wgrad_bf16":  # which trains with torch's silu between the layers
        assert isinstance(model.mlp, QuantizedSwiGLU)
        assert isinstance(model.experts, QuantizedExperts)


def test_recipes_of_one_step_and_weight_casts_of_a_step():
    """The rule of the present step counts, and so do the present weights."""
    recipe = bs.get_recipe("mxfp8").replace(weight_cast="step", since=10)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), torch.randn(3, 64)
    bs.quantize_(model, recipe)
    early = copy.deepcopy(model)
    bs.set_step_(early, 0)
    assert freeze_(early).skipped[0].reason == "recipe mxfp8*, so fprop is unquantized: pass weights"
    bs.set_step_(model, 10)
    model(x).sum().backward()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.5)
    bs.refresh_weights_(model)
    with torch.no_grad():
        want = model(x)
    freeze_(model)
    assert torch.equal(model(x), want)


def test_plain_models_by_formats():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4), nn.Linear(4, 64)), torch.randn(3, 64)
    plain = copy.deepcopy(model)
    assert not freeze_(plain).converted
    report = freeze_(model, "mxfp4")
    assert [each.name for each in report.converted] == ["0"]
    assert [each.reason for each in report.skipped] == ["narrow: fewer than 16 features on a side"] * 2
    w = bs.dequantize(bs.quantize(plain[0].weight, "mxfp4"), torch.float32)  # pyright: ignore[reportArgumentType]
    want = plain[3](plain[2](torch.relu(nn.functional.linear(x, w, plain[0].bias))))  # pyright: ignore[reportArgumentType]
    assert (model(x) - want).abs().max() < 1e-5
    assert not any(each.requires_grad for each in model.parameters())
    chosen = freeze_(plain, "mxfp4", "mxfp8_e4m3", filter_fn=lambda module, name: name == "3")
    assert [each.name for each in chosen.converted] == ["3"]
    assert plain[3].activations.format == "mxfp8_e4m3"  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    again = freeze_(model, "nvfp4")
    assert again.skipped[0].reason == "frozen before: weights mxfp4"


def test_a_layer_is_a_model():
    layer = nn.Linear(64, 32)
    report = freeze_(layer, "mxfp4")
    assert type(layer) is QuantizedLinear
    assert report.converted[0].name == "root"


def test_formats_given_take_the_place_of_the_recipe():
    torch.manual_seed(0)
    model = Everything("mxfp8")
    both = copy.deepcopy(model)
    freeze_(model, "mxfp4")
    freeze_(both, activations="mxfp8_e5m2")
    assert (model.up.format, model.up.activations) == ("mxfp4", None)  # pyright: ignore[reportAttributeAccessIssue]
    assert (both.up.format, both.up.activations.format) == ("mxfp8_e4m3", "mxfp8_e5m2")  # pyright: ignore[reportAttributeAccessIssue]
    assert model(torch.randn(10, 100)).shape == (10, 32)
    with pytest.raises(PairError):
        freeze_(Everything("mxfp8"), "mxfp4", "fp8_1x128")


def test_the_head_on_demand():
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 64, bias=False))
    model[3].weight = model[0].weight
    tied = copy.deepcopy(model)
    assert freeze_(model, "mxfp4").skipped[0].reason.startswith("output head")
    report = freeze_(tied, "mxfp4", "mxfp4", head="mxfp8_e4m3")
    assert (tied[3].format, tied[3].activations) == ("mxfp8_e4m3", None)  # pyright: ignore[reportAttributeAccessIssue]
    assert report.converted[-1].note.endswith("the embedding that it is tied to keeps its own weight")
    assert tied[0].weight.dtype == torch.float32
    assert tied(torch.tensor([[1, 2]])).shape == (1, 2, 64)


def test_tied_layers_share_codes():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    report = freeze_(model, "mxfp4")
    first, second = (layer.weight for layer in model if isinstance(layer, QuantizedLinear))
    assert first.data_ptr() == second.data_ptr()
    note = "weights mxfp4, activations unquantized, with the codes of 0, to which it is tied"
    assert report.converted[1].note == note
    assert report.bytes_after == 64 * 32 + 64 * 2 + 2 * 64 * 4


def test_weights_are_freed_and_bytes_counted():
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.LayerNorm(128))
    weight = weakref.ref(model[0].weight)
    report = freeze_(model, "mxfp4")
    gc.collect()
    assert weight() is None
    assert (report.bytes_before, report.bytes_after) == (4 * (256 * 128 + 256), 128 * (128 + 8) + 4 * 256)
    text = str(report)
    assert "mxfp4, activations unquantized: 1 of 1 linear layers frozen" in text
    assert "not linear: 1 LayerNorm (256 parameters)" in text
    assert "bytes: 132.1k before, 18.4k after" in text
    assert "roofline" not in text


def test_hooks_and_references_stay():
    torch.manual_seed(0)
    mlp, seen = SwiGLU(32, 96, recipe="mxfp8"), []
    model = nn.Sequential(nn.Linear(64, 32), mlp).bfloat16()
    layer = model[0]
    layer.register_forward_hook(lambda *_: seen.append("layer"))
    mlp.gate_up.register_forward_hook(lambda *_: seen.append("gate_up"))
    bs.quantize_(model, "mxfp8")
    x = 4 * torch.randn(64, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        want = model(x)
    freeze_(model)
    assert model[0] is layer
    assert torch.equal(model(x), want), "a hook makes the parts of an MLP run one after the other"
    assert seen == ["layer", "gate_up"] * 2


def test_what_is_not_frozen_says_why():
    odd = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.LazyLinear(32))
    reasons = [each.reason for each in freeze_(odd, "mxfp4").skipped]
    assert reasons[0].startswith("parametrized")
    assert reasons[1].startswith("lazy")
    product = bs.autograd.Product(*[bs.autograd.Operand("mxfp4", hadamard=True)] * 2)
    turned = nn.Sequential(Linear(64, 64, recipe=bs.get_recipe("mxfp4").replace(fprop=product), name="turned"))
    assert freeze_(turned).skipped[0].reason.startswith("its recipe rotates the operands of fprop")
    warning = freeze_(nn.Sequential(nn.Linear(64, 64))).warnings[0]
    assert warning == "no layer was frozen: see the reasons above, or pass weights, such as 'mxfp4'"


def test_wrong_arguments_change_nothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def fails(module: nn.Module, name: str) -> bool:
        if name == "1":
            raise RuntimeError("no")
        return True

    with pytest.raises(RuntimeError, match="no"):
        freeze_(model, "mxfp4", filter_fn=fails)
    with pytest.raises(BlockscaleError, match="did you mean mxfp4"):
        freeze_(model, "mxpf4")
    with pytest.raises(BlockscaleError, match="filter_fn returned 1"):
        freeze_(model, "mxfp4", filter_fn=lambda module, name: 1)  # pyright: ignore[reportArgumentType]
    assert all(type(each) is nn.Linear for each in model)


@pytest.mark.parametrize("second", ["fp8_blockwise", "nvfp4"])
def test_formats_without_a_product_change_nothing(second: str):
    model = nn.Sequential(Linear(64, 64, recipe="mxfp8", name="0"), Linear(64, 64, recipe=second, name="1"))
    with pytest.raises(PairError):
        freeze_(model, activations="mxfp8_e4m3")
    assert all(type(each) is Linear for each in model)
    with pytest.raises(BlockscaleError, match="unknown format 'mxpf8'"):
        freeze_(nn.Sequential(nn.Linear(64, 64)), activations="mxpf8")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"amax": torch.tensor(3.0)}, "amax"),
        ({"amax": "group"}, "amax"),
        ({"hadamard": True}, "a rotation"),
        ({"rounding": bs.Stochastic(bs.rng_state(0), "w"), "role": "fprop_w"}, "stochastic rounding"),
    ],
    ids=str,
)
def test_each_weight_is_cast_to_nearest_by_its_own_amax(options: dict[str, Any], wrong: str):
    model, cast = nn.Sequential(nn.Linear(64, 64)), bs.CastSpec("nvfp4", **options)
    for given in ({"weights": cast}, {"weights": "nvfp4", "head": cast}):
        with pytest.raises(BlockscaleError, match=f"{wrong} for weights in nvfp4. Rule: each weight"):
            freeze_(model, **given)
    assert type(model[0]) is nn.Linear


def test_layers_that_hold_more_than_a_weight_stay():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model[0].lora = nn.Linear(64, 4)
    model[1].scale = nn.Parameter(torch.ones(64))
    model[2].register_buffer("rng", torch.ones(2))
    report = freeze_(model, "mxfp4", filter_fn=lambda module, name: "lora" not in name)
    reasons = {each.name: each.reason for each in report.skipped}
    held = {"0": "module lora", "1": "parameter scale", "2": "buffer rng"}
    assert {name: reasons[name] for name in held} == {
        name: f"holds {each} besides its weight, which freezing would drop" for name, each in held.items()
    }
    assert [each.name for each in report.converted] == ["3"]
    assert model[0].lora.in_features == 64


def test_attributes_of_the_user_stay():
    model = nn.Sequential(nn.Linear(64, 64), Linear(64, 64, recipe="nvfp4", name="1"), nn.Linear(64, 64))
    for layer in model:
        layer.place, layer.format = [3], "mine"
    model[0].name = model[2].name = "mine"
    bs.quantize_(model, "mxfp8", lambda module, name: name == "2")
    freeze_(model, "mxfp4")
    assert all((each.place, each.format) == ([3], "mxfp4") for each in model), "those of a frozen layer come first"
    assert model[0].name == model[2].name == "mine"
    assert {"recipe_now", "name", "rng", "shared_weight"}.isdisjoint(vars(model[1]))
    assert not hasattr(model[1], "rng")


def test_sharded_models_are_refused():
    from torch._C._distributed_c10d import HashStore
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        layer, mesh = nn.Linear(64, 64), init_device_mesh("cpu", (1,))
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
        with pytest.raises(ShardingError, match=r"0\.weight of the model is sharded\. Rule: freeze_ casts whole"):
            freeze_(nn.Sequential(layer), "mxfp4")
    finally:
        destroy_process_group()
