"""torchtitan on one, two and four ranks, with the same weights and tokens: what test_torchtitan_ranks.py looks at. And
titan_checks.py, since importing torchtitan takes longer than its runs.

    PYTHONPATH=tests python -m support.titan_ranks [one two ...]     # prints one line of JSON for each group

Ranks are forked from one process that has imported torchtitan, which takes longer than any run. A run has one block of
a debug model. It gives losses and the gradients of its first step, which are compared where they are: with a run of one
process, or with another run of the same ranks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support import gathered_experts, titan_checks, titan_cpu

# gradients are not scaled, and products of unconverted layers are fp32's: what remains is the order of sums
LINE = ("--training.seq-len", "128", "--training.max-norm", "1e9", "--training.steps", "2")
BATCH = "--training.local-batch-size"
ONE_STEP = ("--training.steps", "1")
FP32 = ("--training.mixed-precision-param", "float32")
SHARDED = ("--parallelism.spmd-backend", "partial_dtensor")
TENSOR = ("--parallelism.tensor-parallel-degree", "2")
EXPERTS = ("--parallelism.expert-parallel-degree", "2", "--training.disable-cuda-graphs")
FOLDER = Path(os.environ.get("TITAN_RANKS", "/nonexistent"))
# what a rank gives to a collective, among its arguments
COLLECTIVES: dict[str, Any] = {
    "_allgather_base_": lambda args: args[1:2],
    "all_to_all_single": lambda args: args[:1],
    "all_gather_into_tensor": lambda args: args[:1],
    "all_gather_into_tensor_coalesced": lambda args: args[0],
}
MODELS = {"llama3_debug": 0, "deepseek_v3_debug": 1}  # the block that is trained


class Wire(TorchDispatchMode):
    """Bytes that a rank gives to each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if "c10d" in func.namespace and name in COLLECTIVES:
            self.bytes[name] += sum(each.numel() * each.element_size() for each in COLLECTIVES[name](args))
        return func(*args, **(kwargs or {}))


def fill(model: torch.nn.Module) -> None:
    """The same weights for any number of ranks."""
    for name, param in model.named_parameters():
        draw = torch.Generator().manual_seed(zlib.crc32(plain(name).encode()))
        whole = torch.randn(param.shape, generator=draw) * (0.05 if param.dim() > 1 else 0.1) + (param.dim() == 1)
        with torch.no_grad():
            if isinstance(param, DTensor):
                whole = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(whole)


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def batches(trainer: Any) -> Iterator[Any]:
    """This rank's part of the batches that one process would have."""
    config, dims = trainer.config, trainer.parallel_dims
    ranks, rank = 1, 0
    if dims.dp_enabled:
        mesh = dims.get_mesh("batch")
        ranks, rank = mesh.size(), mesh.get_local_rank()
    local = 1 if dims.pp_enabled else config.training.local_batch_size
    loader = config.dataloader.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=trainer.tokenizer,
        seq_len=config.training.seq_len,
        local_batch_size=local * ranks,
        snapshot_every_n_steps=None,
    )
    own = slice(rank * local, (rank + 1) * local)
    for inputs, labels in loader:
        yield {key: value[own] for key, value in inputs.items()}, labels[own]


class Heard(logging.Handler):
    """Lines that torchtitan's logger was given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Run:
    """One run.  losses: of both steps.  grads: of the first, by name, whole.  wire: bytes of all ranks.  log: lines."""

    def __init__(self, config: str, *line: str, edit: Any = None, blocks: int = 1) -> None:
        from torchtitan.tools.logging import logger

        self.grads: dict[str, Tensor] = {}
        self.trainer: Any = None
        heard, level = Heard(), logger.level
        logger.addHandler(heard)
        logger.setLevel(logging.INFO)
        block = next(block for model, block in MODELS.items() if config.startswith(model))
        wire, start = Wire(), time.process_time()
        with wire:
            found = titan_checks.train(
                *("--config", config, *LINE, *line),
                block=block,
                blocks=blocks,
                parse=titan_cpu.quickly_parsed,
                edit=edit,
                prepare=self._prepare,
                logged=self._logged,
            )
        logger.removeHandler(heard)
        logger.setLevel(level)
        self.log = heard.lines
        if dist.get_rank() == 0:
            print(config, *line, "CPU seconds:", round(time.process_time() - start, 1), file=sys.stderr)
        counts = torch.tensor([wire.bytes[name] for name in COLLECTIVES])
        dist.all_reduce(counts)
        wire.bytes = Counter(dict(zip(COLLECTIVES, counts.tolist(), strict=True)))
        self.losses, self.kinds, self.state, self.wire = found["losses"], found["kinds"], found["state"], wire.bytes

    def _prepare(self, trainer: Any) -> None:
        self.trainer = trainer
        for part in trainer.model_parts:
            fill(part)
        trainer.dataloader = batches(trainer)

    def _logged(self) -> None:
        """Called on all ranks after each step."""
        if not self.grads:
            for part in self.trainer.model_parts:
                for name, param in part.named_parameters():
                    grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                    self.grads[plain(name)] = grad.detach().clone()

    def keep(self, name: str) -> None:
        """Write what other numbers of ranks are compared with."""
        torch.save((self.losses, self.grads, self.state), FOLDER / f"{name}.pt")

    def against(self, name: str) -> dict[str, Any]:
        return self.beside(*torch.load(FOLDER / f"{name}.pt"))

    def beside(self, losses: list[float], grads: dict[str, Tensor], state: dict[str, str]) -> dict[str, Any]:
        """Distances from another run, which may have more steps and layers: of losses, and of gradients."""
        errors: dict[str, float] = {}
        for name, want in grads.items():
            if name in self.grads:
                kind = "experts" if "inner_experts" in name else "others"
                error = float((self.grads[name].double() - want.double()).norm() / want.double().norm())
                errors[kind] = max(errors.get(kind, 0.0), error)
        return {
            "losses": [abs(mine / other - 1) for mine, other in zip(self.losses, losses, strict=False)],
            "grads": errors,
            "missing": sorted(set(grads) - set(self.grads)),
            "state": self.state.items() <= state.items(),
        }

    def like(self, other: Run) -> dict[str, Any]:
        return self.beside(other.losses, other.grads, other.state)


def reports(run: Run) -> list[str]:
    return [line for line in run.log if "gathered as codes" in line]


def own_kind(**options: Any) -> Callable[[Any], None]:
    """The same model with other options of the converter."""

    def edit(config: Any) -> None:
        from torchtitan.models import deepseek_v3, llama3

        from blockscale.integrations.torchtitan import BlockScaledConverter

        registry = {"llama3": llama3, "deepseek_v3": deepseek_v3}[config.model_spec.name].model_registry
        config.model_spec = registry("debugmodel", converters=[BlockScaledConverter.Config(**options)])

    return edit


def small_with(**options: Any) -> Callable[[Any], None]:
    """A small model of which only the routed experts are converted."""

    def edit(config: Any) -> None:
        own_kind(recipe="fp8_blockwise_pow2", fqns=["*.inner_experts"], **options)(config)
        titan_checks.small(config)

    return edit


# ---- groups of ranks -------------------------------------------------------------------------------------------------


LLAMA, MOE = "llama3_debug_fp8_blockwise", "deepseek_v3_debug_fp8_blockwise_pow2"
RECIPE = "fp8_blockwise"
LONGER = ("--training.seq-len", "256")


def one() -> dict[str, Any]:
    """One process, with the batches of two and of four ranks."""
    Run(LLAMA, *FP32, BATCH, "2").keep(LLAMA)
    Run(LLAMA, *ONE_STEP, *FP32, BATCH, "2", blocks=2).keep("two blocks")
    Run(LLAMA, *ONE_STEP, *FP32, *LONGER, BATCH, "1").keep("longer")
    Run(MOE, *ONE_STEP, *FP32, BATCH, "2", edit=small_with()).keep(MOE)
    Run(MOE, *ONE_STEP, *FP32, BATCH, "4", edit=small_with()).keep("four")
    runs = [Run(f"llama3_debug_{recipe}", *ONE_STEP, BATCH, "2", edit=lora(recipe)) for recipe in ("bf16", RECIPE)]
    return {"lora": {"losses": [each.losses[0] for each in runs], "kinds": [each.kinds for each in runs]}}


def lora(recipe: str) -> Callable[[Any], None]:
    """LoRA after our converter."""

    def edit(config: Any) -> None:
        from torchtitan.components.lora import LoRAConverter
        from torchtitan.models.llama3 import model_registry

        from blockscale.integrations.torchtitan import BlockScaledConverter

        ours = [] if recipe == "bf16" else [BlockScaledConverter.Config(recipe=recipe)]
        config.model_spec = model_registry("debugmodel", converters=[*ours, LoRAConverter.Config(rank=16, alpha=32.0)])

    return edit


def two() -> dict[str, Any]:
    found: dict[str, Any] = {}
    line = (*SHARDED, *ONE_STEP, *FP32)
    found["fsdp"] = Run(LLAMA, *line, BATCH, "1").against(LLAMA)
    found["tp"] = Run(LLAMA, *line, *TENSOR, BATCH, "2").against(LLAMA)
    found["ep"] = Run(MOE, *line, *EXPERTS, BATCH, "1", edit=small_with()).against(MOE)
    found["tp x ep"] = Run(MOE, *line, *TENSOR, *EXPERTS, BATCH, "2", edit=small_with()).against(MOE)
    edit = own_kind(recipe="nvfp4", keep_first=0, keep_last=0)
    try:
        Run(LLAMA, *SHARDED, *TENSOR, BATCH, "1", edit=edit)
    except ValueError as error:
        found["nvfp4"] = f"{type(error).__name__}: {error}"
    found["pp"], found["cp"] = pipeline(*line), context(*line)
    found |= {f"gathered {name}": each for name, each in gathered_experts.titan_cases()}
    return found | gathers() | dispatchers() | sequence_shards()


def sequence_shards() -> dict[str, Any]:
    """Tensor parallel layers that gather codes, overlapped and not, beside torchtitan's, which gather 16 bits."""
    line, recipe = (*SHARDED, *TENSOR, BATCH, "1"), "fp8_blockwise_pow2"
    theirs = Run(LLAMA, *line, edit=own_kind(recipe=recipe))
    low: dict[str, Any] = {"recipe": recipe, "tensor_parallel": "low"}
    off, on = (Run(LLAMA, *line, edit=own_kind(**low, overlap=overlap)) for overlap in ("off", "on"))
    wire = [sum(each.wire[name] for name in COLLECTIVES if "into_tensor" in name) for each in (theirs, off, on)]
    log = [each for each in on.log if "under tensor parallelism" in each]
    found = {"tp low": off.like(theirs) | {"wire": wire, "log": log}, "tp overlap": on.like(off)}
    refused: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "backend": (("--parallelism.spmd-backend", "full_dtensor", *TENSOR), {}),
        "whole": ((*SHARDED, *TENSOR, "--parallelism.no-enable-sequence-parallel"), {}),
        "compiled": ((*SHARDED, *TENSOR, "--compile.enable"), {}),
        "layers": ((*SHARDED, *TENSOR), {"skip": ["*lm_head*", "*.wo", "*.w2"]}),
    }
    for name, (given, options) in refused.items():
        try:
            Run(LLAMA, *given, edit=own_kind(**low, **options))
            found[f"tp low {name}"] = "no error"
        except ValueError as error:
            found[f"tp low {name}"] = str(error)
    return found


def pipeline(*line: str) -> dict[str, Any]:
    """A block on each rank."""
    stages = ("--parallelism.pipeline-parallel-degree", "2", "--parallelism.pipeline-parallel-schedule", "GPipe")
    run = Run(LLAMA, *line, *stages, "--training.disable-cuda-graphs", BATCH, "2", blocks=2)
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, run.against("two blocks"))
    first, last = parts
    return {
        "losses": last["losses"],  # the first rank has none
        "grads": {"others": max(each["grads"]["others"] for each in parts)},
        "missing": sorted(set(first["missing"]) & set(last["missing"])),
        "state": first["state"] and last["state"],
    }


def context(*line: str) -> dict[str, Any]:
    """Half of a sequence on each rank. Not balanced: blocks of tokens are then those of one process."""
    halves = ("--parallelism.context-parallel-degree", "2", "--parallelism.context-parallel-load-balancer", "None")
    with torch.compiler.set_stance("force_eager"):  # torch compiles the making of masks
        return Run(LLAMA, *line, *halves, *LONGER, BATCH, "1").against("longer")


def gathers() -> dict[str, Any]:
    """Codes in place of weights, beside the same run that gathers bf16."""
    plain_gather = Run(LLAMA, *SHARDED, BATCH, "1")
    low = Run(LLAMA, *SHARDED, BATCH, "1", edit=own_kind(recipe="fp8_blockwise", gather="low"))
    weights = [name for name in low.grads if "layers" in name and "norm" not in name]
    return {
        "gather": low.like(plain_gather)
        | {
            "wire": [each.wire["_allgather_base_"] for each in (low, plain_gather)],
            "elements": sum(low.grads[name].numel() for name in weights),
            "report": reports(low),
        }
    }


def dispatchers() -> dict[str, Any]:
    """Our dispatchers beside torchtitan's. A step, since they keep nothing for the next."""
    line, found = (*SHARDED, *EXPERTS, *ONE_STEP, BATCH, "1"), {}
    theirs = Run(MOE, *line, edit=small_with())
    for name, dispatch in {"bf16": "bf16", "low": "low", "fixed": fixed_capacity}.items():
        ours = Run(MOE, *line, edit=small_with(dispatch=dispatch))
        wire = [each.wire["all_to_all_single"] for each in (ours, theirs)]
        found[f"dispatch {name}"] = ours.like(theirs) | {"wire": wire, "kinds": ours.kinds}
    return found


def fixed_capacity(mesh: Any) -> Any:
    from blockscale.distributed import FixedCapacity

    return FixedCapacity(2 * 128, "low")


def full() -> dict[str, Any]:
    """torchtitan's full_dtensor on two ranks: a process can have one such run."""
    run = Run(LLAMA, "--parallelism.spmd-backend", "full_dtensor", *ONE_STEP, *FP32, BATCH, "1")
    return {"full_dtensor": run.against(LLAMA)}


def four() -> dict[str, Any]:
    """Pairs, also with low-precision gather and dispatch."""
    found: dict[str, Any] = {}
    line, low = (*SHARDED, *EXPERTS, BATCH, "1"), {"gather": "low", "dispatch": "low"}
    shards = ("--parallelism.data-parallel-shard-degree", "2")
    edit = own_kind(recipe="fp8_blockwise", gather="low")
    run = Run(LLAMA, *SHARDED, *shards, *FP32, *TENSOR, BATCH, "1", edit=edit)
    found["fsdp x tp"] = run.against(LLAMA) | {"report": reports(run)}
    found["fsdp x ep"] = Run(MOE, *line, *ONE_STEP, *FP32, edit=small_with()).against("four")
    theirs, ours = (Run(MOE, *line, *ONE_STEP, edit=small_with(**each)) for each in ({}, low))
    found["fsdp x ep low"] = ours.like(theirs) | {"report": reports(ours)}
    try:
        Run(LLAMA, *SHARDED, "--parallelism.tensor-parallel-degree", "4")
    except ValueError as error:
        found["pieces"] = f"{type(error).__name__}: {error}"
    return found


def lines() -> dict[str, Any]:
    """Launch lines of docs/torchtitan.md: parsed, and two blocks of the model sharded without values, on a group of as
    many ranks that exchange nothing."""
    return {"lines": [parallelized(*line) for line in launch_lines()]}


def launch_lines() -> Iterator[tuple[int, list[str]]]:
    """Ranks and arguments of each `torchrun ... -m torchtitan.train` of the page."""
    text = (Path(__file__).parents[2] / "docs" / "torchtitan.md").read_text().replace("\\\n", " ")
    for line in re.findall(r"^    (torchrun .* -m torchtitan\.train .*)$", text, re.MULTILINE):
        launcher, _, given = line.partition(" -m torchtitan.train ")
        sizes = dict(re.findall(r"--(nnodes|nproc-per-node) (\d+)", launcher))
        yield int(sizes.get("nnodes", 1)) * int(sizes["nproc-per-node"]), shlex.split(given)


def parallelized(ranks: int, given: list[str]) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan_utils
    from torchtitan.tools.logging import logger

    config = ConfigManager().parse_args(given)
    if ranks == 1:
        return {"line": given, "ranks": 1}
    spec, heard = config.model_spec, Heard()
    spec.model.layers[:] = spec.model.layers[:2]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    dims = ParallelDims.from_config(config.parallelism, ranks)
    titan_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    logger.removeHandler(heard)
    dist.destroy_process_group()
    kinds = Counter(type(each).__name__ for each in model.modules())
    report = [each for each in heard.lines if "gathered as codes" in each]
    axes = {axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "tp", "ep")}
    return {"line": given, "ranks": ranks, "axes": axes, "report": report, "kinds": kinds}


def checks() -> dict[str, Any]:
    """What test_torchtitan.py looks at in every test run."""
    return {name: getattr(titan_checks, name)() for name in titan_checks.EVERY_RUN}


RANKS = {"checks": 1, "one": 1, "two": 2, "full": 2, "four": 4, "lines": 1}


def run_rank(rank: int, ranks: int, group: str, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    found = globals()[group]()
    if rank == 0:
        print(titan_checks.MARK, json.dumps({group: found}), flush=True)
    if dist.is_initialized():
        dist.barrier()  # the first rank has the store
        dist.destroy_process_group()


def main(groups: list[str]) -> None:
    import torchtitan.trainer  # noqa: F401

    from blockscale.integrations.torchtitan import config_registry  # noqa: F401

    titan_cpu.patch_torchtitan()
    for config in (LLAMA, MOE):
        titan_cpu.quickly_parsed("--config", config)  # ranks inherit what parsing imports and caches
    for group in groups:
        ranks = RANKS[group]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.multiprocessing.start_processes(run_rank, (ranks, group, port), ranks, start_method="fork")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = Path(os.environ.setdefault("TITAN_RANKS", folder))
        main(sys.argv[1:] or [*RANKS])
