"""Step time and peak memory of FSDP2 of one rank, with weights gathered as codes and in bf16.

    python -m benchmarks.fsdp                              # Llama 3 8B with 8 layers, 8,192 tokens a step, on a GPU
    python -m benchmarks.fsdp --preset tiny --steps 2      # a dry run on a CPU

First each way to gather trains a few steps with deterministic algorithms, since torch's attention does not repeat on a
GPU; the program fails if their losses differ in a bit. Then they take turns with a clock. Each turn builds the model
from the same seed, trains some steps without a clock and then some with one, and frees everything. FSDP2 of one rank
moves nothing between GPUs: what is measured are casts, transposes of codes and buffers of gathered weights. Parameters
are fp32 and are gathered in bf16 or as its codes, unless --parameters says bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import blockscale as bs
from blockscale.bench.store import command_line, where
from blockscale.distributed import gather_low_
from blockscale.models import Transformer
from blockscale.train.config import RunConfig
from blockscale.train.loop import as_configured
from blockscale.train.presets import get_preset, with_layers


@dataclass(frozen=True)
class Arm:
    """A way to gather.  weight_cast: of the recipe."""

    codes: bool
    weight_cast: str

    def __str__(self) -> str:
        return f"{'codes' if self.codes else 'values'}, weight_cast={self.weight_cast}"


# FSDP2 that gathers values refuses "step"
ARMS = (Arm(False, "forward"), Arm(True, "forward"), Arm(False, "twice"), Arm(True, "twice"), Arm(True, "step"))


@dataclass
class Found:
    """Results of an arm.  losses: of the check.  ms: of each timed step, over all turns.  peaks: bytes, the most in
    forwards, backwards and optimizer steps.  kept: bytes after a step."""

    arm: Arm
    ms: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    peaks: tuple[int, ...] = (0, 0, 0)
    kept: int = 0


class Step(NamedTuple):
    """A step.  ms: of all its microbatches and the optimizer.  loss: of the last microbatch.  peaks: as `Found`'s."""

    ms: float
    loss: Tensor
    peaks: tuple[int, ...]


class Objective(nn.Module):
    """Loss of a model as a forward, where FSDP2 has its hooks."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, pieces: Tensor) -> Tensor:
        """Mean cross entropy of symbols [B, T + 1]."""
        return self.model.loss(pieces)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, help="symbols of a sequence; default: the preset's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument("--recipe", default="fp8_blockwise")
    parser.add_argument("--parameters", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--check-steps", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--arms", type=int, nargs="*", default=range(len(ARMS)), help="; ".join(map(_numbered, ARMS)))
    parser.add_argument("--out", type=Path, help="file for one line of JSON per arm")
    return parser.parse_args(words)


def _numbered(arm: Arm) -> str:
    return f"{ARMS.index(arm)}: {arm}"


def build(options: argparse.Namespace, arm: Arm, device: torch.device) -> tuple[Objective, torch.optim.Optimizer]:
    """The sharded model of an arm and its optimizer."""
    preset = with_layers(get_preset(options.preset), options.layers)
    dtype = getattr(torch, options.parameters)
    model = Transformer.build(preset.model, options.sequence or preset.data.sequence, device=device, dtype=dtype)
    model.loss_chunks = preset.loss_chunks
    recipe = bs.get_recipe(options.recipe)
    bs.quantize_(model, recipe.replace(name=recipe.name, weight_cast=arm.weight_cast))
    objective = Objective(model)
    if arm.codes:
        report = gather_low_(objective)
        if report.others or not report.formats:
            raise SystemExit(f"not all weights are gathered as codes: {report}")
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        block.recompute = options.recompute  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        if options.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-4, fused=True)
    if arm.weight_cast == "step":
        bs.attach(optimizer, objective)
    return objective, optimizer


def steps(options: argparse.Namespace, arm: Arm, device: torch.device, count: int) -> Iterator[Step]:
    """Steps of a new model."""
    objective, optimizer = build(options, arm, device)
    vocabulary, length = objective.model.config.vocabulary, objective.model.sequence + 1
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        shape = (options.microbatches, options.batch, length)
        batches = torch.randint(vocabulary, shape, generator=generator).to(device)
        loss, forwards, backwards = torch.zeros(()), [0], [0]
        peak(device)
        synchronize(device)
        start = time.perf_counter()
        for pieces in batches:
            loss = objective(pieces)
            forwards.append(peak(device))
            loss.backward()
            backwards.append(peak(device))
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        ms = (time.perf_counter() - start) * 1e3
        yield Step(ms, loss.detach(), (max(forwards), max(backwards), peak(device)))


def peak(device: torch.device) -> int:
    """Most bytes allocated since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def clear(options: argparse.Namespace, device: torch.device) -> None:
    """Free what the last model had."""
    if options.compile:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def turn(options: argparse.Namespace, found: Found, device: torch.device) -> None:
    """One turn of an arm with a clock: its steps are added to what was found."""
    count = options.warm_up + options.steps
    for number, step in enumerate(steps(options, found.arm, device, count), 1):
        if number > options.warm_up:
            found.ms.append(step.ms)
            found.peaks = tuple(map(max, found.peaks, step.peaks))
        if number == count and device.type == "cuda":  # the model is still there
            found.kept = max(found.kept, torch.cuda.memory_allocated())


def measure(options: argparse.Namespace, device: torch.device) -> list[Found]:
    """The losses of each arm, then its times in turns; in every second turn in reverse order."""
    found = [Found(ARMS[at]) for at in options.arms]
    with as_configured(RunConfig(deterministic=True)):
        for each in found:
            each.losses = [float(step.loss) for step in steps(options, each.arm, device, options.check_steps)]
            clear(options, device)
    for number in range(options.turns):
        for each in found[:: -1 if number % 2 else 1]:
            turn(options, each, device)
            clear(options, device)
    return found


def table(found: Sequence[Found]) -> Iterator[str]:
    """A line for each arm.  of values: time over that of the arm with values and the same casts, else of the first.
    GiB: peaks of forwards, backwards and optimizer steps, and what is kept after a step."""
    sizes = " ".join(f"{name:>7}" for name in ("forward", "backw.", "optim.", "kept"))
    yield f"{'gathered':32} {'ms a step':>10} {'quartiles':>15} {'of values':>10} {sizes} GiB"
    for each in found:
        base = next((one for one in found if one.arm == replace(each.arm, codes=False)), found[0])
        median, ratio = statistics.median(each.ms), statistics.median(each.ms) / statistics.median(base.ms)
        low, _, high = statistics.quantiles(each.ms * 2, n=4)  # of one step, too
        sizes = " ".join(f"{size / 2**30:7.2f}" for size in (*each.peaks, each.kept))
        yield f"{each.arm!s:32} {median:10.2f} {low:7.2f}-{high:7.2f} {ratio:10.4f} {sizes}"


@contextlib.contextmanager
def one_rank(device: torch.device) -> Generator[None]:
    """A process group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(words: Sequence[str]) -> int:
    """Measure, print the table; returns 1 if losses differ."""
    options = parse(words)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU: times mean nothing"
    print(f"torch {torch.__version__}, {name}; {vars(options)}", flush=True)
    with one_rank(device):
        found = measure(options, device)
    for line in table(found):
        print(line)
    losses = found[0].losses
    same = all(each.losses == losses for each in found)
    print(f"losses of {len(losses)} steps: {'the same bits' if same else 'DIFFERENT'}, last {losses[-1]}")
    if not same:
        print(*(f"{each.arm}: {each.losses}" for each in found), sep="\n")
    if options.out is not None:
        command = command_line(["", *words]).replace("blockscale", "python -m benchmarks.fsdp", 1)
        shared = {"suite": "fsdp", "where": asdict(replace(where(device, bs.__version__), command=command))}
        options.out.write_text("".join(json.dumps({**asdict(each), **shared}) + "\n" for each in found))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
