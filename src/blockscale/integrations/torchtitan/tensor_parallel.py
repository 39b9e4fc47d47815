"""Tensor parallelism that casts before it gathers, in torchtitan: attention and feed-forward take sequence shards.

torchtitan gathers the tokens of a block in 16 bits, at the boundary of attention and of feed-forward, and sums parts
after them. Here the boundary keeps the sequence sharded. The linear layers inside gather codes and send partial sums
themselves, as `column_parallel` and `row_parallel`, which may run beside their products (`overlap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
from torchtitan.models.common.decoder_sharding import dense_sequence_parallel_placement
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.logging import logger

from ...distributed.overlap.choice import Overlap
from ...errors import ShardingError, refuse
from .linear import BlockScaledLinear


def use_low_tensor_parallel(model_config: Any, overlap: Overlap, *, sequence_parallel: bool) -> None:
    """Let the layers of a model's config communicate themselves, in place; torchtitan has set its shardings already."""
    if not sequence_parallel:
        refuse(
            "tensor_parallel='low' without sequence parallelism",
            "what is gathered as codes are the tokens of sequence shards",
            "leave --parallelism.enable-sequence-parallel on, or leave tensor_parallel out",
        )
    found, kept = 0, list[str]()
    for kind, argument in ((GQAttention, "x_BLD"), (FeedForward, "x")):
        for fqn, config, *_ in model_config.traverse(kind.Config):
            reason = _reason_against(config, argument)
            if reason is not None:
                kept.append(f"{fqn}: {reason}")
                continue
            inputs = {argument: config.sharding_config.in_src_shardings[argument]}
            config.sharding_config = ShardingConfig(in_src_shardings=inputs)
            columns, row = _layers(config)
            for layer in columns:
                layer.cut, layer.overlap = "column", overlap
            row.cut, row.overlap = "row", overlap
            row.sharding_config = ShardingConfig(state_shardings=row.sharding_config.state_shardings)
            found += 1
    if not found:
        refuse(
            f"tensor_parallel='low' for a model in which no block can take it: {'; '.join(kept) or 'it has none'}",
            "it is for attention (GQA) and feed-forward whose linear layers all have the recipe",
            "convert all layers of these blocks, or leave tensor_parallel out",
            error=ShardingError,
        )
    logger.info(f"{found} blocks gather codes of their tokens under tensor parallelism, {len(kept)} in 16 bits")
    for line in kept:
        logger.warning(f"  in 16 bits: {line}")


def _layers(config: Any) -> tuple[Sequence[Any], Any]:
    """Configs of the layers whose outputs are cut, and of the one whose inputs are."""
    if isinstance(config, FeedForward.Config):
        return (config.w1, config.w3), config.w2
    qkv = config.qkv_linear
    return ((qkv.wqkv,) if isinstance(qkv, FusedQKVLinear.Config) else (qkv.wq, qkv.wkv)), config.wo


def _reason_against(config: Any, argument: str) -> str | None:
    """Why the layers of a block cannot communicate themselves; None if they can."""
    if (owner := _class_of(config)) not in (FeedForward, GQAttention):
        return f"a {owner.__name__}, which may use its input elsewhere"
    if owner is GQAttention and (qkv := _class_of(config.qkv_linear)) not in (FusedQKVLinear, QKVLinear):
        return f"a {qkv.__name__}"
    columns, row = _layers(config)
    if any(_class_of(each) is not BlockScaledLinear for each in (*columns, row)):
        return "layers without the recipe"
    sharding = config.sharding_config
    if sharding is None or (sharding.in_src_shardings or {}).get(argument) != dense_sequence_parallel_placement():
        return "tokens that are not sharded along the sequence"
    return None


def _class_of(config: Any) -> Any:
    """The class that a config builds."""
    return type(config)._owner
