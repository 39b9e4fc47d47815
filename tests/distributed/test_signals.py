"""Flags and waits of GPUs: in Triton's interpreter, compiled without a GPU, and the host's reading of faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton", reason="needs triton, which is not installed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from aot.compiled import CAN_COMPILE, compiled_for, report
from blockscale.distributed.collectives import Ranks
from blockscale.distributed.overlap import choice, cuda
from blockscale.distributed.overlap.arena import HEADER
from blockscale.distributed.overlap.link import Link
from blockscale.distributed.overlap.signals import OTHER_CALL, TIMED_OUT, Fault, Flags
from blockscale.distributed.overlap.sums import sum_parts
from blockscale.errors import RankError, ShardingError
from support import helpers
from support.signal_checks import checks

CPU = torch.device("cpu")


@pytest.mark.slow
def test_interpreted_kernels():
    """Numbers that pass 2^31, timeouts, other calls, what a fault ends; and a link of two processes."""
    assert helpers.interpreted(Path(__file__).parent / "interpreted_signals.py") == (42, 160, 0)


@pytest.mark.gpu
def test_kernels_on_a_gpu():
    """The same, by the GPU's clock."""
    found = checks()
    assert len(found) == 38
    assert [name for name, holds in found.items() if not holds] == []


def compiled(arch: int) -> dict[str, Any]:
    """The kernels as a link of eight ranks launches them; "graph" in names of those that take a counted number."""
    headers = [torch.empty(HEADER // 4, dtype=torch.int32) for _ in range(8)]
    flags = Flags(headers, 3, Fault.on(CPU), 1800)
    with compiled_for(arch) as kernels:
        for call in (1, 16, 17, 2**31 + 1):  # no number makes another kernel
            flags.signal([4, 5, 6, 7, 0, 1, 2], call, call % 31)
            flags.wait(5, call, call % 31)
        eager = {each.metadata.name: each for each in kernels}
        assert len({each.hash for each in kernels}) == len(eager) == 2
        flags.meet()
        flags.signal([4], None, 5)
        flags.wait(5, None, 5)
    hashes = {each.hash for each in eager.values()}
    captured = {f"{each.metadata.name} graph": each for each in kernels if each.hash not in hashes}
    assert len(captured) == 3
    return eager | captured


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET")
@pytest.mark.parametrize("arch", [90, 100])
def test_machine_code(arch: int):
    """One warp, no spills; flags are read and written for the whole system, and a wait reads the clock as it polls."""
    kernels = compiled(arch)
    for name in kernels:
        most = {"_signal_kernel": 24, "_meet_kernel graph": 40}.get(name, 32)
        found = report(kernels[name])
        assert found.warps == 1
        assert found.spilled == 0
        assert found.registers <= most, name
    assert re.search(
        r"atom\.global\.release\.sys\.exch|atom\.global\.sys\.release\.exch", kernels["_signal_kernel"].asm["ptx"]
    )
    for name in ("_wait_kernel", "_wait_kernel graph", "_meet_kernel graph"):
        ptx = kernels[name].asm["ptx"]
        loop = ptx[ptx.index("bra") :]
        assert re.search(r"(ld|atom)\.global\.(acquire\.sys|sys\.acquire)", loop), name
        assert ptx.count("%globaltimer") == 2, name


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COMPILE, reason="needs Triton's compiler and cuobjdump, and no TRITON_INTERPRET")
@pytest.mark.parametrize("arch", [90, 100])
def test_a_sum_reads_each_part_once(arch: int):
    """16 bytes at a time, all loads before the first addition, and no spills."""
    parts, own = torch.empty(8, 16, 64, dtype=torch.bfloat16), torch.empty(16, 64, dtype=torch.bfloat16)
    with compiled_for(arch) as kernels:
        sum_parts(parts, own, 1, torch.tensor(-0.0))
    found = report(kernels[0])
    assert (found.loads[128], found.stores[128], found.spilled) == (8, 1, 0)
    assert found.registers <= 64


def on_gpu(**facts: Any) -> tuple[str, str, str] | None:
    """Why a call of two ranks on GPUs cannot overlap.  facts: what differs from a machine where it can."""
    x: Any = SimpleNamespace(device=torch.device("cuda", 0))
    with (
        patch.object(torch.version, "hip", facts.get("hip")),
        patch.object(choice, "find_spec", lambda name: facts.get("triton", True) or None),
        patch.object(choice.platform, "machine", lambda: "aarch64"),
    ):
        return choice.reason_against(x.device, Ranks("", 0, facts.get("ranks", 2)))


def test_what_gpus_refuse():
    assert on_gpu() is None, "the order of stores matters on CPU ranks alone"
    for facts, said in (
        ({"ranks": 1}, "one rank"),
        ({"hip": "7"}, "AMD"),
        ({"triton": False}, "without Triton"),
    ):
        reason = on_gpu(**facts)
        assert reason is not None
        assert said in reason[0]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (TIMED_OUT, RankError, "no word from rank 0, .* while rank 0 waits in overlapped call 2147483653"),
        (OTHER_CALL, ShardingError, "with different layers or sizes in overlapped call 2147483653"),
    ],
)
def test_a_fault_is_raised_in_every_later_call(group: dist.ProcessGroup, kind: int, error: Any, said: str):
    transport = cuda.CudaTransport.__new__(cuda.CudaTransport)
    transport._fault = Fault.on(CPU)
    transport.check(group)
    transport._fault.told.fill_(((2**31 + 5 - 2**32) << 32) | kind)
    for act in (transport.check, transport.check, transport.begin):
        with pytest.raises(error, match=said):
            act(group)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([("a", "1", "H200", False), ("b", "2", "H200", False)], "ranks on 2 hosts: a, b"),
        ([("a", "1", "H200", True), ("a", "1", "H200", False)], "ranks that share a GPU"),
        ([("a", "1", "H200", True), ("a", "1", "H200", True)], None),
        ([("a", "1", "H200", False), ("a", "2", "H200", False)], None),
    ],
)
def test_ranks_without_shared_memory(others: list[Any], said: str | None):
    found = [cuda._Gpu(*each) for each in others]
    if said is None:
        return cuda._check_gpus(found)
    with pytest.raises(ShardingError, match=said):
        cuda._check_gpus(found)


@pytest.mark.parametrize(("other", "name"), [("NVIDIA H200", "h200"), ("NVIDIA H100 PCIe", None), ("NVIDIA T4", None)])
def test_the_machine_of_all_ranks(group: dist.ProcessGroup, other: str, name: str | None):
    """The model decides for all ranks alike: by one machine, which it knows, and whose memory they map."""
    mine = SimpleNamespace(uuid="1", name="NVIDIA T4" if other == "NVIDIA T4" else "NVIDIA H200")
    transport = cuda.CudaTransport.__new__(cuda.CudaTransport)
    transport._device = CPU
    real = dist.all_gather_object

    def gather(found: list[Any], mine: Any, group: Any) -> None:
        real(found, mine, group)
        found.append(mine._replace(name=other) if isinstance(mine, tuple) else mine)

    link = Link(group)
    link._transport = transport
    with (
        patch.object(torch.cuda, "get_device_properties", lambda device: mine),
        patch.object(dist, "all_gather_object", gather),
        patch.object(torch.cuda, "is_current_stream_capturing", return_value=True) as capturing,
        patch.object(cuda.CudaTransport, "arena") as arena,
    ):
        assert link.machine() is None, "ranks do not meet in a graph"
        capturing.return_value = False
        assert link.machine() == name
        assert link.machine() == name
        assert arena.call_count == (name is not None)
        arena.side_effect = ShardingError("no peer access")
        unlinked = Link(group)
        unlinked._transport = transport
        assert unlinked.machine() is None
