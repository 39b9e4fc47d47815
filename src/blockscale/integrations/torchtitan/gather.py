"""Low-precision gather in torchtitan: FSDP2 gathers codes of converted weights (`distributed/fsdp.py`).

Weights must be prepared after tensor and expert parallelism have sharded them, and before `fully_shard`. Between the
two every model of torchtitan applies activation checkpointing, to the whole model or to a pipeline stage: the policy
that a model is given here prepares the weights first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from ...distributed.fsdp import gather_low_
from ...errors import refuse


def use_low_gather(spec: ModelSpec) -> None:
    """Let FSDP2 gather codes of the converted weights of a model, in place."""
    if getattr(spec.parallelize_fn, "func", None) is not _parallelize:
        spec.parallelize_fn = functools.partial(_parallelize, spec.parallelize_fn)


def _parallelize(plain: Callable[..., Module], model: Module, *, ac_config: Any, **named: Any) -> Module:
    """Shard a model or a pipeline stage by its own function, with low-precision gather."""
    policy = _GatherFirst(model, ac_config)
    sharded = plain(model, ac_config=policy, **named)
    if not policy.is_done:
        refuse(
            f"gather='low' for {type(model).__name__}",
            "weights are prepared when a model applies activation checkpointing, between tensor parallelism and "
            "FSDP2, and this one never does",
            "call blockscale.distributed.gather_low_(model) in its parallelize function, before fully_shard",
        )
    return sharded


class _GatherFirst:
    """Config and policy of activation checkpointing that prepares the weights of a model first, once."""

    def __init__(self, model: Module, plain: Any) -> None:
        self.model, self.plain = model, plain
        self.is_done = False

    def build(self, **named: Any) -> _GatherFirst:
        if self.plain is not None:
            self.plain = self.plain.build(**named)
        return self

    def apply(self, part: Module) -> None:
        """Prepare the whole model, then apply the policy to a part of it, or to all of it."""
        if not self.is_done:
            report = gather_low_(self.model)
            for line in str(report).splitlines():
                (logger.info if report.formats else logger.warning)(line)
            self.is_done = True
        if self.plain is not None:
            self.plain.apply(part)
