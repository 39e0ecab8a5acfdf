"""The examples whose gradients are finite, and who asks for them."""

import random

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping.batch_check import apart_in
from noshuffle.clipping.layers import Mixes, NotNow
from noshuffle.clipping.look_runs import finite_gradients


class Roots(nn.Module):
    """√(w·x)², whose slope at x = 0 is infinite where its value is not; counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.runs = nn.Parameter(torch.ones(3)), 0

    def forward(self, rows: tuple[Tensor, ...]) -> Tensor:
        self.runs += 1
        return (self.w * rows[0]).abs().sqrt().sum(1)


def one_by_one(model: Roots, x: Tensor) -> list[int]:
    """The slow twin: every example beside its own copy."""
    good = []
    for i in range(len(x)):
        losses = model((x[[i, i]],))
        (grad,) = torch.autograd.grad(losses[0], [model.w])
        if bool(torch.isfinite(losses).all()) and bool(torch.isfinite(grad).all()):
            good.append(i)
    return good


@pytest.mark.parametrize("seed", range(12))
def test_parts_find_the_examples_that_are_finite_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = draw.choice([1, 2, 3, 7, 16, 33])
    x, model = torch.rand(size, 3) + 0.1, Roots()
    for i in draw.sample(range(size), draw.randint(0, size)):
        x[i, draw.randrange(3)] = draw.choice([0.0, torch.inf, torch.nan])
    assert finite_gradients(model, (x,), [model.w]).tolist() == one_by_one(model, x)


def test_one_example_among_many_takes_few_runs() -> None:
    x, model = torch.rand(256, 3) + 0.1, Roots()
    x[77] = 0.0
    with torch.no_grad():  # whatever the loop has set around its step
        assert len(finite_gradients(model, (x,), [model.w])) == 255
    assert model.runs == 1 + 2 * 8


class WayBack(torch.autograd.Function):
    """Rows are exchanged on the way back, from the second half of the batch on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        half = len(grad) // 2
        return torch.cat([grad[:half], grad[half:].roll(1, 0)]) if len(grad) > 12 else grad


@pytest.mark.parametrize("bad", [range(0, 32, 2), range(20), range(32)])
def test_a_batch_is_looked_at_with_all_examples_that_are_finite(monkeypatch, bad) -> None:
    """Every second one of them, all of the first half, or none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = WayBack.apply(self.first(x))
            return self.last(h / (h.square().sum(1, keepdim=True).sqrt() + 1e-3)).square()

    torch.manual_seed(0)
    x, sizes = torch.randn(32, 4), []

    def counted(*args):
        found = finite_gradients(*args)
        sizes.append(len(found))
        return found

    monkeypatch.setattr("noshuffle.clipping.batch_check.finite_gradients", counted)
    x[list(bad)] = 0.0
    with pytest.raises(NotNow if len(bad) == 32 else Mixes):
        apart_in(Model(), lambda out, y: (out[:, 0] - y).square(), (x, torch.randn(32)))
    assert sizes == [32 - len(bad)]
