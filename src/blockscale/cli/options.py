"""Options of a command, and checks of the words on the command line.

Options are declared once: as parameters of a command's `run`, or as fields of a dataclass, where fields with
`init=False` are set by the command. tyro shows and parses them. `checked` runs before tyro and rejects, with our own
messages: unknown options (prefixes included), options given twice, missing or invalid values, and stray words. Imports
no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union

from ..errors import OptionError, UnknownNameError, check_name, message
from ..models.config import ExpertsConfig, LatentConfig
from ..train.config import RunConfig

T = TypeVar("T")
# short names of options for nested fields
SHORT = {
    "--recipe": "--recipe.name",
    "--weight-cast": "--recipe.weight-cast",
    "--keep-file": "--recipe.keep-file",
    "--since": "--recipe.since",
    "--layers": "--model.layers",
    "--sequence": "--data.sequence",
    "--source": "--data.source",
    "--tokenizer": "--data.tokenizer",
    "--rate": "--optimizer.rate",
    "--schedule": "--optimizer.schedule",
}
_HELP = ("-h", "--help")
# separator of list values in one word; a weight is "N,K", so shapes use ;
_SEPARATORS = {"--shapes": ";"}
_KINDS: Mapping[object, tuple[str, str]] = {
    int: ("an integer", "1"),
    float: ("a number", "0.5"),
    str: ("a word", "WORD"),
    Path: ("a path", "PATH"),
}


@dataclass(frozen=True)
class Option:
    """An option or a positional argument.  kinds: accepted types and literal texts.  takes: number of values."""

    flag: str
    kinds: tuple[object, ...]
    takes: Literal["none", "one", "many"] = "one"
    is_positional: bool = False
    is_required: bool = False

    @property
    def choices(self) -> list[str]:
        """The accepted texts, if only fixed texts are accepted; else empty."""
        return [] if any(kind in _KINDS for kind in self.kinds) else [each for each in self.kinds if type(each) is str]

    @property
    def rule(self) -> str:
        """Description of a valid value."""
        texts = [_KINDS[kind][0] for kind in self.kinds if kind in _KINDS] or [f"one of {', '.join(self.choices)}"]
        return " or ".join(texts)

    @property
    def example(self) -> str:
        """A valid value."""
        return next((_KINDS[kind][1] for kind in self.kinds if kind in _KINDS), "") or self.choices[0]

    def takes_value(self, value: str) -> bool:
        """Whether a word is a valid value."""
        return any(_is_of(kind, value) for kind in self.kinds)


def _is_of(kind: object, value: str) -> bool:
    if kind is int or kind is float:
        try:
            kind(value)
        except ValueError:
            return False
        return True
    is_text = kind is str or kind is Path
    return is_text or value == str(None if kind is types.NoneType else kind)


def options_of(declared: object) -> list[Option]:
    """Options that a command declares: parameters of a function, or fields of a dataclass instance, nested ones
    included."""
    if dataclasses.is_dataclass(declared):
        return list(_fields(declared, is_set=True))
    assert callable(declared)
    hints, found = typing.get_type_hints(declared), list[Option]()
    for name, each in inspect.signature(declared).parameters.items():
        is_positional, default = each.kind is each.POSITIONAL_ONLY, each.default
        found.append(_option(name, hints[name], default, is_positional, default is each.empty))
    return found


def _fields(declared: Any, at: str = "", *, is_set: bool, is_inside: bool = False) -> Iterator[Option]:
    """Options of the fields that the user sets (is_set), or that the command sets.  is_inside: nested in a field that
    the command sets."""
    hints = typing.get_type_hints(type(declared))
    for each in dataclasses.fields(declared):
        value, path, ours = getattr(declared, each.name), f"{at}{each.name}", is_inside or not each.init
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{path}.", is_set=is_set, is_inside=ours)
        elif ours is not is_set and not any(map(dataclasses.is_dataclass, _kinds(hints[each.name]))):
            yield _option(path, hints[each.name], value)


def _option(path: str, hint: object, default: object, is_positional: bool = False, is_required: bool = False) -> Option:
    if is_positional:
        return Option(path, _kinds(hint), "one", is_positional, is_required)
    before, _, name = path.rpartition(".")
    kinds = _kinds(hint)
    if kinds == (bool,):
        name = f"no-{name}" if default is True else name
        return Option(_flag(f"{before}.{name}" if before else name), (), "none")
    return Option(_flag(path), kinds, "many" if typing.get_origin(hint) is tuple else "one")


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


def _kinds(hint: object) -> tuple[object, ...]:
    """Types and literal texts in an annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return inner
    if origin in (Union, types.UnionType, tuple):
        return tuple(dict.fromkeys(kind for each in inner if each is not ... for kind in _kinds(each)))
    return (hint,)


def parse_words(
    declared: Callable[..., T] | T,
    command: str,
    words: Sequence[str],
    description: str | None = None,
    presets: Collection[str] = (),
) -> T:
    """Call a function, or change an instance of a dataclass, with the options in `words`; raises for invalid ones.

    presets: valid first words of the command; the first word is already removed from `words`.
    """
    import tyro

    options = options_of(declared)
    shorts = short_options(options)
    named = [f"{short} for {full}" for short, full in shorts.items()]
    letters = [f"-{option.flag[2:]}" for option in options if len(option.flag) == 3]
    more = [f"Short names: {', '.join(named)}."] if named else []
    more += [f"Single-letter options may have one dash: {', '.join(letters)}."] if letters else []
    is_instance = dataclasses.is_dataclass(declared)
    about = description or (inspect.getdoc(declared) or "").partition("\n\nArgs:")[0]
    arguments: dict[str, Any] = {
        "prog": f"blockscale {command}",
        "description": "\n\n".join([about, *more]),
        "args": checked(command, words, options, shorts, set_by_command(declared) if is_instance else (), presets),
        "config": (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    }
    return tyro.cli(type(declared), default=declared, **arguments) if is_instance else tyro.cli(declared, **arguments)  # pyright: ignore


def set_by_command(declared: object) -> tuple[str, ...]:
    """Options of a run that the command sets itself."""
    return tuple(option.flag for option in _fields(declared, is_set=False))


def short_options(options: Sequence[Option]) -> dict[str, str]:
    """Short names of the given options, short name -> full name."""
    flags = {option.flag for option in options}
    return {short: full for short, full in SHORT.items() if full in flags and short not in flags}


def checked(
    command: str,
    words: Sequence[str],
    options: Sequence[Option],
    shorts: Mapping[str, str],
    ours: Sequence[str] = (),
    presets: Collection[str] = (),
) -> list[str]:
    """The words with full option names and one word per value; raises for the first invalid one.

    ours: options that the command sets itself.  presets: valid first words of the command, never values of a list.
    """
    known = {option.flag: option for option in options if not option.is_positional}
    places = [option for option in options if option.is_positional]
    if any(word in _HELP for word in words):
        for written in (word.partition("=")[0] for word in words if _is_flag(word) and word not in _HELP):
            if _full(written, shorts) not in known:
                _refuse_option(command, written, [], [*shorts, *known], ours)
        return ["--help"]
    given, first, found, rest = dict[str, str](), list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            if not places and word in presets:
                others = [*words[: len(words) - len(rest) - 1], *rest]
                _refuse_preset(command.split()[0], word, others)
            if not places:
                meant = _as_option(word, rest, {**known, **{short: known[full] for short, full in shorts.items()}})
                _refuse_word(command, word, [option for option in options if option.is_positional], meant)
            if "--model" in known and not places[0].takes_value(word):
                _refuse_model(command, word, rest)
            _check_value(places[0].flag, places[0], word)
            first.append(word)
            places.pop(0)
            continue
        written, mark, value = word.partition("=")
        flag = _full(written, shorts)
        follows = [] if mark else _values(rest)
        if flag not in known:
            _refuse_option(command, written, [value] if mark else follows[:1], [*shorts, *known], ours)
        option = known[flag]
        if flag in given:
            _refuse(f"{given[flag]} and {written}", "an option is given once", f"leave one {written} out")
        given[flag] = written
        if option.takes == "none":
            if mark:
                _refuse(word, "it is on or off, and takes no value", f"write {written}, or leave it out")
            found.append(flag)
            continue
        values = [value] if mark else _own(follows, option, presets) if option.takes == "many" else follows[:1]
        del rest[: 0 if mark else len(values)]
        if option.takes == "many":
            values = [each for text in values for each in _parts(text, flag)]
        if not values:
            _refuse(f"{written} without a value", f"it takes {option.rule}", f"write {written} {option.example}")
        for each in values:
            _check_value(written, option, each)
        found += [flag, *values] if option.takes == "many" else [f"{flag}={values[0]}"]
    for option in places:
        if option.is_required:
            fix = f"blockscale {command} {option.example}"
            _refuse(f"{command} without its {option.flag}", f"it is {option.rule}", fix)
    return first + found


def _is_flag(word: str) -> bool:
    return word.startswith("--") or re.fullmatch("-[a-zA-Z]", word) is not None


def _full(written: str, shorts: Mapping[str, str]) -> str:
    """Full name of an option, single letters included."""
    return shorts.get(written, f"-{written}" if len(written) == 2 else written)


def _values(words: Sequence[str]) -> list[str]:
    """The words before the next option."""
    ends = (place for place, word in enumerate(words) if _is_flag(word))
    return list(words[: next(ends, len(words))])


def _parts(text: str, flag: str) -> list[str]:
    """The list values in one word."""
    return [part.strip() for part in text.split(_SEPARATORS.get(flag, ",")) if part.strip()]


def _own(words: Sequence[str], option: Option, presets: Collection[str]) -> list[str]:
    """The words that are values of a list option: the first, and the following valid ones that are not presets."""

    def is_own(word: str) -> bool:
        return word not in presets and all(map(option.takes_value, _parts(word, option.flag)))

    ends = (place for place, word in enumerate(words) if not is_own(word))
    return list(words[: max(1, next(ends, len(words)))])


def _check_value(written: str, option: Option, value: str) -> None:
    if option.choices and value != "None":
        check_name(value, option.choices, option.flag)
    is_empty = not value.strip()
    if is_empty or not option.takes_value(value):
        what = f"{written} {shlex.quote(value)}"
        fix = f"leave {written} out, or pass a value" if is_empty else f"write {written} {option.example}, for instance"
        _refuse(what, "it is not empty" if is_empty else f"it is {option.rule}", fix)


def _as_option(word: str, rest: Sequence[str], known: Mapping[str, Option]) -> str:
    """The option meant by `steps=5`, `-steps 5` or `resume`; empty if there is none."""
    name, mark, value = word.lstrip("-").partition("=")
    option = known.get(flag := _flag(name))
    if option is None or (mark and option.takes == "none"):
        return ""
    values = [value] if mark else _values(rest)[:1]
    return flag if option.takes == "none" else " ".join((flag, *map(shlex.quote, values or [option.example])))


def _refuse_preset(command: str, word: str, others: Sequence[str]) -> NoReturn:
    written = " ".join(map(shlex.quote, ("blockscale", command, word, *others)))
    _refuse(f"{word!r} belongs to no option", "the preset is the first word", f"write it first: {written}")


def _refuse_model(command: str, word: str, rest: Sequence[str]) -> None:
    """Raise for the name of a model where a command takes it as an option."""
    from ..bench.shapes import model_name

    with suppress(UnknownNameError):
        model_name(word)
        written = " ".join(map(shlex.quote, ("blockscale", command, "--model", word, *rest)))
        _refuse(f"{word!r} is a model", f"blockscale {command} takes it as an option", written)


def _refuse_word(command: str, word: str, places: Sequence[Option], meant: str) -> NoReturn:
    takes = f"no more than one word, its {places[0].flag}," if places else "no words"
    rule = f"blockscale {command} takes {takes} before its options, which begin with --"
    fix = f"write {meant}" if meant else f"leave it out; blockscale {command} --help lists the options"
    _refuse(f"{word!r} belongs to no option", rule, fix)


def _refuse_option(
    command: str, written: str, value: Sequence[str], known: Sequence[str], ours: Sequence[str]
) -> NoReturn:
    is_ours = SHORT.get(written, written) in ours
    close = [" ".join((flag, *map(shlex.quote, value))) for flag in _nearest(written, known, 0.9 if is_ours else 0.7)]
    rule = f"blockscale {command} --help lists the options"
    if is_ours:
        rule = f"{command.split()[0]} sets it itself"
    fix = f"did you mean {' or '.join(close)}?" if close else f"leave {written} out"
    _refuse(f"unknown option {' '.join((written, *map(shlex.quote, value)))}", rule, fix)


def _nearest(written: str, known: Sequence[str], least: float) -> list[str]:
    """The most similar option, and a second about as similar; for nested options the last part is enough."""
    name, scored = written.lstrip("-").replace("_", "-"), list[tuple[float, str]]()
    for flag in known:
        score = difflib.SequenceMatcher(None, f"--{name}", flag).ratio()
        begins = bool(name) and re.match(rf"--{re.escape(name)}[^.]", flag) is not None
        scored.append((2.0 if flag.rpartition(".")[2].lstrip("-") == name else max(score, 0.9 * begins), flag))
    best = max((score for score, _ in scored), default=0.0)
    return [flag for score, flag in sorted(scored, reverse=True) if score >= max(least, best - 0.03)][:2]


def _refuse(what: str, rule: str, fix: str) -> NoReturn:
    raise OptionError(message(what, rule=rule, fix=fix))


@cache
def _flags() -> dict[str, str]:
    """Option of each field of a run, by the path of the field, and by its name if that is unique."""
    run = RunConfig()
    model = dataclasses.replace(run.model, latent=LatentConfig(), experts=ExpertsConfig())
    run, short = dataclasses.replace(run, model=model), {full: name for name, full in SHORT.items()}
    flags = [option.flag for option in options_of(run)]
    paths = {flag[2:].replace("-", "_"): short.get(flag, flag) for flag in flags}
    leaves = [path.rpartition(".")[2] for path in paths]
    return {
        path.rpartition(".")[2]: flag for path, flag in paths.items() if leaves.count(path.rpartition(".")[2]) == 1
    } | paths


def as_flag(name: str, *value: object) -> str:
    """A field of a run and its value as a command-line option; `errors.option` uses it in commands.

    >>> as_flag("recipe.since", 5), as_flag("resume", True), as_flag("eval_every"), as_flag("keep_first", 0)
    ('--since 5', '--resume', '--eval-every', '--recipe.keep-first 0')
    """
    flag = _flags().get(name, f"--{name.replace('_', '-')}")
    return " ".join((flag, *(shlex.quote(str(each)) for each in value if each is not True)))
