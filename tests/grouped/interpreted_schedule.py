"""Lists of tiles in Triton's interpreter against plain loops; a program, because the interpreter is chosen at import.

    TRITON_INTERPRET=1 python tests/grouped/interpreted_schedule.py

Prints `cases entries mismatches` and the first mismatches.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import accumulate

assert os.environ.get("TRITON_INTERPRET") == "1"
os.environ["BLOCKSCALE_POISON"] = "1"

import torch  # noqa: E402

from blockscale.grouped import _schedule  # noqa: E402
from blockscale.grouped._schedule import group_spans, row_tiles  # noqa: E402

# the interpreter takes long over a scan, and each program makes one: as few as can still divide the work wrongly
_schedule._PROGRAMS, _schedule._CHUNK = 2, 512  # pyright: ignore[reportPrivateUsage]

Entry = tuple[int, int, int, int]


def patterns() -> Iterator[tuple[str, list[int], int]]:
    """Ends of groups, and rows."""
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


def clamped(ends: list[int], rows: int) -> list[tuple[int, int]]:
    """First and end row of every group."""
    most, found = 0, []
    for end in ends:
        first, most = most, max(most, min(end, rows))
        found.append((first, most))
    return found


def tiles(ends: list[int], rows: int, height: int, step: int) -> list[Entry]:
    spans = clamped(ends, rows)
    spans.append((spans[-1][1] if spans else 0, rows))
    found = [
        (row, min(row + height, end), group, max(row, first))
        for group, (first, end) in enumerate(spans)
        for row in range(first // step * step, end, height)
        if first < end
    ]
    return [(len(found), 0, 0, 0), *found]


def spans(ends: list[int]) -> list[Entry]:
    place, found = 0, []
    for group, (first, end) in enumerate(clamped(ends, 2**31 - 256)):
        blocks = -(-(end - first) // 128)
        found.append((group, place, blocks, 0))
        place += blocks
    return sorted(found, key=lambda entry: -entry[2])  # which keeps the order of equal ones


def main() -> int:
    counted = cases = 0
    bad: list[str] = []
    for what, ends, rows in patterns():
        offs = torch.tensor(ends, dtype=torch.int32)
        for height, step in ((64, 4), (192, 4), (128, 1), (128, 128)):
            want, got = tiles(ends, rows, height, step), row_tiles(offs, rows, height, step)
            right = len(want) <= len(got) and got[: len(want)].tolist() == [list(entry) for entry in want]
            cases, counted = cases + 1, counted + len(want)
            bad += [] if right else [f"tiles of {height} rows from multiples of {step}, {what}"]
        want, got = spans(ends), group_spans(offs)
        cases, counted = cases + 1, counted + len(want)
        bad += [] if got.tolist() == [list(entry) for entry in want] else [f"spans, {what}"]
    print(cases, counted, len(bad))
    print("\n".join(bad[:10]))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
