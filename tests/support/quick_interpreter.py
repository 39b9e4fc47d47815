"""Runs a program in Triton's interpreter at a third of its cost: `python quick_interpreter.py PROGRAM ARGUMENTS`.

Without a program it is a server: it imports torch and Triton once, and forks for each line of its input.

The interpreter exchanges the functions of triton.language for its own whenever a kernel calls a function; once for each
launch and module is enough, since nothing puts them back in between. It computes integer sums again in int64 for an
assertion that only a debug run makes. And it builds types and shapes of every value anew; here they are kept.
Values are untouched. Each patch is left out where this Triton is built in another way.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


def exchange_once_a_launch() -> None:
    """Where this Triton's interpreter is built as described, else nothing."""
    from triton.runtime import interpreter

    exchange = getattr(interpreter, "_patch_lang", None)
    executor = getattr(interpreter, "GridExecutor", None)
    if exchange is None or executor is None:
        return
    start, done = executor.__call__, set[int]()

    def exchange_once(fn: Any) -> Any:
        if id(fn.__globals__) in done:
            return None  # functions that a kernel calls return nothing to restore
        done.add(id(fn.__globals__))
        return exchange(fn)

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        done.clear()
        return start(self, *args, **named)

    interpreter._patch_lang, executor.__call__ = exchange_once, launch


def leave_out_overflow_checks() -> None:
    """Integer sums once. Their check ends in `device_assert`, which does nothing unless the options say debug."""
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if builder is not None and dataclasses.is_dataclass(options) and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _takes(function: Any, *names: str) -> bool:
    return tuple(inspect.signature(function).parameters) == names


def keep_shapes_and_types() -> None:
    """Shapes of blocks and tensors, and NumPy's dtypes of Triton's, are made once for each shape and dtype."""
    import triton.language.core as tl
    from triton.runtime import interpreter

    make_block, make_tensor, blocks, shapes = tl.block_type.__init__, tl.tensor.__init__, {}, {}
    plain = tl.tensor(None, tl.block_type(tl.int32, [2]))
    known = set(vars(plain)) == {"handle", "shape", "numel", "type", "dtype"}
    known &= set(vars(plain.type)) == {"element_ty", "shape", "numel", "name"}
    if known and _takes(make_block, "self", "element_ty", "shape") and _takes(make_tensor, "self", "handle", "type"):

        def block_type(self: Any, element_ty: Any, shape: Any) -> None:
            key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
            if key not in blocks:
                make_block(self, element_ty, shape)
                blocks[key] = self.shape, self.numel, str(self.shape)
            self.element_ty = element_ty
            self.shape, self.numel, text = blocks[key]
            self.name = f"<{text}, {element_ty}>"

        def tensor(self: Any, handle: Any, type: Any) -> None:
            key = tuple(type.shape) if type.is_block() else ()
            if key not in shapes:
                make_tensor(self, handle, type)
                shapes[key] = self.shape, self.numel
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[key]

        tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
        again = tl.tensor(None, tl.block_type(tl.int32, [2]))
        assert (str(again), str(again.type), again.numel.value) == (str(plain), str(plain.type), plain.numel.value)

    to_numpy = getattr(interpreter, "_get_np_dtype", None)
    if to_numpy is not None and _takes(to_numpy, "tt_dtype"):
        dtypes: dict[Any, Any] = {}

        def np_dtype(tt_dtype: Any) -> Any:
            key = tt_dtype.scalar.name
            if key not in dtypes:
                dtypes[key] = to_numpy(tt_dtype)
            return dtypes[key]

        interpreter._get_np_dtype = np_dtype


def run(program: str, *arguments: str) -> None:
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def serve() -> None:
    """A line is a file for what is printed, seconds that it may take, a program and its arguments, in JSON; the answer
    is the exit status."""
    import blockscale  # noqa: F401

    for line in sys.stdin:
        output, seconds, *command = json.loads(line)
        child = os.fork()
        if not child:
            status = 1
            signal.alarm(seconds)
            printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            try:
                run(*command)
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    exchange_once_a_launch()
    leave_out_overflow_checks()
    keep_shapes_and_types()
    if len(sys.argv) > 1:
        run(*sys.argv[1:])
    else:
        serve()
