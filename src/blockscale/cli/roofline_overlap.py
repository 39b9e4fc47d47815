"""`blockscale roofline overlap`: a model of communication hidden behind a product, and published times beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ..errors import check_name
from ..names import LINKS, MACHINES
from . import arguments

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.shapes import ExpertModel
    from ..roofline import OverlapMachine, Prediction

Op = Literal["all_gather_mm", "mm_reduce_scatter", "all_gather_grouped_mm", "grouped_mm_reduce_scatter"]
Payload = Literal["bf16", "fp8_blockwise", "fp8_blockwise_pow2", "mxfp8"]
# shapes of the Flux performance report: rows of all ranks, out features, in features
SHAPES: dict[Op, tuple[int, int, int]] = {
    "all_gather_mm": (4096, 49152, 12288),
    "mm_reduce_scatter": (4096, 12288, 49152),
    "all_gather_grouped_mm": (8192, 8192, 8192),
    "grouped_mm_reduce_scatter": (8192, 8192, 8192),
}
LAYERS: tuple[Op, Op] = ("all_gather_grouped_mm", "grouped_mm_reduce_scatter")
_HEAD = ("payload", "wire MB", "G µs", "C µs", "T µs", "serial µs", "exposed µs", "hidden", "bound by", "decision")
_PATHS = ("serial", "overlapped")
_ERRORS = ("fitted", "left out", "unfitted")
_FLUX = ("machine, operation", "TP EP E k", "G ms", "C ms", "Flux ms", "torch ms", "model ms", *_ERRORS)
_TRITON = ("M", "N", "K", "G ms", "C ms", "fused ms", "model ms", "fitted")


def run(
    op: Op = "all_gather_mm",
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    experts: int | None = None,
    topk: int | None = None,
    model: str | None = None,
    tp: int = 8,
    ep: int = 1,
    payload: tuple[Payload, ...] = ("bf16", "fp8_blockwise_pow2", "mxfp8"),
    machine: str = "h200",
    link: str | None = None,
    chunks: int | None = None,
    flux: bool = False,
) -> int:
    """Show how much communication an overlapped operation hides behind its product, and whether that pays: a model,
    with the basis of every constant. Sizes are of all ranks together, by default those of the Flux performance report.

    Args:
        op: all_gather_mm: rows are gathered, then multiplied. mm_reduce_scatter: partial products are summed over the
            ranks. all_gather_grouped_mm, grouped_mm_reduce_scatter: the same with experts, layers 0 and 1 of a mixture.
        m: Rows, which are tokens.
        n: Out features: those of an expert in layer 0, those of a token in layer 1.
        k: In features: those of a token in layer 0, those of an expert in layer 1.
        experts: Experts of a mixture; 32 by default.
        topk: Experts of a token; 4 by default.
        model: mixtral-8x7b or qwen1.5-moe-a2.7b: layers 0 and 1 at its sizes, gate and up in one weight, and the sum
            over its layers. 8192 tokens, or --m.
        tp: Ranks that cut a weight.
        ep: Groups of TP ranks that divide the experts.
        payload: What gathers carry and products multiply; sums travel in bf16.
        machine: A short name such as h200, b200 or l20.
        link: Link between the GPUs, the machine's own by default; infiniband for ranks on several nodes.
        chunks: Parts of the product and of the communication, equal ones; by default those that ranks choose.
        flux: Show 18 rows of the Flux performance report and 9 of Triton's AG+GEMM beside the model instead.
    """
    mixture = {"--experts": experts, "--topk": topk}
    sizes = {"--m": m, "--n": n, "--k": k, **mixture, "--chunks": chunks}
    for flag, count in (sizes | {"--tp": tp, "--ep": ep}).items():
        if count is not None:
            arguments.at_least(1, count, flag, "sizes and counts are positive")
    check_name(machine, MACHINES, "machine")
    if link is not None:
        check_name(link, LINKS, "link")
    if flux:
        changed = {"--op": op != "all_gather_mm", "--tp": tp != 8, "--ep": ep != 1, "--machine": machine != "h200"}
        for flag, value in (sizes | changed | {"--link": link, "--model": model}).items():
            if value:
                rule = "published rows have their own sizes and constants"
                arguments.refuse(f"{flag} with --flux", rule, f"leave {flag} or --flux out")
        return _show_flux(arguments.wide_console())
    of_model = {"--n": n, "--k": k, **mixture, "--op": op != "all_gather_mm"}
    found = None if model is None else expert_model(model, of_model)
    for flag, count in (mixture | {"--ep": ep if ep > 1 else None}).items():
        if count is not None and found is None and "grouped" not in op:
            rule = "only the operations of a mixture have experts"
            arguments.refuse(f"{flag} {count} with {op}", rule, f"--op all_gather_grouped_mm {flag} {count}")
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from ..bench.shapes import OVERLAP_TOKENS, expert_products
        from ..roofline import overlap_machine

    of, divided = (machine, link), {"tp": tp, "ep": ep}
    if found is None:
        given = tuple(size or usual for size, usual in zip((m, n, k), SHAPES[op], strict=True))
        counts = {"experts": experts or 32, "topk": topk or 4} if "grouped" in op else {}
        _show(console, op, given, divided | counts, of, payload, chunks)
    else:
        name, (mixture, layers) = found
        divided |= {"experts": mixture.experts, "topk": mixture.top_k}
        products = zip(LAYERS, expert_products(mixture, m or OVERLAP_TOKENS), strict=True)
        both = [_show(console, each, product, divided, of, payload, chunks) for each, product in products]
        for each in payload:
            serial, overlapped = (1e3 * layers * sum(getattr(layer[each], path) for layer in both) for path in _PATHS)
            console.print(f"{name}, {layers} layers, {each}: {serial:.1f} ms serial, {overlapped:.1f} ms overlapped")
    for each in payload:
        if note := overlap_machine(*of).engine(each).note:
            console.print(f"[dim]{each}: {note}[/]")
    return 0


def expert_model(model: str, sizes: Mapping[str, object]) -> tuple[str, ExpertModel]:
    """Full name, sizes and layers of a model with experts.  sizes: values of options that the model sets; raises for
    one that is given."""
    from ..bench.shapes import OVERLAP_MODELS, model_name

    name = model_name(model, OVERLAP_MODELS, "model with experts")
    for flag, value in sizes.items():
        if value:
            rule = "a model names layers 0 and 1, their sizes and their experts"
            arguments.refuse(f"{flag} with --model", rule, f"leave {flag} or --model out")
    return name, OVERLAP_MODELS[name]


def _show(
    console: Console,
    op: Op,
    sizes: tuple[int, ...],
    divided: Mapping[str, int],
    of: tuple[str, str | None],
    payloads: Sequence[Payload],
    chunks: int | None,
) -> dict[str, Prediction]:
    """Print the model of one operation by payload, with the basis of its constants.  of: machine and link.  chunks: of
    equal size; those that ranks choose if None."""
    from ..distributed.overlap.decision import Work, predict
    from ..roofline import overlap_gain, overlap_machine

    (m, n, k), machine, ranks = sizes, overlap_machine(*of), divided["tp"] * divided["ep"]
    counts = tuple(divided[name] for name in ("experts", "topk")) if "grouped" in op else ()

    def model(payload: Payload) -> Prediction:
        if chunks is not None:
            return overlap_gain(op, m, n, k, **divided, machine=machine, payload=payload, chunks=chunks)
        return predict(of[0], ranks, Work(op, m, n, k, payload, *counts), ep=divided["ep"], link=of[1])

    found = {name: model(name) for name in payloads}
    first, grouped = found[payloads[0]], "grouped" in op
    parallel = f"TP {divided['tp']}"
    if grouped:
        parallel += f", {divided['topk']} of {divided['experts']} experts, EP {divided['ep']}"
    number = "chunks that ranks choose" if chunks is None else f"{chunks} chunks"
    each = f"{first.flops / 1e9:,.0f} GFLOP a rank, {number}"
    console.print(f"{op}, M={m:,} N={n:,} K={k:,}, {parallel}: {each}")
    console.print("model, not measured. G: product alone, C: communication alone, T: overlapped")
    for line in _constants(machine, grouped=grouped):
        console.print(f"[dim]{line}[/]", soft_wrap=True)
    table = arguments.table("", _HEAD, _HEAD[1:8], padding=0)
    for name, gain in found.items():
        times = (gain.product, gain.communication, gain.overlapped, gain.serial, gain.exposed)
        hidden = f"{gain.efficiency:.0%}" if gain.communication else "-"
        cells = (f"{gain.wire / 1e6:,.1f}", *(f"{each * 1e6:,.0f}" for each in times), hidden)
        table.add_row(name, *cells, gain.bound, gain.decision)
    console.print(table)
    return found


def _constants(machine: OverlapMachine, *, grouped: bool) -> list[str]:
    """A line for each constant: figure, basis, source."""
    sheet, link = machine.ceilings, machine.link
    found = {f"{link.bandwidth / 1e9:,.0f} GB/s of link": (link.kind, f"{link.name}, {link.source}")}
    found[f"{link.latency * 1e6:,.0f} µs a collective"] = "assumed", "latency, in the serial time alone"
    found[f"{sheet.bandwidth / 1e12:.3g} TB/s of memory"] = "measured" if sheet.measured else "published", sheet.source
    for name, rate in (("bf16", machine.bf16), ("fp8", machine.fp8)):
        if rate is not None:
            found[f"{rate.value / 1e12:,.0f} TFLOP/s of {name} products"] = rate.kind, rate.source
    setup, slowdown, share = machine.setup, machine.slowdown, machine.grouped
    found[f"{setup.value * 1e6:,.0f} µs of setup"] = setup.kind, setup.source
    found[f"{slowdown.value:.0%} slowdown of the product"] = slowdown.kind, slowdown.source
    if grouped:
        found[f"{share.value:.0%} of that rate for grouped products"] = share.kind, share.source
    return [f"{figure} ({kind}): {source}" for figure, (kind, source) in found.items()]


def _show_flux(console: Console) -> int:
    """Print the published rows with the model beside them, and the mean errors."""
    with console.status("importing torch ..."):
        from ..roofline import calibration

    for line in (
        "A calibration, not a validation: five constants of an L20 fitted to ten rows, six of an H800 to eight.",
        "Times are p: published, f: by a fitted constant, m: modelled from both. Errors are of the model's time, by",
        "constants fitted to all rows, to the machine's other rows (left out), and to none (unfitted, round figures).",
    ):
        console.print(line, soft_wrap=True)
    table = arguments.table("Flux performance report", _FLUX, _FLUX[2:], padding=0)
    found = calibration.calibrate()
    for each in found:
        row = each.row
        of = f"{row.tp} {row.ep}" + (f" {row.experts} {row.topk}" if row.experts > 1 else "")
        times = [f"{1e3 * each.product:.3f} {'p' if row.product else 'f'}", f"{1e3 * each.communication:.3f} f"]
        times += [f"{1e3 * row.overlapped:.3f} p", f"{1e3 * (row.serial or 0):.3f} p", f"{1e3 * each.modelled:.3f} m"]
        table.add_row(f"{row.machine} {row.op}", of, *times, *(f"{error:+.1%}" for error in each.errors))
    console.print(table)
    for name, errors in zip(_ERRORS, zip(*(each.errors for each in found), strict=True), strict=True):
        console.print(f"{name}: mean {calibration.mean_error(errors):.1%}, largest {max(map(abs, errors)):.1%}")
    console.print("bar: mean 6.5 % and largest 25 %, fitted")
    table = arguments.table("Triton AG+GEMM on 8 H100, symm-mem-recipes", _TRITON, _TRITON, padding=0)
    errors = list[float]()
    for row in calibration.TRITON_ROWS:
        product, communication, modelled = calibration.FITTED[row.machine].predict(row)
        errors.append(modelled / row.overlapped - 1)
        times = zip((product, communication, row.overlapped, modelled), "pfpm", strict=True)
        cells = (f"{1e3 * seconds:.3f} {mark}" for seconds, mark in times)
        table.add_row(f"{row.m:,}", f"{row.n:,}", f"{row.k:,}", *cells, f"{errors[-1]:+.1%}")
    console.print(table)
    console.print(f"fitted: mean {calibration.mean_error(errors):.1%}, largest {max(map(abs, errors)):.1%}")
    return 0
