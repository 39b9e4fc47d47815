"""Options of a command, parsed by tyro: parameters of its `run`, or fields of a dataclass. Imports no torch.

Around tyro: short names, lists with commas, and errors as value, rule and fix. Unknown options, options given twice and
empty values are refused before the command runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import re
import shlex
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from ..errors import refuse
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
# separator of list values in one word; a weight is "N,K", so shapes use ;
_SEPARATORS = {"--shapes": ";"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def options_of(declared: object) -> dict[str, bool]:
    """Options of a function or of a dataclass instance, nested fields included -> whether the option takes a list."""
    if not dataclasses.is_dataclass(declared):
        assert callable(declared)
        hints, parameters = typing.get_type_hints(declared), inspect.signature(declared).parameters.values()
        return {
            _flag(each.name): _is_list(hints[each.name]) for each in parameters if each.kind is not each.POSITIONAL_ONLY
        }
    hints, found = typing.get_type_hints(type(declared)), dict[str, bool]()
    for each in dataclasses.fields(declared):
        value = getattr(declared, each.name)
        if each.init and dataclasses.is_dataclass(value):
            found |= {f"{_flag(each.name)}.{flag[2:]}": is_list for flag, is_list in options_of(value).items()}
        elif each.init and not any(map(dataclasses.is_dataclass, typing.get_args(hints[each.name]))):
            found[_flag(f"no_{each.name}" if value is True else each.name)] = _is_list(hints[each.name])
    return found


def short_options(options: Collection[str]) -> dict[str, str]:
    """Short names of the given options, short name -> full name; single letters may have one dash."""
    letters = {option[1:]: option for option in options if len(option) == 3}
    return {short: full for short, full in SHORT.items() if full in options and short not in options} | letters


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


def _is_list(hint: object) -> bool:
    return typing.get_origin(hint) is tuple


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
    about = description or (inspect.getdoc(declared) or "").partition("\n\nArgs:")[0]
    if shorts:
        about += f"\n\nShort names: {', '.join(f'{short} for {full}' for short, full in shorts.items())}."
    is_instance = dataclasses.is_dataclass(declared)
    target: Any = type(declared)
    arguments: dict[str, Any] = {"default": declared} if is_instance else {}
    if not is_instance:  # called after all words are parsed, so that stray ones are refused first
        function = cast("Callable[..., T]", declared)
        target = functools.wraps(function)(functools.partial(functools.partial, function))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found, unknown = tyro.cli(
                target,
                prog=f"blockscale {command}",
                description=about,
                args=_expanded(command, words, options, shorts),
                return_unknown_args=True,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
                **arguments,
            )
    except SystemExit as stop:
        if stop.code:
            _refuse_value(command, said.getvalue())
        raise
    if unknown:
        _refuse_word(command, unknown, [*shorts, *options], presets)
    return found if is_instance else found()


def _expanded(command: str, words: Sequence[str], options: Mapping[str, bool], shorts: Mapping[str, str]) -> list[str]:
    """The words with full option names and one word per value; raises for invalid options and empty values."""
    groups = list[tuple[str, str, list[str]]]([("", "", [])])  # option as written, in full, and the words behind it
    for word in words:
        written, mark, value = word.partition("=")
        if word.startswith("--") or re.fullmatch("-[a-z]", written):
            groups.append((written, shorts.get(written, _flag(written.lstrip("-"))), [value] if mark else []))
        else:
            groups[-1][2].append(word)
    for place, (written, full, values) in enumerate(groups):
        if written and full not in (*options, "--help", "--h"):
            close, rule = _nearest(full, [*shorts, *options]), f"blockscale {command} --help lists the options"
            fix = f"did you mean {_quoted(close[0], *values[:1])}?" if close else f"leave {written} out"
            refuse(f"unknown option {_quoted(written, *values[:1])}", rule, fix)
        if twice := [other for other, same, _ in groups[:place] if same == full]:
            refuse(f"{twice[0]} and {written}", "an option is given once", f"leave one {written} out")
        if not all(value.strip() for value in values):
            refuse(f"{written} ''".strip(), "a value is not empty", f"leave {written or 'it'} out, or pass a value")
        if options.get(full):
            parts = [part.strip() for value in values for part in value.split(_SEPARATORS.get(full, ","))]
            values[:] = filter(None, parts)
            if not values:
                refuse(f"{written} without a value", "it takes one or more", f"leave {written} out, or pass values")
    return [word for _, full, values in groups for word in (full, *values) if word]


def _nearest(full: str, known: Sequence[str]) -> list[str]:
    """Options whose last part is this name, else the one that is most similar."""
    return _same(full, known) or difflib.get_close_matches(full, known, 1, 0.7)


def _same(full: str, known: Sequence[str]) -> list[str]:
    return [flag for flag in known if flag.rpartition(".")[2].lstrip("-") == full[2:]]


def _quoted(*words: str) -> str:
    return " ".join(map(shlex.quote, words))


def _refuse_value(command: str, said: str) -> NoReturn:
    """Raise with the text of tyro's error box: a title, sentences, and the usage of the option that is to blame."""
    lines = [_COLOURS.sub("", line).strip(" │╭╮╰╯├┤─") for line in said.splitlines()]
    _, *lines = [line for line in lines if line.strip("-")]
    ends = [place for place, line in enumerate(lines) if line.startswith(("Argument helptext", "For full helptext"))]
    ends = ends or [len(lines)]
    what, _, rule = " ".join(lines[: ends[0]]).partition(". Got errors")[0].partition(". Expected ")
    rule = lines[ends[0] + 1] if len(ends) > 1 else rule or "the command needs it"
    refuse(what, rule.rstrip("."), f"pass such a value; blockscale {command} --help explains it")


def _refuse_word(command: str, words: Sequence[str], known: Sequence[str], presets: Collection[str]) -> NoReturn:
    """Raise for the first of the words that belong to no option."""
    name, mark, value = words[0].lstrip("-").partition("=")
    rule, fix = f"blockscale {command} --help lists the options", f"leave {words[0]} out"
    if words[0] in presets:
        rule, fix = "the preset is the first word", f"write it first: blockscale {command.split()[0]} {words[0]}"
    elif same := _same(_flag(name), known):
        fix = f"did you mean {_quoted(same[0], *([value] if mark else words[1:2]))}?"
    refuse(f"{words[0]!r} belongs to no option", rule, fix)


@functools.cache
def _flags() -> dict[str, str]:
    """Option of each field of a run, by the path of the field, and by its name if that is unique."""
    run, short = RunConfig(), {full: name for name, full in SHORT.items()}
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, latent=LatentConfig(), experts=ExpertsConfig()))
    paths = {flag[2:].replace("-", "_"): short.get(flag, flag) for flag in options_of(run)}
    leaves = [path.rpartition(".")[2] for path in paths]
    unique = {leaf: flag for leaf, flag in zip(leaves, paths.values(), strict=True) if leaves.count(leaf) == 1}
    return unique | paths


def as_flag(name: str, *value: object) -> str:
    """A field of a run and its value as a command-line option; `errors.option` uses it in commands.

    >>> as_flag("recipe.since", 5), as_flag("resume", True), as_flag("eval_every"), as_flag("keep_first", 0)
    ('--since 5', '--resume', '--eval-every', '--recipe.keep-first 0')
    """
    return " ".join((_flags().get(name, _flag(name)), *(shlex.quote(str(each)) for each in value if each is not True)))
