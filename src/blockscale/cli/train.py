"""`blockscale train`: train a model with a recipe. The first word is a preset, every field of its config an option."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, get_type_hints

import tyro

from .. import env
from ..train.checks import check
from ..train.config import RecipeConfig, RunConfig
from ..train.presets import PRESETS, get_preset
from .arguments import check_device, check_readable, check_writable, refuse, wide_console
from .options import parse_words

if TYPE_CHECKING:
    from ..train.records import Hooks

C = TypeVar("C")
O = TypeVar("O", bound=RunConfig)
DEFAULT = "tiny"


def hides(names: str) -> Callable[[type[C]], type[C]]:
    """Class decorator under `@dataclass`: these fields of its base, separated by spaces, are set by the command."""

    def decorate(kind: type[C]) -> type[C]:
        base: Any = kind.__mro__[1]
        hints, known = get_type_hints(base), {each.name: each for each in fields(base)}
        for name in names.split():
            made = copy.copy(known[name])
            made.init = False
            kind.__annotations__[name] = Annotated[hints[name], tyro.conf.Suppress]
            setattr(kind, name, made)
        return kind

    return decorate


@dataclass(frozen=True)
class RunOptions(RunConfig):
    """Base of command options: a run config plus options of the command."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Options from a preset. Fields with `init=False` are not options: the command sets them."""
        return cls(**_values(cls, config, {each.name for each in fields(RunConfig)}))

    @property
    def config(self) -> RunConfig:
        """The run config without the options of the command."""
        return RunConfig(**_values(RunConfig, self, {each.name for each in fields(RunConfig)}))


def _values(kind: type[Any], config: Any, names: Collection[str]) -> dict[str, Any]:
    """Field values of a config for another dataclass, nested ones converted to its own types."""
    hints, found = get_type_hints(kind), dict[str, Any]()
    for each in fields(kind):
        if each.init and each.name in names:
            value, inner = getattr(config, each.name), hints[each.name]
            if isinstance(inner, type) and is_dataclass(value) and type(value) is not inner:
                value = inner(**_values(inner, value, {each.name for each in fields(value)}))
            found[each.name] = value
    return found


@dataclass(frozen=True)
@hides("name")
class ArmRecipe(RecipeConfig):
    """Precision of the linear layers, for every recipe; see docs/recipes.md."""


def main(arguments: list[str]) -> int:
    """Parse a preset and changes to it, and train."""
    return run(parse(arguments, "train", "Train a preset, changed by options.", lambda config: config))


def parse(arguments: list[str], command: str, what: str, options: Callable[[RunConfig], O], more: str = "") -> O:
    """Options parsed from the words: the first is the preset, the others change it.

    options: makes the options from a preset.  more: end of the description in the help.
    """
    words = list(arguments)
    name = words.pop(0) if words and not words[0].startswith("-") else DEFAULT
    about = "\n".join(f"  {each:<10} {first_line(each)}" for each in PRESETS)
    about = f"{what} The first word is the preset; default: {DEFAULT}.\n\n{about}\n\nOptions are those of the preset."
    about = f"{about}\n\n{more}" if more else about
    return parse_words(options(get_preset(name)), f"{command} {name}", words, about, PRESETS)


def check_run(config: RunConfig) -> None:
    """Raise for invalid configs and unreadable or unwritable paths, before torch is imported."""
    check(config)
    check_device(config.device)
    check_readable(config.data.tokenizer, "--tokenizer")
    check_readable(config.recipe.keep_file, "--keep-file")
    if config.start is not None and not config.start.is_dir():
        rule = "it is the folder of a checkpoint, such as out/a/step-00001000"
        refuse(f"--start {config.start}", f"{rule}, and there is none", "check the path")
    check_writable(config.folder, "--folder", is_folder=True)
    check_writable(config.export, "--export", is_folder=True)
    check_writable(config.data.cache, "--data.cache", is_folder=True)


def refuse_ranks(command: str) -> None:
    """Raise if torchrun started a command whose runs are each in one process."""
    ranks = int(env.of_others("WORLD_SIZE") or 1)
    if ranks > 1:
        rule = "its runs share one process, so that nothing else differs between them"
        refuse(f"{command} on {ranks} ranks", rule, "start it without torchrun, or train one run with torchrun")


def run(config: RunConfig) -> int:
    """Train and show progress; returns 130 if interrupted."""
    if config.recipe.name == "bf16" and config.recipe.weights is not None:
        rule = "bf16 casts no weights"
        refuse(f"--recipe.weights {config.recipe.weights} with bf16", rule, "leave it out, or pass another --recipe")
    check_run(config)
    console = wide_console(160)
    with console.status("importing torch ..."):
        from ..train.files import folder_lock
        from ..train.loop import train
        from ..train.metrics import JsonLines, TensorBoard
        from ..train.view import View

    is_first = env.of_others("RANK") in ("", "0")
    with folder_lock(config.folder if is_first else None):
        hooks: list[Hooks] = [View(console)] if is_first else []
        if config.folder is not None and is_first:
            hooks.append(JsonLines(config.folder))
            if config.tensorboard:
                hooks.append(TensorBoard(config.folder))
        result = train(config, hooks=hooks)
    return 130 if result.stopped == "interrupted" else 0


def first_line(name: str) -> str:
    """First line of the docstring of a preset."""
    return (PRESETS[name].__doc__ or "").partition("\n")[0]
