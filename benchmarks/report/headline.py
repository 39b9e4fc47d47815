"""Headline figures of the front page, losses included: one table, and the bars of one picture.

Every figure is computed from stored rows of one H200. A line whose rows are missing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from blockscale.bench.gemms import FAST
from blockscale.bench.layers import BF16, TORCHAO, TORCHAO_COMPILED
from blockscale.bench.overlaps import SERIAL
from blockscale.bench.shapes import MAIN
from blockscale.bench.store import Row, number
from blockscale.bench.suites.overlap import named
from blockscale.bench.trainings import Convergence, Throughput, Training, baseline, convergences, speedup, throughputs

from .gemm import CUBLAS, LAYOUTS, large
from .layers import speedup as peer_ratio
from .moe import EXPERTS, FP8, linear_of
from .overlap import flux_cases
from .speed import RECIPE, tokens_per_step
from .tables import EMPTY, mean, table
from .training import FULL, chosen, comparisons, gap_of, on_machine, percent

MACHINE = "H200"
TORCHAO_ROWWISE = "torchao rowwise"
TOKENS = 4096
HEAD = ("FP8 blockwise, one H200", "Blockscale", "beside", "speedup: mean (worst to best)")

Value = Callable[[Row], float | None]


# ---- rows ------------------------------------------------------------------------------------------------------------


def _timed(rows: Sequence[Row], suite: str) -> list[Row]:
    return [row for row in rows if row.suite == suite and row.us is not None and MACHINE in str(row.where.get("gpu"))]


def gemms(rows: Sequence[Row], layouts: Sequence[str] = LAYOUTS) -> list[Row]:
    """Large FP8 GEMMs with bf16 output."""
    return [row for row in _timed(rows, "gemm") if any(large(layout)(row) for layout in layouts)]


def linears(rows: Sequence[Row], recipe: str = FP8) -> list[Row]:
    """Linear layers, forward and backward, weights cast in every step."""
    mine = [row for row in _timed(rows, "linear") if (row.group, row.format) == ("layers", recipe)]
    return [row for row in mine if row.shape[0] == TOKENS]


def experts(rows: Sequence[Row]) -> list[Row]:
    """SwiGLU experts, forward and backward, weights cast in every step."""
    return [row for row in _timed(rows, "moe") if (row.group, row.format) == (EXPERTS, FP8)]


def grouped_linears(rows: Sequence[Row]) -> list[Row]:
    """Grouped linear layers, forward and backward, weights cast in every step."""
    found = [(row, linear_of(row)) for row in _timed(rows, "moe")]
    return [row for row, linear in found if linear is not None and (linear.recipe, linear.use) == (FP8, "")]


def throughput(trainings: Sequence[Training], model: str) -> tuple[Throughput, Throughput] | None:
    """Compiled FP8 run with weights cast once a step and the most tokens per step, and bf16 in the same setting."""
    every = [row for row in throughputs(trainings) if on_machine(row)]
    pairs = [
        (row, base)
        for row in every
        if (row.model, row.recipe, row.weight_cast, row.compile) == (model, RECIPE, "step", "blocks")
        and speedup(row, every) is not None
        and (base := baseline(row, every)) is not None
    ]
    return max(pairs, key=lambda pair: tokens_per_step(pair[0]), default=None)


def loss(trainings: Sequence[Training], model: str = "125m") -> Convergence | None:
    """The longest FP8 run from step 0 with the most seeds."""
    return chosen(model, RECIPE, FULL, convergences(trainings))


def loss_comparison(trainings: Sequence[Training]) -> list[Convergence]:
    """All arms of the comparison of `loss`; empty if there is none."""
    shown = loss(trainings)
    every = comparisons(convergences(trainings))
    return next((group for group in every if shown in group), [])


def torchao_ratio(row: Row) -> float | None:
    """Time of torchao's blockwise FP8 over ours, the better of eager and compiled."""
    ratios = [peer_ratio(row, name) for name in (TORCHAO, TORCHAO_COMPILED)]
    return min((ratio for ratio in ratios if ratio), default=None)


def beside(name: str) -> Value:
    """Time of a peer over ours."""
    return lambda row: peer_ratio(row, name)


# ---- table -----------------------------------------------------------------------------------------------------------


def headline_table(rows: Sequence[Row], trainings: Sequence[Training]) -> str:
    """The table of the front page."""
    lines = [line for line in _lines(rows, trainings) if line is not None]
    return table(HEAD, lines) if lines else EMPTY


def _lines(rows: Sequence[Row], trainings: Sequence[Training]) -> Iterable[list[str] | None]:
    layers, mxfp8 = linears(rows), linears(rows, "mxfp8")
    wide = [row for row in layers if torchao_ratio(row) is not None]
    yield _ratios("[GEMM](benchmarks/gemm.md), {} shapes", gemms(rows), "cuBLAS blockwise", beside(CUBLAS))
    yield _ratios(f"GEMM, {LAYOUTS[0]}", gemms(rows, LAYOUTS[:1]), "cuBLAS rowwise, fast accumulation", beside(FAST))
    yield _ratios("[Linear](benchmarks/linear.md), forward + backward, {} layers", layers, "bf16", beside(BF16))
    yield _ratios("Linear, {} large feed-forward layers", wide, "bf16", beside(BF16))
    yield _ratios("the same", wide, "torchao blockwise", torchao_ratio)
    yield _ratios("Linear, `mxfp8` (upcast on Hopper)", mxfp8, "bf16", beside(BF16))
    yield _ratios("[Experts](benchmarks/moe.md), SwiGLU, forward + backward", experts(rows), "bf16", beside(BF16))
    yield _ratios("Experts, grouped linear", grouped_linears(rows), "torchao rowwise", beside(TORCHAO_ROWWISE))
    for name, model in (
        ("[Llama 3 8B](benchmarks/training.md)", "llama3-8b"),
        ("DeepSeek 16B, 16 layers", "dsv3-16b"),
        ("Small MoE, 500M", "moe-500m"),
    ):
        yield _tokens(name, throughput(trainings, model))
    yield _casts(rows)
    yield _overlap(rows)
    yield _loss(loss(trainings))


def span(values: Sequence[float], digits: int = 2) -> str:
    """Geometric mean, and the range in parentheses if there are several values.

    >>> span([1.0, 1.21]), span([1.5])
    ('1.10x (1.00 to 1.21)', '1.50x')
    """
    text = f"{mean(values):.{digits}f}x"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _ratios(name: str, rows: Sequence[Row], peer: str, value: Value) -> list[str] | None:
    """Line of the rows where the peer was timed, with the range of our TFLOP/s; {} in the name is their number."""
    found = [(row, ratio) for row in rows if (ratio := value(row)) is not None]
    if not found:
        return None
    rates = [row.tflop_s for row, _ in found if row.tflop_s is not None]
    ours = f"{min(rates):,.0f} to {max(rates):,.0f} TFLOP/s" if rates else "-"
    return [name.format(len(found)), ours, peer, span([ratio for _, ratio in found])]


def _tokens(name: str, pair: tuple[Throughput, Throughput] | None) -> list[str] | None:
    if pair is None or not pair[0].tokens_per_second or not pair[1].tokens_per_second:
        return None
    ours, base = pair[0].tokens_per_second, pair[1].tokens_per_second
    return [name, f"{number(ours, 0)} tokens/s", "bf16", span([ours / base])]


def _casts(rows: Sequence[Row]) -> list[str] | None:
    """Bandwidth of 8-bit casts of one and of both operands at the main shape, beside a copy of the same run."""
    groups = ("one operand", "both operands")
    mine = [row for row in _timed(rows, "casts") if row.group in groups and row.shape == list(MAIN)]
    found = [(row.gb_s, row.gb_s / row.copy_gb_s) for row in mine if row.gb_s and row.copy_gb_s]
    if not found:
        return None
    bandwidths = [bandwidth for bandwidth, _ in found]
    ours = f"{min(bandwidths) / 1e3:.1f} to {max(bandwidths) / 1e3:.1f} TB/s"
    return ["[Casts](benchmarks/casts.md), FP8 and MXFP8", ours, "`copy_`", span([ratio for _, ratio in found])]


def _overlap(rows: Sequence[Row]) -> list[str] | None:
    """Times of FP8 operations at Flux's shapes, with the ratio of copies and then the product to them."""
    cases = flux_cases()
    found = [
        (row.us, row.peers[SERIAL]["us"] / row.us)
        for row in _timed(rows, "overlap")
        if row.format == "fp8_blockwise_pow2" and named(row.case) in cases and row.us and "us" in row.peers[SERIAL]
    ]
    if not found:
        return None
    ms = [us / 1e3 for us, _ in found]
    name = f"[Overlap](docs/overlap.md), 1 rank of 8 over PCIe, {len(found)} of Flux's shapes"
    return [name, f"{min(ms):.1f} to {max(ms):.1f} ms", "copies, then GEMM", span([ratio for _, ratio in found])]


def _loss(row: Convergence | None) -> list[str] | None:
    if row is None:
        return None
    name = f"[Loss](benchmarks/training.md#loss), {row.model}, {row.steps:,} steps, {len(row.seeds)} seeds"
    return [name, f"{gap_of(row)} to bf16", "noise of the null run", percent(row.noise)]


# ---- bars ------------------------------------------------------------------------------------------------------------

OURS = "Blockscale"
CUBLAS_FP8 = "cuBLAS FP8"
TORCHAO_FP8 = "torchao FP8"


@dataclass(frozen=True)
class Panel:
    """Bars of one panel: figures by implementation.  unit: of the figures.  note: rows that they are the mean of."""

    title: str
    note: str
    unit: str
    bars: dict[str, float]


def panels(rows: Sequence[Row], trainings: Sequence[Training]) -> list[Panel]:
    """Panels of the picture. Each averages the rows where all of its implementations were timed."""
    found = [
        _panel(
            "GEMM", f"{LAYOUTS[0]}, {{}} shapes", gemms(rows, LAYOUTS[:1]),
            {BF16: beside(BF16), CUBLAS_FP8: beside(CUBLAS)},
        ),
        _panel(
            "Linear layer", "forward + backward, {} layers", linears(rows),
            {BF16: beside(BF16), TORCHAO_FP8: torchao_ratio},
        ),
        _panel(
            "Experts", "forward + backward, torchao rowwise", grouped_linears(rows),
            {BF16: beside(BF16), TORCHAO_FP8: beside(TORCHAO_ROWWISE)},
        ),
    ]  # fmt: skip
    pair = throughput(trainings, "llama3-8b")
    if pair is not None and pair[0].tokens_per_second and pair[1].tokens_per_second:
        note = f"training, {tokens_per_step(pair[0]):,} tokens per step"
        bars = {BF16: pair[1].tokens_per_second, OURS: pair[0].tokens_per_second}
        found.append(Panel("Llama 3 8B", note, "tokens/s", bars))
    return [panel for panel in found if panel is not None]


def _panel(title: str, note: str, rows: Sequence[Row], peers: dict[str, Value]) -> Panel | None:
    """TFLOP/s, geometric means. The rate of a peer is ours over the ratio of the times."""
    full = [row for row in rows if row.tflop_s and all(value(row) for value in peers.values())]
    if not full:
        return None
    ours = mean([row.tflop_s or 1.0 for row in full])
    bars = {name: ours / mean([value(row) or 1.0 for row in full]) for name, value in peers.items()}
    return Panel(title, note.format(len(full)), "TFLOP/s", {**bars, OURS: ours})
