"""Rewrite the pages and pictures of the checkout in the current folder: `python -m benchmarks.report`."""

from __future__ import annotations

import sys
from pathlib import Path

from blockscale.bench import trainings

from . import pages, pictures


def main() -> int:
    """Rewrite what changed, and print its path; 1 if no results are stored."""
    root = Path.cwd()
    rows, runs = pages.load(root / pages.RESULTS), trainings.load(root / pages.RESULTS)
    if not rows:
        print(f"no results in {pages.RESULTS}: run it in the root of a checkout")
        return 1
    for path in (*pictures.draw_all(root, rows, runs), *pages.update(root, rows, runs)):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
