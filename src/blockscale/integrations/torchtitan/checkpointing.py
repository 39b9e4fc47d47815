"""`BlockScaledAC`: selective activation checkpointing that saves the results of our products.

torchtitan's policy saves the results of expensive operators by name and recomputes the rest. Its names are torch's, so
it would save nothing of a converted layer. This policy treats our products as torchtitan treats torch's: it saves every
second dense product, and all grouped ones. Operands of weights and inputs are recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from ...gemm import scaled_mm
from ...grouped import scaled_grouped_mm
from ...library import OPERATORS

# the imports above register them
DENSE, GROUPED = (OPERATORS[each.__name__] for each in (scaled_mm, scaled_grouped_mm))
_TORCH_DENSE = (torch.ops.aten.mm.default, torch.ops.aten.linear.default)
_SAVE, _RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
Policy = Callable[..., CheckpointPolicy]


class BlockScaledAC(SelectiveAC):
    """torchtitan's selective policy, for our products too: `config.activation_checkpoint = BlockScaledAC.Config()`."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """every_second: save every second result of dense products, ours and torch's, and recompute the others, as
        torchtitan does; False saves all."""

        every_second: bool = True

    def get_save_ops(self) -> set[Any]:
        """Operators whose results are saved."""
        return super().get_save_ops() | {DENSE, GROUPED}

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        config = cast("BlockScaledAC.Config", self.config)
        save_ops, narrow = self.get_save_ops(), _shapes_of(module, config.force_recompute_mm_shapes_by_fqns, base_fqn)
        return checkpoint_wrapper(
            module,
            # a new policy for every pass, since it has a counter
            context_fn=lambda: create_selective_checkpoint_contexts(_policy(save_ops, narrow, config.every_second)),
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            early_stop=False,
            debug=config.debug,
        )


def _policy(save_ops: set[Any], narrow: set[tuple[int, int]], every_second: bool) -> Policy:
    """Policy of one pass of a block; forward and recomputation count separately, so that both decide alike."""
    seen: Counter[bool] = Counter()

    def choose(ctx: Any, func: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        # copies to the host, such as group sizes, are saved: recomputing would sync again
        if func is torch.ops.aten._to_copy.default and args[0].is_cuda and str(named.get("device")) == "cpu":
            return _SAVE
        if func in _TORCH_DENSE and _weight_shape(func, args[1]) in narrow:
            return _RECOMPUTE
        if func is DENSE or func in _TORCH_DENSE:
            seen[ctx.is_recompute] += 1
            if every_second and seen[ctx.is_recompute] % 2 == 0:
                return _RECOMPUTE
        return _SAVE if func in save_ops else _RECOMPUTE

    return choose


def _weight_shape(func: Any, weight: torch.Tensor) -> tuple[int, int]:
    """(inputs, outputs) of a weight: aten.mm has it transposed, aten.linear does not."""
    rows, columns = weight.shape
    return (columns, rows) if func is torch.ops.aten.linear.default else (rows, columns)


def _shapes_of(block: nn.Module, fqns: list[str], base: str | None) -> set[tuple[int, int]]:
    """(inputs, outputs) of the named layers; products of these sizes are cheap and recomputed."""
    found: set[tuple[int, int]] = set()
    for name, module in block.named_modules():
        if any(fqn in f"{base}.{name}" for fqn in fqns) and isinstance(module, nn.Linear):
            found.add((module.weight.shape[1], module.weight.shape[0]))
    return found
