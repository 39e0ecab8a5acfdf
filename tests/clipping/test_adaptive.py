"""Quantile-adaptive clipping: sensitivity, the budget split, convergence, when it may change."""

import math

import pytest
import torch

from noshuffle.clipping.adaptive import (
    BIT_SENSITIVITY,
    QuantileClip,
    QuantileState,
    gradient_multiplier,
    shifted_count,
    start,
    update,
)
from noshuffle.errors import InvalidInput


def test_one_unit_moves_the_count_by_at_most_half():
    state = QuantileState(1.0, 1.0)
    norms = torch.tensor([0.2, 3.0, 1.0, math.nan, math.inf])
    base = shifted_count(norms, state)
    assert base == 0.5 + 0.5 - 0.5 - 0.5 - 0.5
    for i in range(5):
        present = torch.ones(5, dtype=torch.bool)
        present[i] = False
        assert abs(base - shifted_count(norms, state, present=present)) == 0.5
    assert shifted_count(torch.zeros(0), state) == 0.0


def test_split_is_exact():
    z, sigma = 0.8, 3.0
    left = gradient_multiplier(z, bit_noise=sigma)
    assert left**-2 + (2 * sigma) ** -2 == pytest.approx(z**-2)
    assert left > z
    with pytest.raises(InvalidInput, match="bit_noise must exceed"):
        gradient_multiplier(2.0, bit_noise=1.0)
    count_mu = BIT_SENSITIVITY / sigma  # independent noise: a Gaussian mechanism beside the other
    assert math.hypot(1 / left, count_mu) == pytest.approx(1 / z)


def test_threshold_changes_only_where_allowed():
    config = QuantileClip(initial=1.0, units=10)
    state = start(config)
    for _ in range(5):
        state = update(state, -5.0, config=config, may_change=False)
    assert state.threshold == 1.0
    assert state.estimate > 1.4
    state = update(state, -5.0, config=config, may_change=True)
    assert state.threshold == state.estimate
    assert state.clip.norm == state.threshold
    assert QuantileState(**state.state_dict()) == state


def test_follows_the_quantile():
    generator = torch.Generator().manual_seed(0)
    config = QuantileClip(initial=100.0, units=200, quantile=0.7)
    state = start(config)
    for _ in range(300):
        norms = torch.randn(200, generator=generator).exp()
        noise = float(torch.randn((), generator=generator))
        noisy = shifted_count(norms, state) + config.noise * noise
        state = update(state, noisy, config=config, may_change=True)
    assert state.threshold == pytest.approx(math.exp(0.5244), rel=0.15)


def test_update_equation_and_limits():
    config = QuantileClip(initial=2.0, units=4, quantile=0.25, rate=0.5, largest=3.0)
    got = update(start(config), 1.0, config=config, may_change=True)
    assert got.threshold == pytest.approx(2.0 * math.exp(-0.5 * (1 / 4 + 0.5 - 0.25)))
    assert update(start(config), -1e9, config=config, may_change=True).threshold == 3.0
    assert config.noise == 0.2
    for bad in ({"initial": 0.0}, {"quantile": 1.0}, {"units": 0}, {"bit_noise": 0.0}):
        with pytest.raises(InvalidInput):
            QuantileClip(**{"initial": 1.0, "units": 4, **bad})
    with pytest.raises(InvalidInput, match="finite"):
        update(start(config), math.nan, config=config, may_change=True)
