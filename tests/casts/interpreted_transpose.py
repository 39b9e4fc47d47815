"""Transposed codes in Triton's interpreter against the reference; a script, because the variable must come first.

    TRITON_INTERPRET=1 python tests/casts/interpreted_transpose.py

Prints `cases values mismatches`.
"""

from __future__ import annotations

import torch

import blockscale as bs
from blockscale.casts.transpose import transpose_codes

# rows, codes in a row, matrices
SIZES = [(1, 1, 1), (5, 17, 2), (128, 256, 1), (130, 300, 3), (256, 128, 2), (31, 129, 1)]


def main() -> int:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    cases = values = wrong = 0
    for rows, length, count in SIZES:
        for bits in (8, 4):
            width = -(-length * bits // 8)
            codes = torch.randint(0, 256, (count, rows, width + 16), dtype=torch.uint8, device=where)[..., :width]
            if length % 2 and bits == 4:  # the pad of a row is zero codes
                codes[..., -1] &= 15
            found = []
            for backend in ("triton", "reference"):
                with bs.use_backend(transpose_codes=backend):
                    found.append(transpose_codes(codes, length, bits))
            cases, values = cases + 1, values + found[0].numel()
            wrong += int((found[0] != found[1]).sum())
    print(cases, values, wrong)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
