"""Causes of a loss gap in low precision: which of the three GEMMs, which steps, and how much is the forward's rounding.

python tools/causes.py 125m --recipe fp8_blockwise --arm wgrad --seed 1 --out out/causes.jsonl

An arm is one run: the whole recipe ("all"), one of its GEMMs alone in low precision ("fprop", "dgrad", "wgrad"), or
the whole recipe from the end of the warm-up on ("since"). Every run writes two kinds of JSON lines:

    losses     loss of the trained weights evaluated in other precisions: the effect of the forward's rounding alone
    gradients  at some steps, on a few batches outside the training set: error of the recipe's gradients relative to
               bf16's, and the share of error and gradient that all batches have in common, which averaging over steps
               does not remove

Arms may run concurrently; their losses are compared with those of `blockscale compare`.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockscale.models.transformer import Transformer
from blockscale.nn import quantize_
from blockscale.train import Hooks, Run, RunConfig, TrainResult, get_preset, train
from blockscale.train.run import recipe_of

PRODUCTS = ("fprop", "dgrad", "wgrad")
ARMS = ("all", *PRODUCTS, "since")
STEPS = (20, 100, 200, 300, 500, 1000, 2000, 2990)
# number of gradient batches, and parts of a microbatch: each batch is one part
BATCHES, PARTS = 6, 4

Gradients = list[dict[str, Tensor]]


def alone(recipe: str, product: str) -> str:
    """Name of a recipe with one of its three GEMMs in low precision.

    >>> alone("mxfp8", "dgrad")
    'mxfp8_fprop_wgrad_bf16'
    """
    return "_".join([recipe, *(each for each in PRODUCTS if each != product), "bf16"])


def config_of(arm: str, config: RunConfig) -> RunConfig:
    """Config of an arm's run."""
    if arm == "since":
        return replace(config, recipe=replace(config.recipe, since=int(config.steps * config.optimizer.warmup)))
    name = config.recipe.name
    return replace(config, recipe=replace(config.recipe, name=name if arm == "all" else alone(name, arm)))


def twin(run: Run, recipe: str) -> Transformer:
    """Copy of a run's model with its current weights, by another recipe and not compiled."""
    config, choice = run.config, run.config.recipe
    model = Transformer.build(config.model, config.data.sequence, device=run.device, dtype=torch.float32, seed=0)
    model.load_state_dict(run.model.state_dict())
    chosen = recipe_of(replace(choice, name=recipe, weight_cast="forward", since=0))
    quantize_(model, chosen, keep_first=choice.keep_first, keep_last=choice.keep_last, seed=config.seed)
    return model


@torch.no_grad()
def loss_in(run: Run, recipe: str) -> float:
    """Loss on held-out text of the run's weights by another recipe."""
    config, model = run.config, twin(run, recipe)
    batches = [
        run.symbols.validation(place, config.eval_batches, config.batch, config.data.sequence)
        for place in range(config.eval_batches)
    ]
    losses = [model.loss(part) for each in batches for part in each.to(run.device).chunk(PARTS)]
    return float(torch.stack(losses).mean())


def gradients_in(run: Run, recipe: str, batches: Sequence[Tensor]) -> Gradients:
    """Gradients of every matrix except the embedding, for each batch."""
    model, found = twin(run, recipe), Gradients()
    matrices = {name: each for name, each in model.named_parameters() if each.dim() > 1 and "embed" not in name}
    for each in batches:
        model.loss(each).backward()
        found.append({name: one.grad for name, one in matrices.items() if one.grad is not None})
        model.zero_grad(set_to_none=True)
    return found


def energy(gradients: dict[str, Tensor]) -> Tensor:
    """Sum of squares of all values, fp64."""
    return (
        torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients.values()]).square().sum()
    )


def common(parts: Gradients) -> float:
    """Share of the energy of several gradients, or of their errors, that all have in common; about 0 if they are
    independent."""
    mean = {name: torch.stack([each[name] for each in parts]).mean(0) for name in parts[0]}
    same = energy(mean) / torch.stack([energy(each) for each in parts]).mean()
    return float((same - 1 / len(parts)) / (1 - 1 / len(parts)))


def compared(mine: Gradients, base: Gradients) -> dict[str, float]:
    """Errors of gradients against a baseline.  error: of a batch's gradient, relative to its norm.  length: relative
    bias along the baseline's gradient.  common: share of the errors that all batches have in common."""
    errors = [{name: a[name] - b[name] for name in a} for a, b in zip(mine, base, strict=True)]
    true = torch.stack([energy(each) for each in base]).sum()
    along = torch.stack([(a[name].double() * b[name]).sum() for a, b in zip(errors, base, strict=True) for name in a])
    return {
        "error": float((torch.stack([energy(each) for each in errors]).sum() / true).sqrt()),
        "length": float(along.sum() / true),
        "common": common(errors),
    }


class Causes(Hooks):
    """Hook that writes both kinds of lines."""

    def __init__(self, arm: str, config: RunConfig, steps: Sequence[int], out: Path) -> None:
        self.arm, self.recipe, self.steps, self.out = arm, config.recipe.name, steps, out

    def before_step(self, run: Run) -> None:
        """Write gradient errors if the step is one of `steps`."""
        if run.step in self.steps:
            unseen = [run.pieces(run.config.steps + at, 0) for at in range(-(-BATCHES // PARTS))]
            batches = [part for each in unseen for part in each.chunk(PARTS)][:BATCHES]
            base = gradients_in(run, "bf16", batches)
            names = {"all": self.recipe} | {each: alone(self.recipe, each) for each in PRODUCTS}
            found = {key: compared(gradients_in(run, name, batches), base) for key, name in names.items()}
            self._write(run, "gradients", step=run.step, by=found, gradient_common=common(base))

    def on_end(self, run: Run, result: TrainResult) -> None:
        """Write the losses in other precisions."""
        losses = {name: loss_in(run, name) for name in ("bf16", self.recipe)}
        self._write(run, "losses", loss=result.loss, losses=losses)

    def _write(self, run: Run, kind: str, **what: Any) -> None:
        about = {
            "kind": kind,
            "model": run.config.name,
            "recipe": self.recipe,
            "arm": self.arm,
            "seed": run.config.seed,
        }
        with self.out.open("a") as file:
            file.write(json.dumps(about | what) + "\n")
        gc.collect()


def main(words: Sequence[str] | None = None) -> None:
    """Train one arm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("preset")
    parser.add_argument("--recipe", default="fp8_blockwise")
    parser.add_argument("--arm", choices=ARMS, default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="length of the run; by default the preset's")
    parser.add_argument("--at", type=int, nargs="*", default=STEPS, help="steps at which gradients are measured")
    parser.add_argument("--out", type=Path, default=Path("out/causes.jsonl"))
    wanted = parser.parse_args(words)
    config = get_preset(wanted.preset)
    config = replace(config, seed=wanted.seed, steps=wanted.steps or config.steps)
    config = replace(config, recipe=replace(config.recipe, name=wanted.recipe))
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    result = train(config_of(wanted.arm, config), hooks=[Causes(wanted.arm, config, wanted.at, wanted.out)])
    print(f"{wanted.preset} by {wanted.recipe}, {wanted.arm}, seed {wanted.seed}: loss {result.loss:.4f}")


if __name__ == "__main__":
    main()
