"""One run of an arm and a seed. Runs of one seed start from the same weights and see the same bytes in the same order.

Everything random, stochastic rounding included, is a function of the seed and the step, so a resumed run gives the same
bits as an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from blockscale.formats import rng_state

from .arms import ARMS, Arm
from .data import Text, batch, standard_library
from .model import GPT, SIZES, Regression, Size

POINTS = 12
REGRESSION_STEPS = 80
# first seed of the validation batches, which are the same for all runs
HELD_OUT_SEED = 1 << 40


class Trainer:
    """A model, its optimizer and its step."""

    def __init__(self, arm: Arm, seed: int, size: Size, text: Text, device: torch.device) -> None:
        self.arm, self.seed, self.size, self.text, self.device = arm, seed, size, text, device
        self.rng = rng_state(seed, device=device)
        torch.manual_seed(seed)  # weights are initialized on the CPU, so that every device starts with the same
        self.model = GPT(size, arm.make_linear(self.rng)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        self.step = 0

    def batch(self) -> Tensor:
        """Sequences of this step."""
        size = self.size
        return batch(self.text.train, size.sequences, size.context, (self.seed << 20) + self.step).to(self.device)

    def advance(self) -> Tensor:
        """One step; returns its loss before the update."""
        self._set_rate()
        with self.arm.active():
            loss = self.model.loss(self.batch())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.rng[1] += 1
        return loss.detach()

    def _set_rate(self) -> None:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the rate."""
        done = self.step / self.size.steps
        share = min(10 * (done + 1 / self.size.steps), 0.55 + 0.45 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.rate * share

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per byte of held-out text."""
        size, batches = self.size, max(1, self.size.evaluated // 2048)
        total = 0.0
        with self.arm.active():
            for place in range(batches):
                pieces = batch(self.text.held_out, 2048 // size.context, size.context, HELD_OUT_SEED + place)
                total += float(self.model.loss(pieces.to(self.device)))
        return total / batches

    def state(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.rng[1] = self.step


def train(name: str, seed: int, size_name: str, device_name: str) -> dict[str, Any]:
    """Run in a worker process; returns the row to store."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    text, size = standard_library(), SIZES[size_name]
    run = Trainer(ARMS[name], seed, size, text, torch.device(device_name))
    first = float(run.advance())
    curve: list[tuple[int, float]] = []
    for point in range(1, POINTS + 1):
        while run.step < point * size.steps // POINTS:
            run.advance()
        curve.append((run.step, round(run.validate(), 6)))
    return {
        "kind": "run",
        "arm": name,
        "seed": seed,
        "size": size_name,
        "parameters": sum(param.numel() for param in run.model.parameters()),
        "first_loss": round(first, 6),
        "curve": curve,
        "final": curve[-1][1],
        "data": text.hash,
        "seconds": round(time.perf_counter() - began, 1),
    }


def regress(arm: Arm, seed: int, steps: int, device: torch.device | str = "cpu") -> float:
    """Fit the regression; returns its error on held-out pairs."""
    rng = rng_state(seed, device=device)
    torch.manual_seed(seed)
    model = Regression(arm.make_linear(rng)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    with arm.active():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
            model.loss((seed << 20) + step).backward()
            optimizer.step()
            optimizer.zero_grad()
            rng[1] += 1
        with torch.no_grad():
            return sum(float(model.loss(HELD_OUT_SEED + place)) for place in range(4)) / 4


def fit(name: str, seed: int, size_name: str, device_name: str) -> dict[str, Any]:
    """Regression in a worker process; returns the row to store."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    return {
        "kind": "regression",
        "arm": name,
        "seed": seed,
        "size": size_name,
        "final": round(regress(ARMS[name], seed, REGRESSION_STEPS, device_name), 6),
        "data": standard_library().hash,
        "seconds": round(time.perf_counter() - began, 1),
    }
