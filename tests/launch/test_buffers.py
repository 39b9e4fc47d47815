"""Buffers of recorded calls are allocated with the layouts of the recorded call's."""

from __future__ import annotations

import pytest
import torch

from blockscale.launch import buffers
from blockscale.launch.buffers import Buffer, allocator, view_of

DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


@pytest.fixture(params=["direct", "through the dispatcher"])
def torch_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's private allocation, and as with a torch that lacks it."""
    if request.param != "direct":
        monkeypatch.setattr(buffers, "_direct", None)
        monkeypatch.setattr(buffers, "_part", torch.as_strided)


@pytest.mark.usefixtures("torch_parts")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "stride"), [((4, 8), (8, 1)), ((8, 4), (1, 8)), ((4, 7), (8, 1)), ((1, 2, 4, 8), (32, 32, 1, 4))], ids=str
)
def test_a_buffer_has_the_layout_of_its_only_view(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype):
    whole = torch.empty(2 if len(size) == 4 else 1, 4, 8, dtype=dtype)
    view = whole.as_strided(size, stride)
    allocate, made = allocator(Buffer(whole), {view_of(view)})
    found = allocate()
    assert made == view_of(found) == view_of(view)
    assert found.untyped_storage().nbytes() == whole.nbytes  # kernels write pads too
    assert not found._is_view() or buffers._part is torch.as_strided


@pytest.mark.usefixtures("torch_parts")
@pytest.mark.parametrize("views", [{(8, 1), (8, 2)}, set()], ids=["several", "none"])
def test_a_buffer_with_several_views_or_none_keeps_its_own_layout(views: set[tuple[int, ...]]):
    whole = torch.empty(4, 8)
    allocate, made = allocator(Buffer(whole), {view_of(whole.as_strided((4, 4), each)) for each in views})
    assert made == view_of(allocate()) == view_of(whole)


def test_buffers_follow_inference_mode():
    allocate, _ = allocator(Buffer(torch.empty(4, 8)), set())
    with torch.inference_mode():
        assert allocate().is_inference()
    assert not allocate().is_inference()
