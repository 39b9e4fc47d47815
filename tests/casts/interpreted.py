"""One format's Triton casts in the interpreter against the reference. A script: TRITON_INTERPRET must be set first.

    TRITON_INTERPRET=1 python tests/casts/interpreted.py mxfp4

Prints `cases values mismatches` and the first mismatches. Code rows and scale buffers are compared with their pads. The
interpreter's own rounding is not involved: kernels make codes by integer arithmetic there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

assert os.environ.get("TRITON_INTERPRET") == "1"
os.environ["BLOCKSCALE_POISON"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from blockscale import rng_state, use_backend  # noqa: E402
from blockscale.casts import _triton  # noqa: E402
from blockscale.formats import FORMATS, CastSpec, Format, Stochastic  # noqa: E402
from blockscale.formats.cast_spec import as_cast  # noqa: E402
from blockscale.library import OPERATORS, PARAMETERS  # noqa: E402

Case = tuple[str, list[Tensor], list[Tensor]]


def sources() -> Iterator[tuple[str, Tensor]]:
    """Fewest tiles that still have neighbours and tails in both directions. The interpreter is slow, and a program
    costs the same whatever its tile holds."""
    special = torch.randn(40, 150)
    special[3, 5], special[30, 140], special[31, 40] = torch.nan, torch.inf, -torch.inf
    special[10], special[11], special[12], special[13] = 0.0, -0.0, special[12] * 1e-42, 3e38
    yield "special fp32", special
    yield "odd bf16", torch.randn(33, 95).bfloat16()
    yield "two matrices fp16", torch.randn(2, 20, 70).half()
    yield "wide fp32", torch.randn(35, 140) * torch.exp2(torch.randint(-30, 30, (35, 1)))
    yield "transposed bf16", torch.randn(95, 140).bfloat16().t()
    yield "one value", torch.randn(1, 1)
    yield "strided", torch.randn(40, 400)[::2, ::3]
    yield "full tiles bf16", torch.randn(256, 128).bfloat16()


def specs(spec: Format) -> Iterator[CastSpec]:
    for rule in spec.rules:
        for layout in spec.layouts:
            yield CastSpec(spec.name, rule, scale_layout=layout)
    if spec.family == "mx":
        yield CastSpec(spec.name, satfinite=True)
    if spec.family == "nvfp4":
        for amax in (2.5, -2.5, -1e-42, -0.0):  # a negative amax counts as NaN, -0.0 as zero
            yield CastSpec(spec.name, amax=torch.tensor(amax))


def stochastic_and_rotated(spec: Format) -> Iterator[CastSpec]:
    """Stochastic rounding, unsharded and as a shard, and rotation for formats that have it."""
    state = rng_state(-7, tick=3)
    yield CastSpec(spec.name, rounding=Stochastic(state, "layer"), role="wgrad_x")
    yield CastSpec(spec.name, rounding=Stochastic(state, "layer", origin=(5, 9, 1001)), role="dgrad_dy")
    if spec.hadamard and not spec.is_2d:
        yield CastSpec(spec.name, hadamard=True)
        yield CastSpec(spec.name, hadamard=(1 << spec.hadamard) - 3, rounding=Stochastic(state, "l"), role="fprop_x")


def compared(what: str, name: str, *args) -> Case:
    """The whole buffers that an operator returns, padding included."""
    results: list[list[Tensor]] = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            made = OPERATORS[name](*PARAMETERS[name].flatten(*args))
            results.append([buffer.reshape(-1).view(torch.uint8) for buffer in made])
    return what, results[0], results[1]


def single(x: Tensor, spec: CastSpec, axis: int, title: str, offs: Tensor | None = None) -> Case:
    return compared(f"{spec.plan().text()} axis={axis} {title}", "quantize", x, as_cast(spec), axis, offs)


def both(x: Tensor, row: CastSpec, col: CastSpec, title: str, offs: Tensor | None = None, colsum: bool = False) -> Case:
    texts = row.plan().text(), col.plan().text()
    return compared(f"both {texts} {title}", "quantize_both", x, as_cast(row), as_cast(col), offs, colsum)


def cases(name: str) -> Iterator[tuple[int, Case]]:
    form = FORMATS[name]
    every = list(sources())
    for number, spec in enumerate(specs(form)):
        # every source with the defaults, the first ones with the other rules and layouts: the interpreter is slow
        # (the first source has a NaN amax, which poisons all of NVFP4)
        for title, x in every if number == 0 else every[: 2 if form.family == "nvfp4" else 1]:
            for axis in (-1, -2):
                yield x.numel(), single(x, spec, axis, title)
    for spec in stochastic_and_rotated(form):
        for title, x in every[1:3]:
            for axis in (-1, -2):
                yield x.numel(), single(x, spec, axis, title)
    plain, other = CastSpec(name), CastSpec("mxfp8_e4m3" if form.family == "mx" else name)
    # how a source is read does not depend on the format, nor groups on the element
    fewer = ("wide fp32", "strided", "one value") if form.is_2d else ()
    for title, x in every:
        if title not in fewer:
            yield 2 * x.numel(), both(x, plain, other, title, colsum=title == "odd bf16")
    if not form.is_2d and name not in ("mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2"):
        yield from grouped(form)


def grouped(form: Format) -> Iterator[tuple[int, Case]]:
    """Groups, with empty ones and rows outside all groups; one group has more rows than a block."""
    rows = max(form.block) + 22
    x = torch.randn(rows, 40).bfloat16()
    x[rows - 19] *= 1000
    # NVFP4's amax is supplied in most cases: computing it is a second pass over a hundred small tiles
    given = {"amax": torch.tensor(700.0)} if form.family == "nvfp4" else {}
    plain, state = CastSpec(form.name, **given), Stochastic(rng_state(2), "experts", first_group=9)
    stochastic = CastSpec(form.name, rounding=state, role="wgrad_dy", scale_layout=form.layouts[1], **given)
    ends = torch.tensor([3, 3, rows - 10], dtype=torch.int32)
    options = [plain, stochastic, *(replace(spec, **given) for spec in list(stochastic_and_rotated(form))[2:])]
    if form.family == "nvfp4":
        options += [CastSpec(form.name), CastSpec(form.name, amax="group"), CastSpec(form.name, amax=torch.rand(3))]
    for spec in options:
        yield 2 * x.numel(), both(x, spec, spec, "groups", ends, colsum=True)
    for axis in (-1, -2):
        yield x.numel(), single(x, options[-1], axis, "groups", ends)
    if form.family == "nvfp4":  # one amax for one operand, several for the other
        several = CastSpec(form.name, amax=torch.tensor([0.5, 0.25, -0.75]))
        yield 2 * x.numel(), both(x, several, plain, "groups, mixed", ends)
        yield 2 * x.numel(), both(x, plain, CastSpec(form.name, amax="group"), "no groups", ends[:0], colsum=True)
    for few in ([rows], [0, 0], [max(form.block), rows], []):
        yield 2 * x.numel(), both(x, plain, plain, f"groups {few}", torch.tensor(few, dtype=torch.int32))


def count_mismatches(names: list[str], cases: Callable[[str], Iterator[tuple[int, Case]]]) -> int:
    """Prints cases, values and mismatches of all names; 1 if there are any."""
    count = values = 0
    wrong: list[str] = []
    for name in names:
        torch.manual_seed(0)
        for size, (what, got, want) in cases(name):
            count, values = count + 1, values + size
            if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                off = [int((a != b).sum()) for a, b in zip(got, want, strict=True)]
                wrong.append(f"{name} {what} bytes off {off}")
    print(count, values, len(wrong))
    print("\n".join(wrong[:10]))
    return 1 if wrong else 0


if __name__ == "__main__":
    assert _triton.INTERPRETED
    raise SystemExit(count_mismatches(sys.argv[1:], cases))
