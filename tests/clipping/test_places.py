"""Models that hand their layers rows of other examples than the place says, unknown to torch."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.clipping.twin import flat, loop
from torch import nn

from noshuffle.clipping import Ghost
from noshuffle.clipping.factor import Flat

PLACES = "whole model written out per example"


def by_sorted(lengths):
    return torch.tensor(sorted(range(len(lengths)), key=lambda i: -int(lengths[i])))


def shortest_first(lengths):
    return by_sorted(-lengths)


def by_numpy(lengths):
    return torch.from_numpy(np.argsort(-lengths.numpy(), kind="stable"))


def by_transposed(lengths):
    return lengths[None].argsort(dim=1, descending=True, stable=True)[0]


class Ordered(nn.Module):
    """Examples are ordered by length, as recurrent layers once had to have them, and put back."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.embed, self.inner, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        order = self.order((x != 0).sum(1))
        h = torch.tanh(self.inner(self.embed(x[order]))).sum(1)
        return self.head(torch.zeros_like(h).index_copy(0, order, h))


class Slots(nn.Module):
    """Each example goes to one expert, in the next free place there, of which there are enough."""

    def __init__(self, *, below=-math.inf, above=0.0, opened=torch.sigmoid):
        super().__init__()
        self.gate, self.below, self.above, self.opened = nn.Linear(8, 2), below, above, opened
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x):
        which = ((x[:, 0] < self.above) & (x[:, 0] > self.below)).long()
        goes = F.one_hot(which, 2)
        place = (goes.cumsum(0) - 1)[torch.arange(len(x)), which]
        given = x.new_zeros(2, len(x), 8).index_put((which, place), x)
        out = torch.stack([expert(given[i]) for i, expert in enumerate(self.experts)])
        return out[which, place] * self.opened(self.gate(x))[:, :1]


def tokens(seed, *, is_full=False):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randint(1, 11, (6, 7), generator=draw), torch.randint(3, (6,), generator=draw)
    if not is_full:
        x[torch.arange(7) >= torch.randint(1, 8, (6, 1), generator=draw)] = 0
    return x, y


def vectors(seed, *, is_one=False):
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 8, generator=draw), torch.randint(3, (6,), generator=draw)
    x[:, 0] = x[:, 0].abs().clamp(0.1, 0.9)
    if not is_one:
        x[:, 0] *= torch.tensor([1, -1, -1, 1, -1, 1])
    return x.double(), y


def assert_like_the_twin(engine, model, batch):
    want, _, norm = loop(model, F.cross_entropy, batch, share=0.5)
    got = engine.clipped_sum(model, F.cross_entropy, batch, clip=Flat(norm))
    torch.testing.assert_close(flat(got.values), flat(want))
    for i in range(len(batch[1])):
        rest = tuple(t[torch.arange(len(t)) != i] for t in batch)
        less = engine.clipped_sum(model, F.cross_entropy, rest, clip=Flat(norm))
        assert float((flat(got.values) - flat(less.values)).norm()) <= norm * (1.0 + 1e-9)


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("order", [by_sorted, shortest_first, by_numpy, by_transposed])
def test_examples_in_the_order_of_their_lengths(order, is_full):
    """One of them moved a sum by 1.7 clip norms; with `is_full` the first batch has no padding."""
    torch.manual_seed(1)
    model, engine = Ordered(order).double(), Ghost()
    for batch in (tokens(50, is_full=is_full), tokens(51), tokens(52)):
        assert_like_the_twin(engine, model, batch)
    assert engine.fallbacks


@pytest.mark.parametrize("is_one", [True, False])
def test_places_of_experts_by_a_running_count(is_one):
    """One that is alone at its expert has the first place there; `is_one`: none is at first."""
    torch.manual_seed(0)
    model, engine = Slots().double(), Ghost()
    for batch in (vectors(3, is_one=is_one), vectors(4)):
        assert_like_the_twin(engine, model, batch)
    assert engine.fallbacks


@pytest.mark.parametrize("above", [0.0, -50.0])
def test_an_extreme_row_without_a_gradient_hides_nothing(above):
    """The gate of a far example is shut with every second set of weights."""
    for seed in range(6):
        torch.manual_seed(seed)
        model, engine = Slots(above=above).double(), Ghost()
        engine.clipped_sum(model, F.cross_entropy, vectors(3, is_one=True), clip=Flat(0.2))
        assert any(PLACES in note for note in engine.fallbacks), seed


def test_an_ordinary_row_without_a_gradient_hides_nothing():
    """A ReLU shuts the gate of every second one, the first of the batch among them."""
    for seed in range(12):
        torch.manual_seed(seed)
        model, engine = Slots(opened=torch.relu).double(), Ghost()
        engine.clipped_sum(model, F.cross_entropy, vectors(3, is_one=True), clip=Flat(0.2))
        assert any(PLACES in note for note in engine.fallbacks), seed


class Honest(nn.Module):
    """Dropout, time first, an index shared by all: every row is that of its example."""

    def __init__(self):
        super().__init__()
        self.embed, self.at = nn.Embedding(11, 6), nn.Embedding(7, 6)
        self.run, self.drop, self.head = nn.GRU(6, 5), nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x):
        h = self.embed(x) + self.at(torch.arange(x.shape[1]))
        return self.head(self.drop(self.run(h.transpose(0, 1))[0]).mean(0))


def test_rows_in_their_places_stay():
    torch.manual_seed(0)
    model, engine = Honest(), Ghost()
    for seed in range(20):
        engine.clipped_sum(model, F.cross_entropy, tokens(seed), clip=Flat(0.1))
    assert not engine.fallbacks
