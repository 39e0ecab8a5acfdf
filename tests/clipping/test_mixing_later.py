"""A model that keeps examples apart when it is tried, and mixes them later, is found out."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.clipping.looks import Look, next_full, next_quick

LOSS = nn.CrossEntropyLoss()


class Late(nn.Module):
    """Adds the batch's mean once it was told to, which nothing in the module shows."""

    def __init__(self, mixes: list[bool]) -> None:
        super().__init__()
        self.layer, self.said = nn.Linear(4, 3), lambda: mixes[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + x.mean(0) if self.said() else x)


def looks(monkeypatch: pytest.MonkeyPatch, *, full: int = 10**9, quick: int = 10**9) -> None:
    """The next look of each kind, instead of one that is drawn."""
    monkeypatch.setattr("noshuffle.clipping.later_looks.next_full", lambda calls: full)
    monkeypatch.setattr("noshuffle.clipping.later_looks.next_quick", lambda calls, **_: quick)


@pytest.mark.parametrize("kind", ["full", "quick"])
def test_examples_that_begin_to_mix_are_found_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    torch.manual_seed(0)
    looks(monkeypatch, **{kind: 12})
    mixes = [False]
    model, engine, found = Late(mixes), Ghost(), Heard()
    engine.listeners.add(found.heard)
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    for call in range(1, 13):
        mixes[0] = call > 9
        told = pytest.warns(RuntimeWarning, match="NOT PRIVATE") if call == 12 else nullcontext()
        with told:
            engine.clipped_sum(model, LOSS, (x, y), clip=Flat(1.0))
        assert bool(engine.fallbacks) == (call == 12), call
    assert "the loss of an example changes" in engine.fallbacks[0]
    assert [bool(look.mixes) for look in found.looks[:2]] == [False, True]
    assert found.looks[0].kind == found.looks[1].kind
    # From here on every example is by itself: a changed row moves the sum by its own part only.
    other = x.clone()
    other[0] = 100.0
    sums = [
        engine.clipped_sum(model, LOSS, (rows, y), clip=Flat(1.0)).values for rows in (x, other)
    ]
    gap = torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in sums[0]]).norm()
    assert float(gap) <= 2.0


class Reversed(torch.autograd.Function):
    """Nothing, but gradients are multiplied by what the batch holds on their way back."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1.0 + ctx.saved_tensors[0].mean(0))


@pytest.mark.parametrize("kind", ["on the way back", "behind dropout"])
def test_a_full_look_sees_what_losses_of_two_examples_do_not_show(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Begins(nn.Module):
        is_on = False

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if kind == "behind dropout":
                h = nn.functional.dropout(h - h.mean(0) if self.is_on else h)
            elif self.is_on:
                h = Reversed.apply(h)
            return self.head(torch.tanh(h))

    torch.manual_seed(0)
    looks(monkeypatch, full=4)
    model, engine = Begins(), Ghost()
    for call in range(1, 5):
        model.is_on = call > 2
        told = pytest.warns(RuntimeWarning, match="NOT PRIVATE") if call == 4 else nullcontext()
        with told:
            batch = torch.randn(20, 4), torch.randint(3, (20,))
            engine.clipped_sum(model, LOSS, batch, clip=Flat(1.0))
    assert any("whole model" in line for line in engine.fallbacks)


class Heard:
    """Keeps what an engine tells."""

    def __init__(self) -> None:
        self.looks: list[Look] = []

    def heard(self, model: nn.Module, look: Look) -> None:
        self.looks.append(look)


def test_looks_are_drawn_anew_and_as_often_as_is_said() -> None:
    gaps = [next_quick(0) for _ in range(4000)]
    mean = sum(gaps) / len(gaps)
    assert 14.5 < mean < 17.5  # geometric: mean 16, deviation of the mean 0.25
    assert min(gaps) == 1
    drawn = {next_full(100) for _ in range(200)}
    assert all(200 < call <= 800 for call in drawn)
    assert len(drawn) > 50


def test_a_model_that_stays_as_it_is_is_tried_again_and_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("noshuffle.clipping.later_looks.next_full", lambda calls: calls + 2)
    monkeypatch.setattr("noshuffle.clipping.later_looks.next_quick", lambda calls, **_: calls + 1)
    model, engine = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), Ghost()
    for _ in range(9):
        engine.clipped_sum(model, LOSS, (torch.randn(6, 4), torch.randint(3, (6,))), clip=Flat(1.0))
    assert not engine.fallbacks


@pytest.mark.parametrize(("per_example", "is_found"), [(3e-8, False), (3e-3, True)])
def test_a_loss_that_all_but_cancels_may_move_as_far_as_rounding(
    monkeypatch: pytest.MonkeyPatch, per_example: float, is_found: bool
) -> None:
    """A sum over more rows is rounded otherwise, by parts in ten million: that is no mixing."""
    torch.manual_seed(0)
    looks(monkeypatch, full=8)
    counted, engine = [0.0], Ghost()

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return torch.cat([out * (1.0 + counted[0] * len(x)), out], 1)

    def loss(out: Tensor, size: Tensor) -> Tensor:
        return (size[:, 0] * out[:, 0] - size[:, 1] * out[:, 1]).sum()

    model, x, sizes = nn.Sequential(Counted(4, 1)), torch.randn(6, 4), torch.ones(6, 2)
    sizes[:, 1] = 0.3
    engine.clipped_sum(model, loss, (x, sizes), clip=Flat(1.0))
    sizes[:, 0], sizes[:, 1], counted[0] = 1e3, 1e3 * (1.0 - 1e-5), per_example
    told = pytest.warns(RuntimeWarning, match="apart no longer") if is_found else nullcontext()
    with told:
        for _ in range(8):
            engine.clipped_sum(model, loss, (x, sizes), clip=Flat(1.0))
    assert any("whole model" in line for line in engine.fallbacks) == is_found


def whole(out: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Bernoulli(out, validate_args=True).log_prob(y).mean()


def narrow(out: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(out, y + y.new_full((), 0.25) * (y < 0.5))


@pytest.mark.parametrize("loss_fn", [nn.BCELoss(), whole, narrow])
@pytest.mark.parametrize("size", [1, 4, 9, 40])
@pytest.mark.parametrize("labels", [None, 0.0, 1.0])
def test_losses_that_refuse_labels_are_looked_at(
    size: int, labels: float | None, loss_fn: Any
) -> None:
    """Looks move numbers by roundings, which takes labels out of their range or off the whole, and
    put others in the place of those that all examples have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid())
    x, y = torch.randn(size, 3), torch.randint(2, (size, 2)).float()
    y = y if labels is None else torch.full_like(y, labels)
    found = Ghost().clipped_sum(model, loss_fn, (x, y), clip=Flat(0.1))
    wanted = PerExample().clipped_sum(model, loss_fn, (x, y), clip=Flat(0.1))
    for name, value in wanted.values.items():
        torch.testing.assert_close(found.values[name], value)


def test_mixing_behind_a_rare_draw_is_found_by_the_look_that_draws_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Rarely(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            is_it = float(torch.rand(())) < 0.01
            return self.layer(x + x.mean(0) if is_it and len(x) > 12 else x)

    def draw_of(seed: int) -> float:
        return float(torch.rand((), generator=torch.Generator().manual_seed(seed)))

    torch.manual_seed(0)
    monkeypatch.setattr("noshuffle.clipping.later_looks.next_full", lambda calls: calls + 1)
    model, engine, found = Rarely(), Ghost(), Heard()
    engine.listeners.add(found.heard)
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    hit = next(seed for seed in range(9999) if draw_of(seed) < 0.01)
    seeds = [seed for seed in range(100) if draw_of(seed) > 0.01][:4]
    for seed in seeds:
        monkeypatch.setattr("noshuffle.clipping.later_looks.new_seed", lambda seed=seed: seed)
        engine.clipped_sum(model, LOSS, (x, y), clip=Flat(1.0))
    assert not any(look.mixes for look in found.looks)
    monkeypatch.setattr("noshuffle.clipping.later_looks.new_seed", lambda: hit)
    with pytest.warns(RuntimeWarning, match="NOT PRIVATE"):
        engine.clipped_sum(model, LOSS, (x, y), clip=Flat(1.0))
    (mixes,) = [look.mixes for look in found.looks if look.mixes]
    assert "the other examples of its batch" in mixes
