"""Roofline time of the casts and products of a layer: bytes over bandwidth or FLOPs over rate, whichever is longer.

    fprop  Y  = X  @ W.mT   [M, K] @ [K, N]
    dgrad  dX = dY @ W      [M, N] @ [N, K]
    wgrad  dW = dY.mT @ X   [N, M] @ [M, K]

A recipe is given as the format of each operand's role, None for bf16 (`Recipe.formats()`). Bytes are the fewest: a cast
reads its input once and writes the operands of products, a product reads its operands and writes its result once. Steps
run one after the other, so their times add. Launches, clocks and caches are not modelled: this is a lower bound.

A SwiGLU MLP is y = (silu(x G.mT) * (x U.mT)) D.mT, with gate and up in one product. Quantized, the activation is fused
into the casts. Forward: reads gate_up [M, 2H] once and writes the operand [M, H] of the next product. Backward: reads
the gradient [M, H] and gate_up once, writes both operands of the gradient, and recomputes the wgrad operand of the down
projection. In bf16 forward and backward are one kernel each with the fewest bytes, which eager torch does not reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import check_name, refuse
from ..formats.spec import get_format
from .ceilings import Ceilings, Units, engine_for

Formats = Mapping[str, str | None]
ROLES = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
BF16: Formats = dict.fromkeys(ROLES)
WEIGHT_CASTS = ("forward", "twice", "step")
# decoded operands are bf16, whatever the source is
_DECODED = 2
MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Step:
    """One kernel.  bound: what limits it: "memory" or the dtype of the tensor cores."""

    name: str
    bytes: float
    flops: float
    seconds: float
    bound: str


@dataclass(frozen=True)
class LinearCost:
    """Steps of one or several layers, run one after the other."""

    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def bytes(self) -> float:
        return sum(step.bytes for step in self.steps)

    @property
    def flops(self) -> float:
        return sum(step.flops for step in self.steps)

    @property
    def largest(self) -> Step:
        """The step that takes most of the time."""
        return max(self.steps, key=lambda step: step.seconds)

    def of(self, *names: str) -> float:
        """Seconds of the steps with those names."""
        return sum(step.seconds for step in self.steps if step.name in names)


@dataclass(frozen=True)
class Use:
    """How a layer is used.

    training: False for the forward alone, with the weight cast beforehand.  microbatches: forwards and backwards per
    optimizer step; costs are per microbatch.  weight_cast: as in a recipe: in every "forward", "twice" (in forward and
    backward) or once a "step".  source_bytes: bytes per value of inputs, weights and results.  accumulate: wgrad adds
    into fp32 buffers.  amax_known: NVFP4 casts are given the amax, so they read their input once.
    """

    training: bool = True
    microbatches: int = 1
    weight_cast: Literal["forward", "twice", "step"] = "forward"
    bias: bool = False
    source_bytes: int = 2
    accumulate: bool = False
    amax_known: bool = False

    def __post_init__(self) -> None:
        check_name(self.weight_cast, WEIGHT_CASTS, "weight cast")
        if self.microbatches < 1:
            fix = "pass 1 or more"
            refuse(f"microbatches={self.microbatches}", rule="a step has at least one", fix=fix)


TRAINING, INFERENCE = Use(), Use(training=False)
CostOf = Callable[[int, int, int, Formats, Ceilings, Use], LinearCost]


def speedup(low: LinearCost, high: LinearCost) -> float:
    """Time of `high`, the layer in bf16, over the time of `low`."""
    return high.seconds / low.seconds


def stored_bytes(values: int, format: str | None, source_bytes: int = 2) -> float:
    """Bytes of that many values with their scales, as the library stores them; None: unquantized.

    >>> stored_bytes(1024, "fp8_1x128"), stored_bytes(1024, "nvfp4"), stored_bytes(1024, None)
    (1056.0, 576.0, 2048)
    """
    if format is None:
        return values * source_bytes
    spec = get_format(format)
    # FP6 codes take a byte each
    unused = 8 / spec.codes_per_byte - spec.element.bits
    return values * (spec.bits_per_value + unused) / 8


def linear_cost(
    tokens: int,
    in_features: int,
    out_features: int,
    formats: Formats,
    ceilings: Ceilings,
    use: Use = TRAINING,
    *,
    experts: int = 1,
) -> LinearCost:
    """Casts and products of a linear layer with that many tokens.

    experts: number of weights of a grouped layer; its tokens are rows: one for each expert that a token is routed to.

    >>> from blockscale.roofline import MEASURED
    >>> fp8 = dict.fromkeys(ROLES, "fp8_1x128") | {"fprop_w": "fp8_128x128", "dgrad_w": "fp8_128x128"}
    >>> low, high = (linear_cost(4096, 7168, 18432, each, MEASURED["h200"]) for each in (fp8, BF16))
    >>> f"{speedup(low, high):.2f}", low.largest.name, low.largest.bound
    ('1.87', 'fprop', 'fp8')
    """
    check_formats(formats)
    return Layer("", tokens, in_features, out_features, formats, ceilings, use, experts).cost()


def check_formats(formats: Formats) -> None:
    """Raise unless every role has a format, or None."""
    for role in formats:
        check_name(role, ROLES, "role")
    missing = [role for role in ROLES if role not in formats]
    if missing:
        rule = f"every role has a format or None: {', '.join(ROLES)}"
        refuse(f"formats without {missing[0]}", rule, fix="pass Recipe.formats()")


@dataclass(frozen=True)
class Layer:
    """Steps of one layer.

    name: prefix of the names of its steps.  m, k, n: tokens, input and output features.  experts: number of weights;
    each is cast and has a gradient, but products read only those of experts with rows.
    """

    name: str
    m: int
    k: int
    n: int
    formats: Formats
    ceilings: Ceilings
    use: Use
    experts: int = 1

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n, self.experts) < 1:
            sizes = f"{self.m} tokens, {self.k} to {self.n} features, {self.experts} experts"
            refuse(sizes, rule="a layer has at least one of each", fix="pass positive sizes")

    def cost(self) -> LinearCost:
        """All steps, in the order of a training step."""
        return LinearCost((*self.cast_input(), *self.forward(), *self.cast_gradient(), *self.backward()))

    def cast_input(self) -> Iterable[Step]:
        training = self.use.training
        yield from self.cast("cast x", self.m * self.k, ("fprop_x", "wgrad_x") if training else ("fprop_x",))

    def forward(self) -> Iterable[Step]:
        if self.use.training:
            yield from self._cast_weight()
        bias = self.busy * self.n * self.use.source_bytes if self.use.bias else 0
        yield from self._product("fprop", ("fprop_x", "fprop_w"), (self.m, self.n, self.k), extra=bias)

    @property
    def busy(self) -> int:
        """Largest possible number of experts with rows."""
        return min(self.experts, self.m)

    def cast_gradient(self) -> Iterable[Step]:
        if not self.use.training:
            return
        source = self.use.source_bytes
        steps = list(self.cast("cast dy", self.m * self.n, ("dgrad_dy", "wgrad_dy")))
        if self.use.bias and not steps:  # a cast of the gradient also sums its columns
            steps = [self.moved("bias grad", self.m * self.n * source + self.experts * self.n * source)]
        yield from steps

    def backward(self) -> Iterable[Step]:
        if not self.use.training:
            return
        m, n, k = self.m, self.n, self.k
        yield from self._product("dgrad", ("dgrad_dy", "dgrad_w"), (m, k, n))
        result = 8 if self.use.accumulate else self.use.source_bytes  # fp32 is read and written
        yield from self._product("wgrad", ("wgrad_dy", "wgrad_x"), (n, k, m), result=result)

    def cast(self, name: str, values: int, roles: Sequence[str]) -> Iterable[Step]:
        """A cast: one read, or two with an amax pass; every operand is written. No step if all roles are bf16."""
        low = [self.formats[role] for role in roles if self.formats[role] is not None]
        if low:
            read = self.reads(low) * values * self.use.source_bytes
            yield self.moved(name, read + sum(stored_bytes(values, format) for format in low))

    def reads(self, formats: Sequence[str | None]) -> int:
        """Number of times that a cast to those formats reads its input."""
        needs_amax = any(format is not None and get_format(format).family == "nvfp4" for format in formats)
        return 2 if needs_amax and not self.use.amax_known else 1

    def moved(self, name: str, count: float) -> Step:
        """A memory-bound step that moves `count` bytes."""
        return Step(self.name + name, count, 0, count / self.ceilings.bandwidth, "memory")

    def _cast_weight(self) -> Iterable[Step]:
        values, use = self.experts * self.n * self.k, self.use
        if use.weight_cast == "twice":
            yield from self.cast("cast w", values, ("fprop_w",))
            yield from self.cast("cast w again", values, ("dgrad_w",))
            return
        share = use.microbatches if use.weight_cast == "step" else 1
        for step in self.cast("cast w", values, ("fprop_w", "dgrad_w")):
            yield self.moved("cast w", step.bytes / share)

    def _product(
        self,
        name: str,
        roles: tuple[str, str],
        size: tuple[int, int, int],
        *,
        extra: int = 0,
        result: int | None = None,
    ) -> Iterable[Step]:
        """A product, and a decode step before it on machines without tensor cores for its formats.

        size: rows, columns and contracted length.  extra: further bytes.  result: bytes per value of the result. With
        experts the second operand has one matrix per expert, or in wgrad the result has.
        """
        rows, columns, depth = size
        matrices, results = (1, self.experts) if name == "wgrad" else (self.busy, 1)
        formats = tuple(self.formats[role] for role in roles)
        engine = engine_for(self.ceilings.architecture, formats[0], formats[1])
        source = self.use.source_bytes
        operands = sum(
            stored_bytes(count * depth, format, source)
            for count, format in zip((rows, matrices * columns), formats, strict=True)
        )
        if engine.upcast:
            decoded = (rows + matrices * columns) * depth * _DECODED
            yield self.moved(f"decode for {name}", operands + decoded)
            operands = decoded
        written = results * rows * columns * (source if result is None else result) + extra
        yield self._multiplied(name, operands + written, 2 * rows * columns * depth, engine.units)

    def _multiplied(self, name: str, count: float, flops: int, units: Units) -> Step:
        memory, compute = count / self.ceilings.bandwidth, flops / self.ceilings.rate(units)
        return Step(self.name + name, count, flops, max(memory, compute), units if compute > memory else "memory")


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


def swiglu_cost(
    tokens: int,
    features: int,
    hidden: int,
    formats: Formats,
    ceilings: Ceilings,
    use: Use = TRAINING,
    *,
    experts: int = 1,
) -> LinearCost:
    """Casts, products and activations of features -> 2 * hidden -> features.

    experts: as for `linear_cost`; without routing and without the sum over a token's experts.

    >>> from blockscale.roofline import MEASURED
    >>> [step.name for step in swiglu_cost(4096, 7168, 18432, BF16, MEASURED["h200"], INFERENCE).steps]
    ['up fprop', 'swiglu', 'down fprop']
    """
    check_formats(formats)
    up = Layer("up ", tokens, features, 2 * hidden, formats, ceilings, use, experts)
    down = Layer("down ", tokens, hidden, features, formats, ceilings, use, experts)
    steps = [*up.cast_input(), *up.forward(), _activation(up), *down.forward()]
    if use.training:
        steps += [*down.cast_gradient(), *down.backward(), _gradient(up), *up.backward()]
    return LinearCost(tuple(steps))


def _activation(up: Layer) -> Step:
    """[M, 2H] to the fprop operand of the down projection; the backward recomputes its wgrad operand."""
    half, source = up.m * up.n // 2, up.use.source_bytes
    format = up.formats["fprop_x"]
    written = _written(half, (format,), source)
    if up.use.training and up.formats["wgrad_x"] is None and format is not None:
        written += half * source  # saved in bf16: the backward does not recompute it
    return replace(up, name="").moved("swiglu", up.reads((format,)) * 2 * half * source + written)


def _gradient(up: Layer) -> Step:
    """[M, H] and [M, 2H] to both operands of [M, 2H], and the wgrad operand of the down projection."""
    half, source = up.m * up.n // 2, up.use.source_bytes
    gradients, again = (up.formats["dgrad_dy"], up.formats["wgrad_dy"]), up.formats["wgrad_x"]
    read = up.reads((*gradients, again)) * 3 * half * source
    written = _written(2 * half, gradients, source) + (0 if again is None else stored_bytes(half, again))
    return replace(up, name="").moved("swiglu backward", read + written)


def _written(values: int, formats: Sequence[str | None], source: int) -> float:
    """Bytes written: each quantized operand, and one bf16 copy however many products read it."""
    low = sum(stored_bytes(values, format) for format in formats if format is not None)
    return low + (values * source if None in formats else 0)


# ---- speedups --------------------------------------------------------------------------------------------------------


def predicted_speedup(
    tokens: int, in_features: int, out_features: int, formats: Formats, ceilings: Ceilings, use: Use = TRAINING
) -> float:
    """Predicted speedup of a linear layer over bf16.

    >>> from blockscale.roofline import MEASURED
    >>> predicted_speedup(4096, 7168, 18432, BF16, MEASURED["h200"])
    1.0
    """
    low, high = (linear_cost(tokens, in_features, out_features, each, ceilings, use) for each in (formats, BF16))
    return speedup(low, high)


def advise(
    in_features: int,
    out_features: int,
    formats: Formats,
    ceilings: Ceilings,
    use: Use = TRAINING,
    *,
    margin: float = 1.0,
    most: int = MOST_TOKENS,
    cost: CostOf = linear_cost,
) -> int | None:
    """The fewest tokens from which on, up to `most`, the layer is more than `margin` times faster; None if never.

    cost: the layer's cost function: `linear_cost` or `swiglu_cost`.

    >>> from blockscale.roofline import MEASURED
    >>> fp8 = dict.fromkeys(ROLES, "fp8_1x128") | {"fprop_w": "fp8_128x128", "dgrad_w": "fp8_128x128"}
    >>> advise(7168, 18432, fp8, MEASURED["h200"]), advise(7168, 18432, BF16, MEASURED["h200"])
    (251, None)
    """

    def pays(tokens: int) -> bool:
        low, high = (cost(tokens, in_features, out_features, each, ceilings, use) for each in (formats, BF16))
        return speedup(low, high) > margin

    if not pays(most):
        return None
    # halve down to the first count that does not pay, then bisect: a speedup may also fall with more tokens
    enough = most
    while enough > 1 and pays(enough // 2):
        enough //= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if pays(middle) else (enough, middle)
    return enough
