"""CastSpec and CastPlan: defaults of every format, and plans that round-trip through text."""

from __future__ import annotations

import itertools

import pytest
import torch

from blockscale import CastSpec, Stochastic, rng_state
from blockscale.errors import OptionError, ShapeError, UnknownNameError
from blockscale.formats import FORMATS, CastPlan, as_cast_spec, stream_id

DEFAULTS = {
    "mxfp8_e4m3": ("rceil", "plain"),
    "mxfp8_e5m2": ("rceil", "plain"),
    "mxfp8_e4m3_128x128": ("rceil", "plain"),
    "mxfp6_e2m3": ("rceil", "plain"),
    "mxfp6_e3m2": ("rceil", "plain"),
    "mxfp4": ("even", "plain"),
    "nvfp4": ("nearest", "plain"),
    "nvfp4_16x16": ("nearest", "plain"),
    "fp8_1x128": ("fp32", "mn_major"),
    "fp8_128x128": ("fp32", "grid"),
}
RULES = {"mx": {"rceil", "floor", "ceil", "even"}, "nvfp4": {"nearest", "up"}, "fp8": {"fp32", "pow2"}}


def stochastic(**options: object) -> Stochastic:
    return Stochastic(rng_state(7), "layers.0.mlp.down_proj", **options)


def test_there_are_ten_formats() -> None:
    assert set(FORMATS) == set(DEFAULTS)


@pytest.mark.parametrize("form", DEFAULTS)
def test_defaults(form: str) -> None:
    plan = CastSpec(form).plan()
    assert (plan.rule, plan.layout) == DEFAULTS[form]
    assert plan == CastPlan(form, *DEFAULTS[form])
    assert plan.text() == f"{form} {DEFAULTS[form][0]} {DEFAULTS[form][1]}"
    assert as_cast_spec(form).plan() == plan


@pytest.mark.parametrize("form", DEFAULTS)
def test_default_rule_of_stochastic_rounding(form: str) -> None:
    """Only mxfp4 changes: its default rule clips, which would bias stochastic rounding."""
    plan = CastSpec(form, rounding=stochastic(), role="dgrad_dy").plan()
    assert plan.rule == ("rceil" if form == "mxfp4" else DEFAULTS[form][0])
    assert plan.stream == stream_id("layers.0.mlp.down_proj", "dgrad_dy")
    assert CastSpec("mxfp4", "even", rounding=stochastic(), role="dgrad_dy").plan().rule == "even"


@pytest.mark.parametrize("form", DEFAULTS)
def test_rules_and_layouts_of_every_format(form: str) -> None:
    spec = FORMATS[form]
    assert set(spec.rules) == RULES[spec.family]
    for rule in spec.rules:
        assert CastSpec(form, rule).plan().rule == rule
    layouts = {"plain", "blocked"} if spec.family != "fp8" else {"plain", spec.default_layout}
    assert set(spec.layouts) == layouts
    for layout in layouts:
        assert CastSpec(form, scale_layout=layout).plan().layout == layout


@pytest.mark.parametrize(
    ("form", "bits"),
    [("mxfp8_e4m3", 8.25), ("mxfp6_e2m3", 6.25), ("mxfp4", 4.25), ("nvfp4", 4.5), ("fp8_1x128", 8.25)],
)
def test_bits_per_value(form: str, bits: float) -> None:
    assert FORMATS[form].bits_per_value == bits


ROUND_TRIPS = [
    CastPlan(form, rule, layout, hadamard, satfinite, grouped, stream, origin, first)
    for form, rule, layout in (
        ("mxfp4", "even", "plain"),
        ("nvfp4", "up", "blocked"),
        ("fp8_1x128", "pow2", "mn_major"),
    )
    for hadamard, satfinite, grouped in itertools.product((None, 0, 0xD7E8), (False, True), (False, True))
    for stream, origin, first in ((None, None, 0), (0, (0, 0, 1), 0), (0xFFFFFF05, (1 << 40, 3, 1 << 20), 300))
]


def test_plan_text_round_trips() -> None:
    texts = [plan.text() for plan in ROUND_TRIPS]
    assert len(set(texts)) == len(ROUND_TRIPS)
    for plan, text in zip(ROUND_TRIPS, texts, strict=True):
        assert CastPlan.parse(text) == plan


def test_plan_text_says_it_all() -> None:
    plan = CastSpec(
        "nvfp4",
        "up",
        rounding=stochastic(origin=(128, 64, 4096), first_group=8),
        hadamard=True,
        role="dgrad_dy",
        amax="group",
        scale_layout="blocked",
    ).plan()
    stream = stream_id("layers.0.mlp.down_proj", "dgrad_dy")
    assert plan.text() == (
        f"nvfp4 up blocked hadamard=0xd7e8 grouped_amax stream={stream:#x} origin=128,64,4096 first_group=8"
    )
    assert CastSpec("mxfp8_e4m3", satfinite=True).plan().text() == "mxfp8_e4m3 rceil plain satfinite"


@pytest.mark.parametrize("value", [0, 1, 16, 32, None, "yes"])
def test_flags_and_group_sizes_are_refused_as_masks(value: object) -> None:
    with pytest.raises(OptionError, match="looks like a switch or a group size"):
        CastSpec("nvfp4", hadamard=value).plan()


def test_hadamard_masks() -> None:
    assert CastSpec("nvfp4", hadamard=True).plan().hadamard == 0xD7E8
    assert CastSpec("mxfp4", hadamard=True).plan().hadamard == 0x6627E8D5
    assert CastSpec("mxfp4", hadamard=0xFFFFFFFF).plan().hadamard == 0xFFFFFFFF
    assert CastSpec("nvfp4").plan().hadamard is None


@pytest.mark.parametrize(("form", "length", "stored"), [("nvfp4", 17, 32), ("mxfp4", 33, 64), ("mxfp4", 64, 64)])
def test_a_rotated_tail_is_stored_in_full(form: str, length: int, stored: int) -> None:
    assert CastSpec(form, hadamard=True).plan().stored_length(length) == stored
    assert CastSpec(form).plan().stored_length(length) == length


def test_tensors_stay_out_of_the_plan() -> None:
    amax = torch.tensor(1.0)
    spec = CastSpec("nvfp4", amax=amax, rounding=stochastic(), role="wgrad_x")
    assert spec.amax_tensor is amax
    assert spec.state is not None
    assert CastSpec("nvfp4").amax_tensor is CastSpec("nvfp4", amax="group").amax_tensor is None
    assert CastSpec("nvfp4").state is None
    assert not spec.plan().grouped_amax


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"format": "mxpf8_e4m3"}, UnknownNameError, "mxfp8_e4m3"),
        ({"format": "mxfp4", "scale_rule": "nearest"}, OptionError, "even"),
        ({"format": "nvfp4", "scale_rule": "nearst"}, UnknownNameError, "nearest"),
        ({"format": "mxfp4", "scale_layout": "mn_major"}, OptionError, "plain or blocked"),
        ({"format": "mxfp4", "scale_layout": "swizzled"}, UnknownNameError, "blocked"),
        ({"format": "mxfp4", "amax": "group"}, OptionError, "only NVFP4"),
        ({"format": "fp8_1x128", "amax": torch.tensor(1.0)}, OptionError, "only NVFP4"),
        ({"format": "nvfp4", "amax": "row"}, UnknownNameError, "tensor"),
        ({"format": "nvfp4", "satfinite": True}, OptionError, "MX option"),
        ({"format": "mxfp8_e4m3", "hadamard": True}, OptionError, "Hadamard"),
        ({"format": "nvfp4_16x16", "hadamard": True}, OptionError, "Hadamard"),
        ({"format": "nvfp4", "hadamard": 1 << 16}, OptionError, "mask"),
        ({"format": "nvfp4", "hadamard": -1}, OptionError, "mask"),
        ({"format": "nvfp4", "rounding": "stochastic"}, OptionError, "Stochastic\\(rng_state"),
        ({"format": "nvfp4", "rounding": "up"}, UnknownNameError, "nearest"),
        ({"format": "nvfp4", "rounding": stochastic()}, OptionError, "role"),
        ({"format": "nvfp4", "rounding": stochastic(), "role": "dgrad"}, UnknownNameError, "dgrad_dy"),
        ({"format": "nvfp4", "rounding": Stochastic(rng_state(7), ""), "role": "dgrad_dy"}, OptionError, "name"),
        ({"format": "nvfp4", "rounding": Stochastic(torch.zeros(3), "a"), "role": "dgrad_dy"}, ShapeError, "int64"),
    ],
)
def test_invalid_options_are_refused(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CastSpec(**options).plan()
