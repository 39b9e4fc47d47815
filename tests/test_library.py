"""Every operator under PyTorch's own checks: opcheck, unmodified inputs, FLOP counts, poisoned outputs."""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import blockscale as bs
from blockscale import library, rng_state
from blockscale.casts import fused, permuted, transpose
from blockscale.casts import ops as casts_ops
from blockscale.formats import FORMATS, CastSpec, Stochastic
from blockscale.formats.cast_spec import Cast, as_cast
from blockscale.gemm import ops as gemm_ops
from blockscale.gemm import weight_only as gemm_weight_only
from blockscale.grouped import ops as grouped_ops
from blockscale.grouped import routing, unquantized
from blockscale.grouped import weight_only as grouped_weight_only
from support.products import ONE_D, assert_same_bits, gaussian, offsets, partner, raw

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CHECKS = ("test_autograd_registration", "test_faketensor")


def cast_samples(device):
    x = gaussian(40, 48, device=device)
    state = rng_state(1, device=device)
    offs = offsets([3, 0, 30], device)
    for name in FORMATS:
        for axis in (-1, -2):
            yield x, as_cast(name), axis, None
    stochastic = CastSpec("mxfp4", rounding=Stochastic(state, "layer"), role="dgrad_dy", hadamard=True)
    yield x, as_cast(stochastic), -2, offs
    yield x.float(), as_cast(CastSpec("nvfp4", amax="group")), -2, offs
    yield x.half(), as_cast(CastSpec("nvfp4", amax=torch.tensor(3.0, device=device))), -1, None
    yield x.expand(2, 40, 48), as_cast("fp8_128x128"), -2, None
    yield x[:0], as_cast("mxfp8_e4m3"), -1, None


def cast_both_samples(device):
    x = gaussian(40, 48, device=device)
    for name in FORMATS:
        cast = as_cast(name)
        yield x, cast, cast, None, name == "mxfp4"
    cast = as_cast(CastSpec("nvfp4", amax="group"))
    yield x, cast, cast, offsets([3, 0, 30], device), True


def swiglu_samples(device):
    for x, *rest in cast_samples(device):
        yield torch.cat((x, x), dim=-1), *rest


def swiglu_both_samples(device):
    for x, *rest in cast_both_samples(device):
        yield torch.cat((x, x), dim=-1), *rest[:-1]


def swiglu_backward_samples(device):
    for x, row, col, offs, _ in cast_both_samples(device):
        for hidden in (None, col):
            yield x, torch.cat((x, x), dim=-1), row, col, hidden, offs


def rmsnorm_samples(device):
    for x, cast, axis, _ in cast_samples(device):
        if axis == -1:
            yield x, gaussian(48, device=device), 1e-6, cast


def rmsnorm_both_samples(device):
    for x, *rest in cast_both_samples(device):
        yield x, gaussian(48, device=device), 1e-6, *rest[:-1]


def permute_samples(device):
    x, indices = gaussian(40, 48, device=device), torch.tensor([3, 3, -1, 39, 0], device=device)
    for name in ONE_D:
        yield x, indices, as_cast(name)
    yield x.half(), indices.int(), as_cast(CastSpec("nvfp4", amax=torch.tensor(3.0, device=device)))


def permute_both_samples(device):
    offs = offsets([3, 0, 2], device)
    for place, (x, indices, cast) in enumerate(permute_samples(device)):
        weights = gaussian(5, device=device).float() if place % 2 else None
        yield x, indices, weights, cast, cast, offs


def permute_columns_samples(device):
    offs = offsets([3, 0, 2], device)
    for args in permute_samples(device):
        yield *args, offs


def flat(name, args):
    """Arguments of an operator's schema, one-byte codes and scales as uint8."""
    given = library.PARAMETERS[name].flatten(*args)
    return tuple(t.view(torch.uint8) if isinstance(t, torch.Tensor) and t.element_size() == 1 else t for t in given)


def buffers(results):
    """The result of a cast as arguments of the operator that writes it in place."""
    data, scale, factor = results
    raws = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (data, scale))
    return *raws, factor if factor is not None and factor.numel() else None


def other(x):
    """A tensor with other codes and scales."""
    return 3 * x.flip((0, 1))


def recast_samples(device):
    x = gaussian(40, 48, device=device)
    for name in FORMATS:
        cast = as_cast(name)
        for axis in (-1, -2):
            made = library.OPERATORS["quantize"](*flat("quantize", (x, cast, axis, None)))
            yield *buffers(made), other(x), cast, axis


def recast_both_samples(device):
    for x, row, col, *rest in list(cast_both_samples(device))[:-1]:
        made = library.OPERATORS["quantize_both"](*flat("quantize_both", (x, row, col, *rest)))
        yield *buffers(made[0:3]), *buffers(made[3:6]), other(x), row, col


def transpose_samples(device):
    shapes = ((5, 16), (2, 33, 32), (128, 128), (1, 16))
    for shape, (length, bits) in itertools.product(shapes, ((9, 8), (17, 4))):
        yield torch.randint(0, 256, shape, dtype=torch.uint8).to(device), length, bits


def dequantize_samples(device):
    x, offs = gaussian(40, 48, device=device), offsets([3, 0, 30], device)
    for name in FORMATS:
        yield bs.quantize(x, name, axis=-2), None, torch.bfloat16
    yield bs.quantize(x, "mxfp4", axis=-2, offs=offs, hadamard=True), offs, torch.float32


def gemm_samples(device):
    for name in FORMATS:
        a = bs.quantize(gaussian(20, 48, device=device), name)
        b = bs.quantize(gaussian(24, 48, device=device), partner(name))
        yield a, b, gaussian(24, device=device), torch.bfloat16
        yield a, b, None, torch.float32


def weight_only_samples(device):
    for place, name in enumerate(FORMATS):
        x = gaussian(20, 48, device=device).to((torch.bfloat16, torch.float16, torch.float32)[place % 3])
        w = bs.quantize(gaussian(24, 48, device=device), name)
        yield x, w, gaussian(24, device=device), torch.bfloat16
        yield x.mT.contiguous().mT, w, None, torch.float32


def weight_only_grouped_samples(device):
    starts, ends = (torch.tensor(rows, dtype=torch.int32, device=device) for rows in ([0, 3, 3], [3, 3, 36]))
    for name in FORMATS:
        x = gaussian(36, 48, device=device)
        w = bs.quantize(gaussian(3, 24, 48, device=device), name)
        yield x, w, offsets([3, 0, 30], device), None, gaussian(3, 24, device=device), torch.bfloat16
        yield x.float(), w, ends, starts, None, torch.float32


def gemm_add_samples(device):
    for name in FORMATS:
        a = bs.quantize(gaussian(20, 48, device=device), name)
        b = bs.quantize(gaussian(24, 48, device=device), partner(name))
        yield torch.ones(20, 24, device=device), a, b


def grouped_operands(device):
    offs = offsets([3, 0, 30], device)
    for name in ONE_D:
        a = bs.quantize(gaussian(36, 48, device=device), name)
        yield a, bs.quantize(gaussian(3, 24, 48, device=device), name), offs, (36, 24)
        a = bs.quantize(gaussian(36, 48, device=device), name, axis=-2, offs=offs).mT
        b = bs.quantize(gaussian(36, 24, device=device), name, axis=-2, offs=offs).mT
        yield a, b, offs, (3, 48, 24)


def grouped_samples(device):
    for a, b, offs, shape in grouped_operands(device):
        bias = gaussian(3, 24, device=device) if len(shape) == 2 else None
        yield a, b, offs, None, bias, torch.bfloat16
        if len(shape) == 2:  # rows of no group are undefined, and would differ between calls
            starts, ends = (torch.tensor(rows, dtype=torch.int32, device=device) for rows in ([0, 3, 3], [3, 3, 36]))
            yield a, b, ends, starts, bias, torch.bfloat16


def grouped_add_samples(device):
    for a, b, offs, shape in grouped_operands(device):
        yield torch.ones(shape, device=device), a, b, offs, None
        if len(shape) == 2:
            starts = torch.tensor([0, 5, 7], dtype=torch.int32, device=device)
            yield torch.ones(shape, device=device), a, b, starts + 2, starts


def chosen_experts(device):
    """Expert indices [T, k] for every k up to 8, and for no tokens; 5 means no expert."""
    for k in range(1, 9):
        yield torch.randint(0, 6, (11, k), generator=torch.Generator().manual_seed(k)).to(device)
    yield torch.zeros(0, 2, dtype=torch.int32, device=device)


def sort_samples(device):
    for experts in chosen_experts(device):
        yield experts, 5


def routed_samples(device):
    for at, experts in enumerate(chosen_experts(device)):
        dtype = (torch.bfloat16, torch.float32, torch.float16)[at % 3]
        _, tokens, rows = library.OPERATORS["sort_by_expert"](experts, 5)
        weights = torch.rand(experts.shape, device=device) if at % 2 else None
        yield dtype, tokens, rows, weights


def permute_rows_samples(device):
    for dtype, tokens, rows, weights in routed_samples(device):
        yield gaussian(rows.shape[0], 24, device=device).to(dtype), tokens, rows, weights


def combine_rows_samples(device):
    for dtype, tokens, rows, weights in routed_samples(device):
        yield gaussian(tokens.shape[0], 24, device=device).to(dtype), rows, weights


def combine_dots_samples(device):
    for dtype, tokens, rows, _ in routed_samples(device):
        y, grad = (gaussian(count, 24, device=device).to(dtype) for count in (tokens.shape[0], rows.shape[0]))
        yield y, grad, rows


def unquantized_samples(device):
    """Sizes that torch's grouped product takes, and others."""
    offs = offsets([3, 0, 30], device)
    for dtype in (torch.bfloat16, torch.float32):
        for n, k in ((24, 48), (23, 47)):
            x, w, dy = (gaussian(*shape, device=device).to(dtype) for shape in ((36, k), (3, n, k), (36, n)))
            yield x, w.mT, offs
            yield dy, w, offs
            yield dy.mT, x, offs


SAMPLES = {
    "combine_dots": combine_dots_samples,
    "combine_rows": combine_rows_samples,
    "grouped_mm": unquantized_samples,
    "permute_rows": permute_rows_samples,
    "sort_by_expert": sort_samples,
    "quantize": cast_samples,
    "quantize_both": cast_both_samples,
    "requantize_": recast_samples,
    "requantize_both_": recast_both_samples,
    "swiglu_quantize": swiglu_samples,
    "swiglu_quantize_both": swiglu_both_samples,
    "swiglu_backward_quantize_both": swiglu_backward_samples,
    "rmsnorm_quantize": rmsnorm_samples,
    "rmsnorm_quantize_both": rmsnorm_both_samples,
    "permute_quantize_both": permute_both_samples,
    "permute_quantize_columns": permute_columns_samples,
    "quantize_permute": permute_samples,
    "dequantize": dequantize_samples,
    "transpose_codes": transpose_samples,
    "scaled_mm": gemm_samples,
    "scaled_mm_add_": gemm_add_samples,
    "scaled_grouped_mm": grouped_samples,
    "scaled_grouped_mm_add_": grouped_add_samples,
    "weight_only_mm": weight_only_samples,
    "weight_only_grouped_mm": weight_only_grouped_samples,
}

THOROUGH = "ALL_TESTS" in os.environ


def test_every_operator_has_samples():
    assert set(SAMPLES) == set(library.OPERATORS), "give the new operator sample inputs in this file"


def tensors(args: tuple) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]


def layout(values: object) -> tuple:
    """What a tracer sees of arguments and results, except dtypes of the same size."""
    leaves, structure = pytree.tree_flatten(values)
    seen = [(t.shape, t.stride(), t.element_size()) if isinstance(t, torch.Tensor) else type(t) for t in leaves]
    return *seen, structure


@pytest.mark.parametrize("name", sorted(library.OPERATORS))
def test_opcheck(device, name):
    """Tracing takes most of the time: formats with equal layouts are traced once, and `make test` traces three
    layouts."""
    op = library.OPERATORS[name]
    count, traced = 0, set()
    for sample in SAMPLES[name](device):
        args = flat(name, sample)
        # test_schema compares inputs by allclose, which fp8 does not have; test_inputs below stands in for it there
        fp8 = any(tensor.dtype in FP8_DTYPES for tensor in tensors(args))
        checks = CHECKS if fp8 else ("test_schema", *CHECKS)
        found = layout((args, op(*copy.deepcopy(args))))
        if found not in traced and (THOROUGH or len(traced) < 3):
            traced.add(found)
            checks = *checks, "test_aot_dispatch_dynamic"
        assert set(torch.library.opcheck(op, args, test_utils=checks).values()) == {"SUCCESS"}
        count += 1
    assert count >= len(ONE_D)


@pytest.mark.parametrize("name", sorted(library.OPERATORS))
def test_inputs_are_unmodified_and_outputs_are_new(device, name):
    op = library.OPERATORS[name]
    mutated = {
        index
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert bool(mutated) == name.endswith("_")
    for sample in SAMPLES[name](device):
        args = flat(name, sample)
        before = [[raw(tensor) for tensor in tensors((arg,))] for arg in copy.deepcopy(args)]
        results = op(*args)
        for index, (arg, kept) in enumerate(zip(args, before, strict=True)):
            if arg is None:
                continue
            same = all(torch.equal(raw(t), k) for t, k in zip(tensors((arg,)), kept, strict=True))
            assert same == (index not in mutated), op._schema.arguments[index].name
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors(args)} - {0}
        assert all(tensor.untyped_storage().data_ptr() not in storages for tensor in tensors((results,)))


@pytest.mark.parametrize("name", sorted(library.OPERATORS))
def test_schema_is_pt2_compliant(name):
    assert torch.Tag.pt2_compliant_tag in library.OPERATORS[name].tags
    assert library.OPERATORS[name].namespace == "blockscale"


@pytest.mark.parametrize("name", FORMATS)
def test_a_cast_in_place_gives_the_bytes_of_a_cast(device, name):
    def run(operator, *args):
        return library.OPERATORS[operator](*flat(operator, args))

    cast, first, second = as_cast(name), gaussian(40, 48, device=device), 7 * gaussian(40, 48, device=device)
    made, want = (run("quantize_both", x, cast, cast, None, False) for x in (first, second))
    casts_ops.requantize_both_(*buffers(made[0:3]), *buffers(made[3:6]), second, cast, cast)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(made[:6], want[:6], strict=True))
    for axis in (-1, -2):
        made, want = (run("quantize", x, cast, axis, None) for x in (first, second))
        casts_ops.requantize_(*buffers(made), second, cast, axis)
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(made, want, strict=True))


# ---- FLOPs ---------------------------------------------------------------------------------------------------------


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", FORMATS)
def test_flops_of_products(device, name):
    m, n, k = 33, 24, 70
    a = bs.quantize(gaussian(m, k, device=device), name)
    b = bs.quantize(gaussian(n, k, device=device), partner(name))
    acc = torch.zeros(m, n, device=device)
    bias = torch.zeros(n, device=device)
    assert flops(lambda: bs.scaled_mm(a, b)) == 2 * m * n * k
    assert flops(lambda: bs.scaled_mm(a, b, torch.float32, bias=bias)) == 2 * m * n * k
    assert flops(lambda: bs.scaled_mm(a, b, accumulate=acc)) == 2 * m * n * k
    assert flops(lambda: bs.scaled_mm(gaussian(m, k, device=device), b)) == 2 * m * n * k


@pytest.mark.parametrize("name", ONE_D)
def test_flops_of_grouped_products(device, name):
    """As if every row belonged to a group; k-grouped with the padding, since the sizes are not known on the host."""
    m, n, k, offs = 36, 24, 48, offsets([3, 0, 30], device)
    a, b = bs.quantize(gaussian(m, k, device=device), name), bs.quantize(gaussian(3, n, k, device=device), name)
    acc = torch.zeros(m, n, device=device)
    assert flops(lambda: bs.scaled_grouped_mm(a, b, offs)) == 2 * m * n * k
    assert flops(lambda: bs.scaled_grouped_mm(a, b, offs, accumulate=acc)) == 2 * m * n * k
    assert flops(lambda: bs.scaled_grouped_mm(a, b, offs, starts=offs)) == 2 * m * n * k
    assert flops(lambda: bs.scaled_grouped_mm(gaussian(m, k, device=device), b, offs)) == 2 * m * n * k
    a = bs.quantize(gaussian(m, n, device=device), name, axis=-2, offs=offs).mT
    b = bs.quantize(gaussian(m, k, device=device), name, axis=-2, offs=offs).mT
    acc = torch.zeros(3, n, k, device=device)
    padded = 512  # round_up(36 + 3 * 127, 128)
    assert flops(lambda: bs.scaled_grouped_mm(a, b, offs)) == 2 * n * k * padded
    assert flops(lambda: bs.scaled_grouped_mm(a, b, offs, accumulate=acc)) == 2 * n * k * padded


# ---- define_op -----------------------------------------------------------------------------------------------------


def test_outputs_start_poisoned(device):
    """Tests run with BLOCKSCALE_POISON, so a value that a kernel does not write is NaN and not stale memory."""
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        assert (raw(library.empty((3, 5), dtype, device)) == 0xFF).all()
    assert library.empty((), torch.float32, device).isnan()
    assert library.empty((0, 4), torch.float32, device).shape == (0, 4)


def test_fakes_allocate_what_the_bodies_allocate(device):
    """Shapes, dtypes and strides of a cast on the meta device."""
    for name in FORMATS:
        for axis in (-1, -2):
            real = bs.quantize(gaussian(40, 48, device=device), name, axis=axis)
            fake = bs.quantize(torch.empty(40, 48, dtype=torch.bfloat16, device="meta"), name, axis=axis)
            for part in ("data", "scale", "global_scale"):
                x, y = getattr(real, part), getattr(fake, part)
                assert (x is None) == (y is None)
                if x is not None:
                    assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


FUNCTIONS = {
    "combine_dots": routing.combine_dots,
    "combine_rows": routing.combine_rows,
    "grouped_mm": unquantized.grouped_mm,
    "permute_rows": routing.permute_rows,
    "sort_by_expert": routing._sort,
    "quantize": casts_ops.cast,
    "quantize_both": casts_ops.cast_both,
    "swiglu_quantize": fused.swiglu_cast,
    "swiglu_quantize_both": fused._swiglu_cast_both,
    "swiglu_backward_quantize_both": fused.swiglu_backward_cast,
    "rmsnorm_quantize": fused._rmsnorm_cast,
    "rmsnorm_quantize_both": fused._rmsnorm_cast_both,
    "permute_quantize_both": permuted.permute_cast_both,
    "permute_quantize_columns": permuted.permute_cast_columns,
    "quantize_permute": permuted.cast_permute,
    "dequantize": casts_ops.dequantize,
    "transpose_codes": transpose.transpose_codes,
    "scaled_mm": gemm_ops.scaled_mm,
    "scaled_grouped_mm": grouped_ops.scaled_grouped_mm,
    "weight_only_mm": gemm_weight_only.weight_only_mm,
    "weight_only_grouped_mm": grouped_weight_only.weight_only_grouped_mm,
}


class Dispatched(TorchDispatchMode):
    """Sends calls through the dispatcher, and counts our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += func.namespace == "blockscale"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in library.OPERATORS if not name.endswith("_")])
def test_the_direct_path_gives_what_the_operator_gives(device, name):
    """The operator returns an empty tensor where the body returns None."""
    for args in itertools.islice(SAMPLES[name](device), 3):
        direct = pytree.tree_leaves(FUNCTIONS[name](*args))
        with Dispatched() as mode:
            whole = pytree.tree_leaves(FUNCTIONS[name](*args))
        assert mode.operators == 1
        for got, want in zip(direct, whole, strict=True):
            if got is None:
                assert want is None or (want.shape, want.dtype) == ((0,), torch.float32)
            else:
                assert_same_bits(got, want)


@pytest.mark.parametrize("name", sorted(library.OPERATORS))
def test_arguments_survive_the_schema(device, name):
    """Flattened and rebuilt, operands and casts are what they were, except for the number of padded groups."""
    parameters = library.PARAMETERS[name]
    for args in SAMPLES[name](device):
        for given, rebuilt in zip(args, parameters.rebuild(*parameters.flatten(*args)), strict=True):
            if isinstance(given, bs.BlockScaled):
                assert vars(replace(given, groups=0)) == vars(rebuilt)
            elif isinstance(given, Cast):
                assert given == rebuilt
            else:
                assert given is rebuilt


def test_the_body_takes_an_operand_whole():
    """On the direct path it is neither taken apart nor rebuilt."""
    q = bs.quantize(torch.ones(4, 32), "mxfp4")

    @library.define_op(fake=lambda q: q.data.new_empty(()))
    def whole_operand_test(q: bs.BlockScaled) -> torch.Tensor:
        seen.append(q)
        return q.data.new_zeros(())

    seen: list[bs.BlockScaled] = []
    whole_operand_test(q)
    library.OPERATORS.pop("whole_operand_test")
    assert seen[0] is q


def test_results_do_not_require_grad_and_a_backward_raises():
    """Autograd lives above the operators; a backward through a bare operator must raise."""
    x = torch.randn(4, 32, requires_grad=True)
    y = bs.scaled_mm(bs.quantize(x, "mxfp8_e4m3"), bs.quantize(x, "mxfp8_e4m3"))
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()
    y = bs.scaled_mm(x, bs.quantize(x, "mxfp8_e4m3"))
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


def test_accumulation_bumps_the_version():
    """So that autograd detects a write to a saved tensor."""
    acc, q = torch.zeros(4, 4), bs.quantize(torch.ones(4, 32), "mxfp4")
    before = acc._version
    bs.scaled_mm(q, q, accumulate=acc)
    assert acc._version > before
