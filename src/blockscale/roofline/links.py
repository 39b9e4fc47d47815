"""Links between GPUs: bandwidth of one GPU in one direction, latency of a collective, and the basis of both figures.

This project has run on several CPU ranks and one GPU, so no link between GPUs was measured by it. `kind` says what a
bandwidth is: "measured" by copies between a GPU and its host, "fitted" to published times of overlapped products,
"published" by a library's authors, or "assumed", a share of the specification. Latencies are assumed, all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import check_name

Kind = Literal["measured", "fitted", "published", "assumed"]


@dataclass(frozen=True)
class Link:
    """A link of one GPU.  bandwidth: bytes per second that one direction sustains.  nominal: the specification's.
    latency: seconds of a collective without bytes.  kind: basis of the bandwidth.  source: origin of the figures."""

    name: str
    bandwidth: float
    nominal: float
    latency: float
    kind: Kind
    source: str

    def __str__(self) -> str:
        figures = f"{self.bandwidth / 1e9:,.0f} GB/s each way ({self.kind}, of {self.nominal / 1e9:,.0f})"
        return f"{self.name}: {figures}, {self.latency * 1e6:.0f} µs a collective (assumed)"


def _link(name: str, gb_s: float, nominal: float, us: float, kind: Kind, source: str) -> Link:
    return Link(name, gb_s * 1e9, nominal * 1e9, us * 1e-6, kind, source)


LINKS: Mapping[str, Link] = {
    "nvlink3": _link(
        "NVLink 3 of an A100", 230, 300, 20, "assumed", "three quarters of the specification, until it is measured"
    ),
    "nvlink4": _link(
        "NVLink 4 of an H100 or H200", 370, 450, 20, "assumed",
        "four fifths of the specification, until it is measured; overlapped products published by PyTorch's "
        "symmetric-memory recipes fit 300",
    ),
    "nvlink4-h800": _link(
        "NVLink 4 of an H800", 180, 200, 20, "fitted",
        "between 160 and 195, which fit the times of overlapped products in the paper on Flux; DeepEP publishes 153 to "
        "158 by copies of SMs",
    ),
    "nvlink5": _link("NVLink 5 of a B200", 643, 900, 20, "published", "the lower of DeepEP's 643 to 740"),
    "pcie4": _link(
        "PCIe 4 x16 of an L20", 21, 32, 30, "fitted", "the times of overlapped products in the paper on Flux"
    ),
    "pcie5": _link(
        "PCIe 5 x16", 55, 63, 30, "measured",
        "copies between one H200 and pinned host memory, one direction at a time; 94 both ways at once",
    ),
    "infiniband": _link(
        "InfiniBand, 400 Gbit/s for each GPU", 45, 50, 40, "assumed", "nine tenths of the specification"
    ),
}  # fmt: skip


def link_of(name: str) -> Link:
    """A link by its short name.

    >>> print(link_of("nvlink4"))
    NVLink 4 of an H100 or H200: 370 GB/s each way (assumed, of 450), 20 µs a collective (assumed)
    """
    check_name(name, LINKS, "link")
    return LINKS[name]
