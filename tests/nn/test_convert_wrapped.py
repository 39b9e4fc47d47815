"""Models on the meta device, compiled, wrapped and sharded are converted like any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.nn import Linear
from support.helpers import first_of
from support.toy_models import TOKENS, Model, everything, gradients, loss_of, made, names, small


def test_a_meta_model_gets_its_values_and_its_seed_later():
    with torch.device("meta"):
        model = Model()
    report = bs.quantize_(model, "nvfp4", everything, seed=5)
    assert report.predicted_speedup(4096).converted > 0
    assert model.lm_head.rng.is_meta
    bs.advance_(model)  # no state to advance yet
    model.to_empty(device="cpu")
    assert all(module.rng.tolist() == [5, 0] for module in model.modules() if isinstance(module, Linear))
    other = made()
    bs.quantize_(other, "nvfp4", everything, seed=5)
    model.load_state_dict(other.state_dict())
    bs.advance_(model)
    bs.advance_(other)
    wanted = gradients(other)
    for name, mine in gradients(model).items():
        assert torch.equal(mine, wanted[name]), name


@pytest.mark.parametrize("order", first_of(["before", "after", "after a call"], lambda order: order == "after a call"))
def test_compiled_models_can_be_converted(order):
    torch._dynamo.reset()
    model, twin = small(), small()
    bs.quantize_(twin, "mxfp8")
    if order == "before":
        bs.quantize_(model, "mxfp8")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if order == "after a call":
        assert torch.equal(compiled(TOKENS), small()(TOKENS))
    if order != "before":
        report = bs.quantize_(compiled, "mxfp8")
        assert "1.up_proj" in names(report.converted)
    assert torch.equal(compiled(TOKENS), twin(TOKENS))
    bs.unquantize_(compiled)
    assert torch.equal(compiled(TOKENS), small()(TOKENS))


def test_wrappers_of_data_parallel_models_do_not_change_names():
    model = nn.Module()
    model.module = made()  # as DistributedDataParallel holds it
    report = bs.quantize_(model, "nvfp4", everything)
    assert "layers.1.attention.qkv" in names(report.converted)
    assert model.module.layers[1].attention.qkv.name == "layers.1.attention.qkv"


def test_sharded_models(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model, plain = made(), made()
        fully_shard(model.layers[1].attention.qkv, mesh=mesh)
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        report = bs.quantize_(model, "mxfp8")
        reasons = {each.name: each.reason for each in report.skipped}
        assert reasons.pop("layers.1.attention.qkv").endswith("convert before fully_shard")
        assert set(reasons) == {"lm_head"}
        assert report.parameters == sum(each.numel() for each in plain.parameters())
        bs.quantize_(plain, "mxfp8", lambda module, name: name in names(report.converted))
        assert torch.equal(model(TOKENS), plain(TOKENS))
        loss_of(model).backward()
        for name, mine in gradients(plain).items():
            assert torch.equal(mine, model.get_parameter(name).grad.full_tensor()), name
        assert bs.unquantize_(model) == 9
    finally:
        torch.distributed.destroy_process_group()
