"""Rows that no GPU is shown: what they find, and that a model is as before they were asked."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.clipping.odd_models import APART, MIXING, data
from tests.clipping.test_row_check import Honest, Slots, tokens, vectors
from torch import nn

from noshuffle.clipping import Ghost, host_trial, rule_trial
from noshuffle.clipping.factor import Flat
from noshuffle.clipping.host_trial import is_elsewhere, lent, tried_on_host

CLIP = Flat(0.2)
IGNORED = next(odd for odd in MIXING if odd.name == "mean over kept labels")


@pytest.fixture(params=["asked", "not asked"])
def on_a_gpu(request, monkeypatch) -> bool:
    """As a GPU has it: no extreme rows, no ignored labels; and asked on the host, or not."""

    def short_only(pair):
        return iter([next(iter(own_short(pair)))])

    own_short, is_asked = host_trial.alone_still.__globals__["cut_short"], request.param == "asked"
    names = ("isolation_check", "row_check")
    for name in names:
        monkeypatch.setattr(f"noshuffle.clipping.{name}.extremes", lambda *_: iter(()))
        monkeypatch.setattr(f"noshuffle.clipping.{name}.cut_short", short_only)
    asks = partial(tried_on_host, is_asked=lambda *_: is_asked)

    def with_all_rows(*given):
        with monkeypatch.context() as patch:
            from noshuffle.clipping import trial_rows

            for name in names:
                patch.setattr(f"noshuffle.clipping.{name}.extremes", trial_rows.extremes)
                patch.setattr(f"noshuffle.clipping.{name}.cut_short", trial_rows.cut_short)
            return asks(*given)

    monkeypatch.setattr(rule_trial, "tried_on_host", with_all_rows)
    return is_asked


def test_places_that_only_an_extreme_row_shows(on_a_gpu) -> None:
    torch.manual_seed(0)
    model, engine = Slots().double(), Ghost()
    engine.clipped_sum(model, F.cross_entropy, vectors(3, is_one=True), clip=CLIP)
    assert bool(engine.fallbacks) is on_a_gpu


def test_a_mean_that_only_ignored_labels_show(on_a_gpu) -> None:
    torch.manual_seed(0)
    model, engine = IGNORED.make(), Ghost()
    engine.clipped_sum(model, IGNORED.loss, data(IGNORED, 0), clip=CLIP)
    assert bool(engine.fallbacks) is on_a_gpu


def test_models_that_are_apart_stay_so(on_a_gpu) -> None:
    torch.manual_seed(0)
    for odd in APART:
        engine = Ghost()
        engine.clipped_sum(odd.make(), odd.loss, data(odd, 0), clip=CLIP)
        assert not any("whole model" in line for line in engine.fallbacks), odd.name
    engine = Ghost()
    engine.clipped_sum(Honest(), F.cross_entropy, tokens(1), clip=CLIP)
    assert not engine.fallbacks


class Keeps(nn.Module):
    """Tied weights, a buffer, and tensors among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))
        self.own, self.more = torch.zeros(2), {"a": [torch.ones(2)]}


def test_everything_is_lent_and_comes_back() -> None:
    model, loss = Keeps(), nn.CrossEntropyLoss(weight=torch.ones(3))
    held = [model.first.weight, model.scale, model.own, model.more["a"][0], loss.weight]
    before = [(t.data_ptr(), t._version, t.clone()) for t in held]
    with suppress(KeyError), lent(model, loss, F.cross_entropy, move=lambda t: t + 1.0):
        assert all(torch.equal(t, b[2] + 1.0) for t, b in zip(held, before, strict=True))
        assert model.second.weight is model.first.weight
        raise KeyError
    for t, (place, version, values) in zip(held, before, strict=True):
        assert (t.data_ptr(), t._version) == (place, version)
        assert torch.equal(t, values)


def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(3)


def fails(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("found at least\n two devices")


class Plus(nn.Module):
    def __init__(self, more) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(3, 3), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.more(x)


def asked(model: nn.Module) -> str:
    rows = torch.randn(4, 3, device="cpu"), torch.tensor([0, 1, 2, 0], device="cpu")
    return tried_on_host(model, F.cross_entropy, rows, lambda *_: {}, is_asked=lambda *_: True)


def test_who_is_not_asked_is_told_of(monkeypatch) -> None:
    assert not is_elsewhere(nn.Linear(3, 3), (torch.ones(2, 3),))
    assert asked(Plus(ones)) == ""
    assert asked(Plus(fails)).endswith("(found at least two devices)")
    monkeypatch.setattr(host_trial, "MOST", 11)
    assert asked(Plus(ones)).endswith("(more than 11 numbers)")


def test_new_tensors_lie_on_the_cpu_whatever_the_default_is() -> None:
    model = Plus(ones)
    with torch.device("meta"):
        assert asked(model) == ""
        assert ones(model.linear.weight).is_meta
    torch.set_default_device("meta")
    try:
        assert asked(model) == ""
    finally:
        torch.set_default_device(None)


class KernelError(Exception):
    """As libraries of kernels for a GPU have them: of no kind that torch knows."""


@pytest.mark.parametrize("error", [KernelError, AttributeError, ImportError, OSError])
def test_whatever_a_model_raises_on_a_cpu_it_is_not_asked_there(error) -> None:
    def only_on_a_gpu(x: torch.Tensor) -> torch.Tensor:
        raise error("needs a GPU")

    assert asked(Plus(only_on_a_gpu)).endswith("(needs a GPU)")


class Teaching(nn.Module):
    """A loss that keeps tensors, and puts new ones in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.teacher = torch.ones(3), nn.Linear(3, 3)

    def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * 1.0
        return F.cross_entropy(scores * self.scale, labels, reduction="none")


def test_a_loss_is_as_before_and_counts_with_the_model(monkeypatch) -> None:
    """What it had made on the CPU stayed in it, and a teacher of any size was copied there."""
    loss, rows = Teaching(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    scale = loss.scale

    def told() -> str:
        model = nn.Linear(3, 3)
        return tried_on_host(model, loss, rows, lambda *_: {}, is_asked=lambda *_: True)

    assert told() == ""
    assert loss.scale is scale
    monkeypatch.setattr(host_trial, "MOST", 12)  # those of the model
    assert told().endswith("(more than 12 numbers)")
