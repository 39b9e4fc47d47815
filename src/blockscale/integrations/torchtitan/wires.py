"""The root of a model's config with options of the wire, which must reach beyond the config of the model.

A trainer calls `update_from_config` of the root with its own config, before it builds and shards the model.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ...errors import refuse
from .dispatch import BlockScaledRoutedExperts
from .gather import use_low_gather


@functools.cache
def wired_class(plain: type[Any]) -> type[Any]:
    """Subclass of a class of models that follows the options of the wire."""

    class Model(plain):
        @dataclass(kw_only=True, slots=True)
        class Config(plain.Config):
            """gather: as for `BlockScaledConverter`."""

            gather: str | None = None

            def update_from_config(self, *, config: Any, **named: Any) -> None:
                plain.Config.update_from_config(self, config=config, **named)
                divides = config.parallelism.expert_parallel_degree > 1
                if divides and any(True for _ in self.traverse(BlockScaledRoutedExperts.Config)):
                    _check_eager(config, "dispatch and expert parallelism", "our dispatchers read numbers of rows")
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
