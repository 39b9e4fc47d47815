"""What a run is, as plain frozen data: model, data, optimizer and the loop around them.

A run is described by one `RunConfig` and nothing else, so that a stored one repeats it. Every field has a default and
is an option of the command line; `checks.py` refuses what cannot be trained. Imports no torch: the command line reads
it to print its help.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
Compile = Literal["none", "blocks"]
WeightCast = Literal["forward", "twice", "step"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["cosine", "wsd", "constant"]
Backend = Literal["auto", "flash", "cudnn", "efficient", "math"]


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come out of one narrow vector."""

    kv_rank: int = 512
    """Width of the vector that keys and values are made from."""
    q_rank: int = 0
    """Width of the vector that queries are made from; 0: queries are projected directly."""
    nope_dim: int = 128
    """Features of a head's query and key without a position."""
    rope_dim: int = 64
    """Features of a head's query and key with a position; all heads share the key's."""
    value_dim: int = 128
    """Features of a head's value."""


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP, as in DeepSeek-V3 (arXiv:2412.19437)."""

    count: int = 64
    """Experts of a layer."""
    top_k: int = 6
    """Experts that a token goes to."""
    hidden: int = 1408
    """Hidden units of an expert."""
    shared: int = 2816
    """Hidden units of the expert that every token passes; 0: none."""
    dense_layers: int = 1
    """Layers at the start that have an ordinary MLP."""
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    """How the router's scores are made."""
    normalize: bool = True
    """Whether the weights of a token's experts add up to one."""
    scale: float = 1.0
    """A factor of those weights."""
    balance_rate: float = 1e-3
    """Step of the bias that evens out the load; 0: no bias."""


@dataclass(frozen=True)
class ModelConfig:
    """A transformer: Llama's with `latent` and `experts` left out, DeepSeek-V3's with both."""

    dim: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Heads of queries."""
    kv_heads: int = 2
    """Heads of keys and values; ignored by latent attention."""
    hidden: int = 192
    """Hidden units of the MLP."""
    vocabulary: int = 256
    """Symbols: 256 for bytes, at least as many as a tokenizer has."""
    head_dim: int = 0
    """Features of a head; 0: dim / heads."""
    rope_theta: float = 10000.0
    """Base of the rotary positions."""
    norm_eps: float = 1e-5
    """Added to the mean square within RMS norms."""
    qk_norm: bool = False
    """Whether queries and keys are normed, head by head."""
    tied: bool = False
    """Whether embedding and output head share one weight."""
    latent: LatentConfig | None = None
    """Latent attention in place of grouped queries."""
    experts: ExpertsConfig | None = None
    """A mixture of experts in place of the MLP."""

    @property
    def head_width(self) -> int:
        """Features of a head."""
        return self.head_dim or self.dim // self.heads


@dataclass(frozen=True)
class DataConfig:
    """Which text, as which symbols, in pieces of which length."""

    source: str = "stdlib"
    """stdlib: Python's standard library. python: that and all installed packages. Else a text file or a folder."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizer.json; None: bytes."""
    sequence: int = 32
    """Symbols of a piece."""
    held_out: float = 0.1
    """Share of the files that is validated on and never trained on."""
    cache: Path | None = None
    """Folder of prepared text; None: in the user's cache."""


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
    """cosine: down to `floor` along a cosine. wsd: constant, then linear over `decay`. constant: as it says."""
    warmup: float = 0.1
    """Share of the steps over which the rate rises."""
    decay: float = 0.2
    """wsd: share of the steps at the end over which the rate falls."""
    floor: float = 0.1
    """Last rate, as a share of the highest."""


@dataclass(frozen=True)
class RecipeConfig:
    """In which precision the linear layers train; see docs/recipes.md."""

    name: str = "fp8_blockwise"
    """A recipe: bf16, fp8_blockwise, mxfp8, mxfp8_128x128, nvfp4, ..."""
    weight_cast: WeightCast = "step"
    """When weights are cast, see docs/weights.md; step: once for all microbatches."""
    weights: str | None = None
    """Another format for weights, such as mxfp8_e4m3_128x128."""
    keep_first: int | None = None
    """Blocks at the start that stay in high precision; None: the default of the recipe."""
    keep_last: int | float | None = None
    """Blocks at the end, or a share of them."""
    since: int = 0
    """The step up to which all layers stay in high precision, such as the last of the warm-up; 0: none."""
    keep_file: Path | None = None
    """What `blockscale advise` wrote: the layers that it would keep stay in high precision."""


@dataclass(frozen=True)
class RunConfig:
    """One run."""

    name: str = "tiny"
    """What it is called in reports."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    steps: int = 100
    """Optimizer steps."""
    batch: int = 4
    """Sequences of a microbatch."""
    accumulate: int = 1
    """Microbatches of a step."""
    seed: int = 0
    """Of initial weights, data order and stochastic rounding."""
    device: str | None = None
    """cpu or cuda; None: the first GPU if there is one."""
    parameters: Dtype = "float32"
    """float32: master weights, multiplied in bf16. bfloat16: half the memory, and small updates round away."""
    compile: Compile = "none"
    """blocks: torch.compile of each block, and of the loss."""
    cuda_graph: bool = False
    """Capture forward and backward of a microbatch once and replay it: for models that wait for the host."""
    recompute: Recompute = "none"
    """What the backward computes again. full: whole blocks. selective: all but products and attention."""
    attention: Backend = "auto"
    """Which of torch's attentions; auto leaves it to torch."""
    deterministic: bool = False
    """Torch takes what gives the same bits in every run on the same GPU and versions, and no cuDNN attention."""
    loss_chunks: int = 1
    """Pieces in which logits are made; more take less memory where the vocabulary is large."""
    log_every: int = 10
    """Steps between reports; only then is anything read back from the GPU."""
    eval_every: int = 50
    """Steps between evaluations; 0: at the end only."""
    eval_batches: int = 8
    """Microbatches of held-out text for each evaluation."""
    folder: Path | None = None
    """Where checkpoints, metrics and traces go; None: nothing is written."""
    save_every: int = 0
    """Steps between checkpoints; 0: at the end and when interrupted."""
    keep: int = 2
    """Checkpoints that stay."""
    resume: bool = False
    """Go on from the last checkpoint in the folder."""
    start: Path | None = None
    """Begin with another run's checkpoint, such as out/a/step-00001000; that run's recipe may have been another."""
    profile: int = 0
    """Steps to write a profiler trace of, for Perfetto, after the first three."""
    numerics_every: int = 0
    """Steps between samples of what the recipe does to every layer, into numerics.jsonl; 0: never."""
    tensorboard: bool = False
    """Write TensorBoard's files too."""
    export: Path | None = None
    """Folder for the trained weights as safetensors with Hugging Face's names; dense models only."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulate * self.data.sequence


def to_dict(config: object) -> dict[str, Any]:
    """A config as JSON holds it."""
    assert dataclasses.is_dataclass(config)
    assert not isinstance(config, type)
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def fingerprint(config: RunConfig) -> str:
    """A short name of a config's content."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


# of a run that goes on: what it is called, where it is, and what is written of it
_MAY_CHANGE = frozenset({"name", "folder", "resume", "start", "device", "export", "profile", "keep", "data.cache"})


def changes(before: dict[str, Any], now: dict[str, Any], at: str = "") -> list[str]:
    """What differs between two configs as `to_dict` gives them, in words; fields that one of them lacks are new.

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
