"""`generate` and its draws: the distribution, and noise that depends on seed, request and position only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from blockscale.errors import BlockscaleError
from blockscale.formats.stochastic import rng_state
from blockscale.inference import Decoder, generate
from blockscale.inference.sampling import gumbel, sample
from blockscale.models import ModelConfig, Transformer
from support.small_runs import DENSE

PROMPTS = torch.arange(12).view(3, 4) * 31 % 251


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.build(DENSE, 64).eval()


def drawn(logits: Tensor, first: int, seed: int = 0, position: int = 0, **options: float) -> Tensor:
    """A symbol for each row, as requests from `first` on."""
    requests = torch.arange(first, first + len(logits))
    return sample(logits, torch.full_like(requests, position), requests, rng_state(seed), **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (1.0, 3)])
def test_frequencies_are_those_of_softmax(temperature: float, top_k: int | None):
    """Chi-square of 20,000 draws, four degrees of freedom or fewer: above 25 with a probability of 5e-5."""
    logits = torch.tensor([0.5, 1.5, -1.0, 1.0, 0.0])
    scores = logits / temperature
    if top_k is not None:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
    want = scores.double().softmax(-1) * 20_000
    found = drawn(logits.expand(20_000, -1), 0, temperature=temperature, top_k=top_k).bincount(minlength=5)
    assert not found[want == 0].any()
    counted = want > 0
    chi = ((found - want)[counted].square() / want[counted]).sum()
    assert chi < 25


def test_noise_is_that_of_gumbel_and_finite():
    noise = gumbel(rng_state(3), torch.arange(200), torch.arange(200), 500)
    assert noise.dtype == torch.float64
    assert bool(noise.isfinite().all())
    assert abs(noise.mean().item() - 0.5772) < 0.02
    assert abs(noise.var().item() - 1.6449) < 0.05


def test_noise_is_a_function_of_seed_request_and_position():
    state, requests, positions = rng_state(5), torch.tensor([4, 9]), torch.tensor([2, 7])
    want = gumbel(state, requests, positions, 64)
    assert torch.equal(gumbel(state, requests.flip(0), positions.flip(0), 64), want.flip(0))
    assert torch.equal(gumbel(state, requests[1:], positions[1:], 64), want[1:])
    others = [
        gumbel(rng_state(6), requests, positions, 64),
        gumbel(state, requests + 1, positions, 64),
        gumbel(state, requests, positions + 1, 64),
    ]
    for other in others:
        assert float((other == want).double().mean()) < 0.01


def test_a_draw_has_fixed_shapes_and_copies_nothing_from_the_host():
    """Traced with logits that have no values; a constant in the trace would be a copy to the GPU, within a capture."""
    inputs = torch.randn(3, 50, dtype=torch.bfloat16), torch.arange(3), torch.arange(3), rng_state(1)
    graph = make_fx(functools.partial(sample, top_k=5), tracing_mode="fake")(*inputs)
    assert torch.equal(graph(*inputs), sample(*inputs, top_k=5))
    assert not any(word in graph.code for word in ("_tensor_constant", "lift_fresh", "_local_scalar_dense", "nonzero"))


def test_greedy_text_is_the_most_likely_symbol_each_time(model: Transformer):
    found = generate(model, PROMPTS, 6)
    assert torch.equal(found[:, :4], PROMPTS)
    decoder = Decoder(model, 3, 16)
    logits = decoder.prefill(PROMPTS)
    for place in range(4, 10):
        assert torch.equal(found[:, place], logits.argmax(-1))
        logits = decoder.step(found[:, place])


def test_a_request_keeps_its_text_in_any_batch(model: Transformer):
    """Logits of this model have equal bits at these shapes (`test_decoder`'s gate for others), so texts are equal."""
    together = generate(model, PROMPTS, 12, temperature=1.0, seed=7)
    for row in range(3):
        assert torch.equal(
            generate(model, PROMPTS[row : row + 1], 12, temperature=1.0, seed=7, requests=[row])[0], together[row]
        )
    turned = generate(model, PROMPTS.flip(0), 12, temperature=1.0, seed=7, requests=[2, 1, 0])
    assert torch.equal(turned.flip(0), together)
    assert not torch.equal(generate(model, PROMPTS, 12, temperature=1.0, seed=8), together)
    same = generate(model, PROMPTS[:1].expand(3, -1), 12, temperature=1.0, seed=7)
    assert len({tuple(row) for row in same.tolist()}) == 3


def test_a_text_goes_on_as_if_it_had_not_stopped(model: Transformer):
    whole = generate(model, PROMPTS, 12, temperature=1.0, seed=7)
    assert torch.equal(generate(model, whole[:, :9], 7, temperature=1.0, seed=7), whole)


def test_prompts_of_different_lengths_go_on_at_once(model: Transformer):
    lengths = [2, 4, 1]
    found = generate(model, PROMPTS, 5, temperature=1.0, seed=1, lengths=lengths)
    assert found.shape == (3, 9)
    for row, length in enumerate(lengths):
        alone = generate(model, PROMPTS[row : row + 1, :length], 5, temperature=1.0, seed=1, requests=[row])
        assert torch.equal(found[row, : length + 5], alone[0])
        assert not found[row, length + 5 :].any()
    short = generate(model, PROMPTS + 1, 1, lengths=lengths)
    assert [bool(row[length + 1 :].any()) for row, length in zip(short, lengths, strict=True)] == [False] * 3


def test_an_end_symbol_fills_the_rest(model: Transformer):
    plain = generate(model, PROMPTS, 40, temperature=1.0, seed=2)
    end = int(plain[0, 6])
    found = generate(model, PROMPTS, 40, temperature=1.0, seed=2, end=end)
    for row, want in zip(found[:, 4:].tolist(), plain[:, 4:].tolist(), strict=True):
        stop = want.index(end) if end in want else 40
        assert row == want[:stop] + [end] * (40 - stop)


def test_generation_stops_when_all_texts_have_ended(model: Transformer, monkeypatch: pytest.MonkeyPatch):
    steps = list[int]()
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: steps.append(1) or step(self, tokens))
    end = int(generate(model, PROMPTS[:1], 1)[0, 4])
    steps.clear()
    found = generate(model, PROMPTS[:1, :4], 40, end=end)
    assert len(steps) == 15
    assert found[0, 4:].tolist() == [end] * 40
    padded = torch.cat((PROMPTS[:1], PROMPTS[:1] + 1), dim=1)
    assert generate(model, padded, 40, end=end, lengths=[4])[0, 4:].tolist() == [end] * 40 + [0] * 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: generate(model, torch.tensor([1, 2]), 3), "tokens is torch.int64 (2,). Rule: prompts are"),
        (lambda model: generate(model, torch.ones(1, 2), 3), "tokens is torch.float32 (1, 2). Rule: symbols are"),
        (lambda model: generate(model, PROMPTS, -1), "new_tokens=-1. Rule:"),
        (lambda model: generate(model, PROMPTS, 1, temperature=-1.0), "temperature=-1.0. Rule: temperature is 0"),
        (lambda model: generate(model, PROMPTS, 1, temperature=float("nan")), "temperature=nan. Rule:"),
        (lambda model: generate(model, PROMPTS, 1, top_k=0), "top_k=0. Rule:"),
        (lambda model: generate(model, PROMPTS, 1, end=-1), "end=-1. Rule:"),
        (lambda model: generate(model, PROMPTS, 1, seed="a"), "seed='a'. Rule:"),
        (lambda model: generate(model, PROMPTS, 1, requests=[0]), "requests=[0]. Rule: every row has a number"),
        (lambda model: generate(model, PROMPTS, 62), "length=65. Rule: the model has 64 positions."),
    ],
)
def test_bad_values_are_refused(call: Callable[[Transformer], object], said: str, model: Transformer):
    with pytest.raises(BlockscaleError) as error:
        call(model)
    assert str(error.value).startswith(said)


@pytest.mark.gpu
def test_captured_text_is_the_eager_one(model: Transformer):
    cuda = Transformer.build(DENSE, 64, device="cuda")
    found = generate(cuda, PROMPTS, 20, temperature=1.0, seed=3)
    decoder = Decoder(cuda, 3, 24, graphs=False)
    state, requests = rng_state(3, device="cuda"), torch.arange(3, device="cuda")
    logits = decoder.prefill(PROMPTS.cuda())
    for place in range(4, 24):
        positions = torch.full_like(requests, place)
        assert torch.equal(found[:, place], sample(logits, positions, requests, state))
        logits = decoder.step(found[:, place])


def test_results_may_be_trained_on():
    """They are ordinary tensors, not those of inference mode."""
    model = Transformer.build(ModelConfig(layers=1), 32)
    prompt = torch.tensor([[1, 2, 3]])
    model.loss(generate(model, prompt, 4)).backward()
    assert model.norm.weight.grad is not None
    weight = torch.ones(256, requires_grad=True)
    (Decoder(model, 1, 8).prefill(prompt) * weight).sum().backward()


def test_a_tiny_temperature_is_greedy():
    model, prompt = Transformer.build(ModelConfig(layers=1), 32), torch.tensor([[1, 2, 3]])
    greedy = generate(model, prompt, 8)
    for temperature in (1e-300, 5e-324):
        assert torch.equal(generate(model, prompt, 8, temperature=temperature), greedy)


def test_no_new_symbols_and_lengths():
    model, prompts = Transformer.build(ModelConfig(layers=1), 32), torch.tensor([[1, 9, 9], [1, 2, 3]])
    assert generate(model, prompts, 0, lengths=[1, 3]).tolist() == [[1, 0, 0], [1, 2, 3]]
    with pytest.raises(BlockscaleError, match="lengths"):
        generate(model, prompts, 0, lengths=[7, 3])


def test_autocast_does_not_change_the_dtype_of_the_cache():
    model, prompt = Transformer.build(ModelConfig(layers=1), 32), torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", torch.float16):
        assert generate(model, prompt, 4).shape == (1, 7)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"requests": [2**63]}, "requests"),
        ({"requests": [2**56]}, "requests"),
        ({"end": 256}, "end=256"),
        ({"lengths": 3}, "lengths=3"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], part: str):
    model = Transformer.build(ModelConfig(layers=1), 32)
    with pytest.raises(BlockscaleError, match=part):
        generate(model, torch.tensor([[1, 2, 3]]), 4, **options)


@pytest.mark.parametrize("symbol", [256, -1])
def test_symbols_out_of_range(symbol: int):
    model = Transformer.build(ModelConfig(layers=1), 32)
    with pytest.raises(BlockscaleError, match=f"symbol {symbol}"):
        generate(model, torch.tensor([[1, symbol]]), 2)
