"""What tests/integrations/test_torchtitan.py looks at, found in one process: torchtitan takes long to start.

    PYTHONPATH=tests python -m support.titan_checks llama experts     # prints one line of JSON for each

Runs of several ranks are in titan_ranks.py. In a process of its own also because torchtitan is told that the CPU is its
device, which no other test should be.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from support import titan_cpu

MARK = "RESULT"
ONE_STEP = ("--training.steps", "1")
EXPERTS = ("--config", "deepseek_v3_debug_mxfp8", "--parallelism.expert-parallel-degree", "2")
EXPERTS = (*EXPERTS, "--training.disable-cuda-graphs")
EVERY_RUN = ("conversions", "configs", "measured", "experts_alone", "refusals", "llama", "experts", "checkpoints")
EXPERT_COUNT = 4
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


def train(
    *given: str,
    block: int = 0,
    blocks: int = 1,
    counted: bool = False,
    parse: Callable[..., Any] | None = None,
    edit: Any = None,
    prepare: Any = None,
    logged: Any = None,
) -> dict[str, Any]:
    """One run by torchtitan's own trainer, of some blocks of a model: losses, kinds of layers, counts of operators.

    parse: makes the config of a command line.  edit: called with the config.  prepare: with the trainer.  logged: after
    each step.
    """
    import torchtitan.trainer

    torchtitan.trainer.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    titan_cpu.one_rank()
    if dist.is_initialized():  # one group of ranks for all runs
        dist.init_process_group = lambda *args, **named: None
    start = time.perf_counter()
    config = (parse or titan_cpu.parsed)(*given)
    if edit is not None:
        edit(config)
    config.model_spec.model.layers[:] = config.model_spec.model.layers[block : block + blocks]
    trainer = config.build()
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, *rest: Any, **named: Any) -> None:
        losses.append(loss)
        log(step, loss, *rest, **named)
        if logged is not None:
            logged()

    if prepare is not None:
        prepare(trainer)

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
        "state": {name: str(each.dtype) for name, each in model.state_dict().items()},
        "ticks": sorted({int(each.rng[1]) for each in model.modules() if getattr(each, "rng", None) is not None}),
        "counts": dict(calls.counts),
        "seconds": round(time.perf_counter() - start, 1),
    }
    trainer.close()
    return found


def llama() -> dict[str, Any]:
    found = {
        "bf16": train("--config", "llama3_debug_bf16"),
        "fp8_blockwise": train("--config", "llama3_debug_fp8_blockwise", counted=True),
        "mxfp8": train("--config", "llama3_debug_mxfp8"),
        "override": train("--config", "llama3_debug_bf16", "--override.imports", f"{OVERRIDES}.linear"),
    }
    for label, edit in (("stock", _stock_checkpointing), ("kept", _keep_all)):
        found[label] = train("--config", "llama3_debug_fp8_blockwise", *ONE_STEP, counted=True, edit=edit)
    return found


def _stock_checkpointing(config: Any) -> None:
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    config.activation_checkpoint = SelectiveAC.Config()


def _keep_all(config: Any) -> None:
    config.activation_checkpoint.every_second = False


def small(config: Any) -> None:
    """Four small experts, and two of them for a token: a sum of two has one order."""
    moe = config.model_spec.model.layers[1].moe
    routed, router = moe.routed_experts, moe.router
    moe.num_experts = router.num_experts = router.gate.out_features = EXPERT_COUNT
    routed.inner_experts.num_experts = routed.token_dispatcher.num_experts = EXPERT_COUNT
    routed.inner_experts.hidden_dim = 128
    router.top_k = routed.token_dispatcher.top_k = 2


def smaller(config: Any) -> None:
    """And four heads of sixteen, whose weights are most of what is cast."""
    small(config)
    attention = config.model_spec.model.layers[1].attention
    attention.n_heads //= 4
    attention.wq.out_features //= 4
    attention.wkv_b.out_features //= 4
    attention.wo.in_features //= 4


def experts() -> dict[str, Any]:
    """The second block is the first with experts."""
    imports = (f'{OVERRIDES}.linear={{"recipe": "mxfp8"}}', f'{OVERRIDES}.experts={{"recipe": "mxfp8"}}')
    steps = ("--training.steps", "2")
    found = {
        recipe: train("--config", f"deepseek_v3_debug_{recipe}", *steps, block=1, edit=smaller)
        for recipe in ("bf16", "fp8_blockwise", "mxfp8")
    }
    found["override"] = train(
        "--config", "deepseek_v3_debug_bf16", *steps, "--override.imports", *imports, block=1, edit=smaller
    )
    return found


def checkpoints() -> dict[str, Any]:
    """Two steps by one recipe, the learning rate's warm-up, saved; a third by the other."""
    found: dict[str, Any] = {}
    save = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only")
    for first, second in (("bf16", "mxfp8"), ("mxfp8", "bf16")):
        folder = ("--dump-folder", str(titan_cpu.assets() / f"from-{first}"))
        before = train("--config", f"llama3_debug_{first}", *save, *folder, "--training.steps", "2")
        after = train("--config", f"llama3_debug_{second}", *save, *folder)
        found[f"{first} to {second}"] = before["losses"] + after["losses"]
    return found


def experts_alone() -> dict[str, Any]:
    """Both kinds of experts beside the plain ones with the same weights: relative errors of the result and of all
    gradients. One expert has no rows, and three rows belong to none."""
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    from blockscale import get_recipe
    from blockscale.integrations.torchtitan.convert import converted_config

    found: dict[str, Any] = {}
    for kind in (GroupedExperts, GptOssGroupedExperts):
        config = kind.Config(dim=64, hidden_dim=96, num_experts=4)
        torch.manual_seed(0)
        plain, low = config.build(), converted_config(config, get_recipe("mxfp8"), "experts").build()
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        low.load_state_dict(plain.state_dict())
        results: list[dict[str, torch.Tensor]] = []
        for module in (plain, low):
            x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
            y = module(x, torch.tensor([9, 0, 20, 8]))
            y[:37].float().square().sum().backward()
            gradients = {name: each.grad for name, each in module.named_parameters()}
            results.append({"y": y[:37].detach(), "x": x.grad[:37], **gradients})
        want, got = results
        errors = {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}
        found[kind.__name__] = {"class": type(low).__name__, "errors": errors}
    return found


def refusals() -> dict[str, str]:
    """What is said to those who ask for the impossible."""
    from torchtitan.models import deepseek_v3, gpt_oss
    from torchtitan.models.llama3 import model_registry

    from blockscale import get_recipe
    from blockscale.autograd.dtensor import check_shards
    from blockscale.integrations.torchtitan import BlockScaledConverter, overrides
    from blockscale.integrations.torchtitan.gather import use_low_gather

    def said(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def convert(**options: Any) -> Any:
        return model_registry("debugmodel", converters=[BlockScaledConverter.Config(**options)])

    def experts(backend: str = "standard", **options: Any) -> Any:
        converters = [BlockScaledConverter.Config(**options)]
        return deepseek_v3.model_registry("debugmodel", moe_comm_backend=backend, converters=converters)

    def gpt_oss_low(**options: Any) -> Any:
        return gpt_oss.model_registry("debugmodel", converters=[BlockScaledConverter.Config(**options)])

    def low_dispatch(config: Any) -> None:
        config.model_spec = experts(recipe="mxfp8", dispatch="low")

    def unknown_model() -> None:
        spec = convert(gather="low")
        spec.parallelize_fn = lambda model, **named: model
        use_low_gather(spec)
        spec.parallelize_fn(torch.nn.Linear(2, 2), ac_config=None)

    layer = model_registry("debugmodel").model.layers[0].feed_forward.w1
    return {
        "nothing matches": said(lambda: convert(fqns=["*blocks.*"])),
        "a glob alone": said(lambda: convert(fqns="*layers.0.*")),
        "step": said(lambda: convert(weight_cast="step")),
        "recipe": said(lambda: convert(recipe="mxpf8")),
        "since": said(lambda: convert(recipe=get_recipe("mxfp8").replace(since=10))),
        "until": said(lambda: convert(recipe=get_recipe("mxfp8").replace(until={"fprop": 10}))),
        "ends": said(lambda: convert(keep_last=1.5)),
        "pieces": said(lambda: check_shards("layers.0.w1.weight", (768, 256), (192, 256), get_recipe("fp8_blockwise"))),
        "pieces that fit": said(lambda: check_shards("weight", (768, 256), (192, 256), get_recipe("mxfp8"))),
        "gather": said(lambda: convert(gather="bf16")),
        "payload": said(lambda: experts(recipe="mxfp8", dispatch="fp4")),
        "low": said(lambda: experts(recipe="fp8_blockwise", dispatch="low")),
        "no experts": said(lambda: convert(recipe="mxfp8", dispatch="low")),
        "kept experts": said(lambda: experts(recipe="mxfp8", dispatch="low", skip=["*experts*"])),
        "other dispatcher": said(lambda: experts("hybridep", recipe="mxfp8", dispatch="low")),
        "other activation": said(lambda: gpt_oss_low(recipe="mxfp8", dispatch="low")),
        "compiled": said(lambda: train(*EXPERTS, "--compile.enable", edit=low_dispatch, block=1)),
        "compiled gather": said(lambda: train("--config", "llama3_debug_fp8_blockwise_low", "--compile.enable")),
        "no checkpointing": said(unknown_model),
        "override that draws": said(lambda: overrides.linear(layer, recipe="nvfp4")),
    }


def conversions() -> dict[str, Any]:
    """Whole models as configs and on the meta device, without a run: what is converted, and what the modules hold."""
    import importlib

    from blockscale.integrations.torchtitan import BlockScaledConverter

    found: dict[str, Any] = {}
    cases = (("llama3", "8B"), ("llama3", "debugmodel"), ("deepseek_v3", "debugmodel"), ("gpt_oss", "debugmodel"))
    for name, flavor in cases:
        registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
        plain = registry(flavor).model
        converter = BlockScaledConverter(BlockScaledConverter.Config(weight_cast="twice"))
        config = converter.convert(registry(flavor).model)
        with torch.device("meta"):
            model, other = config.build(), plain.build()
        model.verify_module_protocol()
        report = converter.report
        assert report is not None
        casts = {each.recipe.weight_cast for each in model.modules() if hasattr(each, "recipe")}
        found[f"{name} {flavor}"] = {
            "kinds": Counter(type(each).__name__ for each in model.modules() if "BlockScaled" in type(each).__name__),
            "kept": {each.name: each.reason for each in report.skipped},
            "same parameters": _parameters(model) == _parameters(other),
            "same state": _shapes(model.state_dict()) == _shapes(other.state_dict()),
            "casts": sorted(casts),
        }
    nvfp4 = BlockScaledConverter(BlockScaledConverter.Config(recipe="nvfp4"))
    nvfp4.convert(importlib.import_module("torchtitan.models.llama3").model_registry("debugmodel").model)
    assert nvfp4.report is not None
    ends = BlockScaledConverter(BlockScaledConverter.Config(recipe="nvfp4", keep_first=6))
    ends.convert(importlib.import_module("torchtitan.models.llama3").model_registry("debugmodel").model)
    assert ends.report is not None
    found["nothing but ends"] = {"converted": len(ends.report.converted), "warnings": ends.report.warnings}
    found["nvfp4"] = {each.name: each.reason for each in nvfp4.report.skipped if ".wo" in each.name}
    return found


def configs() -> dict[str, Any]:
    """Every ready-made run: how many layers follow which recipe, and the classes around them."""
    from blockscale.integrations.torchtitan import BlockScaledExperts, BlockScaledLinear, config_registry
    from blockscale.integrations.torchtitan.config_registry import CONFIGS
    from blockscale.integrations.torchtitan.dispatch import BlockScaledRoutedExperts

    offered = {name for name, each in vars(config_registry).items() if callable(each) and not name.startswith("_")}
    functions = {name for name in offered if not isinstance(getattr(config_registry, name), type)}
    found: dict[str, Any] = {"offered beside": sorted(functions - set(CONFIGS) - {"Callable", "Any"})}
    for name, make in CONFIGS.items():
        config = make()
        kinds = (BlockScaledLinear.Config, BlockScaledExperts.Config)
        layers = [each for kind in kinds for _, each, _, _ in config.model_spec.model.traverse(kind)]
        routed = [each for _, each, _, _ in config.model_spec.model.traverse(BlockScaledRoutedExperts.Config)]
        found[name] = {
            "layers": len(layers),
            "recipes": sorted({each.recipe.name for each in layers}),
            "checkpointing": type(config.activation_checkpoint).__qualname__,
            "metrics": type(config.metrics).__qualname__,
            "wires": [getattr(config.model_spec.model, "gather", None), sorted({each.dispatch for each in routed})],
        }
    return found


def measured() -> list[Any]:
    """Numerics of a layer of torchtitan's kind, and of ours with the same weight."""
    from blockscale.diagnostics import layer_numerics
    from blockscale.integrations.torchtitan.linear import BlockScaledLinear
    from blockscale.nn import Linear

    torch.manual_seed(0)
    ours, x = Linear(64, 96, bias=False, recipe="mxfp8"), torch.randn(32, 64)
    config = BlockScaledLinear.Config(in_features=64, out_features=96, bias=False, recipe="mxfp8")
    theirs = BlockScaledLinear(config)
    theirs.load_state_dict(ours.state_dict())
    return [asdict(layer_numerics(each, lambda each=each: each(x).square().mean())[0]) for each in (theirs, ours)]


def _parameters(model: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()}


def _shapes(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tuple(each.shape), str(each.dtype)) for name, each in state.items()}


def draws() -> dict[str, Any]:
    """NVFP4: ticks go with the optimizer's steps, also where a run resumes. The third block is not spared."""
    save = ("--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only")
    line = ("--config", "llama3_debug_nvfp4", "--lr-scheduler.decay-ratio", "0", *save)
    parts, four = ("--dump-folder", str(titan_cpu.assets() / "parts")), ("--training.steps", "4")
    first = train(*line, *parts, "--training.steps", "2", block=2)
    second = train(*line, *parts, *four, block=2)
    whole = train(*line, "--dump-folder", str(titan_cpu.assets() / "whole"), *four, block=2)
    return {"whole": whole, "parts": first["losses"] + second["losses"], "ticks": [first["ticks"], second["ticks"]]}


def compiled() -> dict[str, Any]:
    """torchtitan compiles blocks without breaks, and the loss."""
    from torch._dynamo.utils import counters

    found = train("--config", "llama3_debug_fp8_blockwise", "--compile.enable")
    return found | {"graphs": counters["stats"]["unique_graphs"]}


if __name__ == "__main__":
    titan_cpu.patch_torchtitan()
    for name in sys.argv[1:]:
        result = globals()[name]()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(MARK, json.dumps({name: result}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
