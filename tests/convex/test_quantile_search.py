"""A quantile by noisy questions: halving without noise, staying with it, windows that are wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from noshuffle.convex.quantile_search import QUESTIONS, next_point, sureness


def found(
    y: Any, level: float, *, questions: int, noise: float, rng: Any, window: Any = (-1.0, 1.0)
) -> float:
    """Questions about targets y, each answered with noise in units of a share."""
    asked = np.zeros((0, 2))
    for _ in range(questions):
        at = next_point(asked, window=window, of=questions)
        answer = np.mean(y < at) - level + noise * rng.normal()
        asked = np.vstack([asked, [at, sureness(answer, noise)]])
    return next_point(asked, window=window, of=questions)


@pytest.mark.parametrize("level", [0.01, 0.3, 0.5, 0.99])
def test_without_noise_every_question_halves_what_is_left(level: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        y = np.clip(rng.uniform(-1, 1) + 10 ** rng.uniform(-6, 0) * rng.normal(size=501), -1, 1)
        told = found(y, level, questions=40, noise=0.0, rng=rng)
        low, high = np.quantile(y, [max(level - 0.005, 0), min(level + 0.005, 1)])
        assert low - 1e-6 <= told <= high + 1e-6
    assert found(np.full(9, -1.0), level, questions=30, noise=0.0, rng=rng) < -0.999
    assert found(np.full(9, 1.0), level, questions=30, noise=0.0, rng=rng) > 0.999


def test_with_noise_it_is_nearer_than_counts_with_the_same_privacy() -> None:
    """Counts of 64 bins have noise nε in each, and √32 of it below the middle; questions √k/2."""
    rng, share = np.random.default_rng(1), 0.04  # of one question with all of the privacy
    off = []
    for _ in range(200):
        y = rng.uniform(-0.7, 0.7) + 0.1 * rng.normal(size=300)
        told = found(y, 0.5, questions=QUESTIONS, noise=share * math.sqrt(QUESTIONS), rng=rng)
        off.append(np.mean(y < told) - 0.5)
    assert np.sqrt(np.mean(np.square(off))) < 2.5 * share  # counts: 2·√32 = 11 of it


def test_a_wrong_window_costs_questions_and_not_the_answer() -> None:
    rng = np.random.default_rng(2)
    y = 0.6 + 0.01 * rng.normal(size=400)
    for window in ((-0.9, -0.8), (0.5, 0.7), (-3.0, 3.0)):
        told = found(y, 0.5, questions=24, noise=0.01, rng=rng, window=window)
        assert abs(told - 0.6) < 0.01


def test_the_density_is_that_of_the_docstring() -> None:
    """On a fine grid, where every step of it is written out."""
    rng = np.random.default_rng(3)
    asked = np.column_stack([rng.uniform(-1, 1, 12), 2 * rng.normal(size=12)])
    grid = np.linspace(-1, 1, 200_001)
    density = np.where(np.abs(grid - 0.1) < 0.3, 0.9 / 0.6, 0.0) + 0.05
    for i, (at, z) in enumerate(asked, start=1):
        sure = norm.cdf(np.clip(z, -2.5, 2.5))
        density = density * np.where(grid < at, sure, 1 - sure) ** ((i / 12) ** (20 / 64))
    mass = np.cumsum(density) / density.sum()
    median = grid[np.searchsorted(mass, 0.5)]
    assert next_point(asked, window=(-0.2, 0.4), of=20) == pytest.approx(median, abs=1e-4)


def test_answers_without_noise_are_sides() -> None:
    assert sureness(0.0, 0.0) == 0.0
    assert sureness(-1e-9, 0.0) == -sureness(1e-9, 0.0) < 0
    assert sureness(0.3, 0.1) == pytest.approx(3.0)
