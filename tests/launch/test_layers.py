"""Layers whose calls are replayed as a whole, on a stand-in for sm_90."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "replayed_layers.py"


def test_every_layer_is_replayed_forward_and_backward():
    """Kernels through Triton, then recordings, of a forward and of a backward. A layer is one recording; experts of
    tokens sum the gradient of a token's rows after it, gate weights have a product of their own before it, and results
    are combined after the forward."""
    pytest.importorskip("triton", reason="needs triton, which is not installed")
    pytest.importorskip("blockscale.gemm._hopper", reason="this Triton has no Gluon for Hopper")
    environment = {**os.environ, "BLOCKSCALE_POISON": "0"}  # poisoned buffers are not recorded
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "linear": [[0, 1], [0, 1]],
        "MLP": [[0, 1], [0, 1]],
        "experts of sorted rows": [[0, 1], [0, 1]],
        "experts of tokens": [[0, 1], [0, 2]],
        "experts with gate weights": [[0, 2], [0, 3]],
    }
