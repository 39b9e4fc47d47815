"""Layers with weights that FSDP2 gathered as codes, without ranks."""

from __future__ import annotations

import torch

from blockscale import get_recipe
from blockscale.autograd.linear import linear
from blockscale.casts.ops import cast
from blockscale.distributed.gathered import GatheredWeight
from blockscale.distributed.weight_gather import plan_of
from blockscale.formats.cast_spec import Cast


def test_a_product_with_gathered_codes_compiles_without_a_graph_break():
    """torchtitan compiles its blocks with fullgraph."""
    recipe, whole = get_recipe("fp8_blockwise"), torch.randn(256, 128)
    plan = plan_of(recipe, whole)
    assert not isinstance(plan, str)
    row = cast(whole, Cast(plan), -1, None)
    parts = row.data.view(torch.uint8), row.plain_scale().view(torch.uint8), None
    weight = GatheredWeight(*parts, plan, (256, 128), torch.float32).requires_grad_()

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, recipe=recipe)

    results: list[list[torch.Tensor]] = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = function(x, weight)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), (x, weight))])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
