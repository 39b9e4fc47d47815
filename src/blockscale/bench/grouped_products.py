"""Operands of a grouped GEMM in the layouts of all variants, and the SQNR of its result.

m-grouped GEMMs are compared on rows of some groups, including the first, the last, the largest and the smallest;
k-grouped ones on some rows of every group's result. The rest is as for dense GEMMs (`products.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..casts import quantize
from ..formats.tensor import BlockScaled
from ..grouped._reference import exact_grouped
from .harness import random
from .loads import sizes as sizes_of
from .products import Operands, cast_rows, spread, sqnr_db, take, take_rows

# m-grouped: number of compared groups and rows of each; k-grouped: compared rows of every group's result
GROUPS, ROWS_OF_GROUP, ROWS_OF_RESULT = 16, 16, 16
CAPACITY = 8  # capacity of each group, as a multiple of the largest group
MANY = 128


@dataclass(frozen=True, eq=False, kw_only=True)
class Grouped(Operands):
    """Operands with rows in groups.  sizes: on the host.  offs: group ends, on the device.  dtype: of the result."""

    sizes: tuple[int, ...]
    offs: Tensor
    dtype: torch.dtype = torch.bfloat16

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first row, end row) of each group."""
        return list(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))

    @functools.cached_property
    def with_equal_groups(self) -> Grouped:
        """The same rows in equal groups."""
        raise NotImplementedError


class MGrouped(Grouped):
    """Rows x [M, K] and a matrix for each group, w [E, N, K]: the result is [M, N]."""

    @functools.cached_property
    def picks(self) -> list[tuple[int, Tensor]]:
        """Compared groups and the indices of their compared rows."""
        found: list[tuple[int, Tensor]] = []
        for group in pick_groups(self.sizes, GROUPS):
            start, end = self.spans[group]
            found.append((group, start + spread(end - start, ROWS_OF_GROUP, self.x.device)))
        return found

    @functools.cached_property
    def judged(self) -> Tensor:
        return torch.cat([rows for _, rows in self.picks])

    @property
    def how(self) -> str:
        return f"{len(self.judged)} rows of {len(self.picks)} groups"

    @functools.cached_property
    def exact(self) -> Tensor:
        ends = itertools.accumulate(len(rows) for _, rows in self.picks)
        offs = torch.tensor(list(ends), dtype=torch.int32, device=self.x.device)
        groups = torch.tensor([group for group, _ in self.picks], device=self.x.device)
        return exact_grouped(take_rows(self.a, self.judged), _take_matrices(self.b, groups), offs)

    def rowwise_accuracy(self, run: Callable[..., Tensor]) -> float:
        codes_x, scale_x, codes_w, scale_w = self.rowwise
        wanted = [
            (codes_x[rows].double() * scale_x[rows]) @ (codes_w[group].double() * scale_w[group]).mT
            for group, rows in self.picks
        ]
        return sqnr_db(torch.cat(wanted), self.some(run(self)))

    def plain_accuracy(self, run: Callable[..., Tensor]) -> float:
        wanted = [self.x[rows].double() @ self.w[group].double().mT for group, rows in self.picks]
        return sqnr_db(torch.cat(wanted), self.some(run(self)))

    @functools.cached_property
    def with_equal_groups(self) -> Grouped:
        sizes = sizes_of(sum(self.sizes), len(self.sizes))
        return replace(self, sizes=sizes, offs=ends_of(sizes, self.x.device))

    @functools.cached_property
    def with_capacity(self) -> tuple[BlockScaled, Tensor, Tensor, Tensor]:
        """The same rows in groups with spare capacity: operand, group starts, group ends, new index of each row."""
        device, room, groups = self.x.device, CAPACITY * max(self.sizes), len(self.sizes)
        starts = room * torch.arange(groups, dtype=torch.int32, device=device)
        counts = torch.tensor(self.sizes, dtype=torch.int32, device=device)
        rows = torch.cat([torch.arange(size, device=device) + room * group for group, size in enumerate(self.sizes)])
        x = self.x.new_zeros(groups * room, self.x.shape[1])
        x[rows] = self.x
        return quantize(x, self.a.format), starts, starts + counts, rows


class KGrouped(Grouped):
    """Rows x [M, N] and w [M, K], contracted over the rows of each group: the result is [G, N, K]."""

    @functools.cached_property
    def judged(self) -> Tensor:
        return spread(self.x.shape[1], ROWS_OF_RESULT, self.x.device)

    @property
    def how(self) -> str:
        return f"{len(self.judged)} rows of each of {len(self.sizes)} groups"

    def some(self, out: Tensor) -> Tensor:
        return out[:, self.judged]

    def unchanged(self, out: Tensor) -> Tensor:
        # sums over few rows may be exactly zero
        filled = [group for group, size in enumerate(self.sizes) if size >= MANY]
        return out[filled] == 0

    @functools.cached_property
    def exact(self) -> Tensor:
        return exact_grouped(take_rows(self.a, self.judged), self.b, self.offs)

    @functools.cached_property
    def rowwise(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes [N, M] and [K, M], a scale for each row of each group: [G * N] and [G * K]."""
        return *_cast_by_group(self.x, self.spans), *_cast_by_group(self.w, self.spans)

    def rowwise_accuracy(self, run: Callable[..., Tensor]) -> float:
        codes_x, scale_x, codes_w, scale_w = self.rowwise
        x, w = codes_x[self.judged].double(), codes_w.double()
        scales = scale_x.view(len(self.sizes), -1)[:, self.judged], scale_w.view(len(self.sizes), -1)
        wanted = [
            (x[:, start:end] * by_x[:, None]) @ (w[:, start:end] * by_w[:, None]).mT
            for (start, end), by_x, by_w in zip(self.spans, *scales, strict=True)
        ]
        return sqnr_db(torch.stack(wanted), self.some(run(self)))

    def plain_accuracy(self, run: Callable[..., Tensor]) -> float:
        x = self.x[:, self.judged].double()
        wanted = [x[start:end].mT @ self.w[start:end].double() for start, end in self.spans]
        return sqnr_db(torch.stack(wanted), self.some(run(self)))

    @functools.cached_property
    def with_equal_groups(self) -> Grouped:
        sizes = sizes_of(sum(self.sizes), len(self.sizes))
        offs = ends_of(sizes, self.x.device)
        a, b = (_columns(x, q.format, offs) for x, q in ((self.x, self.a), (self.w, self.b)))
        return replace(self, sizes=sizes, offs=offs, a=a, b=b)


def make_m_grouped(
    sizes: tuple[int, ...], n: int, k: int, formats: tuple[str, str], device: torch.device, dtype: torch.dtype
) -> MGrouped:
    """Normal values [M, K] and [E, N, K], and our casts of them."""
    x, w = random((sum(sizes), k), device), random((len(sizes), n, k), device)
    a, b = quantize(x, formats[0]), quantize(w, formats[1])
    return MGrouped(x, w, a, b, sizes=sizes, offs=ends_of(sizes, device), dtype=dtype)


def make_k_grouped(
    sizes: tuple[int, ...],
    n: int,
    k: int,
    formats: tuple[str, str],
    device: torch.device,
    dtype: torch.dtype,
    *,
    accumulate: bool = False,
) -> KGrouped:
    """Normal values [M, N] and [M, K], our casts of them, and an fp32 accumulator if `accumulate`."""
    x, w = random((sum(sizes), n), device), random((sum(sizes), k), device)
    offs = ends_of(sizes, device)
    acc = torch.zeros(len(sizes), n, k, device=device) if accumulate else None
    a, b = (_columns(each, format, offs) for each, format in zip((x, w), formats, strict=True))
    return KGrouped(x, w, a, b, acc, sizes=sizes, offs=offs, dtype=dtype)


def ends_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Group ends as int32 on the device."""
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=device)


def pick_groups(sizes: Sequence[int], most: int) -> list[int]:
    """At most `most` groups that have rows, in order: the largest, the smallest, and others from first to last.

    >>> pick_groups((3, 0, 9, 1, 4, 4), 4)
    [0, 2, 3, 5]
    """
    filled = [group for group, size in enumerate(sizes) if size]
    if len(filled) <= most:
        return filled
    ends = {max(filled, key=sizes.__getitem__), min(filled, key=sizes.__getitem__)}
    others = [group for group in filled if group not in ends]
    chosen = spread(len(others), most - len(ends), torch.device("cpu")).tolist()
    return sorted(ends | {others[index] for index in chosen})


def _take_matrices(operand: BlockScaled, groups: Tensor) -> BlockScaled:
    """Weights of some groups."""
    data, scale = (take(tensor, groups) for tensor in (operand.data, operand.plain_scale()))
    return replace(operand, data=data, scale=scale, scale_layout="plain", shape=(len(groups), *operand.shape[1:]))


def _columns(x: Tensor, format: str, offs: Tensor) -> BlockScaled:
    """Operand of a k-grouped GEMM; blocks do not cross group boundaries."""
    return quantize(x, format, axis=-2, offs=offs).mT


def _cast_by_group(x: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """E4M3 codes of x.mT, and one scale for each of its rows in each group."""
    codes = torch.empty(x.shape[1], x.shape[0], dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.ones(len(spans), x.shape[1], device=x.device)
    for (start, end), scale in zip(spans, scales, strict=True):
        if end > start:
            found, factor = cast_rows(x[start:end].mT)
            codes[:, start:end], scale[:] = found, factor[:, 0]
    return codes, scales.flatten()
