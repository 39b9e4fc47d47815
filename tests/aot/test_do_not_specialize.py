"""Names in `do_not_specialize` lists are parameters of their kernels: Triton silently ignores unknown names."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton, which is not installed")

import triton
from triton.experimental import gluon
from triton.runtime.jit import JITFunction

from aot.compiled import CAN_COMPILE
from blockscale import casts, gemm, grouped
from blockscale.distributed import overlap

pytestmark = pytest.mark.skipif(
    not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET"
)
LISTS = ("do_not_specialize", "do_not_specialize_on_alignment")


def jit_functions() -> dict[str, JITFunction[Any]]:
    """Every Triton and Gluon JIT function of the package, by its module and name."""
    found: dict[str, JITFunction[Any]] = {}
    for package in (gemm, grouped, casts, overlap):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if isinstance(value, JITFunction) and value.fn.__module__ == info.name:
                    found[f"{info.name}.{name}"] = value
    return found


def unknown_names(function: JITFunction[Any]) -> set[str]:
    """Names in the lists of a JIT function that its signature does not have."""
    listed = {str(name) for attribute in LISTS for name in getattr(function, attribute)}
    return listed - {param.name for param in function.params}


def test_do_not_specialize_names_exist() -> None:
    functions = jit_functions()
    unknown = {name: names for name, function in functions.items() if (names := unknown_names(function))}
    assert not unknown
    listed = {name for name, function in functions.items() if any(getattr(function, each) for each in LISTS)}
    assert {name.split(".")[1] for name in listed} == {"gemm", "grouped", "casts", "distributed"}
    assert {
        "blockscale.gemm._hopper_kernel.scaled_mm_kernel",
        "blockscale.grouped._hopper_kernel.grouped_mm_kernel",
        "blockscale.casts._kernels.cast_kernel",
    } <= listed


@pytest.mark.parametrize("jit", [triton.jit, gluon.jit], ids=["triton", "gluon"])
@pytest.mark.parametrize("attribute", LISTS)
def test_an_unknown_name_is_found(jit: Any, attribute: str) -> None:
    """The control: Triton accepts a name that is not in the signature, and the check finds it."""
    kernel = jit(_kernel, **{attribute: ["M", "bogus"]})
    assert unknown_names(kernel) == {"bogus"}
    assert unknown_names(jit(_kernel, **{attribute: ["M", "K"]})) == set()


def _kernel(M, K):  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    pass
