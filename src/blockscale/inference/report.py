"""Report of a frozen or loaded model: the conversion's, with bytes in place of a prediction for training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..nn import ConversionReport
from ..nn.report import short_count


@dataclass(frozen=True)
class FrozenReport(ConversionReport):
    """What `freeze_` or `load` did.

    converted: frozen layers, each with its formats as note.  skipped: the other linear layers, with the reason.
    bytes_before, bytes_after: of all parameters and buffers; of a loaded model before: of its files.
    """

    _DONE: ClassVar[str] = "frozen"
    bytes_before: int = 0
    bytes_after: int = 0

    def _totals(self) -> list[str]:
        share = f"share: {100 * self.parameter_share:.1f} % of parameters"
        sizes = f"bytes: {short_count(self.bytes_before)} before, {short_count(self.bytes_after)} after"
        return [share, sizes]


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied ones count once, lazy ones not at all."""
    every: Iterable[Tensor] = (*model.parameters(), *model.buffers())
    tensors = (each for each in every if not isinstance(each, UninitializedParameter))
    held = {id(each) if each.is_meta else (each.data_ptr(), each.shape): each for each in tensors}
    return sum(each.numel() * each.element_size() for each in held.values())
