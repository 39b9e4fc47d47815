"""`PackedWeight`: a block-scaled weight in the order in which the weight-only kernel of Hopper reads it.

Bytes and bits change places; `unpack` is the exact inverse. A **tile** is 256 rows by a **block** of 128 of K. Within
it the order is: group of 64 rows, chunk of 64 of K, then the 32-bit words of the threads, so that each loads 16 bytes.
N and K are padded with zero codes to multiples of 256.

E2M1: a word holds eight codes: code i = 0 to 3 of half h = 0, 1 is k = 16 i + 2 j + h of its chunk, j = 0 to 7. The
bits of a code lie where one shift or rotation, or two, bring them to sign, exponent and mantissa of bf16
(`_BIT_OFFSETS`). E4M3: a word holds k = 32 i + 2 j + h, j = 0 to 15, in byte i of half h.

E8M0 scales are stored as the exponent field of a bf16 factor, which is finite for scale bytes to 128 (E2M1) or 134
(E4M3). A weight with greater ones is stored 2^exponent times smaller, and the tensor scale restores it. The exponent is
at most 24, since products with a smaller weight underflow 2^exponent earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from ..errors import AxisError, LayoutError, ShapeError, refuse
from ..formats.layout import ceil_div, code_row_bytes, shorten
from ..formats.packing import pack_fp4, unpack_fp4
from ..formats.spec import get_format
from ..formats.tensor import BlockScaled, check_block_scaled, check_is_block_scaled

TILE_ROWS = 256
BLOCK = 128
K_UNIT = 256  # K is padded to it; a unit of work of the kernel


# of 2^exponent by which a weight is stored smaller or larger
MOST_EXPONENT = 24


class _Scales(NamedTuple):
    """Range of E8M0 bytes that decode exactly, and what is added to a byte to get the exponent field of its factor."""

    least: int
    most: int
    offset: int


# The bit pattern of a code is 2^-126 (E2M1) or 2^-120 (E4M3) times its value. Factors are at most 2^127, and the least
# code times its scale, 2^-1 or 2^-9 times 2^(byte - 127), at least 2^-133, the least bf16.
_E8M0 = {"mxfp4": _Scales(0, 128, 126), "mxfp8_e4m3": _Scales(3, 134, 120)}
PACKABLE = ("mxfp4", "nvfp4", "mxfp8_e4m3")
PACKED_LAYOUT = "packed"  # in requests, beside the scale layouts of `formats`


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """A weight [N, K] in the order of the weight-only kernel.

    data: codes, uint8 [tiles, blocks, bytes of a tile].  scale: block scales, uint8 [tiles, blocks, bytes of a tile].
    global_scale: fp32 factor [] of the decoded weight: NVFP4's, or 2^exponent.  exponent: of an MX weight that is
    stored 2^exponent times smaller, else 0.

    >>> import torch, blockscale as bs
    >>> w = bs.quantize(torch.ones(3, 96), "mxfp4")
    >>> bs.scaled_mm(torch.ones(1, 96), bs.pack_weight(w))
    tensor([[96., 96., 96.]], dtype=torch.bfloat16)
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    format: str
    shape: tuple[int, int]
    exponent: int = 0

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def rows(self) -> int:
        """N."""
        return self.shape[0]

    @property
    def length(self) -> int:
        """K."""
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return self.data.numel() + self.scale.numel() + (0 if self.global_scale is None else 4)

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""
        device = torch.device(device)
        scale = None if self.global_scale is None else self.global_scale.to(device)
        return replace(self, data=self.data.to(device), scale=self.scale.to(device), global_scale=scale)

    def unpack(self) -> BlockScaled:
        """The weight that was packed: the same codes and scale bytes, plain scales."""
        spec, (rows, length) = get_format(self.format), self.shape
        fp4 = spec.codes_per_byte == 2
        codes = torch.cat([_unpack_e2m1(part) if fp4 else _unpack_e4m3(part) for part in _slabs(self.data)])
        codes = codes[:rows, :length]
        data = pack_fp4(codes) if fp4 else codes
        data = pad(data, (0, code_row_bytes(spec, length) - data.shape[1])).contiguous()
        data = shorten(data, ceil_div(length, spec.codes_per_byte)).view(spec.data_dtype)
        scale = _unpack_scale(self.scale, self.format)[:rows, : ceil_div(length, spec.granule)]
        if spec.family == "mx":
            scale = scale - (_E8M0[self.format].offset - self.exponent)
        scale = scale.contiguous().view(spec.scale_dtype)
        return BlockScaled(
            data, scale, self.global_scale if spec.family == "nvfp4" else None, self.format, -1, "plain", self.shape
        )

    def __repr__(self) -> str:
        exponent = f", stored 2^{-self.exponent} times" if self.exponent else ""
        return f"PackedWeight({self.format} {self.shape}{exponent}, {self.device})"


def packed_shapes(format: str, shape: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of `data` and `scale` of a packed weight [N, K].

    >>> packed_shapes("mxfp4", (576, 2880))
    ((3, 24, 16384), (3, 24, 1024))
    """
    spec, tiles = get_format(format), ceil_div(shape[0], TILE_ROWS)
    blocks = ceil_div(shape[1], K_UNIT) * (K_UNIT // BLOCK)
    values = TILE_ROWS * BLOCK
    return (tiles, blocks, values // spec.codes_per_byte), (tiles, blocks, values // spec.granule)


def _flatten(w: PackedWeight) -> tuple[list[Tensor], tuple[object, ...]]:
    leaves = [w.data, w.scale] if w.global_scale is None else [w.data, w.scale, w.global_scale]
    return leaves, (w.format, w.shape, w.exponent)


def _unflatten(leaves: Sequence[Tensor], meta: tuple[object, ...]) -> PackedWeight:
    data, scale, *rest = leaves
    return PackedWeight(data, scale, rest[0] if rest else None, *meta)  # pyright: ignore[reportArgumentType]


pytree.register_pytree_node(
    PackedWeight,
    _flatten,  # pyright: ignore[reportArgumentType]
    _unflatten,  # pyright: ignore[reportArgumentType]
    serialized_type_name="blockscale.PackedWeight",
)
torch.serialization.add_safe_globals([PackedWeight])


def pack_weight(w: BlockScaled) -> PackedWeight:
    """Pack a weight [N, K] of MXFP4, NVFP4 or MXFP8 (E4M3) for the weight-only kernel of Hopper.

    Waits for the device: weights that the kernel could not decode exactly are refused.

    >>> import torch, blockscale as bs
    >>> w = bs.quantize(torch.randn(3, 64), "mxfp4")
    >>> packed = bs.pack_weight(w)
    >>> packed
    PackedWeight(mxfp4 (3, 64), cpu)
    >>> torch.equal(packed.unpack().data.view(torch.uint8), w.data.view(torch.uint8))
    True
    """
    _check(w)
    spec, (rows, length) = w.spec, w.shape
    fp4 = spec.codes_per_byte == 2
    raw = w.data.view(torch.uint8)
    blocks = w.plain_scale().view(torch.uint8)
    exponent, global_scale = 0, w.global_scale
    if spec.family == "mx":
        exponent = _shared_exponent(w.format, blocks, _largest_magnitudes(raw, fp4, length))
        if exponent:
            global_scale = torch.tensor(2.0**exponent, device=w.device)
        blocks = blocks + (_E8M0[w.format].offset - exponent)  # modulo 256
    elif bool((blocks >= 0x7F).any()):
        refuse(
            "a block scale of the NVFP4 weight is NaN or negative",
            "packed weights have scales 0 to 448",
            "find where the checkpoint is damaged, or leave the weight unpacked",
        )
    if not fp4 and bool(((raw & 0x7F) == 0x7F).any()):
        refuse(
            f"the {w.format} weight has NaN codes",
            "packed weights are finite",
            "find where the checkpoint is damaged, or leave the weight unpacked",
        )
    down, across = -rows % TILE_ROWS, -length % K_UNIT
    step = 8 * TILE_ROWS  # rows at a time, so that the integers in between stay small
    packed: list[Tensor] = []
    for first in range(0, rows, step):
        codes = raw[first : first + step]
        codes = unpack_fp4(codes, length) if fp4 else codes
        codes = pad(codes, (0, across, 0, -codes.shape[0] % TILE_ROWS))
        packed.append(_pack_e2m1(codes) if fp4 else _pack_e4m3(codes))
    columns = (length + across) // spec.granule - blocks.shape[1]
    scale = _pack_scale(pad(blocks, (0, columns, 0, down)), w.format)
    data = torch.cat(packed)
    if data.is_cuda:  # the kernel reads weights before the kernel in front has ended
        torch.cuda.current_stream(data.device).synchronize()
    return PackedWeight(data, scale, global_scale, w.format, (rows, length), exponent)


def _check(w: BlockScaled) -> None:
    """Raise unless the weight has a format, shape and axis that can be packed."""
    check_is_block_scaled(w, "w", "pack_weight")
    check_block_scaled(w, "w")
    if w.format not in PACKABLE:
        rule = f"packed weights are {', '.join(PACKABLE)}"
        refuse(f"w is {w.format}", rule, "leave it unpacked: products take every format", error=LayoutError)
    if len(w.shape) != 2 or 0 in w.shape:
        rule, fix = "a packed weight is a matrix [N, K] that is not empty", "pack matrices one by one"
        refuse(f"w has shape {tuple(w.shape)}", rule, fix, error=ShapeError)
    if w.axis != -1:
        rule = "blocks of a weight [N, K] run along K"
        refuse(f"w {tuple(w.shape)} is scaled along axis {w.axis}", rule, "pass w.mT", error=AxisError)
    if w.hadamard is not None or w.group_align:
        rule, fix = "a packed weight has no rotation and no groups of tokens", "cast it without hadamard and offs"
        refuse(f"w is {w}", rule, fix)
    if w.global_scale is not None and w.global_scale.dim():
        rule, fix = "a packed weight has one tensor scale", "pack each row range by itself"
        refuse(f"w has {w.global_scale.numel()} tensor scales", rule, fix)


def _largest_magnitudes(raw: Tensor, fp4: bool, length: int) -> Tensor:
    """Largest code of each block of 32 without its sign, uint8 [N, blocks]; 0 for a block of zeros."""
    size = 16 if fp4 else 32  # bytes
    blocks = ceil_div(length, 32)
    if fp4 and length % 2:
        raw = torch.cat([raw[:, :-1], raw[:, -1:] & 0xF], dim=1)
    magnitudes = pad(raw & (0x77 if fp4 else 0x7F), (0, blocks * size - raw.shape[1]))
    return magnitudes.unflatten(1, (blocks, size)).amax(-1)


def _shared_exponent(format: str, scales: Tensor, magnitudes: Tensor) -> int:
    """The least exponent, 0 if possible, for which every scale byte minus it is in the exact range of the format."""
    least, most, offset = _E8M0[format]
    if bool((scales == 0xFF).any()):
        refuse(
            f"a block scale of the {format} weight is NaN (byte 0xFF)",
            "packed weights are finite",
            "find where the checkpoint is damaged, or leave the weight unpacked",
        )
    # a block of zeros may have any scale but the one whose exponent field would be that of infinity
    used, idle = scales[magnitudes > 0], scales[magnitudes == 0].unique().tolist()
    lowest, highest = (int(used.min()), int(used.max())) if used.numel() else (least, least)
    fitting = range(max(highest - most, -MOST_EXPONENT), min(lowest - least, MOST_EXPONENT) + 1)
    for exponent in sorted(fitting, key=abs):
        if all((byte + offset - exponent) % 256 != 255 for byte in idle):
            return exponent
    what = f"block scales of the {format} weight are 2^{lowest - 127} to 2^{highest - 127}"
    if fitting:
        what += f", and those of blocks of zeros 2^{min(idle) - 127} to 2^{max(idle) - 127}"
    return refuse(
        what,
        f"scales of a packed {format} weight lie between 2^{least - 127} and 2^{most - 127}, all moved by at most "
        f"2^{MOST_EXPONENT}",
        "leave the weight unpacked, or split it by rows",
    )


# ---- order of codes and scales ---------------------------------------------------------------------------------------

# Rows of a tile: group, warp, high bit, lane / 4. Columns of a block: chunk, code i, then the word's column.
# Bit p of the bf16 pattern of code i (mantissa 6, exponent 7 and 8, sign 15) lies _BIT_OFFSETS[i][p] higher, modulo 32.
_BITS = (6, 7, 8, 15)
_BIT_OFFSETS = ((0, 0, 0, 0), (4, 4, 4, 4), (-6, -6, -6, -6), (-2, 6, 6, 6))


def _e2m1_bits() -> Iterator[tuple[int, int, int, int]]:
    """(code, half, bit of the code, bit of the word) of every bit of a word."""
    for i, offsets in enumerate(_BIT_OFFSETS):
        for half in range(2):
            for bit, (place, offset) in enumerate(zip(_BITS, offsets, strict=True)):
                yield i, half, bit, (place + 16 * half + offset) % 32


def _slabs(data: Tensor) -> Iterator[Tensor]:
    """Packed codes, some tiles at a time."""
    for first in range(0, data.shape[0], 8):
        yield data[first : first + 8]


def _pack_e2m1(codes: Tensor) -> Tensor:
    """Codes, uint8 [N, K] -> uint8 [tiles, blocks, 16384]."""
    n, k = codes.shape
    # tile, group, warp, high bit, lane / 4 | block, chunk, code, bit 2, lane % 4, half
    c = codes.view(n // 256, 4, 4, 2, 8, k // 128, 2, 4, 2, 4, 2).to(torch.int32)
    words = torch.zeros_like(c[..., 0, :, :, 0])
    for i, half, bit, place in _e2m1_bits():
        words |= (c[..., i, :, :, half] >> bit & 1) << place
    words = words.permute(0, 5, 1, 6, 2, 4, 8, 7, 3).contiguous()
    return words.view(n // 256, k // 128, -1).view(torch.uint8)


def _unpack_e2m1(data: Tensor) -> Tensor:
    """Inverse of `_pack_e2m1`."""
    tiles, blocks, _ = data.shape
    data = data.clone() if data.storage_offset() % 4 else data  # a view into the bytes of a file
    words = data.contiguous().view(torch.int32).view(tiles, blocks, 4, 2, 4, 8, 4, 2, 2)
    words = words.permute(0, 2, 4, 8, 5, 1, 3, 7, 6)
    codes = torch.zeros(*words.shape[:7], 4, 2, 4, 2, dtype=torch.uint8, device=data.device)
    for i, half, bit, place in _e2m1_bits():
        codes[..., i, :, :, half] |= ((words >> place & 1) << bit).to(torch.uint8)
    return codes.view(tiles * 256, blocks * 128)


def _pack_e4m3(codes: Tensor) -> Tensor:
    """Codes, uint8 [N, K] -> uint8 [tiles, blocks, 32768]."""
    n, k = codes.shape
    # tile, group, warp, high bit, lane / 4 | block, chunk, code, load, bit 2, lane % 4, half
    c = codes.reshape(n // 256, 4, 4, 2, 8, k // 128, 2, 2, 2, 2, 4, 2)
    return c.permute(0, 5, 1, 6, 8, 2, 4, 10, 9, 3, 11, 7).contiguous().view(n // 256, k // 128, -1)


def _unpack_e4m3(data: Tensor) -> Tensor:
    """Inverse of `_pack_e4m3`."""
    tiles, blocks, _ = data.shape
    c = data.view(tiles, blocks, 4, 2, 2, 4, 8, 4, 2, 2, 2, 2)
    return c.permute(0, 2, 5, 9, 6, 1, 3, 11, 4, 8, 7, 10).reshape(tiles * 256, blocks * 128)


def _pack_scale(scale: Tensor, format: str) -> Tensor:
    """Scales, uint8 [N, K / 32 or K / 16] -> uint8 [tiles, blocks, 1024 or 2048]: four bytes per row and block (MX) or
    chunk (NVFP4). The kernel takes bytes 0 and 2 of a word at once, and 1 and 3: MX has a chunk in each pair."""
    n = scale.shape[0]
    rows = (n // 256, 4, 4, 2, 8)
    if format == "nvfp4":  # tile, group, warp, high bit, lane / 4 | block, chunk, byte
        s = scale.view(*rows, -1, 2, 4).permute(0, 5, 1, 6, 2, 4, 3, 7)
    else:  # ... | block, chunk, byte
        s = scale.view(*rows, -1, 2, 2).permute(0, 5, 1, 2, 4, 3, 7, 6)
    return s.contiguous().view(n // 256, s.shape[1], -1)


def _unpack_scale(scale: Tensor, format: str) -> Tensor:
    """Inverse of `_pack_scale`."""
    tiles, blocks, _ = scale.shape
    if format == "nvfp4":
        s = scale.view(tiles, blocks, 4, 2, 4, 8, 2, 4).permute(0, 2, 4, 6, 5, 1, 3, 7)
    else:
        s = scale.view(tiles, blocks, 4, 4, 8, 2, 2, 2).permute(0, 2, 3, 5, 4, 1, 7, 6)
    return s.reshape(tiles * 256, -1)
