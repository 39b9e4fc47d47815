"""The program of tests/train/test_ranks.py: the trainer on two ranks, beside one process."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from blockscale.autograd.dtensor import local
from blockscale.errors import BlockscaleError
from blockscale.models.config import RanksConfig
from blockscale.train import DataConfig, Hooks, OptimizerConfig, Run, RunConfig, train
from blockscale.train.checkpoint import tensors_of
from support.forked_ranks import Launcher
from support.small_runs import SPARSE, small

# 2 of 4 sequences are 128 tokens: a rank has whole blocks of every operand
BATCH: dict[str, Any] = {"batch": 4, "data": DataConfig(sequence=64), "steps": 4}


def dense(recipe: str = "fp8_blockwise", **changes: Any) -> RunConfig:
    return small(recipe, **(BATCH | changes))


def sparse(recipe: str = "fp8_blockwise", **changes: Any) -> RunConfig:
    return small(recipe, model=SPARSE, **(BATCH | changes))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Keeps(Hooks):
    """Whole tensors at the start and at the end of a run, and what the run's layers were."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.saved: dict[int, dict[str, Tensor]] = {}
        self.sharding = ""

    def _tensors(self, run: Run) -> dict[str, Tensor]:
        return {name: whole(each).detach().clone() for name, each in tensors_of(run.model, run.optimizer).items()}

    def on_start(self, run: Run) -> None:
        self.first, self.sharding = self._tensors(run), str(run.sharding)

    def on_save(self, run: Run, path: Path) -> None:
        self.saved.setdefault(run.step, self._tensors(run))

    def on_end(self, run: Run, result: Any) -> None:
        self.last = self._tensors(run)


def trained(config: RunConfig, save: Path | None = None) -> dict[str, Any]:
    """Losses and norms of a run; whole tensors go to a file."""
    keeps = Keeps()
    result = train(config, hooks=[keeps])
    if save is not None:
        torch.save({"first": keeps.first, "last": keeps.last, "saved": keeps.saved}, save)
    return {
        "losses": [each.loss for each in result.history],
        "norms": [each.norm for each in result.history],
        "evaluation": result.loss,
        "steps": result.steps,
        "stopped": result.stopped,
        "sharding": keeps.sharding,
    }


CASES: dict[str, RunConfig] = {
    "fp8_blockwise": dense(),
    "mxfp8": dense("mxfp8", weight_cast="forward"),
    "high": dense(weight_cast="forward", ranks=RanksConfig(gather="high")),
    "nvfp4": dense("nvfp4", batch=2, data=DataConfig(sequence=32)),
    "sparse": sparse(),
    "tied": dense(model=replace(dense().model, tied=True), loss_chunks=2, recompute="full"),
    # without clipping: the norm is a sum whose order depends on shards
    "exact": dense("bf16", optimizer=OptimizerConfig(clip=0.0)),
}
EXPERTS = {
    payload: sparse("mxfp8", weight_cast="forward", ranks=RanksConfig(experts=2, payload=payload))
    for payload in ("bf16", "low")
}
SAVED = dense(save_every=2, keep=9)


def two_ranks(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(config, folder / f"{name}-{rank}.pt") for name, config in CASES.items()}
    found |= {f"experts {name}": trained(config) for name, config in EXPERTS.items()}
    found["saved"] = trained(replace(SAVED, folder=folder / "run"), folder / f"saved-{rank}.pt")
    found["export"] = trained(dense(steps=1, export=folder / "exported"))
    return found


def one_process(rank: int, folder: Path) -> dict[str, Any]:
    """The same runs, in which each rank's share is a microbatch."""
    found: dict[str, Any] = {}
    for name, config in CASES.items():
        same = replace(config, batch=config.batch // 2, accumulate=config.accumulate * 2)
        found[name] = trained(same, folder / f"{name}.pt")
    whole = replace(EXPERTS["bf16"], ranks=RanksConfig())
    found["experts"] = trained(whole)
    found["saved"] = trained(replace(SAVED, folder=folder / "alone"), folder / "saved.pt")
    found["export"] = trained(dense(steps=1, batch=2, accumulate=2, export=folder / "exported alone"))
    return found


def resumed(source: str, name: str) -> Any:
    """Continues a run from step 2, in another folder."""

    def scenario(rank: int, folder: Path) -> dict[str, Any]:
        config = dense(folder=folder / name, start=folder / source / "step-00000002")
        return trained(config, folder / f"{name}-{rank}.pt")

    return scenario


class Meddles(Hooks):
    """Something in one step of the last rank alone."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank, self.what = rank, what

    def before_step(self, run: Run) -> None:
        if run.step != 1 or self.rank != run.world.size - 1:
            return
        if self.what == "stop":
            run.wants_stop = True
        if self.what == "weight":
            with torch.no_grad():
                local(run.model.get_parameter("layers.1.mlp.down.weight")).view(-1)[0] = float("nan")
        if self.what == "layer":
            layer = run.model.get_submodule("layers.1.attention.out")
            layer.register_forward_hook(lambda module, inputs, output: output * float("inf"))
        if self.what == "wgrad":
            layer = run.model.get_submodule("layers.0.attention_norm")
            layer.register_forward_pre_hook(spoil_gradient)
        if self.what == "raise":
            raise ValueError("a hook's own error")
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            time.sleep(12)


def spoil_gradient(module: Any, inputs: Any) -> None:
    """The gradient of the layer's weight is NaN on this rank, before it is summed."""
    if torch.is_grad_enabled():
        module.weight.register_hook(lambda gradient: gradient * float("nan"))


def attempt(config: RunConfig, *hooks: Hooks) -> str:
    try:
        result = train(config, hooks=hooks)
        return f"{result.stopped} {result.steps}"
    except BlockscaleError as error:
        return str(error)


def refusals(rank: int, folder: Path) -> dict[str, str]:
    cases = {
        "batch": dense(batch=3),
        "graph": dense(cuda_graph=True),
        "numerics": dense(numerics_every=1, folder=folder / "never"),
        "experts": dense(ranks=RanksConfig(experts=2)),
        "uneven": sparse(ranks=RanksConfig(experts=3), batch=6),
        "step": dense("mxfp8"),
        "high": dense(ranks=RanksConfig(gather="high")),
        "divided": sparse("mxfp8", ranks=RanksConfig(experts=2)),
        "configs": dense(seed=rank),
    }
    found = {name: attempt(config) for name, config in cases.items()}
    for what in ("stop", "weight", "layer", "wgrad"):
        found[what] = attempt(dense("bf16", steps=3), Meddles(rank, what))
    return found


def faulty(what: str) -> Any:
    """The last rank raises, is killed or hangs in step 2; a collective waits for 4 seconds."""

    def scenario(rank: int, folder: Path) -> Any:
        train(dense("bf16", ranks=RanksConfig(timeout=4.0)), hooks=[Meddles(rank, what)])

    return scenario


def killed_in_a_save(rank: int, folder: Path) -> Any:
    """The last rank is killed when half of its shards of step 2 are on disk."""
    plain = FileSystemWriter.write_data

    def half(self: Any, plan: Any, planner: Any) -> Any:
        done = plain(self, plan, planner)
        if rank and "00000002" in str(self.path):
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    FileSystemWriter.write_data = half
    train(dense("bf16", folder=folder / "killed", save_every=1, ranks=RanksConfig(timeout=4.0)))


def after_the_kill(rank: int, folder: Path) -> Any:
    before = sorted(path.name for path in (folder / "killed").iterdir())
    found = trained(dense("bf16", folder=folder / "killed", resume=True))
    return found | {"before": before, "after": sorted(path.name for path in (folder / "killed").iterdir())}


def four_ranks(rank: int, folder: Path) -> dict[str, Any]:
    """Experts divided among pairs of ranks, each expert sharded by two pairs."""
    divided = replace(EXPERTS["bf16"], ranks=RanksConfig(experts=2))
    saved = replace(divided, folder=folder / "run", save_every=2)
    return {"experts": trained(saved, folder / f"saved-{rank}.pt"), "sparse": trained(CASES["sparse"])}


def from_four(rank: int, folder: Path) -> dict[str, Any]:
    """Two ranks resume what four ranks saved."""
    start = folder / "run" / "step-00000002"
    return trained(replace(EXPERTS["bf16"], start=start), folder / f"resumed-{rank}.pt")


def of_four(rank: int, folder: Path) -> dict[str, Any]:
    return {"experts": trained(replace(EXPERTS["bf16"], ranks=RanksConfig()))}


def main_of_four(folder: Path) -> None:
    launcher = Launcher(folder)
    launcher.run("alone", of_four, 1)
    launcher.run("four", four_ranks, 4)
    launcher.run("two", from_four)


def main(folder: Path) -> None:
    launcher = Launcher(folder)
    alone = launcher.start("alone", one_process, 1)
    launcher.run("ranks", two_ranks)
    launcher.wait(alone)
    waiting = [launcher.start(what, faulty(what), 2) for what in ("raise", "kill", "hang")]
    launcher.run("refusals", refusals)
    launcher.run("to one", resumed("run", "to one"), 1)
    launcher.run("to two", resumed("alone", "to two"))
    launcher.run("again", resumed("run", "again"))
    launcher.run("saving", killed_in_a_save)
    launcher.run("after", after_the_kill)
    for each in waiting:
        launcher.wait(each)


if __name__ == "__main__":
    (main_of_four if "four" in sys.argv else main)(Path(sys.argv[1]))
