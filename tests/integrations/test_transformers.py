"""Tiny random models of Transformers, converted and trained by its `Trainer`."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blockscale as bs

pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[transformers]'")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install -e '.[transformers]'")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

from blockscale.errors import OptionError
from blockscale.integrations.transformers import RecipeCallback

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen_moe() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))


def rows(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up, which can be learned."""
    starts = torch.arange(count) % 64
    return [
        {"input_ids": (start + torch.arange(16)) % 64, "labels": (start + torch.arange(16)) % 64} for start in starts
    ]


def train(model: nn.Module, folder: Path, *callbacks: Any, resume: bool = False, **options: Any) -> list[float]:
    """Losses of every step, those before a checkpoint included."""
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_steps": 2} | options
    args = TrainingArguments(
        str(folder), logging_steps=1, report_to=[], use_cpu=True, seed=1, disable_tqdm=True, save_total_limit=3, **given
    )
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=list(callbacks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "mxfp8"])
@pytest.mark.parametrize(("make", "layers"), [(llama, 14), (qwen_moe, 12)], ids=["llama", "qwen3-moe"])
def test_a_model_trains_and_saves_what_the_plain_one_loads(tmp_path: Path, recipe: str, make: Any, layers: int):
    plain = train(make(), tmp_path / "plain")
    model = make()
    report = bs.quantize_(model, recipe)
    # four of attention in each of two blocks, and the MLP's three or the experts' two
    assert len(report.converted) == layers
    losses = train(model, tmp_path / "low", RecipeCallback())
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(plain, rel=0.02)
    assert losses != plain

    again = type(make()).from_pretrained(tmp_path / "low" / "checkpoint-4")
    state, saved = model.state_dict(), again.state_dict()
    assert state.keys() == saved.keys() == make().state_dict().keys()
    assert all(torch.equal(state[name], saved[name]) for name in state)


def test_a_plain_checkpoint_continues_with_a_recipe(tmp_path: Path):
    plain = train(llama(), tmp_path)
    model = llama()
    bs.quantize_(model, "mxfp8")
    losses = train(model, tmp_path, RecipeCallback(), resume=True)
    assert losses[:2] == plain[:2]  # from the checkpoint
    assert losses[2:] == pytest.approx(plain[2:], rel=0.02)
    assert losses[2:] != plain[2:]


def test_experts_go_on_in_a_model_made_from_the_checkpoint(tmp_path: Path):
    """`resume_from_checkpoint` of Transformers does not load experts from checkpoints with a key per expert."""

    def converted(model: nn.Module) -> nn.Module:
        bs.quantize_(model, "nvfp4", lambda module, name: "mlp" in name)
        return model

    losses = train(converted(qwen_moe()), tmp_path, RecipeCallback())
    again = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert train(converted(again), tmp_path, RecipeCallback(), resume=True) == losses


def test_weights_are_cast_once_for_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from blockscale.autograd import weights

    refreshed: list[int] = []
    refresh = weights._refresh
    monkeypatch.setattr(weights, "_refresh", lambda *args, **named: refreshed.append(1) or refresh(*args, **named))
    options = {"gradient_accumulation_steps": 2, "max_steps": 3}
    every = llama()
    bs.quantize_(every, "mxfp8")
    losses = train(every, tmp_path / "forward", RecipeCallback(), **options)
    assert not refreshed
    once = llama()
    bs.quantize_(once, bs.get_recipe("mxfp8").replace(weight_cast="step"))
    assert train(once, tmp_path / "step", RecipeCallback(), **options) == losses
    assert len(refreshed) == 1 + 3  # when training begins, and after each step


def test_ticks_advance_with_every_backward_and_resume(tmp_path: Path):
    class Ticks(RecipeCallback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_pre_optimizer_step(self, *args: Any, **given: Any) -> None:
            self.note(given)

        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.note(given)
            super().on_substep_end(args, state, control, **given)

        def note(self, given: dict[str, Any]) -> None:
            self.seen.append(int(given["model"].model.layers[0].mlp.up_proj.rng[1]))

    def converted() -> nn.Module:
        model = llama()
        bs.quantize_(model, "nvfp4", lambda module, name: "mlp" in name)
        return model

    options = {"gradient_accumulation_steps": 2}
    whole, ticks = converted(), Ticks()
    losses = train(whole, tmp_path, ticks, **options)
    assert ticks.seen == list(range(8))
    parts, ticks = converted(), Ticks()
    assert train(parts, tmp_path, ticks, resume=True, **options) == losses
    assert ticks.seen == [4, 5, 6, 7]


def test_recipes_get_the_step(tmp_path: Path):
    model = llama()
    bs.quantize_(model, bs.get_recipe("mxfp8").replace(until={"fprop": 3}))
    train(model, tmp_path, RecipeCallback())
    layer = model.model.layers[0].mlp.up_proj
    assert layer.recipe.fprop is not None
    assert layer.recipe_now.fprop is None  # the last step began as number 3


def test_a_model_that_was_not_converted_is_an_error(tmp_path: Path):
    with pytest.raises(OptionError, match=r"call blockscale\.quantize_"):
        train(llama(), tmp_path, RecipeCallback())


def test_accelerate_finds_gathered_weights_by_their_address() -> None:
    """It maps an optimizer's parameters to shards by `data_ptr`: with equal ones it would train one weight alone."""
    model = llama()
    bs.quantize_(model, "fp8_blockwise")
    assert len(bs.distributed.gather_low_(model).formats) == 14
    found = [param.data_ptr() for param in model.parameters()]
    assert 0 not in found
    assert len({*found}) == len(found)


def test_accelerate_options_that_lose_codes_are_refused(tmp_path: Path) -> None:
    """Before any rank shards; tests/integrations/test_accelerate.py has two ranks."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for dtype, ram, mixed, coded, said in (
        (torch.float32, True, False, True, "cpu_ram_efficient_loading of weights"),
        (torch.bfloat16, False, True, True, "mixed precision of weights in torch.bfloat16"),
        (torch.float32, False, True, True, ""),
        (torch.bfloat16, False, False, True, ""),
        (torch.bfloat16, True, True, False, ""),
    ):
        model = llama().to(dtype)
        bs.quantize_(model, "fp8_blockwise")
        if coded:
            bs.distributed.gather_low_(model)
        args.fsdp, args.fsdp_config, args.bf16 = True, {"cpu_ram_efficient_loading": ram}, mixed
        with pytest.raises(OptionError, match=said) if said else contextlib.nullcontext():
            RecipeCallback().on_init_end(args, None, None, model=model)


def test_the_example_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    # the second one is for several ranks: tests/integrations/test_accelerate.py
    example, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "transformers.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"^print\(.*\)  # (.*)$", example, flags=re.MULTILINE)
    assert len(said) == 2
    assert set(said) <= set(printed)
