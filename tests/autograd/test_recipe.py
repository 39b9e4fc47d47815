"""Recipes as data: fields, changes, and errors for every invalid one."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import blockscale as bs
from blockscale import rng_state
from blockscale.autograd import RECIPES, Operand, Product, Recipe, get_recipe, linear
from blockscale.errors import OptionError, PairError, UnknownNameError
from blockscale.formats.stochastic import ROLES, Stochastic

FP8, MX, MX4, NV = Operand("fp8_1x128"), Operand("mxfp8_e4m3"), Operand("mxfp4"), Operand("nvfp4")
SQUARE, TILES = Operand("fp8_128x128"), Operand("nvfp4_16x16")

# fprop x, w; dgrad dy, w; wgrad dy, x, as docs/recipes.md has them
TABLE = {
    "bf16": [None] * 6,
    "fp8_blockwise": ["fp8_1x128", "fp8_128x128", "fp8_1x128", "fp8_128x128", "fp8_1x128", "fp8_1x128"],
    "fp8_blockwise_pow2": ["fp8_1x128", "fp8_128x128", "fp8_1x128", "fp8_128x128", "fp8_1x128", "fp8_1x128"],
    "mxfp8": ["mxfp8_e4m3"] * 6,
    "mxfp8_128x128": ["mxfp8_e4m3", "mxfp8_e4m3_128x128"] * 2 + ["mxfp8_e4m3"] * 2,
    "mxfp8_wgrad_bf16": ["mxfp8_e4m3"] * 4 + [None] * 2,
    "mxfp6": ["mxfp6_e2m3"] * 6,
    "mxfp4": ["mxfp4"] * 6,
    "nvfp4": ["nvfp4", "nvfp4_16x16", "nvfp4", "nvfp4_16x16", "nvfp4", "nvfp4"],
}


def test_formats_by_role():
    assert {name: list(recipe.formats().values()) for name, recipe in RECIPES.items()} == TABLE
    assert all(tuple(recipe.formats()) == ROLES for recipe in RECIPES.values())


def test_four_bit_recipes_round_gradients_stochastically_and_rotate_wgrad():
    for name, recipe in RECIPES.items():
        operands = {role: recipe.operand(role) for role in ROLES}
        drawing = {role for role, operand in operands.items() if operand is not None and operand.stochastic}
        rotated = {role for role, operand in operands.items() if operand is not None and operand.hadamard}
        four = name in ("mxfp4", "nvfp4")
        assert drawing == ({"dgrad_dy", "wgrad_dy"} if four else set())
        assert rotated == ({"wgrad_dy", "wgrad_x"} if four else set())
        assert recipe.stochastic == four
        assert recipe.is_quantized == (name != "bf16")


def test_scale_rules_of_four_bit_recipes():
    """Stochastic rounding needs a scale that clips nothing: MXFP4's default then; NVFP4's is named."""
    state = bs.Stochastic(bs.rng_state(0), "layer")
    rules = {
        name: [get_recipe(name).operand(role).spec(role, state).plan().rule for role in ROLES]  # pyright: ignore[reportOptionalMemberAccess]
        for name in ("mxfp4", "nvfp4")
    }
    assert rules["mxfp4"] == ["even", "even", "rceil", "even", "rceil", "even"]
    assert [rule == "up" for rule in rules["nvfp4"]] == [False, False, True, False, True, False]


def test_recipes_read_well():
    assert str(get_recipe("bf16")) == ("bf16: fprop unquantized; dgrad unquantized; wgrad unquantized")
    assert str(get_recipe("mxfp4").wgrad) == "mxfp4 rceil hadamard stochastic @ mxfp4 even hadamard"


# ---- equality, copies ----------------------------------------------------------------------------------------------


def rebuilt(recipe: Recipe) -> Recipe:
    return Recipe(recipe.name, recipe.fprop, recipe.dgrad, recipe.wgrad, dict(recipe.until))


@pytest.mark.parametrize("copied", [rebuilt, copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
@pytest.mark.parametrize("name", RECIPES)
def test_equal_recipes_have_equal_hashes(name: str, copied: Callable[[Recipe], Recipe]):
    recipe = get_recipe(name).replace(until={"fprop": 3, "wgrad": 5}, name=name)
    other = copied(recipe)
    assert other == recipe
    assert hash(other) == hash(recipe)
    assert {recipe: 1}[other] == 1
    assert (other.is_quantized, other.stochastic) == (recipe.is_quantized, recipe.stochastic)


def test_different_recipes_differ():
    recipe = get_recipe("mxfp8")
    others = [
        get_recipe("fp8_blockwise"),
        recipe.replace(name="mine"),
        recipe.replace(name="mxfp8", wgrad=None),
        recipe.replace(name="mxfp8", until={"fprop": 1}),
        recipe.replace(name="mxfp8", until={"fprop": 2}),
        recipe.replace(name="mxfp8", saves="source"),
        recipe.replace(name="mxfp8", weight_cast="step"),
    ]
    assert len({recipe, *others}) == 8
    assert recipe.replace(name="mxfp8") == recipe


def test_the_order_of_steps_does_not_matter():
    recipe = get_recipe("mxfp8")
    one, other = recipe.replace(until={"fprop": 1, "wgrad": 2}), recipe.replace(until={"wgrad": 2, "fprop": 1})
    assert one == other
    assert hash(one) == hash(other)


def test_a_pickled_recipe_finds_its_equals_in_another_process():
    """Hashes of strings are salted in every process. And what compiles nothing does not wait for torch's compiler."""
    code = "import pickle, sys, blockscale as bs; found = pickle.loads(sys.stdin.buffer.read())"
    code += "; print({found: 1}[bs.get_recipe('nvfp4')], 'torch._dynamo' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=pickle.dumps(get_recipe("nvfp4")),
        capture_output=True,
        check=True,
    )
    assert result.stdout.split() == [b"1", b"False"]


def test_recipes_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_recipe("mxfp8").fprop = None  # pyright: ignore[reportAttributeAccessIssue]


# ---- changes -------------------------------------------------------------------------------------------------------


def test_get_recipe():
    assert get_recipe("nvfp4") is RECIPES["nvfp4"]
    mine = get_recipe("nvfp4").replace(saves="source")
    assert get_recipe(mine) is mine


@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("unquantized", [["fprop"], ["dgrad"], ["wgrad"], ["fprop", "wgrad"]], ids="-".join)
def test_products_after_a_name_are_unquantized(name: str, unquantized: list[str]):
    full = f"{name}_{'_'.join(unquantized)}_bf16"
    found = get_recipe(full)
    assert found == get_recipe(name).replace(name=full, **dict.fromkeys(unquantized))
    assert found.is_quantized
    # an unquantized product is that of bf16, to the bit
    torch.manual_seed(0)
    x, weight = torch.randn(40, 64), torch.randn(48, 64)
    made = {}
    for recipe in ("bf16", full):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = linear(a, b, recipe=recipe, rounding=Stochastic(rng_state(0), "layer"))
        y.backward(torch.ones_like(y))
        made[recipe] = {"fprop": y, "dgrad": a.grad, "wgrad": b.grad}
    same = {each for each in made[full] if torch.equal(made[full][each], made["bf16"][each])}
    assert same == {*unquantized}


@pytest.mark.parametrize(
    "name", ["fp8_blockwise_fprop_dgrad_wgrad_bf16", "fp9_wgrad_bf16", "mxfp8_xgrad_bf16", "_bf16"]
)
def test_names_with_other_suffixes_are_unknown(name: str):
    with pytest.raises(UnknownNameError, match="unknown recipe"):
        get_recipe(name)


def test_replace_names_what_it_makes():
    recipe = get_recipe("mxfp8")
    assert recipe.replace(saves="source").name == "mxfp8*"
    assert recipe.replace(saves="source", name="mine").name == "mine"
    changed = recipe.replace(fprop=None, dgrad=None, wgrad=None)
    assert not changed.is_quantized
    assert get_recipe("nvfp4").replace(dgrad=None).stochastic
    assert not get_recipe("nvfp4").replace(dgrad=None, wgrad=None).stochastic


def test_products_end_at_their_step():
    recipe = get_recipe("nvfp4").replace(until={"fprop": 10, "dgrad": 0, "wgrad": 20})
    low = {
        step: [getattr(recipe.at(step), name) is not None for name in ("fprop", "dgrad", "wgrad")] for step in range(30)
    }
    assert low == {step: [step < 10, False, step < 20] for step in range(30)}
    assert recipe.at(25) == recipe.at(29)
    assert recipe.at(12).at(25) == recipe.at(25)
    assert recipe.at(12).stochastic
    assert not recipe.at(25).stochastic
    assert recipe.at(5).at(5) is not None
    plain = get_recipe("mxfp8")
    assert plain.at(10**9) is plain


@pytest.mark.parametrize(
    ("name", "format"), [("mxfp8", "mxfp8_e4m3_128x128"), ("nvfp4", "nvfp4"), ("fp8_blockwise", "fp8_1x128")]
)
def test_weights_in_another_format(name: str, format: str):
    recipe = get_recipe(name)
    changed = recipe.with_weights(format)
    assert changed.name == f"{name}, weights {format}"
    want = recipe.formats() | {"fprop_w": format, "dgrad_w": format}
    assert changed.formats() == want
    assert changed.wgrad == recipe.wgrad
    assert changed.dgrad is not None
    assert recipe.dgrad is not None
    assert changed.dgrad.a == recipe.dgrad.a


def test_pow2_is_fp8_blockwise_with_powers_of_two_as_scales():
    """In every operand, and in nothing else."""
    recipe = get_recipe("fp8_blockwise_pow2")
    assert recipe.formats() == get_recipe("fp8_blockwise").formats()
    assert {operand.scale_rule for role in ROLES if (operand := recipe.operand(role))} == {"pow2"}
    assert get_recipe("fp8_blockwise_pow2_wgrad_bf16") == recipe.replace(
        name="fp8_blockwise_pow2_wgrad_bf16", wgrad=None
    )
    layer = bs.nn.Linear(256, 128, recipe=recipe)
    for spec in (Operand("fp8_1x128", "pow2"), Operand("fp8_128x128", "pow2")):
        scale = bs.quantize(layer.weight.detach(), spec.spec("fprop_w", None)).plain_scale()
        assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


def test_mxfp8_of_hopper_is_a_recipe_by_name():
    """The bits of MXFP8 with weights in 128x128 blocks, also with unquantized products."""
    made = get_recipe("mxfp8").with_weights("mxfp8_e4m3_128x128")
    assert get_recipe("mxfp8_128x128") == made.replace(name="mxfp8_128x128")
    named = {"mxfp8_128x128": made, "mxfp8_128x128_wgrad_bf16": made.replace(wgrad=None)}
    for name, written in named.items():
        results = []
        for recipe in (name, written):
            x, weight = (torch.randn(160, 192, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
            x, weight = x.requires_grad_(), weight.requires_grad_()
            y = linear(x, weight, recipe=recipe)
            y.square().sum().backward()
            results.append((y.detach(), x.grad, weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert get_recipe("mxfp8_128x128_wgrad_bf16").name == "mxfp8_128x128_wgrad_bf16"


def test_with_weights_leaves_unquantized_products():
    changed = get_recipe("mxfp8").replace(dgrad=None).with_weights("mxfp8_e5m2")
    assert changed.dgrad is None
    assert changed.operand("fprop_w") == Operand("mxfp8_e5m2")


# ---- mistakes ------------------------------------------------------------------------------------------------------

STOCHASTIC = Operand("mxfp4", stochastic=True)
ROTATED = Operand("mxfp4", hadamard=True)
base = get_recipe("mxfp8")
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "pair": (lambda: Recipe("r", fprop=Product(FP8, MX)), PairError, "no product of fp8_1x128 with mxfp8_e4m3"),
    "two grids": (lambda: Recipe("r", fprop=Product(SQUARE, SQUARE)), PairError, "fp8_128x128 with fp8_128x128"),
    "stochastic x": (
        lambda: Recipe("r", fprop=Product(STOCHASTIC, MX4)),
        OptionError,
        "stochastic rounding of fprop's x.*diverge",
    ),
    "stochastic w": (
        lambda: Recipe("r", dgrad=Product(MX4, STOCHASTIC)),
        OptionError,
        "stochastic rounding of dgrad's w",
    ),
    "stochastic wgrad x": (
        lambda: Recipe("r", wgrad=Product(STOCHASTIC, STOCHASTIC)),
        OptionError,
        "rounding of wgrad's x",
    ),
    "one rotation": (
        lambda: Recipe("r", wgrad=Product(ROTATED, MX4)),
        OptionError,
        "wgrad with hadamard=True and False.*both operands have the same one",
    ),
    "two rotations": (
        lambda: Recipe("r", wgrad=Product(ROTATED, Operand("mxfp4", hadamard=0x5))),
        OptionError,
        "hadamard=True and 5",
    ),
    "rotated fp8": (
        lambda: Recipe("r", fprop=Product(Operand("mxfp8_e4m3", hadamard=True), Operand("mxfp8_e4m3", hadamard=True))),
        OptionError,
        "Hadamard transform asked for mxfp8_e4m3",
    ),
    "tiles of x": (lambda: Recipe("r", fprop=Product(TILES, NV)), OptionError, "nvfp4_16x16 for fprop's x.*1-D blocks"),
    "tiles of dy": (lambda: Recipe("r", dgrad=Product(SQUARE, FP8)), OptionError, "fp8_128x128 for dgrad's dy"),
    "tiles in wgrad": (lambda: Recipe("r", wgrad=Product(FP8, SQUARE)), OptionError, "fp8_128x128 for wgrad's x"),
    "tiles by with_weights": (lambda: base.with_weights("nvfp4"), PairError, "no product of mxfp8_e4m3 with nvfp4"),
    "rule": (
        lambda: Recipe("r", fprop=Product(Operand("fp8_1x128", "rceil"), FP8)),
        OptionError,
        "scale rule 'rceil' does not exist for fp8_1x128",
    ),
    "unknown rule": (
        lambda: Recipe("r", fprop=Product(Operand("mxfp4", "rciel"), MX4)),
        UnknownNameError,
        "unknown scale rule 'rciel'",
    ),
    "format": (lambda: Recipe("r", fprop=Product(MX, Operand("mxfp9"))), (PairError, UnknownNameError), "mxfp9"),
    "weights": (lambda: base.with_weights("mxfp9"), UnknownNameError, "unknown format 'mxfp9'"),
    "until product": (lambda: base.replace(until={"fprp": 3}), UnknownNameError, "unknown product 'fprp'.*mean fprop"),
    "until negative": (
        lambda: base.replace(until={"fprop": -1}),
        OptionError,
        r"until=\{'fprop': -1\}.*an int of 0 or more",
    ),
    "until part": (lambda: base.replace(until={"fprop": 1.5}), OptionError, r"until=\{'fprop': 1.5\}"),
    "no product": (lambda: Recipe("r", fprop="mxfp8_e4m3"), OptionError, "fprop='mxfp8_e4m3'.*two operands"),  # pyright: ignore[reportArgumentType]
    "until text": (lambda: base.replace(until={"fprop": "3"}), OptionError, r"until=\{'fprop': '3'\}"),
    "until nothing": (lambda: base.replace(until=None), OptionError, "until=None"),
    "saves": (lambda: base.replace(saves="input"), UnknownNameError, "unknown saved input 'input'.*operand, source"),
    "weight cast": (lambda: base.replace(weight_cast="once"), UnknownNameError, "forward, twice, step"),
    "field": (
        lambda: base.replace(weightcast="step"),
        UnknownNameError,
        "is one of name, fprop, dgrad, wgrad, until, saves, weight_cast, since. Fix: did you mean weight_cast",
    ),
    "found field": (
        lambda: base.replace(is_quantized=True),
        UnknownNameError,
        "unknown field of a recipe 'is_quantized'",
    ),
    "seed": (
        lambda: bs.quantize_(torch.nn.Linear(64, 64), "nvfp4", lambda module, name: True, seed=1.5),  # pyright: ignore[reportArgumentType]
        OptionError,
        "seed=1.5. Rule: it is a whole number",
    ),
    "role": (lambda: base.operand("fprop_dy"), UnknownNameError, "unknown role 'fprop_dy'"),
    "recipe": (lambda: get_recipe("mxfp"), UnknownNameError, "unknown recipe 'mxfp'.*did you mean mxfp"),
    "no recipe": (lambda: get_recipe(None), UnknownNameError, "unknown recipe None"),  # pyright: ignore[reportArgumentType]
    "a list": (lambda: get_recipe(["mxfp8"]), UnknownNameError, "unknown recipe"),  # pyright: ignore[reportArgumentType]
}


def test_a_recipe_does_not_change_with_the_mapping_passed_as_until():
    until = {"fprop": 5}
    recipe = base.replace(until=until)
    until["fprop"] = 0
    assert recipe.at(1).fprop is not None


@pytest.mark.parametrize("which", MISTAKES)
def test_mistakes_raise(which: str):
    call, error, text = MISTAKES[which]
    with pytest.raises(error, match=text):
        call()
