"""torch.compile around a private step: it runs as it is, with the weights that it had before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import noshuffle as ns
from noshuffle.noise import test_source as make_source

LOSS = nn.CrossEntropyLoss()
PLAN = ns.Plan.fit(ns.SinglePass(steps=3), mechanism="tree", noise_multiplier=2.0)
Batch = tuple[torch.Tensor, torch.Tensor]


def data(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def by_step(private: ns.Private, wrap: Any) -> Callable[[Batch], Any]:
    step = wrap(private.step)
    return lambda batch: step(LOSS, *batch)


def within(private: ns.Private, wrap: Any) -> Callable[[Batch], Any]:
    def work(batch: Batch) -> float:
        return private.step(LOSS, batch[0] * 2.0, batch[1])

    return wrap(work)  # type: ignore[no-any-return]


def in_parts(private: ns.Private, wrap: Any) -> Callable[[Batch], Any]:
    def work(batch: Batch) -> None:
        x, y = batch
        with private.accumulate() as step:
            step.add(LOSS, (x[:4], y[:4]))
            step.add(LOSS, (x[4:], y[4:]))

    return wrap(work)  # type: ignore[no-any-return]


def unchanged(private: ns.Private, wrap: Any) -> Callable[[Batch], Any]:
    def work(batch: Batch) -> None:
        x, y = batch
        LOSS(private.model(x), y).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()

    return wrap(work)  # type: ignore[no-any-return]


#: torch takes ten seconds to trace what lies around the step in these.
SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in (in_parts, unchanged)]


@pytest.mark.parametrize("way", [by_step, within, *SLOW])
def test_a_compiled_call_takes_the_same_steps(way: Any) -> None:
    """torch's tracer ended in a RecursionError inside the ledger."""
    ends = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        private = ns.privatize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            PLAN,
            clip_norm=1.0,
            batch_size=8,
            source=make_source(seed=1),
        )
        work = way(private, wrap)
        for step in range(3):
            work(data(step))
        assert private.steps_released == 3
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
