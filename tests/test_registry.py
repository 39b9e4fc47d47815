"""The kernel registry: which kernel serves a request, what a forced backend may and may not do, what is logged."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale import registry
from blockscale.errors import BackendError, UnknownNameError
from blockscale.formats import FORMATS
from blockscale.formats.spec import LEGAL_PAIRS, WEIGHT_ONLY_PAIRS
from blockscale.registry import Forecast, Request, explain_request, kernel, select, use_backend
from support.products import HYPOTHETICAL, ONE_D, PAIRS, gaussian

SRC = Path(__file__).parents[1] / "src"
ONE_CAST = ("cast", "dequantize", "swiglu", "rmsnorm", "permute", "permute_columns")
TWO_CASTS = ("cast_both", "swiglu_both", "swiglu_backward_both", "rmsnorm_both", "permute_both")
MOVES = ("permute_rows", "combine_rows", "combine_dots", "clear_rows", "place_rows", "transpose_codes")
OPERATIONS = (*ONE_CAST, *TWO_CASTS, "gemm", "m_grouped", "k_grouped", *MOVES)


def request_for(
    op: str,
    formats: tuple[str, ...],
    where: str = "cpu",
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layouts: tuple[str, ...] | None = None,
    options: frozenset[str] = frozenset(),
) -> Request:
    sizes = {"gemm": (128, 64, 256), "m_grouped": (128, 64, 256, 4), "k_grouped": (64, 64, 256, 4)}
    shape = sizes.get(op, (128, 256)) if shape is None else shape
    if layouts is None:
        layouts = tuple(FORMATS[name].default_layout if name in FORMATS else "" for name in formats)
    return Request(op, HYPOTHETICAL[where], formats, shape, dtype, layouts, options)


def formats_of(op: str) -> list[tuple[str, ...]]:
    """Every combination of formats that an operation accepts."""
    if op in ONE_CAST:
        return [(name,) for name in FORMATS]
    if op in TWO_CASTS:
        return list(itertools.product(FORMATS, FORMATS))
    if op in MOVES:
        return [()]
    either = [*PAIRS, *WEIGHT_ONLY_PAIRS]
    one_sided = {"gemm": either, "m_grouped": either}
    return list(one_sided.get(op, [pair for pair in PAIRS if set(pair) <= set(ONE_D)]))


@pytest.fixture
def toy(monkeypatch):
    """An operation with two kernels for the CPU and one for CUDA; removed after the test."""
    monkeypatch.setitem(registry._REGISTRY, "toy", [])
    monkeypatch.setattr(registry, "_logged", set())

    def reject(request: Request) -> str | None:
        return "takes no odd rows" if request.shape[0] % 2 else None

    @kernel("toy", "slow", devices=(), priority=-5)
    def slow() -> str:
        """the slow one"""
        return "slow"

    @kernel("toy", "fast", devices=("cpu",), priority=5, reject=reject)
    def fast() -> str:
        """the fast one"""
        return "fast"

    @kernel("toy", "elsewhere", devices=("cuda",), priority=9)
    def elsewhere() -> str:
        return "elsewhere"

    yield "toy"
    registry._select.cache_clear()


def toy_request(rows: int = 2) -> Request:
    return request_for("toy", ("mxfp4",), shape=(rows, 8))


# ---- the registry --------------------------------------------------------------------------------------------------


def test_operations():
    assert sorted(registry.operations()) == sorted(OPERATIONS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_reference_is_last_and_takes_everything(op):
    entries = registry.kernels(op)
    assert [entry.backend for entry in entries].count("reference") == 1
    assert entries[-1].backend == "reference"
    assert [entry.priority for entry in entries] == sorted((entry.priority for entry in entries), reverse=True)
    reference = entries[-1]
    options = [frozenset(), frozenset({"bias", "accumulate", "sliced", "strided", "offs", "hadamard", "stochastic"})]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    size = {"gemm": 3, "m_grouped": 4, "k_grouped": 4}.get(op, 2)
    shapes = [(0,) * size, (1,) * size, (129, 7, 33, 5)[:size]]
    for formats, where, dtype, option, shape in itertools.product(
        formats_of(op), HYPOTHETICAL, dtypes, options, shapes
    ):
        request = request_for(op, formats, where, shape, dtype, options=option)
        assert reference.refusal(request) is None, str(request)
        assert select(request) is not None


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_kernel_has_a_summary(op):
    pairs = {*LEGAL_PAIRS, *(WEIGHT_ONLY_PAIRS if op in ("gemm", "m_grouped") else ())}
    for entry in registry.kernels(op):
        assert entry.summary
        assert entry.op == op
        assert entry.formats <= (set(formats_of(op)) if op in (*ONE_CAST, *TWO_CASTS) else pairs)


def test_kernels_returns_a_copy():
    registry.kernels("gemm").clear()
    assert registry.kernels("gemm")


def test_backends():
    of_triton = {"triton", "hopper", "hopper_rows", "hopper_upcast", "blackwell"}
    assert set(registry.backends()) - of_triton == {"reference", "torch", "torch_sm100"}


def test_requests_and_kernels_are_hashable():
    a, b = request_for("gemm", ("mxfp4", "mxfp4")), request_for("gemm", ("mxfp4", "mxfp4"))
    assert a == b
    assert len({a, b}) == 1
    assert len({a, replace(a, shape=(1, 2, 3)), replace(a, options=frozenset({"bias"}))}) == 3
    assert len(set(registry.kernels("gemm"))) == len(registry.kernels("gemm"))
    assert len(set(HYPOTHETICAL.values())) == len(HYPOTHETICAL)


def test_a_request_reads_like_a_sentence():
    text = str(request_for("gemm", ("mxfp4", "mxfp4"), "sm_90", options=frozenset({"bias", "accumulate"})))
    assert text == "gemm mxfp4 @ mxfp4 128x64x256 bfloat16 with accumulate, bias on cuda sm_90"


# ---- which kernel, on machines that are not here -------------------------------------------------------------------

UPCAST, VENDOR = "torch.scaled_mm_upcast", "torch.scaled_mm_hopper"
GLUON, REFERENCE = "hopper.scaled_mm", "reference.scaled_mm"


def kernel_for(request: Request) -> str:
    taken = select(request)
    return f"{taken.backend}.{taken.launch.__name__}"


@pytest.mark.parametrize(
    ("where", "pair", "launcher"),
    [
        ("cpu", ("mxfp8_e4m3", "mxfp8_e4m3"), UPCAST),
        ("cpu", ("nvfp4", "nvfp4_16x16"), UPCAST),
        ("cpu", ("fp8_1x128", "fp8_128x128"), REFERENCE),
        ("sm_80", ("mxfp8_e4m3", "mxfp8_e4m3"), UPCAST),
        ("sm_80", ("nvfp4", "nvfp4"), UPCAST),
        ("sm_80", ("fp8_1x128", "fp8_1x128"), REFERENCE),
        ("sm_90", ("fp8_1x128", "fp8_1x128"), GLUON),
        ("sm_90", ("fp8_1x128", "fp8_128x128"), GLUON),
        ("sm_90", ("fp8_128x128", "fp8_1x128"), VENDOR),
        ("sm_90", ("mxfp8_e4m3", "mxfp8_e4m3"), UPCAST),
        ("sm_90", ("mxfp8_e4m3", "mxfp8_e4m3_128x128"), "hopper.scaled_mm_mx"),
        ("sm_100", ("mxfp8_e4m3", "mxfp8_e4m3"), UPCAST),
        ("sm_100", ("mxfp8_e4m3_128x128", "mxfp8_e5m2"), UPCAST),
        ("sm_100", ("mxfp8_e5m2", "mxfp8_e4m3"), UPCAST),
        ("sm_100", ("mxfp8_e5m2", "mxfp8_e5m2"), UPCAST),
        ("sm_100", ("nvfp4", "nvfp4"), UPCAST),
        ("sm_100", ("nvfp4", "nvfp4_16x16"), UPCAST),
        ("sm_100", ("mxfp4", "mxfp6_e2m3"), UPCAST),
        ("sm_100", ("fp8_1x128", "fp8_128x128"), REFERENCE),
        ("sm_120", ("mxfp8_e4m3", "mxfp8_e4m3"), UPCAST),
        ("sm_120", ("fp8_1x128", "fp8_128x128"), REFERENCE),
    ],
)
def test_gemm_kernels_by_machine(where, pair, launcher):
    assert kernel_for(request_for("gemm", pair, where)) == launcher


@pytest.mark.parametrize(
    ("where", "pair", "shape", "launcher", "reason"),
    [
        ("sm_90", ("fp8_128x128", "fp8_1x128"), (128, 60, 256), REFERENCE, "multiples of 16, these are 60 and 256"),
        ("sm_90", ("fp8_1x128", "fp8_1x128"), (128, 60, 250), GLUON, "multiples of 16, these are 60 and 250"),
        ("sm_90", ("fp8_1x128", "fp8_1x128"), (130, 64, 256), GLUON, "rows in multiples of 4, not 130"),
        ("sm_90", ("fp8_128x128", "fp8_1x128"), (130, 64, 256), VENDOR, None),
        ("sm_90", ("fp8_1x128", "fp8_1x128"), (0, 64, 256), REFERENCE, "no empty operands"),
        ("sm_100", ("mxfp8_e4m3", "mxfp8_e4m3"), (128, 64, 272), UPCAST, "these are 64 and 272"),
        ("sm_100", ("nvfp4", "nvfp4"), (128, 0, 256), UPCAST, "no empty operands"),
    ],
)
def test_vendor_kernels_refuse_sizes_with_a_reason(where, pair, shape, launcher, reason):
    request = request_for("gemm", pair, where, shape)
    assert kernel_for(request) == launcher
    if reason is not None:
        assert reason in str(explain_request(request))


def test_scales_with_foreign_strides_are_refused_by_the_vendor_kernel():
    request = request_for("gemm", ("fp8_1x128", "fp8_1x128"), "sm_90", options=frozenset({"strided"}))
    assert select(request).backend == "reference"
    assert "strides of their layout" in str(explain_request(request))


@pytest.mark.parametrize("op", ["m_grouped", "k_grouped"])
def test_grouped_kernels_by_machine(op):
    for where in HYPOTHETICAL:
        decoded = "hopper_upcast" if where == "sm_90" else "torch"
        assert select(request_for(op, ("mxfp8_e4m3", "mxfp4"), where)).backend == decoded
        pair = ("fp8_1x128", "fp8_128x128") if op == "m_grouped" else ("fp8_1x128", "fp8_1x128")
        served = {"cpu": "reference", "sm_90": "hopper"}.get(where, "triton")
        assert select(request_for(op, pair, where)).backend == served
        # results that torch cannot give without rounding twice
        other = select(request_for(op, ("nvfp4", "nvfp4"), where, dtype=torch.float32)).backend
        assert other == {"cpu": "torch", "sm_90": "hopper_upcast"}.get(where, "triton")
    odd = (128, 60, 252, 4)
    # rows of decoded values that start anywhere; padded groups of tokens never do
    served = "triton" if op == "m_grouped" else "hopper_upcast"
    assert select(request_for(op, ("mxfp4", "mxfp4"), "sm_90", shape=odd)).backend == served
    assert select(request_for(op, ("mxfp4", "mxfp4"), shape=odd)).backend == "torch"


def test_conversions_are_shown():
    request = request_for("gemm", ("mxfp8_e4m3", "mxfp8_e5m2"), "sm_100")
    # never run, so the vendor's product serves only if forced
    assert kernel_for(request) == UPCAST
    with use_backend(gemm="torch_sm100"):
        taken = explain_request(request).taken
        assert taken is not None
        assert taken.conversions == ("mxfp8_e4m3 scales plain -> blocked", "mxfp8_e5m2 scales plain -> blocked")
        assert "converts mxfp8_e5m2 scales plain -> blocked" in str(explain_request(request))
        ready = replace(request, layouts=("blocked", "blocked"))
        assert explain_request(ready).taken.conversions == ()
    # the default layouts of FP8 are the ones that sm_90 reads
    hopper = explain_request(request_for("gemm", ("fp8_1x128", "fp8_128x128"), "sm_90")).taken
    assert hopper.conversions == ()


@pytest.mark.parametrize("where", HYPOTHETICAL)
def test_explain_and_select_agree(where):
    for pair in LEGAL_PAIRS:
        request = request_for("gemm", pair, where)
        explanation = explain_request(request)
        assert explanation.taken.summary == select(request).summary
        assert [candidate.taken for candidate in explanation.candidates].count(True) == 1
        assert len(explanation.candidates) == len(registry.kernels("gemm"))
        for candidate, found in zip(explanation.candidates, registry.kernels("gemm"), strict=True):
            if found.refusal(request) is not None:
                assert candidate.reason == found.refusal(request)
            assert candidate.fits == (found.misfit(request) is None)


@pytest.mark.parametrize(
    ("backend", "request_", "reason"),
    [
        ("torch", request_for("gemm", ("fp8_1x128", "fp8_1x128")), "runs on cuda, not on cpu"),
        ("torch", request_for("gemm", ("fp8_1x128", "fp8_1x128"), "sm_80"), "needs sm_90, this is sm_80"),
        ("torch_sm100", request_for("gemm", ("nvfp4", "nvfp4"), "sm_90"), "needs sm_100 to sm_103, this is sm_90"),
        ("torch", request_for("gemm", ("mxfp4", "mxfp4"), "sm_90"), "does not serve mxfp4 @ mxfp4"),
        (
            "hopper",
            request_for("gemm", ("fp8_1x128", "fp8_1x128"), "sm_90", options=frozenset({"accumulate"})),
            None,
        ),
        ("hopper", request_for("gemm", ("fp8_1x128", "fp8_128x128"), "sm_90", options=frozenset({"accumulate"})), None),
    ],
)
def test_refusals(backend, request_, reason):
    found = next(entry for entry in registry.kernels("gemm") if entry.backend == backend)
    assert found.refusal(request_) == reason


def test_a_kernel_without_the_dtype_refuses():
    found = replace(registry.kernels("gemm")[-1], dtypes=frozenset({torch.bfloat16}))
    assert found.refusal(request_for("gemm", ("mxfp4", "mxfp4"), dtype=torch.float32)) == "has no float32"


def test_explain_shows_the_forecast_of_a_kernel(toy):
    def forecast(request: Request) -> Forecast:
        return Forecast(f"{request.shape[0]} rows", 4.0, 8_000_000, 1.0, "memory", "guessed")

    @kernel("toy", "predicted", devices=(), priority=7, forecast=forecast, reject=lambda request: None)
    def predicted() -> None:
        """the one with a model"""

    explanation = explain_request(toy_request(2))
    assert explanation.taken.forecast == forecast(toy_request(2))
    assert [each.forecast is not None for each in explanation.candidates].count(True) == 1
    assert str(explanation).splitlines()[3:4] == [
        "   2 rows; predicted 4.0 µs, 2 TFLOP/s; "
        "bound 1.0 µs by memory, of which the prediction reaches 25% (guessed)"
    ]  # fmt: skip


# ---- forcing a backend ---------------------------------------------------------------------------------------------


def backend_of(op: str, formats: tuple[str, ...]) -> str:
    return select(request_for(op, formats)).backend


MX_PAIR, FP8_PAIR = ("mxfp4", "mxfp4"), ("fp8_1x128", "fp8_1x128")


def test_use_backend_holds_for_every_operation_that_has_it():
    with use_backend("reference"):
        assert {backend_of(op, MX_PAIR) for op in ("gemm", "m_grouped", "k_grouped")} == {"reference"}
    with use_backend("torch"):
        assert backend_of("gemm", MX_PAIR) == "torch"
        assert backend_of("cast", ("mxfp4",)) == "reference"  # there is no torch backend of casts
    assert backend_of("gemm", MX_PAIR) == "torch"


def test_a_forced_backend_never_falls_back():
    with use_backend("torch"), pytest.raises(BackendError) as caught:
        select(request_for("gemm", FP8_PAIR))
    text = str(caught.value)
    assert "backend 'torch' cannot run gemm fp8_1x128 @ fp8_1x128" in text
    assert "runs on cuda, not on cpu" in text
    assert "does not serve fp8_1x128 @ fp8_1x128" in text
    assert "reference" in text  # the way out
    assert isinstance(caught.value, NotImplementedError)


def test_a_forced_backend_never_falls_back_in_a_call():
    q = bs.quantize(gaussian(4, 128), "fp8_1x128")
    with use_backend(gemm="torch"), pytest.raises(BackendError):
        bs.scaled_mm(q, q)
    assert bs.scaled_mm(q, q).shape == (4, 4)


def test_use_backend_per_operation():
    with use_backend(gemm="reference"):
        assert backend_of("gemm", MX_PAIR) == "reference"
        assert backend_of("m_grouped", MX_PAIR) == "torch"
    with use_backend("torch", gemm="reference"):
        assert backend_of("gemm", MX_PAIR) == "reference"
        assert backend_of("m_grouped", MX_PAIR) == "torch"


def test_use_backend_nests_and_restores():
    with use_backend("reference"):
        with use_backend(gemm="torch"):
            assert backend_of("gemm", MX_PAIR) == "torch"
            assert backend_of("k_grouped", MX_PAIR) == "reference"
        assert backend_of("gemm", MX_PAIR) == "reference"
        with use_backend("torch"):
            assert backend_of("gemm", MX_PAIR) == "torch"
            assert backend_of("k_grouped", MX_PAIR) == "torch"
        assert backend_of("gemm", MX_PAIR) == "reference"
        with pytest.raises(RuntimeError, match="inside"), use_backend("torch"):
            raise RuntimeError("inside")
        assert backend_of("gemm", MX_PAIR) == "reference"
    assert registry._forced == []


def test_auto_unforces_a_backend():
    with use_backend("reference"), use_backend(gemm="auto"):
        assert backend_of("gemm", MX_PAIR) == "torch"
        assert backend_of("m_grouped", MX_PAIR) == "reference"
    with use_backend(gemm="reference"), use_backend("auto"):
        assert backend_of("gemm", MX_PAIR) == "torch"


def test_a_backend_is_forced_on_other_threads_too():
    """On CUDA a backward runs on autograd's own threads."""
    found: list[str] = []
    with use_backend("reference"):
        thread = threading.Thread(target=lambda: found.append(backend_of("gemm", MX_PAIR)))
        thread.start()
        thread.join()
    assert found == ["reference"]


def test_explain_shows_a_forced_backend():
    with use_backend(gemm="reference"):
        explanation = explain_request(request_for("gemm", MX_PAIR))
    assert explanation.taken.backend == "reference"
    assert explanation.taken.reason == "forced: reference"
    assert "able, but reference is forced" in str(explanation)
    with use_backend(gemm="torch"):
        assert explain_request(request_for("gemm", FP8_PAIR)).taken is None


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda: use_backend("referenze"), ("unknown backend 'referenze'", "did you mean reference?")),
        (lambda: use_backend(gemm="torhc"), ("unknown backend of gemm 'torhc'", "torch")),
        (lambda: use_backend(gem="torch"), ("unknown operation 'gem'", "gemm")),
        (lambda: use_backend(cast="torch"), ("unknown backend of cast 'torch'", "reference")),
    ],
)
def test_unknown_names_propose_the_nearest(call, texts):
    with pytest.raises(UnknownNameError) as caught, call():
        pass
    assert all(text in str(caught.value) for text in texts)
    assert registry._forced == []


def test_unknown_operation():
    with pytest.raises(UnknownNameError, match="did you mean gemm"):
        registry.kernels("gem")


# ---- the environment -----------------------------------------------------------------------------------------------


def test_the_environment_forces_a_backend(monkeypatch):
    monkeypatch.setenv("BLOCKSCALE_BACKEND", "reference")
    assert backend_of("gemm", MX_PAIR) == "reference"
    with use_backend("torch"):  # the program overrides the environment
        assert backend_of("gemm", MX_PAIR) == "torch"
    with use_backend("auto"):
        assert backend_of("gemm", MX_PAIR) == "torch"
    monkeypatch.setenv("BLOCKSCALE_BACKEND", "torch")
    assert backend_of("cast", ("mxfp4",)) == "reference"
    with pytest.raises(BackendError):
        select(request_for("gemm", FP8_PAIR))
    monkeypatch.setenv("BLOCKSCALE_BACKEND", " auto ")
    assert backend_of("gemm", FP8_PAIR) == "reference"
    monkeypatch.setenv("BLOCKSCALE_BACKEND", "torhc")
    with pytest.raises(UnknownNameError, match="did you mean torch"):
        select(request_for("gemm", MX_PAIR))


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("auto", "assert 'gemm' in bs.registry.operations()\nwith bs.use_backend('torch', gemm='torch'): pass"),
        ("torch", "import torch; bs.quantize(torch.ones(2, 32), 'mxfp4')"),
    ],
    ids=["use_backend", "environment"],
)
def test_the_registry_is_complete_in_a_fresh_process(setting, code):
    """Names resolve lazily: a program may first force a backend of a package that is not imported yet."""
    result = subprocess.run(
        [sys.executable, "-c", f"import blockscale as bs\n{code}"],
        env={**os.environ, "BLOCKSCALE_BACKEND": setting, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


# ---- kernels that come and go --------------------------------------------------------------------------------------


def test_priority_decides_and_refusals_pass_on(toy):
    assert [entry.backend for entry in registry.kernels(toy)] == ["elsewhere", "fast", "slow"]
    assert select(toy_request(2)).launch() == "fast"
    assert select(toy_request(3)).launch() == "slow"
    with use_backend(toy="slow"):
        assert select(toy_request(2)).backend == "slow"
    with use_backend(toy="fast"), pytest.raises(BackendError, match="takes no odd rows"):
        select(toy_request(3))


def test_a_new_kernel_counts_at_once(toy):
    assert select(toy_request(2)).backend == "fast"

    @kernel(toy, "faster", devices=("cpu",), priority=50)
    def faster() -> str:
        return "faster"

    assert select(toy_request(2)).backend == "faster"


def test_a_kernel_defers_requests_that_others_serve_faster(toy, caplog):
    def defer(request):
        return None if request.shape[0] < 10 else "would take longer"

    def reject(request):
        return "has no room" if request.shape[0] > 99 else None

    kernel(toy, "special", devices=("cpu",), priority=6, defer=defer, reject=reject)(lambda: "special")
    small, middle, large = (toy_request(rows) for rows in (4, 50, 500))
    assert [select(request).backend for request in (small, middle, large)] == ["special", "fast", "fast"]
    assert not caplog.records, "a kernel that defers is not logged"
    with use_backend(toy="special"):
        assert select(middle).backend == "special"
        with pytest.raises(bs.errors.BackendError, match="has no room"):
            select(large)
    text = str(explain_request(middle))
    assert "special: able, but would take longer" in text
    assert "-> fast" in text


def test_a_forced_only_kernel_serves_only_if_forced(toy):
    kernel(toy, "untried", devices=("cpu",), priority=99, forced_only=True)(lambda: "untried")
    assert select(toy_request(2)).backend == "fast"
    assert explain_request(toy_request(2)).taken.backend == "fast"
    assert "untried: able, but only if forced" in str(explain_request(toy_request(2)))
    with use_backend(toy="untried"):
        assert select(toy_request(2)).backend == "untried"
        assert explain_request(toy_request(2)).taken.backend == "untried"
    untried = {f"{entry.backend}.{entry.launch.__name__}" for entry in registry.kernels("gemm") if entry.forced_only}
    assert untried <= {
        "triton.scaled_mm",
        "torch_sm100.scaled_mm_blackwell",
        "torch_sm100.scaled_mm_mxfp4",
        "blackwell.scaled_mm_sm100",
        "blackwell.scaled_mm_sm120",
        "hopper.scaled_mm_mx",
    }


def test_no_kernel_is_an_error_with_every_reason(toy):
    registry._REGISTRY[toy][:] = [entry for entry in registry._REGISTRY[toy] if entry.backend != "slow"]
    with pytest.raises(BackendError) as caught:
        select(toy_request(3))
    assert "no backend can run toy" in str(caught.value)
    assert "fast takes no odd rows" in str(caught.value)
    assert "elsewhere runs on cuda, not on cpu" in str(caught.value)


def test_a_slower_kernel_is_logged_once(toy, caplog):
    caplog.set_level(logging.DEBUG, logger="blockscale")
    for rows in (2, 4):
        select(toy_request(rows))
    assert caplog.records == []  # the best kernel of this device; kernels for other devices are not logged
    for rows in (3, 5, 3):
        select(toy_request(rows))
    assert [record.message for record in caplog.records] == ["toy mxfp4 on cpu uses slow: fast takes no odd rows"]
    assert caplog.records[0].levelno == logging.INFO


def test_a_slower_kernel_on_a_gpu_is_a_warning(toy, caplog):
    kernel(toy, "tuned", devices=("cuda",), priority=99, reject=lambda request: "is not built")(lambda: None)
    caplog.set_level(logging.DEBUG, logger="blockscale")
    request = replace(toy_request(2), capability=HYPOTHETICAL["sm_90"])
    for _ in range(2):
        assert select(request).backend == "elsewhere"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "tuned is not built" in caplog.records[0].message


def test_a_forced_kernel_is_not_logged(toy, caplog):
    caplog.set_level(logging.DEBUG, logger="blockscale")
    with use_backend(toy="slow"):
        select(toy_request(3))
    assert caplog.records == []


@pytest.mark.parametrize("op", ["m_grouped", "k_grouped"])
def test_a_grouped_upcast_that_is_refused_is_logged(op: str, caplog: pytest.LogCaptureFixture, monkeypatch):
    """Entries that only defer to others for few rows are not: k-grouped has none."""
    pytest.importorskip("blockscale.grouped._hopper_upcast", reason="this Triton has no Gluon for Hopper")
    monkeypatch.setattr(registry, "_logged", set())
    groups = 5000
    shape = (groups * 4, 64, 256, groups) if op == "m_grouped" else (64, 64, groups * 4, groups)
    with caplog.at_level(logging.WARNING, logger="blockscale"):
        select(request_for(op, ("mxfp8_e4m3", "mxfp8_e4m3"), "sm_90", shape))
    named = "hopper_upcast takes at most" in caplog.text
    assert named == (op == "k_grouped")
