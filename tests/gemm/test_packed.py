"""Packed weights on the CPU: exact inverse, what cannot be packed, and the kernel's decoding by its instructions."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import blockscale as bs
from blockscale.errors import BlockscaleError
from blockscale.formats import BlockScaled
from blockscale.formats.decoding import decode_blocks, decode_codes
from blockscale.gemm import PackedWeight, exact_mm, pack_weight
from blockscale.gemm.packed import _BIT_OFFSETS, _BITS, MOST_EXPONENT, PACKABLE, packed_shapes
from blockscale.hardware import Capability
from support.ptx import run_ptx

every_format = pytest.mark.parametrize("name", PACKABLE)
SIZES = ((1, 1), (3, 64), (256, 256), (300, 2047), (576, 512), (577, 2880), (2304, 96))


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def weight(n: int, k: int, name: str) -> BlockScaled:
    """Rows of very different sizes, every code."""
    return bs.quantize(torch.randn(n, k) * torch.exp2(torch.randint(-8, 1, (n, 1)).float()), name)


def with_bytes(w: BlockScaled, codes: Tensor | None = None, scale: Tensor | None = None) -> BlockScaled:
    data = w.data if codes is None else codes.to(torch.uint8).view(w.data.dtype)
    return replace(w, data=data, scale=w.scale if scale is None else scale.to(torch.uint8).view(w.scale.dtype))


@every_format
def test_unpack_is_the_inverse(name: str) -> None:
    for n, k in SIZES:
        w = weight(n, k, name)
        packed = pack_weight(w)
        assert (packed.data.shape, packed.scale.shape) == packed_shapes(name, (n, k))
        again = packed.unpack()
        assert torch.equal(raw(again.data), raw(w.data))
        assert torch.equal(raw(again.scale), raw(w.plain_scale()))
        assert again.data.stride() == w.data.stride()
        assert again.global_scale is w.global_scale
        assert (again.format, again.shape, again.axis, again.scale_layout) == (name, (n, k), -1, "plain")


@every_format
def test_bytes_only_change_places(name: str) -> None:
    """Whole tiles: as many bits of each kind before as after. E2M1 moves bits, E4M3 bytes."""
    w = weight(512, 512, name)
    packed = pack_weight(w)
    if name == "mxfp8_e4m3":
        assert torch.equal(raw(w.data).flatten().sort().values, packed.data.flatten().sort().values)
    assert packed.data.numel() == raw(w.data).numel()
    count = [sum(int((part >> bit & 1).sum()) for bit in range(8)) for part in (raw(w.data), packed.data)]
    assert count[0] == count[1]


def test_every_scale_layout_packs_to_the_same_bytes() -> None:
    w = weight(300, 320, "mxfp4")
    assert torch.equal(pack_weight(w).scale, pack_weight(w.with_layout("blocked")).scale)


@every_format
def test_packed_weights_are_pytrees_and_can_be_saved(name: str) -> None:
    packed = pack_weight(weight(40, 96, name))
    leaves, spec = pytree.tree_flatten(packed)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, PackedWeight)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for other in (again, loaded, packed.to("cpu")):
        assert torch.equal(other.data, packed.data)
        assert torch.equal(raw(other.unpack().data), raw(packed.unpack().data))


@every_format
def test_products_of_packed_weights(name: str) -> None:
    """On the CPU a packed weight gives the bytes of the weight itself."""
    w, bias = weight(37, 96, name), torch.randn(37)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(3, 96).to(dtype)
        for out_dtype in (torch.bfloat16, torch.float32):
            for given in (None, bias):
                found = bs.scaled_mm(x, pack_weight(w), out_dtype, bias=given)
                assert torch.equal(found, bs.scaled_mm(x, w, out_dtype, bias=given))
    assert (bs.scaled_mm(x, pack_weight(w), torch.float32).double() - exact_mm(x, w)).abs().max() < 1e-3


# ---- what cannot be packed -------------------------------------------------------------------------------------------


def blocks_of_zeros() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [64, 64] of MXFP4: bytes of the whole range, and a block of zeros of byte 129."""
    codes, scale = torch.full((64, 32), 0x11), torch.full((64, 2), 127)
    codes[0, :16], scale[0, 0], scale[1, 0], scale[1, 1] = 0, 129, 0, 128
    return codes, scale


def refusals() -> list[tuple[str, BlockScaled]]:
    w4, wn, w8 = (bs.quantize(torch.randn(64, 64), name) for name in PACKABLE)
    nan = torch.full_like(raw(w4.scale), 127)
    nan[3, 1] = 0xFF
    wide = torch.full_like(raw(w4.scale), 200)
    wide[0, 0] = 60
    negative = raw(wn.scale).clone()
    negative[0, 0] = 0x80
    codes = raw(w8.data).clone()
    codes[5, 5] = 0xFF
    return [
        ("NaN (byte 0xFF)", with_bytes(w4, scale=nan)),
        ("lie between 2^-127 and 2^1", with_bytes(w4, torch.full((64, 32), 0x11), wide)),
        ("moved by at most 2^24", with_bytes(w4, torch.full((64, 32), 0x11), torch.full_like(wide, 153))),
        ("blocks of zeros 2^2 to 2^2", with_bytes(w4, *blocks_of_zeros())),
        ("NaN or negative", with_bytes(wn, scale=negative)),
        ("NaN codes", with_bytes(w8, codes)),
        ("w is mxfp6_e2m3", bs.quantize(torch.randn(64, 64), "mxfp6_e2m3")),
        ("rank 2 or w has shape", bs.quantize(torch.randn(2, 64, 64), "mxfp4")),
        ("pass w.mT", bs.quantize(torch.randn(64, 64), "mxfp4", axis=-2)),
        ("no rotation", bs.quantize(torch.randn(64, 64), bs.CastSpec("mxfp4", hadamard=True))),
    ]


@pytest.mark.parametrize("index", range(10))
def test_refusals_have_value_rule_and_fix(index: int) -> None:
    what, w = refusals()[index]
    with pytest.raises(BlockscaleError) as error:
        pack_weight(w)
    assert "Rule: " in str(error.value)
    assert "Fix: " in str(error.value)
    assert any(part in str(error.value) for part in what.split(" or w"))


def test_explain_knows_packed_weights() -> None:
    x, packed = torch.randn(2, 96).bfloat16(), pack_weight(weight(40, 96, "mxfp4"))
    found = {each.backend: each for each in bs.explain("gemm", x, packed).candidates}
    assert found["torch"].taken
    assert found["torch"].conversions == ("mxfp4 scales packed -> plain",)
    if "hopper_weights" in found:
        here = bs.explain("gemm", x, packed, on=Capability("cuda", 90)).candidates
        reason = next(each.reason for each in here if each.backend == "hopper_weights")
        assert reason == "able, but only if forced"


def test_packed_bytes_may_start_anywhere_in_a_buffer() -> None:
    """As views into a file do."""
    q = weight(40, 96, "mxfp4")
    packed = pack_weight(q)
    buffer = torch.zeros(packed.data.numel() + 1, dtype=torch.uint8)
    buffer[1:] = packed.data.flatten()
    moved = replace(packed, data=buffer[1:].view(packed.data.shape))
    assert torch.equal(raw(moved.unpack().data), raw(packed.unpack().data))


def test_a_packed_weight_moves_and_is_not_converted() -> None:
    packed = pack_weight(weight(40, 96, "mxfp4"))
    assert packed.to("cpu").data.dtype == torch.uint8
    with pytest.raises((TypeError, RuntimeError)):
        packed.to(torch.float16)  # pyright: ignore[reportArgumentType]


def test_a_weight_is_checked_before_a_product() -> None:
    packed, scaled = (pack_weight(weight(40, 96, name)) for name in ("mxfp4", "nvfp4"))
    x = torch.randn(2, 96)
    for wrong, given in (
        (x[:, :64], packed),
        (x.int(), packed),
        (x[0], packed),
        (x, replace(packed, data=packed.data[:, :1])),
        (x, replace(packed, shape=(500, 96))),
        (x, replace(packed, global_scale=torch.ones(()))),
        (x, replace(packed, exponent=3)),
        (x, replace(scaled, global_scale=None)),
        (x, replace(scaled, global_scale=torch.ones(40))),
        (x, replace(scaled, global_scale=torch.ones((), dtype=torch.bfloat16))),
        (x, replace(scaled, global_scale=torch.ones((), device="meta"))),
        (bs.quantize(x, "mxfp4"), packed),
    ):
        with pytest.raises(BlockscaleError):
            bs.scaled_mm(wrong, given)
    with pytest.raises(BlockscaleError):
        bs.scaled_mm(x, packed, accumulate=torch.zeros(2, 40))


# ---- decoding, as the kernel does it ---------------------------------------------------------------------------------


def _kernel():
    return pytest.importorskip("blockscale.gemm._hopper_weights_kernel", reason="this Triton has no Gluon for Hopper")


def bf16_of(bits: Tensor) -> Tensor:
    """Low 16 bits as bf16, in fp64."""
    return (bits & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16).double()


def test_every_half_of_e2m1_codes() -> None:
    """All 65,536 halves beside several others: the four codes at `_BIT_OFFSETS`, times four different scales."""
    assembly = _kernel().E2M1_ASM.value
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat([table, -table])
    every = torch.arange(65536)
    # factors of 2^126: exponent fields 253 + 0, -1, -2 and -3
    scales = [0x7E80, 0x7E00, 0x7D80, 0x7D00]
    even, odd = scales[0] | scales[2] << 16, scales[1] | scales[3] << 16
    for other in (0, 0xFFFF, 0x5A5A, every.flip(0), torch.randint(0, 65536, (65536,))):
        for words in (every | other << 16, other | every << 16):
            found = run_ptx(assembly, 4, words, *(torch.tensor(each) for each in (even, even, odd, odd)))
            for i, offsets in enumerate(_BIT_OFFSETS):
                for half in range(2):
                    code = torch.zeros_like(words)
                    for bit, (place, offset) in enumerate(zip(_BITS, offsets, strict=True)):
                        code |= (words >> (place + 16 * half + offset) % 32 & 1) << bit
                    assert torch.equal(bf16_of(found[i] >> 16 * half), table[code] * 2.0**-i), (i, half)


def test_bits_of_e2m1_codes_do_not_overlap() -> None:
    places = [
        (place + 16 * half + offset) % 32
        for offsets in _BIT_OFFSETS for half in range(2) for place, offset in zip(_BITS, offsets, strict=True)
    ]  # fmt: skip
    assert sorted(places) == list(range(32))


def test_every_half_of_e4m3_codes() -> None:
    assembly = _kernel().E4M3_ASM.value
    every = torch.arange(65536)
    table = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double()
    finite = ~(table[every & 0xFF].isnan() | table[every >> 8].isnan())
    every = every[finite]
    scale = torch.tensor(0x7B80 | 0x7B00 << 16)  # 2^120 and 2^119
    for words, half in ((every | 0x3800 << 16, 0), (0x38 | every << 16, 1)):
        low, high = (bf16_of(each >> 16 * half) for each in run_ptx(assembly, 2, words, scale, scale))
        assert torch.equal(low, table[every & 0xFF])
        assert torch.equal(high, table[every >> 8] / 2)


def test_every_e4m3_scale() -> None:
    """All but NaN and negative ones: 2^118 times their value, in each place of a word."""
    assembly = _kernel().E4M3_SCALE_ASM.value
    codes = torch.arange(0x7F)
    want = codes.to(torch.uint8).view(torch.float8_e4m3fn).double() * 2.0**118
    for byte in range(4):
        words = codes << 8 * byte
        bits = (words << 4 if byte % 2 == 0 else words >> 4) & 0x07F007F0
        (found,) = run_ptx(assembly, 1, bits)
        assert torch.equal(bf16_of(found >> 8 * (byte // 2 * 2)), want)


def decoded(packed: PackedWeight) -> Tensor:
    """All tiles as the consumers of the kernel decode them, with the kernel's reshapes and its assembly: bf16 values in
    fp64, [padded N, padded K]."""
    kernel, (tiles, blocks, _) = _kernel(), packed.data.shape
    loads = 2 if packed.format == "mxfp8_e4m3" else 1
    per_row = 2 if packed.format == "nvfp4" else 1
    codes = packed.data.view(torch.int16).view(tiles, blocks, 4, 2, 4 * loads, 256).long() & 0xFFFF
    scales = packed.scale.view(torch.int32).view(tiles, blocks, 4, per_row, 64).long() & 0xFFFFFFFF
    out = torch.empty(tiles, 4, 64, blocks, 2, 64, dtype=torch.float64)
    for tile in range(tiles):
        for block in range(blocks):
            for group in range(4):
                for chunk in range(2):
                    w = _chunk(
                        kernel, packed.format, codes[tile, block, group, chunk], scales[tile, block, group], chunk
                    )
                    out[tile, group, :, block, chunk] = w
    return out.view(tiles * 256, blocks * 128)


def _chunk(kernel, name: str, codes: Tensor, scales: Tensor, chunk: int) -> Tensor:
    """`_weights` of the kernel, on whole tensors."""
    if name == "mxfp8_e4m3":
        h = codes.reshape(2, 4, 8, 4, 2, 2, 2).permute(1, 5, 2, 0, 4, 3, 6).reshape(64, 32)
    else:
        h = codes.reshape(4, 8, 4, 2, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(64, 16)
    words = h[:, 0::2] | h[:, 1::2] << 16  # pack=2 of the inline assembly
    s = scales[chunk if name == "nvfp4" else 0].reshape(4, 8, 2).permute(0, 2, 1).reshape(64, 1)
    if name == "nvfp4":
        pairs = [run_ptx(kernel.E4M3_SCALE_ASM.value, 1, bits & 0x07F007F0)[0] for bits in (s << 4, s >> 4)]
    else:
        pairs = [(s << 7 if chunk == 0 else s >> 1) & 0x7F807F80] * 2
    if name == "mxfp8_e4m3":
        found = run_ptx(kernel.E4M3_ASM.value, 2, words, pairs[0], pairs[0])
    else:
        found = run_ptx(kernel.E2M1_ASM.value, 4, words, pairs[0], pairs[0], pairs[1], pairs[1])
    halves = [torch.stack([bf16_of(each), bf16_of(each >> 16)], -1).reshape(64, -1) for each in found]
    if name == "mxfp8_e4m3":
        return torch.stack(halves, -1).permute(0, 2, 1).reshape(64, 64)
    joined = torch.stack([torch.stack(halves[:2], -1), torch.stack(halves[2:], -1)], -1)
    return joined.permute(0, 3, 2, 1).reshape(64, 64)


def check_decoding(w: BlockScaled) -> None:
    packed = pack_weight(w)
    n, k = packed.shape
    found = decoded(packed)
    factor = 2.0**-8 if w.format == "nvfp4" else 2.0**-packed.exponent
    assert torch.equal(found[:n, :k], decode_blocks(w).double() * factor)
    assert not found[n:].any()
    assert not found[:, k:].any()


@every_format
def test_the_kernel_decodes_every_value(name: str) -> None:
    for n, k in ((256, 256), (300, 288), (7, 33)):
        check_decoding(weight(n, k, name))


@pytest.mark.parametrize(("name", "least", "most"), [("mxfp4", 0, 128), ("mxfp8_e4m3", 3, 134)])
def test_scale_bytes_decode_exactly(name: str, least: int, most: int) -> None:
    """Every byte that needs no exponent, and the ends of ranges that do, with every code."""
    w = bs.quantize(torch.randn(256, 256), name)
    codes = torch.arange(256).repeat(256, raw(w.data).shape[1] // 128)[:, : raw(w.data).shape[1]]
    if name == "mxfp8_e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0
    span = torch.arange(256 * 8).view(256, 8) % (most - least + 1)
    for low in (least, MOST_EXPONENT if name == "mxfp4" else 0):
        bytes_ = low + span
        given = with_bytes(w, codes, bytes_)
        packed = pack_weight(given)
        assert packed.exponent == (low - least if low != least else 0)
        assert torch.equal(raw(packed.unpack().scale), bytes_.to(torch.uint8))
        # beyond fp32 for the largest scales: codes and exponents apart
        values = decode_codes(given).double() * torch.exp2(bytes_.double() - 127).repeat_interleave(32, 1)
        assert torch.equal(decoded(packed), values * 2.0**-packed.exponent)
        if packed.exponent:
            assert packed.global_scale is not None
            assert float(packed.global_scale) == 2.0**packed.exponent


def test_blocks_of_zeros_may_have_any_scale() -> None:
    w = bs.quantize(torch.zeros(64, 256), "mxfp4")
    for least in (0, 100):
        scale = torch.arange(64 * 8).view(64, 8) % 40 + least
        codes = torch.zeros(64, 128)
        codes[:, :16] = 0x22  # one block of values, of scale 1
        scale[:, 0] = 127
        given = with_bytes(w, codes, scale)
        packed = pack_weight(given)
        assert torch.equal(raw(packed.unpack().scale), scale.to(torch.uint8))
        check_decoding(given)
