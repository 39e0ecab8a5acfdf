"""`private.check` and the first look say beforehand what a run will meet, and charge nothing."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from noshuffle.accounting import gaussian
from noshuffle.auditing.answers import HOLDS
from noshuffle.auditing.prefixes import audit_plan
from noshuffle.clipping import ModelLoss
from noshuffle.errors import ParticipationViolation
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import identity, tree
from noshuffle.training import privatize, verify
from noshuffle.training.batches import with_ids

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (20,), generator=torch.Generator().manual_seed(1))
LOSS = nn.CrossEntropyLoss()
DATA = TensorDataset(X, Y)


def make(rule=None, *, strategy=None, size=5, unit="example", delta=1e-5, **options):
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    plan = Plan(
        participation=rule or Epochs(epochs=2, steps_per_epoch=4), strategy=strategy or tree(),
        noise_multiplier=1.0, unit=unit, delta=delta,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"clip_norm": 1.0, "batch_size": size, "source": test_source(seed=1), **options}
    return privatize(model, optimizer, plan, **settings)


def verdicts(check):
    return {f.name: f.verdict for f in check.findings if f.verdict != "ok"}


def test_a_good_loader_is_fine_and_nothing_is_charged_or_drawn(monkeypatch):
    private = make()
    before = [p.detach().clone() for p in private.model.parameters()]
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    check = private.check(DataLoader(DATA, batch_size=5), LOSS)
    assert torch.equal(torch.rand(3), want)
    assert check.is_fine
    assert verdicts(check) == {}
    assert private.steps_released == 0
    assert all(torch.equal(a, b) for a, b in zip(before, private.model.parameters()))
    assert json.loads(json.dumps(check.to_dict()))["is_fine"]
    for columns in (40, 60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, str(check).splitlines())) <= columns
        assert "batch size" in str(check)


def test_what_would_be_refused_later_is_said_before_the_first_step():
    shuffled = DataLoader(DATA, batch_size=5, shuffle=True)
    assert verdicts(make().check(shuffled)) == {}  # private.batches keeps to one order
    assert verdicts(make(strategy=identity()).check(shuffled)) == {}
    assert verdicts(make().check([(X[:5], Y[:5])] * 4)) == {"ids": "warning"}
    numbered = with_ids(DATA)
    followed = DataLoader(numbered, batch_size=5, shuffle=True, collate_fn=numbered.collate)
    assert verdicts(make(strategy=identity()).check(followed)) == {}
    assert verdicts(make().check(followed)) == {"order": "refused"}
    assert verdicts(make(SinglePass(steps=4)).check(shuffled)).get("order") is None
    for sampler in (
        BatchSampler(SubsetRandomSampler(range(20)), 5, drop_last=False),
        BatchSampler(WeightedRandomSampler([1.0] * 20, 20), 5, drop_last=False),
    ):
        found = make().check(DataLoader(DATA, batch_sampler=sampler))
        assert verdicts(found)["order"] == "refused"
    again = DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, replacement=True))
    assert verdicts(make(SinglePass(steps=4)).check(again))["order"] == "refused"
    assert verdicts(make().check(DataLoader(DATA, batch_size=7)))["batches"] == "refused"
    assert verdicts(make(unit="user").check(DataLoader(DATA, batch_size=5))) == {"ids": "refused"}
    poisson = make(Poisson(steps=4, rate=0.2), strategy=identity())
    found = verdicts(poisson.check(DataLoader(DATA, batch_size=5)))
    assert found == {"order": "refused", "ids": "refused"}
    numbered = with_ids(DATA)
    sampled = DataLoader(numbered, batch_sampler=poisson.sampler(20), collate_fn=numbered.collate)
    assert poisson.check(sampled).is_fine
    plain = DataLoader(numbered, batch_sampler=poisson.sampler(20))  # fails where a draw is empty
    assert verdicts(poisson.check(plain))["order"] == "warning"
    small = make(size=10).check(DataLoader(DATA, batch_size=5))  # parts, or a mistake
    (size,) = (row for row in small.findings if row.name == "batch size")
    assert (size.verdict, "unless parts are added up" in size.advice) == ("ok", True)
    arrays = [(X[:5].numpy(), Y[:5])] * 4
    assert verdicts(make().check(arrays)) == {"data": "refused"}


def test_a_loss_is_tried_and_slow_ones_are_named():
    loader = DataLoader(DATA, batch_size=5)
    assert verdicts(make().check(loader, lambda out, y: "no loss"))["loss"] == "refused"
    alone = ModelLoss(lambda model, x, y: LOSS(model(x), y))
    check = make().check(loader, alone)
    assert verdicts(check) == {"loss": "warning"}
    assert "by_row=True" in str(check)


def test_a_generator_is_not_consumed():
    batches = ((X[i : i + 5], Y[i : i + 5]) for i in range(0, 20, 5))
    assert make().check(batches, LOSS).is_fine
    assert len(list(batches)) == 4


def said(private, *, rows=5, loss=LOSS):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for start in (0, 10):
            private.step(loss, X[start : start + rows], Y[start : start + rows])
    return [str(w.message) for w in caught if w.category.__name__ == "ProbablyNotMeant"]


def test_warnings_come_once_and_only_where_they_should():
    assert said(make()) == []
    assert said(make(size=6)) == []
    (words,) = said(make(size=5), rows=10)
    assert "batch size: 10 examples" in words
    (words,) = said(make(delta=0.06))
    assert "20 records" in words
    assert said(make(delta=0.05)) == []
    (words,) = said(make(), loss=ModelLoss(lambda model, x, y: LOSS(model(x), y)))
    assert "private.fallbacks" in words


def test_batches_that_are_dictionaries():
    """A loss that cannot take them is a line of the table; it was a TypeError of torch's."""
    loader = DataLoader([{"x": X[i], "y": Y[i]} for i in range(20)], batch_size=5)
    assert make().check(loader).is_fine
    found = make().check(loader, LOSS)
    assert verdicts(found) == {"loss": "refused"}
    (row,) = (one for one in found.findings if one.verdict == "refused")
    assert "must be Tensor, not dict" in row.found
    assert "the whole dictionary ('x', 'y'); say what is whose: ModelLoss(" in row.advice
    by_name = ModelLoss(lambda model, batch: LOSS(model(batch["x"]), batch["y"]))
    private = make()
    assert private.check(loader, by_name).is_fine
    assert private.steps_released == 0
    two = ModelLoss(lambda model, x, y: LOSS(model(x), y))
    (row,) = (one for one in make().check(loader, two).findings if one.verdict == "refused")
    assert "missing 1 required positional argument" in row.found
    assert row.advice == "ModelLoss calls fn(model, *batch), and this batch has 1 part(s)"
    wrong = DataLoader(TensorDataset(X, Y.float()), batch_size=5)
    (row,) = (one for one in make().check(wrong, LOSS).findings if one.verdict == "refused")
    assert row.found.startswith("RuntimeError: ")
    assert "\n" not in row.found


def test_epsilon_of_a_part_of_an_epoch_and_the_statement_after_close():
    private = make(Epochs(epochs=2, steps_per_epoch=4))
    found = []
    for t in range(5):
        rows = slice(t % 4 * 5, t % 4 * 5 + 5)
        private.step(LOSS, X[rows], Y[rows])
        found.append(private.epsilon)
        assert found[-1] == private.plan.epsilon_after(t + 1)
    assert found[0] < found[4] < private.plan.epsilon()
    private.close()
    assert private.statement().epsilon == found[4]


def test_independent_noise_takes_any_order_at_the_same_price(tmp_path):
    """A new order in every epoch, a unit twice in one refused, and ε of every prefix exact."""
    private = make(strategy=identity(), run=tmp_path / "run")
    for epoch in range(2):
        rows = torch.randperm(20, generator=torch.Generator().manual_seed(epoch))
        for t, ids in enumerate(rows.split(5), start=4 * epoch):
            if t == 5:
                with pytest.raises(ParticipationViolation, match="in this epoch, in step 4"):
                    private.step(LOSS, X[rows[:5]], Y[rows[:5]], ids=rows[:5])
            private.step(LOSS, X[ids], Y[ids], ids=ids)
            want = gaussian.epsilon(mu=math.sqrt(epoch + 1), delta=1e-5)
            assert private.epsilon == pytest.approx(want, rel=1e-9)
            assert private.statement().epsilon == private.epsilon
    words = private.statement().words()
    assert "in any order" in words
    assert "same order" not in words
    private.close()
    assert not verify(tmp_path / "run").refuted
    assert audit_plan(private.plan).answer == HOLDS
    ordered = make()
    ordered.step(LOSS, X[:5], Y[:5], ids=range(5))
    for t in range(1, 4):
        ordered.step(LOSS, X[5 * t : 5 * t + 5], Y[5 * t : 5 * t + 5], ids=range(5 * t, 5 * t + 5))
    with pytest.raises(ParticipationViolation):  # correlated noise does ask for it
        ordered.step(LOSS, X[5:10], Y[5:10], ids=range(5, 10))
