"""Autocast, autograd, compiled code, other threads and other groups do not change the results of a call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import blockscale as bs
from blockscale.formats import FORMATS
from blockscale.gemm import exact_mm
from blockscale.registry import forced_backend
from support.products import partner


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_autocast_does_not_touch_a_product(name: str, dtype: torch.dtype, device: torch.device) -> None:
    a = bs.quantize(torch.randn(64, 256, device=device), name)
    b = bs.quantize(torch.randn(32, 256, device=device), partner(name))
    plain = bs.scaled_mm(a, b, torch.float32)
    with torch.autocast(device.type, dtype):
        assert torch.equal(bs.scaled_mm(a, b, torch.float32), plain)
        assert torch.equal(bs.dequantize(a), bs.dequantize(a))
    assert exact_mm(a, b).isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_bias_or_a_column_sum_does_not_require_grad(backend: str) -> None:
    x = torch.randn(8, 64, requires_grad=True)
    q = bs.quantize(x, "mxfp8_e4m3")
    with bs.use_backend(backend):
        assert not bs.scaled_mm(q, q, bias=nn.Parameter(torch.ones(8))).requires_grad
        assert not bs.quantize_both(x, "mxfp4", "mxfp4", colsum=True)[2].requires_grad


def test_forcing_a_backend_inside_a_compiled_function_is_refused() -> None:
    def product(q: bs.BlockScaled) -> torch.Tensor:
        with bs.use_backend("reference"):
            return bs.scaled_mm(q, q)

    q = bs.quantize(torch.ones(4, 32), "mxfp4")
    with pytest.raises(Exception, match="use_backend inside a compiled function"):
        torch.compile(product, backend="eager", fullgraph=True)(q)
    assert forced_backend("gemm") is None


def test_forced_backends_may_end_in_any_order() -> None:
    first, second = bs.use_backend("reference"), bs.use_backend(gemm="torch")
    first.__enter__()
    second.__enter__()
    assert (forced_backend("gemm"), forced_backend("cast")) == ("torch", "reference")
    first.__exit__(None, None, None)
    assert (forced_backend("gemm"), forced_backend("cast")) == ("torch", None)
    second.__exit__(None, None, None)
    assert forced_backend("gemm") is None


def test_unknown_names_raise_while_tracing() -> None:
    with pytest.raises(Exception, match="unknown format 'mxfp9'"):
        torch.compile(lambda x: bs.quantize(x, "mxfp9").data, backend="eager", fullgraph=True)(torch.ones(2, 32))


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("offs", [(60, 130), (10, 20, 130)])
def test_other_group_ends_than_those_of_the_cast_are_refused(offs: tuple[int, ...]) -> None:
    q = bs.quantize(torch.randn(130, 32), "mxfp8_e4m3", axis=-2, offs=ends(130))
    with pytest.raises(bs.errors.ShapeError, match="cast with 1 groups"):
        bs.dequantize(q, offs=ends(*offs))
    with pytest.raises(bs.errors.ShapeError, match="cast with 1 groups"):
        bs.scaled_grouped_mm(q.mT, q.mT, ends(*offs))


@pytest.mark.parametrize("offs", [(10,), (2, 4, 10), (4, 20), (10, 4)])
def test_other_group_ends_for_scales_of_groups_are_refused(offs: tuple[int, ...]) -> None:
    q = bs.quantize(torch.randn(10, 32), "nvfp4", offs=ends(4, 10), amax="group")
    with pytest.raises(bs.errors.ShapeError, match=r"offs is|group ends"):
        bs.dequantize(q, offs=ends(*offs))


@pytest.mark.parametrize("name", FORMATS)
def test_operands_are_mapped_and_moved(name: str, device: torch.device) -> None:
    q = bs.quantize(torch.randn(5, 33), name)
    mapped = pytree.tree_map(torch.clone, bs.quantize(torch.randn(4, 64), "mxfp8_e4m3"))
    assert isinstance(mapped, bs.BlockScaled)
    moved = q.to(device)
    assert (moved.device.type, moved.scale.stride(), moved.data.stride()) == (
        device.type,
        q.scale.stride(),
        q.data.stride(),
    )
    assert torch.equal(bs.dequantize(moved).cpu(), bs.dequantize(q))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda q, x: bs.explain("gemm", q, bs.quantize(x, "nvfp4")), "no product of"),
        (lambda q, x: bs.explain("gemm", q, bs.quantize(x[:, :32], "mxfp4")), "have K = 64 and 32"),
        (lambda q, x: bs.explain("gemm", q, bs.quantize(x, "mxfp4", axis=-2)), "scaled along axis -2"),
        (lambda q, x: bs.explain("cast", x.int(), "mxfp4"), "dtype torch.int32"),
        (lambda q, x: bs.explain("cast", x[0], "mxfp4"), "rank 2 or more"),
    ],
)
def test_explain_refuses_what_the_call_would(call: object, text: str) -> None:
    x = torch.randn(8, 64)
    with pytest.raises((ValueError, NotImplementedError), match=text):
        call(bs.quantize(x, "mxfp4"), x)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x, q: bs.scaled_mm(q, q, accumulate=True), "accumulate is True"),
        (lambda x, q: bs.quantize(x, "nvfp4", amax=3.0), "amax is a float"),
        (lambda x, q: bs.quantize(x, "mxfp4", rounding=bs.Stochastic(0, "l"), role="fprop_x"), "state is a int"),
        (lambda x, q: bs.scaled_grouped_mm(q, q, None), "offs is a NoneType"),
        (lambda x, q: bs.quantize(x, ["mxfp4"]), "unknown format"),
        (lambda x, q: bs.quantize(x.to_sparse(), "mxfp4"), "dense tensors"),
        (lambda x, q: bs.quantize(q, "mxfp4"), "high-precision"),
        (lambda x, q: bs.doctor("foo"), "device 'foo'"),
    ],
)
def test_what_people_type_by_mistake(call: object, text: str) -> None:
    x = torch.randn(8, 64)
    with pytest.raises(ValueError, match=text):
        call(x, bs.quantize(x, "mxfp4"))  # pyright: ignore[reportCallIssue]


def test_golden_vectors_name_sections_that_exist() -> None:
    import json
    import re
    from pathlib import Path

    root = Path(__file__).parent
    sections = set(re.findall(r"^## (\d+)\.", (root.parent / "docs" / "numerics.md").read_text(), flags=re.MULTILINE))
    for path in (root / "golden").glob("*.json"):
        assert {case["from"] for case in json.loads(path.read_text())["cases"]} <= sections, path.name
