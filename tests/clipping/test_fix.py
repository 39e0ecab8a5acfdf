"""`noshuffle.fix`: what it exchanges, what it leaves, and that the result can be trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import noshuffle as ns
from noshuffle.clipping import validate
from noshuffle.errors import InvalidInput, Unsupported


def network():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(body, nn.Flatten(), nn.Linear(96, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize("statistics", ["replace", "keep"])
def test_a_fixed_model_trains_and_keeps_examples_apart(statistics):
    model = network()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 1, 6, 6))  # statistics of public data
    with pytest.raises(Unsupported):
        validate(model)
    parameters = list(model.parameters())
    reference = copy.deepcopy(model).eval()
    fixed, changes = ns.fix(model, statistics=statistics)
    assert fixed is model
    assert len(changes) == 2
    assert all(a is b for a, b in zip(parameters, fixed.parameters(), strict=True))
    fixed.train()
    validate(fixed)
    x = torch.randn(5, 1, 6, 6)
    torch.testing.assert_close(fixed(x)[:2], fixed(x[:2]))
    if statistics == "keep":
        torch.testing.assert_close(fixed(x), reference(x))
    else:
        assert not torch.equal(fixed(x), torch.zeros_like(fixed(x)))
        assert fixed[3].num_groups == 1  # a group of one number would be nothing
    plan = ns.Plan.fit(ns.SinglePass(steps=2), mechanism="tree", noise_multiplier=1.0)
    optimizer = torch.optim.SGD(fixed.parameters(), lr=0.1)
    private = ns.privatize(fixed, optimizer, plan, clip_norm=1.0, batch_size=5)
    private.step(nn.CrossEntropyLoss(), x, torch.randint(3, (5,)))
    assert private.steps_released == 1


def test_everything_else_stays_and_is_said():
    tied = nn.BatchNorm2d(4, affine=False)
    model = nn.ModuleDict({
        "a": tied, "b": tied, "norm": nn.InstanceNorm2d(4, track_running_stats=True),
        "words": nn.Embedding(9, 4, max_norm=1.0, sparse=True), "ready": nn.GroupNorm(2, 4),
    })  # fmt: skip
    ready = model["ready"]
    _, changes = ns.fix(model)
    assert model["a"] is model["b"]
    assert type(model["a"]) is nn.GroupNorm
    assert model["ready"] is ready
    assert model["words"].max_norm is None
    assert not model["words"].sparse
    assert [c.split(":")[0] for c in changes] == [
        "layer 'a'", "layer 'norm'", "layer 'words'", "layer 'words'"
    ]  # fmt: skip
    validate(nn.Sequential(model["norm"], model["words"], model["ready"]))
    assert ns.fix(model).changes == ()


def test_a_bare_layer_double_precision_and_statistics_that_are_not_there():
    model, _ = ns.fix(nn.BatchNorm2d(4, dtype=torch.float64).eval())
    assert type(model) is nn.GroupNorm
    assert model.weight.dtype is torch.float64
    assert not model.training
    with pytest.raises(InvalidInput, match="no statistics that could be kept"):
        ns.fix(nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)), statistics="keep")
