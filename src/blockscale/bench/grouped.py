"""A grouped GEMM to time: operands in the layouts of all variants, the SQNR of its result, and peers.

m-grouped GEMMs are compared on rows of some groups, including the first, the last, the largest and the smallest;
k-grouped ones on some rows of every group's result. The rest is as for dense GEMMs (`gemms.py`).

Peers are our other kernels, torch's grouped GEMMs in bf16 and rowwise FP8, and ours with equal groups. torch checks
group sizes on the device and aborts the program at an unsupported one, so such a peer is not started.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ..casts import quantize
from ..formats.tensor import BlockScaled
from ..grouped import scaled_grouped_mm
from ..grouped._reference import exact_grouped
from ..registry import Request
from .gemms import FAST, Operands, cast_rows, gate_db, other_kernels, spread, take, take_rows
from .harness import Peer, random
from .shapes import group_sizes

# m-grouped: number of compared groups and rows of each; k-grouped: compared rows of every group's result
GROUPS, ROWS_OF_GROUP, ROWS_OF_RESULT = 16, 16, 16
MANY = 128
BALANCED = "balanced"
# row multiple of a group in torch's k-grouped FP8 GEMM: 16 bytes
_ALIGNED = 16


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
        """The same rows in equal groups. Blocks of a k-grouped operand end with its groups, so it is cast again."""
        sizes = group_sizes(sum(self.sizes), len(self.sizes))
        offs = ends_of(sizes, self.x.device)
        a, b = self.a, self.b
        if isinstance(self, KGrouped):
            a, b = (_columns(x, q.format, offs) for x, q in ((self.x, a), (self.w, b)))
        return replace(self, sizes=sizes, offs=offs, a=a, b=b)


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

    def compared(self, x: Tensor, scale_x: Tensor, w: Tensor, scale_w: Tensor) -> Tensor:
        products = [
            (x[rows].double() * scale_x[rows]) @ (w[group].double() * scale_w[group]).mT for group, rows in self.picks
        ]
        return torch.cat(products)


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

    @property
    def unscaled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ones = (torch.ones(len(self.sizes) * each.shape[1], device=each.device) for each in (self.x, self.w))
        return self.x.mT, next(ones), self.w.mT, next(ones)

    def compared(self, x: Tensor, scale_x: Tensor, w: Tensor, scale_w: Tensor) -> Tensor:
        x, groups = x[self.judged].double(), len(self.sizes)
        scales = scale_x.view(groups, -1)[:, self.judged], scale_w.view(groups, -1)
        products = [
            (x[:, start:end] * by_x[:, None]) @ (w[:, start:end].double() * by_w[:, None]).mT
            for (start, end), by_x, by_w in zip(self.spans, *scales, strict=True)
        ]
        return torch.stack(products)


def make_m_grouped(
    sizes: tuple[int, ...], n: int, k: int, formats: tuple[str, str], device: torch.device, dtype: torch.dtype
) -> MGrouped:
    """Normal values [M, K] and [E, N, K], and our casts of them."""
    x, w = random((sum(sizes), k), device), random((len(sizes), n, k), device)
    a, b = quantize(x, formats[0]), quantize(w, formats[1])
    return MGrouped(x, w, a, b, sizes=sizes, offs=ends_of(sizes, device), dtype=dtype)


def make_k_grouped(
    sizes: tuple[int, ...], n: int, k: int, formats: tuple[str, str], device: torch.device, dtype: torch.dtype,
    *, accumulate: bool = False,
) -> KGrouped:  # fmt: skip
    """Normal values [M, N] and [M, K], our casts of them, and an fp32 accumulator if `accumulate`."""
    x, w, offs = random((sum(sizes), n), device), random((sum(sizes), k), device), ends_of(sizes, device)
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


# ---- peers -----------------------------------------------------------------------------------------------------------


def multiply(operands: Grouped) -> Tensor:
    """Our grouped GEMM, by the kernel that the registry selects."""
    return scaled_grouped_mm(operands.a, operands.b, operands.offs, operands.dtype, accumulate=operands.acc)


def peers(request: Request, sizes: Sequence[int], *, even: bool) -> dict[str, Peer | str]:
    """Peers of a grouped GEMM, with ours in equal groups.  even: groups are equal already."""
    found, gate = other_kernels(request, multiply), gate_db(request.formats[0], request.dtype)
    if not even:
        found[BALANCED] = equal_groups_peer(gate)
    found["bf16"] = Peer(plain, accuracy=lambda operands: operands.plain_accuracy(plain))
    if request.op == "k_grouped" and any(size % _ALIGNED for size in sizes):
        found[FAST] = f"not run: takes groups in multiples of {_ALIGNED} rows only"
    else:
        found[FAST] = Peer(rowwise, accuracy=lambda operands: operands.rowwise_accuracy(rowwise))
    return found


def equal_groups_peer(gate: float) -> Peer:
    """Our GEMM with the same rows and FLOPs in equal groups."""
    return Peer(
        lambda o: multiply(o.with_equal_groups),
        gate_db=gate,
        accuracy=lambda o: o.with_equal_groups.accuracy(multiply),
    )


def plain(operands: Grouped) -> Tensor:
    """Grouped GEMM of the bf16 matrices; on a CPU of their values in fp32, as `gemms.plain`."""
    x, w = operands.x, operands.w
    if not x.is_cuda:
        x, w = x.float(), w.float()
    a, b = (x.mT, w) if isinstance(operands, KGrouped) else (x, w.mT)
    return functional.grouped_mm(a, b, offs=operands.offs)


def rowwise(operands: Grouped) -> Tensor:
    """Grouped FP8 GEMM with one scale per row of each group and fast accumulation."""
    x, scale_x, w, scale_w = operands.rowwise
    if not isinstance(operands, KGrouped):
        scale_x, scale_w = scale_x[:, 0], scale_w[:, :, 0]
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]
        x, w.mT, scale_x, scale_w, offs=operands.offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )
