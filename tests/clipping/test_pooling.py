"""Max pooling with channels last in memory, against torch's own order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, pooling
from noshuffle.clipping.pooling import pooled, pooling_by_channel, pools


@pytest.fixture(autouse=True)
def _also_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "LEAST", 1)


def images(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers with many ties, infinities, zeros of both signs and NaN."""
    torch.manual_seed(seed)
    x = torch.randn(shape).mul(2).round().div(2)
    luck = torch.rand(shape)
    for share, value in ((0.03, torch.inf), (0.06, -torch.inf), (0.09, -0.0), (0.11, torch.nan)):
        x = torch.where((luck < share) & (luck >= share - 0.03), value, x)
    return x


@settings(max_examples=60, deadline=None)
@given(
    channels=st.sampled_from([8, 9, 16, 37]),
    sides=st.tuples(st.integers(4, 12), st.integers(4, 12)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    ceil_mode=st.booleans(),
    return_indices=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_indices_and_gradients_are_the_same_bits(
    channels: int, sides: tuple[int, int], seed: int, kernel: Any, padding: int, **options: Any
) -> None:
    padding = min(padding, *(k // 2 for k in kernel))
    layer = nn.MaxPool2d(kernel, padding=padding, **options)
    x = images((3, channels, *sides), seed).requires_grad_()
    if min(s + 2 * padding - layer.dilation * (k - 1) for s, k in zip(sides, kernel)) < 1:
        return
    slow, fast = layer(x), pooled(layer, x)
    if not layer.return_indices:
        slow, fast = (slow,), (fast,)
    for one, other in zip(slow, fast):
        assert one.shape == other.shape
        assert other.is_contiguous()
        assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(torch.signbit(one), torch.signbit(other))
    sent = torch.randn_like(slow[0])
    (truth,) = torch.autograd.grad(slow[0], x, sent)
    (found,) = torch.autograd.grad(fast[0], x, sent)
    assert torch.equal(found, truth)
    assert found.is_contiguous()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 6, 6),  # too few channels
        torch.randn(8, 6, 6),  # one image
        torch.randn(2, 8, 6, 6).double(),
        torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(2, 8, 6, 12)[..., ::2],
    ],
)
def test_everything_else_is_the_layers_own(x: Tensor) -> None:
    layer = nn.MaxPool2d(2)
    own = layer(x)
    found = pooled(layer, x)
    assert torch.equal(own, found)
    assert own.stride() == found.stride()


def test_inside_vmap_it_is_the_layers_own() -> None:
    layer, x = nn.MaxPool2d(2), torch.randn(5, 2, 8, 6, 6)
    with pooling_by_channel([layer]):
        found = torch.vmap(layer)(x)
    assert torch.equal(found, layer(x.flatten(0, 1)).unflatten(0, (5, 2)))


class Own(nn.MaxPool2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2)


def test_only_layers_with_torchs_forward_are_meant() -> None:
    model = nn.Sequential(nn.MaxPool2d(2), nn.Sequential(nn.MaxPool2d(3)), Own(2), nn.AvgPool2d(2))
    assert pools(model) == [model[0], model[1][0]]


def test_nothing_stays_in_the_layer() -> None:
    layer = nn.MaxPool2d(2)
    with pooling_by_channel([layer]):
        assert "forward" in layer.__dict__
    assert "forward" not in layer.__dict__
    with pytest.raises(RuntimeError), pooling_by_channel([layer]):
        layer(torch.randn(1, 8, 1, 1))
    assert "forward" not in layer.__dict__
    layer.__dict__["forward"] = own = lambda x: x
    with pooling_by_channel([layer]):
        assert layer.forward is own
    assert layer.forward is own


def test_clipped_sums_are_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )
    batch = (torch.randn(6, 1, 8, 8), torch.randint(4, (6,)))
    calls: list[torch.Size] = []
    watched = pooling.pooled

    def counted(layer: nn.MaxPool2d, x: Tensor) -> Any:
        calls.append(x.shape)
        return watched(layer, x)

    monkeypatch.setattr(pooling, "pooled", counted)
    fast = Ghost().clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=Flat(0.1))
    assert torch.Size((6, 8, 6, 6)) in calls
    monkeypatch.setattr(pooling, "FEWEST", 1 << 30)
    slow = Ghost().clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=Flat(0.1))
    assert torch.equal(fast.losses, slow.losses)
    for name, value in slow.values.items():
        assert torch.equal(fast.values[name], value)
