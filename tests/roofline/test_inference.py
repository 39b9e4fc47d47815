"""Roofline of inference: sizes of models, bytes and FLOPs of a step by hand, and what bounds it."""

from __future__ import annotations

import random

import pytest

from blockscale.errors import BlockscaleError
from blockscale.roofline import MEASURED, nominal
from blockscale.roofline.inference import (
    SERVED_MODELS,
    ServedExperts,
    ServedModel,
    Serving,
    decode_cost,
    prefill_cost,
    touched_experts,
    turning_batch,
)

H200 = MEASURED["h200"]
LLAMA = SERVED_MODELS["Llama3 8B"]
# billions, as the models' cards print them
PUBLISHED = {
    "Llama3 8B": 8.03, "Llama3 70B": 70.6, "Qwen3 8B": 8.2, "Qwen3 32B": 32.8, "Qwen3 30B-A3B": 30.5,
    "gpt-oss 20B": 20.9, "gpt-oss 120B": 116.8, "DeepSeek-V3 671B": 671,
}  # fmt: skip


def test_parameters_are_the_published_ones():
    assert PUBLISHED.keys() == SERVED_MODELS.keys()
    for name, billions in PUBLISHED.items():
        digits = len(str(billions).partition(".")[2])
        assert round(SERVED_MODELS[name].parameters / 1e9, digits) == billions, name


def test_a_decoding_step_by_hand():
    """A layer of 16 features, 4 heads of 4, 2 of them of keys, 32 hidden units; 3 requests of 10 tokens."""
    model = ServedModel(16, 1, 4, 2, 4, 32, 100)
    projections, mlp, head = 16 * 16 + 2 * 16 * 8 + 16 * 16, 3 * 16 * 32, 16 * 100
    dense, cache, last = decode_cost(model, Serving("mxfp4", batch=3, context=10), H200).steps
    assert dense.bytes == (projections + mlp) * 4.25 / 8
    assert dense.flops == 2 * 3 * (projections + mlp)
    assert cache.bytes == 3 * (10 + 1) * 2 * 8 * 2  # keys and values of 2 heads of 4, in bf16; new ones are written
    assert cache.flops == 3 * 10 * 2 * 2 * 16
    assert (last.bytes, last.flops) == (head * 2, 2 * 3 * head)
    assert dense.seconds == pytest.approx(max(dense.bytes / 4.2e12, dense.flops / 681.6e12))


def test_fp8_activations_use_fp8_units():
    serving = Serving("fp8_128x128", "fp8_1x128", batch=1024, context=0)
    dense = decode_cost(LLAMA, serving, H200).steps[0]
    assert dense.bound == "fp8"
    assert dense.seconds == pytest.approx(dense.flops / 1397.4e12)
    # no MXFP8 units on Hopper
    assert decode_cost(LLAMA, Serving("mxfp8_e4m3", "mxfp8_e4m3", batch=1024), H200).steps[0].bound == "bf16"
    assert decode_cost(LLAMA, Serving("mxfp4", "mxfp4", batch=4096), nominal("b200")).steps[0].bound == "fp4"


@pytest.mark.parametrize("weights", [None, "mxfp4", "nvfp4", "mxfp8_e4m3"])
def test_the_bound_turns_at_the_turning_batch(weights: str | None):
    turn = turning_batch(Serving(weights), H200)
    for batch, bound in ((int(turn), "memory"), (int(turn) + 1, "bf16")):
        assert decode_cost(LLAMA, Serving(weights, batch=batch), H200).steps[0].bound == bound


def test_touched_experts_are_those_of_random_tokens():
    rng, experts = random.Random(0), ServedExperts(32, 4, 64)
    for tokens in (1, 4, 16, 64):
        draws = [{e for _ in range(tokens) for e in rng.sample(range(32), 4)} for _ in range(2000)]
        assert touched_experts(experts, tokens) == pytest.approx(sum(map(len, draws)) / len(draws), rel=0.02)


def test_experts_alone_are_quantized_in_gpt_oss():
    model = SERVED_MODELS["gpt-oss 20B"]
    plain, low = (decode_cost(model, Serving(each, context=4096), H200).steps for each in (None, "mxfp4"))
    assert plain[0] == low[0]
    assert low[1].bytes == pytest.approx(plain[1].bytes * 4.25 / 16)
    # every second layer attends to 128 tokens
    assert low[2].bytes == pytest.approx((24 * (4096 + 128) / 2 + 24) * 2 * 8 * 64 * 2)


def test_latent_attention_reads_its_latent():
    model = SERVED_MODELS["DeepSeek-V3 671B"]
    cache = decode_cost(model, Serving(context=1000), H200).steps[2]
    assert cache.name == "cache"
    assert cache.bytes == 61 * 1001 * 576 * 2
    assert cache.flops == 61 * 1000 * 2 * 128 * (512 + 64 + 512)


def test_a_prefill_expands_the_latents_that_are_cached():
    model = SERVED_MODELS["DeepSeek-V3 671B"]
    cost = prefill_cost(model, Serving(batch=2, context=100), 10, H200)
    cache = next(step for step in cost.steps if step.name == "cache")
    pairs = 2 * 10 * (100 + 11 / 2) * 61 * 2 * 128 * (128 + 64 + 128)
    assert cache.flops == pairs + 2 * 2 * 100 * 61 * 512 * 128 * (128 + 128)


def test_a_prefill_multiplies_all_tokens_and_reads_weights_once():
    cost = prefill_cost(LLAMA, Serving(batch=2, context=0), 512, H200)
    dense, cache, head = cost.steps
    assert dense.flops == 2 * LLAMA.dense * 1024
    assert dense.bytes == 2 * LLAMA.dense
    assert cache.flops == 1024 * 256.5 * 32 * 4 * 32 * 128
    assert head.flops == 2 * 2 * 4096 * 128256
    whole, rest = (
        prefill_cost(LLAMA, Serving(context=0), 1024, H200),
        prefill_cost(LLAMA, Serving(context=512), 512, H200),
    )
    first = prefill_cost(LLAMA, Serving(context=0), 512, H200)
    assert first.steps[1].flops + rest.steps[1].flops == whole.steps[1].flops


@pytest.mark.parametrize(("context", "prompt"), [(0, 1), (0, 512), (0, 4096), (100, 64), (1024, 64)])
def test_attended_tokens_are_counted_one_by_one(context: int, prompt: int):
    """gpt-oss: every second layer attends to 128 tokens."""
    seen = [context + token + 1 for token in range(prompt)]
    want = sum(each + min(each, 128) for each in seen) / 2 / prompt
    assert SERVED_MODELS["gpt-oss 20B"].causal(context, prompt) == pytest.approx(want)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"batch": 0}, "batch=0"),
        ({"context": -1}, "context=-1"),
        ({"weights": "int4"}, "int4"),
        ({"activations": "fp8_1x128"}, "without weights"),
        ({"weights": "mxfp4", "activations": "fp8_1x128"}, "mxfp4"),
    ],
)
def test_refusals(fields: dict[str, object], part: str):
    with pytest.raises(BlockscaleError, match=part):
        Serving(**fields)  # pyright: ignore[reportArgumentType]
