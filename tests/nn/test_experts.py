"""`GroupedLinear` and `GroupedExperts`: the functions with names; state, copies, shared casts; groups of all sizes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import blockscale as bs
from blockscale.autograd import grouped_linear, grouped_swiglu_mlp
from blockscale.errors import OptionError
from blockscale.nn import GroupedExperts, GroupedLinear, MoE
from support.grouped_reference import PATTERNS
from support.linear_reference import Calls
from support.products import assert_same_bits, gaussian, offsets

EXPERTS, DIM, HIDDEN = 4, 72, 104
SIZED = {"experts": EXPERTS, "dim": DIM, "hidden": HIDDEN}
SIZES = (31, 0, 17, 2)


def make(recipe: str | bs.Recipe = "fp8_blockwise", *, bias: bool = False, seed: int = 0) -> GroupedExperts:
    torch.manual_seed(seed)
    named: dict[str, Any] = {"recipe": recipe, "name": "layers.0.mlp.experts", "dtype": torch.bfloat16}
    return GroupedExperts(**SIZED, bias=bias, **named)


def trained(
    module: Callable[[Tensor, Tensor], Tensor], *owners: torch.nn.Module, sizes: tuple[int, ...] = SIZES
) -> list[Tensor | None]:
    """y, dx and the gradients of all parameters, which are None again after."""
    x = gaussian(sum(sizes), DIM, seed=1).requires_grad_()
    y = module(x, offsets(sizes))
    y.backward(gaussian(*y.shape, seed=2))
    grads = [param.grad for owner in owners for param in owner.parameters()]
    for owner in owners:
        owner.zero_grad()
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "nvfp4", "mxfp8_wgrad_bf16", "bf16"])
def test_the_modules_are_the_functions(name: str, bias: bool):
    experts, state = make(name, bias=bias), bs.rng_state(0)
    first, second = experts.gate_up, experts.down
    roundings = bs.Stochastic(state, "layers.0.mlp.experts.gate_up"), bs.Stochastic(state, "layers.0.mlp.experts.down")

    def mlp(x: Tensor, offs: Tensor) -> Tensor:
        weights = first.weight, second.weight
        return grouped_swiglu_mlp(x, *weights, offs, first.bias, second.bias, name, roundings=roundings)

    def layer(x: Tensor, offs: Tensor) -> Tensor:
        return grouped_linear(x, first.weight, offs, first.bias, name, rounding=roundings[0])

    assert experts.is_fused
    assert_same_bits(trained(experts, experts), trained(mlp, experts))
    assert_same_bits(trained(first, first), trained(layer, first))


@pytest.mark.parametrize("pattern", [name for name, sizes in PATTERNS.items() if len(sizes) == EXPERTS])
def test_any_groups(pattern: str):
    """Experts without rows have gradients of zero, and the others those of their rows alone."""
    experts, sizes = make("mxfp8"), PATTERNS[pattern]
    _, _, dw_first, dw_second = trained(experts, experts, sizes=sizes)
    for e, size in enumerate(sizes):
        for grad in (dw_first, dw_second):
            assert bool(grad[e].any()) == (size > 0)  # pyright: ignore[reportOptionalSubscript]


def test_initialisation_is_that_of_torchs_layers():
    layer = GroupedLinear(64, 64, 256, recipe="bf16")
    for values in (layer.weight, layer.bias):
        assert values is not None
        bound = 1 / 8
        assert values.min() >= -bound
        assert values.max() <= bound
        assert abs(float(values.detach().std()) - bound / 3**0.5) < 0.02 * bound


def test_stochastic_rounding_needs_a_name():
    with pytest.raises(OptionError, match="without a name"):
        GroupedExperts(**SIZED, recipe="nvfp4")
    experts = make("nvfp4")
    assert experts.gate_up.rng is experts.down.rng
    bs.advance_(experts)
    assert experts.gate_up.rng is not None
    assert experts.gate_up.rng.tolist() == [0, 1]


def test_sublayers_are_called_if_not_plain():
    experts, seen = make("mxfp8"), []
    experts.down.register_forward_hook(lambda *_: seen.append("down"))
    assert not experts.is_fused

    def parts(x: Tensor, offs: Tensor) -> Tensor:
        gate, up = experts.gate_up(x, offs).chunk(2, -1)
        return experts.down(silu(gate) * up, offs)

    got = trained(experts, experts)
    assert seen == ["down"]
    assert_same_bits(got, trained(parts, experts))
    routing, _ = bs.route(torch.rand(20, EXPERTS), 2)
    tokens = gaussian(20, DIM)
    rows = parts(bs.permute(tokens, routing), routing.offs)
    assert_same_bits(experts(tokens, routing), rows)
    weights = torch.rand(20, 2)
    assert_same_bits(experts(tokens, routing, weights), bs.combine(rows, routing, weights))
    with pytest.raises(OptionError, match="only a routing has the token of each row"):
        experts(bs.permute(tokens, routing), routing.offs, weights)


# ---- state -----------------------------------------------------------------------------------------------------------


def test_state_dicts_are_plain_tensors_in_both_directions():
    experts = make("nvfp4", bias=True)
    state = experts.state_dict()
    assert sorted(state) == ["down.bias", "down.weight", "gate_up.bias", "gate_up.weight"]
    assert {type(each) for each in state.values()} == {Tensor}
    gate, up = experts.gate_up.weight.chunk(2, dim=1)
    assert gate.shape == up.shape == (EXPERTS, HIDDEN, DIM)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = make("bf16", bias=True, seed=1)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same_bits(dict(other.state_dict()), dict(state))
    again = make("nvfp4", bias=True, seed=2)
    again.load_state_dict(other.state_dict(), strict=True)
    assert_same_bits(trained(again, again), trained(experts, experts))


def pickled(module: GroupedExperts) -> GroupedExperts:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", ["nvfp4", "fp8_blockwise"])
def test_copies_compute_the_same(name: str, copied: Callable[[GroupedExperts], GroupedExperts]):
    experts = make(bs.get_recipe(name).replace(weight_cast="step"))
    bs.refresh_weights_(experts)
    want, other = trained(experts, experts), copied(experts)
    assert other.gate_up.shared_weight is not None
    assert not other.gate_up.shared_weight.is_open
    with torch.no_grad():
        experts.gate_up.weight.zero_()
    assert_same_bits(trained(other, other), want)


def test_a_module_from_the_meta_device_has_its_seed():
    experts = GroupedExperts(**SIZED, device="meta", recipe="nvfp4", name="experts")
    experts.to_empty(device="cpu")
    assert experts.down.rng is not None
    assert experts.down.rng.tolist() == [0, 0]


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "nvfp4"])
def test_weights_are_cast_once_per_step(name: str):
    """Two microbatches, three steps: the numbers of casting in every forward, from one cast for each step."""
    recipe = bs.get_recipe(name)
    plain, shared = make(recipe), make(recipe.replace(weight_cast="step"))
    optimizers = [torch.optim.AdamW(experts.parameters(), lr=0.1) for experts in (plain, shared)]
    bs.attach(optimizers[1], shared)
    for step in range(3):
        casts = [layer.shared_weight.casts for layer in (shared.gate_up, shared.down) if layer.shared_weight]
        assert casts == [step + 1] * 2
        for experts, optimizer in zip((plain, shared), optimizers, strict=True):
            for micro in range(2):
                experts(gaussian(sum(SIZES), DIM, seed=10 * step + micro), offsets(SIZES)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(list(shared.parameters()), list(plain.parameters()))
    assert not torch.equal(plain.down.weight, make().down.weight)
    with Calls() as calls:
        shared(gaussian(sum(SIZES), DIM), offsets(SIZES))
    assert calls.found == {"quantize_both": 1, "swiglu_quantize": 1, "scaled_grouped_mm": 2}  # of the input alone


def test_sizes_are_passed_by_name():
    """Three ints in another order would make a layer of another size."""
    for call in (
        lambda: GroupedExperts(256, 128, 8),
        lambda: GroupedExperts(8, dim=256, hidden=128),
        lambda: MoE(256, 128, 8, 2),
        lambda: MoE(256, 128, experts=8, top_k=2),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()
    moe = MoE(hidden=128, dim=256, top_k=2, experts=8)
    assert moe.experts.gate_up.weight.shape == (8, 256, 256)
    assert moe.experts.down.weight.shape == (8, 256, 128)


def test_repr_of_a_layer_of_experts_has_its_sizes():
    for kind in (GroupedExperts, MoE):
        kinds = {p.name: p.kind for p in inspect.signature(kind).parameters.values()}
        assert {kinds[name] for name in ("experts", "dim", "hidden")} == {inspect.Parameter.KEYWORD_ONLY}
