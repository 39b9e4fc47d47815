"""Transformer blocks of whole models, for the model of several GPUs. Apart from `shapes.py`, which imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from ..roofline import Block

# blocks of whole models; two shared experts of DeepSeek 16B are one gated MLP, as in the model
_LATENT = ((2048, 3072), (2048, 576), (512, 4096), (2048, 2048))
BLOCKS: Mapping[str, tuple[Block, ...]] = {
    "Llama3 8B": (Block(32, ((4096, 6144), (4096, 4096)), (4096, 14336)),),
    "DeepSeek 16B": (
        Block(1, _LATENT, (2048, 10944)),
        Block(26, _LATENT, (2048, 2816), experts=64, top_k=6, expert=(2048, 1408)),
    ),
}
