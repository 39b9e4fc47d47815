"""`Decoder`: logits of a transformer symbol by symbol, with the keys and values of earlier symbols in a cache.

The blocks are those of training. The first prompt runs the operators of `Transformer.forward`; later symbols attend to
the cache. On a GPU a step is one CUDA graph, without a host sync.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError, refuse
from ..formats.checks import all_ints, check_flag, check_int, check_model, in_words
from ..models.cache import Cache
from ..models.transformer import STREAM, Transformer
from .graphs import GraphedCall

P = ParamSpec("P")


def without_gradients(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorator: run a function in inference mode, and return its result as an ordinary tensor, which training may
    use."""

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> Tensor:
        with torch.inference_mode():
            found = function(*args, **named)
        return found.clone()

    return call


class Decoder:
    """Generation with a model for `batch` sequences of up to `length` symbols each.

    model: a `Transformer`: plain, converted by `quantize_`, frozen by `freeze_` or loaded. It keeps its storage while
    the decoder is in use.  graphs: capture a step as a CUDA graph; on a CPU there are none, and `graphs` is False.
    A row of logits depends on the other sequences only through the order of sums, unless activations have a scale for
    the whole tensor (`nvfp4`).

    >>> from ..models import ModelConfig
    >>> decoder = Decoder(Transformer.build(ModelConfig(layers=1), 64), batch=2, length=32)
    >>> logits = decoder.prefill(torch.tensor([[72, 101], [66, 0]]), lengths=[2, 1])
    >>> decoder.step(logits.argmax(-1)).shape
    torch.Size([2, 256])
    >>> decoder.counts
    [3, 2]
    """

    def __init__(self, model: Transformer, batch: int, length: int, *, graphs: bool = True) -> None:
        check_model(model, "a decoder runs the blocks of a blockscale.models.Transformer")
        if not isinstance(model, Transformer):  # pyright: ignore[reportUnnecessaryIsInstance]
            rule = "a decoder runs the blocks of a blockscale.models.Transformer, which keep keys and values"
            refuse(f"a model that is a {type(model).__name__}", rule, "load it with blockscale.inference.load")
        check_int(batch, "batch", "batch is the number of sequences", least=1)
        check_int(length, "length", "length is the number of symbols that a sequence has room for", least=1)
        check_flag(graphs, "graphs")
        if length > model.sequence:
            rule = f"the model has {model.sequence:,} positions"
            refuse(f"length={length:,}", rule, f"pass length={model.sequence}, or a model for longer sequences")
        self.model, self.batch, self.length = model, batch, length
        self.device = model.embedding.weight.device
        self.graphs = graphs and self.device.type == "cuda"
        # symbols of each sequence, as the host counts them
        self.counts = [0] * batch
        self.cache = Cache(model.config, batch, length, device=self.device, dtype=STREAM)
        self._run = GraphedCall(self._logits) if self.graphs else self._logits

    @without_gradients
    def prefill(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Take the next symbols [B, T] of every sequence -> logits after the last one, [B, V].

        lengths: symbols of each sequence, 1 to T, if they differ; what stands to the right of them is ignored. A prompt
        may be taken in several calls.
        """
        self._check(tokens, "[B, T]")
        batch, width = tokens.shape
        counts = [width] * batch if lengths is None else _as_list(lengths, "lengths", batch)
        if len(counts) != batch or not all_ints(counts) or not all(1 <= each <= width for each in counts):
            rule = f"a sequence has 1 to {width} of the {width} columns of tokens"
            refuse(f"lengths={counts}", rule, f"pass an int for each of the {batch} sequences")
        self._check_room(width)
        is_empty = not any(self.counts)
        added = torch.tensor(counts, device=self.device)
        stream = self.model.stream(tokens, self.cache.extend(width, is_empty=is_empty))
        last = stream[torch.arange(batch, device=self.device), added - 1]
        self._advance(counts, added)
        return self.model.head(last)

    @without_gradients
    def step(self, tokens: Tensor) -> Tensor:
        """Take one symbol of every sequence, [B] -> logits of the next one, [B, V]."""
        self._check(tokens, "[B]")
        self._check_room(1)
        logits = self._run(tokens)
        self._advance([1] * self.batch, 1)
        return logits

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all sequences. Buffers and the captured step stay."""
        self.cache.clear()
        self.counts = [0] * self.batch

    def _logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after symbols [B]. Repeatable: the cache is written where it was, and not advanced."""
        stream = self.model.stream(tokens[:, None], self.cache.extend(1, is_empty=False))
        return self.model.head(stream[:, 0])

    def _advance(self, counts: Sequence[int], added: Tensor | int) -> None:
        self.cache.ends += added
        self.counts = [before + more for before, more in zip(self.counts, counts, strict=True)]

    def _check(self, tokens: Tensor, shape: str) -> None:
        """Raise unless these are symbols of all sequences."""
        check_symbols(tokens)
        check_vocabulary(tokens, self.model.config.vocabulary)
        if tokens.dim() != len(shape.split(",")) or tokens.shape[0] != self.batch or not tokens.numel():
            rule = f"they are {shape}, for the {self.batch} sequences of the decoder"
            refuse(f"tokens {tuple(tokens.shape)}", rule, "pass one row for each sequence", error=ShapeError)

    def _check_room(self, more: int) -> None:
        """Raise unless all sequences have room for more symbols; padding counts."""
        most = max(self.counts)
        if most + more > self.length:
            what = f"{more:,} more symbols for a sequence of {most:,}"
            rule = f"the cache has room for {self.length:,}, and its buffers do not grow"
            refuse(what, rule, f"call reset(), or make the decoder with length={most + more} or more")

    def __repr__(self) -> str:
        sizes = f"batch={self.batch}, length={self.length}, counts={self.counts}"
        return f"Decoder({sizes}, graphs={self.graphs}, device={str(self.device)!r})"


def check_symbols(tokens: object) -> None:
    """Raise unless it is a tensor of symbols. Their values are not read: that would be a host sync."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        rule, fix = "symbols are tensors of int64 or int32", "pass torch.tensor([[1, 2, 3]])"
        refuse(f"tokens is {in_words(tokens)}", rule, fix, error=DtypeError)


def check_vocabulary(tokens: Tensor, vocabulary: int) -> None:
    """Raise if a symbol on the CPU is none of the model's. On a GPU the embedding's assertion ends the program: to look
    there is a host sync."""
    if not tokens.is_cpu or not tokens.numel():
        return
    least, most = (int(each) for each in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        refuse(f"symbol {wrong}", f"the model has symbols 0 to {vocabulary - 1}", "pass symbols of its tokenizer")


def _as_list(values: object, name: str, batch: int) -> list[int]:
    if not isinstance(values, Sequence):
        refuse(f"{name}={values!r}", "every sequence of the batch has its own", f"pass a list of {batch} ints")
    return list(values)
