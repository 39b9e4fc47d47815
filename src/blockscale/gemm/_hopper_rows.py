"""The Gluon product for few rows as a row of the table, for few tokens by large weights: descriptors and the launch."""

# pyright: basic, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..casts._launch import start
from ..formats.tensor import BlockScaled
from ..hardware import multiprocessors
from ..registry import Request, kernel
from . import _assembly
from ._gluon import gl
from ._hopper import descriptor, workspace_for
from ._hopper_rows_kernel import few_rows_kernel
from .heuristics import MOST_ROWS, Plan, Problem, choose_few_rows, scales_of
from .ops import reject_fp8_of_hopper


def _reject(request: Request) -> str | None:
    if request.shape[0] > MOST_ROWS:
        return f"takes at most {MOST_ROWS} rows, these are {request.shape[0]}"
    return reject_fp8_of_hopper(request)


@kernel(
    "gemm",
    "hopper_rows",
    sm=(90, 90),
    formats=[("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")],
    layouts={"fp8_1x128": "mn_major", "fp8_128x128": "grid"},
    priority=26,
    reject=_reject,
    by_demand=True,  # it has never run
)
def scaled_mm(a: BlockScaled, b: BlockScaled, out: Tensor, *, bias: Tensor | None, accumulate: bool) -> None:
    """Gluon: FP8 product of few rows, weights as the tall side"""
    wide = out.dtype == torch.float32
    problem = Problem(a.rows, b.rows, a.length, not b.spec.is_2d, wide, multiprocessors(out.device), accumulate)
    plan, _ = choose_few_rows(problem)
    launch(a, b, out, bias, accumulate=accumulate, plan=plan)


def launch(a: BlockScaled, b: BlockScaled, out: Tensor, bias: Tensor | None, *, accumulate: bool, plan: Plan) -> None:
    """The product by one plan."""
    tile, vector = plan.tile, not b.spec.is_2d
    m, n, k = a.rows, b.rows, a.length
    a_scale, b_scale = a.scale.mT, b.scale.mT if vector else b.scale
    rows = tile.bm // tile.loads
    weights, tokens, scales = _layouts(rows, tile.bn)
    _assembly.launch(functools.partial(
        start(few_rows_kernel, (plan.programs,), out),
        descriptor(b.data[:, :k], (rows, 128), weights),
        descriptor(a.data[:, :k], (tile.bn, 128), tokens),
        descriptor(b_scale if vector else a_scale, (1, tile.span), scales),
        descriptor(a_scale, (1, scales_of(tile.bn)), scales),
        out, b_scale, None if bias is None else bias.contiguous(),
        workspace_for(plan, out.device) if plan.shared else out,
        m, n, k, b_scale.stride(0), *out.stride(), plan.rounds,
        tile, vector, bias is not None, accumulate, plan.shared, num_warps=4,
        enable_fp_fusion=True,  # of the scaled sums: the contract's fused multiply-add
    ))  # fmt: skip


@functools.lru_cache(maxsize=16)
def _layouts(rows: int, tokens: int) -> tuple[object, ...]:
    """Of tiles of weights, tokens and scales in shared memory."""
    shared = gl.NVMMASharedLayout
    return (
        shared.get_default_for([rows, 128], gl.float8e4nv),
        shared.get_default_for([tokens, 128], gl.float8e4nv),
        shared(swizzle_byte_width=0, element_bitwidth=32, rank=2),
    )
