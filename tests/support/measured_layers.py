"""Layers that tests of numerics measure: linear ones behind each other, and experts."""

from __future__ import annotations

import itertools

import torch

import blockscale as bs


def all_layers(module: torch.nn.Module, name: str) -> bool:
    return True


def converted(recipe: str, *widths: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    bs.quantize_(model, recipe, all_layers)
    return model


def experts(recipe: str) -> bs.nn.GroupedLinear:
    torch.manual_seed(0)
    return bs.nn.GroupedLinear(4, 64, 96, bias=False, recipe=recipe, name="experts")
