"""A client's copy is what `copy.deepcopy` makes of a model, but for the server's parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noshuffle.errors import Unsupported
from noshuffle.federated.own_copy import Copies


class Keeps(nn.Module):
    """Keeps things of every kind that a layer may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.same = self.seen_too = {"rows": [torch.zeros(3)], 3: (1, 2)}
        self.pairs = (torch.zeros(1), [0])
        self.again = self.layer
        object.__setattr__(self, "itself", self)
        self.layer.__dict__["above"] = self
        self.held: Any = [self.layer, self.mean, {self}]
        self.names = OrderedDict(first=[1])
        self.dtype, self.kind, self.call = torch.float64, Keeps, torch.relu


class Own(nn.Module):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return "own"


class Shrinks(nn.Module):
    """Leaves out a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = [1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cache"}


def _made(number: int) -> nn.Module:
    torch.manual_seed(number)
    rnn, norm = nn.LSTM(4, 2), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    parts = [nn.Linear(4, 4), Keeps(), rnn, norm, nn.Conv2d(1, 2, 3), nn.MultiheadAttention(4, 2)]
    parts += [nn.BatchNorm1d(4), nn.Sequential(Keeps(), nn.ParameterList([torch.zeros(2)]))]
    chosen = torch.randperm(len(parts))[: 1 + number % len(parts)].tolist()
    model = nn.Sequential(*(parts[index] for index in chosen))
    model[0].register_forward_hook(print)
    model.seen = model.also_seen = {}
    return model


def _reached(value: Any, met: dict[int, Any]) -> dict[int, Any]:
    """Everything that hangs on a value, by its id."""
    if id(value) not in met:
        met[id(value)] = value
        for part in _parts(value):
            _reached(part, met)
    return met


def _parts(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return [vars(value)]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []


def _same(made: Any, twin: Any, originals: dict[int, Any], met: dict[int, int]) -> None:
    """A copy is built as its twin is, with the same parts shared or its own."""
    assert type(made) is type(twin)
    assert (id(made) in originals) == (id(twin) in originals)
    if id(twin) in met:  # the same object in another place
        assert met[id(twin)] == id(made)
        return
    met[id(twin)] = id(made)
    if isinstance(twin, Tensor):
        assert torch.equal(made, twin)
    for one, other in zip(_parts(made), _parts(twin), strict=True):
        _same(one, other, originals, met)


@pytest.mark.parametrize("number", range(16))
def test_copies_are_deep_copies(number: int) -> None:
    model = _made(number)
    originals = _reached(model, {})
    _same(Copies(model, {})(), copy.deepcopy(model), originals, {})
    shared = {name: p for name, p in model.named_parameters() if len(name) % 2}
    made = Copies(model, shared)()
    twin = copy.deepcopy(model, {id(p): p for p in shared.values()})
    _same(made, twin, originals, {})
    assert made is not Copies(model, shared)()
    for name, p in made.named_parameters():
        assert (name in shared) == (p is dict(model.named_parameters())[name])


def test_what_is_hung_on_a_copy_is_nobody_elses() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Keeps())
    made = Copies(model, {"0.weight": model[0].weight})()
    made[1].register_forward_pre_hook(lambda *_: None)
    made[1].same["rows"][0].add_(1.0)
    made[1].mean.add_(1.0)
    made[1].seen.add_(1.0)
    made[0].new = 1
    assert not model[1]._forward_pre_hooks
    assert not any(t.any() for t in (*model[1].same["rows"], model[1].mean, model[1].seen))
    assert not hasattr(model[0], "new")
    assert made[1].held[2] == {made[1]}


def test_classes_that_copy_themselves_do_so() -> None:
    model = nn.Sequential(Shrinks(), nn.Linear(1, 1))
    model.own = Own()
    made = Copies(model, {})()
    assert made.own == "own"
    assert not hasattr(made[0], "cache")
    here = nn.Linear(2, 2)
    here.__deepcopy__ = lambda memo: "here"  # type: ignore[operator, assignment]
    assert Copies(here, {})() == "here"


def test_a_loss_that_keeps_something_is_copied_and_a_function_is_not() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    made = Copies(loss, {})()
    assert made is not loss
    assert made.weight is not loss.weight
    assert Copies(_made, {})() is _made


def test_what_cannot_be_copied_is_named() -> None:
    model = nn.Linear(2, 2)
    model.last = model(torch.zeros(1, 2))
    with pytest.raises(Unsupported, match="Linear cannot be copied"):
        Copies(model, {})()
