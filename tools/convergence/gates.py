"""Gates without training: effect of a fault on bytes, on one GEMM, and on the first gradient.

    bytes     exact values, ties and stochastic rounding of the contract, cast and decoded: equal or not
    product   one GEMM of data with outlier channels, against fp64: decibels
    gradient  of the first batch, against bf16's: cosine and ratio of norms

Together they take a second on a CPU. The fourth gate, the loss after a whole run, is in `report.py`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import blockscale as bs
from blockscale.diagnostics.quality import sqnr_db
from blockscale.formats import Stochastic, rng_state

from .arms import ARMS, BASELINE, Arm
from .data import standard_library
from .model import SIZES
from .trainer import Trainer

COSINE = {16: 0.998, 8: 0.998, 4: 0.98}
NORMS = (0.9, 1.15)
# largest difference of an untrained model's loss, relative to bf16's: noise of 4 bits exceeds a tenth of a percent
FIRST_LOSS = {16: 1e-3, 8: 1e-3, 4: 1e-2}
# half a decibel below the known SQNR of the format on this data
OUTLIERS_DB = {"mxfp8_e4m3": 28.1, "fp8_1x128": 30.3, "nvfp4": 17.2, "mxfp4": 14.5}
# values of one block and their rounded values, by element bits
TIES = {
    8: ((448.0, 17.0, 19.0, 1.02), (448.0, 16.0, 20.0, 1.0)),
    4: ((6.0, 2.5, 3.5, 0.7), (6.0, 2.0, 4.0, 0.5)),
}


def passes(row: dict[str, Any]) -> dict[str, bool]:
    """Whether a row of `measure` passes each gate; a NaN passes none."""
    least = OUTLIERS_DB.get(row["format"] or "")
    return {
        "bytes": row["bytes"],
        "product": least is None or row["outliers_db"] >= least,
        "gradient": row["cosine"] >= COSINE[ARMS[row["arm"]].bits] and NORMS[0] <= row["norms"] <= NORMS[1],
    }


def measure(name: str, size_name: str, device_name: str) -> dict[str, Any]:
    """Gate figures of an arm as a row to store."""
    torch.set_num_threads(1)
    began, arm, device = time.perf_counter(), ARMS[name], torch.device(device_name)
    cosine, norms = first_gradient(arm, size_name, device)
    product = None if arm.recipe is None else arm.recipe.fprop
    return {
        "kind": "gates",
        "arm": name,
        "seed": None,
        "size": size_name,
        "format": None if product is None else product.a.format,
        "bytes": True if arm.recipe is None else bytes_are_right(arm, device),
        "outliers_db": None if product is None else round(outliers_db(arm, device), 2),
        "cosine": round(cosine, 5),
        "norms": round(norms, 4),
        "data": standard_library().hash,
        "seconds": round(time.perf_counter() - began, 1),
    }


def first_gradient(arm: Arm, size_name: str, device: torch.device) -> tuple[float, float]:
    """Cosine to the baseline's gradient on the first batch, and ratio of norms, over the weights of tested layers."""
    mine, theirs = (_gradient(each, size_name, device) for each in (arm, ARMS[BASELINE]))
    cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=0)
    return float(cosine), float(mine.norm() / theirs.norm())


def _gradient(arm: Arm, size_name: str, device: torch.device) -> Tensor:
    run = Trainer(arm, 0, SIZES[size_name], standard_library(), device)
    with arm.active():
        run.model.loss(run.batch()).backward()
    tested = (param.grad for name, param in run.model.named_parameters() if name.endswith(".layer.weight"))
    return torch.cat([grad.flatten().double() for grad in tested if grad is not None])


def outliers_db(arm: Arm, device: torch.device) -> float:
    """SQNR in dB of fprop of 256x2048 and 256x2048, with 16 channels 20 to 60 times as large as the rest."""
    assert arm.recipe is not None
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, 2048, generator=generator) for _ in range(2))
    x[:, torch.randperm(2048, generator=generator)[:16]] *= 20 + 40 * torch.rand(16, generator=generator)
    layer = arm.make_linear(rng_state(0, device=device))(2048, 256, "outliers").layer.to(device)
    layer.weight.data.copy_(w)
    with arm.active(), torch.no_grad():
        y = layer(x.to(device))
    return float(sqnr_db(x.double() @ w.double().mT, y.cpu().double()))


def bytes_are_right(arm: Arm, device: torch.device) -> bool:
    """Whether casts with the fault injected still give the bytes of the contract."""
    with arm.active():
        return all(torch.equal(*pair) for pair in (_nearest(arm, device), _stochastic(device)))


def _nearest(arm: Arm, device: torch.device) -> tuple[Tensor, Tensor]:
    """Decoded and expected values of ties and values between, in four blocks with different scales."""
    assert arm.recipe is not None
    operand = arm.recipe.operand("dgrad_w")
    assert operand is not None
    # a block's largest value is the element's largest, so that scales are exact; NVFP4's scales reach 448 = 7 * 64
    given, expected = TIES[arm.bits]
    scales = torch.tensor([[1.0, 4.0], [16.0, 64.0]]) * (7 if operand.format.startswith("nvfp4") else 1)
    scales = scales.repeat_interleave(128, 1).repeat_interleave(128, 0)
    x, y = (scales * torch.tensor(values).repeat(256, 64) for values in (given, expected))
    return bs.dequantize(bs.quantize(x.to(device), operand.format, scale_rule=operand.scale_rule)).cpu().float(), y


def _stochastic(device: torch.device) -> tuple[Tensor, Tensor]:
    """Decoded and expected values of the contract's worked example of stochastic rounding, with its seed and name."""
    rounding = Stochastic(rng_state(0x0123456789ABCDEF, 7, device), "model.layers.0.mlp.down_proj")
    x = torch.zeros(1, 32)
    x[0, :6], x[0, 31] = torch.tensor([2.75, 2.75, 2.75, 2.75, 0.3, -0.3]), 6.0
    y = torch.zeros(1, 32)
    y[0, :6], y[0, 31] = torch.tensor([3.0, 3.0, 2.0, 3.0, 0.5, -0.5]), 6.0
    spec = bs.CastSpec("mxfp4", "rceil", rounding, role="dgrad_dy")
    row, _ = bs.quantize_both(x.to(device), spec, "mxfp4")
    return bs.dequantize(row).cpu().float(), y
