"""Losses that take a tensor of the whole batch from around them: refused, or warned of."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample, captured
from noshuffle.errors import InvalidInput, ProbablyNotMeant

G = torch.Generator().manual_seed(0)
X, Z, W = (torch.randn(8, n, generator=G) for n in (5, 3, 1))
Y = torch.randint(3, (8,), generator=G)


class Pair(NamedTuple):
    first: object
    second: object


TREES = st.recursive(
    st.sampled_from([X, Y, nn.Parameter(W), None, 2, 0.5, True, "mean", torch.float32, slice(3)]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(TREES, TREES)
def test_tensors_of_arguments_are_those_among_all_leaves(args, result):
    slow = [one for one in tree_leaves((args, result)) if isinstance(one, torch.Tensor)]
    assert list(map(id, captured._tensors(args, result))) == list(map(id, slow))


def clipped(loss_fn, *batch, engine=Ghost, model=None):
    torch.manual_seed(0)
    model = nn.Linear(5, 3) if model is None else model
    return engine().clipped_sum(model, loss_fn, batch, clip=Flat(1.0))


@pytest.mark.parametrize("engine", [Ghost, PerExample])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, y: (out - Z).square().mean(),
        lambda out, y: (out - Z[:, :3] * 1.0).square().mean(),
        ModelLoss(lambda model, x, y: (model(x) - Z).square().mean()),
        partial(lambda z, out, y: (out - z).square().mean(), Z),
    ],
    ids=["lambda", "a view of it", "ModelLoss", "partial"],
)
def test_a_tensor_of_the_batch_beside_the_arguments_is_refused(loss_fn, engine):
    with pytest.raises(InvalidInput, match="tensor of the whole batch"):
        clipped(loss_fn, X, Z, engine=engine)


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_one_with_as_many_rows_is_warned_of(engine):
    with pytest.warns(ProbablyNotMeant, match=r"shape \(8, 1\) beside its arguments"):
        clipped(lambda out, y: (W * F.cross_entropy(out, y)).sum(), X, Y, engine=engine)


class Table(nn.Module):
    """Keeps as many constants as a batch has rows, and makes as many numbers on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.plain = nn.Linear(5, 3), torch.ones(8)
        self.register_buffer("table", torch.ones(8, 5))

    def forward(self, x):
        scores = x @ self.table.T * self.plain
        return self.layer(x) + (scores.T * torch.arange(8)[:, None]).sum(0)[:, None]


def test_arguments_constants_and_what_modules_keep_are_taken():
    weight = torch.tensor([1.0, 2.0, 3.0])
    honest = [
        (lambda out, y, w: (w * F.cross_entropy(out, y, weight=weight)).sum(), (X, Y, W)),
        (nn.CrossEntropyLoss(weight=weight), (X, Y)),
        (lambda out, y: (out - torch.zeros(8, 3)[:1]).square().sum(), (X, Z)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProbablyNotMeant)
        for loss_fn, batch in honest:
            clipped(loss_fn, *batch)
            clipped(loss_fn, *batch, model=Table())
