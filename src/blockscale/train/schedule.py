"""The learning rate as a pure function of the step, and the optimizer that takes it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import AdamW

from .config import OptimizerConfig


def rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of a step, counted from 0: up over `warmup`, then as the schedule says.

    >>> config = OptimizerConfig(rate=1.0, warmup=0.1, floor=0.1)
    >>> [round(rate_at(step, 100, config), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.542, 0.1]
    """
    warm = round(config.warmup * steps)
    if step < warm:
        return config.rate * (step + 1) / warm
    if config.schedule == "constant":
        return config.rate
    if config.schedule == "cosine":
        done = (step - warm) / max(1, steps - 1 - warm)
        return config.rate * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    falling = round(config.decay * steps)
    done = max(0.0, (step - (steps - 1 - falling)) / max(1, falling))
    return config.rate * (1 - (1 - config.floor) * min(1.0, done))


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW in one kernel. Matrices decay; norms, biases and whatever else has one dimension do not."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


@torch.no_grad()
def clip_(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
    """Scale gradients to a norm of at most `limit` (0: leave them); the norm that they had, on their device.

    Nothing is read back: a factor of 1 is multiplied where nothing is to be clipped.
    """
    norm = torch.nn.utils.get_total_norm(gradients)
    if limit:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return norm
