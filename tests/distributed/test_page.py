"""docs/distributed.md and README's three lines, followed word by word on two ranks.

Every code block runs. Every row of a table, every number in prose and every word on what raises has a check here, which
compares the page with what `support/page_of_ranks.py` counted. What has none fails, by its name: add it to `ROWS` or to
`PROSE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

from blockscale.autograd.recipe import RECIPES, get_recipe
from blockscale.formats import FORMATS, get_format
from blockscale.roofline import ep_transfers, fsdp_transfers, tp_transfers
from support.markdown import Page, Row, parse
from support.page_of_ranks import RANKS, run
from support.ranks import start_ranks

Facts = dict[str, Any]
RowCheck = Callable[[Row, Facts], bool]
ROOT = Path(__file__).parents[2]
SOURCE = (ROOT / "docs" / "distributed.md").read_text()
PAGE, README = parse(SOURCE), (ROOT / "README.md").read_text()
FSDP, TP, EP = "FSDP2 that gathers codes", "Tensor and sequence parallel", "Expert parallel"
# its table is compared with the command that made it, in tests/cli/test_roofline_ranks.py
MODELLED = "Eight GPUs, modelled"
CUT, FAULTS = "Experts cut along their hidden units", "Faults"
EXPERTS, FEATURES = 6, 256  # of the mixture that is counted
TOKENS, SLOTS = 48, 2  # of a rank, for experts that are cut


# ---- checks ----------------------------------------------------------------------------------------------------------


def held(file: str, *names: str) -> bool:
    """Whether a test file has cases, tests or bounds of these names."""
    source = (ROOT / "tests" / file).read_text()
    return all(name in source for name in names)


def by_tests(travels: str, **tests: str) -> RowCheck:
    """Each number of ranks has a test: two="file name".  travels: the cell on what travels."""
    said = f"{' and '.join({'two': '2', 'four': '4'}[each] for each in tests)} CPU ranks (gloo)"

    def check(row: Row, facts: Facts) -> bool:
        found = all(held(*test.split(" ")) for test in tests.values())
        return found and row.cell("tested on") == said and row.cell("what travels") == travels

    return check


def wire_share(row: Row, facts: Facts) -> bool:
    format, recipe = row.cell("format of the weight"), row.cell("recipe")
    known = facts["recipes"][recipe] == [format]
    return known and row.cell("wire, of bf16") == f"{facts[f'wire {recipe}']['share']:.2f}"


def casts_of_shards(row: Row, facts: Facts) -> bool:
    """Two microbatches: two forwards of the model, four gathers of each weight."""
    for weight_cast in re.findall(r'"(\w+)"', row.cell("weight_cast")):
        found = facts[f"casts {weight_cast}"]
        gathers = {"in every gather": 4, "one per optimizer step; codes of the shard stay in memory": 1}
        exchanges = {"one in every forward of the model": 2, "one per optimizer step": 1}
        wanted = gathers[row.cell("casts of a shard")] * found["weights"], exchanges[row.cell("exchange of maxima")]
        if (found["casts"], found["exchanges"]) != wanted:
            return False
    return True


def owner_and_requantized(owner: str, requantized: str) -> RowCheck:
    """The cells have these texts; braces take what was counted, by "tp owner" and "tp requantized"."""

    def check(row: Row, facts: Facts) -> bool:
        wanted = (owner.format(**facts["tp owner"]), requantized.format(**facts["tp requantized"]))
        return (row.cell('wgrad="owner"'), row.cell('wgrad="requantized"')) == wanted

    return check


def saved_of_x(row: Row, facts: Facts) -> bool:
    """Codes and scales saved for 64 tokens and 192 features: columns scale 32 tokens, rows 32 features."""
    kept = [[64, 192], [2, 192]], [[128, 192], [128, 6]]
    same = [facts[f"tp {each}"]["saved"][:2] for each in ("owner", "requantized")] == [*kept]
    return same and row.cells[1:] == ("the columns of its tokens", "the rows of all tokens")


def weight_gradients_of_tensor_parallel(row: Row, facts: Facts) -> bool:
    owner, other = (facts[f"tp {each}"] for each in ("owner", "requantized"))
    (bound,) = map(float, re.fullmatch(r"within (\S+) of it", row.cell('wgrad="requantized"')).groups())  # type: ignore
    exact = owner["up"] == owner["down"] == 0 and row.cell('wgrad="owner"') == "the bits of one process"
    within = 0 < max(other["up"], other["down"]) <= bound
    return exact and within and held("distributed/test_tensor_parallel.py", f"<= {bound:.0e}".replace("e-0", "e-"))


def recipes_of_tensor_parallel(row: Row, facts: Facts) -> bool:
    owner, other = (set(facts[f"tp recipes {each}"]) for each in ("owner", "requantized"))
    if row.cell('wgrad="owner"') != "all but NVFP4" or owner != set(RECIPES) - {"nvfp4"}:
        return False
    forms = [get_recipe(name).operand("fprop_x") for name in other - {"bf16"}]
    rules = {each.scale_rule or get_format(each.format).default_rule() for each in forms if each is not None}
    bits = {get_format(each.format).element.bits for each in forms if each is not None}
    said = "8-bit elements, power-of-two scales that clip nothing (mxfp8, FP8 with scale rule pow2), rounded to nearest"
    named = {"mxfp8", "fp8_blockwise_pow2"} <= other
    return named and bits == {8} and rules <= {"pow2", "rceil", "ceil"} and row.cell('wgrad="requantized"') == said


def tokens_of_a_rank(row: Row, facts: Facts) -> bool:
    fp8, mx, every = (facts[f"tp tokens {each}"] for each in ("fp8", "mx", "requantized"))
    blocks = f"whole blocks: a multiple of {min(fp8)} (FP8), {min(mx)} (MX)"
    multiples = all(each % min(found) == 0 for found in (fp8, mx) for each in found)
    return multiples and min(every) == 1 and 48 in every and row.cells[1:] == (blocks, "any number")


def rows_of_experts(which: int) -> RowCheck:
    """The exchange of rows: of tokens, results, gradients of results, gradients of tokens."""

    def check(row: Row, facts: Facts) -> bool:
        plain, low = (
            [each for each in facts[f"ep {payload}"]["sent"] if "all_to_all" in each[0] and each[1] != ["float64"]]
            for payload in ("bf16", "low")
        )
        assert len(plain) == len(low) == 4
        (_, dtypes, count), bits = low[which], f"{8 * torch.bfloat16.itemsize} bits"
        coded = f"codes and scales: {count / plain[which][2]:.3f} of bf16" if dtypes == ["uint8"] else bits
        return plain[which][1] == ["bfloat16"] and row.cells[1:] == (bits, coded)

    return check


def numbers_of_rows(row: Row, facts: Facts) -> bool:
    six, five = (facts[name]["sent"][0][2] for name in ("ep low", "ep 5"))
    said = f"{six - five} bytes for each expert, and {six - (six - five) * EXPERTS}"
    return facts["ep bf16"]["sent"][0] == facts["ep low"]["sent"][0] and row.cells[1:] == (said, "the same")


def column_sums(row: Row, facts: Facts) -> bool:
    plain, low = (
        [count for _, dtypes, count in facts[f"ep {payload}"]["sent"] if dtypes == ["float64"]]
        for payload in ("bf16", "low")
    )
    said = f"{low[0] // (EXPERTS * FEATURES)} bytes for each expert and feature"
    return plain == [] and len(low) == 1 and row.cells[1:] == ("none", said)


def same_bits_of_experts(row: Row, facts: Facts) -> bool:
    found = [facts[f"ep {load}"] for load in ("even", "random", "spread")] + [*facts["dispatchers"].values()]
    exact = all(value == 0 for each in found for name, value in each.items() if "weight" not in name)
    return exact and row.cells[1:] == ("the same bits", "the same bits")


def weight_gradients_of_experts(row: Row, facts: Facts) -> bool:
    text = (
        r"the bits of casting columns from the codes of rows\. Relative distance from one process: at most (\S+) with "
        r"equal gate weights, (\S+) with those of a softmax, (\S+) with gate weights that spread over 2\^20"
    )
    match = re.fullmatch(text, row.cell('"low"'))
    assert match is not None, "the bounds are read from this sentence"
    even, softmax, spread = match.groups()
    bounds = {"even": even, "random": softmax, "spread": spread}
    within = all(facts[f"ep {load}"]["down.weight"] <= float(bound) for load, bound in bounds.items())
    requantized = all(facts[f"ep {load}"]["requantized"] == 0 for load in bounds)
    exact = all(value == 0 for name, each in facts["dispatchers"].items() if "bf16" in name for value in each.values())
    stated = f'{spread} if "spread" in label else {even} if "even" in label else {softmax}'
    tested = held("distributed/test_expert_parallel.py", stated)
    return within and requantized and exact and tested and row.cells[1] == "the same bits"


def all_to_all(row: Row, facts: Facts) -> bool:
    names = {name for name, _, _ in facts["ep low"]["sent"][1:]}
    counted = names == {"all_to_all_single"} and facts["ep low"]["syncs"] == facts["ep bf16"]["syncs"] == [1, 0]
    said = "all_to_all_single with split sizes; gloo and NCCL", "one in a forward, which needs the numbers of rows"
    return counted and row.cells[1:] == said


def bits_of_tokens(count: int) -> float:
    return 8 * count / (TOKENS * FEATURES)


def tokens_of_cut_experts(which: int) -> RowCheck:
    """Tokens, or gradients of results, that are gathered; results that are summed have those of all ranks."""

    def check(row: Row, facts: Facts) -> bool:
        plain, low = (facts[f"cut {payload}"]["sent"][which] for payload in ("bf16", "low"))
        ranks = 2 if "reduce_scatter" in plain[0] else 1
        coded = "the same" if low == plain else f"codes and scales: {low[2] / plain[2]:.3f} of bf16"
        return row.cells[1:] == (f"{bits_of_tokens(plain[2]) / ranks:.0f} bits", coded)

    return check


def slots_of_cut_experts(row: Row, facts: Facts) -> bool:
    sent = [facts[f"cut {payload}"]["sent"][0] for payload in ("bf16", "low")]
    return sent[0] == sent[1] and row.cells[1:] == (f"{sent[0][2] // (TOKENS * SLOTS)} bytes a slot", "the same")


def gradients_of_cut_experts(row: Row, facts: Facts) -> bool:
    sent = [sorted(facts[f"cut {payload}"]["sent"][4:]) for payload in ("bf16", "low")]
    by_dtype = {dtypes[0]: count // 2 for _, dtypes, count in sent[0]}
    tokens, slots = bits_of_tokens(by_dtype["bfloat16"]), by_dtype["float32"] // (TOKENS * SLOTS)
    said = f"{tokens:.0f} bits, and {slots} bytes a slot", "the same"
    return len(sent[0]) == 2 and sent[0] == sent[1] and row.cells[1:] == said


def share_of_cut_experts(row: Row, facts: Facts) -> bool:
    shares: list[str] = []
    for payload in ("bf16", "low"):
        sent = facts[f"cut {payload}"]["sent"]
        shares.append(f"{bits_of_tokens(sent[1][2] + sent[3][2]) / 32:.2f}")
    return row.cells[1:] == tuple(shares)


def weight_gradients_of_cut_experts(row: Row, facts: Facts) -> bool:
    plain, low = (facts[f"cut {payload}"] for payload in ("bf16", "low"))
    bound = re.search(r"within (\S+) unless", row.cells[2])
    assert bound is not None, "the bound is read from this sentence"
    exact = plain["off"] == 0 and all([*plain["bits"].values(), *low["bits"].values()])
    tested = held("distributed/test_tensor_parallel.py", f'({bound[1]} if "low" in label else 0.0)')
    return exact and tested and low["off"] <= float(bound[1]) and row.cells[1] == "the same bits"


def by_fault(others: str, file: str, *names: str) -> RowCheck:
    """What the others see.  names: of the cases of a test that runs the fault, or of its assertions."""
    return lambda row, facts: row.cells[1] == others and held(file, *names)


def dispatcher(first: str, second: str, *names: str) -> RowCheck:
    """A dispatcher that other tests run.  names: of their cases."""
    return lambda row, facts: row.cells[1:] == (first, second) and held("support/expert_parallel.py", *names)


# What a row's check needs is counted in this run, or a case of another rank test.
ROWS: dict[tuple[str, str], RowCheck] = {
    ("Several GPUs", "FSDP2, HSDP"): by_tests(
        "weights and gradients in the dtypes of FSDP's policy; weights in 8 or 4 bits after gather_low_",
        two="distributed/test_gather_low.py test_two_ranks",
        four="distributed/test_gather_low.py test_four_ranks",
    ),
    ("Several GPUs", "DDP"): lambda row, facts: (
        facts["ddp"] == {"torch.bfloat16": [["bfloat16"], 1.0], "torch.float32": [["float32"], 1.0]}
        and by_tests("gradients in their dtype", two="autograd/test_fsdp.py test_two_ranks")(row, facts)
    ),
    ("Several GPUs", "tensor parallel by torch's styles"): by_tests(
        "activations and their gradients in 16 or 32 bits, by torch's collectives and no others (layers)",
        two="autograd/test_tensor_parallel.py test_two_ranks_compute_their_own_shards",
    ),
    (
        "Several GPUs",
        "tensor and sequence parallel by column_parallel, row_parallel and their styles",
    ): by_tests(
        "activations and gradients in 8 bits before products, partial sums in 16 or 32 (below)",
        two='distributed/test_tensor_parallel.py parametrize("ranks",',
        four="distributed/test_tensor_parallel.py 4])",
    ),
    ("Several GPUs", "expert parallel"): by_tests(
        'tokens and results in 16 bits; tokens and the combine\'s gradient in 8 with payload="low" (below)',
        two="distributed/test_expert_parallel.py test_two_ranks",
        four="distributed/test_expert_parallel.py test_four_ranks",
    ),
    (
        "Several GPUs",
        "experts cut along their hidden units by ExpertTensorParallel, also when divided",
    ): by_tests(
        'tokens in 16 bits, or as codes with payload="low"; gradients of results and partial sums in 16 (below)',
        two='distributed/test_tensor_parallel.py parametrize("ranks",',
        four="distributed/test_tensor_parallel.py 4])",
    ),
    (
        "Several GPUs",
        "torchtitan: FSDP2, tensor, expert, pipeline and context parallel, and pairs",
    ): by_tests(
        'torchtitan\'s, in 16 bits; weights in 8 or 4 bits with gather="low", rows of experts in 8 with '
        'dispatch="low" (torchtitan)',
        two="integrations/test_torchtitan_ranks.py test_ranks_train_like_one_process",
        four="integrations/test_torchtitan_ranks.py test_sharded_and_divided_experts_have_both_wires_low",
    ),
    ("Several GPUs", "blockscale train under torchrun: FSDP2, and experts divided among ranks"): by_tests(
        "as FSDP2 and expert parallel; one all-reduce of three numbers a step (training)",
        two="train/test_ranks.py test_two_ranks",
        four="train/test_ranks.py test_four_ranks",
    ),
    (FSDP, "fp8_128x128"): wire_share,
    (FSDP, "mxfp8_e4m3_128x128"): wire_share,
    (FSDP, "nvfp4_16x16"): wire_share,
    (FSDP, '"forward", "twice"'): casts_of_shards,
    (FSDP, '"step", with attach'): casts_of_shards,
    (TP, "columns (blocks along tokens)"): owner_and_requantized(
        "gathered in the backward, beside dgrad", "cast from the values of gathered rows"
    ),
    (TP, "gathered x and dy, of bf16 gathered once each"): owner_and_requantized("{share:.2f}", "{share:.2f}"),
    (TP, "saved of x on every rank"): saved_of_x,
    (TP, "weight gradients"): weight_gradients_of_tensor_parallel,
    (TP, "recipes"): recipes_of_tensor_parallel,
    (TP, "tokens of a rank"): tokens_of_a_rank,
    (CUT, "tokens, gathered once"): tokens_of_cut_experts(1),
    (CUT, "experts and gate weights of tokens, gathered"): slots_of_cut_experts,
    (CUT, "results, after the sum over slots, reduce-scattered"): tokens_of_cut_experts(2),
    (CUT, "gradient of results, gathered"): tokens_of_cut_experts(3),
    (CUT, "gradients of tokens, and of gate weights, reduce-scattered"): gradients_of_cut_experts,
    (CUT, "gathered tokens and gradients, of bf16"): share_of_cut_experts,
    (CUT, "weight and bias gradients"): weight_gradients_of_cut_experts,
    (CUT, "y, gradients of tokens and of gate weights"): lambda row, facts: (
        "fp32: within 3e-7; 2 ranks: exactly the sum of the two parts" in row.cells[1]
        and held("distributed/test_tensor_parallel.py", '(3e-7 if "fp32" in label', "is the sum")
        and row.cells[2] == "the same"
    ),
    (EP, "tokens to their experts"): rows_of_experts(0),
    (EP, "results to their tokens"): rows_of_experts(1),
    (EP, "gradient of results, each times its gate weight"): rows_of_experts(2),
    (EP, "gradient of tokens"): rows_of_experts(3),
    (EP, "numbers of rows"): numbers_of_rows,
    (EP, "column sums for the bias of down, if it has one"): column_sums,
    (EP, "y, gradients of tokens and of gate weights, bias gradients"): same_bits_of_experts,
    (EP, "weight gradients"): weight_gradients_of_experts,
    (EP, "AllToAll(payload)"): all_to_all,
    (EP, "FixedCapacity(rows, payload)"): dispatcher(
        "always rows rows for each pair of ranks; symmetric memory on CUDA (run by 4 processes on one H200), equal "
        "splits elsewhere",
        "none on CUDA",
        "symmetric {load}",
        "fixed {load}",
    ),
    (EP, "DeepEP(buffer, payload)"): dispatcher(
        "deep_ep.Buffer, where the package is installed; tested against a stand-in with its documented calls, not run",
        "those of its kernels",
        "DeepEP(buffer, payload)",
    ),
    (FAULTS, "raises"): by_fault(
        "RankError with that rank and its error: at once where they compare calls or its process ends, else at the "
        "timeout",
        "distributed/test_failures.py",
        "rank 1 failed: ValueError: of rank 1 alone",
    ),
    (FAULTS, "is killed"): by_fault(
        "RankError that names the rank that gave no word: at once in a collective of gloo, in the comparison of calls "
        "at the timeout",
        "distributed/test_failures.py",
        "no word from rank 1",
        '"kill"',
    ),
    (FAULTS, "hangs"): by_fault(
        "the same, at the timeout; it ends too when it wakes up",
        "distributed/test_failures.py",
        '"hang": {1: "RankError"}',
    ),
    (
        FAULTS,
        "passes other shapes, dtypes, options or a gradient that others do not need to column_parallel, row_parallel, "
        "swiglu_parallel, gather_activation or experts that are cut, or calls another of them",
    ): by_fault(
        "ShardingError on all ranks, with the calls of each",
        "distributed/test_failures.py",
        *('"tokens"', '"recipes"', '"gradients"', '"swiglu"', '"activation"', '"cut experts"', '"calls"'),
    ),
    (
        FAULTS,
        "calls divided experts with other features, slots or dtype, or those of another layer",
    ): lambda row, facts: (
        held("distributed/test_failures.py", '"layers"') and raises("ep", "dtypes", "slots", "one evaluates")(facts)
    ),
    (FAULTS, "has other weights in FSDP2 that gathers codes"): by_fault(
        "an error when they exchange maxima; FSDP2's own gathers are not compared",
        "distributed/test_failures.py",
        "waits in maxima of weights",
    ),
    (FAULTS, "has a loss or gradient that is NaN, in the trainer"): by_fault(
        "NonFiniteError on all ranks, with rank, step and layer",
        "train/test_ranks.py",
        '"layer": r"step 2',
        "on rank 1",
    ),
    (FAULTS, "dies while a checkpoint is saved, in the trainer"): by_fault(
        "RankError; the checkpoint before it is resumed", "support/ranked_runs.py", "killed_in_a_save", "after_the_kill"
    ),
}


def raises(kind: str, *names: str) -> Callable[[Facts], bool]:
    """Cases of refusals that ran here and ended in an error of ours."""

    def check(facts: Facts) -> bool:
        found = facts["refusals"][kind]
        return all(found[name] not in ("no error", "nothing", "raised after a collective") for name in names)

    return check


def by_case(file: str, *names: str) -> Callable[[Facts], bool]:
    return lambda facts: held(file, *names)


def square_blocks(facts: Facts) -> bool:
    """Every format with square blocks that a recipe has for weights is in the table, and no other is gathered."""
    gathered = {format for found in facts["recipes"].values() for format in found if not format.startswith("not: ")}
    listed = {row.cells[0] for row in PAGE.rows if row.head[0] == "format of the weight"}
    return listed == gathered == {name for name in gathered if FORMATS[name].is_2d}


def same_bits_of_all(facts: Facts) -> bool:
    """With 16 bits all gradients of experts have the bits of one process that has the tokens of all ranks."""
    return all(value == 0 for value in facts["dispatchers"]["AllToAll(payload='bf16')"].values())


# Sentences, by section. A check is a function of what was counted.
PROSE: dict[str, dict[str, Callable[[Facts], bool]]] = {
    "Several GPUs": {},
    FSDP: {
        "Three lines beside those of one GPU": lambda facts: facts["blocks"][FSDP]["gathered"] == ["uint8"],
        "gradients, weights and losses are those of plain FSDP2, bit by bit": lambda facts: facts["blocks"][FSDP][
            "same"
        ],
        "in square blocks the row and the column operand hold the same numbers": square_blocks,
        "exchange theirs in one MAX all-reduce": lambda facts: facts["casts step"]["exchanges"] == 1,
        "Shards of whole blocks (a multiple of 128 rows on every rank) exchange nothing; NVFP4 always": lambda facts: (
            facts["whole blocks"] == {"fp8_blockwise": 0, "mxfp8_128x128": 0, "nvfp4": 4}
        ),
        "- Everything else is FSDP2's": by_case(
            "support/gathered.py", "mixed", "recompute=True", "compiled=True", "adamw"
        ),
        "- Layers: ours, Transformers' experts (also transposed ones), and torchtitan's": by_case(
            "support/gathered_experts.py", "class PackedExperts", "def transposed_experts", "def titan("
        ),
        "if hidden_dim is a multiple of 128": by_case(
            "integrations/test_torchtitan_ranks.py", '"split a block of 128"'
        ),
        "- Beside tensor and expert parallelism: call gather_low_ after them": by_case(
            "support/gathered_parallel.py", "def tokens_cut", "def experts_cut"
        ),
        "- Checkpoints are plain": by_case("distributed/test_gather_low.py", '"unquantized": 0.0', '"names us": []'),
        "1-D blocks (mxfp8: forward and backward need different codes, which one gather for both would have to carry, "
        "so it would move as many bytes as bf16": lambda facts: "1-D blocks" in facts["recipes"]["mxfp8"][0],
        "What raises: a recipe": raises("fsdp", "changed recipe"),
        "or a dtype that changes after the first gather": raises("fsdp", "changed dtype"),
        "NVFP4 in shards of different sizes": raises("fsdp", "uneven nvfp4"),
        "a weight that was written by something else than an optimizer that holds it": raises("fsdp", "written"),
        "(weight.data, state_dict() entries, dcp.load in place), between the exchange and a gather, where blocks "
        "straddle: call refresh_weights_ after it": lambda facts: all(
            facts["refusals"]["fsdp"][each] == "written after 0.0" for each in ("data", "state dict", "loaded in place")
        ),
        "Shards of whole blocks are cast again": lambda facts: facts["whole blocks written"]["same"],
        "In-place writes to a gathered weight": raises("fsdp", "gathered weight"),
        "and load_state_dict(assign=True) from another such model": raises("fsdp", "assigned"),
        "FSDP2 itself refuses reshard_after_forward=<int> for such weights": lambda facts: (
            "Expected 1 all_gather_output" in facts["resharded to a number"]
        ),
        "BLOCKSCALE_CHECK_WEIGHTS=1 exchanges, casts and compares again in every gather": raises("fsdp", "checked"),
        "- Copies of a model": by_case("distributed/test_gather_low.py", "copy gathers", "pickled y"),
    },
    TP: {
        "Three lines beside those of one GPU": lambda facts: (
            facts["blocks"][TP]["y"] <= 3e-7 and max(facts["blocks"][TP]["off"].values()) <= 3e-7
        ),
        "weight gradients have the bits of one process": lambda facts: (
            [facts["tp owner"][each] for each in ("h", "dh", "up", "down")] == [0.0] * 4
        ),
        "(fp32: within 3e-7; 2 ranks: exactly the sum of the two parts)": lambda facts: (
            max(facts["tp owner"]["y off"], facts["tp owner"]["x off"]) <= 3e-7
            and held("distributed/test_tensor_parallel.py", "is the sum", "< 3e-7")
        ),
        "the amax of their 128 or 32 tokens": lambda facts: (
            [FORMATS[name].block[1] for name in ("fp8_1x128", "mxfp8_e4m3")] == [128, 32]
        ),
        # the smallest E4M3 value is 2^-9, and half of it rounds to even
        "an E4M3 value is zero at 2^-10 of the block's scale": lambda facts: (
            FORMATS["fp8_1x128"].element.min_subnormal == 2**-9
        ),
        "off by one step of the block's smallest subnormal at most": by_case(
            "casts/test_requantize.py", "test_underflows_are_counted_and_bounded"
        ),
        "Rows spread by 2^±20 within every block lose more than half of their values, and weight gradients move by up "
        "to 1e-4": lambda facts: facts["tp spread"]["lost"] > 0.5 and 0 < facts["tp spread"]["off"] <= 1e-4,
        "0 for [S, B, K], which moves no byte twice, 1 for [B, S, K], which copies codes once more": by_case(
            "support/tokens_sharded.py", "gather_dim=dim"
        ),
        "- Styles take layers that quantize_ has converted": raises("tp", "plain"),
        "SwiGLUParallel stores gate_up.weight as a DTensor [2, H, K] sharded along H": lambda facts: (
            "layers.0.mlp.gate_up.weight" in facts["blocks"][TP]["cut"]
        ),
        "load into weight.unflatten(0, (2, -1)) of a model on one GPU": by_case(
            "support/sequence_parallel.py", 'unflatten(1 if "experts" in name else 0, (2, -1)) if "gate_up" in name'
        ),
        "- Norms and biases": lambda facts: facts["blocks"][TP]["off"]["layers.0.norm.weight"] <= 3e-7,
        "- What gathers 16 or 32 bits: the input or gradient of a product that the recipe leaves unquantized": by_case(
            "distributed/test_tensor_parallel.py", '"layers dgrad unquantized"', '"layers all unquantized": 3.0'
        ),
        "- Layers that share an input gather it once each, or together: h = bs.distributed.gather_activation(x, "
        'recipe, group=mesh["tp"], gather_dim=1)': by_case("distributed/test_tensor_parallel.py", 'kind == "shared"'),
        "What raises, before any collective and on all ranks": lambda facts: (
            "raised after a collective" not in facts["refusals"]["tp"].values()
        ),
        "tokens or weights that split a block": raises(
            "tp", "tokens fp8", "rows of the weight", "columns of the weight"
        ),
        "recipes that cannot be requantized": raises("tp", "requantized fp8_blockwise", "requantized mxfp6"),
        "NVFP4, stochastic rounding in SwiGLUParallel": raises("tp", "nvfp4", "stochastic"),
        "or of tokens that are not contiguous ([B, S, K] in a row-parallel layer)": raises("tp", "scattered runs"),
        "an activation of a rank's own tokens, main_grad of DTensors": raises("tp", "activation", "main_grad"),
        'weight_cast="step" of DTensors without gather_low_': raises("tp", "step"),
        "Ranks that pass unequal shapes or options raise too (faults)": by_case(
            "distributed/test_failures.py", '"tokens"', '"recipes"'
        ),
    },
    CUT: {
        "more bytes than one row in 16 bits from k = 2 on": lambda facts: (
            SLOTS * facts["cut low"]["sent"][1][2] > facts["cut bf16"]["sent"][1][2] and SLOTS == 2
        ),
        "Any number of tokens": lambda facts: TOKENS % 32 > 0,
        "Hidden units of a rank are whole blocks: a multiple of 128 (FP8) or 32 (MX)": lambda facts: (
            [FORMATS[name].block[1] for name in ("fp8_1x128", "mxfp8_e4m3")] == [128, 32]
            and raises("cut", "hidden")(facts)
        ),
        "- The style takes an nn.MoE or a GroupedExperts": raises("cut", "linear"),
        "gate_up.weight is stored as [E, 2, H, K] sharded along H, its bias as [E, 2, H]: the packed parameter is "
        ".flatten(1, 2) of it": lambda facts: (
            facts["blocks"][CUT]["weight"] == [5, 2, 256, 64] and facts["blocks"][CUT]["own"] == [5, 2, 128, 64]
        ),
        "- The function on local tensors and a group is grouped_swiglu_parallel. It needs gate weights": raises(
            "cut", "no gates"
        ),
        '- Divided and cut: expert_parallel_(moe, mesh["ep", "tp"], dispatcher)': by_case(
            "distributed/test_tensor_parallel.py", '"mesh low"'
        ),
        'with "low" also down.weight is within 5e-7': by_case(
            "distributed/test_tensor_parallel.py", '(5e-7 if "low" in label else 0.0)'
        ),
        "- Attention on tp, whole experts on the same ranks": by_case("support/sequence_parallel.py", "mlp.router"),
        "SequenceParallel(sequence_dim=0, use_local_output=True) for moe.router and SwiGLUParallel(sequence_dim=0) for "
        "moe.shared": by_case(
            "support/sequence_parallel.py",
            "SequenceParallel(sequence_dim=0, use_local_output=True)",
            "SwiGLUParallel(sequence_dim=0)",
        ),
        "What raises: hidden units that split a block": raises("cut", "hidden"),
        "stochastic rounding, recipes that cannot travel as codes": raises("cut", "stochastic", "low"),
        "rows without a routing or gate weights": raises("cut", "ends", "no gates"),
        'hooks on gate_up or down with "low", experts of Transformers': raises("cut", "hooks", "linear"),
        'main_grad of DTensors, weight_cast="step" of DTensors': raises("cut", "main_grad", "step"),
        "Ranks that pass unequal shapes or options raise too (faults)": by_case(
            "distributed/test_failures.py", '"cut experts"'
        ),
    },
    EP: {
        "Three lines: a mesh, a dispatcher, and the call": lambda facts: (
            [facts["blocks"][EP][each] for each in ("same", "payload", "mesh")] == [True, "low", 1]
        ),
        "the first ranks have ceil(experts / ranks) each": lambda facts: facts["blocks"][EP]["experts"] == 3,
        'fp32 tokens travel in fp32 with payload="bf16"': lambda facts: (
            {dtypes[0] for _, dtypes, _ in facts["ep fp32"]["sent"][1:]} == {"float32"}
        ),
        "8-bit elements and scales that are powers of two: fp8_blockwise_pow2, mxfp8, mxfp8_128x128": lambda facts: (
            {"fp8_blockwise_pow2", "mxfp8", "mxfp8_128x128"} == set(facts["tp recipes requantized"]) - {"bf16"}
        ),
        "Any other recipe raises, with its name": lambda facts: all(
            f"recipe '{name}'" in facts["refusals"]["ep"][f"low {name}"] for name in ("fp8_blockwise", "nvfp4", "mxfp4")
        ),
        "All three give the same bits": lambda facts: all(
            facts["dispatchers"][f"AllToAll(payload='{payload}')"]
            == facts["dispatchers"][f"FixedCapacity(rows=123, payload='{payload}', transport=None)"]
            for payload in ("bf16", "low")
        ),
        "name no class of ours: a checkpoint of 4 ranks is read by 2, by any other number": by_case(
            "distributed/test_expert_parallel.py", '"names us": False', "test_four_ranks"
        ),
        "- Parameters of experts become DTensors Shard(0) on the mesh": lambda facts: (
            facts["blocks"][EP]["experts"] == 3
        ),
        "- FSDP2 on another dimension of the mesh": by_case("support/expert_parallel_state.py", "def with_fsdp"),
        "- Gradients of experts are sums over the tokens of all ranks": same_bits_of_all,
        "- load counts the rank's own tokens": by_case("support/expert_parallel.py", '"load"'),
        "What raises, on all ranks alike": by_case("distributed/test_expert_parallel.py", "the same errors"),
        "more rows than FixedCapacity has": raises("ep", "overflow on rank 0", "overflow on rank 1"),
        "(on CUDA as a device assertion, which the host sees at its next sync)": by_case(
            "../src/blockscale/distributed/fixed_capacity.py", "_assert_async"
        ),
        "calls that differ in dtype, slots, features": raises("ep", "dtypes", "slots"),
        "or needed gradients, such as one rank that evaluates while another trains": raises("ep", "one evaluates"),
        "layers, recipes or dispatchers that differ": raises("ep", "ranks", "dispatchers"),
        "sharded or converted experts": raises("ep", "twice"),
        "main_grad; a change of weights between forward and backward": raises(
            "ep", "main_grad", "changed", "changed low"
        ),
        'weight_cast="step" with attach': raises("ep", "attach"),
        "hooks on gate_up or down, gpt-oss's activation": raises("ep", "hooks", "activation"),
        'and recipes that change with the step, with "low"': raises("ep", "low since"),
        "With AllToAll and FixedCapacity no token is ever dropped": raises("ep", "overflow on rank 0"),
        "- torch.compile: with FixedCapacity the layer is one graph (fullgraph=True)": by_case(
            "distributed/test_tensor_parallel.py", '"compiled cut", "compiled divided"'
        ),
        "Before torch 2.13 these layers run eagerly in compiled code, a graph break: 2.11 gives gradients of zero": (
            by_case("../src/blockscale/distributed/compiling.py", '>= "2.13"', "torch 2.11")
        ),
        "- What does not raise at once": by_case("support/failing_ranks.py", '"experts"'),
    },
    FAULTS: {
        "Groups that a device mesh makes have a timeout of their own, 30 minutes for gloo": lambda facts: (
            facts["blocks"][FAULTS] == {"steps": 1, "minutes": 30.0}
        ),
        "- Calls are compared through the store of the group": by_case(
            "distributed/test_failures.py", "ranks that make different calls"
        ),
        "- What is not detected": by_case("../src/blockscale/distributed/agreement.py", "is_compiling()", "_seen"),
        "(BLOCKSCALE_CHECK_RANKS=1 compares every call)": by_case(
            "../src/blockscale/distributed/agreement.py", "not env.flag(CHECK)"
        ),
        "- On GPUs an error of one rank reaches others that wait for NCCL": lambda facts: "Not run." in SOURCE,
    },
}

# Words that join the phrases of a bullet on what raises.
JOINS = {"and", "before", "with"}


# ---- tests -----------------------------------------------------------------------------------------------------------


def spans(text: str, section: str) -> list[tuple[int, int]]:
    """Where the phrases of a section lie in its prose."""
    return [(text.index(each), text.index(each) + len(each)) for each in PROSE.get(section, {}) if each in text]


def unchecked(page: Page) -> list[str]:
    """What of a page has no check, and checks whose text the page no longer has."""
    rows = {(row.section, row.cells[0]) for row in page.rows if row.section != MODELLED}
    found = [f"{section}: the row {first!r}: add a check to ROWS" for section, first in rows - ROWS.keys()]
    found += [f"{section}: no row {first!r} is left: its check in ROWS" for section, first in ROWS.keys() - rows]
    for section, text in page.prose.items():
        found += [
            f"{section}: {each!r} is no longer there: see PROSE" for each in PROSE.get(section, {}) if each not in text
        ]
        held_at, start = spans(text, section), 0
        for line in text.splitlines():
            inside = [(max(a, start) - start, b - start) for a, b in held_at if a < start + len(line) and b > start]
            start += len(line) + 1
            if line.startswith("Tests: "):
                continue
            numbers = [m.start() for m in re.finditer(r"(?<![A-Za-z0-9_.^±-])\d", line)]
            words = (
                [m.start() for m in re.finditer(r"\w{3,}", line) if m[0] not in JOINS]
                if "- What raises" in line
                else []
            )
            loose = sorted({at for at in (*numbers, *words) if not any(a <= at < b for a, b in inside)})
            if loose:
                found.append(f"{section}: {line[loose[0] : loose[0] + 60]!r} has no check: add a phrase to PROSE")
            elif line.startswith("- ") and not inside:
                found.append(f"{section}: {line[:60]!r} has no check: add a phrase to PROSE")
    return found


def test_everything_on_the_page_has_a_check() -> None:
    """Without ranks, so that an edit of the page is told at once."""
    missing = unchecked(PAGE)
    assert not missing, "docs/distributed.md and tests/distributed/test_page.py differ:\n" + "\n".join(missing)


def test_an_edit_without_a_check_is_named() -> None:
    for old, new, said in (
        ("| DDP |", "| DDP2 |", "the row 'DDP2'"),
        ("| recipes |", "| formats |", "no row 'recipes'"),
        (
            "an `activation` of a rank's",
            "an `activation` of a cat's",
            'own tokens, main_grad of DTensors" is no longer',
        ),
        ("NVFP4, stochastic", "NVFP4, mice, stochastic", "'NVFP4, stochastic rounding in SwiGLUParallel' is no longer"),
        ("recipes that cannot be requantized,", "recipes that cannot be requantized, mice,", "'mice, NVFP4"),
        ("All weights of the model", "All 12 weights of the model", "'12 weights"),
        ("- **Styles** take layers", "- **Kinds** take layers", "'- Kinds take layers"),
    ):
        assert SOURCE.count(old) == 1, old
        assert said in "\n".join(unchecked(parse(SOURCE.replace(old, new)))), old


def check_modelled_bytes(facts: Facts, other: Facts) -> None:
    """The model of `blockscale roofline fsdp`, `tp` and `ep` has the bytes that ranks give to collectives."""
    for recipe in ("fp8_blockwise", "mxfp8_128x128", "nvfp4"):
        weights, _, _ = fsdp_transfers(512 * 512, get_recipe(recipe).formats()["fprop_w"], RANKS)
        # NVFP4 also sends the amax of the tensor, 4 bytes
        assert facts[f"wire {recipe}"]["share"] * 512 * 512 - weights.given == (4 if recipe == "nvfp4" else 0), recipe
    formats = get_recipe("mxfp8").formats()
    for wgrad in ("owner", "requantized"):
        *gathered, y, dx = tp_transfers(256, 128, formats, RANKS, gathers=wgrad)
        x_and_dy = 2 * 2 * 256 * 128 / RANKS
        assert sum(each.given for each in gathered) / x_and_dy == facts[f"tp {wgrad}"]["share"]
        assert (y.given + dx.given) / (2 * 2 * 256 * 128) == facts[f"tp {wgrad}"]["summed"]
    for payload, chosen in (("bf16", None), ("low", formats)):
        modelled = [each.given for each in ep_transfers(48, FEATURES, 2, EXPERTS, chosen, RANKS)]
        counted = [
            [count for _, dtypes, count in each[f"ep {payload}"]["sent"] if dtypes != ["float64"]]
            for each in (facts, other)
        ]
        # ranks send their own rows, and return those that came
        assert modelled == [sum(counts) / RANKS for counts in zip(*counted, strict=True)], payload


@pytest.mark.slow
def test_the_page_says_what_two_ranks_count(tmp_path: Path) -> None:
    """One test, since starting ranks costs seconds."""
    start_ranks(run, (str(tmp_path), SOURCE, README), RANKS)
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for facts in both:
        failed = {name: each for name, each in facts.items() if isinstance(each, str) and "Traceback" in each}
        assert not failed, f"{len(failed)} of {len(facts)} failed, first: {next(iter(failed.items()))}"
        for section, found in facts["blocks"].items():
            assert isinstance(found, dict), f"docs/distributed.md, {section}: {found}"
        assert facts["blocks"].keys() == {FSDP, TP, CUT, EP, FAULTS, "README"}
    facts = both[0]
    readme = facts["blocks"]["README"]
    assert readme == {"same": True, "gathered": ["uint8"], "lines": 3}
    assert "three lines between" in README
    check_modelled_bytes(facts, both[1])
    wrong = [
        f"{row.section}: the row {' | '.join(row.cells)}"
        for row in PAGE.rows
        if row.section != MODELLED and not ROWS[row.section, row.cells[0]](row, facts)
    ]
    for section, phrases in PROSE.items():
        wrong += [f"{section}: {phrase}" for phrase, check in phrases.items() if not check(facts)]
    assert not wrong, "docs/distributed.md says what is not so:\n" + "\n".join(wrong)
