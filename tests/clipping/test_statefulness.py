"""What a model keeps: nothing of the data may stay in it, neither in a trial nor in a step."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.clipping.snapshot import Watch
from noshuffle.clipping.statefulness import Findings, ModelState, put_back_after
from noshuffle.errors import Unsupported

both = pytest.mark.parametrize("engine", [Ghost, PerExample])
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

    def __init__(self, how: str, *, is_trained: bool = True) -> None:
        super().__init__()
        self.how, self.initialized = how, False
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=is_trained)

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
                self.bias = nn.Parameter(start, requires_grad=self.bias.requires_grad)
            self.initialized = True
        return x + self.bias


@both
@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("how", ["data", "copy", "in place", "exchanged"])
def test_a_trial_run_initialises_nothing(engine: Any, how: str, is_trained: bool) -> None:
    """It was initialised from one raw example, and the parameter was released."""
    model = around(ActNorm(how, is_trained=is_trained))
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
    model(torch.randn(9, 4))  # public data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = ns.privatize(model, optimizer, PLAN, clip_norm=1.0, batch_size=6)
    private.step(F.cross_entropy, *data())
    assert private.steps_released == 1


class Statistics(nn.Module):
    """Keeps a mean in a parameter that is not trained; from run `first` on."""

    def __init__(self, how: str = "in place", *, first: int = 0) -> None:
        super().__init__()
        self.how, self.runs, self.first = how, 0, first
        if how == "buffer":
            self.register_buffer("mean", torch.zeros(4))
        else:
            self.mean = nn.Parameter(torch.zeros(4), requires_grad=self.how == "trained")

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.runs >= self.first:
            seen = x.detach().mean(0)
            if self.how == "variance":  # of one example it is zero
                seen = x.detach().var(0, unbiased=False)
            with torch.no_grad():
                if self.how == "through data":
                    self.mean.data.mul_(0.9).add_(seen, alpha=0.1)
                elif self.how == "exchanged":
                    self.mean = nn.Parameter(seen, requires_grad=False)
                elif self.how == "new":
                    self.register_buffer("late", seen)
                else:
                    self.mean.mul_(0.9).add_(seen, alpha=0.1)
        return x


KINDS = ["in place", "through data", "exchanged", "buffer"]


@both
@pytest.mark.parametrize("how", KINDS)
def test_statistics_in_parameters_are_refused(engine: Any, how: str) -> None:
    """Only buffers were watched: the raw mean went into the state_dict."""
    model = around(Statistics(how))
    before = state_of(model)
    with pytest.raises(Unsupported, match=r"(parameter|buffer) '1\.mean'"):
        engine().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    assert_is(model, before)
    model.eval()
    engine().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    assert_is(model, before)


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
        return x + (self.book[which] - x).detach()


def test_a_code_book_that_follows_its_codes_is_refused() -> None:
    model = around(Codes())
    before = state_of(model)
    with pytest.raises(Unsupported, match=r"parameter '1\.book'"):
        Ghost().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    assert_is(model, before)


def test_statistics_that_only_a_batch_has_are_refused() -> None:
    model = around(Statistics("variance"))
    before = state_of(model)
    with pytest.raises(Unsupported, match=r"'1\.mean'"):
        Ghost().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    assert_is(model, before)


class Extra(nn.Module):
    """Something of the data that `state_dict` asks for by a method."""

    largest = 0.0

    def get_extra_state(self) -> float:
        return self.largest

    def set_extra_state(self, state: float) -> None:
        self.largest = state

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return x


@both
def test_extra_state_is_looked_at(engine: Any) -> None:
    model = around(Extra())
    with pytest.raises(Unsupported, match="extra state"):
        engine().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    assert model[1].largest == 0.0


class Constrained(nn.Linear):
    """Brings its own weights inside a ball before it uses them (EEGNet and others)."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


class Counting(nn.Module):
    """Counts its runs in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.data += 1
        return x


class Cache(nn.Module):
    """A table that grows with the longest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.table):
            self.register_buffer("table", torch.arange(float(x.shape[1])), persistent=False)
        return x + 0.01 * self.table[: x.shape[1]].sum()


@both
def test_what_does_not_depend_on_the_data_may_change(engine: Any) -> None:
    power = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    for layer in (Constrained(4, 4), Counting(), power):
        model, eng = around(layer), engine()
        for seed in range(4):
            eng.clipped_sum(model, F.cross_entropy, data(seed), clip=Flat(1.0))
    assert isinstance(layer, nn.Linear)
    model = around(Counting())
    engine().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
    assert float(model[1].runs) == 1.0  # the step; trial runs are taken back


@both
def test_a_cache_may_grow_at_a_later_step(engine: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cache, self.out = nn.Embedding(9, 4), Cache(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(
                torch.tanh(self.embed(x).mean(1) + self.cache(x * 1.0).mean(1)[:, None])
            )

    model, eng = Net(), engine()
    for length in (3, 3, 7, 5, 9):
        x, y = torch.randint(9, (6, length)), torch.randint(3, (6,))
        eng.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1.0))


class Later(nn.Module):
    """Behaves for some steps; then it starts to keep something of the data."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.statistics = Statistics(how, first=10**9)

    def switch(self) -> None:
        self.statistics.first = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.statistics(x)


@both
@pytest.mark.parametrize("how", [*KINDS, "new", "variance"])
def test_a_layer_that_starts_to_keep_statistics_is_refused(engine: Any, how: str) -> None:
    if engine is PerExample and how in ("variance", "exchanged", "new", "in place", "through data"):
        pytest.skip("vmap itself refuses to let one example write there, or there is no variance")
    model, eng = around(Later(how)), engine()
    for seed in range(3):
        eng.clipped_sum(model, F.cross_entropy, data(seed), clip=Flat(1.0))
    before = state_of(model)
    model[1].switch()
    for seed in (3, 4):
        with pytest.raises(Unsupported, match=r"'1\.statistics\.(mean|late)'"):
            eng.clipped_sum(model, F.cross_entropy, data(seed), clip=Flat(1.0))
        assert_is(model, before)


def test_a_trained_parameter_that_a_forward_pass_writes_is_refused() -> None:
    model, engine = around(nn.Tanh()), Ghost()
    engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))

    def drift(layer: Any, args: Any) -> None:
        with torch.no_grad():
            layer.bias.add_(args[0].mean(0))

    model[0].register_forward_pre_hook(drift)
    with pytest.raises(Unsupported, match=r"parameter '0\.bias' is set by the forward pass"):
        engine.clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))


def test_nothing_is_released_by_a_step_that_keeps_statistics() -> None:
    model = around(Later("buffer"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = ns.privatize(model, optimizer, PLAN, clip_norm=1.0, batch_size=6)
    for seed in range(10):
        private.step(F.cross_entropy, *data(seed))
    model[1].switch()
    before = state_of(model)
    with pytest.raises(Unsupported, match="keeps statistics of the data"):
        private.step(F.cross_entropy, *data(10))
    assert_is(model, before)


class OfThree(nn.Module):
    """Writes in batches of three and more only: no trial of one or two examples shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            self.mean.copy_(x.detach().mean(0))
        return x


def test_every_trial_run_is_taken_back_and_the_step_is_watched() -> None:
    model = around(OfThree())
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"'1\.mean' of the model must not change in a step"):
            Ghost().clipped_sum(model, F.cross_entropy, data(), clip=Flat(1.0))
        assert not model[1].mean.any()


def test_a_run_that_fails_leaves_nothing_behind() -> None:
    class Failing(OfThree):
        is_on = False

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
    model = Collecting()
    with put_back_after(model):
        model(torch.ones(2, 4))
        assert len(model.rows) == 1
    assert (model.rows, model.named, list(model.recent)) == ([], {"sizes": []}, [])
    assert (model.sizes, model.array.tolist(), model.plain.tolist()) == (set(), [0, 0], [0, 0])
    assert (model.pair[0].tolist(), model.pair[1]) == ([0.0], [0])
    assert not hasattr(model, "made")


def test_tied_and_exchanged_tensors_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    weight, before = model[0].weight, model[0].weight.detach().clone()
    state = ModelState(model)
    with torch.no_grad():
        weight.add_(1.0)
    weight.data = torch.zeros(2, 2)
    model[0].weight = nn.Parameter(torch.ones(3, 3))
    model.append(nn.Linear(3, 1))
    state.put_back()
    assert len(model) == 2
    assert model[0].weight is weight is model[1].weight
    assert torch.equal(weight, before)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda m: m[1].running_mean.add_(1.0),
    "through data": lambda m: m[1].running_mean.data.add_(1.0),
    "another object": lambda m: setattr(m[1], "running_mean", torch.ones(3)),
    "another memory": lambda m: setattr(m[1].running_mean, "data", torch.ones(3)),
    "gone": lambda m: m[1]._buffers.pop("running_mean"),
    "none": lambda m: setattr(m[1], "running_mean", None),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_watch_sees_every_write_and_takes_it_back(write: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    watch = Watch(model)
    for _ in range(2):
        buffer = model[1].running_mean
        watch.begin()
        WRITES[write](model)
        assert watch.end(Findings()) == ["1.running_mean"]
        assert model[1].running_mean is buffer
        assert not buffer.any()
        watch.begin()
        assert watch.end(Findings()) == []
    watch.begin()
    WRITES[write](model)
    assert watch.end(Findings(may_change={"1.running_mean"})) == []


def test_a_watch_lets_the_owner_change_what_he_likes_between_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    watch = Watch(model)
    for value in (1.0, 2.0):
        model[1].running_mean.data.fill_(value)
        model[0].weight.data.zero_()
        watch.begin()
        model(torch.ones(2, 3))
        assert watch.end(Findings()) == []
        assert model[1].running_mean.tolist() == [value] * 3
