"""Report of a conversion: converted layers, the others with the reason, their share of the model, predicted speedup.

Printed as text, with one line for all numbered blocks that are alike. Predictions are the roofline's: upper bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..autograd.recipe import Recipe
from ..errors import option
from ..formats.checks import check_int
from ..formats.spec import get_format
from ..roofline import BF16, ROLES, Ceilings, Use, engine_for, linear_cost, measured, nominal

MACHINE, TOKENS = "h200", 4096
# alignment of features for the fast products
_ALIGNED = 16


class Converted(NamedTuple):
    """A converted layer.  parameters: without those tied to an earlier module.  note: for the user.  experts: number of
    weights of this size, of which `active` see a token.  among: length of the list of experts that it is in, 1 if none;
    `active` of them see a token."""

    name: str
    in_features: int
    out_features: int
    parameters: int
    note: str = ""
    experts: int = 1
    active: int = 1
    among: int = 1


class Skipped(NamedTuple):
    """A linear layer that was not converted, and the reason."""

    name: str
    reason: str
    in_features: int
    out_features: int
    parameters: int
    experts: int = 1
    active: int = 1
    among: int = 1


class Other(NamedTuple):
    """Modules of one class that have parameters and are no linear layers."""

    kind: str
    modules: int
    parameters: int

    def plus(self, parameters: int) -> Other:
        """The same with one more module."""
        return Other(self.kind, self.modules + 1, self.parameters + parameters)


class Speedup(NamedTuple):
    """Speedup over bf16, of the converted layers and of all linear layers."""

    converted: float
    linears: float


def nothing_converted(skipped: Sequence[Skipped]) -> str:
    """Warning for a conversion without a converted layer: what to do."""
    text = "no layer was converted: "
    if not skipped:
        return text + "the model has no linear layers, and no experts of a known kind"
    if any(" blocks" in each.reason for each in skipped):
        return text + f"pass {option('keep_first', 0)} and {option('keep_last', 0)}, or choose layers by name"
    return text + "see the reasons above"


def unknown_active(names: Sequence[str], experts: int) -> str:
    """Warning for modules whose number of active experts is unknown: what to do."""
    where = ", ".join(_merged(names))
    return (
        f"unknown how many of the {experts} experts of {where} see a token, so FLOPs and the roofline count 1: set "
        "top_k on the block (block.top_k = 2) before quantize_"
    )


@dataclass(frozen=True)
class ConversionReport:
    """What `quantize_` did.

    converted, skipped: all linear layers.  others: other modules with parameters.  warnings: for the user.  `print` it.

    >>> import torch, blockscale as bs
    >>> with torch.device("meta"):
    ...     blocks = [torch.nn.Sequential(torch.nn.Linear(4096, 14336), torch.nn.Linear(14336, 4096)) for _ in range(8)]
    >>> report = bs.quantize_(torch.nn.Sequential(*blocks), "fp8_blockwise")
    >>> print("\\n".join(report.lines()))
    converted
      0-7.0  x8   4096 -> 14336
      0-7.1  x8  14336 ->  4096
    >>> f"{report.flop_share:.0%}", report.predicted_speedup(16384, "h100").converted > 1.5
    ('100%', True)
    """

    # what was done to the converted layers
    _DONE: ClassVar[str] = "converted"
    recipe: Recipe
    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    others: tuple[Other, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; tied ones count once."""
        return sum(each.parameters for each in (*self.converted, *self.skipped, *self.others))

    @property
    def parameter_share(self) -> float:
        """Share of the model's parameters in converted layers, from 0 to 1."""
        return sum(each.parameters for each in self.converted) / max(1, self.parameters)

    @property
    def flop_share(self) -> float:
        """Share of the FLOPs of all linear layers in converted layers, from 0 to 1. Every layer sees every token, of
        experts only the active ones."""
        converted, rest = (
            sum(2 * each.in_features * each.out_features * each.active / each.among for each in layers)
            for layers in (self.converted, self.skipped)
        )
        return converted / (converted + rest) if converted + rest else 0.0

    def predicted_speedup(self, tokens: int, machine: str = MACHINE) -> Speedup:
        """Speedup of a training step of the linear layers, by the roofline (measured ceilings if there are some)."""
        check_int(tokens, "tokens", "it is the number of tokens of a step", least=1)
        ceilings = measured(machine) or nominal(machine)
        use = Use(weight_cast=self.recipe.weight_cast)
        plain = _seconds(self.converted, tokens, BF16, ceilings, use)
        low = _seconds(self.converted, tokens, self.recipe.formats(), ceilings, use)
        rest = _seconds(self.skipped, tokens, BF16, ceilings, use)
        return Speedup(plain / low if low else 1.0, (plain + rest) / (low + rest) if low + rest else 1.0)

    def seconds_saved(self, tokens: int, machine: str = MACHINE) -> dict[str, float]:
        """Seconds per training step that each converted layer saves over bf16, by the roofline; negative if it takes
        longer."""
        check_int(tokens, "tokens", "it is the number of tokens of a step", least=1)
        ceilings, use = measured(machine) or nominal(machine), Use(weight_cast=self.recipe.weight_cast)
        saved: dict[tuple[int, ...], float] = {}
        for each in self.converted:
            if _size(each) not in saved:
                plain, low = (_seconds([each], tokens, form, ceilings, use) for form in (BF16, self.recipe.formats()))
                saved[_size(each)] = plain - low
        return {each.name: saved[_size(each)] for each in self.converted}

    def lines(self) -> list[str]:
        """The layers as lines of text, one for all blocks that are alike."""
        return _table(
            {
                self._DONE: [(each, each.note) for each in self.converted],
                _KEPT: [(each, each.reason) for each in self.skipped],
            }
        )

    def __str__(self) -> str:
        total = len(self.converted) + len(self.skipped)
        text = [f"{self.recipe.name}: {len(self.converted)} of {total} linear layers {self._DONE}", *self.lines()]
        if self.others:
            kinds = (f"{each.modules} {each.kind} ({short_count(each.parameters)} parameters)" for each in self.others)
            text.append(f"not linear: {', '.join(kinds)}")
        text += self._totals() if self.converted else []
        return "\n".join([*text, *(f"warning: {each}" for each in self.warnings)])

    def _totals(self) -> list[str]:
        """Lines on the model as a whole."""
        shares = f"{100 * self.parameter_share:.1f} % of parameters, {100 * self.flop_share:.1f} % of linear FLOPs"
        return [f"share: {shares}", f"roofline: {self._prediction()}"]

    def _prediction(self) -> str:
        speedup = self.predicted_speedup(TOKENS)
        formats, architecture = self.recipe.formats(), nominal(MACHINE).architecture
        pairs = [(formats[a], formats[b]) for a, b in zip(ROLES[::2], ROLES[1::2], strict=True)]
        notes = dict.fromkeys(engine_for(architecture, *pair).note for pair in pairs)
        where = "; ".join([f"{MACHINE.upper()}, {TOKENS} tokens", *filter(None, notes)])
        gains = (
            f"{speedup.converted:.2f}x bf16's speed for what is converted, {speedup.linears:.2f}x for all linear layers"
        )
        return f"{gains} ({where})"


def speed_note(recipe: Recipe, in_features: int, out_features: int) -> str:
    """Note on a layer whose size costs speed; empty if it does not.

    >>> from blockscale import get_recipe
    >>> speed_note(get_recipe("fp8_blockwise"), 2048, 10944)
    'costs a little speed: 10944 features end in a partly filled block of 128'
    >>> speed_note(get_recipe("mxfp8"), 1000, 1024)
    'costs speed: 1000 is no multiple of 16, which the fast products need'
    """
    sizes = list(dict.fromkeys((in_features, out_features)))
    blocks = [max(get_format(format).block) for format in recipe.formats().values() if format is not None]
    if not blocks:
        return ""
    odd = [str(size) for size in sizes if size % _ALIGNED]
    if odd:
        be = "is no multiple" if len(odd) == 1 else "are no multiples"
        return f"costs speed: {' and '.join(odd)} {be} of {_ALIGNED}, which the fast products need"
    partial = [str(size) for size in sizes if size % max(blocks)]
    if partial:
        return f"costs a little speed: {' and '.join(partial)} features end in a partly filled block of {max(blocks)}"
    return ""


def _size(layer: Converted) -> tuple[int, ...]:
    return layer.in_features, layer.out_features, layer.experts, layer.active, layer.among


def _seconds(
    layers: Iterable[Converted | Skipped], tokens: int, formats: Mapping[str, str | None], ceilings: Ceilings, use: Use
) -> float:
    """Seconds of one training step. Lazy layers have no size and count as zero. Experts share the tokens evenly."""
    sizes = Counter[tuple[int, int, int]]()
    for each in layers:
        rows = max(1, tokens * each.active // (each.experts * each.among))
        sizes[rows, each.in_features, each.out_features] += each.experts
    costs = {size: linear_cost(*size, formats, ceilings, use).seconds for size in sizes if min(size) > 0}
    return sum(seconds * sizes[size] for size, seconds in costs.items())


# ---- text ------------------------------------------------------------------------------------------------------------

_KEPT = "kept in high precision"
# kept layers of a block with the same remark, from which on they share a line
_FOLD = 4


class _Line(NamedTuple):
    """Key of a line: everything but the numbers in its names."""

    heading: str
    pattern: str
    size: tuple[int, int] | None
    remark: str


def _table(layers: Mapping[str, Sequence[tuple[Converted | Skipped, str]]]) -> list[str]:
    """Lines under headings; layers whose names differ in numbers share one."""
    groups: dict[_Line, list[str]] = {}
    for heading, members in layers.items():
        for layer, remark in members:
            line = _Line(heading, _pattern(layer.name), (layer.in_features, layer.out_features), remark)
            groups.setdefault(line, []).append(layer.name)
    groups = _fold(groups)
    rows = [
        (line, _ranges(names), f"x{len(names)}" if len(names) > 1 else "", *map(str, line.size or ("", "")))
        for line, names in groups.items()
    ]
    name, count, low, high = (max((len(row[i]) for row in rows), default=0) for i in range(1, 5))
    text: list[str] = []
    for i, (line, names, times, inner, outer) in enumerate(rows):
        if i == 0 or rows[i - 1][0].heading != line.heading:
            text.append(line.heading)
        size = f"{inner:>{low}} -> {outer:>{high}}" if line.size else " " * (low + high + 4)
        cells = [f"{names:<{name}}", *([f"{times:<{count}}"] if count else []), size, line.remark]
        text.append(f"  {'  '.join(cells)}".rstrip())
    return text


def _fold(groups: Mapping[_Line, list[str]]) -> dict[_Line, list[str]]:
    """One line for blocks that are kept as a whole, not one for each of their layers."""
    places: dict[_Line, list[_Line]] = {}
    for line in groups:
        block, _, rest = line.pattern.partition("#")
        if line.heading == _KEPT and rest:
            places.setdefault(line._replace(pattern=f"{block}#.*", size=None), []).append(line)
    folded: dict[_Line, list[str]] = {}
    for line, names in groups.items():
        block = line._replace(pattern=f"{line.pattern.partition('#')[0]}#.*", size=None)
        if len(places.get(block, ())) < _FOLD:
            folded[line] = names
        else:
            depth = block.pattern.count(".")
            folded.setdefault(block, []).extend(".".join(name.split(".")[:depth]) + ".*" for name in names)
    return folded


def _ranges(names: Sequence[str]) -> str:
    """Names that differ only in numbers, as one text.

    >>> _ranges(["layers.0.w", "layers.1.w", "layers.2.w", "layers.5.w"])
    'layers.0-2,5.w'
    """
    parts = [name.split(".") for name in names]
    return ".".join(_span(column) for column in zip(*parts, strict=True))


def _pattern(name: str) -> str:
    """A name with `#` for each number in it."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _merged(names: Iterable[str]) -> list[str]:
    """Names, with those that differ only in numbers merged.

    >>> _merged(["layers.0.moe", "layers.1.moe", "head.moe"])
    ['layers.0-1.moe', 'head.moe']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    return [_ranges(group) for group in groups.values()]


def _span(words: Sequence[str]) -> str:
    if len(set(words)) == 1:
        return words[0]
    spans: list[list[int]] = []
    for number in sorted(set(map(int, words))):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def short_count(count: int) -> str:
    """A count with a unit.

    >>> short_count(525_336_576), short_count(266_240), short_count(96)
    ('525.3M', '266.2k', '96')
    """
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)
