"""Learning rate as a pure function of the step, AdamW, and the norm of the gradients."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import AdamW

from .config import OptimizerConfig


def rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of a step, counted from 0: linear warm-up, then the schedule.

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
    """Fused AdamW. Weight decay applies to matrices, not to parameters of one dimension such as norms and biases."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


@torch.no_grad()
def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Norm of all gradients, an fp32 scalar; nothing is read back."""
    norms = torch._foreach_norm(gradients, 2, torch.float32)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def divisor(norm: torch.Tensor, limit: float) -> torch.Tensor | None:
    """Divisor that clips gradients to a norm of at most `limit` (None if 0), 1 if the norm is below it; fp32 scalar.

    AdamW divides by its `grad_scale` as it reads, so clipping needs no extra pass and no rounding in bf16.
    """
    return ((norm + 1e-6) / limit).clamp(min=1.0) if limit else None
