"""What a model keeps: nothing of the data may stay in it, neither in a trial nor in a step."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.clipping.state import restored
from noshuffle.errors import ProbablyNotMeant, Unsupported

engines = pytest.mark.parametrize("engine", [Ghost, PerExample, partial(Ghost, isolate=True)])
PLAN = ns.Plan.fit(ns.SinglePass(steps=20), mechanism="tree", noise_multiplier=2.0)


def data(seed: int = 0, size: int = 6) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def assert_is(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(before)
    assert all(torch.equal(now[name], before[name]) for name in now)


def around(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), nn.Linear(4, 3))


class ActNorm(nn.Module):
    """A bias that the first run sets, as in public code of Glow; the flag is plain Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.initialized = how, False
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            start = -x.detach().mean(0)
            if self.how == "data":
                self.bias.data = start
            elif self.how == "copy":
                self.bias.data.copy_(start)
            elif self.how == "in place":
                with torch.no_grad():
                    self.bias.copy_(start)
            else:
                self.bias = nn.Parameter(start)
            self.initialized = True
        return x + self.bias


@engines
@pytest.mark.parametrize("how", ["data", "copy", "in place", "exchanged"])
def test_a_pass_initialises_no_trained_parameter(engine: Any, how: str) -> None:
    """It was initialised from one raw example, and the parameter was released."""
    model = around(ActNorm(how))
    bias, before = model[1].bias, state_of(model)
    for _ in range(2):  # and is refused again: it was not left initialised
        with pytest.raises(Unsupported, match=r"parameter '1\.bias' is set by the forward pass"):
            engine().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
        assert_is(model, before)
        assert model[1].bias is bias
        assert model[1].initialized is False


def test_nothing_is_released_then() -> None:
    model = around(ActNorm("data"))
    before = state_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = ns.privatize(model, optimizer, PLAN, clip_norm=1.0, batch_size=6)
    with pytest.raises(Unsupported, match="on public data before privatize"):
        private.step(F.cross_entropy, *data())
    assert_is(model, before)


class Statistics(nn.Module):
    """Keeps a mean; from run `first` on."""

    def __init__(self, how: str = "in place", *, first: int = 0) -> None:
        super().__init__()
        self.how, self.first = how, first
        if how == "buffer":
            self.register_buffer("mean", torch.zeros(4))
        else:
            self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.first == 0:
            seen = x.detach().mean(0)
            with torch.no_grad():
                if self.how == "through data":
                    self.mean.data.mul_(0.9).add_(seen, alpha=0.1)
                elif self.how == "exchanged":
                    self.mean = nn.Parameter(seen, requires_grad=False)
                elif self.how == "new":
                    self.register_buffer("late", seen)
                else:
                    self.mean.mul_(0.9).add_(seen, alpha=0.1)
        return x + self.mean.detach()


class Codes(nn.Module):
    """A code book that follows its codes (VQ-VAE, exponential moving averages)."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(5, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        which = torch.cdist(x.detach(), self.book).argmin(1)
        if self.training:
            hot = F.one_hot(which, 5).to(x.dtype)
            self.book.data.mul_(0.9).add_(hot.T @ x.detach(), alpha=0.1)
        return x


class Queue(nn.Module):
    """Keeps its last inputs, as momentum contrast, memory banks and key-value caches do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rows: Any = {"list": [], "dict": {}, "deque": deque(maxlen=3), "nested": [([],)]}[kind]

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "dict":
            last = list(self.rows.values())
            self.rows[len(self.rows)] = x.detach()
        else:
            own = self.rows[0][0] if self.kind == "nested" else self.rows
            last = list(own)
            own.append(x.detach())
        return x + sum(t.mean() for t in last)


KEEPING: dict[str, Callable[[], nn.Module]] = {
    **{how: partial(Statistics, how) for how in ("in place", "through data", "buffer")},
    "exchanged": partial(Statistics, "exchanged"),
    "new": partial(Statistics, "new"),
    "codes": Codes,
    **{f"queue: {kind}": partial(Queue, kind) for kind in ("list", "dict", "deque", "nested")},
}


@engines
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.filterwarnings("ignore::noshuffle.errors.ProbablyNotMeant")
def test_a_pass_leaves_nothing_behind(engine: Any, name: str) -> None:
    """No batch is seen by the next one: with and without another one between, the same bits."""
    sums = []
    for between in (False, True):
        model, eng = around(KEEPING[name]()), engine()
        before = state_of(model)
        for seed in (0, 1, 2) if between else (0, 2):
            torch.manual_seed(seed)
            got = eng.clipped_sum(model, F.cross_entropy, data(seed), clip=Flat(1.0))
        assert_is(model, before)
        assert not any(getattr(model[1], "rows", ())) or model[1].rows == [([],)]
        sums.append(got.values)
    assert all(torch.equal(a, b) for a, b in zip(sums[0].values(), sums[1].values(), strict=True))


@engines
@pytest.mark.parametrize("how", ["in place", "through data", "buffer", "exchanged", "new"])
@pytest.mark.filterwarnings("ignore::noshuffle.errors.ProbablyNotMeant")
def test_a_layer_that_starts_to_keep_statistics_keeps_none(engine: Any, how: str) -> None:
    model, eng = around(Statistics(how, first=1)), engine()
    eng.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    before = state_of(model)
    model[1].first = 0
    eng.clipped_sum(model, F.cross_entropy, data(1), clip=Flat(1.0))
    assert_is(model, before)


def test_parts_of_one_step_do_not_see_each_other() -> None:
    """A row of the first part moved the sum of the second by more than the clip norm."""
    x, y = data(size=8)
    other = x.clone()
    other[0] += 5.0
    found = []
    for rows in (x, other):
        model = around(Queue("list")).double()
        got = Ghost(mode="lean").clipped_sum(
            model, F.cross_entropy, (rows.double(), y), clip=Flat(1e-2)
        )
        found.append(torch.cat([v.reshape(-1) for v in got.values.values()]))
    assert float((found[0] - found[1]).norm()) <= 2e-2 * (1 + 1e-9)


def test_what_every_pass_changes_in_vain_is_named_once() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model, engine = around(layer), Ghost()
    with pytest.warns(ProbablyNotMeant, match=r"0\._v' of the model; each pass is undone"):
        engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.clipped_sum(model, F.cross_entropy, data(1), clip=Flat(1.0))


def test_a_model_that_writes_nothing_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Dropout(0.5), nn.LSTM(4, 3))
    model[3].forward = lambda x, of=model[3].forward: of(x[:, None])[0][:, 0]  # type: ignore
    Ghost().clipped_sum(model[:3], F.cross_entropy, data(), clip=Flat(1.0))
    assert not recwarn.list


def test_a_trained_parameter_that_a_later_pass_writes_is_refused() -> None:
    model, engine = around(nn.Tanh()), Ghost()
    engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))

    def drift(layer: Any, args: Any) -> None:
        with torch.no_grad():
            layer.bias.add_(args[0].mean(0))

    model[0].register_forward_pre_hook(drift)
    with pytest.raises(Unsupported, match=r"parameter '0\.bias' is set by the forward pass"):
        engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))


def test_a_large_frozen_tensor_that_moved_is_refused() -> None:
    class Base(nn.Module):
        is_moving = False

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(2**15), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            if self.is_moving:
                self.table[:4] += x.detach().mean(0)
            return x

    model, engine = around(Base()), Ghost()
    engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    model[1].is_moving = True
    with pytest.raises(Unsupported, match=r"parameter '1\.table' is set by the forward pass"):
        engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        is_on = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.is_on:
                self.mean.copy_(x.detach().mean(0))
                raise ValueError("half-way")
            return x

    model, engine = around(Failing()), Ghost()
    engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    model[1].is_on = True
    with pytest.raises(ValueError, match="half-way"):
        engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    assert not model[1].mean.any()


class Collecting(nn.Module):
    """Attributes of all kinds that a run writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        self.named: dict[str, list[int]] = {"sizes": []}
        self.recent: deque[int] = deque(maxlen=3)
        self.sizes, self.array, self.plain = set[int](), np.zeros(2), torch.zeros(2)
        self.pair = (torch.zeros(1), [0])

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.detach())
        self.named["sizes"].append(len(x))
        self.named["new"] = []
        self.recent.append(len(x))
        self.sizes.add(len(x))
        self.array += 1
        self.plain += 1
        self.pair[0].add_(1)
        self.pair[1].append(1)
        self.made = x.detach()
        return x


def test_attributes_and_what_they_hold_are_put_back() -> None:
    model, changed = Collecting(), set[str]()
    with restored(model, changed=changed):
        model(torch.ones(2, 4))
        assert len(model.rows) == 1
    assert (model.rows, model.named, list(model.recent)) == ([], {"sizes": []}, [])
    assert (model.sizes, model.array.tolist(), model.plain.tolist()) == (set(), [0, 0], [0, 0])
    assert (model.pair[0].tolist(), model.pair[1]) == ([0.0], [0])
    assert not hasattr(model, "made")
    assert {"rows", "recent", "plain", "array", "made"} <= changed


def test_the_pass_of_a_buffer_can_be_followed_by_its_backward_pass() -> None:
    model = around(Statistics("buffer"))
    with restored(model):
        out = model(data()[0]) * model[1].mean.sum()
    out.sum().backward()  # what the graph holds is not what was put back
    assert not model[1].mean.any()


def test_a_loss_that_keeps_something_of_its_examples_forgets_it() -> None:
    class ByRunningMean(nn.Module):
        """A loss in units of its running mean."""

        mean = 1.0

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(out, y)
            self.mean = 0.5 * self.mean + 0.5 * float(loss.detach())
            return loss / self.mean

    model, loss, found = around(nn.Tanh()), ByRunningMean(), []
    x, y = data()
    other = x.clone()
    other[0] += 5.0
    for engine in (Ghost, PerExample):
        with pytest.warns(ProbablyNotMeant):
            found = [
                engine().clipped_sum(model, loss, (rows, y), clip=Flat(0.2)).norms
                for rows in (x, other)
            ]
        assert torch.equal(found[0][1:], found[1][1:])
        assert loss.mean == 1.0
