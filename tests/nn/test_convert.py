"""Conversion changes what layers compute and nothing else, keeps what it should, says why, and can be undone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

import blockscale as bs
from blockscale.errors import OptionError, UnknownNameError
from blockscale.nn import Linear
from blockscale.nn.policy import find_blocks

DIM, VOCABULARY = 64, 96


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.output = nn.Linear(DIM, DIM)  # in a block, so no head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.output(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, router: str) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLP() for _ in range(24))
        self.router_name = router
        self.add_module(router, nn.Linear(DIM, 24, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        weights = getattr(self, self.router_name)(x).softmax(-1)
        return sum(weights[..., i : i + 1] * self.experts[i](x) for i in range(2))  # pyright: ignore[reportReturnType]


class Block(nn.Module):
    def __init__(self, router: str | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.mlp = MLP() if router is None else Experts(router)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 2, router: str | None = None, head: str = "lm_head", tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block(router) for _ in range(blocks))
        self.norm = nn.RMSNorm(DIM)
        self.head_name = head
        self.add_module(head, nn.Linear(DIM, VOCABULARY, bias=False))
        if tied:
            getattr(self, head).weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return getattr(self, self.head_name)(self.norm(x))


TOKENS = torch.arange(32).view(2, 16) % VOCABULARY


def made(seed: int = 0, **named) -> Model:
    torch.manual_seed(seed)
    return Model(**named)


def small() -> nn.Module:
    """Little enough to be compiled in a second."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, DIM), MLP())


def everything(module: nn.Module, name: str) -> bool:
    return True


def names(layers) -> set[str]:
    return {layer.name for layer in layers}


def loss_of(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(TOKENS).flatten(0, 1).float(), TOKENS.flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


# ---- what changes and what does not ----------------------------------------------------------------------------------


def test_a_converted_layer_is_the_same_object_and_computes_by_the_recipe():
    model = made()
    before = dict(model.named_modules())
    plain = model(TOKENS)
    report = bs.quantize_(model, "mxfp8")
    assert dict(model.named_modules()) == before
    layer = model.layers[0].mlp.down_proj
    assert type(layer) is Linear
    assert layer.name == "layers.0.mlp.down_proj"
    assert not torch.equal(model(TOKENS), plain)
    x = torch.randn(3, 2 * DIM)
    assert torch.equal(layer(x), bs.autograd.linear(x, layer.weight, recipe="mxfp8"))
    assert len(report.converted) == 10
    assert report.recipe is bs.get_recipe("mxfp8")


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "nvfp4"])
def test_state_dicts_are_those_of_the_plain_model_in_both_directions(recipe):
    model = made()
    before = model.state_dict()
    bs.quantize_(model, recipe, everything)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[key] is before[key] or after[key].data_ptr() == before[key].data_ptr() for key in before)
    other = made(seed=1)
    other.load_state_dict(after, strict=True)
    fresh = made(seed=2)
    bs.quantize_(fresh, recipe, everything)
    fresh.load_state_dict(before, strict=True)
    assert all(
        torch.equal(value, before[key]) for key, value in (*other.state_dict().items(), *fresh.state_dict().items())
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_unquantize_restores_exactly(recipe):
    model = made()
    mine = Linear(DIM, DIM, recipe="mxfp8")
    model.add_module("mine", mine)
    model.layers[0].mlp.up_proj.name = "a user's own"

    def contents() -> list:
        return [
            (name, type(module), list(vars(module)), list(module._buffers), set(module._non_persistent_buffers_set))
            for name, module in model.named_modules()
            if module is not mine
        ]

    before, plain = contents(), model(TOKENS)
    report = bs.quantize_(model, recipe, everything)
    assert contents() != before
    assert bs.unquantize_(model) == len(report.converted) - 1
    assert contents() == before
    assert model.layers[0].mlp.up_proj.name == "a user's own"
    assert torch.equal(model(TOKENS), plain)
    assert type(mine) is Linear, "it was made as one"
    assert bs.unquantize_(model) == 0


def test_unquantize_refuses_a_layer_whose_class_was_changed_since():
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    bs.quantize_(model, "mxfp8")
    nn.utils.parametrizations.weight_norm(model[1])
    with pytest.raises(OptionError, match="Fix: call it before fully_shard"):
        bs.unquantize_(model)
    assert type(model[0]) is Linear, "nothing changes when something fails"


def test_double_conversion_takes_the_new_recipe_and_says_so():
    model = made()
    bs.quantize_(model, "nvfp4", everything)
    report = bs.quantize_(model, "mxfp8")
    assert all("followed nvfp4 before" in each.note for each in report.converted)
    assert model.layers[0].mlp.down_proj.recipe.name == "mxfp8"
    assert model.layers[0].mlp.down_proj.rng is None
    (head,) = report.skipped
    assert head.reason == "output head; still follows nvfp4"
    assert bs.unquantize_(model) == 11
    assert type(model.lm_head) is nn.Linear


def test_tied_weights_stay_tied_and_count_once():
    model = made(tied=True, head="to_words")
    report = bs.quantize_(model, "mxfp8")
    assert {each.name: each.reason for each in report.skipped} == {
        "to_words": "output head: its weight is an embedding's"
    }
    assert report.parameters == sum(each.numel() for each in model.parameters())
    bs.quantize_(model, "mxfp8", everything)
    assert model.to_words.weight is model.embed.weight
    assert "embed.weight" in gradients(model)


def test_hooks_and_optimizers_survive():
    model = made()
    seen: list[str] = []
    layer = model.layers[1].attention.qkv
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    bs.quantize_(model, "mxfp8")
    loss_of(model).backward()
    optimizer.step()
    assert seen == ["forward", "backward"]
    assert not torch.equal(layer.weight, before)


def test_a_bare_layer_is_converted_even_if_its_recipe_draws():
    layer = nn.Linear(DIM, DIM)
    report = bs.quantize_(layer, "nvfp4")
    assert type(layer) is Linear
    assert names(report.converted) == {"root"}
    layer(torch.randn(4, DIM)).sum().backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("recipe", ["nvfp4", "step"])
def test_copies_compute_the_same_and_can_be_restored(copied, recipe):
    model = made()
    bs.quantize_(model, bs.get_recipe("mxfp8").replace(weight_cast="step") if recipe == "step" else recipe, everything)
    bs.refresh_weights_(model)
    twin = copied(model)
    for (name, mine), other in zip(gradients(model).items(), gradients(twin).values(), strict=True):
        assert torch.equal(mine, other), name
    bs.advance_(twin)
    if recipe == "nvfp4":
        assert model.lm_head.rng[1] == 0
        assert twin.lm_head.rng[1] == twin.layers[0].mlp.up_proj.rng[1] == 1
    assert bs.unquantize_(twin) == 11
    assert type(twin.lm_head) is nn.Linear
    assert type(model.lm_head) is Linear


def test_weights_are_saved_and_loaded_safely():
    model, file = made(), io.BytesIO()
    bs.quantize_(model, "nvfp4", everything)
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = made(seed=1)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
@pytest.mark.parametrize(
    ("router", "why"), [("gate", "router"), ("chooser", "router: as wide as the 24 experts beside it")]
)
def test_heads_routers_and_nothing_else_stay(recipe, router, why):
    model = made(router=router)
    report = bs.quantize_(model, recipe)
    reasons = {each.name: each.reason for each in report.skipped}
    assert reasons == {f"layers.{i}.mlp.{router}": why for i in range(2)} | {"lm_head": "output head"}
    assert "layers.0.attention.output" in names(report.converted)
    assert "layers.1.mlp.experts.23.gate_proj" in names(report.converted)
    assert {each.kind: each.modules for each in report.others} == {"Embedding": 1, "RMSNorm": 5}


@pytest.mark.parametrize("head", ["lm_head", "output", "head", "classifier", "words"])
def test_output_heads_are_found_by_name_or_by_the_vocabulary(head):
    (skipped,) = bs.quantize_(made(head=head), "mxfp8").skipped
    assert skipped.name == head
    assert skipped.reason.startswith("output head")
    assert ("vocabulary" in skipped.reason) is (head == "words")


def test_a_layer_as_wide_as_the_vocabulary_that_is_not_last_is_converted():
    model = nn.Sequential(nn.Embedding(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM))
    assert not bs.quantize_(model, "mxfp8").skipped


@pytest.mark.parametrize(
    "name", ["gate_proj", "gate_up", "w_gate", "router_norm_proj", "headroom", "outputs", "my_lm_head_norm"]
)
def test_names_count_by_whole_components(name):
    model = nn.Module()
    model.add_module(name, nn.Linear(DIM, DIM))
    assert names(bs.quantize_(model, "mxfp8").converted) == {name}


def test_narrow_layers_stay():
    model = nn.ModuleDict({"a": nn.Linear(DIM, 15), "b": nn.Linear(15, DIM), "c": nn.Linear(DIM, 16)})
    report = bs.quantize_(model, "fp8_blockwise")
    assert names(report.converted) == {"c"}
    assert all(each.reason == "narrow: fewer than 16 features on a side" for each in report.skipped)


def converted_blocks(model: nn.Module, *args, **named) -> list[int]:
    report = bs.quantize_(model, *args, **named)
    return sorted({int(each.name.split(".")[1]) for each in report.converted if each.name.startswith("layers")})


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("blocks", "last"), [(10, 2), (7, 2), (20, 3), (6, 1)])
def test_four_bit_recipes_keep_the_end_blocks(recipe, blocks, last):
    model = made(blocks=blocks, router="gate")  # experts are a longer list, but within a block
    assert converted_blocks(model, recipe) == list(range(2, blocks - last))


def test_end_blocks_can_be_chosen():
    assert converted_blocks(made(blocks=6), "nvfp4", keep_first=0, keep_last=0) == [0, 1, 2, 3, 4, 5]
    assert converted_blocks(made(blocks=6), "mxfp8", keep_first=1, keep_last=0.5) == [1, 2]
    assert converted_blocks(made(blocks=6), "mxfp8", everything, keep_last=2) == [0, 1, 2, 3]
    assert converted_blocks(made(blocks=6), "nvfp4", everything) == [0, 1, 2, 3, 4, 5]
    report = bs.quantize_(made(blocks=2), "nvfp4")
    assert not report.converted
    assert "no layer was converted" in str(report)


def test_blocks_of_a_dict_and_none_at_all():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): Block(None) for i in range(5)})
    assert converted_blocks(model, "nvfp4") == [2, 3]
    report = bs.quantize_(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM)), "nvfp4")
    assert len(report.converted) == 2
    assert "no blocks were found" in report.warnings[0]
    assert find_blocks(list(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).named_modules())) is None


def test_filter_fn_decides_alone_and_sees_plain_names():
    asked: list[str] = []

    def only_heads(module: nn.Module, name: str) -> bool:
        assert type(module) is nn.Linear
        asked.append(name)
        return name == "lm_head"

    model = torch.compile(made(router="gate"), backend="eager")
    report = bs.quantize_(model, "nvfp4", only_heads)
    assert names(report.converted) == {"lm_head"}
    assert "layers.0.mlp.gate" in asked
    assert {each.reason for each in report.skipped} == {"filter_fn said no"}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Int8Linear(nn.Module):
    """Somebody's quantised layer: no subclass of torch's."""

    in_features = out_features = DIM


def test_what_is_not_exactly_a_linear_layer_is_skipped_with_the_reason():
    patched = nn.Linear(DIM, DIM)
    patched.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "own": Doubled(DIM, DIM),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM)),
            "lazy": nn.LazyLinear(DIM),
            "patched": patched,
            "fp64": nn.Linear(DIM, DIM, dtype=torch.float64),
            "quantised": Int8Linear(),
            "attention": nn.MultiheadAttention(DIM, 4),
        }
    )
    classes = {name: type(module) for name, module in model.named_modules()}
    report = bs.quantize_(model, "mxfp8", everything)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    reasons = {each.name: each.reason for each in report.skipped}
    wanted = {
        "own": "Doubled, which may compute something else",
        "normed": "parametrized",
        "lazy": "lazy",
        "patched": "forward was replaced",
        "fp64": "weight is float64",
        "quantised": "Int8Linear, which may",
        "attention.out_proj": "never calls it",
    }
    assert set(reasons) == set(wanted)
    for name, reason in wanted.items():
        assert reason in reasons[name]
    assert not report.converted
    assert report.warnings
    assert str(report)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: bs.quantize_(made(), "mxpf8"), UnknownNameError, "unknown recipe 'mxpf8'"),
        (lambda: bs.quantize_(made(), None), UnknownNameError, "unknown recipe None"),
        (lambda: bs.quantize_({"a": made()}, "mxfp8"), OptionError, "a model that is a dict"),
        (lambda: bs.quantize_(made(), "mxfp8", lambda module, name: None), OptionError, "returned None for 'layers.0"),
        (lambda: bs.quantize_(made(), "mxfp8", keep_first=-1), OptionError, "keep_first=-1"),
        (lambda: bs.quantize_(made(), "mxfp8", keep_last=1.5), OptionError, r"keep_last=1\.5"),
        (lambda: bs.unquantize_(None), OptionError, "a model that is a NoneType"),
        (lambda: bs.advance_(None), OptionError, "a model that is a NoneType"),
        (lambda: bs.set_step_(None, 1), OptionError, "a model that is a NoneType"),
        (lambda: bs.set_step_(made(), -1), OptionError, "step=-1"),
    ],
)
def test_errors_say_value_rule_and_fix(call, error, text):
    with pytest.raises(error, match=rf"{text}.*Rule: .*Fix: "):
        call()


def test_a_filter_fn_that_fails_leaves_the_model_as_it_was():
    model = made()
    with pytest.raises(OptionError):
        bs.quantize_(model, "mxfp8", lambda module, name: True if name.startswith("layers.0") else "no")
    assert not any(isinstance(module, Linear) for module in model.modules())


# ---- where models live -----------------------------------------------------------------------------------------------


def test_a_meta_model_gets_its_values_and_its_seed_later():
    with torch.device("meta"):
        model = Model()
    report = bs.quantize_(model, "nvfp4", everything, seed=5)
    assert report.predicted_speedup(4096).converted > 0
    assert model.lm_head.rng.is_meta
    bs.advance_(model)  # there is nothing to advance yet
    model.to_empty(device="cpu")
    assert all(module.rng.tolist() == [5, 0] for module in model.modules() if isinstance(module, Linear))
    other = made()
    bs.quantize_(other, "nvfp4", everything, seed=5)
    model.load_state_dict(other.state_dict())
    bs.advance_(model)
    bs.advance_(other)
    wanted = gradients(other)
    for name, mine in gradients(model).items():
        assert torch.equal(mine, wanted[name]), name


@pytest.mark.parametrize("order", ["before", "after", "after a call"])
def test_compiled_models_can_be_converted(order):
    torch._dynamo.reset()
    model, twin = small(), small()
    bs.quantize_(twin, "mxfp8")
    if order == "before":
        bs.quantize_(model, "mxfp8")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if order == "after a call":
        assert torch.equal(compiled(TOKENS), small()(TOKENS))
    if order != "before":
        report = bs.quantize_(compiled, "mxfp8")
        assert "1.up_proj" in names(report.converted)
    assert torch.equal(compiled(TOKENS), twin(TOKENS))
    bs.unquantize_(compiled)
    assert torch.equal(compiled(TOKENS), small()(TOKENS))


def test_wrappers_of_data_parallel_models_do_not_change_names():
    model = nn.Module()
    model.module = made()  # as DistributedDataParallel holds it
    report = bs.quantize_(model, "nvfp4", everything)
    assert "layers.1.attention.qkv" in names(report.converted)
    assert model.module.layers[1].attention.qkv.name == "layers.1.attention.qkv"


def test_sharded_models(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model, plain = made(), made()
        fully_shard(model.layers[1].attention.qkv, mesh=mesh)
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        report = bs.quantize_(model, "mxfp8")
        reasons = {each.name: each.reason for each in report.skipped}
        assert reasons.pop("layers.1.attention.qkv").endswith("convert before fully_shard")
        assert set(reasons) == {"lm_head"}
        assert report.parameters == sum(each.numel() for each in plain.parameters())
        bs.quantize_(plain, "mxfp8", lambda module, name: name in names(report.converted))
        assert torch.equal(model(TOKENS), plain(TOKENS))
        loss_of(model).backward()
        for name, mine in gradients(plain).items():
            assert torch.equal(mine, model.get_parameter(name).grad.full_tensor()), name
        assert bs.unquantize_(model) == 9
    finally:
        torch.distributed.destroy_process_group()


# ---- time passes -----------------------------------------------------------------------------------------------------


def test_layers_draw_by_their_names_from_one_state():
    model = made()
    bs.quantize_(model, "nvfp4", everything, seed=3)
    states = {id(module.rng) for module in model.modules() if isinstance(module, Linear)}
    assert len(states) == 1
    up, gate = model.layers[0].mlp.up_proj, model.layers[0].mlp.gate_proj
    gate.weight.data.copy_(up.weight)
    x, grad = torch.randn(8, DIM, requires_grad=True), torch.randn(8, 2 * DIM)

    def dw(layer: nn.Linear) -> Tensor:
        return torch.autograd.grad(layer(x), layer.weight, grad)[0]

    assert torch.equal(dw(up), dw(up))
    assert not torch.equal(dw(up), dw(gate))


@pytest.mark.parametrize("compiled", [False, True])
def test_advance_changes_draws_and_moves_each_state_once(compiled):
    torch._dynamo.reset()
    model = small()
    bs.quantize_(model, "nvfp4", everything, seed=3)
    counter = CompileCounter()
    called = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
    first, again = gradients(called), gradients(called)
    bs.advance_(called)
    assert all(module.rng.tolist() == [3, 1] for module in model.modules() if isinstance(module, Linear))
    second = gradients(called)
    bs.advance_(called, tick=0)
    third = gradients(called)
    for name in first:
        assert torch.equal(first[name], again[name]), name
        assert torch.equal(first[name], third[name]), name
    assert counter.frame_count == int(compiled), "nothing compiles again"
    changed = [name for name in first if not torch.equal(first[name], second[name])]
    assert len(changed) == 4, changed


def test_states_that_were_torn_apart_advance_alike():
    model = made()
    bs.quantize_(model, "nvfp4", everything)
    for module in list(model.modules())[::2]:
        if isinstance(module, Linear):
            module.rng = module.rng.clone()  # as a move to another device does
    bs.advance_(model)
    bs.advance_(model)
    assert all(module.rng.tolist() == [0, 2] for module in model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize("compiled", [False, True])
def test_products_change_at_their_step(compiled):
    torch._dynamo.reset()
    model, plain = small(), small()
    recipe = bs.get_recipe("mxfp8").replace(until={"fprop": 10})
    bs.quantize_(model, recipe)
    called = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    before = called(TOKENS)
    bs.set_step_(called, 9)
    assert model[1].up_proj.recipe_now is recipe
    assert torch.equal(called(TOKENS), before)
    bs.set_step_(called, 10)
    now = model[1].up_proj.recipe_now
    assert torch.equal(called(TOKENS), plain(TOKENS))
    bs.set_step_(called, 11)
    assert model[1].gate_proj.recipe_now is now, "an equal recipe is not replaced, or callers compile again"
    bs.set_step_(called, 0)
    assert torch.equal(called(TOKENS), before)
