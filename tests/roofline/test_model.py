"""Bytes and FLOPs counted by hand, and what must hold whatever the sizes are."""

from __future__ import annotations

import dataclasses

import pytest

from blockscale.autograd.recipe import RECIPES, get_recipe
from blockscale.errors import OptionError, UnknownNameError
from blockscale.roofline import (
    BF16,
    INFERENCE,
    MEASURED,
    NOMINAL,
    ROLES,
    TRAINING,
    Ceilings,
    LinearCost,
    Use,
    advise,
    engine_for,
    linear_cost,
    nominal,
    predicted_speedup,
    speedup,
    stored_bytes,
    swiglu_cost,
)

H200 = MEASURED["h200"]
FFN = (4096, 7168, 18432)
FP8 = get_recipe("fp8_blockwise").formats()
# a machine on which a byte and a FLOP are easy to divide by
SIMPLE = Ceilings("simple", "blackwell", bandwidth=1e12, bf16=1e15, fp8=2e15, fp4=4e15, source="made up")


def bytes_of(cost: LinearCost) -> dict[str, float]:
    return {step.name: step.bytes for step in cost.steps}


def test_bytes_of_fp8_blockwise_by_hand() -> None:
    """4096 tokens, 7168 -> 18432: 29,360,128 inputs, 132,120,576 weights, 75,497,472 outputs."""
    found = bytes_of(linear_cost(*FFN, FP8, H200))
    # an operand with 1x128 blocks: a byte, and 4 bytes of scale for 128 values
    x, dy = 29_360_128 + 917_504, 75_497_472 + 2_359_296
    # with 128x128 blocks: 4 bytes for 16,384 values
    w = 132_120_576 + 32_256
    assert found == {
        "cast x": 58_720_256 + 2 * x,  # bf16 in, two operands out
        "cast w": 264_241_152 + 2 * w,
        "fprop": x + w + 150_994_944,  # bf16 out
        "cast dy": 150_994_944 + 2 * dy,
        "dgrad": dy + w + 58_720_256,
        "wgrad": dy + x + 264_241_152,
    }


def test_flops_and_times_by_hand() -> None:
    cost = linear_cost(*FFN, FP8, SIMPLE)
    flops = {step.name: step.flops for step in cost.steps}
    assert flops["fprop"] == flops["dgrad"] == flops["wgrad"] == 1_082_331_758_592  # 2 * 4096 * 7168 * 18432
    assert flops["cast x"] == flops["cast w"] == flops["cast dy"] == 0
    seconds = {step.name: step.seconds for step in cost.steps}
    assert seconds["fprop"] == pytest.approx(541.165879296e-6, rel=1e-12)  # at 2e15
    assert seconds["cast x"] == pytest.approx(119.275520e-6, rel=1e-12)  # 119,275,520 bytes at 1e12
    assert cost.seconds == pytest.approx(sum(seconds.values()))
    assert {step.bound for step in cost.steps} == {"memory", "fp8"}
    assert cost.largest.bound == "fp8"


def test_bytes_of_bf16_by_hand() -> None:
    found = bytes_of(linear_cost(2, 4, 8, BF16, H200, Use(bias=True, accumulate=True)))
    assert found == {
        "fprop": 2 * (8 + 32 + 16) + 16,  # x, w, y, and the bias
        "bias grad": 2 * 16 + 16,
        "dgrad": 2 * (16 + 32 + 8),
        "wgrad": 2 * (16 + 8) + 8 * 32,  # an fp32 buffer is read and written
    }


def test_nvfp4_looks_for_the_largest_value_first() -> None:
    formats = get_recipe("nvfp4").formats()
    cast = bytes_of(linear_cost(128, 256, 512, formats, SIMPLE))["cast x"]
    known = bytes_of(linear_cost(128, 256, 512, formats, SIMPLE, Use(amax_known=True)))["cast x"]
    values = 128 * 256
    assert known == 2 * values + 2 * values * 9 / 16  # 4.5 bits each
    assert cast - known == 2 * values


def test_six_bits_are_stored_as_bytes() -> None:
    assert stored_bytes(3200, "mxfp6_e2m3") == stored_bytes(3200, "mxfp8_e4m3") == 3300
    assert stored_bytes(3200, "mxfp4") == 1700
    assert stored_bytes(10, None, 4) == 40


@pytest.mark.parametrize(
    ("cast", "microbatches", "expected"),
    [("forward", 1, 4), ("forward", 8, 4), ("twice", 1, 6), ("twice", 8, 6), ("step", 1, 4), ("step", 8, 0.5)],
)
def test_when_weights_are_cast(cast: str, microbatches: int, expected: float) -> None:
    """In bytes for each weight, without scales: two are read and one written for each operand, `twice` reads again."""
    use = Use(microbatches=microbatches, weight_cast=cast)  # pyright: ignore[reportArgumentType]
    steps = linear_cost(512, 1024, 2048, FP8, H200, use).steps
    moved = sum(step.bytes for step in steps if step.name.startswith("cast w"))
    assert moved / (1024 * 2048) == pytest.approx(expected, rel=2e-3)


def test_twice_differs_from_forward_by_one_read() -> None:
    once, twice = (linear_cost(*FFN, FP8, H200, Use(weight_cast=cast)).bytes for cast in ("forward", "twice"))
    assert twice - once == 2 * 7168 * 18432


@pytest.mark.parametrize("machine", NOMINAL)
@pytest.mark.parametrize("use", [TRAINING, INFERENCE, Use(microbatches=8, weight_cast="step", bias=True)], ids=str)
def test_bf16_is_exactly_as_fast_as_itself(machine: str, use: Use) -> None:
    formats = get_recipe("bf16").formats()
    assert predicted_speedup(*FFN, formats, nominal(machine), use) == 1.0
    low, high = (swiglu_cost(*FFN, each, nominal(machine), use) for each in (formats, BF16))
    assert speedup(low, high) == 1.0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("machine", NOMINAL)
def test_more_work_takes_longer(recipe: str, machine: str) -> None:
    """More tokens, features and training take longer; casting less often does not."""
    formats, roof = RECIPES[recipe].formats(), nominal(machine)
    base = linear_cost(1024, 2048, 4096, formats, roof).seconds
    for larger in ((2048, 2048, 4096), (1024, 4096, 4096), (1024, 2048, 8192)):
        assert linear_cost(*larger, formats, roof).seconds > base
    assert linear_cost(1024, 2048, 4096, formats, roof, INFERENCE).seconds < base
    shared = linear_cost(1024, 2048, 4096, formats, roof, Use(microbatches=8, weight_cast="step")).seconds
    assert shared < base if recipe != "bf16" else shared == base
    faster = dataclasses.replace(roof, bandwidth=2 * roof.bandwidth, bf16=2 * roof.bf16)
    assert linear_cost(1024, 2048, 4096, formats, faster).seconds < base


def test_inference_casts_the_input_alone() -> None:
    found = bytes_of(linear_cost(16, 256, 512, FP8, H200, INFERENCE))
    assert list(found) == ["cast x", "fprop"]
    assert found["cast x"] == 16 * 256 * 2 + stored_bytes(16 * 256, "fp8_1x128")


def test_a_product_that_stays_in_bf16_needs_no_operand() -> None:
    found = bytes_of(linear_cost(128, 256, 512, get_recipe("mxfp8_wgrad_bf16").formats(), SIMPLE))
    assert found["cast x"] == 128 * 256 * 2 + 128 * 256 * 33 / 32
    assert found["wgrad"] == 2 * (128 * 512 + 128 * 256 + 512 * 256)


# ---- units -----------------------------------------------------------------------------------------------------------


def test_without_units_operands_are_decoded_in_memory() -> None:
    found = bytes_of(linear_cost(128, 256, 512, get_recipe("mxfp8").formats(), H200, INFERENCE))
    codes, decoded = (128 + 512) * 256 * 33 / 32, 2 * (128 + 512) * 256
    assert found["decode for fprop"] == codes + decoded
    assert found["fprop"] == decoded + 2 * 128 * 512
    assert "decode for fprop" not in bytes_of(linear_cost(128, 256, 512, get_recipe("mxfp8").formats(), SIMPLE))


def test_square_mxfp8_weights_need_no_decoding_on_hopper() -> None:
    square = get_recipe("mxfp8").with_weights("mxfp8_e4m3_128x128").formats()
    names = [step.name for step in linear_cost(*FFN, square, H200).steps]
    assert names == ["cast x", "cast w", "fprop", "cast dy", "dgrad", "decode for wgrad", "wgrad"]


@pytest.mark.parametrize(
    ("architecture", "recipe", "units", "upcast"),
    [
        ("ampere", "fp8_blockwise", "bf16", True),
        ("ada", "fp8_blockwise", "fp8", False),
        ("ada", "mxfp8", "bf16", True),
        ("hopper", "fp8_blockwise", "fp8", False),
        ("hopper", "nvfp4", "bf16", True),
        ("blackwell", "mxfp8", "fp8", False),
        ("blackwell", "mxfp6", "fp8", False),
        ("blackwell", "mxfp4", "fp4", False),
        ("blackwell", "nvfp4", "fp4", False),
    ],
)
def test_who_multiplies(architecture: str, recipe: str, units: str, upcast: bool) -> None:
    formats = RECIPES[recipe].formats()
    engine = engine_for(architecture, formats["fprop_x"], formats["fprop_w"])  # pyright: ignore[reportArgumentType]
    assert (engine.units, engine.upcast) == (units, upcast)
    assert bool(engine.note) == upcast


@pytest.mark.parametrize("machine", NOMINAL)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_time_on_every_machine(machine: str, recipe: str) -> None:
    assert linear_cost(*FFN, RECIPES[recipe].formats(), nominal(machine)).seconds > 0


def test_no_recipe_wins_time_on_an_a100() -> None:
    for recipe in RECIPES.values():
        assert predicted_speedup(*FFN, recipe.formats(), nominal("a100")) <= 1.0


# ---- the gated unit --------------------------------------------------------------------------------------------------


def test_swiglu_bytes_by_hand() -> None:
    """128 tokens, 256 features, 512 hidden: [128, 1024] gates and ups, [128, 512] after the activation."""
    low = bytes_of(swiglu_cost(128, 256, 512, get_recipe("mxfp8").formats(), SIMPLE))
    half, byte = 128 * 512, 33 / 32
    assert low["swiglu"] == 2 * 2 * half + half * byte
    # gradient and gates and ups in; two operands of [M, 2H] and the activation's again out
    assert low["swiglu backward"] == 2 * 3 * half + 2 * 2 * half * byte + half * byte
    assert low["down cast dy"] == 128 * 256 * (2 + 2 * byte)
    assert "up cast dy" not in low
    assert "down cast x" not in low
    high = bytes_of(swiglu_cost(128, 256, 512, BF16, SIMPLE))
    assert high["swiglu"] == 2 * 3 * half
    assert high["swiglu backward"] == 2 * 5 * half


def test_swiglu_multiplies_what_its_layers_do() -> None:
    whole = swiglu_cost(128, 256, 512, FP8, SIMPLE)
    parts = linear_cost(128, 256, 1024, FP8, SIMPLE).flops + linear_cost(128, 512, 256, FP8, SIMPLE).flops
    assert whole.flops == parts == 3 * 2 * 128 * 256 * 512 * 3


def test_a_fused_activation_is_cheaper_than_a_cast_after_it() -> None:
    whole = swiglu_cost(*FFN, FP8, H200)
    up, down = linear_cost(4096, 7168, 36864, FP8, H200), linear_cost(4096, 18432, 7168, FP8, H200)
    plain = swiglu_cost(*FFN, BF16, H200).of("swiglu", "swiglu backward")
    assert whole.seconds < up.seconds + down.seconds + plain


# ---- advice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [(7168, 18432), (512, 32768), (2048, 576)])
@pytest.mark.parametrize("margin", [1.0, 1.2])
@pytest.mark.parametrize("use", [TRAINING, Use(microbatches=8, weight_cast="step")], ids=["1", "8"])
def test_advice_agrees_with_the_speedup(layer: tuple[int, int], margin: float, use: Use) -> None:
    found = advise(*layer, FP8, H200, use, margin=margin)
    assert found is not None
    assert predicted_speedup(found, *layer, FP8, H200, use) > margin
    if found > 1:
        assert predicted_speedup(found - 1, *layer, FP8, H200, use) <= margin


def test_advice_where_nothing_is_won() -> None:
    assert advise(7168, 18432, get_recipe("mxfp8").formats(), H200) is None
    assert advise(7168, 18432, FP8, H200, margin=3.0) is None


def test_advice_asks_for_fewer_tokens_where_casts_are_shared() -> None:
    alone, shared = (advise(7168, 18432, FP8, H200, use) for use in (TRAINING, Use(microbatches=8, weight_cast="step")))
    assert alone is not None
    assert shared is not None
    assert shared < alone


def test_serving_pays_from_the_first_token() -> None:
    assert advise(7168, 18432, FP8, H200, INFERENCE) == 1


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes_are_explained() -> None:
    with pytest.raises(OptionError, match="formats without wgrad_x"):
        linear_cost(*FFN, {role: None for role in ROLES if role != "wgrad_x"}, H200)
    with pytest.raises(UnknownNameError, match="unknown role 'fprop_y'"):
        linear_cost(*FFN, {**BF16, "fprop_y": None}, H200)
    with pytest.raises(OptionError, match="0 tokens"):
        linear_cost(0, 7168, 18432, BF16, H200)
    with pytest.raises(OptionError, match="microbatches=0"):
        Use(microbatches=0)
    with pytest.raises(UnknownNameError, match="unknown weight cast"):
        Use(weight_cast="never")  # pyright: ignore[reportArgumentType]


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_bytes_of_a_grouped_linear_by_hand() -> None:
    """256 rows on 4 experts, 1024 -> 2048: 262,144 inputs, 8,388,608 weights, 524,288 outputs."""
    found = bytes_of(linear_cost(256, 1024, 2048, FP8, H200, experts=4))
    x, dy = 262_144 + 8_192, 524_288 + 16_384  # four bytes for 128 values
    w = 8_388_608 + 2_048  # and for 16,384
    assert found == {
        "cast x": 2 * 262_144 + 2 * x,
        "cast w": 2 * 8_388_608 + 2 * w,
        "fprop": x + w + 2 * 524_288,
        "cast dy": 2 * 524_288 + 2 * dy,
        "dgrad": dy + w + 2 * 262_144,
        "wgrad": dy + x + 2 * 8_388_608,
    }
    flops = [step.flops for step in linear_cost(256, 1024, 2048, FP8, H200, experts=4).steps if step.flops]
    assert flops == [2 * 256 * 1024 * 2048] * 3, "a row meets one expert only"


def test_experts_without_rows_are_cast_but_not_multiplied() -> None:
    few = bytes_of(linear_cost(2, 128, 256, BF16, H200, Use(bias=True), experts=8))
    weight = 2 * 128 * 256
    assert few["fprop"] == 2 * weight + 2 * (2 * 128 + 2 * 256) + 2 * 2 * 256
    assert few["dgrad"] == 2 * weight + 2 * (2 * 128 + 2 * 256)
    assert few["wgrad"] == 8 * weight + 2 * (2 * 128 + 2 * 256)
    assert few["bias grad"] == 2 * 2 * 256 + 8 * 2 * 256
    low = bytes_of(linear_cost(2, 128, 256, FP8, H200, experts=8))
    assert low["cast w"] == 8 * bytes_of(linear_cost(2, 128, 256, FP8, H200))["cast w"]


@pytest.mark.parametrize(
    "use", [TRAINING, INFERENCE, Use(microbatches=8, weight_cast="step", accumulate=True)], ids=str
)
@pytest.mark.parametrize("name", ["bf16", "fp8_blockwise", "mxfp8", "nvfp4"])
def test_experts_cost_as_much_as_each_by_itself(name: str, use: Use) -> None:
    """So what pays for one pays for all: `advise` counts the tokens of one expert."""
    formats = get_recipe(name).formats()
    for cost in (linear_cost, swiglu_cost):
        one, all_of_them = (
            cost(300, 1024, 512, formats, H200, use),
            cost(4800, 1024, 512, formats, H200, use, experts=16),
        )
        assert all_of_them.seconds == pytest.approx(16 * one.seconds, rel=1e-12)
        assert all_of_them.flops == 16 * one.flops


def test_a_layer_without_experts_is_refused() -> None:
    with pytest.raises(OptionError, match="0 experts"):
        linear_cost(256, 128, 128, FP8, H200, experts=0)
