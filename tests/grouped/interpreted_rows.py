"""Permute and combine in Triton's interpreter against the reference; a script, because the variable must come first.

    TRITON_INTERPRET=1 python tests/grouped/interpreted_rows.py

Prints `cases values mismatches`. All but dot products are compared bitwise, those within fp32 rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import blockscale as bs
from blockscale.grouped import routing as moves

SIZES = [(1, 1, 1), (5, 17, 2), (33, 264, 3), (7, 1500, 8)]
OPERATIONS = ("permute_rows", "combine_rows", "combine_dots", "clear_rows", "place_rows")


def comparisons() -> Iterator[tuple[int, int]]:
    """(values compared, mismatches)."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    for (tokens, columns, k), dtype in itertools.product(SIZES, (torch.bfloat16, torch.float16, torch.float32)):
        generator = torch.Generator().manual_seed(tokens)
        experts = torch.rand(tokens, 9, generator=generator).topk(k).indices
        routing = bs.sort_by_expert(experts.to(where), 9)
        x = torch.randn(tokens, 2 * columns, generator=generator).to(where, dtype)[:, :columns]
        y = torch.randn(tokens * k, columns, generator=generator).to(where, dtype)
        y[0], x[0] = -0.0, 0.0
        for gate_weights in (None, torch.rand(tokens, k, generator=generator).to(where)):
            found: list[list[Tensor]] = []
            for backend in ("triton", "reference"):
                with bs.use_backend(**dict.fromkeys(OPERATIONS, backend)):
                    permuted = moves.permute_rows(x, routing.tokens, routing.rows, gate_weights)
                    combined = moves.combine_rows(y, routing.rows, gate_weights)
                    cleared = y.clone()
                    moves.clear_rows(cleared, routing.offs // 2)
                    wide = torch.zeros(tokens * k, 2 * columns, dtype=dtype, device=where)
                    placed, turned = wide[:, columns:], torch.zeros(columns, tokens * k, dtype=dtype, device=where).mT
                    moves.place_rows(x, routing.rows, placed)
                    moves.place_rows(y.view(tokens, k, columns), routing.rows, turned)
                    results = [permuted, combined, cleared, wide, turned.contiguous()]
                    found.append([*results, moves.combine_dots(y, x, routing.rows)])
            *bits, dots = zip(*found, strict=True)
            for got, want in bits:
                words = [each.view(torch.int16 if dtype.itemsize == 2 else torch.int32) for each in (got, want)]
                yield got.numel(), int((words[0] != words[1]).sum())
            close = torch.isclose(*dots, rtol=1e-5, atol=1e-5 * columns**0.5)
            yield dots[0].numel(), int((~close).sum())


def main() -> int:
    found = list(comparisons())
    print(len(found), sum(count for count, _ in found), sum(wrong for _, wrong in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
