"""What a conversion did: which layers, why not the others, how much of the model that is, and what it should win.

Text for people; numbered blocks share a line. Predictions are the roofline's, so the most that can be won.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..autograd.recipe import Recipe
from ..errors import option
from ..formats.checks import check_int
from ..formats.spec import get_format
from ..roofline import BF16, ROLES, Ceilings, Use, engine_for, linear_cost, measured, nominal

MACHINE, TOKENS = "h200", 4096
# features that the fast products take in multiples of
_ALIGNED = 16


class Converted(NamedTuple):
    """A layer that follows the recipe now.  parameters: those that no module before it has.  note: what to know.
    experts: how many weights of this size it has, and active how many of them see a token.  among: experts in the list
    that it is one of, if it is; `active` of these see a token."""

    name: str
    in_features: int
    out_features: int
    parameters: int
    note: str = ""
    experts: int = 1
    active: int = 1
    among: int = 1


class Skipped(NamedTuple):
    """A linear layer that stays as it was, and why."""

    name: str
    reason: str
    in_features: int
    out_features: int
    parameters: int
    experts: int = 1
    active: int = 1
    among: int = 1


class Other(NamedTuple):
    """Modules of one class with parameters of their own that are no linear layers."""

    kind: str
    modules: int
    parameters: int

    def plus(self, parameters: int) -> Other:
        """One more of them."""
        return Other(self.kind, self.modules + 1, self.parameters + parameters)


class Speedup(NamedTuple):
    """Times bf16's speed: of the converted layers, and of all linear layers, where the others are as before."""

    converted: float
    linears: float


def nothing_converted(skipped: Sequence[Skipped]) -> str:
    """What to do about a conversion that left every layer as it was."""
    said = "no layer was converted: "
    if not skipped:
        return said + "the model has no linear layers, and no experts that are known"
    if any(" blocks" in each.reason for each in skipped):
        return said + f"pass {option('keep_first', 0)} and {option('keep_last', 0)}, or choose layers by name"
    return said + "the reasons above say what they would need"


def unknown_active(names: Sequence[str], experts: int) -> str:
    """What to do where nothing says how many experts of these modules see a token."""
    where = ", ".join(_merged(names))
    return (
        f"nothing says how many of the {experts} experts of {where} see a token, so 1 is counted, and FLOPs and the "
        "roofline are those of one: set top_k on the block (block.top_k = 2) before quantize_"
    )


@dataclass(frozen=True)
class ConversionReport:
    """What `quantize_` did.

    converted, skipped: all linear layers.  others: modules with parameters that are none.  warnings: what a user should
    look at.  `print` it.

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

    recipe: Recipe
    converted: tuple[Converted, ...]
    skipped: tuple[Skipped, ...]
    others: tuple[Other, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Of the whole model; tied ones count once."""
        return sum(each.parameters for each in (*self.converted, *self.skipped, *self.others))

    @property
    def parameter_share(self) -> float:
        """How much of the model's parameters the converted layers have, from 0 to 1."""
        return sum(each.parameters for each in self.converted) / max(1, self.parameters)

    @property
    def flop_share(self) -> float:
        """How much of the FLOPs of all linear layers is converted, if every layer sees every token, and of experts as
        many as are active for one."""
        low, rest = (
            sum(2 * each.in_features * each.out_features * each.active / each.among for each in layers)
            for layers in (self.converted, self.skipped)
        )
        return low / (low + rest) if low + rest else 0.0

    def predicted_speedup(self, tokens: int, machine: str = MACHINE) -> Speedup:
        """Of a training step of the linear layers, by the roofline: measured ceilings where there are some."""
        check_int(tokens, "tokens", "it is the number of tokens of a step", least=1)
        ceilings = measured(machine) or nominal(machine)
        use = Use(weight_cast=self.recipe.weight_cast)
        plain = _seconds(self.converted, tokens, BF16, ceilings, use)
        low = _seconds(self.converted, tokens, self.recipe.formats(), ceilings, use)
        rest = _seconds(self.skipped, tokens, BF16, ceilings, use)
        return Speedup(plain / low if low else 1.0, (plain + rest) / (low + rest) if low + rest else 1.0)

    def seconds_won(self, tokens: int, machine: str = MACHINE) -> dict[str, float]:
        """Of a training step, by the roofline: how much less each converted layer takes than in bf16; below zero where
        it takes more."""
        check_int(tokens, "tokens", "it is the number of tokens of a step", least=1)
        ceilings, use = measured(machine) or nominal(machine), Use(weight_cast=self.recipe.weight_cast)
        won: dict[tuple[int, ...], float] = {}
        for each in self.converted:
            if _size(each) not in won:
                plain, low = (_seconds([each], tokens, form, ceilings, use) for form in (BF16, self.recipe.formats()))
                won[_size(each)] = plain - low
        return {each.name: won[_size(each)] for each in self.converted}

    def lines(self) -> list[str]:
        """The layers as text, one line for all blocks that are alike."""
        return _table(
            {
                "converted": [(each, each.note) for each in self.converted],
                _KEPT: [(each, each.reason) for each in self.skipped],
            }
        )

    def __str__(self) -> str:
        total = len(self.converted) + len(self.skipped)
        text = [f"{self.recipe.name}: {len(self.converted)} of {total} linear layers converted", *self.lines()]
        if self.others:
            kinds = (f"{each.modules} {each.kind} ({_short(each.parameters)} parameters)" for each in self.others)
            text.append(f"not linear: {', '.join(kinds)}")
        if self.converted:
            shares = f"{100 * self.parameter_share:.1f} % of parameters, {100 * self.flop_share:.1f} % of linear FLOPs"
            text += [f"share: {shares}", f"roofline: {self._prediction()}"]
        return "\n".join([*text, *(f"warning: {each}" for each in self.warnings)])

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
    """What a layer's size costs, if anything.

    >>> from blockscale import get_recipe
    >>> speed_note(get_recipe("fp8_blockwise"), 2048, 10944)
    'costs a little speed: 10944 features end in a partly filled block of 128'
    >>> speed_note(get_recipe("mxfp8"), 1000, 1024)
    'costs speed: 1000 is no multiple of 16, as the fast products want it'
    """
    sizes = list(dict.fromkeys((in_features, out_features)))
    blocks = [max(get_format(format).block) for format in recipe.formats().values() if format is not None]
    if not blocks:
        return ""
    odd = [str(size) for size in sizes if size % _ALIGNED]
    if odd:
        be = "is no multiple" if len(odd) == 1 else "are no multiples"
        return f"costs speed: {' and '.join(odd)} {be} of {_ALIGNED}, as the fast products want it"
    partial = [str(size) for size in sizes if size % max(blocks)]
    if partial:
        return f"costs a little speed: {' and '.join(partial)} features end in a partly filled block of {max(blocks)}"
    return ""


def _size(layer: Converted) -> tuple[int, ...]:
    return layer.in_features, layer.out_features, layer.experts, layer.active, layer.among


def _seconds(
    layers: Iterable[Converted | Skipped], tokens: int, formats: Mapping[str, str | None], ceilings: Ceilings, use: Use
) -> float:
    """Of one training step; lazy layers have no size, and so no time. Experts share the tokens evenly."""
    sizes = Counter[tuple[int, int, int]]()
    for each in layers:
        rows = max(1, tokens * each.active // (each.experts * each.among))
        sizes[rows, each.in_features, each.out_features] += each.experts
    costs = {size: linear_cost(*size, formats, ceilings, use).seconds for size in sizes if min(size) > 0}
    return sum(seconds * sizes[size] for size, seconds in costs.items())


# ---- text ------------------------------------------------------------------------------------------------------------

_KEPT = "kept in high precision"
# patterns that share a remark and a place, from which on they share a line
_FOLD = 4


class _Line(NamedTuple):
    """What a line is about, apart from the numbers in its names."""

    heading: str
    pattern: str
    size: tuple[int, int] | None
    remark: str


def _table(layers: Mapping[str, Sequence[tuple[Converted | Skipped, str]]]) -> list[str]:
    """Lines under headings; layers whose names differ in numbers share one."""
    groups: dict[_Line, list[str]] = {}
    for heading, members in layers.items():
        for layer, remark in members:
            pattern = ".".join("#" if part.isdigit() else part for part in layer.name.split("."))
            line = _Line(heading, pattern, (layer.in_features, layer.out_features), remark)
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
    """Blocks that are kept as a whole take one line, not one for each of their layers."""
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
    """Names that differ in numbers only, as one.

    >>> _ranges(["layers.0.w", "layers.1.w", "layers.2.w", "layers.5.w"])
    'layers.0-2,5.w'
    """
    parts = [name.split(".") for name in names]
    return ".".join(_span(column) for column in zip(*parts, strict=True))


def _merged(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers only as one each.

    >>> _merged(["layers.0.moe", "layers.1.moe", "head.moe"])
    ['layers.0-1.moe', 'head.moe']
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join("#" if part.isdigit() else part for part in name.split(".")), []).append(name)
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


def _short(count: int) -> str:
    """A count as people say it.

    >>> _short(525_336_576), _short(266_240), _short(96)
    ('525.3M', '266.2k', '96')
    """
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)
