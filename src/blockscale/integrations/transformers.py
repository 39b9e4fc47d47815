"""`RecipeCallback`: what a model that follows a recipe needs from Transformers' `Trainer`.

    model = AutoModelForCausalLM.from_pretrained(...)
    bs.quantize_(model, "fp8_blockwise")
    Trainer(model, args, train_dataset=..., callbacks=[RecipeCallback()]).train()

Most recipes train without it. It casts weights once for each optimizer step where a recipe says so
(weight_cast="step"), moves on to the next draws after every backward, and tells the step to recipes whose products
change with it. What is saved and loaded is the plain model's: modules have changed their class and nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from ..autograd.recipe import Recipe
from ..autograd.weights import attach, shared_weights
from ..errors import OptionError, message
from ..nn import advance_, set_step_
from .packages import check_package

check_package("transformers", "5.", "transformers", "earlier ones keep experts as lists of modules")

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402


class RecipeCallback(TrainerCallback):
    """Keeps the layers of a converted model in step with the trainer."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Find out that the model was converted, and let its weights follow the optimizer."""
        model = _converted(given["model"])
        if shared_weights(model):
            attach(_torch_optimizer(given["optimizer"]), model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Say which step comes; a run that resumes goes on where it was."""
        model: nn.Module = given["model"]
        set_step_(model, state.global_step)
        advance_(model, tick=state.global_step * args.gradient_accumulation_steps)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """After every microbatch but the last: its draws are not used again."""
        advance_(given["model"])


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The one that steps: accelerate wraps it, and hooks are called on what is inside."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _converted(model: nn.Module) -> nn.Module:
    if not any(isinstance(getattr(module, "recipe", None), Recipe) for module in model.modules()):
        raise OptionError(
            message(
                f"a {type(model).__name__} without a layer that follows a recipe",
                rule="the callback serves models that were converted",
                fix="call blockscale.quantize_(model, recipe) before you make the Trainer, and print what it returns: "
                "it may have kept every layer, and says why",
            )
        )
    return model
