"""The private histogram of gradient norms: what one unit moves, what it costs, what is shown."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.clipping.norm_histogram import EDGES, HistogramClip, NormHistogram
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import test_source
from noshuffle.noise.grid import grid_step
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    MinSeparation,
    Poisson,
    SinglePass,
)
from noshuffle.plan import Plan
from noshuffle.release.evidence_checks import _scale
from noshuffle.release.keys import KeyRing
from noshuffle.release.threshold import COUNT, CountedThreshold
from noshuffle.report import write_report
from noshuffle.strategies import banded, identity, sqrt_toeplitz, tree
from noshuffle.training import fit_model, privatize

CLIP = HistogramClip(norm=0.5, share=0.1)
RULE = Epochs(epochs=2, steps_per_epoch=4)
PLAN = Plan(participation=RULE, strategy=sqrt_toeplitz(), noise_multiplier=1.5)
LOSS = nn.CrossEntropyLoss()
ROWS = torch.Generator().manual_seed(1)
X, Y = torch.randn(32, 4, generator=ROWS), torch.randint(2, (32,), generator=ROWS)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]


def private_of(plan=PLAN, clip=CLIP, run=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = test_source(seed=2)
    return privatize(model, optimizer, plan, clip=clip, batch_size=8, source=source, run=run)


def test_one_unit_adds_one_to_one_bin_whatever_its_norm():
    norms = torch.tensor([0.0, 0.5, 0.500001, 7.9, 1e9, math.inf, math.nan])
    bins = CLIP.bins(norms)
    assert bins.sum() == len(norms)
    assert list(np.flatnonzero(bins)) == [0, 8, 9, 16, 17]
    assert bins[17] == 3
    for i in range(len(norms)):
        present = torch.arange(len(norms)) != i
        moved = bins - CLIP.bins(norms, present=present)
        assert sorted(moved)[-2:] == [0.0, 1.0]
        assert moved.sum() == 1
    found = NormHistogram.of(bins, clip=CLIP, deviation=0.0)
    assert found.above == pytest.approx(5 / 7)  # a norm of exactly ζ is not cut


@pytest.mark.parametrize("strategy", [identity(), sqrt_toeplitz(), tree(), tree(restart_every=4)])
def test_the_guarantee_is_the_plans(strategy):
    for rule in (RULE, MinSeparation(steps=16, separation=4, max_participations=3), SinglePass(9)):
        plan = Plan(participation=rule, strategy=strategy, noise_multiplier=1.5)
        own = CountedThreshold(CLIP, plan, KeyRing.new(test_source(seed=1)))
        gradients = plan.sensitivity.squared / own.noise_scale(plan, ("w",)) ** 2
        bins = rule.most / own.noise**2
        assert math.sqrt(gradients + bins) == pytest.approx(plan.mu(), rel=1e-12)
        assert bins == pytest.approx(CLIP.share * plan.mu() ** 2, rel=1e-12)


def test_sampled_steps_share_their_coin_and_correlated_ones_are_refused():
    plan = Plan(participation=Poisson(steps=9, rate=0.1), strategy=identity(), noise_multiplier=1.5)
    own = CountedThreshold(CLIP, plan, KeyRing.new(test_source(seed=1)))
    assert own.noise_scale(plan, ("w",)) ** -2 + own.noise**-2 == pytest.approx(1.5**-2)
    cyclic = CyclicPoisson(steps=8, groups=4, rate=0.1)
    bins = BallsInBins(epochs=2, steps_per_epoch=4)
    halves = identity(gains=(0.5,) * 8)  # half the gradients' μ, but all of a count's
    for rule, strategy in ((cyclic, banded([1.0, 0.5])), (cyclic, halves), (bins, halves)):
        plan = Plan(participation=rule, strategy=strategy, noise_multiplier=1.5)
        with pytest.raises(Unsupported, match="not accounted for"):
            CountedThreshold(CLIP, plan, KeyRing.new(test_source(seed=1)))


def test_noise_of_the_bins_has_the_deviation_that_is_charged():
    plan = Plan(participation=SinglePass(100), strategy=identity(), noise_multiplier=1.5)
    own = CountedThreshold(CLIP, plan, KeyRing.new(test_source(seed=3)))
    draws, before = [], np.zeros(len(EDGES) + 1)
    for step in range(100):
        own.learn([], step=step)
        after = np.array(own.histogram().counts)
        draws.append(after - before)
        before = after
    assert np.allclose(np.concatenate(draws) / grid_step(own.noise) % 1.0, 0.0)
    assert 0.92 < np.std(draws) / own.noise < 1.08  # 1,800 draws: 1.7 %
    assert abs(np.corrcoef(np.array(draws).T) - np.eye(18)).max() < 0.45  # 100 steps: 10 %
    assert own.histogram().deviation == pytest.approx(own.noise * 10)


def test_the_sum_is_noised_in_units_of_the_clip_norm():
    runs = []
    for clip in (CLIP, HistogramClip(norm=5.0, share=0.1)):
        private = private_of(clip=clip)
        far = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)
        private.step(lambda out, y: 0 * out.sum(1), *far)  # nothing but noise
        runs.append(private.model.bias.grad)
        assert private._parts.noise.scale == pytest.approx(1.5 / math.sqrt(0.9))
    assert torch.allclose(10 * runs[0], runs[1], rtol=1e-5)


def test_a_run_shows_its_norms_by_the_histogram_alone(tmp_path):
    """Killed after five steps and resumed, it has what it would have had."""
    whole = private_of(run=tmp_path / "whole")
    fit_model(whole, BATCHES, LOSS)
    first = private_of(run=tmp_path / "run")
    fit_model(first, BATCHES[:5], LOSS, epochs=1)
    first.step(LOSS, *BATCHES[0])  # after the last checkpoint: replayed below
    assert first.epsilon == pytest.approx(PLAN.epsilon())  # of the whole plan from the first step
    first.close()
    private = private_of(run=tmp_path / "run")
    fit_model(private, BATCHES, LOSS)
    assert private.norm_histogram == whole.norm_histogram
    said = private.statement().words()
    assert "A histogram of the gradient norms was released" in said
    private.close()
    whole.close()
    page = write_report(tmp_path / "run").read_text()
    assert "Gradient norms before clipping" in page
    assert "Privacy spent" not in page


def test_verify_knows_what_the_noise_must_be():
    scale = repr(1.5 / math.sqrt(0.9))
    assert (
        repr(HistogramClip(norm=1, share=np.float64(0.1))) == "HistogramClip(norm=1.0, share=0.1)"
    )
    meta = {"clip": repr(CLIP), "adaptive_clip": "histogram", "noise_scale": scale}
    assert not list(_scale(meta, PLAN))
    assert list(_scale({**meta, "noise_scale": "1.5"}, PLAN))


@pytest.mark.parametrize("bad", [{"norm": 0.0}, {"norm": 1.0, "share": 1.0}, {"norm": math.nan}])
def test_bad_settings(bad):
    with pytest.raises(InvalidInput):
        HistogramClip(**bad)


def test_no_parameter_shares_the_noise_of_the_bins():
    own = CountedThreshold(CLIP, PLAN, KeyRing.new(test_source(seed=1)))
    with pytest.raises(InvalidInput, match="name of the counts"):
        own.noise_scale(PLAN, (f"{COUNT} 3",))
