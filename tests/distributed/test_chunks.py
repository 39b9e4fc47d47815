"""Which ranks share a product: no division ends earlier, and links use the one of their machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from blockscale.bench.virtual_link import ReadyLink, VirtualLink
from blockscale.distributed.overlap import link as link_module
from blockscale.distributed.overlap.chunks import Part, best, chunks
from blockscale.distributed.overlap.link import LayerLink, Link

PART = Part(512, 6144, 12288, 512 * 12288, low=True)
GPU = torch.device("cuda", 0)


def divisions(ranks: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.product((False, True), repeat=ranks - 1):
        ends = [end for end, cut in enumerate(cuts, 1) if cut] + [ranks]
        yield tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def seconds(groups: tuple[int, ...], step: float, product: Any) -> float:
    """The end of the last product: each waits for its rows and for the one before."""
    end, ranks = 0.0, 0
    for count in groups:
        ranks += count
        end = max(end, (ranks - 1) * step) + product(count)
    return end


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_no_division_ends_earlier(ranks: int):
    numbers = random.Random(ranks)
    for _ in range(40):
        launch, each, step = numbers.random(), numbers.random(), 2 * numbers.random()

        def product(count: int, launch: float = launch, each: float = each) -> float:
            return launch + each * count

        found = best(ranks, step, product)
        assert sum(found) == ranks
        least = min(seconds(groups, step, product) for groups in divisions(ranks))
        assert seconds(found, step, product) == pytest.approx(least)


def test_links_divide_by_their_machine():
    with (
        patch.object(torch.cuda, "get_device_name", lambda device: "NVIDIA H200"),
        patch.object(link_module, "transport_of", lambda device: SimpleNamespace(side=None)),
    ):
        link = Link(Mock(rank=lambda: 0, size=lambda: 8), GPU)
        assert LayerLink(link).chunks(PART) == link.chunks(PART) == chunks("h200", None, 8, PART) != ()
        assert ReadyLink(0, 8, device=GPU).chunks(PART) == chunks("h200", "pcie5", 8, PART)
        assert ReadyLink(0, 8, groups=(3, 5), device=GPU).chunks(PART) == (3, 5)
    assert VirtualLink(0, 8, torch.device("cpu")).chunks(PART) == ()


def test_more_work_for_the_same_rows_makes_larger_chunks():
    """Rows that arrive early, relative to their product, share more of it."""
    numbers = [len(chunks("h200", "pcie5", 8, PART._replace(columns=128 * n))) for n in (8, 64, 512, 4096)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]
    assert PART._replace(experts=32).tiles(1) == PART.tiles(1) + 16 * 48
