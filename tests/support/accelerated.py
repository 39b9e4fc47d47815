"""What tests/integrations/test_accelerate.py looks at on every rank, after the script of docs/transformers.md has run.

The test appends `after(globals())` to the script, since starting ranks that import Transformers takes seconds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import blockscale as bs
from blockscale.distributed.tensors import ShardedWeight
from blockscale.errors import BlockscaleError
from blockscale.integrations.transformers import RecipeCallback


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in model.named_parameters()
    }


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def difference(got: nn.Module, want: nn.Module) -> float:
    """0 for the same bits, else the largest relative error of a weight."""
    wanted, worst = whole(want), 0.0
    for name, each in whole(got).items():
        if not torch.equal(each, wanted[name]):
            worst = max(worst, float((each - wanted[name]).norm() / wanted[name].norm()), 1e-30)
    return worst


def optimizer_has_parameters(trainer: Trainer) -> bool:
    """Whether every parameter is in the optimizer once: accelerate swaps those that it was made with for shards."""
    held = [id(param) for group in trainer.optimizer.optimizer.param_groups for param in group["params"]]
    return len(held) == len(set(held)) and set(held) == {id(param) for param in trainer.model.parameters()}


def gathers_codes(model: nn.Module) -> int:
    local = (each.to_local() for each in model.parameters() if isinstance(each, DTensor))
    return sum(isinstance(each, ShardedWeight) for each in local)


def after(names: dict[str, Any]) -> None:
    """The same script in other ways; writes what this rank found."""
    model, args, rows, sizes = (names[each] for each in ("model", "args", "rows", "sizes"))
    config, options = names["LlamaConfig"](**sizes), args.to_dict()
    folder = Path(os.environ["RESULTS"])

    def run(recipe: Any, *, low: bool = False, resume: str | None = None, other: nn.Module | None = None) -> Trainer:
        torch.manual_seed(0)
        made = LlamaForCausalLM(config) if other is None else other
        bs.quantize_(made, recipe)
        if low:
            bs.distributed.gather_low_(made)
        again = TrainingArguments(**{**shared, "output_dir": str(folder / "other"), "save_strategy": "no"})
        trainer = Trainer(made, again, train_dataset=rows, callbacks=[RecipeCallback()])
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    kept = ("max_steps", "per_device_train_batch_size", "logging_steps", "fsdp", "fsdp_config")
    shared = {name: options[name] for name in kept} | {"report_to": [], "disable_tqdm": True}
    plain = run("fp8_blockwise")
    found: dict[str, Any] = {
        "losses": losses(names["trainer"]),
        "plain losses": losses(plain),
        "plain weights": difference(plain.model, model),
        "codes": [gathers_codes(model), gathers_codes(plain.model)],
        "optimizers": [optimizer_has_parameters(each) for each in (names["trainer"], plain)],
    }
    resumed = run(names["recipe"], low=True, resume=str(Path("out/fsdp2/checkpoint-2").absolute()))
    found |= {"resumed losses": losses(resumed), "resumed weights": difference(resumed.model, model)}

    experts = {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 48,
    }
    config_of_experts = Qwen3MoeConfig(**sizes, **experts)
    shared["fsdp_config"] = {**shared["fsdp_config"], "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"]}
    for low in (False, True):
        torch.manual_seed(0)
        mixture = run("fp8_blockwise", low=low, other=Qwen3MoeForCausalLM(config_of_experts))
        found[f"experts {low}"] = losses(mixture)
        found[f"experts {low} codes"] = gathers_codes(mixture.model)

    found["refused"] = refusals(config, shared)
    weights = whole(model)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def refusals(config: Any, shared: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    cases = {"ram": (torch.float32, False), "mixed": (torch.bfloat16, True)}
    for label, (dtype, mixed) in cases.items():
        made = LlamaForCausalLM(config).to(dtype)
        bs.quantize_(made, "fp8_blockwise")
        bs.distributed.gather_low_(made)
        fsdp_config = {**shared["fsdp_config"], "cpu_ram_efficient_loading": label == "ram"}
        args = TrainingArguments(**{**shared, "output_dir": "out/refused", "fsdp_config": fsdp_config})
        args.bf16 = mixed  # Transformers takes it on GPUs alone
        try:
            Trainer(made, args, callbacks=[RecipeCallback()])
            found[label] = "no error"
        except BlockscaleError as error:
            found[label] = str(error)
    return found
