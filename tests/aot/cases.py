"""Budgets for the machine code of the cast kernels, and the exceptions.

`make test` compiles `CASES`: a new kernel adds one line there, and the constants of its tile to `TILES`. A budget is a
little above what the compiler needs today, so that a change that costs a resident CTA or a tenth of the instructions
fails. `variants` is the long list of `make aot`, which checks fewer properties of more kernels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton

from aot.compiled import TILES, Report, compiled_for, report
from blockscale import (
    CastSpec,
    Stochastic,
    dequantize,
    permute_quantize_both,
    permute_quantize_columns,
    quantize,
    quantize_both,
    quantize_permute,
    rmsnorm_quantize,
    rmsnorm_quantize_both,
    rng_state,
    swiglu_backward_quantize_both,
    swiglu_quantize_both,
    use_backend,
)
from blockscale.casts.transpose import transpose_codes
from blockscale.formats import FORMATS

ARCHES = (80, 89, 90, 100, 120)  # Triton asks for the `a` variant from sm_90 on by itself
_KIB = 1024
SHARED = {80: 163 * _KIB, 89: 99 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB, 120: 99 * _KIB}
E4M3 = "cvt.rn.satfinite.e4m3x2"
E5M2 = "cvt.rn.satfinite.e5m2x2"
FROM_E4M3 = "cvt.rn.f16x2.e4m3x2"


# ---- exceptions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownSpill:
    """Variants (a pattern that matches names from their start) that may spill `spilled` bytes, and the reason.
    later: only with a triton newer than the one in constraints.txt."""

    pattern: str
    spilled: int
    reason: str
    arches: tuple[int, ...] = ARCHES
    later: bool = False


MAY_SPILL = (
    KnownSpill(r"swiglu backward \w+$", 72, "128 registers leave room for a second CTA of eight warps", arches=(90,)),
    KnownSpill(
        r"swiglu backward mxfp8_e4m3$", 184, "a third operand, which saves a second read of gate and up", arches=(90,)
    ),
    KnownSpill(
        r"(fp8_1x128 both (bf16|fp16)( plain)?|fp8_1x128 row bf16 ragged|mxfp6_e2m3 both fp16|swiglu mxfp8_e4m3)$",
        8,
        "two registers spilled, in exchange for twice the resident warps or a fifth CTA",
        arches=(80, 89, 100, 120),
    ),
    KnownSpill(r"mxfp6_e\dm\d both fp32$", 80, "codes by integer arithmetic for both operands", arches=(100, 120)),
    KnownSpill(r"\w+ row bf16 stochastic( given)?$", 8, "codes by integer arithmetic, and random words of four values"),
    KnownSpill(
        r"(mxfp8_e4m3|fp8)_128x128 both fp16$",
        64,
        "168 registers leave room for a third CTA",
        arches=(90, 100, 120),
    ),
    KnownSpill(
        r"\w+ both bf16.* (ragged|groups)$",
        168,
        "168 registers leave room for a third CTA: 9 to 20 % less time on an H200 than without a limit",
        arches=(90,),
    ),
    KnownSpill(
        r"swiglu backward \w+ groups$",
        432,
        "tiles at the ends of groups, with room for a second CTA of eight warps; others spill a quarter of it",
        arches=(90,),
    ),
    KnownSpill(r"permute and weigh \w+$", 8, "168 registers leave room for a third CTA", arches=(90,)),
    KnownSpill(r"\w+ both .*strided$", 220, "values loaded one by one: the slow path, for sources contiguous nowhere"),
    KnownSpill(r"\w+ col .*strided$", 120, "values loaded one by one: the slow path, for sources contiguous nowhere"),
    KnownSpill(
        r"mxfp6_e\dm\d (both .*|row .*)groups$", 80, "codes by integer arithmetic, ends of groups, column sums in fp64"
    ),
    KnownSpill(r"mxfp8_e4m3 col bf16 groups stochastic$", 56, "random words, and ends of groups", arches=(100,)),
    KnownSpill(r"\w+ col .*stochastic", 200, "random words, with the ptxas of triton 3.9", later=True),
    KnownSpill(r"\w+ row bf16 stochastic$", 350, "random words, with the ptxas of triton 3.9", (80,), later=True),
    KnownSpill(r"\w+ col fp32$", 140, "codes by integer arithmetic, with the ptxas of triton 3.9", (80,), later=True),
    KnownSpill(
        r"\w+ (row|col|both) bf16( plain)?( groups)?$",
        8,
        "two registers spilled, with the ptxas of triton 3.9",
        arches=(89, 120),
        later=True,
    ),
    KnownSpill(r"\w+ both fp16$", 40, "values twice in registers, with the ptxas of triton 3.9", later=True),
    KnownSpill(
        r"swiglu( backward)? \w+( groups)?$", 330, "limits of registers, with the ptxas of triton 3.9", later=True
    ),
    KnownSpill(r"mxfp6_e\dm\d both bf16$", 16, "codes by integer arithmetic, with the ptxas of triton 3.9", later=True),
    KnownSpill(r"fp8_1x128 both bf16 groups$", 340, "ends of groups, with the ptxas of triton 3.9", later=True),
    KnownSpill(
        r"(fp8_1x128|mxfp8_e4m3) both bf16$",
        100,
        "the limit of 168 registers was measured with triton 3.6; the ptxas of 3.9 needs a few more",
        later=True,
    ),
)
# whether this triton is newer than the one in constraints.txt
LATER = tuple(int(part) for part in triton.__version__.split(".")[:2]) > (3, 6)


def known_spill(name: str, arch: int) -> KnownSpill | None:
    """The exception with the widest bound that covers a variant, or None."""
    found = [known for known in MAY_SPILL if re.match(known.pattern, name) and arch in known.arches]
    return max((known for known in found if LATER or not known.later), key=lambda known: known.spilled, default=None)


# ---- rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Limits of a case.  registers: per thread.  per_value: instructions per value.  ptx: an instruction that must be
    present from sm_89 on and absent before.  wide: memory accesses have 128 bits."""

    registers: int = 255
    per_value: float = 0.0
    ptx: str = ""
    wide: bool = True


def problems(name: str, found: Report, budget: Budget) -> list[str]:
    """Violations by a kernel of a case, as sentences."""
    wrong: list[str] = []
    known = known_spill(name, found.arch)
    if found.spilled > (known.spilled if known else 0):
        wrong.append(f"spills {found.spilled} bytes, {known.spilled if known else 0} allowed")
    if found.shared > SHARED[found.arch]:
        wrong.append(f"takes {found.shared} bytes of shared memory, sm_{found.arch} has {SHARED[found.arch]}")
    if found.stray:
        wrong.append(f"takes the stack pointer for a value: {found.stray[0]}")
    if found.kernel not in TILES:
        wrong.append("has no entry in TILES")
    if not found.values:  # a small kernel launched beside the main one
        return wrong
    if budget.wide:
        # the 30 % are scales, group ends and the tensor's maximum
        for what, widths in (("loads", found.loads), ("stores", found.stores)):
            if wide_share(widths) < 0.7:
                wrong.append(f"{what} {wide_share(widths):.0%} of its bytes by 128 bits or more: {widths}")
    if found.kernel in ("amax_kernel", "_rstd_kernel"):
        return wrong
    if found.registers > budget.registers:
        wrong.append(f"takes {found.registers} registers, {budget.registers} budgeted")
    if budget.per_value and found.per_value > budget.per_value:
        wrong.append(f"takes {found.per_value:.1f} instructions for a value, {budget.per_value} budgeted")
    if budget.ptx and (budget.ptx in found.ptx) != (found.arch >= 89):
        wrong.append(f"{'lacks' if found.arch >= 89 else 'has'} {budget.ptx}")
    return wrong


def wide_share(widths: dict[int, int]) -> float:
    """Fraction of the bytes moved by instructions of 128 bits or more; 1 if none are moved."""
    total = sum(bits * count for bits, count in widths.items())
    return sum(bits * count for bits, count in widths.items() if bits >= 128) / total if total else 1.0


def reports(call: Callable[[], object], arch: int) -> list[Report]:
    """Reports of the distinct kernels that a call launches on sm_<arch>."""
    with compiled_for(arch) as kernels:
        call()
    return [report(kernel) for kernel in {kernel.hash: kernel for kernel in kernels}.values()]


# ---- casts -----------------------------------------------------------------------------------------------------------

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Cast:
    """One cast.  source: whole tiles, "ragged" sizes, or "strided" elements.  given: NVFP4's amax is an argument, so
    that no kernel computes it."""

    format: str
    side: str
    dtype: str = "bf16"
    rule: str = ""
    layout: str = ""
    source: str = "whole"
    groups: bool = False
    stochastic: bool = False
    hadamard: bool = False
    given: bool = False

    @property
    def name(self) -> str:
        flags = [name for name in ("groups", "stochastic", "hadamard", "given") if getattr(self, name)]
        source = [] if self.source == "whole" else [self.source]
        words = [self.format, self.side, self.dtype, self.rule, self.layout, *source, *flags]
        return " ".join(word for word in words if word)

    def __call__(self) -> object:
        rows, columns = (8192, 4096) if self.source == "whole" else (8000, 4004)
        x = torch.empty(rows, columns, dtype=_DTYPES[self.dtype])  # never read
        if self.source == "strided":
            x = torch.empty(rows, 2 * columns, dtype=_DTYPES[self.dtype])[:, ::2]
        spec = CastSpec(
            self.format,
            self.rule or None,
            Stochastic(rng_state(0), "layer") if self.stochastic else "nearest",
            self.hadamard,
            "dgrad_dy" if self.stochastic else None,
            amax=torch.ones(()) if self.given else "tensor",
            scale_layout=self.layout or None,
        )
        offs = torch.arange(1, 9, dtype=torch.int32) * (rows // 8) if self.groups else None
        if self.side == "both":
            return quantize_both(x, spec, spec, offs=offs, colsum=self.groups)
        return quantize(x, spec, axis=-1 if self.side == "row" else -2, offs=offs)


def variants(*, product: bool = False) -> Iterator[Cast]:
    """Every format and side with each option alone and the pairs of training; with `product`, all combinations."""
    for form, side in itertools.product(FORMATS.values(), ("row", "col", "both")):
        base = Cast(form.name, side)
        rotates, groups = (form.hadamard > 0 and not form.is_2d), not form.is_2d
        if product:
            options = itertools.product(
                _DTYPES,
                ("", *form.rules[1:]),
                ("", *form.layouts[1:]),
                ("whole", "ragged", "strided"),
                (False, True)[: 1 + groups],
                (False, True),
                (False, True)[: 1 + rotates],
            )
            yield from (Cast(form.name, side, *chosen) for chosen in options)
            continue
        yield base
        yield from (replace(base, dtype=dtype) for dtype in ("fp16", "fp32"))
        yield from (replace(base, rule=rule) for rule in form.rules if rule != form.default_rule())
        yield from (replace(base, layout=layout) for layout in form.layouts[1:])
        yield from (replace(base, source=source) for source in ("ragged", "strided"))
        yield replace(base, stochastic=True)
        if groups:
            yield replace(base, groups=True)
            yield replace(base, groups=True, layout=form.layouts[1])
            yield replace(base, groups=True, stochastic=True)
        if rotates:
            yield replace(base, hadamard=True)
            yield replace(base, hadamard=True, stochastic=True)


# ---- what `make test` compiles ---------------------------------------------------------------------------------------


def decode(name: str, axis: int) -> Callable[[], object]:
    """Decode of a whole tensor to bf16."""
    with use_backend("reference"):
        q = quantize(torch.zeros(2048, 1024, dtype=torch.bfloat16), name, axis=axis)
    return lambda: dequantize(q)


def transposed(bits: int) -> Callable[[], object]:
    """Transpose of 2048 x 1024 codes."""
    codes = torch.empty(2048, 1024 * bits // 8, dtype=torch.uint8)
    return lambda: transpose_codes(codes, 1024, bits)


def swiglu(name: str, *, backward: bool = False, hidden: int = 4096, groups: int = 0) -> Callable[[], object]:
    """SwiGLU or its backward, to both operands; the backward also casts the column operand of SwiGLU's output."""
    offs = torch.arange(1, groups + 1, dtype=torch.int32) * 100 if groups else None
    gate_up, grad = (torch.empty(8192, columns, dtype=torch.bfloat16) for columns in (2 * hidden, hidden))
    if backward:
        return lambda: swiglu_backward_quantize_both(grad, gate_up, name, name, hidden=name, offs=offs)
    return lambda: swiglu_quantize_both(gate_up, name, name, offs=offs)


def norm(name: str, rows: int = 8192, columns: int = 4096) -> Callable[[], object]:
    """RMSNorm to the row operand."""
    x, weight = torch.empty(rows, columns, dtype=torch.bfloat16), torch.empty(columns, dtype=torch.bfloat16)
    return lambda: rmsnorm_quantize(x, weight, name)


def norm_both(name: str) -> Callable[[], object]:
    """RMSNorm to both operands."""
    x, weight = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    return lambda: rmsnorm_quantize_both(x, weight, name, name)


def permute(name: str) -> Callable[[], object]:
    """Tokens cast once and copied to eight experts each."""
    x, indices = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.zeros(65536, dtype=torch.int32)
    return lambda: quantize_permute(x, indices, name)


def spread(name: str, *, columns: bool = False) -> Callable[[], object]:
    """Weighted rows of tokens to both operands of experts, or rows as they are to the column operand."""
    x, indices = torch.empty(8192, 2048, dtype=torch.bfloat16), torch.zeros(49152, dtype=torch.int32)
    offs, weights = torch.arange(1, 65, dtype=torch.int32) * 768, torch.ones(49152)
    if columns:
        return lambda: permute_quantize_columns(x, indices, offs, name)
    return lambda: permute_quantize_both(x, indices, offs, name, name, gate_weights=weights)


@dataclass(frozen=True)
class Case:
    """A call of the library, the architectures to compile it for, and its budget."""

    name: str
    call: Callable[[], object]
    budget: Budget
    arches: tuple[int, ...]


def cast(what: Cast, registers: int, per_value: float, ptx: str = "", *, everywhere: bool = False) -> Case:
    """Entry of `CASES`: sm_90, or every architecture."""
    return Case(what.name, what, Budget(registers, per_value, ptx), ARCHES if everywhere else (90,))


# a thread has all rows of a rotation, so its accesses are narrower
_ROTATED = Cast("nvfp4", "col", hadamard=True, given=True)
_ROTATED_STOCHASTIC = replace(_ROTATED, stochastic=True)

# Registers: 168 leave room for three CTAs of four warps, 128 for four, 64 for eight. At most 60 cases: one of each
# kernel and family for every architecture, and the common casts on sm_90; `make aot` has the rest.
CASES = (
    cast(Cast("fp8_1x128", "row"), 64, 8, E4M3),
    cast(Cast("fp8_1x128", "col"), 112, 7.6, E4M3),
    cast(Cast("fp8_1x128", "both"), 168, 18, E4M3, everywhere=True),
    cast(Cast("fp8_128x128", "row"), 104, 5.9, E4M3),
    cast(Cast("fp8_128x128", "both"), 168, 11.6, E4M3),
    cast(Cast("mxfp8_e4m3", "row"), 64, 7, E4M3),
    cast(Cast("mxfp8_e4m3", "col"), 88, 7, E4M3),
    cast(Cast("mxfp8_e4m3", "both"), 168, 17, E4M3, everywhere=True),
    cast(Cast("mxfp8_e4m3_128x128", "row"), 104, 5.3, E4M3),
    cast(Cast("mxfp8_e4m3_128x128", "both", layout="blocked"), 168, 10.9, E4M3),
    cast(Cast("mxfp8_e5m2", "both"), 168, 12.2, E5M2),
    cast(Cast("mxfp6_e2m3", "row"), 72, 23),
    cast(Cast("mxfp4", "row"), 64, 10.2),
    cast(Cast("mxfp4", "col"), 104, 10.3),
    cast(Cast("mxfp4", "both"), 104, 21),
    cast(Cast("nvfp4", "row"), 64, 23.5, E4M3, everywhere=True),
    cast(Cast("nvfp4", "col", given=True), 104, 16.3, E4M3),
    cast(Cast("nvfp4", "both", given=True), 128, 32.5, E4M3),
    cast(Cast("nvfp4_16x16", "row", given=True), 104, 14.3, E4M3),
    cast(Cast("nvfp4_16x16", "both", given=True), 128, 27.5, E4M3),
    cast(Cast("fp8_1x128", "both", groups=True), 255, 46, E4M3),  # two code paths: tiles within one group, and others
    cast(Cast("mxfp8_e4m3", "both", layout="blocked"), 168, 12.8, E4M3),
    cast(Cast("nvfp4", "row", stochastic=True, given=True), 72, 52, E4M3),
    Case(_ROTATED.name, _ROTATED, Budget(96, 39, E4M3, wide=False), (90,)),
    Case(_ROTATED_STOCHASTIC.name, _ROTATED_STOCHASTIC, Budget(168, 61, E4M3, wide=False), (90,)),
    Case("swiglu fp8_1x128", swiglu("fp8_1x128"), Budget(128, 42, E4M3), (90,)),
    Case("swiglu mxfp8_e4m3", swiglu("mxfp8_e4m3"), Budget(104, 42, E4M3), (90, 100)),
    Case("swiglu backward fp8_1x128", swiglu("fp8_1x128", backward=True), Budget(128, 76, E4M3), (90,)),
    Case("swiglu backward mxfp8_e4m3", swiglu("mxfp8_e4m3", backward=True), Budget(255, 60, E4M3), (90,)),
    Case(
        "swiglu backward of no whole tiles fp8_1x128",
        swiglu("fp8_1x128", backward=True, hidden=2880),
        Budget(168, 48, E4M3),
        (90,),
    ),
    Case(
        "swiglu backward fp8_1x128 groups",
        swiglu("fp8_1x128", backward=True, groups=64),
        Budget(128, 163, E4M3),
        (90,),
    ),
    Case("rmsnorm fp8_1x128", norm("fp8_1x128"), Budget(168, 0, E4M3, wide=False), ARCHES),
    # ptxas 12.8 miscompiled this one
    Case("rmsnorm fp8_128x128", norm("fp8_128x128", 200, 264), Budget(wide=False), (90,)),
    Case("rmsnorm both fp8_1x128", norm_both("fp8_1x128"), Budget(255, 0, E4M3, wide=False), (90,)),
    Case("permute mxfp8_e4m3", permute("mxfp8_e4m3"), Budget(128), ARCHES),
    Case("permute and weigh fp8_1x128", spread("fp8_1x128"), Budget(168, 41, E4M3), (90,)),
    Case("permute columns fp8_1x128", spread("fp8_1x128", columns=True), Budget(120, 17.5, E4M3), (90,)),
    Case("decode fp8_1x128", decode("fp8_1x128", -1), Budget(64, 12, FROM_E4M3, wide=False), (90,)),
    Case("decode mxfp8_e4m3 col", decode("mxfp8_e4m3", -2), Budget(72, 12, FROM_E4M3, wide=False), ARCHES),
    Case("transpose codes", transposed(8), Budget(64, 8), (90,)),
    Case("transpose codes of 4 bits", transposed(4), Budget(64, 8), (90,)),
    Case("decode nvfp4", decode("nvfp4", -1), Budget(64, 14, wide=False), (90,)),
)
