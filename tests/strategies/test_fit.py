"""The door: every mechanism by name, automatic choices, refusals, and the search for the best."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from tests.strategies.lower_bound import rms_lower_bound

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    FixedSize,
    MinSeparation,
    Poisson,
    Restarted,
    SinglePass,
)
from noshuffle.strategies.error import error
from noshuffle.strategies.fit import MECHANISMS, best, candidates, fit
from noshuffle.strategies.sensitivity import sensitivity
from noshuffle.strategies.workload import Workload, cooldown, momentum, prefix

least = cache(rms_lower_bound)


def measured(found, participation, workload=None):
    record = error(found.strategy, participation.steps, workload=workload or prefix())
    return record.rms * sensitivity(found.strategy, participation).value


@pytest.mark.parametrize("participation", [SinglePass(48), Epochs(4, 12), MinSeparation(48, 12, 3)])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_reports_what_it_measures(mechanism, participation):
    refused = ("blt_tapped", "blt_gains", "blt_two_sided")
    if isinstance(participation, MinSeparation) and mechanism in refused:
        pytest.skip("taps and gains are fitted for one participation or for epochs")
    options = {"buffers": 2} if mechanism.startswith("blt") else {}
    found = fit(mechanism, participation, **options)
    assert found.objective == pytest.approx(measured(found, participation), rel=1e-6)
    assert found.objective >= least(participation)
    if not mechanism.startswith("blt"):  # whose own tests say the same, and take a while
        assert fit(mechanism, participation).strategy == found.strategy


@pytest.mark.parametrize("mechanism", ["identity", "tree", "sqrt", "bsr", "bisr", "banded", "blt"])
def test_momentum_and_schedules(mechanism):
    for workload in (momentum(0.9), Workload(0.5, cooldown(40))):
        found = fit(mechanism, Epochs(2, 20), workload=workload, buffers=2)
        assert found.objective == pytest.approx(measured(found, Epochs(2, 20), workload), rel=1e-6)


def test_trees_choose_restart_and_completion():
    mnist, cifar, nodes = Epochs(20, 240), Epochs(20, 100), {"tree_accounting": "nodes"}
    for options, at_mnist, at_cifar, at_once in ((nodes, 33.8, 31.1, 5.7), ({}, 30.4, 28.6, 5.3)):
        found = fit("tree", mnist, **options)
        assert found.objective == pytest.approx(at_mnist, abs=0.05)
        assert (found.strategy.restart_every, found.strategy.completion) == (480, True)
        found = fit("tree", cifar, **options)
        assert found.objective == pytest.approx(at_cifar, abs=0.05)
        assert found.strategy.restart_every == 200
        once = fit("tree", SinglePass(1600), **options).objective
        assert once == pytest.approx(at_once, abs=0.05)


def test_trees_are_compared_on_the_workload_they_are_for():
    rule, workload = MinSeparation(steps=1000, separation=100, max_participations=10), momentum(0.9)
    found = fit("tree", rule, workload=workload)
    assert found.strategy.restart_every == 256
    assert found.objective == pytest.approx(133.574, rel=1e-5)
    nodes = fit("tree", rule, workload=workload, tree_accounting="nodes")
    assert nodes.objective == pytest.approx(143.438, rel=1e-5)
    for every in (100, 200, 500, 128, 512):
        for completion in (False, True):
            other = fit("tree", rule, workload=workload, restart_every=every, completion=completion)
            assert found.objective <= other.objective
    sums = fit("tree", rule)
    assert sums.strategy.restart_every == 128  # another workload, another restart


def test_given_tree_options_are_kept():
    epochs = Epochs(8, 8)
    one = fit("tree", epochs, restart_every=64, variant="plain")
    assert (one.strategy.restart_every, one.strategy.variant) == (None, "plain")
    two = fit("tree", epochs, restart_every=16, completion=False)
    assert (two.strategy.restart_every, two.strategy.completion) == (16, False)
    done = fit("tree", epochs, restart_every=24, completion=True)
    assert (done.strategy.restart_every, done.strategy.completion) == (24, True)
    with pytest.raises(InvalidInput, match="completion must come with restart_every"):
        fit("tree", SinglePass(64), completion=True)
    assert fit("tree", epochs, completion=True).strategy.restart_every in (8, 16, 32)
    for every in (8, 16, 32, 64):
        for completion in (False, True):
            fixed = fit("tree", epochs, restart_every=every, completion=completion)
            assert fit("tree", epochs).objective <= fixed.objective


def test_unit_columns_where_they_help():
    found = fit("sqrt", SinglePass(256))
    assert found.strategy.normalized == 256
    assert found.objective == pytest.approx(2.557, abs=1e-3)
    assert fit("sqrt", Epochs(4, 64)).strategy.normalized == 0
    assert fit("banded", SinglePass(1600)).objective <= 3.2
    blt = fit("blt", SinglePass(256))
    assert blt.strategy.has_gains
    assert blt.objective <= 2.562


def test_bands_follow_bands_then_buffers_then_the_separation():
    epochs = Epochs(4, 16)
    assert len(fit("banded", epochs).strategy.bands) == 16
    assert fit("banded", epochs, buffers=3).strategy.buffers(64) == 3
    assert len(fit("banded", epochs, buffers=3, bands=8).strategy.bands) == 8
    assert fit("bsr", epochs).strategy.bands == 16
    assert fit("bsr", epochs, bands=5).strategy.bands == 5
    assert fit("bisr", epochs).objective <= fit("bisr", epochs, bands=4).objective
    assert len(fit("banded_inverse", epochs, bands=5).strategy.bands) == 5


@pytest.mark.parametrize("participation", [SinglePass(64), Epochs(4, 16)])
def test_a_blt_takes_no_more_buffers_than_pay(participation):
    found = fit("blt", participation)
    assert found.strategy.buffers(64) <= 2  # at this size a third merges with the others
    for size in (1, 2, 3):
        other = fit("blt", participation, buffers=size)
        assert found.objective <= other.objective * 1.0011


def test_taps_and_gains_pay_over_epochs():
    plain = fit("blt", Epochs(4, 16), buffers=2)
    tapped = fit("blt_tapped", Epochs(4, 16), buffers=2, taps=3)
    assert plain.objective == pytest.approx(4.917, abs=2e-3)
    assert tapped.objective <= 4.65
    assert len(tapped.strategy.taps) <= 3


@pytest.mark.parametrize("sampled", [Poisson(100, 0.1), FixedSize(100, 5, 50)])
def test_sampling_is_for_independent_noise(sampled):
    assert fit("identity", sampled).strategy.name == "identity"
    for mechanism in set(MECHANISMS) - {"identity"}:
        with pytest.raises(Unsupported, match="independent noise only"):
            fit(mechanism, sampled)
    assert [found.strategy.name for found in candidates(sampled)] == ["identity"]


def test_restarted_orders_are_for_trees():
    participation = Restarted(Epochs(4, 8), every=16)
    assert fit("tree", participation).strategy.restart_every == 16
    assert {found.strategy.name for found in candidates(participation)} == {"identity", "tree"}
    with pytest.raises(Unsupported, match="trees and identity only"):
        fit("blt", participation)


def test_bad_input_is_one_line():
    with pytest.raises(InvalidInput, match="mechanism must be one of"):
        fit("magic", SinglePass(8))
    with pytest.raises(InvalidInput, match="variant must be one of"):
        fit("tree", SinglePass(8), variant="oak")
    for name in ("bands", "buffers", "restart_every"):
        with pytest.raises(InvalidInput, match=f"{name} must be a whole number"):
            fit("banded", SinglePass(8), **{name: 0})
    with pytest.raises(InvalidInput, match="taps must be"):
        fit("blt_tapped", Epochs(2, 4), taps=-1)
    with pytest.raises(InvalidInput, match="max_buffers must be"):
        candidates(SinglePass(8), max_buffers=-1)


@pytest.mark.parametrize("limit", [0, 1, pytest.param(None, marks=pytest.mark.slow)])
def test_candidates_keep_to_the_limit_and_come_sorted(limit):
    found = candidates(Epochs(3, 10), max_buffers=limit)
    values = [one.objective for one in found]
    assert values == sorted(values)
    names = {one.strategy.name for one in found}
    assert {"identity", "banded_inverse", "dense"} <= names
    assert ("blt" in names) == (limit != 0)
    if limit is not None:
        assert all(one.strategy.buffers(30) <= limit for one in found)


def test_best_is_independent_noise_where_nothing_else_is_proved():
    assert best(AnyOrderEpochs(3, 5)).strategy.name == "identity"


def test_best_is_the_first_candidate():
    participation = Epochs(3, 10)
    found = best(participation, max_buffers=0)
    assert found.strategy.name == "dense"  # small enough to draw everything again
    assert found.objective == candidates(participation, max_buffers=0)[0].objective


def test_long_runs_leave_out_what_redraws_everything():
    names = {found.strategy.name for found in candidates(SinglePass(3000), max_buffers=2)}
    assert "dense" not in names
    assert "sqrt_toeplitz" not in names
    assert "blt_two_sided" in names


def test_tiny_runs():
    for participation in (SinglePass(1), SinglePass(2), Epochs(2, 1), MinSeparation(3, 2, 2)):
        for mechanism in ("identity", "tree", "sqrt", "bsr", "bisr", "banded", "dense"):
            assert np.isfinite(fit(mechanism, participation).objective)
