"""What a pass of the user writes into a model, before a private step could look at it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from noshuffle.errors import Unsupported
from noshuffle.noise import test_source
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import privatize

LOSS = nn.CrossEntropyLoss()


class FirstBatch(nn.Module):
    """Sets something from the data of its `when`-th pass, once: ActNorm, code books, scales."""

    def __init__(self, what, when=1):
        super().__init__()
        self.what, self.when, self.passes, self.number = what, when, 0, 0.0
        self.layer, self.bias = nn.Linear(4, 3), nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.passes += 1
        if self.passes == self.when:
            with torch.no_grad():
                if self.what == "parameter":
                    self.bias.copy_(-x.mean(0))
                elif self.what == "buffer":
                    self.mean.copy_(x.mean(0))
                else:
                    self.number = x.mean().item()
        return self.layer(x + self.bias - self.mean - self.number)


def make(model):
    torch.manual_seed(0)
    return privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2),
        Plan(participation=SinglePass(steps=8), strategy=tree(), noise_multiplier=0.5),
        clip_norm=1.0,
        batch_size=8,
        source=test_source(seed=1),
    )


def data(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=draw), torch.randint(3, (8,), generator=draw)


def loop_step(private, x, y):
    private.optimizer.zero_grad()
    LOSS(private.model(x), y).backward()
    private.optimizer.step()


@pytest.mark.parametrize("what", ["parameter", "buffer", "attribute"])
def test_a_layer_that_the_first_batch_of_a_loop_initialises_is_refused(what):
    private = make(FirstBatch(what))
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"set by the forward pass|keeps"):
            loop_step(private, *data())
    assert private.steps_released == 0


@pytest.mark.parametrize("has_grad", [True, False])
def test_so_is_one_that_a_pass_before_the_first_step_has_initialised(has_grad):
    private = make(FirstBatch("parameter"))
    with torch.set_grad_enabled(has_grad):
        private.model(data()[0])
    with pytest.raises(Unsupported, match="parameter 'bias' is set by the forward pass"):
        private.step(LOSS, *data())
    with (
        pytest.raises(Unsupported, match="parameter 'bias' is set by the forward pass"),
        private.accumulate() as step,
    ):
        step.add(LOSS, data())
    assert private.steps_released == 0


@pytest.mark.parametrize("what", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("is_loop", [True, False])
def test_so_is_one_whose_forward_was_called_by_itself(what, is_loop):
    private = make(model := FirstBatch(what))
    model.forward(data()[0])
    with pytest.raises(Unsupported, match=r"set by the forward pass|keeps"):
        loop_step(private, *data()) if is_loop else private.step(LOSS, *data())
    assert private.steps_released == 0


class KeptInEval(nn.Module):
    """Keeps the mean of what it sees in eval mode; gives several outputs in training mode."""

    def __init__(self, *, keeps):
        super().__init__()
        self.layer, self.keeps = nn.Linear(4, 3), keeps
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            return self.layer(x), x
        if self.keeps:
            self.mean.copy_(x.detach().mean(0))
        return self.layer(x)


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_pass_in_eval_mode_kept_is_refused(keeps, is_heard):
    def first(out, y):
        if not (keeps or isinstance(out, tuple)):
            raise TypeError("a loss of several outputs, which eval mode does not give")
        return LOSS(out[0] if isinstance(out, tuple) else out, y)

    private = make(model := KeptInEval(keeps=keeps))
    model.eval()
    (model if is_heard else model.forward)(data()[0])
    model.train()
    model.temperature.fill_(2.0)  # by hand, which is no pass
    if keeps:
        with pytest.raises(Unsupported, match="a pass before this step"):
            private.step(first, *data())
    else:
        private.step(first, *data())
    assert private.steps_released == (not keeps)


class BuiltLate(KeptInEval):
    """Builds something in its first pass, of any mode."""

    built = None

    def forward(self, x):
        self.built = torch.ones(1) if self.built is None else self.built
        out = super().forward(x)
        return out[0] if self.training else out


def test_what_a_model_would_keep_in_eval_mode_is_nothing_before_it_was_in_it():
    private = make(BuiltLate(keeps=True))
    loop_step(private, *data())
    assert private.steps_released == 1


class Actnorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x):
        if not self.is_set:
            self.mean.copy_(x.detach().mean(0))
            self.is_set.fill_(True)
        return self.layer(x - self.mean) * getattr(self, "scale", 1.0)


def test_values_that_a_caller_loads_or_sets_are_no_pass():
    private = make(model := Actnorm())
    public = {"mean": torch.ones(4), "is_set": torch.tensor(True)}
    model.load_state_dict({**model.state_dict(), **public})
    model.scale = 2.0
    private.step(LOSS, *data())
    assert torch.equal(model.mean, torch.ones(4))


@pytest.mark.parametrize("what", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("part", ["", "layer."])
def test_values_that_are_loaded_do_not_hide_what_a_pass_kept_before(what, part):
    private = make(model := FirstBatch(what))
    model.forward(data()[0])
    own = {name: value for name, value in model.state_dict().items() if name.startswith(part)}
    model.load_state_dict(own, strict=False)
    with pytest.raises(Unsupported, match=r"set by the forward pass|keeps"):
        private.step(LOSS, *data())
    assert private.steps_released == 0


class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * self.scale


def test_an_attribute_that_comes_after_privatize_is_no_pass():
    private = make(model := Scaled(nn.Linear(4, 3)))
    model.scale = 2.0
    private.step(LOSS, *data())
    assert private.steps_released == 1


class Shifted(nn.Module):
    """Has a buffer, and builds another in its first pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(4, 3), None
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(x.shape[1]).cos().to(x)
        return self.layer(x * self.mask * self.table + self.shift)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_loop", [True, False])
def test_a_model_that_is_moved_or_set_by_hand_need_not_run_as_it_was(dtype, is_loop):
    private = make(model := Shifted())
    model.mask, model.shift = torch.ones(4), torch.zeros(4)
    model.to(dtype)
    x, y = data()
    model.eval()
    model(x.to(dtype))
    model.train()
    loop_step(private, x.to(dtype), y) if is_loop else private.step(LOSS, x.to(dtype), y)
    assert private.steps_released == 1


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_a_later_pass_of_a_loop_may_not_either(what):
    private = make(model := FirstBatch(what, when=10**9))
    for seed in range(4):  # 5 passes: the looks of steps 1, 2, 4 are over
        loop_step(private, *data(seed))
    model.when = model.passes + 1
    with pytest.raises(Unsupported, match=r"must not change in a step|keeps statistics"):
        loop_step(private, *data(4))
    assert private.steps_released == 4
    assert not model.mean.any()


class Cached(nn.Module):
    """A table as long as the longest batch so far, which tells of shapes alone; a counter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        if x.shape[1] > len(self.table):
            self.table = torch.cos(torch.arange(x.shape[1]) * 1.0)
        return self.layer((x * self.table[: x.shape[1], None]).mean(1))


def test_counters_and_caches_that_grow_are_no_statistics():
    private, draw = make(Cached()), torch.Generator().manual_seed(0)
    for length in (3, 2, 5, 6, 4, 9):
        loop_step(private, torch.randn(8, length, 4, generator=draw), data()[1])
    assert private.steps_released == 6


def test_weights_that_are_loaded_after_a_pass_stay():
    private = make(model := nn.Sequential(nn.Linear(4, 3)))
    with torch.no_grad():
        model(data()[0])
    model.load_state_dict({name: torch.ones_like(v) for name, v in model.state_dict().items()})
    private.step(LOSS, *data())
    assert (model[0].weight - 1).abs().max() < 0.5


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.norm(x))


def normed():
    (model := Normed()).norm.requires_grad_(False).eval()
    return model


def test_what_a_pass_kept_in_another_mode_is_refused():
    """Whoever followed the first refusal had statistics of a raw batch in the model."""
    private = make(model := normed())
    model.train()
    with pytest.raises(Unsupported, match=r"BatchNorm1d\) mixes examples"):
        loop_step(private, *data())
    model.norm.eval()
    with pytest.raises(Unsupported, match="a pass before this step may have run with"):
        loop_step(private, *data())
    assert private.steps_released == 0


def test_a_later_pass_in_another_mode_leaves_nothing():
    private = make(model := normed())
    for seed in range(3):  # the fourth is compared with the raw gradient, by a pass of its own
        loop_step(private, *data(seed))
    before = model.norm.running_mean.clone()
    model.train()
    with pytest.raises(Unsupported, match=r"BatchNorm1d\) mixes examples"):
        loop_step(private, *data(3))
    assert torch.equal(model.norm.running_mean, before)
    model.norm.eval()
    loop_step(private, *data(3))


class Rotary(nn.Module):
    """The length of a table is kept beside it: a number, or a tensor (Hugging Face)."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.length = nn.Linear(4, 3), kind, kind(5)
        self.register_buffer("table", torch.arange(5.0).cos(), persistent=False)

    def forward(self, x):
        if x.shape[1] > self.length:
            self.length, self.table = self.kind(x.shape[1]), torch.arange(float(x.shape[1])).cos()
        return self.layer((x * self.table[: x.shape[1], None]).mean(1))


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("is_loop", [True, False])
def test_a_cached_length_goes_with_its_table(kind, is_loop):
    private, draw = make(Rotary(kind)), torch.Generator().manual_seed(0)
    for length in (3, 5, 4, 6, 9, 4):
        batch = torch.randn(8, length, 4, generator=draw), data()[1]
        loop_step(private, *batch) if is_loop else private.step(LOSS, *batch)
    assert private.steps_released == 6
