"""Argument parsing and checks shared by the commands: layers, tokens, formats, recipes, devices, files, consoles.

Torch is imported late: `--help` and errors in options must not wait for it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import check_name, message, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

Layer = tuple[int, int]  # (N, K) of a weight

# largest dimension of an operand: byte counts of a matrix fit in 64 bits
MAX_SIZE = 2**28
# each compile process imports torch, about 500 MB
MAX_WORKERS = 16
# console width for files and pipes, which have no terminal width
FILE_WIDTH = 120


def layers(model: str | None, shapes: Sequence[str], command: str) -> list[Layer]:
    """(N, K) of every weight of a model, or of shapes given as "N,K"."""
    from ..bench.shapes import MODELS, model_name

    if (model is None) == (not shapes):
        given = "neither a model nor --shapes" if model is None else f"model {model!r} and --shapes {_quoted(shapes)}"
        fix = "leave one of them out"
        if model is None:
            fix = f"blockscale {command} llama3-8b, or blockscale {command} --shapes 4096,14336"
        refuse(given, "exactly one of them names the layers", fix)
    if model is not None:
        return [(n, k) for k, n in MODELS[model_name(model)]]
    found = [re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", shape) for shape in shapes]
    sizes = [(int(each[1]), int(each[2])) for each in found if each]
    if len(sizes) < len(found) or not all(0 < size <= MAX_SIZE for pair in sizes for size in pair):
        rule = "each weight is N,K, out and in features, two positive integers up to 2**28"
        refuse(f"--shapes {_quoted(shapes)}", rule, "--shapes 4096,14336, for instance")
    return sizes


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def numbers(values: Sequence[int], flag: str) -> list[int]:
    """The values; raises unless all are positive integers up to `MAX_SIZE`."""
    right = [value for value in values if 0 < value <= MAX_SIZE]
    if len(right) < len(values):
        what, fix = (f"{flag} {','.join(map(str, each))}" for each in (values, right or [1, 16, 128]))
        refuse(what, "sizes are positive integers up to 2**28", fix)
    return list(values)


def at_least(minimum: int, value: int, flag: str, rule: str) -> None:
    """Raise if a count is below the minimum or above `MAX_SIZE`."""
    if value < minimum:
        refuse(f"{flag} {value}", rule, f"pass {flag} {minimum} or more")
    if value > MAX_SIZE:
        refuse(f"{flag} {value}", "counts are integers up to 2**28", f"pass {flag} {max(1, minimum)} or more")


def format_pair(formats: str) -> tuple[str, str]:
    """Formats of activations and weights, given as a@b; raises if no GEMM takes the pair."""
    from ..names import FORMAT_NAMES, check_pair

    names = [name.strip() for name in formats.split("@")]
    if len(names) != 2:
        rule, fix = "activations and weights have one format each", "--formats fp8_1x128@fp8_128x128"
        refuse(f"--formats {shlex.quote(formats)}", rule, fix)
    a, b = names
    for name in names:
        check_name(name, FORMAT_NAMES, "format")
    check_pair(a, b)
    return a, b


def recipes(names: Iterable[str]) -> list[str]:
    """Recipe names without duplicates; raises for unknown ones."""
    from ..names import check_recipe

    found = list(dict.fromkeys(names))
    for name in found:
        check_recipe(name)
    return found


def check_device(device: str | None, *, is_architecture: bool = False) -> None:
    """Raise for an invalid device name; torch checks later that it exists.  is_architecture: also accept sm_90."""
    known = r"(cpu|cuda)(:\d+)?" + (r"|sm_\d{2,3}" if is_architecture else "")
    if device is None or re.fullmatch(known, device):
        return
    rule, fix = "a device is cpu, cuda or cuda:0", "leave it out, or pass --device cpu"
    if is_architecture:
        rule = "a device is cpu, cuda, or a GPU architecture, which need not be on this machine"
        fix = "pass sm_90 for an H100 or H200, sm_100 for a B200"
    refuse(f"--device {shlex.quote(device)}", rule, fix)


def check_writable(path: Path | None, flag: str, *, is_folder: bool = False) -> None:
    """Raise unless the file or folder can be written; missing parent folders are fine."""
    if path is None:
        return
    what = f"{flag} {shlex.quote(str(path))}"
    if path.is_dir() and not is_folder:
        refuse(what, "it is a file to write, and this Is a directory", f"name a file in it, such as {path / 'x'}")
    above = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not above.is_dir() and (is_folder or above != path):
        rule = f"{above} is a file, and a folder is needed there"
        refuse(what, rule, f"name another {'folder' if is_folder else 'file'}")
    if not os.access(above, os.W_OK):
        refuse(what, f"{above} is not writable", "name another place, or change its permissions")


def check_readable(path: Path | None, flag: str) -> None:
    """Raise unless the file exists."""
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        refuse(f"{flag} {shlex.quote(str(path))}", f"it is a file to read, and {path} {what}", "check the path")


def worker_count(workers: int | None) -> int:
    """Number of compile processes: as given, else one per core available to this process."""
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MAX_WORKERS)
    if workers < 1:
        refuse(f"--workers {workers}", "at least one process compiles", "leave it out, or pass --workers 1 or more")
    return workers


def plain_console() -> Console:
    """Console that raises BrokenPipeError if the reader closes the pipe, as `head` does; `main` handles it."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with an error
            raise BrokenPipeError

    return Piped()


def wide_console(width: int = FILE_WIDTH) -> Console:
    """Console whose tables are not truncated in files and pipes."""
    console = plain_console()
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console


def table(title: str, headings: Iterable[str], right: Collection[str] = (), padding: int = 1) -> Table:
    """Table without lines between rows.  title: may be empty.  right: headings of the right-aligned columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, padding))
    for heading in headings:
        made.add_column(heading, no_wrap=True, justify="right" if heading in right else "left")
    return made


@contextmanager
def progress(console: Console, total: int, first: str) -> Generator[Callable[[str], None]]:
    """Progress bar: yields a function that advances it by one and sets the text.  first: text at the start."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def nothing_done(done: str, what: str, rule: str, fix: str) -> int:
    """Print why nothing was compiled or tuned; returns the exit status."""
    print(f"blockscale: nothing was {done}: {message(what, rule=rule, fix=fix)}", file=sys.stderr)
    return 1
