"""Long runs: two-sided gains in stages, errors in O(n), and `best` at every size."""

from __future__ import annotations

import numpy as np
import pytest
from tests.strategies.lower_bound import rms_lower_bound

from noshuffle.participation import Epochs, SinglePass
from noshuffle.strategies.base import column_normalized
from noshuffle.strategies.blt import blt
from noshuffle.strategies.blt_poles import poles, spaced, stretched
from noshuffle.strategies.error import _by_rows, error
from noshuffle.strategies.fit import _attempts, best, fit
from noshuffle.strategies.fit_blt import fit_blt
from noshuffle.strategies.fit_staged import fit_staged
from noshuffle.strategies.sensitivity import sensitivity
from noshuffle.strategies.workload import Workload, cooldown, prefix


def test_stages_end_below_the_fit_without_draw_gains_and_above_the_bound() -> None:
    part = Epochs(4, 30)
    found = fit_staged(part, buffers=2, taps=3)
    exact = error(found.strategy, 120).rms * sensitivity(found.strategy, part).value
    assert found.objective == pytest.approx(exact, rel=1e-9)
    assert found.objective < fit_blt(part, buffers=2).objective
    least = rms_lower_bound(part)
    assert least < found.objective < 1.04 * least


def test_slow_poles_move_with_the_length() -> None:
    u = spaced(2, 0.01, 0.6)
    before, after = (np.stack(poles(each), axis=-1).ravel() for each in (u, stretched(u, 5.0)))
    assert after[0] == pytest.approx(before[0] / 5)
    assert np.all(np.diff(after) > 0)
    assert after[-1] > 0.8 * before[-1]


@pytest.mark.parametrize("rates", [prefix(), Workload(0.0, cooldown(50))], ids=["flat", "cooldown"])
def test_the_error_of_buffers_is_that_of_the_rows(rates: Workload) -> None:
    n = 50
    gains, draws = np.linspace(1, 2, n), np.linspace(3, 1, n)
    both = blt((0.95, 0.5), (0.2, 0.3), gains=gains, draw_gains=draws)
    rows = _by_rows(both.noising_rows(n), n, rates, n)
    assert np.allclose(error(both, n, workload=rates).per_step ** 2, rows, rtol=1e-12)
    scaled = column_normalized(blt((0.99, 0.5), (0.1, 0.3)), n)
    rows = _by_rows(scaled.noising_rows(n), n, rates, n)
    assert np.allclose(error(scaled, n, workload=rates).per_step ** 2, rows, rtol=1e-12)


def test_long_runs_have_unit_columns() -> None:
    part = SinglePass(60_000)
    found = best(part)
    assert found.strategy.normalized == 60_000
    assert found.objective < 0.99 * fit_blt(part, buffers=4).objective
    assert found.objective > 4.2  # no mechanism is below


@pytest.mark.slow
def test_taps_of_long_runs_are_those_of_a_shorter_run() -> None:
    part = Epochs(4, 20_000)
    taps = fit("blt_tapped", part, buffers=2)
    assert taps.strategy.lag == 20_000
    exact = error(taps.strategy, 80_000).rms * sensitivity(taps.strategy, part).value
    assert taps.objective == pytest.approx(exact, rel=1e-6)
    assert taps.objective < fit("blt", part, buffers=2).objective


def test_best_of_a_long_run_tries_gains_on_both_sides_and_no_part_of_them() -> None:
    def names(part: Epochs | SinglePass) -> int:
        return len(list(_attempts(part, max_buffers=None, workload=prefix())))

    assert names(Epochs(20, 240)) == 6
    assert names(SinglePass(10**6)) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("part", "most"), [(Epochs(20, 240), 19.6), (SinglePass(10_000), 3.70)])
def test_best_at_the_sizes_of_the_table(part: Epochs | SinglePass, most: float) -> None:
    assert best(part).objective < most
