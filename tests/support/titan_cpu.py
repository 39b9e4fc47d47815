"""torchtitan on a CPU: what a debug run needs besides torchtitan, and a launcher.

    python tests/support/titan_cpu.py --config llama3_debug_mxfp8            # one rank
    torchrun --standalone --nproc-per-node 2 tests/support/titan_cpu.py --config llama3_debug_mxfp8 \\
        --parallelism.spmd-backend partial_dtensor --parallelism.tensor-parallel-degree 2

The trainer wants an accelerator, a tokenizer and text. Here it is told that the device is the CPU, attention is dense
(FlexAttention has no backward there), gloo only adds, a barrier on a CUDA device is left out, products of bf16 are
taken in fp32 and rounded once, and text is made up, one byte a token. Pipeline schedules of torch 2.13 do not take the
microbatches that torchtitan gives them, so they get a step that does. Nothing else differs. Import this before
torchtitan, which looks for its device when it is imported.
"""

from __future__ import annotations

import ast
import atexit
import copy
import functools
import json
import os
import random
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.nn.functional as F

MODULE = "blockscale.integrations.torchtitan"
# small enough for one core, and the same weights in every run
SIZES = ["--training.seq-len", "64", "--training.local-batch-size", "2", "--training.steps", "3", "--debug.seed", "1"]


def patch_torch() -> None:
    """Before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    widen_products()
    properties = SimpleNamespace(total_memory=16 << 30)
    for name, stub in {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: properties,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, stub)


@functools.cache
def widen_products() -> torch.library.Library:
    """Products of bf16 by fp32's: a CPU that has no instructions for them takes 250 times as long."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        library.impl(name, functools.partial(_wide, getattr(torch.ops.aten, name).out), "CPU")
    return library


def _wide(product: Any, *operands: Any, **named: Any) -> torch.Tensor:
    dtype = operands[0].dtype
    inner = torch.float32 if dtype == torch.bfloat16 else dtype
    found = product(*(each.to(inner) for each in operands), **named, out=torch.empty(0, dtype=inner))
    return found.to(dtype)


def patch_torchtitan() -> None:
    import torchtitan.distributed.utils
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    from torch.nn.attention.flex_attention import create_block_mask, create_mask
    from torchtitan.models.common import attention
    from torchtitan.models.common.attention import FlexAttention

    torchtitan.distributed.utils.set_pg_timeouts = lambda *args, **named: None
    attention._compiled_create_block_mask = create_block_mask  # compiling it takes longer than all steps

    def dense_attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **rest: Any) -> Any:
        assert rest.get("score_mod") is None
        mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None

    FlexAttention.compiled_flex_attn = staticmethod(dense_attention)
    divide = FSDPModule.set_gradient_divide_factor

    def divide_and_add(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_and_add
    PipelineScheduleSingle.step = step_microbatches


def step_microbatches(schedule: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **named: Any) -> None:
    """A step of a pipeline schedule with the arguments that torchtitan gives: torch 2.13 would split a whole batch."""
    stage = schedule._stage
    stage.has_backward = schedule._has_backward
    stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **named)


@functools.cache
def assets() -> Path:
    """A folder with a tokenizer of single bytes and made-up text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    root = Path(tempfile.mkdtemp(prefix="blockscale-titan-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(root / "cache"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    (root / "tokenizer").mkdir()
    tokenizer.save(str(root / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    words = ("scale", "block", "round", "carry", "tie", "exponent", "mantissa", "tile", "warp", "stage")
    draw = random.Random(0)
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=120))}) for _ in range(200)]
    (root / "text").mkdir()
    (root / "text" / "data.json").write_text("\n".join(lines))
    return root


def arguments(*given: str) -> list[str]:
    """A command line for torchtitan: ours, with assets and sizes of this file where it names no others."""
    root = assets()
    line = ["--hf-assets-path", str(root / "tokenizer"), "--dataloader.dataset-path", str(root / "text")]
    line += ["--dump-folder", str(root / "out"), *SIZES]
    return [*(() if "--module" in given else ("--module", MODULE)), *line, *given]


def parsed(*given: str) -> Any:
    """The config of a command line."""
    from torchtitan.config.manager import ConfigManager

    return ConfigManager().parse_args(arguments(*given))


@functools.cache
def _named(*given: str) -> Any:
    return parsed(*given)


def quickly_parsed(option: str, name: str, *given: str) -> Any:
    """`parsed`, which takes as long as a step: the named config is parsed once, and the other options are set."""
    config = copy.deepcopy(_named(option, name))
    for word, value in zip(given, [*given, "--"][1:], strict=True):
        if not word.startswith("--"):
            continue
        path, _, last = word.removeprefix("--").replace("-", "_").rpartition(".")
        holder, on = functools.reduce(getattr, path.split("."), config), not last.startswith("no_")
        last = last.removeprefix("no_")
        getattr(holder, last)  # an option that does not exist is an error here too
        setattr(holder, last, on if value.startswith("--") else _value(value))
    return config


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def one_rank() -> None:
    """Make this process the only rank, unless a launcher has given it one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def launch() -> None:
    one_rank()
    sys.argv[1:] = arguments(*sys.argv[1:])
    patch_torchtitan()
    from torchtitan.train import main

    main()


patch_torch()

if __name__ == "__main__":
    launch()
