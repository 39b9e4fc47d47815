"""Print the files of src/blockscale whose Python runs in one forward and backward of a Linear on a stand-in for sm_90.

The CPU stands for an H200: kernels are selected, their arguments computed and their launch called; the launch of a
Triton kernel does nothing. A process of its own, since it replaces parts of Triton.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from triton.runtime.jit import JITFunction

import blockscale as bs
from blockscale import hardware
from blockscale.hardware import Capability

SOURCE = Path(bs.__file__).parent
CPU = torch.device("cpu")


def files_of_a_step() -> list[str]:
    hardware._KNOWN[CPU] = hardware._Facts(Capability("cuda", 90), 132, "NVIDIA H200")
    JITFunction.run = lambda self, *args, **named: None
    layer = bs.nn.Linear(512, 512, False, "cpu", torch.bfloat16, recipe="fp8_blockwise")
    x = torch.randn(256, 512, dtype=torch.bfloat16, requires_grad=True)
    found: set[str] = set()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            found.add(path.relative_to(SOURCE).as_posix())

    for at in range(3):  # caches are filled first
        if at == 2:
            threading.setprofile(profile)  # a backward may run on another thread
            sys.setprofile(profile)
        layer(x).sum().backward()
    sys.setprofile(None)
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(files_of_a_step()))
