"""`blockscale train`: run one model by one recipe. The preset comes first, every field of its config is an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self, TypeVar

from ..train.config import RunConfig
from ..train.presets import PRESETS, get_preset

if TYPE_CHECKING:
    from ..train.records import Hooks

O = TypeVar("O")
DEFAULT = "tiny"
# options that people write, for fields that lie deeper
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


@dataclass(frozen=True)
class RunOptions(RunConfig):
    """A run with options of a command beside its own."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Those of a preset."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(RunConfig)})

    @property
    def config(self) -> RunConfig:
        """The run alone."""
        return RunConfig(**{each.name: getattr(self, each.name) for each in fields(RunConfig)})


def main(arguments: list[str]) -> int:
    """Parse a preset and changes to it, and run it."""
    shorts = ", ".join(f"{short} for {full}" for short, full in SHORT.items())
    return run(
        parse(arguments, "train", "Train a preset, changed by options.", lambda config: config, f"Short: {shorts}.")
    )


def parse(arguments: list[str], command: str, what: str, options: Callable[[RunConfig], O], more: str = "") -> O:
    """A preset, which is the first word, as `options` of it, changed by what follows."""
    import tyro

    words = list(arguments)
    name = words.pop(0) if words and not words[0].startswith("-") else DEFAULT
    about = "\n".join(f"  {each:<10} {first_line(each)}" for each in PRESETS)
    default = options(get_preset(name))
    return tyro.cli(
        type(default),
        prog=f"blockscale {command} {name}",
        description=f"{what} The first word is the preset, {DEFAULT} without one.\n\n{about}\n\n"
        f"Options shown are those of the preset. {more}",
        default=default,
        args=[full_option(word) for word in words],
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )


def run(config: RunConfig | None = None) -> int:
    """Train and show it; 130 where it was interrupted."""
    from .arguments import wide_console

    config = config or get_preset(DEFAULT)
    console = wide_console(160)
    with console.status("importing torch ..."):
        from ..train.checks import check
        from ..train.files import owned
        from ..train.loop import train
        from ..train.metrics import JsonLines, TensorBoard
        from ..train.view import View

    check(config)
    with owned(config.folder):
        hooks: list[Hooks] = [View(console)]
        if config.folder is not None:
            hooks.append(JsonLines(config.folder))
            if config.tensorboard:
                hooks.append(TensorBoard(config.folder))
        result = train(config, hooks=hooks)
    return 130 if result.stopped == "interrupted" else 0


def first_line(name: str) -> str:
    """What a preset is."""
    return (PRESETS[name].__doc__ or "").partition("\n")[0]


def full_option(word: str) -> str:
    """An option as the config calls it, for the short name that people write."""
    option, mark, value = word.partition("=")
    return SHORT.get(option, option) + mark + value
