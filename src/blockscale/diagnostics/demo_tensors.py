"""Realistic tensors to quantize: weights, activations and gradients of a tiny model, trained in seconds.

A byte-level language model (16 bytes of context, one SwiGLU layer) learns from the standard library's source code,
which every machine has. Large models also have outlier channels, which such a small model does not develop: a copy of
its activations has sixteen channels scaled by 20 to 60.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm, silu

from ..errors import OptionError, message

CONTEXT, EMBED, HIDDEN = 16, 16, 384
_FILES = ("argparse.py", "ast.py", "datetime.py", "decimal.py", "typing.py", "zipfile.py", "tarfile.py", "inspect.py")


@dataclass(frozen=True)
class Samples:
    """Named bf16 matrices, and the loss before and after the training that made them."""

    tensors: dict[str, Tensor]
    first_loss: float
    last_loss: float


class _TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = CONTEXT * EMBED
        self.embed = nn.Embedding(256, EMBED)
        self.gate, self.up = nn.Linear(width, HIDDEN, bias=False), nn.Linear(width, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, width, bias=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.seen: dict[str, Tensor] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        x = rms_norm(self.embed(tokens).flatten(1), (CONTEXT * EMBED,))
        hidden = silu(self.gate(x)) * self.up(x)
        out = self.down(hidden)
        if out.requires_grad:
            out.retain_grad()
        self.seen = {"activation": hidden, "output": out}
        return self.head(rms_norm(x + out, (CONTEXT * EMBED,)))


def _text() -> Tensor:
    library = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join((library / name).read_bytes() for name in _FILES if (library / name).exists())
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def train_samples(steps: int = 100, *, track: Callable[[Iterable[int]], Iterable[int]] = iter) -> Samples:
    """Train the model and return tensors of its last step.  track: wraps the steps, for a progress bar.

    >>> samples = train_samples(steps=2)
    >>> [tuple(tensor.shape) for tensor in samples.tensors.values()]
    [(256, 384), (512, 384), (512, 384), (512, 256)]
    """
    if steps < 1:
        raise OptionError(message(f"steps={steps}", rule="gradients come from a training step", fix="pass 1 or more"))
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _TinyModel()
    text = _text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    for _ in track(range(steps)):
        start = torch.randint(len(text) - CONTEXT - 1, (512,), generator=generator)
        window = text[start[:, None] + torch.arange(CONTEXT + 1)]
        loss = cross_entropy(model(window[:, :-1]), window[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    activation, gradient = model.seen["activation"].detach(), model.seen["output"].grad
    assert gradient is not None
    channels = torch.randperm(HIDDEN, generator=generator)[:16]
    outliers = activation.clone()
    outliers[:, channels] *= 20 + 40 * torch.rand(16, generator=generator)
    tensors = {
        "weight": model.down.weight.detach(),
        "act": activation,
        "outlier": outliers,
        "grad": gradient,
    }
    return Samples({name: tensor.bfloat16() for name, tensor in tensors.items()}, losses[0], losses[-1])
