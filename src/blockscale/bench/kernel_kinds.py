"""Kinds of GPU kernels by their names: GEMMs ("products"), casts, attention, everything else."""

from __future__ import annotations

KINDS: tuple[str, ...] = ("products", "casts", "attention", "other")
# separates the name of one of our kernels from the operator that launched it
LAUNCHED_BY = " of "
# Substrings of kernel names: torch's attentions, our kernels, cuBLAS and CUTLASS. The first match decides: some
# attentions are CUTLASS kernels, and some GEMMs are called upcast_kernel.
_KERNELS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "products": ("gemm", "matmul", "nvjet", "cutlass", "splitk", "_mm_", "few_rows", "_finish_kernel"),
    "casts": ("cast_kernel", "amax_kernel", "colsum_kernel", "rstd_kernel", "quantize"),
}
# inductor's kernels: their names list every fused operator
_FUSED = ("triton_poi", "triton_red", "triton_per", "triton_for", "triton_mix")


def kernel_kind(name: str) -> str:
    """Kind of a kernel, from its name.

    >>> kernel_kind("nvjet_tst_128x256_64x4_h_bz_coopA_TNT"), kernel_kind("_cast_kernel"), kernel_kind("fused_adamw")
    ('products', 'casts', 'other')
    >>> kernel_kind("grouped_mm_upcast_kernel of scaled_grouped_mm"), kernel_kind("fmha_cutlassF_bf16")
    ('products', 'attention')
    >>> kernel_kind("triton_poi_fused__to_copy_mm_silu_3"), kernel_kind("_permute_rows_kernel of permute_quantize_both")
    ('other', 'other')
    """
    low = name.lower().partition(LAUNCHED_BY)[0]
    if low.startswith(_FUSED):
        return "other"
    return next((kind for kind, parts in _KERNELS.items() if any(part in low for part in parts)), "other")
