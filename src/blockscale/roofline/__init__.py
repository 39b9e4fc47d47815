"""Lower bound on the time of a layer on a machine, and so upper bound on the speedup of quantization there.

`linear_cost` and `swiglu_cost` count bytes and FLOPs of every cast and product; `measured` and `nominal` give the
ceilings of machines; `advise` gives the number of tokens from which on a layer is worth converting; `overlap_gain` says
what is won by hiding communication behind a product; `decode_cost` and `prefill_cost` are those of inference.

>>> nvfp4 = dict.fromkeys(ROLES, "nvfp4") | {"fprop_w": "nvfp4_16x16", "dgrad_w": "nvfp4_16x16"}
>>> f"{predicted_speedup(4096, 7168, 18432, nvfp4, nominal('b200')):.2f}"
'2.83'
"""

from .ceilings import MEASURED, NOMINAL, Ceilings, Engine, architecture_of, engine_for, machine_of, measured, nominal
from .communication import (
    Block,
    StepCost,
    Transfer,
    ep_transfers,
    fsdp_transfers,
    parallel_cost,
    tp_transfers,
)
from .inference import SERVED_MODELS, ServedModel, Serving, decode_cost, prefill_cost, turning_batch
from .links import LINKS, Link, link_of
from .model import (
    BF16,
    INFERENCE,
    ROLES,
    TRAINING,
    CostOf,
    LinearCost,
    Step,
    Use,
    advise,
    linear_cost,
    predicted_speedup,
    speedup,
    stored_bytes,
    swiglu_cost,
)
from .overlap import OPERATIONS, OverlapMachine, Prediction, overlap_gain, overlap_machine

__all__ = [
    "BF16", "INFERENCE", "LINKS", "MEASURED", "NOMINAL", "OPERATIONS", "ROLES", "SERVED_MODELS", "TRAINING", "Block",
    "Ceilings", "CostOf", "Engine", "LinearCost", "Link", "OverlapMachine", "Prediction", "ServedModel", "Serving",
    "Step", "StepCost", "Transfer", "Use", "advise", "architecture_of", "decode_cost", "engine_for", "ep_transfers",
    "fsdp_transfers", "linear_cost", "link_of", "machine_of", "measured", "nominal", "overlap_gain", "overlap_machine",
    "parallel_cost", "predicted_speedup", "prefill_cost", "speedup", "stored_bytes", "swiglu_cost", "tp_transfers",
    "turning_batch",
]  # fmt: skip
