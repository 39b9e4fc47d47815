"""`blockscale train`: run one model by one recipe. The preset comes first, every field of its config is an option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..train.config import RunConfig
from ..train.presets import PRESETS, get_preset

if TYPE_CHECKING:
    from ..train.records import Hooks

DEFAULT = "tiny"
# options that people write, for fields that lie deeper
SHORT = {
    "--recipe": "--recipe.name",
    "--weight-cast": "--recipe.weight-cast",
    "--layers": "--model.layers",
    "--sequence": "--data.sequence",
    "--source": "--data.source",
    "--tokenizer": "--data.tokenizer",
    "--rate": "--optimizer.rate",
    "--schedule": "--optimizer.schedule",
}


def main(arguments: list[str]) -> int:
    """Parse a preset and changes to it, and run it."""
    import tyro

    words = list(arguments)
    name = words.pop(0) if words and not words[0].startswith("-") else DEFAULT
    about = "\n".join(f"  {each:<10} {first_line(each)}" for each in PRESETS)
    shorts = ", ".join(f"{short} for {full}" for short, full in SHORT.items())
    config = tyro.cli(
        RunConfig,
        prog=f"blockscale train {name}" if name in PRESETS else "blockscale train",
        description=f"Train a preset (the first word; {DEFAULT} without one), changed by options.\n\n{about}\n\n"
        f"Options shown are those of the preset. Short: {shorts}.",
        default=get_preset(name),
        args=[full_option(word) for word in words],
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )
    return run(config)


def run(config: RunConfig | None = None) -> int:
    """Train and show it; 130 where it was interrupted."""
    from rich.console import Console

    config = config or get_preset(DEFAULT)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    with console.status("importing torch ..."):
        from ..train.loop import train
        from ..train.metrics import JsonLines, TensorBoard
        from ..train.view import View

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
