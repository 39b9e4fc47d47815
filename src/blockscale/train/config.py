"""What a run is, as plain frozen data: model, data, optimizer and the loop around them.

A run is described by one `RunConfig` and nothing else, so that a stored one repeats it. Every field has a default and
is an option of the command line, and `check` refuses what cannot be trained before anything is built. Imports no torch:
the command line reads it to print its help.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import OptionError, message

Dtype = Literal["float32", "bfloat16"]
Compile = Literal["none", "blocks"]
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
    """A recipe: bf16, fp8_blockwise, mxfp8, nvfp4, ..."""
    weight_cast: Literal["forward", "twice", "step"] = "step"
    """When weights are cast, see docs/weights.md; step: once for all microbatches."""
    weights: str | None = None
    """Another format for weights, such as mxfp8_e4m3_128x128."""
    keep_first: int | None = None
    """Blocks at the start that stay in high precision; None: the default of the recipe."""
    keep_last: float | None = None
    """Blocks at the end, or a share of them."""


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
    profile: int = 0
    """Steps to write a profiler trace of, for Perfetto, after the first three."""
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


def fingerprint(config: object) -> str:
    """A short name of a config's content."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]


def _refuse(what: str, rule: str, fix: str) -> None:
    raise OptionError(message(what, rule=rule, fix=fix))


def check(config: RunConfig) -> None:
    """Raise for what cannot be trained, with the value, the rule and the fix."""
    _check_model(config.model)
    _check_optimizer(config.optimizer)
    for name, least in (("steps", 1), ("batch", 1), ("accumulate", 1), ("loss_chunks", 1), ("log_every", 1)):
        if getattr(config, name) < least:
            _refuse(f"{name}={getattr(config, name)}", f"it is {least} or more", f"pass {name}={least} or more")
    for name in ("eval_every", "eval_batches", "save_every", "profile"):
        if getattr(config, name) < 0:
            _refuse(f"{name}={getattr(config, name)}", "it is a count, and 0 means never", f"pass {name}=0 or more")
    if config.keep < 1:
        _refuse(f"keep={config.keep}", "the last checkpoint always stays", "pass keep=1 or more")
    if config.data.sequence < 2:
        _refuse(f"sequence={config.data.sequence}", "a piece predicts at least one symbol", "pass sequence=2 or more")
    if not 0 < config.data.held_out < 1:
        _refuse(
            f"held_out={config.data.held_out}",
            "a share of the files between 0 and 1 is validated on",
            "pass held_out=0.1",
        )
    if config.folder is None:
        for name in ("resume", "save_every", "profile", "tensorboard"):
            if getattr(config, name):
                _refuse(
                    f"{name}={getattr(config, name)} without a folder",
                    "checkpoints, traces and metrics are kept in the folder of a run",
                    f"pass folder=out/{config.name}",
                )
    if config.export is not None and (config.model.experts is not None or config.model.latent is not None):
        _refuse(
            f"export={config.export} of a model with experts or latent attention",
            "dense models with grouped queries have names that every Llama loader knows",
            "leave it out; checkpoints hold every weight by its own name",
        )


def _check_optimizer(config: OptimizerConfig) -> None:
    for name, high in (("warmup", 1.0), ("decay", 1.0), ("floor", 1.0), ("beta1", 1.0), ("beta2", 1.0)):
        if not 0 <= getattr(config, name) <= high:
            _refuse(f"{name}={getattr(config, name)}", f"it is a share from 0 to {high:g}", f"pass {name}=0.1")
    for name in ("rate", "eps", "weight_decay", "clip"):
        if not 0 <= getattr(config, name) < float("inf"):
            _refuse(f"{name}={getattr(config, name)}", "it is finite and not negative", "pass 0 or more")
    if config.schedule == "wsd" and config.warmup + config.decay > 1:
        _refuse(
            f"warmup={config.warmup} and decay={config.decay}",
            "both are shares of the same steps, and wsd has all of its phases",
            "pass shares that add up to 1 at most",
        )


def _check_model(config: ModelConfig) -> None:
    for name in ("dim", "layers", "heads", "kv_heads", "hidden", "vocabulary"):
        if getattr(config, name) < 1:
            _refuse(f"{name}={getattr(config, name)}", "sizes of a model are positive", f"pass {name}=1 or more")
    if config.latent is None:
        if config.heads % config.kv_heads:
            _refuse(
                f"heads={config.heads} with kv_heads={config.kv_heads}",
                "each head of keys and values serves as many heads of queries",
                "pass a kv_heads that divides heads",
            )
        if not config.head_dim and config.dim % config.heads:
            _refuse(f"dim={config.dim} with heads={config.heads}", "heads share dim evenly", "pass head_dim too")
        rotated = config.head_width
    else:
        rotated = config.latent.rope_dim
        for name in ("kv_rank", "nope_dim", "value_dim"):
            if getattr(config.latent, name) < 1:
                _refuse(f"latent.{name}={getattr(config.latent, name)}", "sizes are positive", "pass 1 or more")
    if rotated % 2:
        _refuse(f"heads with {rotated} rotated features", "positions rotate pairs of features", "pass an even number")
    experts = config.experts
    if experts is None:
        return
    if not 1 <= experts.top_k <= experts.count:
        _refuse(
            f"top_k={experts.top_k} of {experts.count} experts",
            "a token goes to at least one expert, and to each no more than once",
            "pass experts.top_k between the two",
        )
    if experts.hidden < 1 or experts.shared < 0 or experts.dense_layers < 0:
        _refuse(
            f"experts.hidden={experts.hidden}, shared={experts.shared}, dense_layers={experts.dense_layers}",
            "experts have hidden units, and the others are counts",
            "pass hidden=1 or more, and the others 0 or more",
        )
