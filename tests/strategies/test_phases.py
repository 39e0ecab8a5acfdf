"""Phases against brute force: all patterns, all emitted rows, one covariance."""

import itertools
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest

from noshuffle import strategies as st
from noshuffle.auditing.emitted import emitted_rows
from noshuffle.auditing.worst import worst
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    MinSeparation,
    Participation,
    SinglePass,
    Stages,
)
from noshuffle.plan import Plan
from noshuffle.strategies.phases import Phases, StrategyPhase
from noshuffle.strategies.sensitivity import prefix_sensitivity

SLOW, FAST = st.blt((0.9, 0.4), (0.2, 0.1)), st.blt((0.7,), (0.3,))
TAPPED = st.blt((0.9,), (0.2,), taps=(0.4,), lag=3)
CUT = (StrategyPhase(SLOW, 12, 7), StrategyPhase(FAST, 5, 5, 0.7))
CASES = [
    (CUT, SinglePass(12)),
    (CUT, Epochs(3, 4)),  # the phase begins inside an epoch
    (CUT, Epochs(6, 2)),
    (CUT, MinSeparation(12, 3, 3)),
    (CUT, MinSeparation(12, 4, 2)),
    ((StrategyPhase(SLOW, 6, 6), StrategyPhase(FAST, 6, 6, 1.5)), Epochs(4, 3)),
    ((StrategyPhase(TAPPED, 9, 6), StrategyPhase(st.identity(), 6, 6, 0.5)), Epochs(4, 3)),
    ((StrategyPhase(st.tree(), 7, 5), StrategyPhase(st.tree("plain"), 7, 7, 0.8)), Epochs(4, 3)),
    (
        (StrategyPhase(SLOW, 8, 8), StrategyPhase(FAST, 4, 4, 0.7)),
        Stages((Epochs(2, 4), Epochs(2, 2))),
    ),
]


def allows(part: Participation, pattern: tuple[int, ...]) -> bool:
    """Written down once more: which steps one unit may take part in."""
    gaps = [j - i for i, j in itertools.pairwise(pattern)]
    if isinstance(part, SinglePass):
        return len(pattern) == 1
    if isinstance(part, MinSeparation):
        return len(pattern) <= part.max_participations and min(gaps, default=99) >= part.separation
    first = 0
    for stage in part.stages if isinstance(part, Stages) else (part,):
        own = [i for i in pattern if first <= i < first + stage.steps]
        if len({i % stage.steps_per_epoch for i in own}) > 1:
            return False
        first += stage.steps
    return True


@lru_cache
def by_brute_force(strategy: Phases, part: Participation, n: int) -> float:
    """max uᵀΣ⁻¹u over all patterns and signs, Σ of the rows that the stream emits."""
    rows = emitted_rows(strategy.recipe(strategy.steps), steps=n, horizon=strategy.steps)
    X, best = np.linalg.inv(rows @ rows.T), 0.0
    for mask in range(1, 2**n):
        pattern = tuple(i for i in range(n) if mask >> i & 1)
        if allows(part, pattern):
            block = X[np.ix_(pattern, pattern)]
            signs = itertools.product((1.0, -1.0), repeat=len(pattern) - 1)
            most = np.abs(block).sum()
            if most > best:
                best = max(
                    best, *(float(u @ block @ u) for u in (np.array((1.0, *s)) for s in signs))
                )
    return best


@pytest.mark.parametrize(("parts", "part"), CASES, ids=str)
def test_sensitivity_is_that_of_all_emitted_rows(parts, part):
    strategy = Phases(parts=parts)
    for n in (8, 12):
        found, truth = prefix_sensitivity(strategy, part, n), by_brute_force(strategy, part, n)
        assert found.squared >= truth * (1 - 1e-6)
        if found.exact:
            assert found.squared == pytest.approx(truth, rel=1e-5)
    assert found.exact == (parts[0].strategy != TAPPED)


def test_the_maximum_over_phases_would_be_too_small():
    """What a wrong accounting says: each phase alone. The worst unit lies in both."""
    for parts, part in (CASES[1], CASES[3], CASES[5]):
        strategy = Phases(parts=parts)
        most = max(
            by_brute_force(Phases(parts=(p,)), _alone(part, p), p.used) for p in strategy.parts
        )
        assert most < 0.9 * by_brute_force(strategy, part, 12)


def _alone(part: Participation, phase: StrategyPhase) -> Participation:
    if isinstance(part, MinSeparation):
        return MinSeparation(phase.used, part.separation, part.max_participations)
    gap = part.stages[-1].steps_per_epoch if isinstance(part, Stages) else part.steps_per_epoch
    return Epochs(-(-phase.used // gap), gap)


@pytest.mark.parametrize(("parts", "part"), CASES, ids=str)
def test_the_audit_finds_the_same_worst_unit(parts, part):
    strategy = Phases(parts=parts)
    rows = emitted_rows(strategy.recipe(12), steps=12)
    found = worst(np.linalg.inv(rows @ rows.T), part)
    truth = by_brute_force(strategy, part, 12)
    assert found.low <= truth * (1 + 1e-9)
    assert found.high >= truth * (1 - 1e-9)


def test_what_goes_on_is_the_phase_of_the_last_kept_step():
    """Not the last of the plan: a tree was planned for its steps, whatever came behind it."""
    plan = Plan(participation=SinglePass(4), strategy=st.tree(), noise_multiplier=1.0)
    plan = plan.extended(steps=3, mechanism=st.identity())
    assert plan.extended(steps=1, mechanism="continue").strategy.parts[-1].used == 4
    with pytest.raises(Unsupported, match="does not go on"):
        plan.extended(steps=3, after=3, mechanism="continue")


def test_secret_positions_go_on_in_epochs_after_their_last_step():
    plan = Plan(participation=BallsInBins(2, 4), strategy=st.identity(), noise_multiplier=1.0)
    with pytest.raises(InvalidInput, match="by epochs="):
        plan.extended(steps=4)
    with pytest.raises(Unsupported, match="after the last of them, not after 4"):
        plan.extended(epochs=1, after=4)
    plan = Plan.fit(CyclicPoisson(8, 2, 0.5), mechanism="best", noise_multiplier=1.0)
    with pytest.raises(Unsupported, match="by name"):
        plan.extended(steps=4, mechanism="continue")


def test_noise_across_a_stage_is_refused():
    with pytest.raises(Unsupported, match="begin a phase"):
        prefix_sensitivity(SLOW, Stages((Epochs(2, 4), Epochs(2, 2))), 12)
    alone = prefix_sensitivity(st.identity(), Stages((Epochs(2, 4), Epochs(2, 2))), 12)
    assert alone.squared == 4  # independent noise: once an epoch


def test_phases_of_different_kinds_of_buffers_are_refused():
    mixed = Phases(parts=(StrategyPhase(SLOW, 4, 4), StrategyPhase(st.tree(), 4, 4)))
    with pytest.raises(Unsupported, match="one kind for all phases"):
        emitted_rows(mixed.recipe(8), steps=8)


def test_gains_on_independent_noise_keep_their_order():
    """With gains the steps of one class cost less than one of every epoch, chosen freely."""
    gains = (1.0, 2.0, 2.0, 1.0)
    plan = Plan(participation=Epochs(2, 2), strategy=st.identity(gains=gains), noise_multiplier=1.0)
    assert plan.guarded == Epochs(2, 2)
    assert plan.sensitivity.squared == 5.0  # of a free order: 8


def test_the_error_of_phases_adds_up():
    found = Phases(parts=CUT)
    A = np.tril(np.ones((12, 12)))
    rows = A @ found.noising(12)
    np.testing.assert_allclose(st.error(found, 12).per_step, np.sqrt((rows**2).sum(1)))


@pytest.mark.parametrize(("b", "k"), [(1000, 1), (3, 4), (50, 7)])
def test_an_endless_blt_is_the_limit_of_long_ones(b, k):
    """ε of a run without an end: S from above for every length, and reached in the limit."""
    part = MinSeparation.open(separation=b, max_participations=k)
    found = prefix_sensitivity(SLOW, part, part.steps)
    C = SLOW.encoder(1200)
    for n in (1, 30, 400, 1200):  # by columns of the matrix, b apart
        summed = C[:n, :n][:, : k * b : b].sum(axis=1)
        assert float(summed @ summed) <= found.squared
    assert found.exact
    assert found.squared == pytest.approx(float(summed @ summed), rel=1e-9)


def test_an_endless_blt_of_slow_decay_keeps_its_digits():
    theta, omega = 1 - 1e-9, 1e-5
    found = prefix_sensitivity(st.blt((theta,), (omega,)), SinglePass.open(), 10**8)
    truth = 1 + Fraction(omega) ** 2 / (1 - Fraction(theta) ** 2)
    assert truth <= Fraction(found.squared) <= truth * Fraction(1 + 3e-12)


def test_a_run_of_unknown_length():
    plan = Plan.fit(SinglePass.open(), epsilon=2.0, buffers=2, reach=1000)
    spent = [plan.epsilon_after(t) for t in (1, 10, 1000, 10**6)]
    assert spent == sorted(spent)
    assert spent[-1] <= plan.epsilon() <= 2.0
    assert plan.epsilon() == pytest.approx(2.0, rel=1e-9)
    assert "however many" in plan.statement(steps=5).participation
    assert "no planned end" in " ".join(plan.statement(steps=5).assumptions)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(Unsupported):  # coefficients that rise
        prefix_sensitivity(st.blt((0.5,), (1.2,)), SinglePass.open(), 10**8)
    with pytest.raises(InvalidInput, match="unknown length"):
        Plan.fit(SinglePass.open(), mechanism="dense", epsilon=2.0)


@pytest.mark.parametrize("old", [st.blt((0.9,), (0.2,)), st.tree()])
def test_few_steps_of_a_long_plan_before_a_tree(old):
    """The bound that is no search stands where the plan of a phase is too long for a matrix."""
    plan = Plan(participation=MinSeparation(20_000, 10, 3), strategy=old, noise_multiplier=4.0)
    more = plan.extended(steps=20, after=20, max_participations=2, mechanism=st.tree())
    N = Phases(parts=(StrategyPhase(old, 1000, 20), StrategyPhase(st.tree(), 20, 20))).noising(40)
    X = np.linalg.inv(N @ N.T)
    far = ([i, i + 10, j, j + 10] for i in range(10) for j in range(i + 20, 30))
    worst = max(float(np.abs(X[np.ix_(p, p)]).sum()) for p in far)
    assert worst <= more.sensitivity.squared <= 1.3 * worst
