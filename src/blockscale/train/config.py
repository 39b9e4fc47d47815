"""Configuration of a run as frozen dataclasses: data, optimizer, recipe and loop, around the sizes of `models.config`.

One `RunConfig` describes a run completely, so that a stored config repeats it. Every field has a default and is an
option of the command line; `checks.py` validates values. Imports no torch: the command line reads it to print its help.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..models.config import ModelConfig, RanksConfig, Recompute

Dtype = Literal["float32", "bfloat16"]
Compile = Literal["none", "blocks"]
WeightCast = Literal["forward", "twice", "step"]
Schedule = Literal["cosine", "wsd", "constant"]
Backend = Literal["auto", "flash", "cudnn", "efficient", "math"]


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and sequence length."""

    source: str = "stdlib"
    """stdlib: Python's standard library. python: that and all installed packages. Else a text file or a folder."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json; None: bytes."""
    sequence: int = 32
    """Symbols of a sequence."""
    held_out: float = 0.1
    """Share of the files for validation, never trained on."""
    cache: Path | None = None
    """Folder of tokenized text; None: in the user's cache."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, fused; norms and biases do not decay."""

    rate: float = 3e-3
    """Highest learning rate."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest norm of the gradient; 0: not clipped."""
    schedule: Schedule = "cosine"
    """cosine: down to `floor` along a cosine. wsd: constant, then linear over `decay`. constant: no decay."""
    warmup: float = 0.1
    """Share of the steps with a linearly rising rate."""
    decay: float = 0.2
    """wsd: share of the steps at the end with a falling rate."""
    floor: float = 0.1
    """Last rate, as a share of the highest."""


@dataclass(frozen=True)
class RecipeConfig:
    """Precision of the linear layers; see docs/recipes.md."""

    name: str = "fp8_blockwise"
    """A recipe: bf16, fp8_blockwise, mxfp8, mxfp8_128x128, nvfp4, ..."""
    weight_cast: WeightCast = "step"
    """When weights are cast, see docs/weights.md; step: once for all microbatches."""
    weights: str | None = None
    """Another format for weights, such as mxfp8_e4m3_128x128."""
    keep_first: int | None = None
    """Blocks at the start that stay unquantized; None: the default of the recipe."""
    keep_last: int | float | None = None
    """Blocks at the end that stay unquantized: a number, or a share of all blocks."""
    since: int = 0
    """First step in low precision, such as the end of the warm-up; all layers are bf16 before it."""
    keep_file: Path | None = None
    """File of `blockscale advise`: the layers that it lists stay unquantized."""


@dataclass(frozen=True)
class RunConfig:
    """One run."""

    name: str = "tiny"
    """Name in reports."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    steps: int = 100
    """Optimizer steps."""
    batch: int = 4
    """Sequences of a microbatch, of all ranks together."""
    accumulate: int = 1
    """Microbatches of a step."""
    seed: int = 0
    """Seed of initial weights, data order and stochastic rounding."""
    device: str | None = None
    """cpu or cuda; None: the first GPU if there is one."""
    parameters: Dtype = "float32"
    """float32: master weights, GEMMs in bf16. bfloat16: half the memory, and small updates round away."""
    compile: Compile = "none"
    """blocks: torch.compile of each block, and of the loss."""
    cuda_graph: bool = False
    """Capture forward and backward of a microbatch as a CUDA graph: for models bound by kernel launches."""
    recompute: Recompute = "none"
    """Activation recomputation. full: whole blocks. selective: all but GEMMs and attention."""
    attention: Backend = "auto"
    """Backend of torch's attention; auto: torch chooses."""
    deterministic: bool = False
    """Deterministic algorithms in torch: the same bits on the same GPU and versions; no cuDNN attention."""
    loss_chunks: int = 1
    """Chunks of the logits; more chunks take less memory with a large vocabulary."""
    log_every: int = 10
    """Steps between reports; results are read back from the GPU only then."""
    eval_every: int = 50
    """Steps between evaluations; 0: at the end only."""
    eval_batches: int = 8
    """Microbatches of held-out text for each evaluation."""
    folder: Path | None = None
    """Where checkpoints, metrics and traces go; None: nothing is written."""
    save_every: int = 0
    """Steps between checkpoints; 0: at the end and when interrupted."""
    keep: int = 2
    """Checkpoints to keep."""
    resume: bool = False
    """Resume from the last checkpoint in the folder."""
    start: Path | None = None
    """Start from another run's checkpoint, such as out/a/step-00001000; its recipe may differ."""
    profile: int = 0
    """Steps in a profiler trace for Perfetto, after the first three."""
    numerics_every: int = 0
    """Steps between samples of every layer's quantization noise, in numerics.jsonl; 0: never."""
    tensorboard: bool = False
    """Write TensorBoard's files too."""
    export: Path | None = None
    """Folder for the trained weights as safetensors with Hugging Face's names; dense models only."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulate * self.data.sequence


def to_dict(config: object) -> dict[str, Any]:
    """A config as plain JSON values."""
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def fingerprint(config: RunConfig) -> str:
    """Hash of a config, 12 hex digits."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


# fields that may change when a run resumes: names, paths and output
_MAY_CHANGE = frozenset({"name", "folder", "resume", "start", "device", "export", "profile", "keep", "data.cache"})


def changes(before: dict[str, Any], now: dict[str, Any], at: str = "") -> list[str]:
    """Differences between two configs of `to_dict`, as text; a field that one of them lacks is not compared.

    >>> changes({"steps": 10, "recipe": {"name": "bf16"}}, {"steps": 10, "recipe": {"name": "mxfp8"}})
    ['recipe.name bf16 -> mxfp8']
    """
    found: list[str] = []
    for key in before.keys() & now.keys():
        old, new = before[key], now[key]
        if isinstance(old, dict) and isinstance(new, dict):
            found += changes(old, new, f"{at}{key}.")
        elif old != new and f"{at}{key}" not in _MAY_CHANGE:
            found.append(f"{at}{key} {old} -> {new}")
    return sorted(found)
