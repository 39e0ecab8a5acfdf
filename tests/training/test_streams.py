"""Steps, and parts of a batch, on several streams of a GPU: each waits for the one before.

Stand-ins for streams and tensors: what waits for what, and what is marked as used, is compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noshuffle.noise import test_source
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import privatize
from noshuffle.training.compiled import Compiled
from noshuffle.training.streams import StreamOrder

DEVICE = torch.device("cuda", 0)


class Value:
    """A tensor of the total; knows which streams use it."""

    def __init__(self) -> None:
        self.used_by: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.used_by.append(stream)


class Stream:
    """A stream; knows which others it waited for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)


def interrupted(_: Any) -> None:
    raise KeyboardInterrupt


def followed(monkeypatch: pytest.MonkeyPatch, order: list[Stream]) -> Value:
    """A part, or a release, on each of these streams."""
    streams, value, now = StreamOrder(), Value(), [order[0]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    for now[0] in order:
        streams.follow(DEVICE, lambda: [value])  # type: ignore[list-item]
    return value


def test_every_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Stream(), Stream()
    value = followed(monkeypatch, [a, b, b, a])
    assert b.waited == [a]
    assert a.waited == [b]
    assert value.used_by == [b, a]


def test_one_stream_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Stream()
    assert followed(monkeypatch, [a, a, a]).used_by == []
    assert a.waited == []


def test_a_wait_that_was_interrupted_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of that call may be given once more, on the same stream."""
    a, b, value, streams = Stream(), Stream(), Value(), StreamOrder()
    now = [a]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    streams.follow(DEVICE, lambda: [value])  # type: ignore[list-item]
    now[0] = b
    with monkeypatch.context() as patch:
        patch.setattr(b, "wait_stream", interrupted)
        with pytest.raises(KeyboardInterrupt):
            streams.follow(DEVICE, lambda: [value])  # type: ignore[list-item]
    streams.follow(DEVICE, lambda: [value])  # type: ignore[list-item]
    assert b.waited == [a]
    assert value.used_by == [b]


class Followed(StreamOrder):
    """Counts who follows, and what each would use of the one before."""

    times = 0

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def follow(self, device: torch.device, made: Any) -> None:
        self.times += 1
        self.found.append(len(list(made())))


def test_steps_of_a_run_follow_each_other() -> None:
    """The total of one is made zero on its stream; the parts of the next are added to it."""
    plan = Plan(participation=SinglePass(steps=3), strategy=identity(), noise_multiplier=1.0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own: dict[str, Any] = {"clip_norm": 1.0, "batch_size": 4, "source": test_source(seed=1)}
    private, loss = privatize(model, optimizer, plan, **own), torch.nn.MSELoss()
    private.compiled = Compiled(private._parts, capacity=4, captures=False)
    private._parts.streams = order = Followed()
    for times in (3, 6):
        with private.accumulate() as step:
            for _ in range(2):
                step.add(loss, (torch.randn(2, 2), torch.randn(2, 1)))
        assert order.times == times
    private.step(loss, torch.randn(4, 2), torch.randn(4, 1))
    assert order.times == 7


def test_parts_of_an_eager_step_are_read_by_the_next() -> None:
    """Each part, and the release: two sums, and losses, norms and marks, of every part before."""
    plan = Plan(participation=SinglePass(steps=3), strategy=identity(), noise_multiplier=1.0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own: dict[str, Any] = {"clip_norm": 1.0, "batch_size": 4, "source": test_source(seed=1)}
    private = privatize(model, optimizer, plan, **own)
    private._parts.streams = order = Followed()
    for _ in range(2):
        with private.accumulate() as step:
            for _ in range(2):
                step.add(torch.nn.MSELoss(), (torch.randn(2, 2), torch.randn(2, 1)))
    assert order.found == [0, 5, 10] * 2
