"""Mixtures of experts: rates of grouped GEMMs, and whole layers.

GEMMs are those of a layer's forward and backward: fprop and dgrad (m-grouped), and wgrad (k-grouped) to bf16, to fp32
and accumulating in fp32. `equal groups` are the sizes of the goals. Layers of models have rows balanced over their
experts, by Zipf's law, or all on one expert; the same GEMM with equal groups is then a peer. `decoding` has 16 rows for
each of 32 experts.

`one grouped linear` is the published benchmark of torchao's MXFP8 experts: rows (16640, 5120), weights (E, 8192, 5120),
by every recipe; forward and backward with weights cast in every forward or shared by the microbatches of a step, and a
forward alone with weights cast before. `experts` are SwiGLU experts with rows already grouped; `mixture` is a whole
layer: router, top-k, experts and weighted combine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...formats.layout import padded_length
from ...hardware import Capability
from ...registry import Request, select
from ...roofline import Ceilings
from .. import accuracy, expert_layers, shapes
from ..accuracy import judge_linear, judge_mixture, judge_swiglu
from ..expert_layers import plain_experts, plain_linear, plain_mixture
from ..grouped import make_k_grouped, make_m_grouped, multiply, peers
from ..harness import Args, Case, Verdict
from ..layers import FP8, LINEAR_GATES, MICROBATCHES, MXFP8, NEAR_DB, RECIPES, TORCHAO, Variant, trained
from ..rooflines import Layer, Roofs
from ..shapes import LOADS, Load, Mixture, group_sizes, text
from ..timing import host_syncs
from .casts import stored_bytes
from .gemm import NATIVE, VECTORS, WEIGHTS, product_case
from .gemm import Kind as Formats
from .layers import Kind, Setup, backends, label_of, layer_case

GROUP = "grouped products"
EQUAL, DECODING = "equal groups", "decoding"
# rows of a model's experts: 4096 tokens with eight experts each
ROWS = 32768
# experts of DeepSeek-V3 on one of 32 or of 8 GPUs
SHARDS = (8, 32)
# outputs, as in the name of a case: to bf16, to fp32, accumulated into fp32
BF16, FP32, ADDED = "", " fp32", " fp32 +="
LINEAR_ROWS = 16640
LINEAR, EXPERTS, MIXTURE = "one grouped linear", "experts", "mixture"
GROUPS = (GROUP, LINEAR, EXPERTS, MIXTURE)


class Unit(NamedTuple):
    """SwiGLU experts and the total number of their rows."""

    experts: int
    features: int
    hidden: int
    rows: int


UNITS: Mapping[str, Unit] = {
    "DeepSeek-V3 671B shard": Unit(32, 7168, 2048, 32768),
    "DeepSeek 16B": Unit(64, 2048, 1408, 32768),
}
MIXED, TOKENS = "DeepSeek 16B", 4096


@dataclass(frozen=True)
class Problem:
    """A grouped GEMM of `rows` rows on `experts` experts.

    what: fprop, dgrad or wgrad.  n, k: columns of the result and contracted size; for wgrad rows and columns of a
    group's result.  most: largest number of rows of one expert, the number of tokens; None: no limit.
    """

    label: str
    what: str
    experts: int
    rows: int
    n: int
    k: int
    load: Load = "balanced"
    most: int | None = None
    kind: Formats = WEIGHTS
    output: str = BF16

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.output == BF16 else torch.float32

    @property
    def accumulate(self) -> bool:
        return self.output == ADDED

    @property
    def k_grouped(self) -> bool:
        return self.what == "wgrad"

    @property
    def product(self) -> shapes.Product:
        """(M, N, K) of the dense GEMM with the same FLOPs."""
        return (self.n, self.k, self.rows) if self.k_grouped else (self.rows, self.n, self.k)

    @property
    def sizes(self) -> tuple[int, ...]:
        return group_sizes(self.rows, self.experts, self.load, self.most)

    @property
    def name(self) -> str:
        load = "" if self.label.startswith(EQUAL) else f" {self.load}"
        return f"{self.label} {self.what}{self.output} E={self.experts}{load} {text(self.product)}"


def problems(device: Capability) -> list[Problem]:
    """Grouped GEMMs to run."""
    if device.device != "cuda":
        tiny = [*equal_groups((4,), 160, 128, 256), *_of_model("tiny", 4, 80, 128, 256, most=40)]
        return [*tiny, *other_formats(4, 160, 128, 256), Problem(DECODING, "fprop", 4, 16, 128, 256)]
    n, k = shapes.EXPERT
    found = [*equal_groups(shapes.EXPERT_COUNTS, LINEAR_ROWS, n, k), *_eight_experts()]
    found += [Problem(DECODING, "fprop", 32, 32 * 16, *matrix) for matrix in ((4096, 7168), (7168, 2048))]
    return [*found, *other_formats(4, LINEAR_ROWS, n, k), *_models()]


def equal_groups(counts: tuple[int, ...], rows: int, n: int, k: int) -> Iterator[Problem]:
    """All GEMMs of one layer K -> N, with rows in each of `counts` equal groups."""
    for experts in counts:
        yield Problem(EQUAL, "fprop", experts, rows, n, k)
        yield Problem(EQUAL, "dgrad", experts, rows, k, n)
        yield from _wgrads(experts, rows, n, k)


def _wgrads(experts: int, rows: int, n: int, k: int) -> Iterator[Problem]:
    for output in (BF16, FP32, ADDED):
        yield Problem(EQUAL, "wgrad", experts, rows, n, k, kind=VECTORS, output=output)


def _eight_experts() -> Iterator[Problem]:
    """GEMMs of DeepSeek-V3's gate-up and down on eight experts."""
    pairs = ((4096, 7168), (7168, 2048))
    for n, k in pairs:
        yield Problem(EQUAL, "fprop", 8, ROWS, n, k)
    for n, k in ((2048, 7168), *pairs):
        yield from _wgrads(8, ROWS, n, k)


def _models() -> Iterator[Problem]:
    for name, (experts, top_k, features, hidden) in shapes.MIXTURES.items():
        yield from _of_model(name, experts, ROWS, hidden, features, most=-(-ROWS // top_k))
    deepseek, (_, _, features, hidden) = next(iter(shapes.MIXTURES.items()))
    for count in SHARDS:
        yield from _of_model(f"{deepseek} shard", count, ROWS, hidden, features, most=ROWS)


def _of_model(label: str, experts: int, rows: int, hidden: int, features: int, *, most: int) -> Iterator[Problem]:
    """GEMMs of features -> hidden; those of hidden -> features are the same in another order. If both are equal, fprop
    and dgrad are the same GEMM."""
    for load in LOADS:
        yield Problem(label, "fprop", experts, rows, hidden, features, load, most)
        if features != hidden:
            yield Problem(label, "dgrad", experts, rows, features, hidden, load, most)
        yield Problem(label, "wgrad", experts, rows, hidden, features, load, most, VECTORS)


def other_formats(experts: int, rows: int, n: int, k: int) -> Iterator[Problem]:
    """GEMMs in formats without native tensor cores on Hopper."""
    for kind in (Formats("mxfp8_e4m3", "mxfp8_e4m3"), NATIVE, Formats("nvfp4", "nvfp4")):
        label = f"{EQUAL} {kind.label}"
        yield Problem(label, "fprop", experts, rows, n, k, kind=kind)
        if kind != NATIVE:
            yield Problem(label, "wgrad", experts, rows, n, k, kind=kind)


def cases(
    device: Capability,
    ceilings: Ceilings,
    roofs: Roofs | None,
) -> Iterator[Case]:
    """All rows, in the order of the tables, without GEMMs that a GPU serves only by the reference, in seconds."""
    for problem in problems(device):
        if device.device != "cuda" or select(request(problem, device)).backend != "reference":
            yield case(problem, device, ceilings)
    yield from layer_cases(device, roofs)


def case(problem: Problem, device: Capability, ceilings: Ceilings) -> Case:
    """Case of one grouped GEMM."""
    asked = request(problem, device)
    return product_case(
        problem.name, GROUP, problem.kind, problem.product, moved_bytes(problem), asked, ceilings,
        lambda device: make(problem, device), multiply,
        peers(asked, problem.sizes, even=problem.load == "balanced"),
    )  # fmt: skip


def make(problem: Problem, device: torch.device) -> Args:
    """Operands of a grouped GEMM."""
    given = (problem.sizes, problem.n, problem.k, (problem.kind.a, problem.kind.b), device, problem.dtype)
    return (make_k_grouped(*given, accumulate=problem.accumulate) if problem.k_grouped else make_m_grouped(*given),)


def moved_bytes(problem: Problem) -> int:
    """Least memory traffic: operands of experts with rows once, the result once, or twice if it accumulates."""
    kind, rows, n, k = problem.kind, problem.rows, problem.n, problem.k
    size = problem.dtype.itemsize * (2 if problem.accumulate else 1)
    busy = sum(size > 0 for size in problem.sizes)
    if problem.k_grouped:
        operands = stored_bytes(kind.a, (n, rows), -1) + stored_bytes(kind.b, (k, rows), -1)
        # the accumulator of an expert without rows is not touched
        return operands + (busy if problem.accumulate else problem.experts) * n * k * size
    return stored_bytes(kind.a, (rows, k), -1) + busy * stored_bytes(kind.b, (n, k), -1) + rows * n * size


def request(problem: Problem, device: Capability) -> Request:
    """Request to the registry."""
    op, (rows, columns, depth) = "k_grouped" if problem.k_grouped else "m_grouped", problem.product
    if problem.k_grouped:
        depth = padded_length(depth, problem.experts)
    options = frozenset({"accumulate"} if problem.accumulate else ())
    shape, formats = (rows, columns, depth, problem.experts), (problem.kind.a, problem.kind.b)
    return Request(op, device, formats, shape, problem.dtype, options=options)


# ---- layers ----------------------------------------------------------------------------------------------------------


def layer_cases(device: Capability, roofs: Roofs | None) -> Iterator[Case]:
    """All rows, in the order of the tables. Recipes that a GPU serves only by the reference are left out, since a call
    would take seconds. Recipes other than FP8's run only the first unit, balanced."""
    n, k = shapes.EXPERT
    recipes, rows, layer, counts = list(RECIPES), LINEAR_ROWS, (k, n), shapes.EXPERT_COUNTS
    units, mixed, mixture, tokens = UNITS, MIXED, shapes.MIXTURES[MIXED], TOKENS
    if device.device != "cuda":
        recipes, rows, layer, counts = [FP8, MXFP8], 128, (128, 256), (4,)
        units, mixed, mixture, tokens = {"tiny": Unit(4, 128, 128, 160)}, "tiny", Mixture(4, 2, 128, 128), 64
    else:
        recipes = [name for name in recipes if "reference" not in backends(name, device, rows, layer[1], layer[0], 4)]
    setup = Setup(device, roofs)
    for recipe in recipes:
        for experts in counts:
            yield linear_case(recipe, experts, rows, layer, setup)
            yield linear_case(recipe, experts, rows, layer, setup, microbatches=MICROBATCHES)
            yield linear_case(recipe, experts, rows, layer, setup, forward=True)
    for recipe in recipes:
        for model, unit in list(units.items())[: None if recipe == FP8 else 1]:
            for load in LOADS[:2] if recipe == FP8 else LOADS[:1]:
                yield experts_case(recipe, model, unit, load, setup)
    for recipe in recipes:
        yield mixture_case(recipe, mixed, mixture, tokens, setup)


def linear_case(
    recipe: str, experts: int, rows: int, layer: Layer, setup: Setup, *, microbatches: int = 1, forward: bool = False
) -> Case:
    """Case of one grouped linear.  microbatches, forward: see `layer_case`."""
    k, n = layer
    outputs = "y against" if forward else "y, dX and dW against"
    how = f"{outputs} the exact layer, {accuracy.ROWS} rows of some experts, all values in two runs"
    found = layer_case(
        f"{recipe} {'forward ' if forward else label_of(microbatches)}M={rows} E={experts} {k}->{n}", LINEAR, recipe,
        Kind(expert_layers.our_linear, judge_linear, how), (rows, k, n),
        lambda device: plain_linear(group_sizes(rows, experts), k, n, device),
        setup, experts=experts, microbatches=microbatches, forward=forward,
    )  # fmt: skip
    if setup.device.device != "cuda" or recipe != FP8 or microbatches > 1 or forward:
        return found
    # torchao's blockwise is emulated without DeepGEMM
    blockwise, rowwise = (Variant(expert_layers.torchao_linear(kind)) for kind in ("blockwise", "rowwise"))
    near = min(LINEAR_GATES[recipe]) - NEAR_DB
    theirs = {
        TORCHAO: trained(blockwise, judge_linear, near, "blockwise FP8"),
        f"{TORCHAO} rowwise": trained(rowwise, judge_linear, None, "rowwise FP8"),
    }
    return replace(found, peers={**found.peers, **theirs})


def experts_case(recipe: str, model: str, unit: Unit, load: Load, setup: Setup) -> Case:
    """Case of SwiGLU experts by one recipe, with weights cast in every forward."""
    experts, features, hidden, rows = unit
    groups = group_sizes(rows, experts, load)
    some = f"{accuracy.HIDDEN} rows of y and dX and {accuracy.HIDDEN} hidden features of every dW"
    how = f"{some} of {accuracy.UNITS} experts against the exact ones, all values in two runs"
    return layer_case(
        f"{recipe} experts M={rows} {model} E={experts} {load} {features}x{hidden}", EXPERTS, recipe,
        Kind(expert_layers.our_experts, judge_swiglu, how, gated=True), (rows, features, hidden),
        lambda device: plain_experts(groups, features, hidden, device), setup, experts=experts,
    )  # fmt: skip


def mixture_case(recipe: str, model: str, mixture: Mixture, tokens: int, setup: Setup) -> Case:
    """Case of a mixture by one recipe, with its router; the bound is that of the experts alone."""
    experts, top_k, features, hidden = mixture
    how = "y, dX and every dW against the exact mixture, all values in two runs"
    found = layer_case(
        f"{recipe} mixture M={tokens} {model} E={experts} top-{top_k} {features}x{hidden}", MIXTURE, recipe,
        Kind(expert_layers.our_mixture, judge_mixture, how, gated=True), (tokens * top_k, features, hidden),
        lambda device: plain_mixture(mixture, device), setup, experts=experts, tokens=tokens,
    )  # fmt: skip
    return replace(found, check=_with_syncs(found.check))


def _with_syncs(check: Callable[[Case, Args], Verdict]) -> Callable[[Case, Args], Verdict]:
    """The check, with the number of host synchronizations of a warmed-up forward and backward."""

    def both(case: Case, args: Args) -> Verdict:
        verdict = check(case, args)
        if verdict.problem or not args[0].x.is_cuda:
            return verdict
        syncs = {"host_syncs": float(host_syncs(lambda: case.run(*args)))}
        return replace(verdict, details={**verdict.details, **syncs})

    return both
