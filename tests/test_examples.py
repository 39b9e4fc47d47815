"""Every example runs and reaches the signal to noise, or the loss, that its format promises."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
# lower bounds: in dB, half a dB below what the formats give; of losses, how far they fall
EXPECTED = {
    "convert_a_model": {"converted": 10, "plain": 2.6, "fp8_blockwise": 2.6},
    "three_products": {"fprop": 28.2, "dgrad": 28.2, "wgrad": 28.3},
    "grouped_experts": {"forward": 28.0, "weight gradient": 28.0},
    "mixture_of_experts": {"bf16": 10.0, "fp8_blockwise": 10.0},
    "train_and_generate": {"right": 0.9, "frozen layers": 8},
    "fp4_gradients": {"one tick": 14.1, "mean of 64 ticks, x as cast": 32.0},
}


def test_every_example_is_expected() -> None:
    assert {path.stem for path in EXAMPLES} == set(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    figures = module.main()
    assert set(figures) == set(EXPECTED[path.stem])
    for name, bound in EXPECTED[path.stem].items():
        assert figures[name] >= bound, name
