"""Names that a command line checks before torch is imported, which takes seconds: formats, recipes, machines,
links.

The definitions are in `formats/spec.py`, `autograd/recipe.py`, `roofline/ceilings.py` and `roofline/links.py`; a test
compares these lists with those tables. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .errors import PairError, check_name, refuse

# by family: a product takes two formats of one family
FORMATS: dict[str, tuple[str, ...]] = {
    "mx": ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp8_e4m3_128x128", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4_16x16"),
    "fp8": ("fp8_1x128", "fp8_128x128"),
}
FORMAT_NAMES = tuple(name for names in FORMATS.values() for name in names)
LEGAL_PAIRS = frozenset(
    (a, b) for names in FORMATS.values() for a in names for b in names if (a, b) != ("fp8_128x128", "fp8_128x128")
)
# left operands of weight-only products, by dtype
PLAIN_NAMES = ("bf16", "fp16", "fp32")

RECIPES = (
    "bf16", "fp8_blockwise", "fp8_blockwise_pow2", "mxfp8", "mxfp8_128x128", "mxfp8_wgrad_bf16", "mxfp6", "mxfp4",
    "nvfp4",
)  # fmt: skip
PRODUCTS = ("fprop", "dgrad", "wgrad")
# a recipe's name, and its products that stay unquantized
_SPARED = re.compile(rf"(\w+?)((?:_(?:{'|'.join(PRODUCTS)}))+)_bf16")

MACHINES = ("a100", "h100", "h800", "h200", "b200", "gb200", "l20", "rtx5090")
LINKS = ("nvlink3", "nvlink4", "nvlink4-h800", "nvlink5", "pcie4", "pcie5", "infiniband")


def check_pair(a: str, b: str) -> None:
    """Raise unless some product combines the two formats."""
    if isinstance(a, str) and isinstance(b, str) and (a, b) in LEGAL_PAIRS:  # pyright: ignore[reportUnnecessaryIsInstance]
        return
    for name in (a, b):
        check_name(name, FORMAT_NAMES, "format")
    partners = [name for name in FORMAT_NAMES if (a, name) in LEGAL_PAIRS]
    refuse(
        f"no product of {a} with {b}",
        rule="MX goes with MX, NVFP4 with NVFP4, fp8_1x128 with fp8_1x128 or fp8_128x128",
        fix=f"cast the second operand to {' or '.join(partners)}",
        error=PairError,
    )


def spared_products(name: str, recipes: Collection[str] = RECIPES) -> tuple[str, tuple[str, ...]] | None:
    """(recipe, unquantized products) of a name such as fp8_blockwise_wgrad_bf16; None for other names. At least one
    product is quantized, else the recipe is bf16.

    >>> spared_products("mxfp8_fprop_dgrad_bf16")
    ('mxfp8', ('fprop', 'dgrad'))
    """
    found = _SPARED.fullmatch(name)
    spared = tuple(found[2].split("_")[1:]) if found else ()
    if found is None or found[1] not in recipes or {*spared} == {*PRODUCTS}:
        return None
    return found[1], spared


def check_recipe(name: str) -> None:
    """Raise unless a recipe has this name, or the name of a recipe with some products unquantized."""
    if name not in RECIPES and spared_products(name) is None:
        check_name(name, RECIPES, "recipe")
