"""The root of a model's config with options of the wire, which must reach beyond the config of the model.

A trainer calls `update_from_config` of the root with its own config, before it builds and shards the model.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ...distributed.overlap.choice import Overlap
from ...errors import refuse
from .dispatch import BlockScaledRoutedExperts
from .gather import use_low_gather
from .tensor_parallel import use_low_tensor_parallel


@functools.cache
def wired_class(plain: type[Any]) -> type[Any]:
    """Subclass of a class of models that follows the options of the wire."""

    class Model(plain):
        @dataclass(kw_only=True, slots=True)
        class Config(plain.Config):
            """gather, tensor_parallel, overlap: as for `BlockScaledConverter`."""

            gather: str | None = None
            tensor_parallel: str | None = None
            overlap: Overlap = "auto"

            def update_from_config(self, *, config: Any, **named: Any) -> None:
                plain.Config.update_from_config(self, config=config, **named)
                divides = config.parallelism.expert_parallel_degree > 1
                if divides and any(True for _ in self.traverse(BlockScaledRoutedExperts.Config)):
                    _check_eager(config, "dispatch and expert parallelism", "our dispatchers read numbers of rows")
                parallelism = config.parallelism
                if self.tensor_parallel is not None and parallelism.tensor_parallel_degree > 1:
                    _check_eager(
                        config, "tensor_parallel='low'", "torch 2.13 does not trace the gather that layers share"
                    )
                    _check_backend(parallelism.spmd_backend)
                    use_low_tensor_parallel(self, self.overlap, sequence_parallel=parallelism.enable_sequence_parallel)
                if self.gather is not None:
                    _check_eager(config, "gather='low'", "torch 2.13 cannot partition a graph of gathered codes")
                    use_low_gather(config.model_spec)

    Model.__name__ = Model.__qualname__ = plain.__name__
    return Model


def _check_eager(config: Any, what: str, why: str) -> None:
    """Raise if blocks would be compiled."""
    if config.compile.enable and "model" in config.compile.components:
        refuse(
            f"compiled blocks with {what}",
            f"torchtitan compiles blocks as one graph, and {why}",
            "compile the loss alone (--compile.components loss), or leave the option out",
        )


def _check_backend(backend: str) -> None:
    """Raise unless activations are DTensors of tensor parallel ranks alone."""
    if backend != "partial_dtensor":
        refuse(
            f"tensor_parallel='low' with spmd_backend {backend!r}",
            "layers that communicate themselves take shards of one dimension",
            "use --parallelism.spmd-backend partial_dtensor",
        )
