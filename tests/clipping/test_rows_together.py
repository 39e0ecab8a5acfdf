"""Norms of many linear maps taken together have the bits of each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from noshuffle.clipping import units
from noshuffle.clipping.factor import Flat, PerLayer
from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.forms import take_squares_of_rows as take
from noshuffle.clipping.ghost import Ghost


def outer(size: int, inner: int, out: int, *, steps: int = 1, dtype: torch.dtype) -> OuterGradient:
    a, g = torch.randn(size, steps, inner), torch.randn(size, steps, out)
    return OuterGradient(a.to(dtype), g.to(dtype), (out, inner))


def taken(form: GradientForm) -> torch.Tensor | None:
    return form.__dict__.get("square")


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_bits_of_each_by_itself(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    widths = [(3, 5), (64, 64), (65, 1), (1, 64), (700, 33)]  # longer ones are cut into pieces
    forms = [outer(9, *both, dtype=dtype) for both in widths]
    forms = [replace(f, a=f.a * scale, g=f.g * scale) for f in forms]
    for row, value in ((0, 0.0), (1, torch.inf), (2, -torch.inf), (3, torch.nan)):
        forms[1].a[row], forms[2].g[row] = value, value
    take([[form] for form in forms])
    for form in forms:
        found = taken(form)
        assert found is not None
        assert found.dtype is torch.float64
        assert found.numpy().tobytes() == form.squares().numpy().tobytes()


def test_others_are_left_to_themselves() -> None:
    kind = torch.float32
    several, dense = outer(4, 3, 2, steps=2, dtype=kind), DenseGradient(torch.randn(4, 3))
    tied = [outer(4, 3, 2, dtype=kind) for _ in range(2)]
    known, alone = outer(4, 3, 2, dtype=kind), outer(4, 3, 2, dtype=kind)
    known.__dict__["square"] = torch.full((4,), 7.0)
    take([[several], [dense], tied, [known], [alone], []])
    assert [taken(f) for f in (several, dense, *tied, alone)] == [None] * 5
    assert torch.equal(known.square, torch.full((4,), 7.0))
    mixed = [alone, outer(4, 3, 2, dtype=torch.float64)]  # of two types: none is rounded
    take([[form] for form in mixed])
    assert [taken(f) for f in mixed] == [None, None]
    for size in (0, 1):
        pair = [outer(size, 3, 2, dtype=kind) for _ in range(2)]
        take([[form] for form in pair])
        assert [taken(f).shape for f in pair] == [(size,)] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("clip", [Flat(0.5), PerLayer(1.0)])
@pytest.mark.parametrize("who", [None, torch.arange(12) // 2])
def test_a_sum_has_the_same_bits(
    clip: Flat | PerLayer, who: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where small operations are what a step waits for."""
    monkeypatch.setattr(units._Gradients, "bundling", ("cuda", "cpu"))
    torch.manual_seed(0)
    layers = [nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 7, bias=False), nn.Linear(7, 3)]
    model, loss = nn.Sequential(*layers), nn.CrossEntropyLoss()
    x, y = torch.randn(12, 6), torch.randint(3, (12,))
    x[3] = torch.nan
    own = Ghost().clipped_sum(model, loss, (x, y), clip=clip, units=who)
    monkeypatch.setattr(units, "take_squares_of_rows", lambda forms: None)
    twin = Ghost().clipped_sum(model, loss, (x, y), clip=clip, units=who)
    assert own.norms.numpy().tobytes() == twin.norms.numpy().tobytes()
    assert all(torch.equal(own.values[name], twin.values[name]) for name in own.values)
    assert own.nonfinite == twin.nonfinite == 1
