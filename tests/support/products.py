"""What tests of products and of the kernel table share. Needs torch only: it runs where the oracles are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from blockscale import diagnostics as diagnostics  # imported so that every row is in the table
from blockscale import library, quantize, registry
from blockscale.formats import FORMATS, BlockScaled
from blockscale.formats.spec import LEGAL_PAIRS
from blockscale.hardware import Capability
from blockscale.launch import record
from blockscale.registry import Kernel, Request, use_backend

Pair = tuple[str, str]
PAIRS: list[Pair] = sorted(LEGAL_PAIRS)
# one of each kind, for what does not depend on the element: every width of code, both block shapes on either side
FEW: list[Pair] = [
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp8_e4m3", "mxfp8_e4m3_128x128"),
    ("mxfp8_e4m3_128x128", "mxfp8_e5m2"),
    ("mxfp6_e3m2", "mxfp4"),
    ("mxfp4", "mxfp8_e5m2"),
    ("nvfp4", "nvfp4"),
    ("nvfp4_16x16", "nvfp4"),
    ("fp8_1x128", "fp8_1x128"),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_128x128", "fp8_1x128"),
]
ONE_D = [name for name, spec in FORMATS.items() if not spec.is_2d]


def partner(name: str) -> str:
    """A second operand for a first operand in this format."""
    return "fp8_1x128" if name == "fp8_128x128" else name


def cases(op: str, pairs: Iterable[Pair] = PAIRS) -> list:
    """(row, device, pair) for every registered row of an operation and every device and pair that it claims."""
    pairs = list(pairs)
    found = []
    for row in registry.kernels(op):
        for device in ("cpu", "cuda"):
            if row.devices and device not in row.devices:
                continue
            marks = [pytest.mark.gpu] if device == "cuda" else []
            for pair in pairs:
                if not row.formats or pair in row.formats:
                    name = f"{device}-{row.backend}.{row.launch.__name__}-{pair[0]}@{pair[1]}"
                    found.append(pytest.param(row, torch.device(device), pair, id=name, marks=marks))
    return found


@contextmanager
def only(row: Kernel) -> Iterator[None]:
    """Inside, this row serves its operation or the call raises with its reason; no other row steps in."""
    table = registry._REGISTRY[row.op]
    kept = list(table)
    table[:] = [row]
    registry._select.cache_clear()
    try:
        with use_backend(**{row.op: row.backend}):
            yield
    finally:
        table[:] = kept
        registry._select.cache_clear()


def accepts(row: Kernel, request: Request) -> bool:
    """Whether a row takes a request; use `skip_refused` when it is the only one of a test."""
    return row.refusal(request) is None


def skip_refused(row: Kernel, request: Request) -> None:
    """Skip the test, with the row's own reason, where the row does not take the request."""
    reason = row.refusal(request)
    if reason is not None:
        pytest.skip(f"{row.backend} ({row.summary}) {reason}")


def is_vendor_fp8(row: Kernel, pair: Pair) -> bool:
    """Whether sm_90's FP8 units compute the product: they keep fewer bits while they accumulate."""
    return row.backend == "hopper" or (FORMATS[pair[0]].family == "fp8" and row.backend != "reference")


def gate_a(row: Kernel, pair: Pair) -> float:
    """Gate A of docs/numerics.md in dB, Gaussian operands, fp32 output."""
    return 77.0 if is_vendor_fp8(row, pair) else 80.0


def gaussian(*shape: int, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """The same bf16 values on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def offsets(sizes: Iterable[int], device: torch.device | str = "cpu") -> Tensor:
    """Inclusive ends of groups of these sizes."""
    return torch.tensor(list(sizes), dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, whatever its dtype, rank and strides."""
    # bytes first: torch cannot copy strided FP4
    codes = tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()
    return codes.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).cpu()


def assert_same_bits(got: object, want: object) -> None:
    """Every tensor in two results (tensors, operands, tuples of them) agrees in dtype, shape and every byte."""
    got_leaves, got_tree = pytree.tree_flatten(got)
    want_leaves, want_tree = pytree.tree_flatten(want)
    assert got_tree == want_tree
    for x, y in zip(got_leaves, want_leaves, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device)
        assert torch.equal(raw(x), raw(y))


def step(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` around each value."""
    smallest, digits = {torch.bfloat16: (-133, 8), torch.float16: (-24, 11)}[dtype]
    return torch.exp2((torch.frexp(value).exponent - digits).clamp(min=smallest).double())


# The contract's gate for FP8 units with Gaussian operands and an fp32 result; 16-bit results add their rounding.
HOPPER_DB = {torch.float32: 77.0, torch.float16: 60.0, torch.bfloat16: 50.0}


def fp8_operands(m: int, n: int, k: int, weight: str) -> tuple[BlockScaled, BlockScaled]:
    """Gaussian tokens and weights on a GPU."""
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    return quantize(x, "fp8_1x128"), quantize(w, weight)


def hopper_gate(dtype: torch.dtype, m: int, n: int) -> float:
    """Of so few values, chance may pick bad ones."""
    return HOPPER_DB[dtype] - (4 if m * n < 10_000 else 0)


# (M, N, K) that no multiple of 16 divides, around blocks and at their least; few values only where K is short
ODD_SIZES = [(517, 2111, 4095), (3, 2111, 129), (300, 17, 127), (300, 15, 17), (517, 7, 15), (700, 1, 1)]


def with_poisoned_pad(q: BlockScaled) -> BlockScaled:
    """The same operand with codes of NaN in the pads of its rows, which no product may read."""
    rows, step = q.data.shape[0], q.data.stride(0)
    codes = torch.full((rows, step), 0x7F, dtype=torch.uint8, device=q.device)[:, : q.length]
    return replace(q, data=codes.copy_(q.data.view(torch.uint8)).view(q.data.dtype))


SENTINEL = 12345.0


def framed(m: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A buffer of sentinels and the window in it that a product writes; its rows start at multiples of 16 bytes."""
    frame = torch.full((m + 2, n + -n % 16 + 32), SENTINEL, dtype=dtype, device="cuda")
    return frame, frame[1 : m + 1, 16 : n + 16]


def check_frame(frame: Tensor, m: int, n: int, *, pads: bool = False) -> None:
    """Raise if anything but the window was written.  pads: it may be up to the next 16 bytes, as the copy engine does
    in rooms whose rows are padded for that."""
    frame = frame.clone()
    frame[1 : m + 1, 16 : 16 + n + (-n % (16 // frame.element_size()) if pads else 0)] = SENTINEL
    assert bool((frame == SENTINEL).all()), "written outside the output"


HYPOTHETICAL = {
    "cpu": Capability("cpu"),
    "sm_80": Capability("cuda", 80),
    "sm_90": Capability("cuda", 90),
    "sm_100": Capability("cuda", 100),
    "sm_120": Capability("cuda", 120),
}


def check_replay(call: Callable[[], Tensor], *operands: BlockScaled | Tensor) -> None:
    """Check that a call consists of kernel launches, with no copy by torch before them, and that a replay of them
    gives its bytes."""
    inputs = [
        part for each in operands for part in ((each.data, each.scale) if isinstance(each, BlockScaled) else (each,))
    ]
    with mock.patch.object(library, "_POISON", False):  # torch fills poisoned buffers, and a recording refuses its work
        call()
        got, recording = record(call, inputs, lambda out: ([out], None))
    assert recording is not None, "torch did some of the work"
    assert_same_bits(recording.replay(inputs), [got])
