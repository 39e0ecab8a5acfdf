"""A weight that is used outside its layer is found where the trial has gradients there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample

OUTSIDE = {
    "tanh": lambda m, x: m.a(x) + torch.tanh(x @ m.a.weight.mT),
    "a gate that is shut": lambda m, x: m.a(x) + F.relu(1 - x.abs()) * (x @ m.a.weight.mT),
    "hard sigmoid": lambda m, x: m.a(x) + F.hardsigmoid(F.linear(x, m.a.weight)),
    "clamp": lambda m, x: m.a(x) + (x @ m.a.weight).clamp(-1, 1),
    "a bias": lambda m, x: m.a(x) + F.relu(1 - x.abs()) * m.a.bias,
    "its own input": lambda m, x: m.a(torch.tanh(x @ m.a.weight)),
    "forward alone": lambda m, x: m.a(x) + torch.tanh(m.a.forward(x)),
    "a part of attention": lambda m, x: (
        m.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        + torch.tanh(m.attention.out_proj(x))
    ),
    "a table": lambda m, x: m.a(x) + torch.tanh(x @ m.table.weight)[:, :4] + m.table.weight[:4, 0],
}


def checkpointed(m: Model, x: Tensor) -> Tensor:
    out = checkpoint(m.a, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


def in_place(m: Model, x: Tensor) -> Tensor:
    out: Tensor = m.lstm(x[:, None].expand(-1, 3, -1))[0]  # a view of what lies by time
    out += x[:, None]
    return out[:, -1]


def cached(m: Model, x: Tensor) -> Tensor:
    with parametrize.cached():
        return m.normed(torch.tanh(m.normed(x)))


INSIDE = {
    "twice": lambda m, x: m.a(torch.tanh(m.a(x))),
    "in place": in_place,
    "recurrent": lambda m, x: m.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1],
    "written out by itself": lambda m, x: m.prelu(m.a(x)),
    "parametrized": lambda m, x: m.normed(x),
    "parametrized once": cached,
    "checkpointed": checkpointed,
    "tied": lambda m, x: m.b(m.a(x)),
    "nothing of it": lambda m, x: m.a(x) + 0.0 * sum(p.sum() for p in m.parameters()),
    "detached": lambda m, x: m.a(x) / (1.0 + m.a.weight.detach().norm()),
}


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = {**OUTSIDE, **INSIDE}[how]
        self.a, self.b, self.table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 6)
        self.b.weight = self.a.weight
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm, self.prelu = nn.LSTM(4, 4, batch_first=True), nn.PReLU()
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        used = set(self.how.__code__.co_names)
        for name in ("b", "table", "attention", "lstm", "prelu", "normed"):
            if name not in used:
                delattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def rows(*, far: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return far * torch.randn(6, 4), torch.randn(6, 4)


@pytest.mark.parametrize("how", OUTSIDE)
def test_a_use_beside_its_layer_is_found(how: str) -> None:
    model, loss = Model(how), nn.MSELoss()
    engine, clip = Ghost(), Flat(1.0)
    found = engine.clipped_sum(model, loss, rows(far=0.5), clip=clip).values
    due = PerExample().clipped_sum(model, loss, rows(far=0.5), clip=clip).values
    for name, value in due.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)


def test_one_in_the_loss_is_found() -> None:
    def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        near = torch.tanh(x @ model.weight.mT)
        return ((model(x) - y) ** 2).sum(1) + near.sum(1)

    engine = Ghost()
    engine.clipped_sum(
        nn.Linear(4, 4), ModelLoss(penalty, by_row=True), rows(far=0.5), clip=Flat(1.0)
    )
    assert "whole model written out" in engine.fallbacks[0]


@pytest.mark.parametrize(("how", "far"), list(itertools.product(INSIDE, (0.5, 1e4))))
def test_uses_inside_of_layers_stay_with_their_rules(how: str, far: float) -> None:
    engine = Ghost()
    engine.clipped_sum(Model(how), nn.MSELoss(), rows(far=far), clip=Flat(1.0))
    assert not any("whole model" in note for note in engine.fallbacks)


def test_a_hook_on_the_result_of_a_layer_comes_before_its_rule() -> None:
    class Hooked(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[0](x)
            if h.requires_grad:
                h.register_hook(lambda g: g.clamp(-0.05, 0.05))
            return self[1](torch.tanh(h))

    torch.manual_seed(0)
    model, engine, clip = Hooked(nn.Linear(4, 4), nn.Linear(4, 4)), Ghost(), Flat(1.0)
    engine.clipped_sum(model, nn.MSELoss(), rows(far=1e4), clip=clip)  # whose gradients are small
    found = engine.clipped_sum(model, nn.MSELoss(), rows(far=0.5), clip=clip).values
    due = PerExample().clipped_sum(model, nn.MSELoss(), rows(far=0.5), clip=clip).values
    assert not engine.fallbacks
    for name, value in due.items():
        torch.testing.assert_close(found[name], value)


def named(name: str, forward: Callable[[Any, Tensor], Tensor], *shape: int) -> nn.Module:
    """A layer that looks like one of Hugging Face's."""
    layer: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    layer.weight, layer.eps, layer.nf = nn.Parameter(torch.ones(*shape)), 1e-6, 4
    return layer


def root(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


NAMED = {
    "another room": (named("OwnRMSNorm", lambda m, x: x / (root(x) + 1.0) * m.weight, 4), False),
    "added": (
        named("Conv1D", lambda m, x: x @ m.weight + F.relu(1 - x.abs()) * m.weight[0], 4, 4),
        False,
    ),
    "usual": (named("OwnRMSNorm", lambda m, x: x / root(x) * (1 + m.weight), 4), True),
    "by input": (named("Conv1D", lambda m, x: x @ m.weight, 4, 4), True),
    "takes more": (named("OwnRMSNorm", lambda m, x, y=None: x / root(x) * m.weight, 4), True),
}


@pytest.mark.parametrize("how", NAMED)
def test_a_layer_that_is_not_what_its_name_says_has_no_rule(how: str) -> None:
    layer, is_right = NAMED[how]
    engine, model = Ghost(), nn.Sequential(layer, nn.Linear(4, 4))
    engine.clipped_sum(model, nn.MSELoss(), rows(far=0.5), clip=Flat(1.0))
    assert bool(engine.fallbacks) is not is_right
