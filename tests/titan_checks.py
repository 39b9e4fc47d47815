"""What tests/integrations/test_torchtitan.py looks at, found in one process: torchtitan takes long to start.

    python tests/titan_checks.py llama experts     # prints one line of JSON for each

In a process of its own also because torchtitan is told that the CPU is its device, which no other test should be.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import titan_cpu
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

OVERRIDES = "blockscale.integrations.torchtitan.overrides"


class Calls(TorchDispatchMode):
    """Counts calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("blockscale::"):
            self.counts[name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def train(*given: str, counted: bool = False, edit: Any = None) -> dict[str, Any]:
    """One run by torchtitan's own trainer: losses, kinds of layers, and counts of operators."""
    import torchtitan.trainer
    from torchtitan.config.manager import ConfigManager

    torchtitan.trainer.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ.pop("RANK", None)  # a port of its own for each run
    titan_cpu.one_rank()
    start = time.perf_counter()
    config = ConfigManager().parse_args(titan_cpu.arguments(*given))
    if edit is not None:
        edit(config)
    trainer = config.build()
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, *rest: Any, **named: Any) -> None:
        losses.append(loss)
        log(step, loss, *rest, **named)

    trainer.metrics_processor.log = record
    calls = Calls()
    if counted:
        with calls:
            trainer.train()
    else:
        trainer.train()
    model = trainer.model_parts[0]
    kinds = Counter(type(each).__name__.removeprefix("FSDP") for each in model.modules())
    found = {
        "losses": losses,
        "kinds": {name: count for name, count in kinds.items() if "Linear" in name or "Experts" in name},
        "head": type(model.lm_head).__name__.removeprefix("FSDP"),
        "keys": sorted(model.state_dict()),
        "dtypes": sorted({str(each.dtype) for each in model.state_dict().values()}),
        "ticks": sorted({int(each.rng[1]) for each in model.modules() if getattr(each, "rng", None) is not None}),
        "counts": dict(calls.counts),
        "seconds": round(time.perf_counter() - start, 1),
    }
    trainer.close()
    dist.destroy_process_group()
    return found


def llama() -> dict[str, Any]:
    fp8 = f'{OVERRIDES}.linear={{"recipe": "fp8_blockwise"}}'
    found = {
        "bf16": train("--config", "llama3_debug_bf16"),
        "fp8_blockwise": train("--config", "llama3_debug_fp8_blockwise"),
        "mxfp8": train("--config", "llama3_debug_mxfp8"),
        "override": train("--config", "llama3_debug_bf16", "--override.imports", fp8),
    }
    for label, edit in (("stock", _stock_checkpointing), ("kept", _keep_all)):
        line = ("--config", "llama3_debug_mxfp8", "--training.steps", "1")
        found[label] = train(*line, counted=True, edit=edit)
    found["every_second"] = train("--config", "llama3_debug_mxfp8", "--training.steps", "1", counted=True)
    return found


def _stock_checkpointing(config: Any) -> None:
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    config.activation_checkpoint = SelectiveAC.Config()


def _keep_all(config: Any) -> None:
    config.activation_checkpoint.every_second = False


def experts() -> dict[str, Any]:
    steps = ("--training.steps", "2")
    imports = (f"{OVERRIDES}.linear", f"{OVERRIDES}.experts")
    return {
        "bf16": train("--config", "deepseek_v3_debug_bf16", *steps),
        "fp8_blockwise": train("--config", "deepseek_v3_debug_fp8_blockwise", *steps),
        "mxfp8": train("--config", "deepseek_v3_debug_mxfp8", *steps),
        "override": train("--config", "deepseek_v3_debug_bf16", *steps, "--override.imports", *imports),
    }


def checkpoints() -> dict[str, Any]:
    """Two steps by one recipe, saved; a third by the other."""
    found: dict[str, Any] = {}
    save = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only")
    for first, second in (("bf16", "mxfp8"), ("mxfp8", "bf16")):
        folder = ("--dump-folder", str(titan_cpu.assets() / f"from-{first}"))
        before = train("--config", f"llama3_debug_{first}", *save, *folder, "--training.steps", "2")
        after = train("--config", f"llama3_debug_{second}", *save, *folder)
        found[f"{first} to {second}"] = {"before": before["losses"], "after": after["losses"]}
    return found


if __name__ == "__main__":
    titan_cpu.patch_torchtitan()
    for name in sys.argv[1:]:
        result = globals()[name]()
        print("RESULT", name, json.dumps(result), flush=True)
