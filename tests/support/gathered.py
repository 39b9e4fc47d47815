"""The work of one rank in tests/distributed/test_gather_low.py: the cases of FSDP2 that gathers codes, and the program.

In a module of its own because a spawned process imports it by name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from support.fully_sharded import THOROUGH, adamw
from support.gathered_checkpoints import other_world_sizes
from support.gathered_experts import beside_plain_fsdp, expert_cases
from support.gathered_parallel import parallel_cases
from support.gathered_state import cached_state, checkpoints, dropped, evaluated, refusals, reports, written_elsewhere
from support.gathered_training import (
    against_one_process,
    against_plain_fsdp,
    mixed,
    root_alone,
    second_dimension,
    sharded_one_by_one,
    stepped_on_one_rank,
    wire,
    without_exchange,
)
from support.rank_program import Case, main, run_cases


def label_of(options: dict[str, Any]) -> str:
    return " ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in options.items())


def bits(**options: Any) -> Case:
    """Three steps; two of those that have two microbatches, unless --all."""
    steps = 3 if THOROUGH or "microbatches" not in options else 2
    return label_of(options), functools.partial(against_one_process, steps=steps, **options)


def cases_of_four() -> Iterator[Case]:
    for hidden in (96, 256, 101, 3) if THOROUGH else (96, 3):
        yield f"four hidden={hidden}", functools.partial(against_plain_fsdp, hidden=hidden)
    for hidden in (96, 104) if THOROUGH else (104,):
        yield f"four nvfp4 hidden={hidden}", functools.partial(against_plain_fsdp, name="nvfp4", hidden=hidden)
    for gated in (True, "experts"):
        if THOROUGH:
            yield f"four gated={gated}", functools.partial(against_plain_fsdp, gated=gated)
        yield f"hybrid gated={gated}", functools.partial(against_plain_fsdp, gated=gated, mesh_shape=(2, 2))
    yield from parallel_cases()
    for name, hidden in (("fp8_blockwise", 101), ("nvfp4", 104)) if THOROUGH else (("fp8_blockwise", 101),):
        yield f"worlds {name}", functools.partial(other_world_sizes, name, hidden)
    for name in ("fp8_blockwise", "mxfp8_128x128"):
        along = functools.partial(against_plain_fsdp, gated="experts", shard_placement_fn=second_dimension, name=name)
        yield f"experts along rows {name}", along


def cases(ranks: int) -> Iterator[Case]:
    """hidden=96: 48 rows a rank.  256: whole blocks.  104: 52 rows, and codes padded to 16 bytes.  101: shards differ
    in size."""
    if ranks == 4:
        yield from cases_of_four()
        return
    usual = {("forward", 256), ("forward", 101), ("twice", 96), ("step", 104)}
    for weight_cast in ("forward", "twice", "step"):
        for hidden in (96, 256, 104, 101):
            if THOROUGH or (weight_cast, hidden) in usual:
                yield bits(weight_cast=weight_cast, hidden=hidden)
    for name in ("mxfp8_128x128", "nvfp4"):
        for hidden in (96, 256, 104, 101):
            if hidden == (101 if name == "mxfp8_128x128" else 104) or (THOROUGH and (hidden, name) != (101, "nvfp4")):
                yield bits(weight_cast="forward", name=name, hidden=hidden)
        yield bits(weight_cast="step", name=name, microbatches=2)
    for weight_cast in ("forward", "step"):
        yield bits(weight_cast=weight_cast, reshard=False, microbatches=2)
        yield bits(weight_cast=weight_cast, gated=True, microbatches=2, recompute=True)
        if THOROUGH or weight_cast == "step":
            yield bits(weight_cast=weight_cast, gated="experts", microbatches=2)
            yield bits(weight_cast=weight_cast, optimize=adamw)
        if THOROUGH or weight_cast == "forward":
            yield bits(weight_cast=weight_cast, wrap=root_alone)
            yield bits(weight_cast=weight_cast, compiled=True)
    for hidden in (96, 101):
        yield f"control hidden={hidden}", functools.partial(without_exchange, hidden=hidden)
    for dtype in (torch.bfloat16, torch.float16):
        for weight_cast in ("forward", "step") if THOROUGH or dtype == torch.bfloat16 else ("forward",):
            yield f"mixed {weight_cast} {dtype}", functools.partial(mixed, weight_cast, dtype)
    for name, hidden in (("fp8_blockwise", 101), ("mxfp8_128x128", 96), ("nvfp4", 104)):
        yield f"checkpoints {name}", functools.partial(checkpoints, name, hidden)
    for weight_cast in ("forward", "step"):
        yield f"evaluated {weight_cast}", functools.partial(evaluated, weight_cast)
    for options in ({}, {"name": "nvfp4"}, {"gated": "experts"}):
        label = f"one shard {options}"
        yield label, functools.partial(against_plain_fsdp, mesh_shape=(2, 1), **options)
    for make, options in expert_cases():
        case = functools.partial(beside_plain_fsdp, make, **options)
        yield f"{make.__name__} {label_of(options)}", case
    if THOROUGH:
        yield "inductor", functools.partial(against_plain_fsdp, backend="inductor")
    yield "stepped on one rank", stepped_on_one_rank
    yield "written elsewhere", written_elsewhere
    yield "cached state", cached_state
    yield "dropped", dropped
    yield "sharded one by one", sharded_one_by_one
    yield "refusals", refusals
    yield "reports", reports
    for name in ("fp8_blockwise", "mxfp8_128x128", "nvfp4"):
        for size in (512, 320):
            yield f"wire {name} {size}", functools.partial(wire, name, size)


def run(rank: int, ranks: int, folder: str, names: tuple[str, ...]) -> None:
    """All cases on one rank."""
    run_cases(rank, ranks, folder, names, lambda: cases(ranks))


if __name__ == "__main__":
    main(run)
