"""Rows as a run on a GPU would store them, made up."""

from __future__ import annotations

from typing import Any

from blockscale.bench.shapes import EXPERT, MAIN, text
from blockscale.bench.store import Row

WHERE = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "python": "3.12.3",
    "blockscale": "0.1.0",
    "torchao": "0.18.0",
    "commit": "abc1234",
    "dirty": False,
    "command": "blockscale bench casts",
    "utc": "2026-11-15T00:00:00Z",
}


def row(case: str = "fp8_1x128 axis -1 16384x8192", **fields: Any) -> Row:
    """One row; fields replace the made-up ones."""
    given = {
        "suite": "casts",
        "group": "one operand",
        "format": "fp8_1x128",
        "axis": "-1",
        "shape": list(MAIN),
        "dtype": "bfloat16",
        "backend": "triton",
        "checked": "every byte",
        "wrong_bytes": 0,
        "us": 100.0,
        "bytes": 400_000_000,
        "where": WHERE,
    } | fields
    if given["us"] is not None:
        given |= {"spread_us": [given["us"] * 0.99, given["us"] * 1.01], "gb_s": 3900.0, "copy_gb_s": 4100.0}
        given |= {"percent_of_copy": fields.get("percent_of_copy", 95.1), "method": "graph", "rounds": 11}
    return Row(case=case, **given)


def suite() -> list[Row]:
    """A small run: several groups, a peer that differs, one that fails, a wrong kernel, and host times."""
    peers = {
        "eager": {"us": 900.0, "ratio": 9.0},
        "compile": {"us": 150.0, "ratio": 1.5, "note": "differs: 20.0 dB from ours"},
        "torchao": {"note": "fails: AssertionError"},
    }
    experts = (64, *EXPERT)
    return [
        row(peers=peers),
        row("fp8_1x128 axis -2 16384x8192", percent_of_copy=70.0, peers={"torchao": {"us": 130.0, "ratio": 1.3}}),
        row("mxfp8_e4m3 both 16384x8192", group="both operands", us=None, wrong_bytes=17),
        row(f"fp8_128x128 both {text(experts)}", group="expert weights", shape=list(experts), percent_of_copy=88.0),
        row("quantize nvfp4", suite="dispatch", shape=[128, 128], us=21.5, peers={"copy": {"us": 4.5, "ratio": 0.2}}),
    ]


def product(case: str = "1x128 @ 128x128 4096x7168x18432", **fields: Any) -> Row:
    """One row of a product; fields replace the made-up ones."""
    given = {
        "suite": "gemm",
        "group": "large",
        "format": "fp8_1x128 @ fp8_128x128",
        "shape": [4096, 7168, 18432],
        "backend": "hopper",
        "checked": "256 rows against the exact product, all values in two runs",
        "us": 900.0,
        "tflop_s": 1202.5,
        "bound_us": 840.0,
        "percent_of_bound": 93.3,
        "sqnr_db": 56.1,
        "sm_clock_mhz": 1500.0,
        "power_w": 690.0,
        "peers": {
            "row torch": {"us": 990.0, "ratio": 1.1, "tflop_s": 1093.2, "sqnr_db": 56.1},
            "row triton": {
                "us": 720.0,
                "ratio": 0.8,
                "sqnr_db": 20.0,
                "note": "differs: 20.0 dB from the exact product",
            },
            "row torch_sm100": {"note": "refuses: needs sm_100 to sm_103, this is sm_90"},
            "bf16": {"us": 1570.0, "ratio": 1.744, "tflop_s": 689.3, "sqnr_db": 56.2},
            "rowwise fast": {"us": 830.0, "ratio": 0.922, "tflop_s": 1303.9, "sqnr_db": 31.4},
        },
    } | fields
    return row(case, **given)


def products() -> list[Row]:
    """A small run: a good choice, a bad one, a sum into a buffer, a wrong kernel, few rows."""
    slower = {"row torch": {"us": 800.0, "ratio": 0.9}}
    return [
        product(),
        product("1x128 @ 1x128 4096x7168x18432", peers=slower),
        product("1x128 @ 128x128 fp32 += 4096x7168x18432", dtype="float32", sqnr_db=81.0),
        product("mxfp4 @ mxfp4 4096x7168x18432", group="MX and NVFP4", us=None, problem="3 values differ", peers={}),
        product("few rows 1x128 @ 128x128 16x7168x18432", group="few rows", shape=[16, 7168, 18432]),
    ]
