"""What commands about a model's linear layers share: how layers, tokens and formats are written, consoles and progress.

Torch is imported late: `--help` must not wait for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

Layer = tuple[int, int]  # (N, K) of a weight

# each process that compiles holds a torch of its own, some 500 MB
MOST_WORKERS = 16
# of lists that go to a file or a pipe, where nobody can widen the window
FILE_WIDTH = 120


def layers(model: str | None, shapes: str | None, command: str) -> list[Layer]:
    """(N, K) of every weight: of a model, or as "N,K;N,K"."""
    from ..bench.shapes import MODELS, model_name

    if (model is None) == (shapes is None):
        given = "neither a model nor shapes" if model is None else f"model {model!r} and shapes {shapes!r}"
        fix = f"blockscale {command} llama3-8b, or --shapes '4096,14336'"
        refuse(given, "one of them names the layers", fix)
    if model is not None:
        return [(n, k) for k, n in MODELS[model_name(model)]]
    assert shapes is not None
    pairs = [numbers(part, "shapes") for part in shapes.split(";") if part.strip()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        refuse(f"shapes={shapes!r}", "each weight is N,K", "separate weights by semicolons: --shapes '4096,14336'")
    return [(n, k) for n, k in pairs]


def numbers(text: str, what: str) -> list[int]:
    """Positive integers, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        refuse(f"{what}={text!r}", "sizes are positive integers", "separate them by commas, such as 1,16,128")
    return [int(word) for word in words]


def format_pair(formats: str) -> tuple[str, str]:
    """Of activations and weights, written as a@b, if there is a product of them."""
    from ..formats.spec import check_pair, get_format

    names = [name.strip() for name in formats.split("@")]
    if len(names) != 2:
        refuse(f"formats={formats!r}", "activations and weights have a format each", "write fp8_1x128@fp8_128x128")
    a, b = names
    for name in names:
        get_format(name)
    check_pair(a, b)
    return a, b


def worker_count(workers: int | None) -> int:
    """Processes that compile: as many as asked for, else one for each core that this process may use."""
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MOST_WORKERS)
    if workers < 1:
        refuse(f"workers={workers}", "at least one process compiles", "leave it out, or pass 1 or more")
    return workers


def plain_console() -> Console:
    """A console whose reader may leave, as `head` does; `main` knows what that is."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process, and call that an error
            raise BrokenPipeError

    return Piped()


def wide_console(width: int = FILE_WIDTH) -> Console:
    """A console whose tables are not cut where they go to a file."""
    console = plain_console()
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


@contextmanager
def progress(console: Console, total: int, first: str) -> Generator[Callable[[str], None]]:
    """A bar, and a function that moves it on by one and says what is at work; first: what is at work before."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def nothing(done: str, what: str, rule: str, fix: str) -> int:
    """Say why nothing was compiled, or tuned; the exit status."""
    from ..errors import message

    print(f"blockscale: nothing was {done}: {message(what, rule=rule, fix=fix)}", file=sys.stderr)
    return 1


def refuse(what: str, rule: str, fix: str) -> NoReturn:
    """Raise what `main` prints."""
    from ..errors import OptionError, message

    raise OptionError(message(what, rule=rule, fix=fix))
