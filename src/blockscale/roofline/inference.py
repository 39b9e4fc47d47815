"""Roofline time of inference on one GPU: a decoding step, and a prefill, by the format of the weights.

A decoding step reads every weight once, of a mixture those of the experts that its tokens touch, and each request's
cache of keys and values. A part takes its bytes over the bandwidth or its FLOPs over the rate, whichever is longer, and
parts run one after the other. Weights are read packed: a weight-only product decodes them in registers. Norms, routers,
samplers, launches and the host are left out.

Caches, heads and routers stay in bf16. Of gpt-oss only the experts are quantized, as its checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import refuse
from ..formats.spec import check_pair, get_format
from .ceilings import Ceilings, Units, engine_for
from .model import LinearCost, Step, stored_bytes

_BF16 = 2  # bytes


@dataclass(frozen=True)
class ServedExperts:
    """Experts of a layer.  hidden: units of one.  shared: hidden units of the shared expert.  dense_layers: layers
    without experts.  alone: whether only experts are quantized."""

    count: int
    top_k: int
    hidden: int
    shared: int = 0
    dense_layers: int = 0
    alone: bool = False


@dataclass(frozen=True)
class ServedLatent:
    """Latent attention.  q_rank, kv_rank: widths of the latents.  nope, rope, value: features of a head."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ServedModel:
    """Sizes of a transformer that generates.

    width: features of a head.  hidden: units of a dense MLP, 0 without one.  window: tokens that every second layer
    attends to; 0: all of them.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    vocabulary: int
    experts: ServedExperts | None = None
    latent: ServedLatent | None = None
    window: int = 0

    @property
    def attention(self) -> int:
        """Weights of the projections of one layer."""
        if self.latent is None:
            return self.dim * self.width * 2 * (self.heads + self.kv_heads)
        sizes, dim = self.latent, self.dim
        down = dim * (sizes.q_rank + sizes.kv_rank + sizes.rope)
        up = sizes.q_rank * (sizes.nope + sizes.rope) + sizes.kv_rank * (sizes.nope + sizes.value)
        return down + self.heads * (up + sizes.value * dim)

    @property
    def dense(self) -> int:
        """Weights of all layers that every token multiplies: projections, dense MLPs, shared experts."""
        experts = self.experts
        mlps = self.layers if experts is None else experts.dense_layers
        shared = 0 if experts is None else (self.layers - mlps) * experts.shared
        return self.layers * self.attention + 3 * self.dim * (mlps * self.hidden + shared)

    @property
    def expert(self) -> int:
        """Weights of one expert in all layers that have experts."""
        experts = self.experts
        return 0 if experts is None else 3 * self.dim * experts.hidden * (self.layers - experts.dense_layers)

    @property
    def parameters(self) -> int:
        """All weights but norms, routers and biases; embedding and head counted apart."""
        experts = 0 if self.experts is None else self.experts.count * self.expert
        return self.dense + experts + 2 * self.dim * self.vocabulary

    def attended(self, context: int) -> float:
        """Tokens whose keys and values a layer reads, in the mean over layers."""
        return context if not self.window else (context + min(context, self.window)) / 2

    def causal(self, context: int, prompt: int) -> float:
        """Tokens that a token of a prompt attends to, itself and a context before it included, in the mean over the
        prompt and over layers."""
        whole = context + (prompt + 1) / 2
        if not self.window:
            return whole
        growing = min(max(self.window - context, 0), prompt)  # tokens with less than a window before them
        windowed = growing * (context + (growing + 1) / 2) + (prompt - growing) * self.window
        return (whole + windowed / prompt) / 2

    @property
    def cached(self) -> int:
        """Values of a token in the cache of one layer."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope
        return 2 * self.kv_heads * self.width

    def attending(self, *, prefill: bool) -> int:
        """FLOPs of a new token with one token before it in one layer: scores and weighted sum. Latent attention decodes
        in the space of the latent, and prefills with keys and values."""
        if self.latent is None:
            return 4 * self.heads * self.width
        sizes = self.latent
        if prefill:
            return 2 * self.heads * (sizes.nope + sizes.rope + sizes.value)
        return 2 * self.heads * (2 * sizes.kv_rank + sizes.rope)


# sizes as in the models' published config.json
SERVED_MODELS: Mapping[str, ServedModel] = {
    "Llama3 8B": ServedModel(4096, 32, 32, 8, 128, 14336, 128256),
    "Llama3 70B": ServedModel(8192, 80, 64, 8, 128, 28672, 128256),
    "Qwen3 8B": ServedModel(4096, 36, 32, 8, 128, 12288, 151936),
    "Qwen3 32B": ServedModel(5120, 64, 64, 8, 128, 25600, 151936),
    "Qwen3 30B-A3B": ServedModel(2048, 48, 32, 4, 128, 0, 151936, ServedExperts(128, 8, 768)),
    "gpt-oss 20B": ServedModel(
        2880, 24, 64, 8, 64, 0, 201088, ServedExperts(32, 4, 2880, alone=True), window=128
    ),
    "gpt-oss 120B": ServedModel(
        2880, 36, 64, 8, 64, 0, 201088, ServedExperts(128, 4, 2880, alone=True), window=128
    ),
    "DeepSeek-V3 671B": ServedModel(
        7168, 61, 128, 128, 128, 18432, 129280,
        ServedExperts(256, 8, 2048, 2048, 3), ServedLatent(1536, 512, 128, 64, 128),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """How a model is served.

    weights: format of the quantized weights; None: bf16.  activations: format that products cast their inputs to; None:
    bf16, which is weight-only.  batch: requests.  context: tokens of each in the cache.
    """

    weights: str | None = None
    activations: str | None = None
    batch: int = 1
    context: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 0)):
            value = getattr(self, name)
            if value < least:
                refuse(f"{name}={value}", f"{name} is at least {least}", f"pass {name}={least} or more")
        if self.weights is not None:
            get_format(self.weights)
        if self.activations is not None:
            if self.weights is None:
                rule = "a product with bf16 weights multiplies bf16"
                refuse(f"activations={self.activations!r} without weights", rule, "name the format of the weights, too")
            check_pair(self.activations, self.weights)


def units_of(serving: Serving, ceilings: Ceilings) -> Units:
    """Tensor cores of the quantized products: bf16 if they are weight-only, or if the machine decodes both operands.

    >>> from blockscale.roofline import MEASURED
    >>> units_of(Serving("fp8_128x128", "fp8_1x128"), MEASURED["h200"]), units_of(Serving("mxfp4"), MEASURED["h200"])
    ('fp8', 'bf16')
    """
    if serving.weights is None or serving.activations is None:
        return "bf16"
    return engine_for(ceilings.architecture, serving.activations, serving.weights).units


def turning_batch(serving: Serving, ceilings: Ceilings) -> float:
    """Rows at which the bytes and the FLOPs of a weight take equal time: fewer are bound by memory.

    >>> from blockscale.roofline import MEASURED
    >>> [round(turning_batch(Serving(each), MEASURED["h200"])) for each in ("mxfp4", "mxfp8_e4m3", None)]
    [43, 84, 162]
    """
    rate = ceilings.rate(units_of(serving, ceilings))
    return stored_bytes(1, serving.weights) * rate / (2 * ceilings.bandwidth)


def touched_experts(experts: ServedExperts, tokens: int) -> float:
    """Expected number of experts of a layer that have rows, if each token chooses uniformly and independently.

    >>> round(touched_experts(ServedExperts(32, 4, 2880), 16), 1)
    28.2
    """
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)


def decode_cost(model: ServedModel, serving: Serving, ceilings: Ceilings) -> LinearCost:
    """Parts of one decoding step: every request gets one token.

    >>> from blockscale.roofline import MEASURED
    >>> cost = decode_cost(SERVED_MODELS["Llama3 8B"], Serving("mxfp4"), MEASURED["h200"])
    >>> f"{1 / cost.seconds:.0f} tokens/s"
    '858 tokens/s'
    """
    parts = _Parts(model, serving, ceilings)
    context, batch = model.attended(serving.context), serving.batch
    attended = batch * context * model.layers
    # keys and values of the context are read, and those of the new tokens written
    stored = (attended + batch * model.layers) * model.cached * _BF16
    attention = parts.part("cache", stored, attended * model.attending(prefill=False))
    return LinearCost((*parts.weights(batch), attention, parts.head(batch)))


def prefill_cost(model: ServedModel, serving: Serving, prompt: int, ceilings: Ceilings) -> LinearCost:
    """Parts of a prefill: `serving.batch` prompts of so many tokens, after `serving.context` tokens each, to the logits
    of the last ones. Attention reads what is cached once."""
    if prompt < 1:
        refuse(f"prompt={prompt}", "a prefill has at least one token", "pass prompt=1 or more")
    parts, tokens = _Parts(model, serving, ceilings), serving.batch * prompt
    pairs = model.causal(serving.context, prompt)
    stored = serving.batch * (model.attended(serving.context) + prompt) * model.layers * model.cached * _BF16
    flops = tokens * pairs * model.layers * model.attending(prefill=True)
    if model.latent is not None:  # keys and values of what is cached
        expanded = model.latent.kv_rank * model.heads * (model.latent.nope + model.latent.value)
        flops += 2 * serving.batch * serving.context * model.layers * expanded
    attention = parts.part("cache", stored, flops)
    return LinearCost((*parts.weights(tokens), attention, parts.head(serving.batch)))


@dataclass(frozen=True)
class _Parts:
    """Steps of a forward."""

    model: ServedModel
    serving: Serving
    ceilings: Ceilings

    def part(self, name: str, count: float, flops: float, units: Units = "bf16") -> Step:
        """A part: bytes over the bandwidth, or FLOPs over the rate."""
        memory, compute = count / self.ceilings.bandwidth, flops / self.ceilings.rate(units)
        return Step(name, count, flops, max(memory, compute), "memory" if memory >= compute else units)

    def weights(self, tokens: int) -> Iterator[Step]:
        """Products of so many tokens with the weights of all layers."""
        model, experts = self.model, self.model.experts
        plain = experts is not None and experts.alone
        yield self._product("dense", model.dense, tokens, quantized=not plain)
        if experts is not None:
            touched = touched_experts(experts, tokens)
            yield self._product("experts", touched * model.expert, tokens * experts.top_k / touched)

    def head(self, tokens: int) -> Step:
        """Logits of so many tokens."""
        return self._product("head", self.model.dim * self.model.vocabulary, tokens, quantized=False)

    def _product(self, name: str, values: float, rows: float, *, quantized: bool = True) -> Step:
        """Products of weights with so many rows each."""
        format, units = (self.serving.weights, units_of(self.serving, self.ceilings)) if quantized else (None, "bf16")
        return self.part(name, values * stored_bytes(1, format), 2 * values * rows, units)
