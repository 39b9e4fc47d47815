"""Rows of experts by the rank whose tokens they are: slices of each expert's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

import blockscale as bs
from blockscale.bench.virtual_link import ReadyLink, ReadyParts
from blockscale.distributed.collectives import Ranks, Tokens
from blockscale.distributed.overlap.chunks import Part
from blockscale.distributed.overlap.expert_ops import messages_of, multiply_arrivals, sum_combined
from blockscale.distributed.overlap.expert_rows import ExpertRows, PlacedRows, RowsOfTokens, multiply_rows
from blockscale.distributed.overlap.expert_sharing import ExpertSharing
from blockscale.distributed.overlap.link import spans_of
from blockscale.distributed.overlap.products import PendingSummation
from blockscale.distributed.wire import cast_rows
from blockscale.formats.cast_spec import as_cast
from blockscale.grouped.routing import combine_rows
from support.helpers import same_operand

CASES = {
    "one run": (Tokens(1, 7), 3, 5, 2),
    "three runs": (Tokens(3, 4), 2, 4, 3),
    "one expert": (Tokens(1, 5), 4, 1, 1),
    "more experts than rows": (Tokens(1, 1), 2, 9, 2),
}


def routed(tokens: Tokens, ranks: int, experts: int, slots: int) -> bs.Routing:
    """Tokens of all ranks to their experts; some slots go to none, and the second expert gets none."""
    count = ranks * tokens.outer * tokens.inner
    rng = torch.Generator().manual_seed(count)
    ids = torch.rand(count, experts + 2, generator=rng).topk(slots).indices.clamp(max=experts)
    return bs.sort_by_expert(ids.masked_fill(ids == 1, 0) if experts > 1 else ids, experts)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_has_a_slice_of_each_experts_rows(name: str):
    (tokens, ranks, *_), routing = CASES[name], routed(*CASES[name])
    rows, (sorted_tokens, by_slot) = ExpertRows.of(routing, tokens, ranks), routing.permutation
    seen = torch.zeros(sorted_tokens.shape[0], dtype=torch.int64)
    for rank in range(ranks):
        runs = [*map(rows.of_span, spans_of(rank, ranks, *tokens))]
        assert len(runs) == tokens.outer
        for run in runs:
            assert torch.equal(run.rows, by_slot[run.tokens])
            assert run.starts is not None
            for start, end, first, last in zip(
                run.starts.tolist(),
                run.ends.tolist(),
                [0, *routing.offs[:-1].tolist()],
                routing.offs.tolist(),
                strict=True,
            ):
                assert first <= start <= end <= last
                inside = (sorted_tokens[first:last] >= run.tokens.start) & (sorted_tokens[first:last] < run.tokens.stop)
                assert inside.nonzero().flatten().tolist() == list(range(start - first, end - first))
                seen[start:end] += 1
            places, ends = run.routing()
            assert places.tolist() == sorted(run.rows.flatten().tolist())
            assert ends.tolist() == (run.ends - run.starts).cumsum(0).tolist()
    assert seen.tolist() == [1] * int(routing.offs[-1]) + [0] * int(seen.shape[0] - routing.offs[-1])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", ["fp8_1x128", "mxfp8_e4m3", "mxfp4", None])
def test_products_of_each_rank_are_the_product_of_all(name: str, format: str | None):
    """Rows that are placed run by run are those of one cast, and slices write what one product of all rows writes."""
    (tokens, ranks, experts, _), routing = CASES[name], routed(*CASES[name])
    rows, (sorted_tokens, _) = ExpertRows.of(routing, tokens, ranks), routing.permutation
    x = torch.randn(ranks * tokens.outer * tokens.inner, 72).bfloat16()
    weight = torch.randn(experts, 48, 72).bfloat16()
    cast = None if format is None else as_cast(bs.CastSpec(format, scale_layout="plain"))
    placed = PlacedRows(sorted_tokens.shape[0], 72, cast and cast.plan, torch.bfloat16, x.device)

    def unquantized(values: torch.Tensor, of: bs.Routing) -> torch.Tensor:
        return torch.cat(
            [values[a:b] @ weight[e].mT for e, (a, b) in enumerate(spans(of))]
            + [values.new_zeros(int(values.shape[0] - of.offs[-1]), 48)]
        )

    w = unquantized if format is None else bs.quantize(weight, format)
    out = torch.full((sorted_tokens.shape[0], 48), float("nan"), dtype=torch.bfloat16)
    with bs.use_backend(m_grouped="reference"):
        for rank in reversed(range(ranks)):
            for at in map(rows.of_span, spans_of(rank, ranks, *tokens)):
                placed.place(at, x[at.tokens] if cast is None else cast_rows(x[at.tokens], cast))
                multiply_rows(placed.operand(), w, at, out)
        whole = torch.empty_like(out)
        multiply_rows(placed.operand(), w, rows.all(), whole)
    end = int(routing.offs[-1])
    assert torch.equal(out[:end], whole[:end])
    if format is None:
        assert torch.equal(placed.operand(), x[sorted_tokens.long()])  # pyright: ignore[reportArgumentType]
    else:
        same_operand(placed.operand(), bs.quantize(x[sorted_tokens.long()], bs.CastSpec(format, scale_layout="plain")))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("format", "layout"),
    [("fp8_1x128", "mn_major"), ("mxfp8_e4m3", "blocked"), ("mxfp4", "blocked")],
)
@pytest.mark.parametrize("features", [72, 512])
def test_scales_are_placed_in_the_layout_of_the_product(format: str, layout: str, features: int):
    """Scales and pads of rows that are placed run by run have the bytes of one cast."""
    (tokens, ranks, *_), routing = next(iter(CASES.values())), routed(*next(iter(CASES.values())))
    rows, (sorted_tokens, _) = ExpertRows.of(routing, tokens, ranks), routing.permutation
    x = torch.randn(ranks * tokens.outer * tokens.inner, features).bfloat16()
    of = bs.CastSpec(format, scale_layout=layout)
    placed = PlacedRows(sorted_tokens.shape[0], features, as_cast(of).plan, torch.bfloat16, x.device)
    for rank in range(ranks):
        for at in map(rows.of_span, spans_of(rank, ranks, *tokens)):
            placed.place(at, cast_rows(x[at.tokens], as_cast(of)))
    same_operand(placed.operand(), bs.quantize(x[sorted_tokens.long()], of))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("format", ["fp8_1x128", None])
def test_groups_of_ranks_have_the_bits_of_all_rows(name: str, rank: int, format: str | None):
    """Layers 0 and 1 with tokens of several ranks in a product, which may wrap around."""
    (tokens, ranks, experts, slots), routing = CASES[name], routed(*CASES[name])
    count = ranks * tokens.outer * tokens.inner
    rows, gates = ExpertRows.of(routing, tokens, ranks), torch.rand(count, slots)
    # integers, whose sums are exact: torch's may depend on the number of rows
    x, weight = (torch.randint(-3, 4, shape).bfloat16() for shape in ((count, 72), (experts, 48, 72)))
    a, w = (x, weight) if format is None else (quantize(x, format), quantize(weight, format))
    for groups in ((), (1, ranks - 1), (ranks,)):
        link = ReadyLink(rank, ranks, [messages_of(a)], groups)
        sharing = ExpertSharing(Ranks("", rank, ranks), tokens, range(experts), link)
        (y,), placed = multiply_arrivals(sharing.gather(messages_of(a)), rows, a, [w], [None], torch.bfloat16)
        (whole,), all_placed = multiply_arrivals(Together(messages_of(a)), rows, a, [w], [None], torch.bfloat16)
        assert torch.equal(y, whole)
        assert placed is not None
        parts = sum_combined(sharing, rows, gates, placed, w, None, torch.bfloat16)
        assert isinstance(parts, PendingSummation)
        assert isinstance(parts.summation, ReadyParts)
        total = combine_rows(whole, rows.all().rows, gates)
        assert sorted(parts.summation.parts) == [*range(ranks)]
        for owner, part in parts.summation.parts.items():
            assert torch.equal(part, torch.cat([total[span] for span in spans_of(owner, ranks, *tokens)]))
        if isinstance(placed, torch.Tensor):
            assert torch.equal(placed, all_placed)  # pyright: ignore[reportArgumentType]
        else:
            same_operand(placed, all_placed)  # pyright: ignore[reportArgumentType]


class Together(NamedTuple):
    """Tokens that are there."""

    whole: torch.Tensor

    def arrivals(self, rows: ExpertRows, of: Part) -> Iterator[RowsOfTokens]:
        yield rows.all()

    def values(self) -> torch.Tensor:
        return self.whole


def quantize(x: torch.Tensor, format: str) -> bs.BlockScaled:
    return bs.quantize(x, format, scale_layout="plain")


def spans(routing: bs.Routing) -> list[tuple[int, int]]:
    """Rows of each expert."""
    ends = routing.offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def test_messages_may_differ_by_slot():
    """Gradients of rows: each slot of a token has its own."""
    routing = routed(Tokens(1, 6), 1, 3, 2)
    rows = ExpertRows.of(routing, Tokens(1, 6), 1)
    messages, placed = torch.randn(6, 2, 8), PlacedRows(12, 8, None, torch.float32, torch.device("cpu"))
    placed.place(rows.all(), messages)
    values = placed.operand()
    assert isinstance(values, torch.Tensor)
    _, by_slot = routing.permutation
    assert torch.equal(values[by_slot.long()], messages)
