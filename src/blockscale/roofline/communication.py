"""Model of communication beside compute: what FSDP, tensor and expert parallelism send for a transformer block.

Every collective has its bytes by the formulas that rank tests count: a weight of `fp8_128x128` is 1 byte and 4 / 128^2
bytes of scale, a token of `fp8_1x128` 1 byte and 4 / 128 for each feature. It takes the latency of the link and its
bytes over the bandwidth, of N ranks in a ring or a switch: (N - 1) / N of a whole tensor crosses the link of each rank.

Compute is the roofline of casts and products (`model.py`). Attention itself, norms, embeddings, the loss and the
optimizer are left out of it, so there is more to hide communication behind than it says. Two bounds follow: serial, one
after the other, and overlapped, the longer of both. Neither is a prediction of what an engine reaches between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import check_name, refuse
from .ceilings import Ceilings
from .links import Link
from .model import TRAINING, Formats, Use, linear_cost, stored_bytes, swiglu_cost

_BF16 = 2
# how data of each kind of parallelism travels
PAYLOADS = {"fsdp": ("bf16", "codes"), "tp": ("bf16", "owner", "requantized"), "ep": ("bf16", "low")}


@dataclass(frozen=True)
class Transfer:
    """One collective of N ranks.  given: bytes that a rank passes to it.  wire: bytes that leave a rank over its link,
    as many as reach it."""

    name: str
    given: float
    wire: float

    def seconds(self, link: Link) -> float:
        """Latency, and bytes over the bandwidth."""
        return link.latency + self.wire / link.bandwidth


def all_gather(name: str, given: float, ranks: int) -> Transfer:
    """Every rank gets the bytes of all."""
    return Transfer(name, given, given * (ranks - 1))


def scatter(name: str, given: float, ranks: int) -> Transfer:
    """Every rank gets its part of what all have: a reduce-scatter, or an all-to-all of rows that spread evenly."""
    return Transfer(name, given, given * (ranks - 1) / ranks)


def fsdp_transfers(weights: int, format: str | None, ranks: int) -> tuple[Transfer, ...]:
    """Weights gathered for the forward and again for the backward, gradients summed in bf16.  weights: values of the
    block.  format: of gathered codes, None for bf16.

    >>> [round(each.wire) for each in fsdp_transfers(1 << 20, "fp8_128x128", 8)]
    [917728, 917728, 1835008]
    """
    shard = stored_bytes(weights, format, _BF16) / ranks
    return (
        all_gather("weights", shard, ranks),
        all_gather("weights again", shard, ranks),
        scatter("gradients", weights * _BF16, ranks),
    )


def tp_transfers(
    tokens: int, features: int, formats: Formats, ranks: int, *, gathers: str = "bf16"
) -> tuple[Transfer, ...]:
    """A column-parallel layer and the row-parallel one after it, with sequence parallelism between such pairs.

    tokens: of all ranks.  gathers: "bf16", x and dy as they are; "owner", both operands of each as codes;
    "requantized", the row operands alone. Partial sums of y and dx travel in bf16.
    """
    values = tokens * features
    roles = {
        "bf16": (("x", None), ("dy", None)),
        "owner": (
            ("x rows", "fprop_x"),
            ("dy rows", "dgrad_dy"),
            ("dy columns", "wgrad_dy"),
            ("x columns", "wgrad_x"),
        ),
        "requantized": (("x rows", "fprop_x"), ("dy rows", "dgrad_dy")),
    }[gathers]
    own = values // ranks
    gathered = (
        all_gather(name, stored_bytes(own, None if role is None else formats[role], _BF16), ranks)
        for name, role in roles
    )
    return (*gathered, *(scatter(name, values * _BF16, ranks) for name in ("y", "dx")))


def ep_transfers(
    tokens: int, features: int, top_k: int, experts: int, formats: Formats | None, ranks: int
) -> tuple[Transfer, ...]:
    """Rows of tokens to experts that are spread evenly, results back, and the gradients of both.  tokens: of a rank.
    formats: of rows and of the gradients of results, None for bf16."""
    rows = tokens * top_k * features
    there, back = (None if formats is None else formats[role] for role in ("fprop_x", "dgrad_dy"))
    return (
        all_gather("numbers of rows", 8 * experts + 32, ranks),
        scatter("tokens", stored_bytes(rows, there, _BF16), ranks),
        scatter("results", rows * _BF16, ranks),
        scatter("gradients of results", stored_bytes(rows, back, _BF16), ranks),
        scatter("gradients of tokens", rows * _BF16, ranks),
    )


# ---- a model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Linear layers of a transformer block.

    count: of such blocks in the model.  linears: (in, out features) of attention.  mlp: (features, hidden) of the gated
    MLP that every token passes.  experts, top_k, expert: of a mixture, with (features, hidden) of one expert.
    """

    count: int
    linears: tuple[tuple[int, int], ...]
    mlp: tuple[int, int]
    experts: int = 0
    top_k: int = 0
    expert: tuple[int, int] = (0, 0)

    @property
    def features(self) -> int:
        return self.mlp[0]

    @property
    def weights(self) -> int:
        """Number of values of all weights."""
        gated = 3 * self.mlp[0] * self.mlp[1] + 3 * self.experts * self.expert[0] * self.expert[1]
        return gated + sum(k * n for k, n in self.linears)

    def seconds(self, tokens: int, formats: Formats, ceilings: Ceilings, use: Use = TRAINING, own: int = 0) -> float:
        """Roofline time of forward and backward with that many tokens.  own: experts that this rank has, all if 0."""
        costs = [linear_cost(tokens, k, n, formats, ceilings, use) for k, n in self.linears]
        costs.append(swiglu_cost(tokens, *self.mlp, formats, ceilings, use))
        if self.experts:
            rows, mine = tokens * self.top_k, own or self.experts
            costs.append(swiglu_cost(rows, *self.expert, formats, ceilings, use, experts=mine))
        return sum(cost.seconds for cost in costs)


@dataclass(frozen=True)
class StepCost:
    """A forward and backward of a model on N ranks.  wire: bytes that leave a rank.  link, compute: seconds of the
    collectives and of casts and products, per rank."""

    wire: float
    link: float
    compute: float

    @property
    def serial(self) -> float:
        """Seconds, if nothing overlaps."""
        return self.link + self.compute

    @property
    def overlapped(self) -> float:
        """Seconds, if everything overlaps: no engine is faster."""
        return max(self.link, self.compute)


def step_cost(blocks: Iterable[tuple[Block, Iterable[Transfer], float]], link: Link) -> StepCost:
    """The sum over the blocks of a model.  blocks: each with its collectives and seconds of compute."""
    wire = seconds = compute = 0.0
    for block, transfers, each in blocks:
        sent = tuple(transfers)
        wire += block.count * sum(transfer.wire for transfer in sent)
        seconds += block.count * sum(transfer.seconds(link) for transfer in sent)
        compute += block.count * each
    return StepCost(wire, seconds, compute)


def parallel_cost(
    kind: str,
    payload: str,
    blocks: Iterable[Block],
    tokens: int,
    formats: Formats,
    ceilings: Ceilings,
    link: Link,
    ranks: int,
) -> StepCost:
    """A step of a model on N ranks.

    kind, payload: "fsdp" with "bf16" or "codes" of weights; "tp" with "bf16", "owner" or "requantized"; "ep" with
    "bf16" or "low".  tokens: of a rank for "fsdp" and "ep", of all ranks for "tp", whose work is divided evenly.
    """
    check_name(kind, PAYLOADS, "kind of parallelism")
    check_name(payload, PAYLOADS[kind], "payload")
    if ranks < 1:
        refuse(f"{ranks} ranks", rule="a step runs on at least one", fix="pass 1 or more")
    found: list[tuple[Block, Iterable[Transfer], float]] = []
    for block in blocks:
        seconds = block.seconds(tokens, formats, ceilings)
        if kind == "fsdp":
            sent = fsdp_transfers(block.weights, formats["fprop_w"] if payload == "codes" else None, ranks)
        elif kind == "tp":
            # attention and the MLP are a pair of layers each
            sent = 2 * tp_transfers(tokens, block.features, formats, ranks, gathers=payload)
            seconds /= ranks
        else:
            sizes = tokens, block.features, block.top_k, block.experts
            sent = ep_transfers(*sizes, formats if payload == "low" else None, ranks) if block.experts else ()
            seconds = block.seconds(tokens, formats, ceilings, own=-(-block.experts // ranks))
        found.append((block, sent, seconds))
    return step_cost(found, link)
