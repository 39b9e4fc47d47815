"""What tests of grouped kernels share: groups of every kind, and what a result must be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.diagnostics.quality import sqnr_db
from support.products import HOPPER_DB, check_frame, framed, gaussian

# sizes of groups, and rows of no group behind them
GROUPS: dict[str, tuple[list[int], int]] = {
    "all but one empty": ([0, 0, 517, 0], 0),
    "alternating": ([0, 130, 0, 64, 0, 65, 0], 3),
    "whole tiles": ([256, 192, 64, 128, 384], 0),
    "ascending": ([1, 5, 63, 70, 200, 300], 70),
    "descending": ([300, 200, 70, 63, 5, 1], 300),
    "all empty": ([0, 0, 0], 77),
    "one group": ([301], 0),
}


# rows of each expert, and the room that each has
CAPACITIES: dict[str, tuple[list[int], int]] = {
    "all empty but one": ([0, 0, 37, 0], 64),
    "alternating": ([0, 130, 0, 64, 0, 65, 0], 131),
    "full": ([128, 128, 128], 128),
    "full, and no multiple of a tile": ([77, 77, 77], 77),
    "a row less than full": ([63, 127, 1], 128),
    "one row each": ([1] * 24, 5),
    "one expert": ([33], 70),
    "no rows": ([0, 0, 0], 40),
}


@dataclass(frozen=True)
class Room:
    """The same rows twice in [rows, K]: `placed`, each expert's from a multiple of the capacity on, and `packed`, one
    after another; what lies between and behind is something else."""

    placed: Tensor
    packed: Tensor
    starts: Tensor
    counts: Tensor

    @property
    def ends(self) -> Tensor:
        return self.starts + self.counts

    @property
    def packed_ends(self) -> Tensor:
        return self.counts.cumsum(0).to(torch.int32)

    @property
    def inside(self) -> Tensor:
        """Which rows of `placed` count; as many as the first of `packed`, in that order."""
        row = torch.arange(self.placed.shape[0], device=self.placed.device)[:, None]
        return ((row >= self.starts) & (row < self.ends)).any(1)


def room(counts: list[int], capacity: int, k: int, device: torch.device | str = "cpu", seed: int = 1) -> Room:
    total = len(counts) * capacity
    starts, sizes = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in (range(0, total, capacity), counts)
    )
    made = Room(gaussian(total, k, device=device, seed=seed), gaussian(total, k, device=device, seed=2), starts, sizes)
    made.packed[: sum(counts)] = made.placed[made.inside]
    return made


def is_right(got: Tensor, want: Tensor) -> bool:
    """By the gate of the contract; where nothing is summed it must be zero. One row that is wrong fails it: each is at
    least a thousandth of all, and 77 and 50 dB are less."""
    if want.count_nonzero() == 0:
        return bool((got == 0).all())
    inside = (want != 0).any(-1)  # rows of no group, and matrices of groups without tokens
    return bool((got[~inside] == 0).all()) and sqnr_db(want, got).item() > HOPPER_DB[got.dtype]


def with_bias(want: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Rows of each group with its own."""
    want = want.clone()
    for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        want[start:end] += bias[group].double()
    return want


def twice(launch: Callable[[Tensor], None], rows: int, n: int, dtype: torch.dtype, before: Tensor | None) -> Tensor:
    """The result in a frame of sentinels that nothing but the result has touched; twice, for the same bytes."""
    results: list[Tensor] = []
    for _ in range(2):
        frame, out = framed(rows, n, dtype)
        if before is not None:
            out.copy_(before)
        launch(out)
        check_frame(frame, rows, n)
        results.append(out)
    assert torch.equal(*results)
    return results[0]
