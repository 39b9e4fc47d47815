"""Checkpoints: the full state of a run, in torch's distributed format, so that a resumed run gives the same bits.

    folder/step-00000100/   *.distcp and .metadata, by torch.distributed.checkpoint; run.json, by us
    folder/.saving-*        being written, or left by a process that died

A checkpoint is written under a temporary name, synced and renamed, so a folder with a final name is complete. Old
checkpoints are removed only after that. `run.json` has the step, the config, the history so far and a checksum of every
file, itself included. Tensors are those of the unquantized model: a run by one recipe can be continued by another.
Folders with other names belong to the user: they are neither resumed from nor removed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from ..distributed import sharded_files
from ..distributed.sharded_files import checksum
from ..distributed.world import ALONE, World
from ..errors import CheckpointError, message, option, refuse
from .config import RunConfig, to_dict
from .files import sync_folder, write_synced

FORMAT = 1
ABOUT = "run.json"
_SAVING = ".saving-"
_NAME = re.compile(r"step-\d{8,}")
_MOMENTS = ("exp_avg", "exp_avg_sq")
# required keys of run.json and their types
_PARTS_OF_ABOUT = {
    "step": int, "config": dict, "files": dict, "tensors": list, "data_hash": str, "history": list, "evaluations": list
}  # fmt: skip
# free space needed, as a multiple of the tensors' bytes
_ROOM = 1.05


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors of a run by name: parameters and buffers, Adam's state of each parameter, torch's generators."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = _state_of(optimizer, parameter)
        found |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    found["generator.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        found["generator.cuda"] = torch.cuda.get_rng_state()
    return found


def _state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Adam's state of a parameter. Adam allocates it in its first step; loading before that needs it allocated here."""
    state = optimizer.state[parameter]
    if not state and parameter.requires_grad:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in _MOMENTS:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def name_of(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def save(
    folder: Path, step: int, tensors: dict[str, Tensor], about: Mapping[str, Any], keep: int, world: World = ALONE
) -> Path:
    """Write a checkpoint atomically and remove all but the last `keep`. Every rank writes its shards; the first one
    writes run.json and renames the folder after all are done."""
    final = folder / name_of(step)
    fresh = folder / f"{_SAVING}{step:08d}-{world.from_first(os.getpid)}"
    try:
        needed = sum(world.gather(sharded_files.local_bytes(tensors)))
        world.from_first(lambda: _begin(fresh, needed))
        files = sharded_files.write_tensors(fresh, tensors, world)
        written = {"format": FORMAT, "step": step, "files": files, **about}
        world.from_first(lambda: _finish(fresh, final, written))
    except (Exception, CheckpointException) as error:  # torch's own derives from BaseException
        if world.is_first:
            shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(sharded_files.cause(error), KeyboardInterrupt):
            raise KeyboardInterrupt from None
        last = latest(folder)
        kept = f"the last one is {last}" if last else "there is none yet"
        what = f"no checkpoint of step {step} in {folder}: {sharded_files.reason(error)}"
        rule = f"a checkpoint is written completely or not at all; {kept}"
        fix = f"free some space or name another folder, then resume with {option('resume', True)}"
        raise CheckpointError(message(what, rule=rule, fix=fix)) from error
    for old in complete(folder)[:-keep] if world.is_first else ():
        shutil.rmtree(old, ignore_errors=True)
    return final


def _begin(fresh: Path, needed: int) -> None:
    """Make an empty folder on a disk with room for so many bytes."""
    shutil.rmtree(fresh, ignore_errors=True)  # left by another process with this pid
    fresh.mkdir(parents=True)
    free = shutil.disk_usage(fresh).free
    if free < _ROOM * needed:
        raise OSError(f"{needed / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB are free")


def _finish(fresh: Path, final: Path, written: Mapping[str, Any]) -> None:
    """Write run.json and give the folder its final name."""
    write_synced(fresh / ABOUT, json.dumps({**written, "check": _check_of(written)}))
    sync_folder(fresh)
    if final.exists():  # the same step of the same run, saved again
        shutil.rmtree(final)
    fresh.rename(final)
    sync_folder(final.parent)


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    found = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / ABOUT).exists())
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(complete(folder)), None)


def checkpoint_to_resume(folder: Path | None, *, resume: bool) -> Path | None:
    """The checkpoint that a run in this folder resumes from, or None; removes partial checkpoints of killed runs."""
    last = None if folder is None else latest(folder)
    if last is not None and not resume:
        rule = "a new run does not write over another"
        fix = f"pass {option('resume', True)} to resume it, or another folder"
        refuse(f"{folder} has {last.name} already", rule, fix, error=CheckpointError)
    for path in folder.glob(f"{_SAVING}*") if folder is not None and resume else ():
        shutil.rmtree(path, ignore_errors=True)
    return last


def read_about(path: Path) -> dict[str, Any]:
    """Contents of run.json, with its format, keys and checksum verified."""
    try:
        about: dict[str, Any] = json.loads((path / ABOUT).read_text())
    except OSError as error:
        what = f"{path} has no {ABOUT} that can be read ({error.strerror})"
        rule, fix = "a checkpoint of this trainer has one", "name one of the step-* folders in the folder of a run"
        raise CheckpointError(message(what, rule=rule, fix=fix)) from None
    except ValueError as error:
        raise _damaged(path, f"{ABOUT}: {error}") from None
    version = about.get("format") if isinstance(about, dict) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if version != FORMAT:
        rule, fix = f"this version reads format {FORMAT}", "load it with the version that wrote it"
        refuse(f"{path} has format {version!r}", rule, fix, error=CheckpointError)
    missing = [name for name, kind in _PARTS_OF_ABOUT.items() if not isinstance(about.get(name), kind)]
    if missing:
        raise _damaged(path, f"{ABOUT} without {', '.join(missing)}")
    if "check" in about and about.pop("check") != _check_of(about):  # the first versions wrote none
        raise _damaged(path, f"{ABOUT} does not match its checksum")
    return about


def _check_of(about: Mapping[str, Any]) -> int:
    """CRC-32 of the contents of run.json, independent of key order and whitespace."""
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def load(path: Path, tensors: dict[str, Tensor], config: RunConfig, world: World = ALONE) -> dict[str, Any]:
    """Fill tensors in place from a checkpoint, which any number of ranks wrote; returns the contents of run.json."""
    about = world.from_first(lambda: _checked(path, config))
    names = sorted(about["files"])[world.rank :: world.size]
    world.together(lambda: _verify(path, {name: about["files"][name] for name in names}))
    wanted = {name: value for name, value in tensors.items() if not name.startswith("generator.cuda")}
    cuda = tensors.get("generator.cuda")
    if cuda is not None and "generator.cuda" in about["tensors"]:
        wanted["generator.cuda"] = cuda
    try:
        sharded_files.read_tensors(path, wanted, world)
    except (Exception, CheckpointException) as error:
        raise _damaged(path, f"{type(error).__name__}: {sharded_files.reason(error)}") from error
    torch.set_rng_state(wanted["generator.cpu"])
    if "generator.cuda" in wanted:
        torch.cuda.set_rng_state(wanted["generator.cuda"])
    return about


def read_model(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill parameters and buffers of a model in place from a checkpoint, whose files are verified first."""
    _verify(path, read_about(path)["files"])
    try:
        sharded_files.read_tensors(path, {f"model.{name}": value for name, value in tensors.items()}, ALONE)
    except (Exception, CheckpointException) as error:
        raise _damaged(path, f"{type(error).__name__}: {sharded_files.reason(error)}") from error


def _checked(path: Path, config: RunConfig) -> dict[str, Any]:
    """Contents of run.json of a checkpoint of the same model."""
    about = read_about(path)
    _check_same_model(path, about, config)
    return about


def _verify(path: Path, files: Mapping[str, int]) -> None:
    """Raise unless files match their checksums."""
    for name, mark in files.items():
        try:
            found = checksum(path / name)
        except FileNotFoundError:
            raise _damaged(path, f"{name} is missing") from None
        except OSError as error:
            rule, fix = "a resumed run reads all files of its checkpoint", "check the permissions of its files"
            raise CheckpointError(message(f"{path} cannot be read: {error}", rule=rule, fix=fix)) from None
        if found != mark:
            raise _damaged(path, f"{name} does not match its checksum")


def _check_same_model(path: Path, about: Mapping[str, Any], config: RunConfig) -> None:
    theirs, ours = about["config"].get("model") or {}, to_dict(config)["model"]
    differ = [name for name in ours if theirs.get(name) != ours[name]]
    for name in ("parameters", "seed"):
        if about["config"].get(name) != getattr(config, name):
            differ.append(name)
    if differ:
        before = about["config"] | theirs
        here = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} | ours
        each = "; ".join(f"{name} was {before.get(name)}, is {here.get(name)}" for name in differ)
        rule, fix = "a run resumes with the same model, dtype and seed", "pass the earlier values, or another folder"
        refuse(f"{path} belongs to another run: {each}", rule, fix, error=CheckpointError)


def _damaged(path: Path, what: str) -> CheckpointError:
    others = [each.name for each in complete(path.parent) if each != path]
    fix = f"delete {path.name}; the run then resumes from {others[-1]}" if others else "start again in another folder"
    return CheckpointError(
        message(f"{path} is damaged: {what}", rule="all of its files have to match their checksums", fix=fix)
    )
