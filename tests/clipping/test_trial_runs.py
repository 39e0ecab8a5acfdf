"""What a trial runs: examples whose gradients are finite, and random numbers of one check."""

import random

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping.batch_check import apart_in, still_apart
from noshuffle.clipping.layers import Mixes, NotNow
from noshuffle.clipping.trial_runs import finite_gradients, new_seed


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
def test_a_batch_is_checked_with_all_examples_that_are_finite(monkeypatch, bad) -> None:
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
    # Which examples are asked is drawn; one of ten draws asks none that was moved.
    draw = random.Random(0)
    monkeypatch.setattr("noshuffle.clipping.batch_check.secrets.randbelow", draw.randrange)
    x[list(bad)] = 0.0
    with pytest.raises(NotNow if len(bad) == 32 else Mixes):
        apart_in(Model(), lambda out, y: (out[:, 0] - y).square(), (x, torch.randn(32)), seed=0)
    assert sizes == [32 - len(bad)]


class Rarely(nn.Module):
    """Adds the mean of a large batch where a draw says so; the way back does it where it draws."""

    def __init__(self, chance: float, *, on_the_way_back: bool = False) -> None:
        super().__init__()
        self.layer, self.chance, self.is_back = nn.Linear(4, 3), chance, on_the_way_back

    def forward(self, x: Tensor) -> Tensor:
        if self.is_back:
            return RareWayBack.apply(self.layer(x), self.chance)
        is_it = float(torch.rand(())) < self.chance
        return self.layer(x + x.mean(0) if is_it and len(x) > 12 else x)


class RareWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chance):
        ctx.chance = chance
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        is_it = float(torch.rand(())) < ctx.chance
        return (grad + grad.mean(0) if is_it and len(grad) > 12 else grad), None


def is_apart(model: nn.Module, seed: int | None, size: int = 20) -> bool:
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw)
    try:
        if seed is None:
            still_apart(model, nn.CrossEntropyLoss(), (x, y))
        else:
            apart_in(model, nn.CrossEntropyLoss(), (x, y), seed=seed)
    except Mixes:
        return False
    return True


@pytest.mark.parametrize("on_the_way_back", [False, True])
def test_mixing_behind_a_rare_draw_is_found_by_the_checks_that_draw_it(on_the_way_back) -> None:
    torch.manual_seed(0)
    model = Rarely(0.1, on_the_way_back=on_the_way_back)
    seeds, found = range(100, 140), []
    for seed in seeds:
        found.append(not is_apart(model, seed))
        assert found[-1] == (not is_apart(model, seed))  # a seed that is named is that one
    draws = [float(torch.rand((), generator=torch.Generator().manual_seed(s))) for s in seeds]
    assert found == [draw < 0.1 for draw in draws]
    assert 0 < sum(found) < 20


def test_every_check_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    seeds: list[int] = []

    def drawn() -> int:
        seeds.append(new_seed())
        return seeds[-1]

    monkeypatch.setattr("noshuffle.clipping.batch_check.new_seed", drawn)
    model, state = Rarely(0.2), torch.get_rng_state()
    while is_apart(model, None):
        assert len(seeds) < 200  # 0.8 ** 200 is 4e-20
    assert len(set(seeds)) == len(seeds)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rate", [0.5, 0.02, 0.002])
def test_honest_draws_are_not_taken_for_mixing(rate: float) -> None:
    """Masks of a batch of another size differ by themselves; rare ones do where nobody looked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(rate), nn.ReLU(), nn.Linear(32, 3))
    assert all(is_apart(model, seed, size=32) for seed in range(40))


def test_a_loss_that_goes_by_the_number_is_found_behind_a_draw_without_effect() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1.0 + 0.0 * torch.rand(())) / max(1, len(x) // 13)

    torch.manual_seed(0)
    assert not is_apart(Counts(), 5, size=40)
