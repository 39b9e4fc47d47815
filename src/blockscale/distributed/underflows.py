"""Count of values that become zero when columns are cast from gathered rows (`wgrad="requantized"`)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

from ..casts import requantize
from ..formats.tensor import BlockScaled


class Underflows:
    """Values that were not zero in gathered rows and are zero in the columns cast from them.

    lost: their number, int64, on the device of the operands.  values: number of values cast.
    """

    def __init__(self) -> None:
        self.lost = torch.zeros((), dtype=torch.int64)
        self.values = 0

    def add(self, rows: BlockScaled, columns: BlockScaled, offs: Tensor | None) -> None:
        """Count one cast.  offs: ends of groups, as for the cast."""
        lost = requantize.count_underflows(rows, columns, offs)
        self.lost = self.lost.to(lost.device) + lost
        self.values += rows.shape[0] * rows.shape[1]

    def __str__(self) -> str:
        share = f" ({int(self.lost) / self.values:.2%})" if self.values else ""
        return f"{int(self.lost)} of {self.values} values underflow{share}"


_counting: list[Underflows] = []


@contextlib.contextmanager
def count_underflows() -> Generator[Underflows]:
    """Count the underflows of all requantized columns of eager layers inside the block, on this rank. It decodes rows
    and columns once more, so use it for single steps.

    >>> with count_underflows() as found:
    ...     pass
    >>> print(found)
    0 of 0 values underflow
    """
    found = Underflows()
    _counting.append(found)
    try:
        yield found
    finally:
        _counting.remove(found)


def record(rows: BlockScaled, columns: BlockScaled, offs: Tensor | None) -> None:
    """Add a cast to the counts that are open; compiled code counts nothing."""
    if torch.compiler.is_compiling():
        return
    for each in _counting:
        each.add(rows, columns, offs)
