"""The `blockscale` command: dispatches to a subcommand, parses its arguments with tyro, prints errors as messages."""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "doctor": "versions, device, which backend serves what and why, and a self-check",
    "explain": "every kernel for one call, and why it is taken or not",
    "formats": "the ten formats: grids, blocks, scale rules; --errors measures them",
    "bench": "check and time casts, GEMMs and layers",
    "tune": "autotune the GEMMs of a model on this GPU; --compile-only precompiles its kernels",
    "train": "train a model with a recipe",
    "compare": "train with several recipes in paired runs: convergence and speed",
    "speed": "time training steps with several recipes: tokens/s, memory, breakdown of the step time",
    "advise": "which layers to keep in bf16 for a loss budget, and the cost in speed",
    "roofline": "upper bound on the speedup of a model's layers, and from how many tokens on",
    "inspect": "what a checkpoint holds: layout, and format, shape and bytes of its weights",
    "convert-checkpoint": "a checkpoint in another layout or format, exactly unless rounding is allowed",
    "export": "weights of a training run as a checkpoint, with the bytes of training",
    "generate": "text from a checkpoint",
}
USAGE = "usage: blockscale COMMAND [options]      (blockscale COMMAND --help for its options)\n"
MISSING = (
    "the command line needs {}. Fix: pip install rich tyro "
    "(the library itself works without: python -c 'import blockscale; print(blockscale.doctor())')"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return contextvars.copy_context().run(_main, words)


def _main(words: list[str]) -> int:
    if words == ["--version"]:
        from .. import __version__

        print(__version__)
        return 0
    if words in ([], ["-h"], ["--help"]):
        print(USAGE, *(f"  {name:<18} {text}" for name, text in COMMANDS.items()), sep="\n")
        return 0
    from ..errors import BlockscaleError, check_name, write_options
    from .options import as_flag

    write_options(as_flag)
    try:
        check_name(words[0], COMMANDS, "command")
        missing = [name for name in ("rich", "tyro") if importlib.util.find_spec(name) is None]
        if missing:
            return _fail(MISSING.format(" and ".join(missing)))
        return _run(words[0], words[1:])
    except BlockscaleError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does; the last flush must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a file that is not there, or a folder that cannot be written to
        return _fail(f"{error.filename or 'a file'}: {error.strerror or error}")


def _run(command: str, arguments: list[str]) -> int:
    module = importlib.import_module(f".{command.replace('-', '_')}", __package__)
    if hasattr(module, "main"):  # the options depend on the first word
        return module.main(arguments)
    from .options import parse_words

    return parse_words(module.run, command, arguments)


def _fail(message: str, status: int = 2) -> int:
    print(f"blockscale: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
