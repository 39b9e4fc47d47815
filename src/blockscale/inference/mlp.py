"""`QuantizedSwiGLU`: the MLP of `nn.SwiGLU` with frozen layers, whose activation is cast as it is computed."""

from __future__ import annotations

from torch import Tensor, nn

from ..autograd.mlp import swiglu
from ..autograd.operands import matrix
from ..nn.mlp import is_plain
from .frozen_layer import shaped
from .linear import QuantizedLinear


class QuantizedSwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) with the frozen layers `gate_up` [2 * hidden, dim], gates first, and `down`
    [dim, hidden].

    If `down` casts its input, silu(gate) * up is cast as in training by `nn.SwiGLU` (docs/numerics.md, section 16), and
    never written; else torch computes it.

    >>> import torch
    >>> parts = (QuantizedLinear(*sizes, weights="mxfp4", activations="mxfp8_e4m3") for sizes in ((64, 192), (96, 64)))
    >>> QuantizedSwiGLU(*parts)(torch.randn(2, 3, 64)).shape
    torch.Size([2, 3, 64])
    """

    def __init__(self, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        gate_up, down = self.gate_up(x), self.down
        if not isinstance(down, QuantizedLinear) or down.activations is None or not is_plain(down, QuantizedLinear):
            return down(swiglu(gate_up))
        hidden = down.casts.swiglu(matrix(gate_up), "fprop_x")
        return shaped(down.multiply(hidden, gate_up.dtype), gate_up)
