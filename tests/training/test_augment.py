"""Augmented copies of a row are one contribution of one row; averages come with privatize."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, Poisson
from noshuffle.plan import Plan
from noshuffle.release.folder import load
from noshuffle.release.release import Release
from noshuffle.strategies import identity
from noshuffle.training import privatize
from noshuffle.training.augment import Augment, mean_over_copies

LOSS = nn.CrossEntropyLoss()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2, bias=False), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def data(rows: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(rows, 2, 8, 8, generator=draw), torch.randint(3, (rows,), generator=draw)


def slow_sum(model: nn.Module, copies: Tensor, y: Tensor, clip: float) -> dict[str, Tensor]:
    """The slow twin: one row after the other, its copies one after the other, autograd alone."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for own, target in zip(copies, y):
        losses = [LOSS(model(copy[None]), target[None]) for copy in own]
        grads = torch.autograd.grad(sum(losses) / len(losses), list(model.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        for name, grad in zip(total, grads):
            total[name] += grad * min(1.0, clip / float(norm))
    return total


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_copies_are_clipped_as_one_row(engine: Any) -> None:
    x, y = data()
    copies, model = Augment(copies=3, shift=2)(x), network()
    found = engine().clipped_sum(model, mean_over_copies(LOSS), (copies, y), clip=Flat(0.5))
    assert engine is PerExample or not found.bad.any()
    for name, value in slow_sum(model, copies, y, 0.5).items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("copies", [1, 5])
@pytest.mark.parametrize("size", [1.0, 1e12])
def test_one_row_moves_the_sum_by_the_clip_norm_whatever_the_copies(
    copies: int, size: float
) -> None:
    x, y = data()
    x[2] *= size
    many, model, loss = Augment(copies=copies)(x), network(), mean_over_copies(LOSS)
    rest = torch.tensor([0, 1, 3])
    whole = Ghost().clipped_sum(model, loss, (many, y), clip=Flat(0.1))
    without = Ghost().clipped_sum(model, loss, (many[rest], y[rest]), clip=Flat(0.1))
    moved = [(whole.values[n] - without.values[n]).double().norm() for n in whole.values]
    assert 0.09 < float(torch.stack(moved).norm()) <= 0.1 * (1 + 1e-5)


def test_images_are_moved_and_mirrored_row_by_row() -> None:
    x = torch.arange(1.0, 65.0).reshape(1, 1, 8, 8).repeat(2, 1, 1, 1)
    x[1] += 100.0
    torch.manual_seed(0)
    copies = Augment(copies=64, shift=1)(x)
    assert bool((copies[0] <= 64).all())
    assert bool((copies[1] > 100).all())
    framed = torch.nn.functional.pad(x, (1,) * 4, mode="reflect")[0, 0]
    windows = [framed[i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    allowed = [*windows, *(w.flip(1) for w in windows)]
    seen = {k for c in copies[0, :, 0] for k, w in enumerate(allowed) if torch.equal(c, w)}
    assert len(seen) >= 15  # of 18; all copies are one of them
    assert all(any(torch.equal(c, w) for w in allowed) for c in copies[0, :, 0])
    still = Augment(copies=2, shift=0, mirror=False)(x)
    assert torch.equal(still[:, 1], x)
    assert Augment(copies=3)(x[:0]).shape == (0, 3, 1, 8, 8)  # a secret draw may be empty
    own = Augment(copies=2, transform=lambda x: x.flatten(1) + torch.rand(()))(x)
    assert own.shape == (2, 2, 64)
    assert not torch.equal(own[:, 0], own[:, 1])
    with pytest.raises(InvalidInput, match="a row for every row"):
        Augment(copies=2, transform=lambda x: x[:1])(x)
    with pytest.raises(Unsupported, match="criterion"):
        mean_over_copies(mean_over_copies(LOSS))


def private(**how: Any) -> Any:
    model = network()
    plan = Plan(participation=Epochs(2, 2), strategy=identity(), noise_multiplier=1.0, delta=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    source = test_source(seed=1)
    return privatize(model, optimizer, plan, clip_norm=0.5, batch_size=2, source=source, **how)


def test_privatize_augments_and_states_the_same() -> None:
    x, y = data()
    plain, run, again = private(), private(augment=3), private(augment=Augment(copies=3))
    for one in (plain, run, again):
        one.step(LOSS, x[:2], y[:2], ids=[0, 1])
        one.step(LOSS, x[2:], y[2:], ids=[2, 3])
    assert run.epsilon == plain.epsilon
    for a, b, c in zip(*(one.model.parameters() for one in (plain, run, again))):
        assert torch.equal(b, c)  # copies are drawn from the seed of the step
        assert not torch.equal(a, b)
    with pytest.raises(InvalidInput, match="needs ids"):
        run.step(LOSS, x[:2], y[:2])
    with pytest.raises(Unsupported, match=r"private\.step"), run.accumulate():
        pass
    with pytest.raises(Unsupported, match=r"private\.step"):
        run.criterion(LOSS)
    with pytest.raises(InvalidInput, match="larger than its shift"):
        run.step(LOSS, x[:2, :, :4, :4], y[:2], ids=[0, 1])
    with pytest.raises(InvalidInput, match="copies"):
        private(augment=0)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mixup": lambda x: 0.5 * x + 0.5 * x.roll(1, 0),
    "pairs": lambda x: x.unflatten(0, (2, 2)).flip(1).flatten(0, 1) + x,
    "whitened": lambda x: (x - x.mean()) / x.std(),
    "in another order": lambda x: x[torch.randperm(len(x))],
    "by all": lambda x: x * (torch.rand(()) if x.sum() > 0 else 3.0) - x.max(),
    "by the largest, which most rows have": lambda x: x / x.clamp(max=0.5).max(),
    "by the range of all": lambda x: x / 255 if x.abs().max() > 100 else x,
    "by what is not finite in any": lambda x: x if x.isfinite().all() else x.nan_to_num() * 0,
}


@pytest.mark.parametrize("mix", MIXING)
def test_a_transform_that_mixes_rows_is_refused(mix: str) -> None:
    x, y = data()
    run = private(augment=Augment(copies=2, transform=MIXING[mix]))
    with pytest.raises(InvalidInput, match="every row alone"):
        run.step(LOSS, x, y, ids=range(4))
    assert run.steps_released == 0
    fine = Augment(copies=2, transform=lambda x: x * torch.rand(len(x), 1, 1, 1) + torch.rand(()))
    run, before = private(augment=fine), torch.get_rng_state()
    run.step(LOSS, x[:1], y[:1], ids=[0])
    run.step(LOSS, x[1:], y[1:], ids=[1, 2, 3])
    assert torch.equal(before, torch.get_rng_state())


def test_a_transform_may_refuse_extreme_rows() -> None:
    def strict(x: Tensor) -> Tensor:
        assert x.isfinite().all()
        return x.tanh()

    x, y = data()
    run = private(augment=Augment(copies=2, transform=strict))
    run.step(LOSS, x, y, ids=range(4))
    assert run.steps_released == 1


def test_draws_are_secret() -> None:
    """A row more or less, or a longer one, moves the draws of others: public ones would show it."""
    whole, drawn = Epochs(2, 2), Poisson(steps=4, rate=0.5)
    seeds = []
    for rule, near in [(whole, "")] * 2 + [(drawn, "")] * 2 + [(drawn, "zero-out")] * 2:
        torch.manual_seed(3)
        noise = {"strategy": identity(), "noise_multiplier": 1.0, "delta": 1e-5}
        plan, model = Plan(participation=rule, neighbours=near, **noise), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(3)
        run = privatize(model, optimizer, plan, clip_norm=0.5, batch_size=2)
        seeds.append(run._parts.release.seed(0))
    assert len(set(seeds)) == 6


def test_two_that_go_on_from_one_folder_share_no_secret_draw(tmp_path: Path) -> None:
    plan = Plan(participation=Poisson(steps=4, rate=0.5), strategy=identity(), noise_multiplier=1.0)

    def begun(name: str) -> Release:
        return Release(plan, {"w": (2,)}, clip=1.0, run=tmp_path / name)

    first = begun("one")
    ticket = first.admit(first.identify(first.sampler(4).draw(0)))
    first.close(ticket, {"w": torch.zeros(2)})
    first.finish(ticket)
    before = first.seed(0), first.seed(1)
    first.log.close()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    seen = [(run.seed(0), run.seed(1)) for run in map(begun, ("one", "two"))]
    assert {own[0] for own in seen} == {before[0]}
    assert len({before[1], *(own[1] for own in seen)}) == 3


def test_privatize_averages_and_saves_the_average(tmp_path: Path) -> None:
    x, y = data()
    run = private(average=0.5, run=tmp_path / "run")
    iterates = []
    for rows in (slice(0, 2), slice(2, 4)):
        run.step(LOSS, x[rows], y[rows], ids=list(range(4))[rows])
        iterates.append([p.detach().clone() for p in run.model.parameters()])
    wanted = [a + (1 - 1 / 11) * (b - a) for a, b in zip(*iterates)]
    state = load(run.save())
    with run.average.in_place():
        for p, mean in zip(run.model.parameters(), wanted):
            torch.testing.assert_close(p.detach(), mean)
    for p, last in zip(run.model.parameters(), iterates[-1]):
        assert torch.equal(p, last)
    assert private().average is None
    values = state["attached"]["average"]["values"].values()
    for kept, mean in zip(values, wanted):
        torch.testing.assert_close(kept, mean)
