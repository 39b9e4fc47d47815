"""One format's Triton casts in the interpreter against the reference: a program, because the variable must come first.

    TRITON_INTERPRET=1 python tests/casts/interpreted.py mxfp4

Prints `cases values mismatches` and the first mismatches. Code rows and scale buffers are compared with their pads. No
rounding of the interpreter's own is involved: kernels make codes by integer arithmetic there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

assert os.environ.get("TRITON_INTERPRET") == "1"
os.environ["BLOCKSCALE_POISON"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from blockscale import use_backend  # noqa: E402
from blockscale.casts import _triton, ops  # noqa: E402
from blockscale.formats import FORMATS, CastPlan, CastSpec, Format  # noqa: E402


def sources() -> Iterator[tuple[str, Tensor]]:
    wide = torch.randn(70, 300) * torch.exp2(torch.randint(-30, 30, (70, 1)))
    special = torch.randn(130, 260)
    special[3, 5], special[100, 200], special[101, 40] = torch.nan, torch.inf, -torch.inf
    special[40], special[41], special[50], special[60] = 0.0, -0.0, special[50] * 1e-42, 3e38
    yield "special fp32", special
    yield "odd bf16", torch.randn(33, 95).bfloat16()
    yield "two matrices fp16", torch.randn(2, 40, 150).half()
    yield "wide fp32", wide
    yield "transposed bf16", torch.randn(95, 140).bfloat16().t()
    yield "one value", torch.randn(1, 1)
    yield "strided", torch.randn(40, 400)[::2, ::3]


def specs(spec: Format) -> Iterator[CastSpec]:
    for rule in spec.rules:
        for layout in spec.layouts:
            yield CastSpec(spec.name, rule, scale_layout=layout)
    if spec.family == "mx":
        yield CastSpec(spec.name, satfinite=True)
    if spec.family == "nvfp4":
        yield CastSpec(spec.name, amax=torch.tensor(-2.5))


def run(x: Tensor, plan: CastPlan, axis: int, amax: Tensor | None, backend: str) -> list[Tensor]:
    with use_backend(cast=backend):
        buffers = ops.quantize(x, plan.text(), axis, None, amax, None)
    return [buffer.reshape(-1).view(torch.uint8) for buffer in buffers]


def main(name: str) -> int:
    assert _triton.INTERPRETED
    torch.manual_seed(0)
    cases = values = 0
    wrong: list[str] = []
    for number, spec in enumerate(specs(FORMATS[name])):
        plan = spec.plan()
        # every source with the defaults, the telling ones with the other rules and layouts: the interpreter is slow
        for title, x in list(sources())[: 7 if number == 0 else 3]:
            for axis in (-1, -2):
                if plan.layout == "blocked" and FORMATS[name].is_2d:
                    continue  # refused, see the kernel's reasons
                got = run(x, plan, axis, spec.amax_tensor, "triton")
                want = run(x, plan, axis, spec.amax_tensor, "reference")
                cases, values = cases + 1, values + x.numel()
                if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
                    wrong.append(f"{plan.text()} axis={axis} {title}")
    print(cases, values, len(wrong))
    print("\n".join(wrong[:10]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
