"""Collectives of operands: codes and scales travel as bytes, and sums in the dtype of the result.

Every collective is started first and waited for later, so that casts and products may run beside it. They are the
operators of `torch.distributed._functional_collectives`: eager and compiled layers share one path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # pyright: ignore[reportUnusedImport]  # defines the operators
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from ..errors import ShardingError, refuse
from ..formats.checks import in_words
from ..formats.layout import CODE_ROW_BYTES, shorten
from ..formats.tensor import BlockScaled

_OPS = torch.ops._c10d_functional


class Ranks(NamedTuple):
    """The ranks that share a layer.  name: of their process group.  rank: of this process among them."""

    name: str
    rank: int
    size: int


def ranks_of(group: dist.ProcessGroup | DeviceMesh) -> Ranks:
    """The ranks of a process group, or of a mesh of one dimension."""
    found: object = group
    if isinstance(found, DeviceMesh):
        if found.ndim != 1:
            refuse(
                f"group is a mesh of {found.ndim} dimensions {found.mesh_dim_names or ''}".rstrip(),
                rule="a layer is shared by the ranks of one dimension",
                fix='pass that dimension, such as mesh["tp"]',
                error=ShardingError,
            )
        group = found.get_group()
    elif not isinstance(found, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        rule = "a layer is shared by the ranks of a process group"
        refuse(f"group is {in_words(found)}", rule, fix='pass a ProcessGroup, or mesh["tp"]', error=ShardingError)
    assert isinstance(group, dist.ProcessGroup)
    return Ranks(group.group_name, dist.get_rank(group), group.size())


class Tokens(NamedTuple):
    """Where a rank's tokens lie among all: `outer` runs of `inner` tokens, between which lie those of the other ranks.
    A rank that has a run of the first axis has outer = 1: its tokens are contiguous."""

    outer: int
    inner: int


class PendingValues(NamedTuple):
    """Rows [M, N] that are being gathered."""

    values: Tensor
    tokens: Tokens
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """The rows of all ranks."""
        return _rows_in_order(_OPS.wait_tensor(self.values), self.tokens).view(self.dtype)


class PendingOperand(NamedTuple):
    """An operand whose tokens are being gathered.  codes, scales: bytes of all ranks, one after the other.  piece: of
    this rank, with its scaled axis last.  along: whether tokens lie along the scaled axis."""

    codes: Tensor
    scales: Tensor
    piece: BlockScaled
    tokens: Tokens
    along: bool
    ranks: int

    def wait(self, layout: str) -> BlockScaled:
        """The operand of all tokens, its scaled axis last and its scales in this layout."""
        q, (rows, length), width = self.piece, self.piece.shape, self.piece.data.shape[-1]
        codes, scales = _OPS.wait_tensor(self.codes), _OPS.wait_tensor(self.scales)
        if self.along:
            codes, scales = (_columns_in_order(each, rows, self.tokens) for each in (codes, scales))
            length, width = length * self.ranks, width * self.ranks
        else:
            codes, scales = (_rows_in_order(each, self.tokens) for each in (codes, scales))
            rows *= self.ranks
        data, scale = shorten(codes, width).view(q.spec.data_dtype), scales.view(q.spec.scale_dtype)
        return replace(q, data=data, scale=scale, shape=(rows, length)).with_layout(layout)


def gather_values(x: Tensor, tokens: Tokens, ranks: Ranks) -> PendingValues:
    """Start to gather rows [M, N] in their own dtype: of products that are unquantized."""
    (values,) = _gather([x.contiguous().view(torch.uint8)], ranks)
    return PendingValues(values, tokens, x.dtype)


def gather_operand(piece: BlockScaled, tokens: Tokens, ranks: Ranks, *, along: bool) -> PendingOperand:
    """Start to gather the tokens of a rank-2 operand with its scaled axis last and plain scales, in one message.

    along: whether tokens lie along the scaled axis, of which every rank then has whole blocks, or are its rows.
    """
    codes, scales = piece.data.view(torch.uint8), piece.scale.view(torch.uint8)
    codes, scales = _gather([padded_codes(codes), scales], ranks)
    return PendingOperand(codes, scales, piece, tokens, along, ranks.size)


def padded_codes(codes: Tensor) -> Tensor:
    """Rows of codes as they lie in memory: a multiple of 16 bytes each."""
    missing = -codes.shape[-1] % CODE_ROW_BYTES
    return pad(codes, (0, missing)) if missing else codes


def _gather(tensors: list[Tensor], ranks: Ranks) -> list[Tensor]:
    return _OPS.all_gather_into_tensor_coalesced(tensors, ranks.size, ranks.name)


def _rows_in_order(x: Tensor, tokens: Tokens) -> Tensor:
    """[ranks * outer * inner, bytes] -> [outer * ranks * inner, bytes]; nothing moves if a rank has one run."""
    if tokens.outer == 1:
        return x
    return x.view(-1, *tokens, x.shape[-1]).transpose(0, 1).reshape(x.shape)


def _columns_in_order(x: Tensor, features: int, tokens: Tokens) -> Tensor:
    """[ranks * features, bytes of a rank's tokens] -> [features, bytes of all tokens]: pieces side by side."""
    runs = x.view(-1, features, tokens.outer, x.shape[-1] // tokens.outer)
    return runs.permute(1, 2, 0, 3).reshape(features, -1)


def reduce_scatter(y: Tensor, tokens: Tokens, ranks: Ranks) -> Tensor:
    """Start to sum partial results [M, N] of all tokens over the ranks, in their dtype: this rank's tokens, to be
    waited for."""
    if tokens.outer > 1:
        parts = y.view(tokens.outer, ranks.size, tokens.inner, y.shape[-1])
        y = parts.transpose(0, 1).reshape(y.shape)
    return _OPS.reduce_scatter_tensor(y.contiguous(), "sum", ranks.size, ranks.name)


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Start to sum a tensor over the ranks; to be waited for."""
    return _OPS.all_reduce(x, "sum", ranks.name)


def wait(x: Tensor) -> Tensor:
    """The result of a collective that was started."""
    return _OPS.wait_tensor(x)
