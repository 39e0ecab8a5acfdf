"""The published settings of a keyboard model (Spanish, 2022), recomputed, and BLT beside them."""

from __future__ import annotations

import pytest

from noshuffle import MinSeparation, Plan
from noshuffle.federated import account_afterwards
from noshuffle.strategies import tree
from noshuffle.strategies.error import error

# 313 rounds strictly between two participations: an index difference of 314.
LIMITS = MinSeparation(steps=2000, separation=314, max_participations=6)


def the_tree(accountant: str = "exact") -> Plan:
    return Plan.fit(
        LIMITS,
        mechanism=tree("honaker"),
        noise_multiplier=7.0,
        delta=1e-10,
        unit="user",
        accountant=accountant,
        tree_accounting="nodes",
    )


def test_the_published_tree() -> None:
    statement = the_tree().statement()
    assert statement.squared_sensitivity == pytest.approx(79.0, abs=1e-9)
    assert statement.rho == pytest.approx(79 / 98, abs=1e-12)
    assert round(statement.rho or 0, 2) == 0.81
    assert round(statement.epsilon, 2) == 8.53  # exact; the publication says 8.90, by Rényi
    assert round(the_tree("rdp").epsilon(), 1) == 8.9


def test_blt_has_less_error_at_the_same_epsilon() -> None:
    old = the_tree()
    new = Plan.fit(LIMITS, mechanism="blt", epsilon=old.epsilon(), delta=1e-10, unit="user")
    assert new.epsilon() <= old.epsilon()
    # Error of the prefix sums per unit of the clip norm, at equal ε, and model-sized buffers.
    errors = [error(p.strategy, 2000).rms * p.noise_multiplier for p in (old, new)]
    assert errors[1] < 0.8 * errors[0]
    assert new.strategy.buffers(2000) <= old.strategy.buffers(2000)


def test_limits_counted_from_a_log_of_rounds() -> None:
    log: list[list[int]] = [[] for _ in range(2000)]
    for t in range(0, 6 * 314, 314):
        log[t].append(1)
    statement = account_afterwards(the_tree(), log)
    assert statement.squared_sensitivity == pytest.approx(79.0, abs=1e-9)
    assert statement.epsilon == pytest.approx(the_tree().epsilon(), rel=1e-12)
