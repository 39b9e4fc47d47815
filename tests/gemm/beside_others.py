"""Repeats one GEMM of Hopper in its own process: `python beside_others.py PRODUCT SECONDS`.

Products: those of a training step of the 125m preset. Prints the number of runs, unless it hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import blockscale as bs

_TOKENS, _DIM, _HIDDEN = 32768, 768, 3456


def _values(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


def _product(rows: int, columns: int, length: int, weight: str) -> Callable[[], object]:
    a, b = bs.quantize(_values(rows, length), "fp8_1x128"), bs.quantize(_values(columns, length), weight)
    return lambda: bs.scaled_mm(a, b)


PRODUCTS: dict[str, Callable[[], Callable[[], object]]] = {
    "fprop": lambda: _product(_TOKENS, _HIDDEN, _DIM, "fp8_128x128"),
    "dgrad": lambda: _product(_TOKENS, _DIM, _HIDDEN, "fp8_128x128"),
    # stream-K, with the scales of weights and of activations
    "stream-K fprop": lambda: _product(_HIDDEN, _DIM, _TOKENS, "fp8_128x128"),
    "stream-K wgrad": lambda: _product(_HIDDEN, _DIM, _TOKENS, "fp8_1x128"),
    # data-parallel, with scales of activations
    "wgrad": lambda: _product(8192, 8192, 4096, "fp8_1x128"),
}


def main(name: str, seconds: float) -> None:
    """Run the product for so many seconds."""
    call = PRODUCTS[name]()
    call()
    torch.cuda.synchronize()
    start, count = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        count += 50
    print(f"{name}: {count} times", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
