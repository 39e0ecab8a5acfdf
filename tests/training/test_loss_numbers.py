"""Numbers of a batch that go through Python and come back into its loss: refused, or warned of."""

from __future__ import annotations

import gc
import math
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from noshuffle.errors import ProbablyNotMeant
from noshuffle.noise import test_source
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import loss_replay, loss_trace, privatize
from noshuffle.training.loss_numbers import EarlierNumbers, explained
from noshuffle.training.loss_replay import Coupling, coupling
from noshuffle.training.loss_trace import LossTrace

G = torch.Generator().manual_seed(0)
X, O = torch.randn(8, 6, generator=G), torch.randn(8, 4, generator=G)
Y = torch.randint(4, (8,), generator=G)
FIRST = X[0, 0].item()
LABELS = (Y, Y, Y.flip(0))
CE, LOG = F.cross_entropy, list[object]()


def each(o, y):
    return CE(o, y, reduction="none")


def finding(loss_fn, earlier=None, x=X) -> Coupling:
    o = O.clone().requires_grad_() * 1
    with LossTrace([o], [x], earlier) as trace:
        loss = loss_fn(o, x, Y)
        return coupling(trace, loss, None)


def if_number(o, x, y):
    top, w = x.abs().max().item(), 1.0
    if top > 30:
        w = 30.0
    return CE(o * w, y)


def helper(o, x, y):
    def top():
        return x.abs().max().item()

    return CE(o * (30.0 if top() > 30 else 1.0), y)


def hard(o, x, y):
    losses = each(o, y)
    middle = np.median(own := losses.detach().numpy())
    return (torch.from_numpy((own >= middle).astype(np.float32)) * losses).mean()


def numbers(o, y):
    """The losses of the rows, and the same through NumPy."""
    losses = each(o, y)
    return losses, losses.detach().numpy()


def hard_mask(o, x, y):
    losses, own = numbers(o, y)
    return (losses * torch.from_numpy(own >= np.median(own))).mean()


def hard_where(o, x, y):
    losses, own = numbers(o, y)
    return torch.where(torch.from_numpy(own >= np.median(own)), losses, 0.0).mean()


def ranked(o, x, y):
    losses, own = numbers(o, y)
    return (losses * torch.from_numpy(own.argsort().argsort()).float()).mean()


def hard_list(o, x, y):
    own = each(o, y).tolist()
    return (torch.tensor([1.0 if a > 0.5 else 0.0 for a in own]) * each(o, y)).mean()


def skipped(o, x, y):
    if x.abs().max() > 30:
        return CE(o, y) * 0.5
    return CE(o, y)


def tried(o, x, y):  # goes another way when the first row is another
    return CE(o * (1.0 if x[0, 0] == FIRST else 2.0), y)


REFUSED = {
    "inverse": lambda o, x, y: CE(o * (1 / x.abs().max().item()), y),
    "inverse of float()": lambda o, x, y: CE(o * (3 / float(x.abs().max())), y),
    "root": lambda o, x, y: CE(o / math.sqrt(x.var().item()), y),
    "exponential": lambda o, x, y: CE(o * math.exp(-x.abs().mean().item()), y),
    "one less": lambda o, x, y: CE(o * (1 - x.abs().mean().item()), y),
    "array": lambda o, x, y: CE(o * torch.from_numpy(x.std(0)[:4].numpy().copy()), y),
    "inverse array": lambda o, x, y: CE(o * torch.tensor(1 / x.std(0)[:4].numpy()), y),
    "test": tried,
    "test of larger numbers": lambda o, x, y: CE(o * (30.0 if x.max() > 30 else 1.0), y),
    "a return": skipped,
    "index": lambda o, x, y: CE(o * [1.0, 30.0][int(x.max() > 30)], y),
    "rows that are cut off": lambda o, x, y: CE(o * x.abs().max().clamp(min=10.0)[None], y),
}
DOUBTFUL = {
    "more arithmetic": lambda o, x, y: CE(o / (x.std().item() + 1e-8) ** 1.1, y),
    "by NumPy": lambda o, x, y: CE(o * float(np.std(x.numpy())), y),
    "test that goes the same way": lambda o, x, y: CE(o * (30.0 if (y > 9).any() else 1.0), y),
    "test of a number": if_number,
    "number of a function": helper,
    "least of two": lambda o, x, y: CE(o * min(1.0, x.abs().max().item()), y),
    "comparison as a number": lambda o, x, y: CE(o * (1 + 29 * (x.max().item() > 30)), y).mean(),
    "rows by NumPy": hard,
    "a mask by NumPy": hard_mask,
    "a choice by NumPy": hard_where,
    "places by NumPy": ranked,
    "rows by a list": hard_list,
}


def logged(o, x, y):
    loss, best = CE(o, y), 9.0
    shares = (o.argmax(1) == y).float().mean().item()
    predicted = o.detach().cpu().numpy()
    LOG.append((loss.item(), shares, (predicted.argmax(1) == y.numpy()).sum() / len(y)))
    if loss.item() < best:
        best = loss.item()
    if torch.isnan(loss) or not math.isfinite(loss.item()):
        return loss * 0
    assert torch.isfinite(loss)
    assert (y < 4).all()
    assert y.max() < 4, "labels"
    print(f"{loss:.3f} {best:.3f} {max(best, loss.item())}")
    return loss


HONEST = {
    "logs": logged,
    "digits that many numbers have": lambda o, x, y: (
        LOG.append(torch.full((), 0.5).mul((y >= 0).float().mean()).item())
        or 0.5 * CE(o, y) + 0.5 * CE(o, (y + 1) % 4)
    ),
    "a constant of many digits": lambda o, x, y: CE(o / math.sqrt(17), y),
    "weights of classes": lambda o, x, y: (
        LOG.append(o.max().item()) or CE(o, y, weight=torch.tensor([0.2, 1.0, 3.0, 1.0]))
    ),
    "labels through NumPy": lambda o, x, y: (
        LOG.append(o.max().item()) or CE(o, torch.from_numpy(y.numpy().copy()))
    ),
    "a factor on the whole": lambda o, x, y: each(o, y).sum() / (x > 0).sum().item(),
    "a distribution": lambda o, x, y: -torch.distributions.Normal(o, 2.0).log_prob(x[:, :4]).mean(),
    "rows through NumPy": lambda o, x, y: F.mse_loss(o, torch.from_numpy(o.detach().numpy() * 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_come_back_are_tried(name):
    assert finding(REFUSED[name]).refusal


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_cannot_be_decided_is_said(name):
    found = finding(DOUBTFUL[name], x=X * 2 if name == "least of two" else X)
    assert found.refusal == ""
    assert "test_loss_numbers.py:" in found.doubts[0]


@pytest.mark.parametrize("name", HONEST)
def test_logs_checks_and_constants_are_left_alone(name):
    assert finding(HONEST[name]) == Coupling("", ())


def test_numbers_that_change_between_losses_are_in_doubt_if_c_changes_with_them():
    def doubts(loss_fn):
        earlier = EarlierNumbers()
        first, *later = (finding(lambda o, x, y, t=t: loss_fn(o, t), earlier) for t in (1, 2, 2))
        assert not first.doubts  # nothing to compare with
        assert not later[1].doubts  # seen before
        return len(later[0].doubts)

    assert doubts(lambda o, t: CE(o, Y) + 0.1 * t * o.square().mean())
    assert doubts(lambda o, t: CE(o * (t * torch.ones(4)), Y))
    assert doubts(lambda o, t: CE(o, Y, label_smoothing=0.1 * t))
    assert not doubts(lambda o, t: CE(o, Y) * 2.0**t)  # a scaler, which is taken out
    assert not doubts(lambda o, t: CE(o, Y) * torch.tensor(2.0**t))
    assert not doubts(lambda o, t: CE(o, LABELS[t]))  # rows are data


@pytest.mark.parametrize("made", [lambda x: 1 / x.abs().max().item(), lambda x: x.std(0)])
def test_factors_of_the_inputs_that_were_made_before_are_known_again(made):
    factor = made(four := X[:, :4].clone())
    assert finding(lambda o, x, y: CE(o * factor, y), x=four).refusal
    other = factor + 0.12345  # no form of it
    assert finding(lambda o, x, y: CE(o * other, y), x=four) == Coupling("", ())


def test_digits_are_proof_and_few_digits_are_not():
    r = torch.tensor([2.7364512], dtype=torch.float64)
    for k in (r, 1 / r, 0.25 * r.sqrt(), 1 - r, 3e-4 / r**2, r.log()):
        again = explained(k, r)
        assert again is not None
        torch.testing.assert_close(again(r), k)
        assert not torch.allclose(again(2 * r), k)
    for k in (0.5 * r / r, r * 1.2345, torch.tensor([1 / 3]).double()):
        assert explained(k, r) is None
    assert explained(torch.tensor([0.5]).double(), torch.tensor([0.5]).double()) is None
    assert explained(torch.tensor([1 / 3]).double(), torch.tensor([3.0]).double()) is None


def test_what_is_read_is_a_plain_number():
    o = O.clone().requires_grad_() * 1
    with LossTrace([o], [X]):
        read = [o.max().item(), float(o.max()), o[0].tolist()[0], o.std().item() * 2]
    assert all(type(one) is float for one in read)
    assert pickle.loads(pickle.dumps(read)) == read


def started(model):
    plan = Plan(participation=SinglePass(steps=8), strategy=identity(), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return privatize(
        model, optimizer, plan, clip_norm=1.0, batch_size=8, source=test_source(seed=1)
    )


def test_a_loop_is_warned_once_and_its_line_is_named():
    private = started(model := nn.Linear(6, 4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for t in range(4):
            out = model(X + t)
            (CE(out, Y) + 0.1 * t * out.square().mean()).backward()
            private.optimizer.step()
    private.close()
    own = [w for w in told if "may compare" in str(w.message)]
    assert [w.category for w in own] == [ProbablyNotMeant]
    assert own[0].filename == __file__
    assert "earlier step" in str(own[0].message)


def test_a_pass_without_its_loss_keeps_no_memory(monkeypatch):
    """What is noted ends at a limit, or with the next pass, and the mode goes with it."""
    monkeypatch.setattr(loss_trace, "MOST_CALLS", 50)
    modes = torch.overrides._get_current_function_mode_stack
    private = started(model := nn.Linear(6, 4))
    out = model(X)
    own = [
        one for one in modes() if isinstance(one, LossTrace) and any(o is out for o in one.outputs)
    ]
    assert len(own) == 1
    held = weakref.ref(big := out.detach() * 2)
    del big
    assert held() is not None
    for _ in range(50):
        torch.ones(1) * 2
    assert held() is None
    assert not own[0].is_on
    model(X)
    assert all(one is not own[0] for one in modes())
    out = weakref.ref(out)
    CE(model(X), Y).backward()
    private.optimizer.step()
    private.close()
    gc.collect()
    assert out() is None


@pytest.mark.parametrize("where", ["trace", "repetition"])
def test_what_cannot_be_noted_or_repeated_is_warned_of_and_stops_no_loop(monkeypatch, where):
    def odd(*_):
        raise KeyError("odd")

    module = loss_trace if where == "trace" else loss_replay
    monkeypatch.setattr(module, "values", odd)
    found = finding(lambda o, x, y: CE(o * o.max().item(), y))
    assert found.refusal is None
    assert any("could not be tried" in doubt for doubt in found.doubts)
