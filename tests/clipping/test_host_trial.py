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

from noshuffle.clipping import Ghost, host_trial
from noshuffle.clipping import ghost as ghost_module
from noshuffle.clipping.factor import Flat
from noshuffle.clipping.host_trial import can_be_lent, lent, tried_on_host

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
            asks(*given)

    monkeypatch.setattr(ghost_module, "tried_on_host", with_all_rows)
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


def test_who_is_asked(monkeypatch) -> None:
    model, rows = nn.Linear(3, 3), (torch.ones(2, 3),)
    assert not can_be_lent(model, rows)  # it is on the CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert can_be_lent(model, rows)
    monkeypatch.setattr(host_trial, "MOST", 11)
    assert not can_be_lent(model, rows)


def test_a_model_that_does_not_run_there_is_not_asked() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("found at least two devices")

    rows = torch.randn(4, 3), torch.randint(3, (4,))
    tried_on_host(Placed(), F.cross_entropy, rows, dict, is_asked=lambda *_: True)
