"""Adaptive clipping inside a run: where it may move, what it costs, that it resumes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.clipping import PerLayer
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import NoiseStream, test_source
from noshuffle.noise.grid import grid_step
from noshuffle.participation import Epochs, MinSeparation, Poisson
from noshuffle.plan import Plan
from noshuffle.release.keys import Keys
from noshuffle.release.release import Release
from noshuffle.release.threshold import COUNT, AdaptiveThreshold
from noshuffle.strategies import identity, sqrt_toeplitz, tree
from noshuffle.strategies.recipe import FeedForward
from noshuffle.training import privatize

CONFIG = QuantileClip(initial=0.05, units=8, bit_noise=2.0)


def run(plan, steps, config=CONFIG, lr=0.0):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        plan,
        clip=config,
        batch_size=8,
        source=test_source(seed=2),
    )
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(8 * 4, 4, generator=g), torch.randint(2, (8 * 4,), generator=g)
    norms = []
    for t in range(steps):
        rows = slice(8 * (t % 4), 8 * (t % 4) + 8)
        norms.append(private._parts.threshold.clip.norm)
        private.step(nn.CrossEntropyLoss(), x[rows], y[rows])
    return private, norms


def test_moves_every_step_under_independent_noise_and_only_at_restarts_under_trees():
    rule = Epochs(epochs=4, steps_per_epoch=4)
    _, free = run(Plan(participation=rule, strategy=identity(), noise_multiplier=1.0), 12)
    assert len(set(free)) == 12
    assert free[-1] > free[0]  # nobody is below 0.05: it grows towards the median
    forest = tree(restart_every=4)
    _, held = run(Plan(participation=rule, strategy=forest, noise_multiplier=1.0), 12)
    assert [len(set(held[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(held)) == 3


def test_the_budget_is_the_plans():
    """μ of gradients (with their larger noise) and counts together is the plan's μ."""
    rules = [
        (Epochs(epochs=4, steps_per_epoch=4), identity()),
        (Epochs(epochs=4, steps_per_epoch=4), tree(restart_every=4)),
        (MinSeparation(steps=16, separation=4, max_participations=3), tree(restart_every=8)),
    ]
    for rule, strategy in rules:
        plan = Plan(participation=rule, strategy=strategy, noise_multiplier=1.5)
        threshold = AdaptiveThreshold(CONFIG, plan)
        z = threshold.noise_scale(plan, ("w",))
        gradients = plan.sensitivity.squared / z**2
        counts = rule.most * (0.5 / CONFIG.noise) ** 2
        assert math.sqrt(gradients + counts) == pytest.approx(plan.mu(), rel=1e-12)
        assert z > 1.5
    plan = Plan(participation=Poisson(steps=9, rate=0.1), strategy=identity(), noise_multiplier=1.5)
    z = AdaptiveThreshold(CONFIG, plan).noise_scale(plan, ("w",))
    assert z**-2 + (2 * CONFIG.noise) ** -2 == pytest.approx(1.5**-2)


def test_noise_is_in_units_of_the_threshold_in_force():
    rule = Epochs(epochs=4, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=tree(restart_every=4), noise_multiplier=1.0)
    private, norms = run(plan, 5)
    scale = private._parts.noise.scale
    shapes = {n: tuple(p.shape) for n, p in private.model.named_parameters()}
    stream = NoiseStream(
        plan.strategy.recipe(16), test_source(seed=2), shapes, scale=scale, steps=16
    )
    for _ in range(5):
        noise = {n: torch.zeros(s) for n, s in shapes.items()}
        stream.add_(noise)
    total = sum(
        float((8 * p.grad / norms[4] - noise[n]).square().sum())
        for n, p in private.model.named_parameters()
    )
    assert math.sqrt(total) <= 8 + 1e-4  # what is left is a sum of eight vectors of norm <= 1
    assert "follows a quantile" in private.statement().words()


def test_a_batch_in_parts_is_counted_as_a_whole():
    rule = Epochs(epochs=4, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=identity(), noise_multiplier=1.0)
    (whole, _), (parts, _) = run(plan, 2), run(plan, 2)
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    whole.step(nn.CrossEntropyLoss(), x, y)
    with parts.accumulate() as step:
        for rows in (slice(0, 5), slice(5, 8)):
            step.add(nn.CrossEntropyLoss(), (x[rows], y[rows]))
    assert whole._parts.threshold.state == parts._parts.threshold.state


def test_the_clip_norm_comes_back_from_the_folder(tmp_path):
    rule = Epochs(epochs=4, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=identity(), noise_multiplier=1.0)

    def opened():
        return Release(plan, {"w": (2,)}, clip=CONFIG, divisor=8, run=tmp_path / "run")

    def step(release):
        t = release.step
        ticket = release.admit(release.identify([t]))
        norms = SimpleNamespace(norms=torch.rand(8), present=None)
        release.close(ticket, {"w": torch.zeros(2)}, sums=[norms])
        release.finish(ticket)

    one = opened()
    for _ in range(3):
        step(one)
    one.save({"model": {}})
    step(one)
    one.log.close()
    two = opened()
    two.restore()
    assert two.step == 4
    assert two.threshold.state_dict() != AdaptiveThreshold(CONFIG, plan).state_dict()
    step(two)


def test_refused_where_noise_is_correlated_over_the_whole_run():
    rule = Epochs(epochs=4, steps_per_epoch=4)
    for strategy in (tree(), sqrt_toeplitz()):
        plan = Plan(participation=rule, strategy=strategy, noise_multiplier=1.0)
        with pytest.raises(Unsupported, match="may not change"):
            run(plan, 0)


def threshold(config, *, seed):
    rule = Epochs(epochs=1, steps_per_epoch=1000)
    plan = Plan(participation=rule, strategy=identity(), noise_multiplier=1.0)
    own = AdaptiveThreshold(config, plan)
    own.keys = Keys.new(test_source(seed=seed))
    return own


def noisy_count(config, before, after):
    """The noisy count, from two thresholds in a row."""
    moved = math.log(after["estimate"] / before["estimate"])
    return (config.quantile - moved / config.rate - 0.5) * config.units


@pytest.mark.parametrize("noise", [10.0, 8.0, 3.7, 2048.0])
def test_the_low_bits_of_thresholds_do_not_tell_the_count(noise):
    """Which candidates for the count could have given these thresholds, with float32 noise?"""
    config = QuantileClip(initial=1.0, units=200, bit_noise=noise)
    own, draws = threshold(config, seed=1), np.random.default_rng(0)
    shifts, steps = (0.0, 0.5, -0.5, 1.0), 300
    fits = dict.fromkeys(shifts, 0)
    for step in range(steps):
        own.load_state_dict({"threshold": 1.0, "estimate": 1.0})
        below = int(draws.integers(0, 200))
        norms = torch.cat([torch.zeros(below), torch.full((200 - below,), 2.0)])
        before = own.state_dict()
        own.learn([SimpleNamespace(norms=norms, present=None)], step=step)
        noisy = noisy_count(config, before, own.state_dict())
        in_steps = noisy / grid_step(noise)
        assert abs(in_steps - round(in_steps)) < 1e-6
        for shift in shifts:
            z = (noisy - (below - 100.0) - shift) / noise
            near = np.float32(z)
            gap = max(float(np.spacing(abs(near))), 2.0**-27)
            fits[shift] += abs(z - float(near)) < 1e-3 * gap
    # All or none of the grid is float32, or a fifth of it, for one count as for another; without
    # the grid it was always the true count and never its neighbours.
    assert max(fits.values()) - min(fits.values()) < 0.15 * steps


@pytest.mark.parametrize("kind", ["aes", "philox"])
@pytest.mark.parametrize("noise", [10.0, 0.3])
def test_one_noisy_number_is_that_of_a_stream(kind, noise):
    source = test_source(seed=4, kind=kind)
    stream = NoiseStream(FeedForward((1.0,)), source, {COUNT: (1,)}, scale=noise, steps=50)
    gaps = []
    for row in range(50):
        value, plain = torch.tensor([row - 25.5], dtype=torch.float64), torch.empty(1)
        stream.add_({COUNT: value})
        got = source.noisy(row - 25.5, row=row, name=COUNT, scale=noise)
        assert got == float(value)
        source.normal_(plain, row=row, name=COUNT)
        gaps.append((got - (row - 25.5) - noise * float(plain)) / grid_step(noise))
    assert 0.5 < max(map(abs, gaps)) < 1.001  # rounded at random, not to the nearest


def test_the_threshold_learns_from_counts_on_the_grid():
    config = QuantileClip(initial=100.0, units=200, quantile=0.7)
    own, generator = threshold(config, seed=3), torch.Generator().manual_seed(0)
    for step in range(300):
        norms = torch.randn(200, generator=generator).exp()
        own.learn([SimpleNamespace(norms=norms, present=None)], step=step)
    assert own.clip.norm == pytest.approx(math.exp(0.5244), rel=0.15)


class Moving:
    """A clip of one's own."""

    def __init__(self, *norms, bound):
        self.norms, self.stated = norms, bound

    def groups(self, names):
        return [((name,), norm) for name, norm in zip(names, self.norms)]

    def bound(self, names):
        return self.stated


def test_a_clip_that_changes_after_the_run_began_is_not_heard():
    """Noise of the first norms lay under sums of the later ones, 100 times as large."""
    plan = Plan(participation=Epochs(4, 4), strategy=sqrt_toeplitz(), noise_multiplier=1.0)
    norms, own = {"weight": 0.1, "bias": 0.1}, Moving(0.1, 0.1, bound=0.2)
    for clip in (PerLayer(norms), own):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = privatize(model, optimizer, plan, clip=clip, batch_size=8)
        norms["bias"], own.norms, own.stated = 10.0, (0.1, 10.0), 20.0
        fixed = private._parts.threshold.clip
        assert [norm for _, norm in fixed.groups(("weight", "bias"))] == [0.1, 0.1]
        x, y = torch.randn(8, 4) * 1e3, torch.arange(8) % 2
        private.step(nn.CrossEntropyLoss(), x, y)
        noise = private._parts.noise.scale
        assert noise == pytest.approx(0.2 if clip is own else 0.1 * math.sqrt(2))
        norms["bias"], own.norms, own.stated = 0.1, (0.1, 0.1), 0.2


@pytest.mark.parametrize(
    ("clip", "words"),
    [(Moving(10.0, 10.0, bound=1.0), "states a bound of 1"), (Moving(1.0, bound=1.0), "once")],
)
def test_a_clip_whose_groups_are_not_within_its_bound_is_refused(clip, words):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(participation=Epochs(4, 4), strategy=identity(), noise_multiplier=1.0)
    with pytest.raises(InvalidInput, match=words):
        privatize(model, optimizer, plan, clip=clip, batch_size=8)
