"""A released step leaves again with the same sum, or not at all.

What was compared before were inputs (a batch, samples of parameters), and whatever they do not
describe could be changed under the same noise: the difference of two releases then held a sum of
examples without any noise. Now it is the clipped sum itself that must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runs import kept
from torch import nn

from noshuffle.clipping import Ghost, PerExample
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, ReplayRefused
from noshuffle.noise import test_source as make_source
from noshuffle.participation import Epochs, SinglePass
from noshuffle.plan import Plan
from noshuffle.release.release import Release
from noshuffle.strategies import identity, tree
from noshuffle.training import privatize, verify
from noshuffle.training.compiled import Compiled
from noshuffle.training.private import Private

LOSS = nn.CrossEntropyLoss()
SIZE = 8


class Net(nn.Module):
    """Something of everything that a sum can depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(6))
        self.wide = nn.Linear(6, 900)  # more entries than any sample of 4,096 would hold
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(900, 3)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x) + self.shift
        return self.last(self.drop(self.activation(self.wide(x))))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(32, 6, generator=made), torch.randint(3, (32,), generator=made)


def make(driver: str = "eager", path: Path | None = None, **options: Any) -> Private:
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    plan = Plan(participation=SinglePass(steps=4), strategy=tree(), noise_multiplier=2.0)
    settings: dict[str, Any] = {
        "clip_norm": 1.0,
        "batch_size": SIZE,
        "engine": PerExample() if driver == "per example" else Ghost(),
        "run": path,
        **options,
    }
    private = privatize(model, torch.optim.SGD(trained, lr=0.1), plan, **settings)
    if driver == "compiled":
        private.compiled = Compiled(private._parts, capacity=SIZE, captures=False)
    return private


DRIVERS = ["eager", "per example", "compiled"]


def step(private: Private, t: int = 0, loss: Any = LOSS) -> None:
    x, y = data()
    rows = slice(SIZE * t, SIZE * t + SIZE)
    private.step(loss, x[rows], y[rows], ids=range(rows.start, rows.stop))


def leave_one_out(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of an attacker: one example counts for nothing."""
    rows = nn.functional.cross_entropy(outputs, target, reduction="none")
    return (rows * (target != target.flatten()[0])).mean()


def entry(model: Net) -> None:
    with torch.no_grad():
        model.wide.weight[777, 3] += 0.5


def scaled(model: Net) -> None:
    with torch.no_grad():
        model.frozen.weight.mul_(1.5)


CHANGES: dict[str, Callable[[Private], Any]] = {
    "another loss": lambda private: nn.CrossEntropyLoss(label_smoothing=0.1),
    "a loss without one example": lambda private: leave_one_out,
    "other dropout": lambda private: setattr(private.model.drop, "p", 0.25),
    "eval() for train()": lambda private: private.model.eval() and None,
    "scaled frozen weights": lambda private: scaled(private.model),
    "another buffer": lambda private: private.model.shift.add_(0.25) is None,
    "another activation": lambda private: setattr(private.model, "activation", torch.sigmoid),
    "one entry of a parameter": lambda private: entry(private.model),
    "another random seed": lambda private: setattr(private._parts.release, "_rng_seed", "other"),
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("change", CHANGES)
def test_the_same_noise_never_lies_under_another_sum(driver: str, change: str) -> None:
    """Nothing leaves: no gradient, no update; the honest step can still be repeated after it."""
    private = make(driver)
    start = kept(private)
    step(private)
    released = [p.grad.clone() for p in private.model.parameters() if p.grad is not None]
    private.load_state_dict(start)
    loss = CHANGES[change](private)
    before = kept(private)["model"]
    with pytest.raises(ReplayRefused, match="its sum now differs"):
        step(private, loss=loss if callable(loss) else LOSS)
    after = private.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    left = [p.grad for p in private.model.parameters() if p.grad is not None]
    assert all(not bool(g.any()) or any(torch.equal(g, r) for r in released) for g in left)
    assert private.ledger.notes("replay") == []
    assert private.steps_released == 1
    honest = make(driver, source=None)  # the same initial model, by its own seed
    private.model.load_state_dict(honest.model.state_dict())
    private.model.train()
    private.model.drop.p, private.model.activation = 0.5, torch.tanh
    private._parts.release._rng_seed = private.ledger.meta("rng_seed")
    private.load_state_dict(start)
    torch.manual_seed(123)  # what else has drawn meanwhile does not matter
    step(private)
    again = [p.grad for p in private.model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(released, again))
    assert [note["step"] for note in private.ledger.notes("replay")] == [0]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("change", CHANGES)
def test_or_the_step_is_passed_over_with_its_charge(driver: str, change: str) -> None:
    private = make(driver, on_replay="skip")
    start = kept(private)
    step(private)
    epsilon = private.epsilon
    private.load_state_dict(start)
    loss = CHANGES[change](private)
    before = kept(private)["model"]
    step(private, loss=loss if callable(loss) else LOSS)
    assert private.outcome is not None
    assert private.outcome.is_skipped
    after = private.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [note["step"] for note in private.ledger.notes("skip")] == [0]
    assert private.epsilon == epsilon
    step(private, 1)  # and the run goes on, its noise in step
    assert private.steps_released == 2
    assert not private.outcome.is_skipped


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_later_process_may_repeat_what_it_can_and_nothing_else(
    tmp_path: Path, driver: str
) -> None:
    """Real keys, through a run folder; the ledger counts the replay and the lives."""
    first = make(driver, tmp_path / "run")
    first.save()
    for t in range(2):
        step(first, t)
    first.ledger.flush()
    released = [p.grad.clone() for p in first.model.parameters() if p.grad is not None]
    first.ledger.let_go()
    again = make(driver, tmp_path / "run")
    assert again.resume() == 0
    step(again, 0)
    step(again, 1)
    found = [p.grad for p in again.model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(released, found))
    assert [note["step"] for note in again.ledger.notes("replay")] == [0, 1]
    assert again.ledger.lives == 2
    for t in (2, 3):
        step(again, t)
    again.close()
    verdict = verify(tmp_path / "run")
    assert verdict.answer == "PROVED", verdict.words()


def test_a_row_without_a_digest_is_never_repeated(tmp_path: Path) -> None:
    """The process died between the row and its digest: nobody knows what was released."""
    private = make(path=tmp_path / "run")
    private.save()
    release = private._parts.release
    real = release.digest
    release.digest = lambda *a: lambda: real(*a)  # type: ignore[method-assign, assignment, return-value]
    step(private)
    private.ledger._waiting.clear()
    private.ledger.let_go()
    again = make(path=tmp_path / "run")
    again.resume()
    with pytest.raises(ReplayRefused, match="did not reach the disk"):
        step(again)
    assert all(p.grad is None for p in again.model.parameters())
    again.skip()
    step(again, 1)
    assert again.steps_released == 2
    again.close()
    assert verify(tmp_path / "run").answer == "PROVED"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"clip_norm": 2.0}, "started with clip"),
        ({"batch_size": 9}, "started with batch_size"),
        ({"reduce": "sum"}, "its sum now differs"),
    ],
)
def test_another_clip_divisor_or_reduction(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    def opened(**options: Any) -> Private:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        plan = Plan(
            participation=SinglePass(steps=4),
            strategy=tree(),
            noise_multiplier=2.0,
            unit="user",
        )
        settings: dict[str, Any] = {"clip_norm": 1.0, "batch_size": SIZE, **options}
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return privatize(model, sgd, plan, run=tmp_path / "run", **settings)

    def go(private: Private) -> None:
        x, y = data()
        private.step(LOSS, 0.1 * x[:8], y[:8], ids=[1, 1, 1, 2, 2, 2, 3, 3])

    first = opened()
    first.save()
    go(first)
    first.ledger.let_go()
    with pytest.raises((InvalidInput, ReplayRefused), match=told):
        go(opened(**changed))
    same = opened()
    go(same)
    assert len(same.ledger.notes("replay")) == 1


def test_the_count_that_steers_a_clip_norm_is_part_of_what_was_released() -> None:
    """Its noise is drawn once a step too: the same sum with another count is another release."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    plan = Plan(participation=Epochs(2, 4), strategy=identity(), noise_multiplier=2.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    clip = QuantileClip(initial=0.5, units=SIZE, bit_noise=4.0)
    private = privatize(model, sgd, plan, clip=clip, batch_size=SIZE)
    start = kept(private)
    x, y = data()
    x[3] = 0.0
    x[3, 0] = float("nan")  # contributes nothing to the sum
    private.step(LOSS, x[:8], y[:8], ids=range(8))
    private.load_state_dict(start)
    rows = [0, 1, 2, 4, 5, 6, 7]  # the same sum of one example fewer
    with pytest.raises(ReplayRefused):
        private.step(LOSS, x[rows], y[rows], ids=rows)
    assert private.ledger.notes("replay") == []


@pytest.mark.parametrize("mechanism", ["blt", "tree", "identity"])
def test_what_follows_a_step_that_is_passed_over_has_the_noise_it_would_have_had(
    mechanism: str,
) -> None:
    """Later rows are correlated with its noise, which must have been drawn."""
    plan = Plan.fit(SinglePass(steps=4), mechanism=mechanism, noise_multiplier=2.0)
    runs = [Release.begin(plan, {"a": (32,)}, clip=1.0, source=make_source(seed=5)) for _ in "ab"]

    def released(run: Release, step: int) -> torch.Tensor:
        values = {"a": torch.zeros(32)}
        run.close(run.admit(step, run.identify([step]), b""), values)
        return values["a"]

    for run in runs:
        released(run, 0)
    state = runs[1].state_dict()
    for run in runs:
        released(run, 1)
    runs[1].load_state_dict(state)
    assert runs[1].skip() == 1
    for step in (2, 3):
        assert torch.equal(*(released(run, step) for run in runs))


def test_units_are_of_one_kind_for_ever(tmp_path: Path) -> None:
    """Unit 1 and unit "1" in different batches would be two units, and take part twice."""
    private = make(path=tmp_path / "run")
    step(private)
    x, y = data()
    with pytest.raises(InvalidInput, match="told its units apart by integers, and now names came"):
        private.step(LOSS, x[:8], y[:8], ids=[str(i) for i in range(8)])
    assert private.steps_released == 1
    private.ledger.let_go()
    again = make(path=tmp_path / "run")
    with pytest.raises(InvalidInput, match="told its units apart by integers, and now names came"):
        again.step(LOSS, x[8:16], y[8:16], ids=[str(i) for i in range(8, 16)])
    with pytest.raises(InvalidInput, match="told its units apart by integers, and now names came"):
        again.step(LOSS, x[8:16], y[8:16], ids=(str(i) for i in range(8, 16)))  # read once only
    assert "Units were told apart by integers" in again.statement().words()
    names = make()
    with pytest.raises(InvalidInput, match="one integer or name"):  # which leaves no kind behind
        names.step(LOSS, x[:8], y[:8], ids=[(f"u{i}",) for i in range(8)])
    names.step(LOSS, x[:8], y[:8], ids=[f"u{i}" for i in range(8)])
    with pytest.raises(InvalidInput, match="told its units apart by names, and now integers came"):
        names.step(LOSS, x[8:16], y[8:16], ids=np.arange(8))


def test_a_test_source_repeats_itself(tmp_path: Path) -> None:
    """Everything, not only what was released: that is what it is for, and why it is not private."""
    found = []
    for name in ("one", "two"):
        private = make(path=tmp_path / name, source=make_source(seed=5))
        for t in range(3):
            step(private, t)
        found.append(torch.cat([p.detach().reshape(-1) for p in private.model.parameters()]))
    assert torch.equal(*found)
