"""`QuantizedLinear`: the products of its operand, and what becomes of codes and scales when a module changes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale import checkpoints
from blockscale.errors import BlockscaleError, DtypeError, LayoutError, PairError, ShapeError
from blockscale.formats import FORMATS
from blockscale.gemm import exact_mm
from blockscale.inference import QuantizedLinear

# every format of weights, with the activations that it is multiplied by
ACTIVATIONS = {
    "fp8_1x128": "fp8_1x128", "fp8_128x128": "fp8_1x128", "nvfp4": "nvfp4", "nvfp4_16x16": "nvfp4", "mxfp4": "mxfp4",
    "mxfp6_e2m3": "mxfp6_e2m3", "mxfp6_e3m2": "mxfp8_e4m3", "mxfp8_e5m2": "mxfp8_e4m3", "mxfp8_e4m3": "mxfp8_e4m3",
    "mxfp8_e4m3_128x128": "mxfp8_e4m3",
}  # fmt: skip
# a tail block in each format, rows of codes with pads, scales of a grid with pads
IN, OUT = 292, 136


def made(weights: str = "fp8_128x128", activations: str | None = "fp8_1x128", dtype: Any = None) -> QuantizedLinear:
    torch.manual_seed(0)
    return QuantizedLinear.from_linear(nn.Linear(IN, OUT, dtype=dtype), weights, activations)


def test_every_format_is_tested():
    assert set(ACTIVATIONS) == set(FORMATS)


@pytest.mark.parametrize("format", FORMATS)
def test_outputs_are_products_of_the_operands(format: str):
    layer, x = made(format, ACTIVATIONS[format]), torch.randn(2, 3, IN)
    w, row = bs.quantize(layer_weight(), format), bs.quantize(x.view(6, IN), ACTIVATIONS[format])
    want = bs.scaled_mm(row, w, torch.float32, bias=layer.bias)
    assert torch.equal(layer(x), want.view(2, 3, OUT))
    plain = QuantizedLinear.from_operand(w, layer.bias)
    assert torch.equal(plain(x), bs.scaled_mm(x.view(6, IN), w, torch.float32, bias=layer.bias).view(2, 3, OUT))
    exact = exact_mm(x.view(6, IN), w) + layer.bias.double()  # pyright: ignore[reportOptionalMemberAccess]
    assert (plain(x).view(6, OUT) - exact).abs().max() < 1e-5, "the input of a weight-only layer is not rounded"


def layer_weight() -> Tensor:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT).weight.detach()


@pytest.mark.parametrize("format", FORMATS)
def test_state_dict_is_what_the_native_layout_stores(format: str, tmp_path: Any):
    pytest.importorskip("safetensors", reason="checkpoints are written by safetensors")
    layer = made(format, ACTIVATIONS[format])
    weights = {"up.weight": layer.operand, "up.bias": layer.bias}
    checkpoints.write(tmp_path, weights.items(), "blockscale")  # pyright: ignore[reportArgumentType]
    found = checkpoints.open(tmp_path)
    stored = {name: found._read(name) for name in found.stored}  # pyright: ignore[reportPrivateUsage]
    state = nn.ModuleDict({"up": layer}).state_dict()
    assert state.keys() == stored.keys()
    for name, part in state.items():
        assert part.dtype == stored[name].dtype
        assert part.is_contiguous()
        assert torch.equal(bytes_of(part), bytes_of(stored[name])), name


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(bytes_of(first[name]), bytes_of(second[name])) for name in first
    )


@pytest.mark.parametrize("format", FORMATS)
def test_state_dict_loads(format: str):
    """In place, with assign=True from the meta device, and through files that execute nothing."""
    layer, x, file = made(format, ACTIVATIONS[format]), torch.randn(3, IN), io.BytesIO()
    want = layer(x)
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    options: Any = {"weights": format, "activations": ACTIVATIONS[format]}
    zeros, meta = (QuantizedLinear(IN, OUT, device=device, **options) for device in (None, "meta"))
    before = zeros.weight.data_ptr(), zeros.weight_scale.data_ptr()
    assert not zeros(x).any()
    zeros.load_state_dict(state)
    assert before == (zeros.weight.data_ptr(), zeros.weight_scale.data_ptr()), "captured graphs read these addresses"
    meta.load_state_dict(state, assign=True)
    empty = QuantizedLinear(IN, OUT, device="meta", **options).to_empty(device="cpu")
    empty.load_state_dict(state)
    for each in (zeros, meta, empty, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(each(x), want)
        assert same(each, layer)


def test_state_dict_of_other_bytes_is_refused():
    layer = made()
    for change, wrong in (
        ({"weight": torch.zeros(OUT, IN)}, "Rule: weight of fp8_128x128 is stored as torch.float8_e4m3fn"),
        ({"weight_scale": torch.zeros(2, 3, dtype=torch.bfloat16)}, "weight_scale is .*bfloat16"),
    ):
        with pytest.raises(DtypeError, match=wrong):
            layer.load_state_dict(layer.state_dict() | change)
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale"):
        layer.load_state_dict(layer.state_dict() | {"weight_scale": torch.zeros(2, 4)})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({"weight": layer.state_dict()["weight"]})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict(layer.state_dict() | {"weight_global_scale": torch.ones([])})
    assert same(layer, made()), "an error changes nothing"


@pytest.mark.parametrize("format", ["fp8_128x128", "nvfp4", "mxfp6_e2m3"])
def test_conversions_of_dtype_change_the_bias_alone(format: str):
    want = made(format, ACTIVATIONS[format])
    for convert in (nn.Module.half, nn.Module.double, lambda m: m.to(torch.float16), lambda m: m.to("cpu").bfloat16()):
        layer = convert(made(format, ACTIVATIONS[format]))
        assert layer.bias is not None
        assert layer.bias.dtype != torch.float32
        layer.register_buffer("bias", want.bias)
        assert same(layer, want)
    layer = made(format, ACTIVATIONS[format])
    with pytest.raises(DtypeError, match="Rule: codes and scales keep their bytes"):
        layer.type(torch.float16)
    assert torch.equal(layer.weight_scale.view(torch.uint8), want.weight_scale.view(torch.uint8))


def test_output_dtype_is_that_of_the_input_or_of_autocast():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layer, x = made("mxfp8_e4m3", None, dtype).to(dtype), torch.randn(2, IN, dtype=dtype)
        assert layer(x).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("activations", ["nvfp4", None])
def test_compiled_layers_have_the_same_bits(activations: str | None):
    layer, x = made("nvfp4", activations), torch.randn(2, 3, IN)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("activations", ["mxfp8_e4m3", None])
def test_leading_dimensions_and_empty_inputs(activations: str | None):
    layer = made("mxfp4", activations)
    assert layer(torch.randn(IN)).shape == (OUT,)
    assert layer(torch.randn(0, 4, IN)).shape == (0, 4, OUT)
    assert layer(torch.randn(2, 0, 4, IN)).shape == (2, 0, 4, OUT)
    x = torch.randn(5, IN)
    assert torch.equal(layer(x[3]), layer(x[3:4])[0])
    assert torch.equal(layer(x.view(5, 1, 1, IN)).flatten(0, 2), layer(x))


def test_gradients_are_refused():
    layer = made()
    assert not list(layer.parameters())
    with pytest.raises(BlockscaleError, match=r"requires a gradient\. Rule: it is frozen.*train with quantize_"):
        layer(torch.randn(2, IN, requires_grad=True))
    with torch.no_grad():
        assert layer(torch.randn(2, IN, requires_grad=True)).shape == (2, OUT)


def test_what_it_cannot_multiply_says_why():
    layer = made()
    with pytest.raises(ShapeError, match=r"x \(2, 128\) for a weight \(136, 292\)"):
        layer(torch.randn(2, 128))
    with pytest.raises(DtypeError, match=r"x is torch\.int64"):
        layer(torch.ones(2, IN, dtype=torch.int64))
    with pytest.raises(PairError):
        made("fp8_128x128", "mxfp8_e4m3")
    with pytest.raises(BlockscaleError, match="2-D blocks are for weights"):
        made("fp8_1x128", "fp8_128x128")
    with pytest.raises(BlockscaleError, match="Rule: activations of frozen layers are cast"):
        made("mxfp4", bs.CastSpec("mxfp4", hadamard=True))  # pyright: ignore[reportArgumentType]
    q = bs.quantize(torch.randn(4, 64, 32), "mxfp4")
    with pytest.raises(ShapeError, match=r"weight of this layer is \[N, K\]"):
        QuantizedLinear.from_operand(q)
    with pytest.raises(LayoutError, match="blocks of a frozen weight run along its inputs"):
        QuantizedLinear.from_operand(bs.quantize(torch.randn(64, 32), "mxfp4", axis=-2))
    with pytest.raises(ShapeError, match=r"Rule: a bias is \(64,\)"):
        QuantizedLinear.from_operand(bs.quantize(torch.randn(64, 32), "mxfp4"), torch.zeros(32))


def test_codes_of_another_format_are_not_loaded():
    """The two MXFP6 formats have tensors of one dtype and shape."""
    source = QuantizedLinear.from_linear(nn.Linear(64, 32), "mxfp6_e2m3")
    other = QuantizedLinear(64, 32, weights="mxfp6_e3m2")
    with pytest.raises(BlockscaleError, match="weight is mxfp6_e2m3 for a layer of mxfp6_e3m2"):
        other.load_state_dict(source.state_dict())
    QuantizedLinear(64, 32, weights="mxfp6_e2m3").load_state_dict(source.state_dict())
