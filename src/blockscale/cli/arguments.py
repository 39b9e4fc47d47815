"""What commands share: how layers, tokens, formats, recipes and devices are written, where files may go, consoles.

Torch is imported late: neither `--help` nor a wrong option must wait for it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

Layer = tuple[int, int]  # (N, K) of a weight

# largest size of an operand: with two of them, bytes are still counted in 64 bits
MOST = 2**28
# each process that compiles holds a torch of its own, some 500 MB
MOST_WORKERS = 16
# of lists that go to a file or a pipe, which have no window to widen
FILE_WIDTH = 120


def layers(model: str | None, shapes: Sequence[str], command: str) -> list[Layer]:
    """(N, K) of every weight: of a model, or each as "N,K"."""
    from ..bench.shapes import MODELS, model_name

    if (model is None) == (not shapes):
        given = "neither a model nor --shapes" if model is None else f"model {model!r} and --shapes {_quoted(shapes)}"
        fix = "leave one of them out"
        if model is None:
            fix = f"blockscale {command} llama3-8b, or blockscale {command} --shapes 4096,14336"
        refuse(given, "one of them names the layers", fix)
    if model is not None:
        return [(n, k) for k, n in MODELS[model_name(model)]]
    return [_pair(shape, shapes) for shape in shapes]


def _pair(shape: str, shapes: Sequence[str]) -> Layer:
    """One weight. The error writes all of them as they should be, where that can be told."""
    found = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", shape)
    n, k = map(int, found.groups()) if found else (0, 0)
    if 0 < n <= MOST and 0 < k <= MOST:
        return n, k
    meant = [[size for size in re.findall(r"\d+", each) if 0 < int(size) <= MOST] for each in shapes]
    if "-" in shape or any(len(sizes) != 2 for sizes in meant):
        meant = [["4096", "14336"]]
    rule = "each weight is N,K, out and in features, two positive integers up to 2**28"
    refuse(f"--shapes {_quoted(shapes)}", rule, f"--shapes {_quoted([','.join(sizes) for sizes in meant])}")


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def numbers(values: Sequence[int], flag: str) -> list[int]:
    """Positive integers."""
    right = [value for value in values if 0 < value <= MOST]
    if len(right) < len(values):
        what, fix = (f"{flag} {','.join(map(str, each))}" for each in (values, right or [1, 16, 128]))
        refuse(what, "sizes are positive integers up to 2**28", fix)
    return list(values)


def at_least(least: int, value: int, flag: str, rule: str) -> None:
    """Raise for a count that is too small, or above `MOST`."""
    if value < least:
        refuse(f"{flag} {value}", rule, f"pass {flag} {least} or more")
    if value > MOST:
        refuse(f"{flag} {value}", "counts are integers up to 2**28", f"pass {flag} {max(1, least)}, or some more")


def format_pair(formats: str) -> tuple[str, str]:
    """Formats of activations and weights, written as a@b, if there is a product of them."""
    from ..errors import check_name
    from ..names import FORMAT_NAMES, check_pair

    names = [name.strip() for name in formats.split("@")]
    if len(names) != 2:
        rule, fix = "activations and weights have a format each", "--formats fp8_1x128@fp8_128x128"
        refuse(f"--formats {shlex.quote(formats)}", rule, fix)
    a, b = names
    for name in names:
        check_name(name, FORMAT_NAMES, "format")
    check_pair(a, b)
    return a, b


def recipes(names: Iterable[str]) -> list[str]:
    """Each once, if there are such recipes."""
    from ..names import check_recipe

    found = list(dict.fromkeys(names))
    for name in found:
        check_recipe(name)
    return found


def check_device(device: str | None, *, is_architecture: bool = False) -> None:
    """Raise for what is no name of a device; whether it is here torch knows.  is_architecture: sm_90 is one too."""
    known = r"(cpu|cuda)(:\d+)?" + (r"|sm_\d{2,3}" if is_architecture else "")
    if device is None or re.fullmatch(known, device):
        return
    rule, fix = "a device is cpu, cuda or cuda:0", "leave it out, or pass --device cpu"
    if is_architecture:
        rule = "a device is cpu, cuda, or the architecture of a GPU that need not be here"
        fix = "pass sm_90 for an H100 or H200, sm_100 for a B200"
    refuse(f"--device {shlex.quote(device)}", rule, fix)


def check_writable(path: Path | None, flag: str, *, is_folder: bool = False) -> None:
    """Raise unless a file, or a folder, of that name can be written; folders above it are made."""
    if path is None:
        return
    what = f"{flag} {shlex.quote(str(path))}"
    if path.is_dir() and not is_folder:
        refuse(what, "it is a file to write, and Is a directory", f"name a file in it, such as {path / 'x'}")
    above = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not above.is_dir() and (is_folder or above != path):
        rule = f"{above} is a file, and a folder is needed there"
        refuse(what, rule, f"name another {'folder' if is_folder else 'file'}")
    if not os.access(above, os.W_OK):
        refuse(what, f"{above} cannot be written to from here", "name another place, or change its permissions")


def check_readable(path: Path | None, flag: str) -> None:
    """Raise unless there is such a file."""
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        refuse(f"{flag} {shlex.quote(str(path))}", f"it is a file that is read, and {path} {what}", "check the path")


def check_picture(path: Path | None, flag: str) -> None:
    """Raise unless matplotlib can write such a file there, and is installed."""
    import importlib.util

    if path is None:
        return
    known = (".png", ".svg", ".pdf")
    if path.suffix not in known:
        is_ending = path.name in known  # a hidden file of that name
        has_stem = path.stem.strip(".") and path.stem != path.suffix
        named = path.with_name("x.png") if is_ending else path.with_suffix(".png") if has_stem else path / "x.png"
        fix = f"{flag} {shlex.quote(str(named))}"
        refuse(f"{flag} {shlex.quote(str(path))}", f"pictures end in {', '.join(known)}", fix)
    check_writable(path, flag)
    if importlib.util.find_spec("matplotlib") is None:
        refuse(f"{flag} without matplotlib", "it draws the picture", "pip install matplotlib")


def worker_count(workers: int | None) -> int:
    """Processes that compile: as many as asked for, else one for each core that this process may use."""
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MOST_WORKERS)
    if workers < 1:
        refuse(f"--workers {workers}", "at least one process compiles", "leave it out, or pass --workers 1 or more")
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
