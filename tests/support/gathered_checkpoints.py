"""Checkpoints of models whose weights FSDP2 gathers as codes, at other numbers of ranks; see `gathered`.

Runs on four ranks. Two ranks are the first pair of a mesh of two by two, and one process is the first rank alone.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import blockscale as bs
from blockscale.distributed import gather_low_
from support.fully_sharded import THOROUGH, adamw, batch, build, shard, train

RANKS = 4
WORLDS = (1, 2, 4)
# ranks that save, ranks that load
USUAL = frozenset({(1, 2), (2, 1), (2, 4), (4, 2)})


class World:
    """Some ranks with a model and an optimizer of their own; one process shards nothing and gathers nothing."""

    def __init__(self, ranks: int, name: str, hidden: int, *, seed: int) -> None:
        self.ranks = ranks
        self.model, self.group = build("step", name=name, hidden=hidden), None
        mesh = init_device_mesh("cpu", (RANKS // ranks, ranks), mesh_dim_names=("apart", "shard"))["shard"]
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(1 + seed / 8)
        if ranks > 1:
            gather_low_(self.model)
            shard(self.model, mesh=mesh)
            self.group = mesh.get_group()
        self.optimizer = adamw(self.model)
        bs.attach(self.optimizer, self.model)

    @property
    def is_here(self) -> bool:
        """Whether this rank takes part."""
        return dist.get_rank() < self.ranks

    def step(self, step: int) -> None:
        train(self.model, 1, step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: str) -> None:
        state, optimizer_state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder, **self.how)

    def load(self, folder: str) -> None:
        state, optimizer_state = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder, **self.how)
        set_state_dict(self.model, self.optimizer, model_state_dict=state, optim_state_dict=optimizer_state)

    @property
    def how(self) -> dict[str, Any]:
        return {"no_dist": True} if self.group is None else {"process_group": self.group}

    def bits(self) -> list[Any]:
        """Whole parameters and optimizer states, and results for one batch: parameters alone determine those."""
        states = pytree.tree_leaves(get_state_dict(self.model, self.optimizer))
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in states]
        with torch.no_grad():
            return [*whole, self.model(batch(0, 0))]


def same(mine: list[Any], other: list[Any]) -> bool:
    pairs = zip(mine, other, strict=True)
    return all(torch.equal(one, two) if isinstance(one, Tensor) else one == two for one, two in pairs)


def other_world_sizes(name: str, hidden: int) -> dict[str, bool]:
    """Every number of ranks reads the files of every other: the same bits of parameters, optimizer states and results,
    which differ before."""
    found: dict[str, bool] = {}
    folders: list[Any] = [[tempfile.mkdtemp() for _ in WORLDS] if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    saved: dict[int, list[Any]] = {}
    for ranks, folder in zip(WORLDS, folders[0], strict=True):
        world = World(ranks, name, hidden, seed=ranks)
        if world.is_here:
            world.step(0)
            world.save(folder)
            saved[ranks] = world.bits()
        dist.barrier()
    for source, folder in zip(WORLDS, folders[0], strict=True):
        for ranks in WORLDS:
            if (source, ranks) == (1, 1) or (not THOROUGH and (source, ranks) not in USUAL):
                continue
            world = World(ranks, name, hidden, seed=0)
            if world.is_here:
                before = world.bits()
                world.load(folder)
                after, known = world.bits(), saved.get(source)
                if known is not None:  # the first rank knows what every number of ranks has saved
                    found[f"{source} to {ranks}"] = same(after, known) and not same(before, known)
            dist.barrier()
    if dist.get_rank() == 0:
        for folder in folders[0]:
            shutil.rmtree(folder)
    return found
