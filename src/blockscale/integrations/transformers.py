"""`RecipeCallback`: keeps a converted model in step with Transformers' `Trainer`.

    model = AutoModelForCausalLM.from_pretrained(...)
    bs.quantize_(model, "fp8_blockwise")
    Trainer(model, args, train_dataset=..., callbacks=[RecipeCallback()]).train()

Most recipes train without it. It casts weights once per optimizer step for recipes with weight_cast="step", advances
the tick of stochastic rounding after every backward, and sets the step for recipes whose products change with it.
Checkpoints are the plain model's: modules have changed their class and nothing else.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..autograd.recipe import Recipe
from ..autograd.weights import attach, shared_weights
from ..distributed.tensors import ShardedWeight
from ..errors import refuse
from ..nn import advance_, set_step_
from .packages import check_package

check_package("transformers", "5.", "transformers", "earlier ones keep experts as lists of modules")

from transformers import TrainerCallback, TrainerState, TrainingArguments  # noqa: E402


class RecipeCallback(TrainerCallback):
    """Sets step and tick of a converted model, and attaches the optimizer to its shared weight casts."""

    def on_init_end(self, args: TrainingArguments, state: object, control: object, **named: Any) -> None:
        """Refuse what accelerate would do wrong with weights that FSDP2 gathers as codes, before any rank shards."""
        coded = [param for param in named["model"].parameters() if isinstance(param.data, ShardedWeight)]
        if not coded or not args.fsdp:
            return
        config = cast("dict[str, Any]", args.fsdp_config or {})
        if str(config.get("cpu_ram_efficient_loading", "")).lower() in ("true", "1"):
            refuse(
                "cpu_ram_efficient_loading of weights that gather_low_ prepared",
                rule="accelerate then replaces the parameters of rank 0 alone, and ranks would wait for each other",
                fix="leave it out of fsdp_config, or leave gather_low_ out",
            )
        wrong = {param.dtype for param in coded if param.dtype != torch.float32}
        if wrong and (args.bf16 or args.fp16):
            refuse(
                f"mixed precision of weights in {', '.join(map(str, wrong))} that gather_low_ prepared",
                rule="accelerate replaces the data of such weights by fp32, which their gather would not see",
                fix="load the model in fp32 (dtype=torch.float32), or leave gather_low_ out",
            )

    def on_train_begin(self, args: object, state: object, control: object, **named: Any) -> None:
        """Check that the model was converted, and attach the optimizer if weights are cast once per step."""
        model = _converted(named["model"])
        if shared_weights(model):
            attach(_torch_optimizer(named["optimizer"]), model)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **named: Any) -> None:
        """Set the step and the tick; both follow from the global step, so a resumed run continues exactly."""
        model: nn.Module = named["model"]
        set_step_(model, state.global_step)
        advance_(model, tick=state.global_step * args.gradient_accumulation_steps)

    def on_substep_end(self, args: object, state: object, control: object, **named: Any) -> None:
        """Advance the tick after every microbatch but the last."""
        advance_(named["model"])


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The wrapped torch optimizer: accelerate wraps it, and step hooks run on the inner one."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _converted(model: nn.Module) -> nn.Module:
    if not any(isinstance(getattr(module, "recipe", None), Recipe) for module in model.modules()):
        refuse(
            f"a {type(model).__name__} in which no layer has a recipe",
            "the callback is for converted models",
            "call blockscale.quantize_(model, recipe) before you make the Trainer, and print the report: it "
            "lists the layers that were not converted, and why",
        )
    return model
