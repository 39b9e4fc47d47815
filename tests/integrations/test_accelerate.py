"""The script of docs/transformers.md under FSDP2 by accelerate, as it is, on two CPU ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[transformers]'")
pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install -e '.[transformers]'")

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "transformers.md").read_text().partition("## FSDP2\n")[2]
RANKS = 2


def script() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    return block


def launch() -> list[str]:
    """The page's line for eight GPUs, on two ranks."""
    (line,) = re.findall(r"`torchrun (--nproc-per-node) 8 (train\.py)`", PAGE)
    return ["torch.distributed.run", "--standalone", line[0], str(RANKS), line[1]]


def one_process(tmp_path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script without its lines for FSDP2; its microbatches are the batches of both ranks, one after the other."""
    text = re.sub(
        r"    fsdp=True,\n    fsdp_config=.*\n",
        f"    use_cpu=True,\n    gradient_accumulation_steps={RANKS},\n",
        script(),
    )
    text = text.replace("print(bs.distributed.gather_low_(model))", "").replace("out/fsdp2", str(tmp_path / "one"))
    assert "fsdp" not in text
    names: dict[str, Any] = {}
    exec(compile(text, "transformers.md", "exec"), names)
    found = [line["loss"] for line in names["trainer"].state.log_history if "loss" in line]
    return found, {name: each.detach() for name, each in names["model"].named_parameters()}


@pytest.mark.sweep
@pytest.mark.slow
def test_the_script_of_the_page_on_two_ranks(tmp_path: Path) -> None:
    """One test, since starting ranks that import Transformers takes seconds; see support/accelerated.py."""
    program = script() + "\nfrom support.accelerated import after\n\nafter(globals())\n"
    (tmp_path / "train.py").write_text(program)
    paths = [
        TESTS / "support" / "cpu_ranks",
        TESTS,
        TESTS.parent / "src",
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "RESULTS": str(tmp_path)}
    environment |= {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", *launch()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, f"{shlex.join(launch())}\n{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}"
    assert "14 weights are gathered as codes, 0 in their own dtype" in ran.stdout
    found, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    assert found["optimizers"] == other["optimizers"] == [True, True], "every parameter is in the optimizer once"
    assert found["codes"] == [14, 0]
    assert found["losses"] == found["plain losses"] == found["resumed losses"]
    assert len(found["losses"]) == 4
    assert (found["plain weights"], found["resumed weights"]) == (0.0, 0.0)
    assert found["losses"][-1] < found["losses"][0]
    assert found["experts True"] == found["experts False"]
    assert (found["experts False codes"], found["experts True codes"]) == (0, 8)
    for rank in (found, other):
        assert "cpu_ram_efficient_loading of weights that gather_low_ prepared" in rank["refused"]["ram"]
        assert "mixed precision of weights in torch.bfloat16" in rank["refused"]["mixed"]

    losses, weights = one_process(tmp_path)
    stated = re.search(
        r"one process, whose two microbatches are the batches of both \| within (\S+) \| within (\S+) \|", PAGE
    )
    assert stated is not None
    loss, weight = map(float, stated.groups())
    assert found["losses"] == pytest.approx(losses, rel=loss)
    got = torch.load(tmp_path / "weights.pt")
    assert got.keys() == weights.keys()
    worst = max(float((got[name] - each).norm() / each.norm()) for name, each in weights.items())
    assert worst <= weight
