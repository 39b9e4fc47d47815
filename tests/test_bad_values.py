"""Every argument of every public function with values of every wrong kind: each is refused with the value, the rule and
the fix, or is valid."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import blockscale as bs
from blockscale import nn
from blockscale.autograd import Operand, Product, Recipe, grouped_linear, grouped_swiglu_mlp, linear, swiglu_mlp
from blockscale.errors import BlockscaleError
from blockscale.gemm import exact_mm

X, X3 = torch.ones(8, 64), torch.ones(3, 8, 64)
OFFS = torch.tensor([2, 2, 8], dtype=torch.int32)
Q, Q3 = bs.quantize(X, "mxfp8_e4m3"), bs.quantize(X3, "mxfp8_e4m3")
NVFP4 = bs.quantize(X, "nvfp4")
ROUTING = bs.sort_by_expert(torch.zeros(8, 1, dtype=torch.int64), 3)
WEIGHT, GATE_UP, DOWN = torch.ones(32, 64), torch.ones(64, 64), torch.ones(64, 32)
WEIGHTS, GATES_UPS, DOWNS = torch.ones(3, 32, 64), torch.ones(3, 64, 64), torch.ones(3, 64, 32)
PIECES = [torch.ones(2, 64), torch.ones(6, 64)]
NONE = (None, None)


def model(recipe: str = "mxfp8") -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(64, 64))
    bs.quantize_(made, bs.get_recipe(recipe).replace(weight_cast="step"), lambda module, name: True)
    return made


def with_backend(**named: Any) -> None:
    with bs.use_backend(**named):
        pass


def handmade(q: bs.BlockScaled) -> dict[str, Any]:
    names = ("data", "scale", "global_scale", "format", "axis", "scale_layout", "shape", "group_align", "hadamard")
    return {name: getattr(q, name) for name in names}


MODEL = model()
LAYER: dict[str, Any] = {"device": None, "dtype": None, "recipe": "mxfp8", "name": "", "rng": None}
EXPERTS: dict[str, Any] = {"experts": 3, "dim": 64, "hidden": 32}
CAST: dict[str, Any] = {
    "scale_rule": None, "rounding": "nearest", "hadamard": False, "role": None, "amax": "tensor", "satfinite": False,
    "scale_layout": None,
}  # fmt: skip
ASKED: dict[str, Any] = {"out_dtype": torch.float32, "bias": False, "accumulate": False, "offs": None, "starts": None}
ENTRIES: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "quantize": (bs.quantize, {"x": X, "format": "mxfp8_e4m3", "axis": -1, "offs": None, **CAST}),
    "quantize to nvfp4": (bs.quantize, {"x": X, "format": "nvfp4", "amax": "tensor", "hadamard": False}),
    "quantize columns": (bs.quantize, {"x": X, "format": "mxfp8_e4m3", "axis": -2, "offs": OFFS}),
    "CastSpec": (lambda **named: bs.CastSpec(**named).plan(), {"format": "mxfp4", **CAST}),
    "Stochastic": (
        lambda **named: bs.quantize(X, "mxfp4", rounding=bs.Stochastic(**named), role="dgrad_dy"),
        {"state": bs.rng_state(0), "name": "layer", "origin": None, "first_group": 0},
    ),
    "rng_state": (bs.rng_state, {"seed": 0, "tick": 0, "device": "cpu"}),
    "quantize_both": (bs.quantize_both, {"x": X, "row": "mxfp4", "col": "mxfp4", "offs": None, "colsum": False}),
    "dequantize": (bs.dequantize, {"q": Q, "dtype": torch.float32, "offs": None, "rotated": False}),
    "BlockScaled": (lambda **named: bs.dequantize(bs.BlockScaled(**named)), handmade(Q)),
    "BlockScaled nvfp4": (lambda **named: bs.dequantize(bs.BlockScaled(**named)), handmade(NVFP4)),
    "BlockScaled in a product": (lambda **named: bs.scaled_mm(bs.BlockScaled(**named), Q), handmade(Q)),
    "BlockScaled.groups": (lambda **named: bs.dequantize(bs.BlockScaled(**handmade(Q), **named)), {"groups": 0}),
    "BlockScaled.with_layout": (Q.with_layout, {"layout": "blocked"}),
    "BlockScaled.to": (Q.to, {"device": "cpu"}),
    "swiglu_quantize": (bs.swiglu_quantize, {"gate_up": X, "spec": "mxfp4", "axis": -1, "offs": None}),
    "swiglu_quantize_both": (bs.swiglu_quantize_both, {"gate_up": X, "row": "mxfp4", "col": "mxfp4", "offs": None}),
    "swiglu_backward_quantize_both": (
        bs.swiglu_backward_quantize_both,
        {"grad": X[:, :32], "gate_up": X, "row": "mxfp4", "col": "mxfp4", "hidden": None, "offs": None},
    ),
    "rmsnorm_quantize": (bs.rmsnorm_quantize, {"x": X, "weight": X[0], "spec": "mxfp4", "eps": 1e-6}),
    "rmsnorm_quantize_both": (
        bs.rmsnorm_quantize_both,
        {"x": X, "weight": X[0], "row": "mxfp4", "col": "mxfp4", "eps": 1e-6, "offs": None},
    ),
    "permute_quantize_both": (
        bs.permute_quantize_both,
        {"x": X, "indices": torch.arange(8), "offs": OFFS, "row": "mxfp4", "col": "mxfp4", "gate_weights": None},
    ),
    "permute_quantize_columns": (
        bs.permute_quantize_columns, {"x": X, "indices": torch.arange(8), "offs": OFFS, "spec": "mxfp4"},
    ),
    "quantize_permute": (bs.quantize_permute, {"x": X, "indices": torch.arange(8), "spec": "mxfp4"}),
    "scaled_mm": (bs.scaled_mm, {"a": Q, "b": Q, "out_dtype": torch.float32, "bias": None, "accumulate": None}),
    "exact_mm": (exact_mm, {"a": Q, "b": Q}),
    "scaled_mm of a tensor": (bs.scaled_mm, {"a": X, "b": Q, "out_dtype": torch.float32, "bias": None}),
    "pack_weight": (bs.pack_weight, {"w": Q}),
    "PackedWeight": (lambda **named: bs.scaled_mm(X, bs.PackedWeight(**named)), vars(bs.pack_weight(Q))),
    "PackedWeight nvfp4": (lambda **named: bs.scaled_mm(X, bs.PackedWeight(**named)), vars(bs.pack_weight(NVFP4))),
    "scaled_grouped_mm": (
        bs.scaled_grouped_mm,
        {"a": Q, "b": Q3, "offs": OFFS, "out_dtype": torch.float32, "bias": None, "accumulate": None, "starts": None},
    ),
    "sort_by_expert": (bs.sort_by_expert, {"experts": torch.zeros(4, 1, dtype=torch.int64), "count": 3}),
    "route": (bs.route, {"scores": torch.rand(4, 3), "k": 1, "bias": None, "normalize": False, "scale": 1.0}),
    "permute": (bs.permute, {"x": X, "routing": ROUTING}),
    "combine": (bs.combine, {"y": X, "routing": ROUTING, "gate_weights": None}),
    "activation": (bs.activation, {"x": X, "recipe": "mxfp8"}),
    "get_recipe": (bs.get_recipe, {"recipe": "mxfp8"}),
    "Operand": (
        lambda **named: Recipe("r", fprop=Product(Operand(**named), Operand("mxfp4"))),
        {"format": "mxfp4", "scale_rule": None, "stochastic": False, "hadamard": False},
    ),
    "Product": (lambda **named: Recipe("r", fprop=Product(**named)), {"a": Operand("mxfp4"), "b": Operand("mxfp4")}),
    "Recipe": (
        Recipe,
        {"name": "r", "fprop": None, "dgrad": None, "wgrad": None, "until": {}, "saves": "operand",
         "weight_cast": "forward", "since": 0},
    ),
    "Recipe.at": (bs.get_recipe("mxfp8").replace(until={"fprop": 2}).at, {"step": 0}),
    "Recipe.operand": (bs.get_recipe("mxfp8").operand, {"role": "fprop_x"}),
    "Recipe.with_weights": (bs.get_recipe("mxfp8").with_weights, {"format": "mxfp8_e4m3_128x128"}),
    "attach": (bs.attach, {"optimizer": torch.optim.SGD(MODEL.parameters()), "model": MODEL}),
    "invalidate": (bs.invalidate, {"model": MODEL}),
    "refresh_weights_": (bs.refresh_weights_, {"model": MODEL}),
    "quantize_": (
        bs.quantize_,
        {"model": model(), "recipe": "mxfp8", "filter_fn": None, "keep_first": None, "keep_last": None, "seed": 0},
    ),
    "unquantize_": (bs.unquantize_, {"model": model()}),
    "set_step_": (bs.set_step_, {"model": model(), "step": 0}),
    "advance_": (bs.advance_, {"model": model("mxfp4"), "tick": None}),
    "predicted_speedup": (bs.quantize_(model(), "mxfp8").predicted_speedup, {"tokens": 64, "machine": "h200"}),
    "seconds_saved": (bs.quantize_(model(), "mxfp8").seconds_saved, {"tokens": 64, "machine": "h200"}),
    "use_backend": (with_backend, {"backend": None, "gemm": "torch"}),
    "explain": (lambda op, a, b, **named: bs.explain(op, a, b, **named), {"op": "gemm", "a": Q, "b": Q, **ASKED}),
    "explain cast": (
        lambda op, x, to, **named: bs.explain(op, x, to, **named),
        {"op": "cast", "x": X, "to": "mxfp4", "offs": None, "on": None},
    ),
    "linear": (
        linear,
        {"x": X, "weight": WEIGHT, "bias": None, "recipe": "mxfp8", "rounding": None, "weight_operands": None},
    ),
    "linear in bf16": (linear, {"x": X, "weight": WEIGHT, "bias": None, "recipe": "bf16"}),
    "swiglu_mlp": (
        swiglu_mlp,
        {"x": X, "gate_up_weight": GATE_UP, "down_weight": DOWN, "gate_up_bias": None, "down_bias": None,
         "recipe": "mxfp8", "roundings": NONE, "weight_operands": NONE},
    ),
    "swiglu_mlp in bf16": (
        swiglu_mlp,
        {"x": X, "gate_up_weight": GATE_UP, "down_weight": DOWN, "gate_up_bias": None, "recipe": "bf16"},
    ),
    "grouped_linear": (
        grouped_linear,
        {"x": X, "weight": WEIGHTS, "routing": OFFS, "bias": None, "recipe": "mxfp8", "rounding": None,
         "weight_operands": None},
    ),
    "grouped_linear in bf16": (
        grouped_linear, {"x": X, "weight": WEIGHTS, "routing": OFFS, "bias": None, "recipe": "bf16"},
    ),
    "grouped_swiglu_mlp": (
        grouped_swiglu_mlp,
        {"x": X, "gate_up_weight": GATES_UPS, "down_weight": DOWNS, "routing": ROUTING, "gate_up_bias": None,
         "down_bias": None, "recipe": "mxfp8", "roundings": NONE, "weight_operands": NONE, "gate_weights": X[:, :1]},
    ),
    "grouped_swiglu_mlp in bf16": (
        grouped_swiglu_mlp,
        {"x": X, "gate_up_weight": GATES_UPS, "down_weight": DOWNS, "routing": OFFS, "down_bias": None,
         "recipe": "bf16"},
    ),
    "nn.Linear": (nn.Linear, {"in_features": 64, "out_features": 32, "bias": False, **LAYER}),
    "nn.SwiGLU": (nn.SwiGLU, {"dim": 64, "hidden": 32, "bias": False, **LAYER}),
    "nn.SwiGLU.from_linears": (
        nn.SwiGLU.from_linears,
        {"gate": torch.nn.Linear(64, 32), "up": torch.nn.Linear(64, 32), "down": torch.nn.Linear(32, 64),
         "recipe": "mxfp8", "name": "", "rng": None},
    ),
    "nn.GroupedLinear": (
        nn.GroupedLinear, {"experts": 3, "in_features": 64, "out_features": 32, "bias": False, **LAYER},
    ),
    "nn.GroupedExperts": (nn.GroupedExperts, {**EXPERTS, "bias": False, **LAYER}),
    "nn.MoE": (
        nn.MoE,
        {**EXPERTS, "top_k": 1, "bias": False, "shared": 0, "scoring": "softmax", "normalize": True, "scale": 1.0,
         "balance": False, **LAYER},
    ),
    "nn.MoE with stochastic rounding": (nn.MoE, {**EXPERTS, "top_k": 1, **LAYER, "recipe": "mxfp4", "name": "moe"}),
    "MoE.update_balance_": (nn.MoE(**EXPERTS, top_k=1, balance=True).update_balance_, {"rate": 1e-3}),
    "a Linear": (nn.Linear(64, 32, recipe="mxfp8"), {"input": X}),
    "a SwiGLU": (nn.SwiGLU(64, 32, recipe="mxfp8"), {"x": X}),
    "a GroupedLinear": (nn.GroupedLinear(3, 64, 32, recipe="mxfp8"), {"input": X, "routing": OFFS}),
    "a GroupedExperts": (nn.GroupedExperts(**EXPERTS, recipe="mxfp8"), {"x": X, "routing": OFFS, "gate_weights": None}),
    "a MoE": (nn.MoE(**EXPERTS, top_k=1, recipe="mxfp8"), {"x": X}),
}  # fmt: skip
BAD: dict[str, Any] = {
    "None": None, "text": "nonsense", "3": 3, "-7": -7, "10**30": 10**30, "2.5": 2.5, "-1.0": -1.0, "nan": torch.nan,
    "1j": 1j, "True": True, "bytes": b"x", "list": [1.0, 2.0], "tuple": (1, 2), "dict": {"a": 1}, "object": object(),
    "array": X.numpy(), "class": torch.Tensor, "dtype": torch.int8, "module": torch.nn.Linear(2, 2),
    "bool tensor": X.bool(), "int tensor": X.long(), "complex tensor": X.to(torch.complex64),
    "scalar": torch.tensor(1.0), "empty": torch.ones(0), "meta": X.to("meta"), "sparse": X.to_sparse(),
    "csr": X.to_sparse_csr(),
    "nested": torch.nested.nested_tensor(PIECES), "jagged": torch.nested.nested_tensor(PIECES, layout=torch.jagged),
    "BlockScaled": Q, "Activation": bs.activation(X, "mxfp8"), "Routing": ROUTING,
}  # fmt: skip
WHOLE, NUMBERS = {"3"}, {"3", "-7", "2.5", "-1.0", "10**30"}
TORCHS = {"sparse", "csr", "jagged", "complex tensor"}
# values that an argument accepts besides its default, by argument or by function and argument
FINE: dict[str, set[str]] = {
    "bias": {"None", "True"}, "satfinite": {"True"}, "colsum": {"True"}, "rotated": {"True"}, "normalize": {"True"},
    "balance": {"True"}, "explain accumulate": {"True"}, "linear bias": {"None"}, "scaled_mm bias": {"None"},
    "amax": {"None", "scalar"}, "quantize amax": set(), "CastSpec amax": set(), "CastSpec hadamard": {"3", "True"},
    "quantize to nvfp4 hadamard": {"3", "True"}, "BlockScaled nvfp4 hadamard": {"3"},
    "BlockScaled nvfp4 global_scale": {"scalar"}, "PackedWeight nvfp4 global_scale": {"scalar"},
    "x": {"meta"}, "gate_up": {"meta"}, "scores": {"meta"},
    "activation x": {"empty", "meta"}, "a Linear input": {"Activation"}, "a SwiGLU x": {"Activation"},
    "linear x": {"Activation"}, "swiglu_mlp x": {"Activation"},
    # torch's own products take these, and so does an unquantized layer
    "linear in bf16 x": {"Activation", *TORCHS}, "linear in bf16 weight": TORCHS,
    "swiglu_mlp in bf16 x": {"Activation", *TORCHS}, "grouped_linear in bf16 x": {"complex tensor"},
    "grouped_swiglu_mlp in bf16 x": {"complex tensor"},
    "permute x": {"bool tensor", "int tensor", "complex tensor", "meta"},
    "combine y": {"bool tensor", "int tensor", "complex tensor", "meta"},
    "q": {"BlockScaled"}, "a": {"BlockScaled"}, "b": {"BlockScaled"}, "Product a": set(), "Product b": set(),
    "routing": {"Routing"}, "offs": {"None", "Routing"}, "quantize offs": {"None"}, "scaled_grouped_mm offs": set(),
    "experts": WHOLE, "sort_by_expert experts": {"int tensor"}, "model": {"module"}, "attach model": set(),
    "quantize_ keep_last": {"3", "10**30"}, "eps": {"3", "2.5", "10**30"}, "route scale": NUMBERS,
    "nn.MoE scale": NUMBERS, "rate": NUMBERS, "name": {"text"}, "dim": WHOLE, "hidden": WHOLE, "in_features": WHOLE,
    "out_features": WHOLE, "top_k": WHOLE, "shared": WHOLE, "count": WHOLE, "k": WHOLE, "step": WHOLE,
    "tick": {"3", "-7"}, "seed": {"3", "-7", "True", "10**30"}, "tokens": WHOLE, "since": {"3", "10**30"},
    "first_group": WHOLE, "groups": {"3", "10**30"}, "keep_first": WHOLE, "gate_weights": {"None"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entry", "argument"), [(entry, name) for entry, (_, good) in ENTRIES.items() for name in good], ids=str
)
def test_a_bad_value_is_refused_with_value_rule_and_fix(entry: str, argument: str):
    call, good = ENTRIES[entry]
    call(**good)
    fine = FINE.get(f"{entry} {argument}", FINE.get(argument, set()))
    answers: dict[str, str] = {}
    for name, bad in BAD.items():
        try:
            call(**{**good, argument: bad})
        except BlockscaleError as error:
            if not re.fullmatch(r".+[.?!] Rule: .+[.?!] Fix: .+[.?!]", str(error), re.DOTALL):
                answers[name] = f"an error without three parts: {error}"
        except Exception as error:
            answers[name] = f"a raw {type(error).__name__}: {error}"
        else:
            if name not in fine and bad is not good[argument]:
                answers[name] = "taken"
    assert answers == {}


def test_every_public_function_is_tested():
    """doctor only takes a device, and the records are results of functions that are tested."""
    tested = {entry.split()[0].split(".")[0] for entry in ENTRIES}
    assert set(bs.__all__) - tested == {"__version__", "doctor", "ConversionReport", "Routing"}
