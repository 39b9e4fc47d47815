"""What a conversion did: which layers, why not the others, how much of the model that is, and what it should win.

Text for people; numbered blocks share a line. Predictions are the roofline's, so the most that can be won.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..autograd.recipe import Recipe
from ..formats.spec import get_format
from ..roofline import BF16, Ceilings, Use, linear_cost, measured, nominal

MACHINE, TOKENS = "h200", 4096
# features that the fast products take in multiples of
_ALIGNED = 16


class Converted(NamedTuple):
    """A layer that follows the recipe now.  parameters: those that no module before it has.  note: what to know."""

    name: str
    in_features: int
    out_features: int
    parameters: int
    note: str = ""


class Skipped(NamedTuple):
    """A linear layer that stays as it was, and why."""

    name: str
    reason: str
    in_features: int
    out_features: int
    parameters: int


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
        """How much of the FLOPs of all linear layers is converted, if every layer sees every token."""
        low, rest = (
            sum(2 * each.in_features * each.out_features for each in layers)
            for layers in (self.converted, self.skipped)
        )
        return low / max(1, low + rest)

    def predicted_speedup(self, tokens: int, machine: str = MACHINE) -> Speedup:
        """Of a training step of the linear layers, by the roofline: measured ceilings where there are some."""
        ceilings = measured(machine) or nominal(machine)
        use = Use(weight_cast=self.recipe.weight_cast)
        plain = _seconds(self.converted, tokens, BF16, ceilings, use)
        low = _seconds(self.converted, tokens, self.recipe.formats(), ceilings, use)
        rest = _seconds(self.skipped, tokens, BF16, ceilings, use)
        return Speedup(plain / low if low else 1.0, (plain + rest) / (low + rest) if low + rest else 1.0)

    def lines(self) -> list[str]:
        """The layers as text, one line for all blocks that are alike."""
        rows = [("converted", *_row(each, each.note)) for each in self.converted]
        rows += [("kept in high precision", *_row(each, each.reason)) for each in self.skipped]
        return _table(rows)

    def __str__(self) -> str:
        total = len(self.converted) + len(self.skipped)
        text = [f"{self.recipe.name}: {len(self.converted)} of {total} linear layers converted", *self.lines()]
        if self.others:
            kinds = (f"{each.modules} {each.kind} ({_short(each.parameters)} parameters)" for each in self.others)
            text.append(f"not linear: {', '.join(kinds)}")
        if self.converted:
            speedup = self.predicted_speedup(TOKENS)
            text.append(f"share: {self.parameter_share:.1%} of parameters, {self.flop_share:.1%} of linear FLOPs")
            text.append(
                f"roofline, {MACHINE.upper()}, {TOKENS} tokens: converted layers at {speedup.converted:.2f}x the speed of "
                f"bf16, all linear layers at {speedup.linears:.2f}x"
            )
        return "\n".join([*text, *(f"warning: {each}" for each in self.warnings)])


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


def _seconds(
    layers: Iterable[Converted | Skipped], tokens: int, formats: Mapping[str, str | None], ceilings: Ceilings, use: Use
) -> float:
    """Of one training step; lazy layers have no size, and so no time."""
    sizes = ((each.in_features, each.out_features) for each in layers)
    return sum(linear_cost(tokens, *size, formats, ceilings, use).seconds for size in sizes if min(size) > 0)


# ---- text ------------------------------------------------------------------------------------------------------------

_Row = tuple[str, str, int, int, str]  # heading, name, in, out, remark


def _row(layer: Converted | Skipped, remark: str) -> tuple[str, int, int, str]:
    return layer.name, layer.in_features, layer.out_features, remark


def _table(rows: Sequence[_Row]) -> list[str]:
    """Lines under headings; rows that differ in numbers of their names share one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for heading, name, low, high, remark in rows:
        pattern = ".".join("#" if part.isdigit() else part for part in name.split("."))
        groups.setdefault((heading, pattern, f"{low}", f"{high}", remark), []).append(name)
    labels = {key: _ranges(names) for key, names in groups.items()}
    counts = {key: f"x{len(names)}" if len(names) > 1 else "" for key, names in groups.items()}
    name_width = max(map(len, labels.values()), default=0)
    count_width = max(map(len, counts.values()), default=0)
    low_width, high_width = (max((len(key[i]) for key in groups), default=0) for i in (2, 3))
    lines: list[str] = []
    above = ""
    for key, label in labels.items():
        heading, _, low, high, remark = key
        lines += [] if heading == above else [heading]
        above = heading
        cells = [f"{label:<{name_width}}"] + ([f"{counts[key]:<{count_width}}"] if count_width else [])
        cells += [f"{low:>{low_width}} -> {high:>{high_width}}", remark]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def _ranges(names: Sequence[str]) -> str:
    """Names that differ in numbers only, as one.

    >>> _ranges(["layers.0.w", "layers.1.w", "layers.2.w", "layers.5.w"])
    'layers.0-2,5.w'
    """
    parts = [name.split(".") for name in names]
    return ".".join(_span(column) for column in zip(*parts, strict=True))


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
