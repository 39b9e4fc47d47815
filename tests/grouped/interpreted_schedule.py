"""Tile lists in Triton's interpreter against plain loops; a script, because the interpreter is chosen at import.

    TRITON_INTERPRET=1 python tests/grouped/interpreted_schedule.py

Prints `cases entries mismatches` and the first mismatches.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

assert os.environ.get("TRITON_INTERPRET") == "1"
os.environ["BLOCKSCALE_POISON"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from blockscale.grouped import _schedule  # noqa: E402
from blockscale.grouped._schedule import group_spans, row_tiles  # noqa: E402
from support.grouped_kernels import CAPACITIES  # noqa: E402

# each program runs a scan, which is slow in the interpreter: the fewest programs that still split the work
_schedule._PROGRAMS, _schedule._CHUNK = 2, 512  # pyright: ignore[reportPrivateUsage]

Entry = tuple[int, int, int, int]


def patterns() -> Iterator[tuple[str, list[int], int]]:
    """(name, end offsets of the groups, rows)."""
    draw = random.Random(5)

    def ends(sizes: list[int]) -> list[int]:
        return list(accumulate(sizes))

    yield "all empty", [0] * 5, 300
    yield "all empty, no rows", [0] * 5, 0
    yield "no groups", [], 130
    yield "one group", [257], 257
    yield "all but one empty", ends([0, 0, 517, 0]), 517
    yield "alternating", ends([0, 130, 0, 64, 0, 65, 0]), 300
    yield "1 to 130", ends(list(range(1, 131))), sum(range(1, 131)) + 7
    yield "one of many has all", ends([0] * 30 + [4000] + [0] * 33), 4000
    yield "ascending", ends([5, 70, 200, 300]), 575
    yield "descending", ends([300, 200, 70, 5]), 575
    yield "1024 groups", ends([draw.choice((0, 1, 16, 63, 64, 65)) for _ in range(1024)]), 65_000
    yield "past the rows", [100, 900, 950], 640
    yield "all past the rows", [700, 700], 640
    yield "descending ends", [300, 100, 400, 50, 500], 600
    yield "negative ends", [-5, 100, -7, 130], 200
    for number in range(8):
        sizes = [draw.randint(0, draw.choice((3, 400))) for _ in range(draw.randint(1, 40))]
        yield f"drawn {number}", ends(sizes), sum(sizes) + draw.choice((0, 1, 500))


def patterns_with_starts() -> Iterator[tuple[str, list[int], list[int], int]]:
    """(name, starts, end offsets of the groups, rows)."""
    draw = random.Random(6)

    def with_capacity(counts: list[int], capacity: int) -> tuple[list[int], list[int], int]:
        starts = [capacity * group for group in range(len(counts))]
        return starts, [start + count for start, count in zip(starts, counts, strict=True)], capacity * len(counts)

    for name, (counts, capacity) in CAPACITIES.items():
        yield name, *with_capacity(counts, capacity)
    yield "1024 groups", *with_capacity([draw.randint(0, 61) for _ in range(1024)], 61)
    yield "no groups", [], [], 130
    yield "starts within the group before", [0, 50, 90], [100, 120, 200], 300
    yield "starts behind ends", [90, 30, 200], [50, 100, 150], 300
    yield "negative starts", [-5, -100, 130], [20, 100, 160], 200
    yield "past the rows", [0, 600, 900, -(2**31)], [100, 2**31 - 1, 950, 640], 640
    yield "descending", [200, 100, 0], [300, 150, 50], 400
    for number in range(8):
        bounds = sorted(draw.randint(0, 2000) for _ in range(2 * draw.randint(1, 20)))
        yield f"drawn {number}", bounds[::2], bounds[1::2], 2000


def clamped(ends: list[int], rows: int, starts: list[int] | None = None) -> list[tuple[int, int]]:
    """(first, end) row of every group, clamped as `_schedule.py` does."""
    last, found = 0, []
    for group, end in enumerate(ends):
        first, last = last, max(last, min(end, rows))
        if starts is not None:
            first = max(first, min(starts[group], rows))
        found.append((first, last))
    return found


def tiles(ends: list[int], rows: int, bm: int, align: int, starts: list[int] | None = None) -> list[Entry]:
    spans = clamped(ends, rows, starts)
    if starts is None:
        spans.append((spans[-1][1] if spans else 0, rows))
    found = [
        (row, min(row + bm, end), group, max(row, first))
        for group, (first, end) in enumerate(spans)
        for row in range(first // align * align, end, bm)
        if first < end
    ]
    written = [row for _, end, _, begin in found for row in range(begin, end)]
    assert len(written) == len(set(written)), "a row in two tiles"
    assert set(written) <= set(range(rows)), "a row outside"
    return [(len(found), 0, 0, 0), *found]


def spans(ends: list[int]) -> list[Entry]:
    block, found = 0, []
    for group, (first, end) in enumerate(clamped(ends, 2**31 - 256)):
        blocks = -(-(end - first) // 128)
        found.append((group, block, blocks, 0))
        block += blocks
    return sorted(found, key=lambda entry: -entry[2])  # stable: groups of equal size stay in order


def main() -> int:
    counted = cases = 0
    bad: list[str] = []
    every = [(what, None, ends, rows) for what, ends, rows in patterns()]
    for what, starts, ends, rows in [*every, *patterns_with_starts()]:
        offs = torch.tensor(ends, dtype=torch.int32)
        first = None if starts is None else torch.tensor(starts, dtype=torch.int32)
        for bm, align in ((64, 4), (192, 4), (128, 1), (128, 128)):
            want, got = tiles(ends, rows, bm, align, starts), row_tiles(offs, rows, bm, align, first)
            right = len(want) <= len(got) and got[: len(want)].tolist() == [list(entry) for entry in want]
            cases, counted = cases + 1, counted + len(want)
            bad += [] if right else [f"tiles of {bm} rows aligned to {align}, {what}"]
    for what, _, ends, _ in every:
        offs = torch.tensor(ends, dtype=torch.int32)
        want, got = spans(ends), group_spans(offs)
        cases, counted = cases + 1, counted + len(want)
        bad += [] if got.tolist() == [list(entry) for entry in want] else [f"spans, {what}"]
    print(cases, counted, len(bad))
    print("\n".join(bad[:10]))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
