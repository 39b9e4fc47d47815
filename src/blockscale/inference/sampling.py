"""`generate`: greedy or random text, whose randomness is a function of seed, request and position alone.

A symbol is drawn by the Gumbel-max trick: the largest of logits / temperature + noise. The noise of a symbol is a word
of the library's counter (`formats.stochastic`), so that a request keeps its noise in any batch, at any place in it, and
when it is taken up again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError, refuse
from ..formats.checks import all_ints, check_int, check_number, in_words
from ..formats.stochastic import check_seed, random_words, rng_state
from ..models.transformer import Transformer
from .decoder import Decoder, check_symbols, without_gradients
from .graphs import GraphedCall

# stream of the counter; those of casts end in the number of a role
_STREAM = 0x73616DFF
# steps between looks at whether all sequences have ended, each a host sync
_LOOK_EVERY = 16


def gumbel(state: Tensor, requests: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise, fp64 [B, V].  state: of `rng_state(seed)`.  requests, positions: int64 [B].

    The word of a symbol is that of element (request, symbol) of a matrix at a tick that is the position.
    """
    symbols = torch.arange(vocabulary, device=state.device)
    ticks = torch.stack(torch.broadcast_tensors(state[0], positions[:, None]))
    # a group on the device: a number would be copied there, which a capture does not allow
    group = torch.zeros((), dtype=torch.int64, device=state.device)
    words = random_words(requests[:, None] * vocabulary + symbols, ticks, _STREAM, group)
    # in fp64, where neither end of (0, 1) rounds to 0 or 1
    return -(-((words.double() + 0.5) / 2**32).log()).log()


def sample(
    logits: Tensor,
    positions: Tensor,
    requests: Tensor,
    state: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Tensor:
    """A symbol for each row of logits [B, V], int64 [B]: the most likely one at temperature 0, else drawn from
    softmax(logits / temperature).

    positions: of the new symbols, int64 [B].  requests: int64 [B].  state: of `rng_state(seed)`.  top_k: draw from
    symbols that are at least as likely as the k-th. No host sync.
    """
    if temperature == 0:
        return logits.argmax(-1)
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature  # at most 0, so that none overflows
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    return (scores + gumbel(state, requests, positions, scores.shape[-1])).argmax(-1)


@without_gradients
def generate(
    model: Transformer,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    top_k: int | None = None,
    end: int | None = None,
    lengths: Sequence[int] | None = None,
    requests: Sequence[int] | None = None,
) -> Tensor:
    """Prompts [B, T] with the symbols that a model adds, int64 [B, T + new_tokens].

    temperature: 0 takes the most likely symbol, 1 draws from the model's distribution.  top_k: only from the k most
    likely.  end: symbol that ends a sequence, and fills it from there.  lengths: symbols of each prompt, if they
    differ; new ones follow at once, and a row ends in zeros.  requests: number of each row, 0 to B - 1 by default.
    Noise depends on (seed, request, position) only, so a request's text depends on its batch only through the order of
    sums in its logits.

    >>> from ..models import ModelConfig
    >>> model = Transformer.build(ModelConfig(layers=1), 64)
    >>> generate(model, torch.tensor([list(b"def ")]), 8).shape
    torch.Size([1, 12])
    """
    _check(tokens, new_tokens, temperature, top_k, end)
    check_seed(seed)
    batch, width = tokens.shape
    numbers = list(range(batch)) if requests is None else list(requests)
    decoder = Decoder(model, batch, max(width, width + new_tokens - 1))
    vocabulary, device = model.config.vocabulary, decoder.device
    most = (2**63 - 1) // vocabulary - 1  # a symbol's noise is counted by request * vocabulary + symbol
    if len(numbers) != batch or not all_ints(numbers) or max(numbers) > most:
        refuse(f"requests={numbers}", f"every row has a number, 0 to {most}", f"pass {batch} ints")
    if end is not None and end >= vocabulary:
        refuse(f"end={end}", f"the model has symbols 0 to {vocabulary - 1}", "pass one of them")
    tokens = tokens.to(device, torch.int64)
    out = torch.cat((tokens, tokens.new_zeros(batch, new_tokens)), dim=1)
    logits = decoder.prefill(tokens, lengths)
    if lengths is not None:
        out.masked_fill_(torch.arange(width + new_tokens, device=device) >= decoder.cache.ends[:, None], 0)
    if not new_tokens:
        return out
    request, state = torch.tensor(numbers, device=device), rng_state(seed, device=device)
    pick = functools.partial(sample, requests=request, state=state, temperature=float(temperature), top_k=top_k)
    if decoder.graphs and temperature:
        pick = GraphedCall(pick)
    ended = torch.zeros(batch, device=device, dtype=torch.bool)
    for count in range(new_tokens):
        positions = decoder.cache.ends.clone()
        chosen = pick(logits, positions)
        if end is not None:
            chosen = chosen.masked_fill(ended, end)
            ended |= chosen == end
        out.scatter_(1, positions[:, None], chosen[:, None])
        if count == new_tokens - 1:
            break
        if end is not None and count % _LOOK_EVERY == _LOOK_EVERY - 1 and bool(ended.all()):
            left = torch.arange(out.shape[1], device=device) - positions[:, None]
            out.masked_fill_((left > 0) & (left < new_tokens - count), end)
            break
        logits = decoder.step(chosen)
    return out


def _check(tokens: Tensor, new_tokens: int, temperature: float, top_k: int | None, end: int | None) -> None:
    """Raise unless these are options of `generate`; the decoder checks the rest."""
    check_symbols(tokens)
    if tokens.dim() != 2 or not tokens.numel():
        rule = "prompts are symbols [B, T], one or more each"
        refuse(f"tokens is {in_words(tokens)}", rule, "pass torch.tensor([[1, 2, 3]])", error=ShapeError)
    check_int(new_tokens, "new_tokens", "new_tokens is the number of symbols to add")
    rule = "temperature is 0 or more: 0 takes the most likely symbol"
    check_number(temperature, "temperature", rule, "pass temperature=1.0")
    if temperature < 0:
        refuse(f"temperature={temperature}", rule, "pass temperature=1.0")
    if top_k is not None:
        check_int(top_k, "top_k", "top_k is the number of symbols to draw from", least=1)
    if end is not None:
        check_int(end, "end", "end is a symbol")
