"""What a batch may hold: everything that reaches a loss is cut by example, or is a setting."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample
from noshuffle.clipping.objective import cuttable
from noshuffle.errors import InvalidInput

SIZE = 6
Pair = namedtuple("Pair", "x y")


@dataclass
class Own:
    x: torch.Tensor


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE, 3, generator=g), torch.randn(SIZE, generator=g)


def error(model, given, y):
    x = given if isinstance(given, torch.Tensor) else torch.as_tensor(given["x"])
    return F.mse_loss(model(x).squeeze(-1), y)


STRANGE = {
    "NumPy array": lambda x: x.numpy(),
    "NumPy number": lambda x: np.float32(x[0, 0]),
    "list of numbers": lambda x: x[:, 0].tolist(),
    "tuple of texts": lambda x: tuple(str(v) for v in x[:, 0].tolist()),
    "numbers inside": lambda x: {"x": x, "more": [1.0] * SIZE},
    "namespace": lambda x: SimpleNamespace(x=x),
    "dataclass": lambda x: Own(x),
    "set": lambda x: {x},
    "a mapping with an array": lambda x: UserDict(x=x.numpy()),
}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_what_cannot_be_cut_is_refused_by_every_engine(strange, engine):
    torch.manual_seed(0)
    x, y = data()
    batch = (STRANGE[strange](x), y)
    with pytest.raises(InvalidInput, match="cut by example") as seen:
        engine().clipped_sum(nn.Linear(3, 1), ModelLoss(error), batch, clip=Flat(1.0))
    assert "\n" not in str(seen.value)


@pytest.mark.parametrize("strange", STRANGE)
def test_nothing_is_released_for_it(strange):
    model = nn.Linear(3, 1)
    plan = ns.Plan.fit(ns.SinglePass(steps=3), mechanism="tree", noise_multiplier=1.0)
    private = ns.privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan, clip_norm=1.0, batch_size=SIZE
    )
    x, y = data()
    with pytest.raises(InvalidInput, match="cut by example"):
        private.step(ModelLoss(error), STRANGE[strange](x), y)
    with (
        pytest.raises(InvalidInput, match="cut by example"),
        private.accumulate() as step,
    ):
        step.add(ModelLoss(error), (STRANGE[strange](x), y))
    assert private.steps_released == 0


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, MappingProxyType])
@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_mappings_are_cut_like_dictionaries(kind, engine):
    """One row changed moves the sum by at most twice the clip norm, however it is wrapped."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    (x, y), other = data(), data()[0]
    other[0] = 1e4

    def total(rows):
        batch = (kind({"x": rows}), y)
        found = engine().clipped_sum(model, ModelLoss(error), batch, clip=Flat(1.0))
        return torch.cat([v.flatten() for v in found.values.values()])

    plain = engine().clipped_sum(model, ModelLoss(error), (x, y), clip=Flat(1.0))
    want = torch.cat([v.flatten() for v in plain.values.values()])
    torch.testing.assert_close(total(x), want)
    assert float((total(other) - total(x)).norm()) <= 2.0


def test_a_mapping_goes_through_a_whole_step():
    def step(kind):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        plan = ns.Plan.fit(ns.SinglePass(steps=3), mechanism="tree", noise_multiplier=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        source = ns.noise.test_source(seed=1)
        private = ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=6, source=source)
        x, y = data()
        private.step(ModelLoss(error), kind({"x": x}), y)
        return model.weight.detach()

    assert torch.equal(step(UserDict), step(dict))


def test_settings_and_nesting_stay():
    x, y = data()
    batch = (Pair(x, y), [x, (y, None)], {"a": x, "flag": True}, 0.5, "text", None)
    got = cuttable(batch)
    assert isinstance(got[0], Pair)
    assert got[1][1] == (y, None) or got[1][1][1] is None
    assert got[3:] == (0.5, "text", None)
    assert got[2]["flag"] is True
    usual = (x, y)
    assert cuttable(usual) is usual
    with pytest.raises(InvalidInput, match=r"put it into one"):
        cuttable({"x": x})
