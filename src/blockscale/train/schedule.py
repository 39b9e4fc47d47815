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
def norm_and_scale(gradients: list[torch.Tensor], limit: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm of all gradients, and what divides them to a norm of at most `limit` (0: None, as they are); in fp32.

    AdamW divides by its `grad_scale` as it reads: clipping takes no pass of its own, and in bf16 no rounding. Nothing
    is read back: 1 where nothing is to be clipped.
    """
    norms = torch._foreach_norm(gradients, 2, torch.float32)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm, ((norm + 1e-6) / limit).clamp(min=1.0) if limit else None
