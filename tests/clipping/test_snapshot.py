"""What an engine remembers of a model is forgotten as soon as the model changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from noshuffle.clipping import Flat, Ghost, PerExample, validate
from noshuffle.clipping import ghost as ghost_module
from noshuffle.clipping.check import trainable
from noshuffle.clipping.snapshot import Snapshot
from noshuffle.errors import InvalidInput, Unsupported


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 2), nn.ReLU()))


class Other(nn.Linear):
    """Another class with the same parameters."""


def rename(model: nn.Sequential) -> None:
    model._modules["9"] = model._modules.pop("1")


def swap_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def drop_bias(model: nn.Sequential) -> None:
    model[0].bias = None


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "mode of a layer": lambda m: m[1].eval(),
    "mode of all": lambda m: m.eval(),
    "a layer is added": lambda m: m.append(nn.ReLU()),
    "a layer inside is added": lambda m: m[2].append(nn.ReLU()),
    "a layer is replaced by its like": lambda m: m.__setitem__(1, nn.Tanh()),
    "a layer is gone": lambda m: m.__delitem__(1),
    "a layer is renamed": rename,
    "a layer is frozen": lambda m: m[0].requires_grad_(False),
    "a parameter is another object": swap_parameter,
    "a parameter is gone": drop_bias,
    "a parameter is added": lambda m: m[1].register_parameter("p", nn.Parameter(torch.ones(1))),
    "a class is another": lambda m: setattr(m[0], "__class__", Other),
    "a layer is compiled": lambda m: m[0].compile(),
    "a hook before": lambda m: m[0].register_forward_pre_hook(lambda *_: None),
    "a hook behind": lambda m: m.register_forward_hook(lambda *_: None),
    "a hook on the way back": lambda m: m[1].register_full_backward_hook(lambda *_: None),
    "another forward": lambda m: setattr(m[1], "forward", torch.relu),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change: str) -> None:
    model = net()
    shot = Snapshot(model)
    assert shot.holds(model)
    CHANGES[change](model)
    assert not shot.holds(model)
    again = Snapshot(model)
    assert again.holds(model)
    assert again.like == trainable(model)


def test_training_changes_nothing() -> None:
    model = net()
    shot = Snapshot(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
            p.grad = torch.ones_like(p)
    assert shot.holds(model)
    model[0].register_forward_hook(lambda *_: None).remove()
    assert shot.holds(model)
    assert shot.names == {id(p): n for n, p in model.named_parameters()}


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(InvalidInput, match="trainable parameter"):
        Snapshot(net().requires_grad_(False))


LOSS, DATA = nn.CrossEntropyLoss(), (torch.randint(5, (6, 2)), torch.randint(2, (6,)))


def words() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0], "max_norm", 1.0),
        lambda m: setattr(m[0], "scale_grad_by_freq", True),
        lambda m: m.__setitem__(2, nn.Sequential(m[2], nn.BatchNorm1d(8))),
        lambda m: m.insert(3, nn.BatchNorm1d(8)),
    ],
)
def test_an_engine_looks_again_in_every_step(change: Callable[[nn.Module], object]) -> None:
    model, engine = words(), Ghost()
    engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    change(model)
    with pytest.raises(Unsupported, match="mixes examples"):
        validate(model)
    with pytest.raises(Unsupported, match="mixes examples"):
        engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))


class Halved(torch.autograd.Function):
    """The identity, whose gradients lose their mean on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *sent: torch.Tensor) -> torch.Tensor:
        return sent[0] - sent[0].mean(0)


MIXING: dict[str, Callable[[nn.Sequential], object]] = {
    "hook": lambda m: m[0].register_forward_hook(lambda _, args, out: out - out.mean(0)),
    "hook before": lambda m: m[2].register_forward_pre_hook(lambda _, a: (a[0] - a[0].mean(0),)),
    "backward": lambda m: m[1].register_forward_hook(lambda _, args, out: Halved.apply(out)),
    "forward": lambda m: setattr(m[1], "forward", lambda x: torch.tanh(x - x.mean(0))),
}


@pytest.mark.parametrize("engine", [Ghost, PerExample])
@pytest.mark.parametrize("change", MIXING)
def test_what_mixes_after_the_first_steps_is_seen_at_once(change: str, engine: Any) -> None:
    """One example then moved the sum by up to 5.8 clip norms until a look was drawn."""
    torch.manual_seed(0)
    model, own = net(), engine()
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    for _ in range(3):
        own.clipped_sum(model, LOSS, (x, y), clip=Flat(0.01))
    MIXING[change](model)
    found = own.clipped_sum(model, LOSS, (x, y), clip=Flat(0.01)).values
    with_it = torch.cat([x[:7], x[:1] * 50])
    other = own.clipped_sum(model, LOSS, (with_it, y), clip=Flat(0.01)).values
    moved = torch.cat([(found[name] - other[name]).flatten() for name in found]).norm()
    assert moved <= 0.02 * (1 + 1e-5)  # one of two contributions, each of one clip norm


def test_a_norm_that_starts_to_train_is_refused_and_may_go_back() -> None:
    model, engine = words(), Ghost()
    model.insert(3, nn.BatchNorm1d(8).eval())
    engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    model[3].train()
    with pytest.raises(Unsupported, match="BatchNorm1d"):
        engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    model[3].eval()
    engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    assert len(engine._known[model]) == 1  # what was known of it still holds
    model[3].running_mean = None  # now it takes the mean of the batch
    with pytest.raises(Unsupported, match="BatchNorm1d"):
        engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))


def test_a_layer_that_is_frozen_later_has_no_sum() -> None:
    model, engine = words(), Ghost()
    both = engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    model[2].requires_grad_(False)
    fewer = engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    assert set(both.values) - set(fewer.values) == {"2.weight", "2.bias"}


def test_few_states_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghost_module, "SHOTS", 2)
    model, engine = words(), Ghost()
    for width in (1, 2, 3, 4):
        model[1].train(width % 2 == 0)
        model[3].train(width > 2)
        engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    assert len(engine._shots[model]) == 2
    assert len(engine._known[model]) == 2


def test_a_model_can_go() -> None:
    model, engine = words(), Ghost()
    engine.clipped_sum(model, LOSS, DATA, clip=Flat(1.0))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not engine._known
    assert not engine._shots


class Casting(nn.Module):
    """A model that casts by itself, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_on = nn.Linear(6, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.is_on):
            return torch.tanh(self.inner(x)).float()


def test_whether_a_model_casts_is_learned_anew_in_every_step() -> None:
    torch.manual_seed(0)
    model, engine = Casting(), Ghost()
    batch = torch.randn(5, 6), torch.randint(4, (5,))
    exact = engine.clipped_sum(model, LOSS, batch, clip=Flat(0.5)).values
    (known,) = engine._known[model].values()
    assert known.route.is_cast is False
    for is_on in (True, True, False):
        model.is_on = is_on
        found = engine.clipped_sum(model, LOSS, batch, clip=Flat(0.5)).values
        assert known.route.is_cast is is_on
        for name, value in found.items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, exact[name], rtol=0.1, atol=0.02)
    assert not engine.fallbacks
