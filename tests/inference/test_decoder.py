"""`Decoder`: the logits of the full forward from prefill, chunks and steps, and no shape that depends on data.

The order of sums in torch's products and attention depends on the number of rows, so logits may differ in the last bits
of bf16. On the machine where this was written they are equal; half a bf16 ulp of noise in every attention moves them by
0.004 of the largest logit, another symbol 16 places before by 0.04 to 0.56. `GATE` is between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import blockscale as bs
from blockscale.errors import BlockscaleError, OptionError
from blockscale.inference import Decoder, freeze_, load
from blockscale.models import ModelConfig, Transformer
from blockscale.models.hugging_face import hugging_face_config, hugging_face_tensors
from blockscale.models.transformer import Block
from support.small_runs import DENSE, SPARSE

GATE = 0.02
LENGTH = 20
NORMED = replace(DENSE, heads=4, kv_heads=2, qk_norm=True, tied=True)
SYMBOLS = torch.arange(3 * LENGTH).view(3, LENGTH) * 37 % 251


def built(config: ModelConfig = DENSE) -> Transformer:
    """A model whose attention is not uniform: weights of queries and keys are larger than at the start of training."""
    model = Transformer.build(config, 32)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.mul_(3 if name.endswith(("qkv.weight", "attention.down.weight", "kv_up.weight")) else 1)
    return model


def full(model: Transformer, symbols: Tensor = SYMBOLS) -> Tensor:
    with torch.no_grad():
        return model.eval()(symbols)


def near(found: Tensor, want: Tensor) -> bool:
    """Whether logits are equal within the gate."""
    assert found.shape == want.shape
    found, want = found.double(), want.double()
    return bool(torch.isfinite(found).all()) and bool((found - want).abs().max() <= GATE * want.abs().max())


def plain(config: ModelConfig) -> Callable[[Path], Transformer]:
    return lambda folder: built(config)


def converted(recipe: str, config: ModelConfig = DENSE) -> Callable[[Path], Transformer]:
    def make(folder: Path) -> Transformer:
        model = built(config)
        bs.quantize_(model, recipe, keep_first=0, keep_last=0)
        return model

    return make


def frozen(config: ModelConfig) -> Callable[[Path], Transformer]:
    def make(folder: Path) -> Transformer:
        model = built(config)
        freeze_(model, "mxfp4", head="mxfp8_e4m3")
        return model

    return make


def loaded(folder: Path) -> Transformer:
    pytest.importorskip("safetensors", reason="checkpoints are written by safetensors")
    model = built(replace(DENSE, hidden=64))
    weights = (
        (name, bs.quantize(each, "mxfp8_e4m3") if "proj" in name else each.detach().clone())
        for name, each in hugging_face_tensors(model)
    )
    bs.checkpoints.write(folder, weights, "blockscale", config=hugging_face_config(model, torch.float32))
    return load(folder, device="cpu").model


MODELS = {
    "plain": plain(DENSE),
    "normed": plain(NORMED),
    "experts and latent": plain(SPARSE),
    "mxfp8": converted("mxfp8"),
    "fp8 experts and latent": converted("fp8_blockwise", SPARSE),
    "frozen": frozen(NORMED),
    "frozen experts": frozen(SPARSE),
    "loaded": loaded,
}


@pytest.mark.parametrize("kind", MODELS)
def test_prefill_chunk_and_steps_have_the_logits_of_the_full_forward(kind: str, tmp_path: Path):
    model = MODELS[kind](tmp_path)
    want = full(model)
    decoder = Decoder(model, 3, LENGTH)
    assert near(decoder.prefill(SYMBOLS[:, :6]), want[:, 5])
    assert near(decoder.prefill(SYMBOLS[:, 6:11]), want[:, 10])
    for place in range(11, LENGTH):
        assert near(decoder.step(SYMBOLS[:, place]), want[:, place]), place
    assert decoder.counts == decoder.cache.ends.tolist() == [LENGTH] * 3


def test_the_gate_tells_a_missing_symbol(tmp_path: Path):
    """A change of one earlier symbol is outside of the gate in every model, so positions and masks are tested by it."""
    changed = SYMBOLS.clone()
    changed[:, 3] += 1
    for make in MODELS.values():
        model = make(tmp_path / str(id(make)))
        assert not near(full(model, changed)[:, -1], full(model)[:, -1])


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts and latent"])
def test_the_stream_of_a_first_prompt_has_the_bits_of_training(config: ModelConfig):
    """The same operators on the same shapes; only the head has fewer rows."""
    model = built(config)
    with torch.no_grad():
        want = model.stream(SYMBOLS)
        caches = Decoder(model, 3, LENGTH).cache.extend(LENGTH, is_empty=True)
        assert torch.equal(model.stream(SYMBOLS, caches), want)


def test_reference_products_make_a_step_independent_of_the_batch():
    """By the reference the sums of a row do not depend on the number of rows, and MXFP8 activations have scales for
    each row: what attention caches in every layer has equal bits alone and in a batch. The head is torch's product."""
    model = converted("mxfp8")(Path())
    with bs.use_backend(gemm="reference"):
        together, alone = Decoder(model, 3, LENGTH), Decoder(model, 1, LENGTH)
        for place in range(4):
            a, b = together.step(SYMBOLS[:, place]), alone.step(SYMBOLS[1:2, place])
            for layer in range(DENSE.layers):
                assert torch.equal(together.cache.keys[layer, 1], alone.cache.keys[layer, 0])
                assert torch.equal(together.cache.values[layer, 1], alone.cache.values[layer, 0])
            assert near(a[1:2], b)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts and latent"])
def test_prompts_of_different_lengths_are_as_alone(config: ModelConfig):
    model, lengths, more = built(config), [7, 2, 5], [1, 3, 2]
    padded = SYMBOLS[:, :7].clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 9
    decoder = Decoder(model, 3, LENGTH)
    first = decoder.prefill(padded, lengths)
    second = decoder.prefill(SYMBOLS[:, 10:13], more)
    third = decoder.step(SYMBOLS[:, 15])
    assert decoder.counts == decoder.cache.ends.tolist() == [9, 6, 8]
    for row, (length, next_length) in enumerate(zip(lengths, more, strict=True)):
        text = (SYMBOLS[row, :length], SYMBOLS[row, 10 : 10 + next_length], SYMBOLS[row, 15:16])
        want = full(model, torch.cat(text)[None])[0]
        assert near(first[row], want[length - 1])
        assert near(second[row], want[length + next_length - 1])
        assert near(third[row], want[-1])


def test_reset_forgets_everything():
    model = built()
    decoder = Decoder(model, 3, LENGTH)
    decoder.prefill(SYMBOLS + 1)
    decoder.cache.values.fill_(float("nan"))  # as a model that overflowed leaves it
    decoder.reset()
    assert decoder.counts == [0] * 3
    fresh = Decoder(model, 3, LENGTH)
    assert torch.equal(decoder.prefill(SYMBOLS[:, :4]), fresh.prefill(SYMBOLS[:, :4]))
    assert torch.equal(decoder.step(SYMBOLS[:, 4]), fresh.step(SYMBOLS[:, 4]))


def test_a_full_cache_is_refused_before_it_is_written():
    decoder = Decoder(built(), 3, 6)
    decoder.prefill(SYMBOLS[:, :5], [5, 2, 1])
    decoder.step(SYMBOLS[:, 5])
    before = decoder.cache.keys.clone()
    for call in (lambda: decoder.step(SYMBOLS[:, 6]), lambda: decoder.prefill(SYMBOLS[:, :2])):
        with pytest.raises(OptionError, match=r"sequence of 6\. Rule: the cache has room for 6, .* Fix: call reset"):
            call()
    assert torch.equal(decoder.cache.keys, before)
    assert decoder.counts == [6, 3, 2]


def test_a_step_has_fixed_shapes_and_reads_nothing_back():
    """Traced with symbols that have no values: a read on the host or a shape by data would raise."""
    decoder = Decoder(frozen(SPARSE)(Path()), 3, LENGTH)
    decoder.prefill(SYMBOLS[:, :4])
    with torch.inference_mode(False), torch.no_grad():
        graph = make_fx(lambda tokens: decoder._logits(tokens), tracing_mode="fake", _allow_non_fake_inputs=True)(
            SYMBOLS[:, 4]
        )
        assert torch.equal(graph(SYMBOLS[:, 4]), decoder._logits(SYMBOLS[:, 4]))
    assert "index_put_" in graph.code
    assert not any(word in graph.code for word in ("_local_scalar_dense", ".item", "nonzero"))


def test_training_does_not_see_the_cache():
    """The block is called with two arguments, and its bits are those of the operators one by one."""
    model = built()
    block = model.layers[0]
    assert isinstance(block, Block)
    x = torch.randn(3, LENGTH, DENSE.dim, dtype=torch.bfloat16)
    table = model.table[:, :LENGTH]
    q, k, v = block.attention.qkv(x).unflatten(-1, (-1, 16)).split((2, 1, 1), dim=-2)

    def turned(part: Tensor) -> Tensor:
        cosine, sine = table[0][:, None], table[1][:, None]
        a, b = part.float().chunk(2, dim=-1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1).to(part.dtype)

    parts = (part.transpose(1, 2).float() for part in (turned(q), turned(k), v))
    y = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    want = block.attention.out(y.transpose(1, 2).bfloat16().flatten(-2))
    assert torch.equal(block.attention(x, table), want)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: Decoder(model, 0, 8), "batch=0. Rule: batch is the number of sequences"),
        (lambda model: Decoder(model, 1, 33), "length=33. Rule: the model has 32 positions. Fix: pass length=32"),
        (lambda model: Decoder(torch.nn.Linear(2, 2), 1, 8), "a model that is a Linear"),
        (lambda model: Decoder(model, 1, 8, graphs=1), "graphs=1. Rule: graphs is True or False"),
        (lambda model: Decoder(model, 1, 8).prefill(SYMBOLS[:, :4]), "tokens (3, 4). Rule: they are [B, T], for the 1"),
        (lambda model: Decoder(model, 3, 8).step(SYMBOLS[:, :1]), "tokens (3, 1). Rule: they are [B], for the 3"),
        (
            lambda model: Decoder(model, 3, 8).step([1, 2, 3]),
            "tokens is a list. Rule: symbols are tensors of int64 or int32",
        ),
        (lambda model: Decoder(model, 3, 8).step(torch.ones(3)), "tokens is torch.float32 (3,)"),
        (lambda model: Decoder(model, 3, 8).prefill(SYMBOLS[:, :4], [4, 0, 1]), "lengths=[4, 0, 1]. Rule: a sequence"),
        (lambda model: Decoder(model, 3, 8).prefill(SYMBOLS[:, :4], [4, 5, 1]), "lengths=[4, 5, 1]. Rule: a sequence"),
    ],
)
def test_bad_values_are_refused(call: Callable[[Transformer], object], said: str):
    with pytest.raises(BlockscaleError) as error:
        call(Transformer.build(DENSE, 32))
    assert str(error.value).startswith(said)
    assert isinstance(error.value, ValueError)
    assert "Fix: " in str(error.value)


def test_a_decoder_on_a_cpu_says_that_it_has_no_graph():
    decoder = Decoder(built(), 1, 8)
    assert not decoder.graphs
    assert repr(decoder) == "Decoder(batch=1, length=8, counts=[0], graphs=False, device='cpu')"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "mxfp8", "frozen", "frozen experts"])
def test_a_captured_step_is_the_eager_one(kind: str, tmp_path: Path):
    from blockscale.bench.timing import host_syncs

    model, symbols = MODELS[kind](tmp_path).cuda(), SYMBOLS.cuda()
    captured, eager = Decoder(model, 3, LENGTH), Decoder(model, 3, LENGTH, graphs=False)
    assert captured.graphs
    for repeat in range(2):
        assert torch.equal(captured.prefill(symbols[:, :5]), eager.prefill(symbols[:, :5])), repeat
        for place in range(5, 9):
            assert torch.equal(captured.step(symbols[:, place]), eager.step(symbols[:, place]))
        assert host_syncs(lambda: captured.step(symbols[:, 9])) == 0
        assert host_syncs(lambda: eager.step(symbols[:, 9])) == 0
        captured.reset()
        eager.reset()
