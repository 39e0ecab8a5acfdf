"""ε of every stopping point from emitted rows, over all mechanisms and participations."""

from __future__ import annotations

import json
import math
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

import noshuffle.auditing
import noshuffle.strategies as st
from noshuffle.auditing.answers import HOLDS, REFUTED, UNDECIDED
from noshuffle.auditing.curve import delta_of, epsilon_of
from noshuffle.auditing.prefixes import audit_plan, whitening
from noshuffle.auditing.worst import worst
from noshuffle.cli import main
from noshuffle.errors import Unsupported
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
)
from noshuffle.plan import Plan
from noshuffle.strategies.blt import blt
from noshuffle.strategies.registry import _BUILT_IN

N = 12
RISING = tuple(np.linspace(0.6, 1.7, N).tolist())
LOWER = np.tril(np.random.default_rng(7).normal(size=(N, N)), -1) * 0.3 + np.eye(N)
STRATEGIES: dict[str, st.Strategy] = {
    "identity": st.identity(),
    "sums": st.release_sums(),
    "sqrt": st.sqrt_toeplitz(),
    "sqrt-momentum": st.sqrt_toeplitz(momentum=0.9, decay=0.99),
    "bsr": st.sqrt_toeplitz(3),
    "bisr": st.banded_inverse(4, gains=RISING[::-1]),
    "inverse-signed": st.banded_inverse(coefficients=[1.2, 0.5, -0.4, 0.3]),
    "banded-signed": st.banded([1.5, -0.6, 0.3, 0.4], gains=RISING),
    "blt-normalized": st.blt((0.95, 0.5), (0.2, 0.3), normalized=N),
    "blt-taps-gains": st.blt((0.9,), (0.4,), taps=(0.3,), lag=4, gains=RISING),
    "blt-two-sided": blt((0.95, 0.5), (0.2, 0.3), gains=RISING, draw_gains=RISING[::-1]),
    "dense": st.dense(LOWER),
    **{
        f"tree-{variant}-{every}-{completion}": st.tree(
            variant, restart_every=every or None, completion=completion
        )
        for variant, (every, completion) in product(
            ("plain", "honaker", "full"), ((0, False), (4, False), (5, True))
        )
    },
}


def participations(strategy: st.Strategy) -> tuple[Participation, ...]:
    """One of each kind; an order may change where a tree restarts."""
    every = getattr(strategy, "restart_every", None) or N
    return (
        SinglePass(N),
        Epochs(3, 4),
        MinSeparation(N, 3, 3),
        Restarted(Epochs(3, 4), every),
        Restarted(MinSeparation(N, 3, 3), every),
    )


def test_no_formula_is_shared_with_what_is_checked() -> None:
    folder = Path(noshuffle.auditing.__file__).parent
    named = {
        line.split()[1]
        for path in folder.glob("*.py")
        for line in path.read_text().splitlines()
        if line.lstrip().startswith(("from noshuffle", "import noshuffle"))
    }
    assert named
    assert not [name for name in named if name.startswith("noshuffle.accounting")]
    assert not [name for name in named if name.startswith("noshuffle.strategies")]


def test_every_built_in_strategy_is_here() -> None:
    assert {type(own) for own in STRATEGIES.values()} == set(_BUILT_IN)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_stopping_point_of_any_mechanism_is_refuted(name: str) -> None:
    audited = 0
    for participation in participations(STRATEGIES[name]):
        try:
            plan = Plan.fit(participation, mechanism=STRATEGIES[name], noise_multiplier=2.0)
        except Unsupported:  # nothing is stated, so nothing can be false
            continue
        found = audit_plan(plan)
        assert found.answer == HOLDS, found.words()
        assert len(found.stops) == N
        if plan.statement().exact:
            assert found.stops[-1].low == pytest.approx(found.stops[-1].stated, rel=1e-4)
        false = {stop.steps: 0.99 * stop.low for stop in found.stops}
        assert audit_plan(plan, stated=false).answer == REFUTED
        audited += 1
    assert audited >= (5 if name.startswith(("identity", "tree")) else 3)


def test_a_stopped_tree_accounted_as_a_fresh_one_is_refuted() -> None:
    """The false ε of version 7dd6451: a tree of t steps in place of the first t rows in use."""
    part = Epochs(4, 5)
    completed = st.tree("honaker", restart_every=10, completion=True)
    plan = Plan.fit(part, mechanism=completed, epsilon=8.0)
    scale = plan.noise_multiplier

    def fresh(steps: int) -> float:
        short = Epochs(math.ceil(steps / 5), 5)
        own = Plan.fit(short, mechanism=completed, noise_multiplier=scale, tree_accounting="nodes")
        return own.epsilon_after(steps)

    found = audit_plan(plan, stated={t: fresh(t) for t in range(1, 21)})
    assert found.answer == REFUTED
    assert "stopped after" in found.words()


def test_the_epsilon_of_poisson_draws_is_refuted_for_a_fixed_order() -> None:
    order = Plan.fit(Epochs(3, 8), mechanism="identity", noise_multiplier=1.0)
    poisson = Plan.fit(Poisson(24, 1 / 8), mechanism="identity", noise_multiplier=1.0)
    assert audit_plan(order, stated={24: poisson.epsilon()}).answer == REFUTED


def test_secret_draws_are_not_decided() -> None:
    plan = Plan.fit(Poisson(24, 1 / 8), mechanism="identity", noise_multiplier=1.0)
    found = audit_plan(plan)
    assert found.answer == UNDECIDED
    assert not found.stops
    assert "not checked: the ε of batches that are drawn in secret" in found.words()


def is_allowed(part: Participation, pattern: tuple[int, ...]) -> bool:
    """Whether a unit may take part in these steps, pair by pair."""
    every = part.every if isinstance(part, Restarted) else part.steps
    pairs = [(a, b) for a, b in combinations(pattern, 2) if a // every == b // every]
    match part.base:
        case Epochs(_, gap):
            return all(a % every % gap == b % every % gap for a, b in pairs)
        case AnyOrderEpochs(_, gap):
            return all(a // gap != b // gap for a, b in pairs)
        case MinSeparation(_, gap, most):
            return len(pattern) <= most and all(b - a >= gap for a, b in pairs)
    return len(pattern) == 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "part",
    [
        SinglePass(7),
        Epochs(3, 3),
        AnyOrderEpochs(3, 3),
        MinSeparation(9, 2, 3),
        Restarted(Epochs(3, 3), 5),
        Restarted(MinSeparation(9, 2, 4), 4),
    ],
    ids=lambda part: part.words(),
)
def test_the_worst_unit_of_all_patterns_and_signs_is_enclosed(
    part: Participation, seed: int
) -> None:
    A = np.random.default_rng(seed).standard_normal((7, 7))  # a run that was stopped after 7 steps
    patterns = [p for r in range(1, 8) for p in combinations(range(7), r) if is_allowed(part, p)]
    signs = {k: np.array(list(product((1, -1), repeat=k))) for k in range(1, 8)}
    every = getattr(part, "every", 3 if isinstance(part, AnyOrderEpochs) else 7)
    apart = np.arange(7)[:, None] // every == np.arange(7)[None] // every
    for X in (A @ A.T, np.abs(A @ A.T), np.abs(A @ A.T) * apart):
        own = [X[np.ix_(p, p)] for p in patterns]
        most = max(float(np.abs(block).sum()) for block in own)
        reached = max(float(((s := signs[len(b)]) @ b * s).sum(1).max()) for b in own)
        found = worst(X, part)
        assert found.low <= reached * (1 + 1e-12)
        assert reached <= found.high * (1 + 1e-12)
        assert is_allowed(part, found.pattern)
    # Where no entry is negative and blocks share nothing, both ends are the worst pattern's.
    assert found.low == pytest.approx(most) == pytest.approx(found.high)


def test_signs_are_found_where_they_can_be_set_apart() -> None:
    sign = np.array([1, -1, -1, 1, 1, -1])
    X = np.outer(sign, sign) * (1.0 + np.eye(6))
    found = worst(X, MinSeparation(6, 2, 3))
    assert found.low == found.high == 12.0
    assert worst(X[:3, :3], Epochs(3, 1)).low == 12.0


def test_the_curve_is_that_of_the_accountant() -> None:
    from noshuffle.accounting import gaussian

    for mu in (1e-3, 0.1, 1.0, 5.0, 20.0):
        assert epsilon_of(mu, delta=1e-6) == pytest.approx(
            gaussian.epsilon(mu=mu, delta=1e-6), rel=1e-6, abs=1e-9
        )
        assert delta_of(mu, epsilon=1.0) <= 1.0
    assert epsilon_of(math.inf, delta=1e-5) == epsilon_of(math.nan, delta=1e-5) == math.inf
    assert epsilon_of(0.0, delta=1e-5) == 0.0


def test_a_row_without_noise_of_its_own_is_no_protection() -> None:
    rows = np.array([[1.0, 0.0], [0.5, 1.0], [1.5, 1.0]])  # the third is the sum of the others
    factor = whitening(rows @ rows.T)
    assert np.isfinite(factor[:2, :2]).all()
    assert np.isinf(factor[2]).all()
    plan = Plan.fit(SinglePass(3), mechanism="sqrt", noise_multiplier=0.0)
    assert audit_plan(plan).answer == HOLDS  # an infinite ε is stated
    assert audit_plan(plan, stated=dict.fromkeys(range(1, 4), 5.0)).answer == REFUTED


def test_a_long_run_is_audited_from_its_beginning() -> None:
    plan = Plan.fit(SinglePass(500), mechanism="tree", epsilon=1.0)
    found = audit_plan(plan, most_steps=20)
    assert found.answer == UNDECIDED
    assert len(found.stops) == 20
    assert "step 20 of 500" in found.left_out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.fit(Epochs(2, 4), mechanism="tree", epsilon=2.0)
    path, page = tmp_path / "plan.json", tmp_path / "audit.html"
    path.write_text(plan.to_json())
    assert main(["audit", str(path), "--json", "--page", str(page)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["answer"] == HOLDS
    assert len(record["parts"][0]["stops"]) == 8
    assert page.read_text().count("<svg") == 2
    assert main(["audit", str(path), "--most-steps", "3"]) == 3
    assert "NOT DECIDED" in capsys.readouterr().out
    plan = Plan.fit(Poisson(8, 0.1), mechanism="identity", epsilon=2.0)
    (tmp_path / "drawn.json").write_text(plan.to_json())
    assert main(["audit", str(tmp_path / "drawn.json"), "--page", str(page)]) == 3
    assert "drawn in secret" in page.read_text()
    assert main(["audit", str(tmp_path / "none.json")]) == 2
    assert main(["audit", str(path), "--save"]) == 2
    assert "--save needs a run folder" in capsys.readouterr().err
