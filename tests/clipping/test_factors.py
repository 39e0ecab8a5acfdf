"""Clip factors on a CPU against their twin in torch, and models that change between two steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import Flat, Ghost, PerExample, PerLayer, clipped
from noshuffle.clipping.clipped import Clip, clip_factors

CLIPS = [Flat(0.7), PerLayer(0.7), PerLayer({"a": 0.3, "b": 2.0})]


def squares_of(size: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(size)
    names = {"a.weight": torch.float64, "a.bias": torch.float32, "b.weight": torch.float32}
    found = {n: 3 * torch.rand(size, generator=draw).to(d) for n, d in names.items()}
    for name in found:
        found[name][0] = 0.0
    if size > 3:
        found["a.weight"][1], found["b.weight"][2], found["a.bias"][3] = math.nan, math.inf, 1e38
    return found


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("size", [1, 9, 250])
def test_factors_equal_their_twin(clip: Clip, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    squares, draw = squares_of(size), torch.Generator().manual_seed(1)
    ok, present = (torch.rand(size, generator=draw) < 0.8 for _ in range(2))
    own = clip_factors(squares, ok, present, clip=clip)
    monkeypatch.setattr(clipped, "_is_plain", lambda t: False)
    twin = clip_factors(squares, ok, present, clip=clip)
    assert [names for names, _ in own[0]] == [names for names, _ in twin[0]]
    for (_, mine), (_, other) in zip(own[0], twin[0]):
        assert mine.dtype == other.dtype == torch.float64
        torch.testing.assert_close(mine, other, rtol=1e-14, atol=0)
    torch.testing.assert_close(own[1], twin[1], rtol=1e-14, atol=0, equal_nan=True)
    assert torch.equal(own[2], twin[2])


def test_half_precision_and_no_unit_at_all() -> None:
    ok = torch.ones(2, dtype=torch.bool)
    half = {"a.bias": torch.tensor([4.0, 0.25], dtype=torch.bfloat16)}
    ((_, factors),), norms, bad = clip_factors(half, ok, ok, clip=Flat(1.0))
    torch.testing.assert_close(factors, torch.tensor([0.5, 1.0]).double(), rtol=1e-5, atol=0)
    assert norms.tolist() == [2.0, 0.5]
    assert not bad.any()
    none = {"a.bias": torch.zeros(0)}
    ((_, factors),), norms, bad = clip_factors(none, ok[:0], ok[:0], clip=Flat(1.0))
    assert factors.shape == norms.shape == bad.shape == (0,)


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn(6, 4))


def frozen(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)


def grown(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


def switched(model: nn.Sequential) -> None:
    model.eval()


@pytest.mark.parametrize("change", [replaced, frozen, grown, switched])
def test_a_model_that_changes_between_two_steps(change) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    batch = (torch.randn(8, 4), torch.randint(3, (8,)))
    engine, loss_fn = Ghost(), nn.CrossEntropyLoss()
    for _ in range(2):
        engine.clipped_sum(model, loss_fn, batch, clip=Flat(0.5))
    change(model)
    own = engine.clipped_sum(model, loss_fn, batch, clip=Flat(0.5))
    twin = PerExample().clipped_sum(model, loss_fn, batch, clip=Flat(0.5))
    assert list(own.values) == list(twin.values)
    for name, value in own.values.items():
        torch.testing.assert_close(value, twin.values[name], rtol=1e-4, atol=1e-5)
    if change is frozen:
        model[0].bias.requires_grad_(True)
        assert "0.bias" in engine.clipped_sum(model, loss_fn, batch, clip=Flat(0.5)).values
