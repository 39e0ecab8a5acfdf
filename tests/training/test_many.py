"""Many runs at once equal the same runs one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from noshuffle.clipping import Flat, PerExample
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import NoiseStream, test_source
from noshuffle.strategies import blt, identity
from noshuffle.training.many import Setting, accuracies, clipped_sums, train_many
from noshuffle.training.models import build
from noshuffle.training.stacked import Stacked


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(3, 4, 2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5),
        nn.Tanh(),
        nn.Linear(5, 3, bias=False),
    )


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 7 * 7, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("make", [network, dense])
def test_clipped_sums_equal_the_engine(make) -> None:
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    clips = torch.tensor([0.05, 1.0, 1e6])
    x, y = torch.randn(6, 2, 7, 7), torch.randint(3, (6,))
    params = {
        name: torch.stack([m.get_parameter(name).detach() for m in models])
        for name, _ in models[0].named_parameters()
    }
    weights = torch.tensor([1.0, 1, 1, 0, 1, 1])  # the fourth row is padding
    found = clipped_sums(Stacked(models[0], runs=3), params, x, y, weights, clips)
    keep = weights.bool()
    for k, model in enumerate(models):
        clip = Flat(float(clips[k]))
        right = PerExample().clipped_sum(
            model, nn.CrossEntropyLoss(), (x[keep], y[keep]), clip=clip
        )
        for name, value in right.values.items():
            torch.testing.assert_close(found[name][k], value, rtol=1e-4, atol=1e-6)


def test_a_bad_example_contributes_zero_to_every_run() -> None:
    torch.manual_seed(0)
    model = network()
    params = {name: p.detach()[None].clone() for name, p in model.named_parameters()}
    x, y = torch.randn(4, 2, 7, 7), torch.randint(3, (4,))
    stacked, clip = Stacked(model, runs=1), torch.ones(1)
    clean = clipped_sums(stacked, params, x[1:], y[1:], torch.ones(3), clip)
    x[0] = float("nan")
    spoiled = clipped_sums(stacked, params, x, y, torch.ones(4), clip)
    for name, value in clean.items():
        torch.testing.assert_close(spoiled[name], value)


def test_a_study_equals_the_runs_one_by_one() -> None:
    """Same weights, same noise elements, heavy-ball updates by hand."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 2, 7, 7), torch.randint(3, (12,))
    strategy, steps, size = blt((0.9,), (0.3,)), 3, 4
    settings = [
        Setting(noise_multiplier=0.5, learning_rate=0.2, seed=1),
        Setting(noise_multiplier=2.0, learning_rate=0.1, momentum=0.0, clip_norm=0.3, seed=2),
    ]
    batches = [(x[i : i + size], y[i : i + size], None) for i in range(0, 12, size)]
    source = test_source(seed=3)
    schedule = (1.0, 0.5, 0.25)
    stacked, params = train_many(
        network,
        batches,
        settings,
        strategy=strategy,
        steps=steps,
        batch_size=5,
        learning_rates=schedule,
        source=source,
    )
    shapes = {name: tuple(value.shape) for name, value in params.items()}
    stream = NoiseStream(strategy.recipe(steps), source, shapes, scale=1.0, steps=steps)
    models, velocity = [], []
    for setting in settings:
        torch.manual_seed(setting.seed)
        models.append(network())
        velocity.append({n: torch.zeros_like(p) for n, p in models[-1].named_parameters()})
    for t, (xs, ys, _) in enumerate(batches):
        noise = {name: torch.zeros(shape) for name, shape in shapes.items()}
        stream.add_(noise)
        for k, (setting, model) in enumerate(zip(settings, models)):
            sums = PerExample().clipped_sum(
                model, nn.CrossEntropyLoss(), (xs, ys), clip=Flat(setting.clip_norm)
            )
            scale = setting.noise_multiplier * setting.clip_norm
            with torch.no_grad():
                for name, p in model.named_parameters():
                    g = (sums.values[name] + scale * noise[name][k]) / 5
                    velocity[k][name] = setting.momentum * velocity[k][name] + g
                    p.sub_(setting.learning_rate * schedule[t] * velocity[k][name])
    for k, model in enumerate(models):
        for name, p in model.named_parameters():
            torch.testing.assert_close(params[name][k], p.detach(), rtol=1e-4, atol=1e-5)
    right = accuracies(stacked, params, x, y, chunk=5)
    for k, model in enumerate(models):
        expected = (model(x).argmax(1) == y).float().mean()
        assert float(right[k]) == pytest.approx(float(expected))


def test_runs_do_not_share_noise() -> None:
    setting = Setting(noise_multiplier=1.0, learning_rate=1.0, seed=0)
    x, y = torch.zeros(2, 2, 7, 7), torch.zeros(2, dtype=torch.int64)
    _, params = train_many(
        network, [(x, y, None)], [setting] * 2, strategy=identity(), steps=1, batch_size=1
    )
    for value in params.values():
        assert not torch.equal(value[0], value[1])


def test_refusals() -> None:
    batch = (torch.zeros(2, 2, 7, 7), torch.zeros(2, dtype=torch.int64), None)
    setting = Setting(noise_multiplier=0.0, learning_rate=1.0)
    common = {"strategy": identity(), "batch_size": 2}
    with pytest.raises(InvalidInput, match="gave 1"):
        train_many(network, [batch], [setting], steps=2, **common)
    with pytest.raises(InvalidInput, match="at least one"):
        train_many(network, [batch], [], steps=1, **common)
    with pytest.raises(InvalidInput, match="schedule"):
        train_many(network, [batch], [setting], steps=2, learning_rates=(1.0,), **common)
    with pytest.raises(Unsupported, match="Sequential"):
        Stacked(build("char_lstm", (4,), 5), runs=2)
    with pytest.raises(Unsupported, match="BatchNorm"):
        Stacked(nn.Sequential(nn.BatchNorm2d(2)), runs=2)
