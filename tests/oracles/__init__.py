"""Independent oracles for the numerics contract (`docs/numerics.md`, sections 1 to 10).

Nothing here imports `blockscale`. The rounding of values is done by `ml_dtypes`, scales are exact float64
comparisons cross-checked with `onnx`, and MX blocks can be redone by `gfloat` (exact and slow). Where a
library deviates from the contract, the function that uses it says so and corrects it; nothing else is allowed
to differ.

Arrays are numpy: float32 in, uint8 codes and scale bytes out. Third-party packages load on first use; a missing
one raises `OracleUnavailable`, an `ImportError`, which a test turns into a skip.
"""

from .elements import E8M0_NAN, ELEMENTS, NAN32, Element, decode, e8m0_decode, encode, grid, spec, to_bf16
from .inputs import (
    all_bf16,
    edge_blocks,
    edge_values,
    fp8_edge_blocks,
    nvfp4_edge_tensors,
    random_blocks,
)
from .layouts import (
    blocked_offset,
    mn_major,
    mn_major_index,
    pack_fp4,
    pack_fp6,
    swizzle_32_4_4,
    unpack_fp4,
    unpack_fp6,
)
from .rounding import (
    HADAMARD_MASKS,
    encode_sr,
    gfloat_encode_sr,
    hadamard,
    philox4x32,
    plain_module_name,
    sr_bits,
    stream_id,
)
from .scales import (
    MX_RULES,
    Nvfp4Scales,
    block_amax,
    fp8_dequantize,
    fp8_quantize,
    fp8_scales,
    from_blocks,
    gfloat_mx_block,
    mx_dequantize,
    mx_quantize,
    mx_scale,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_scales,
    onnx_mx_scale,
    to_blocks,
)
from .third_party import OracleUnavailable, third_party

__all__ = [
    "E8M0_NAN",
    "ELEMENTS",
    "HADAMARD_MASKS",
    "MX_RULES",
    "NAN32",
    "Element",
    "Nvfp4Scales",
    "OracleUnavailable",
    "all_bf16",
    "block_amax",
    "blocked_offset",
    "decode",
    "e8m0_decode",
    "edge_blocks",
    "edge_values",
    "encode",
    "encode_sr",
    "fp8_dequantize",
    "fp8_edge_blocks",
    "fp8_quantize",
    "fp8_scales",
    "from_blocks",
    "gfloat_encode_sr",
    "gfloat_mx_block",
    "grid",
    "hadamard",
    "mn_major",
    "mn_major_index",
    "mx_dequantize",
    "mx_quantize",
    "mx_scale",
    "nvfp4_dequantize",
    "nvfp4_edge_tensors",
    "nvfp4_quantize",
    "nvfp4_scales",
    "onnx_mx_scale",
    "pack_fp4",
    "pack_fp6",
    "philox4x32",
    "plain_module_name",
    "random_blocks",
    "spec",
    "sr_bits",
    "stream_id",
    "swizzle_32_4_4",
    "third_party",
    "to_bf16",
    "to_blocks",
    "unpack_fp4",
    "unpack_fp6",
]
