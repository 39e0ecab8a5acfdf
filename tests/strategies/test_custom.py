"""Mechanisms of one's own: registered by name, refused when recipe and encoder disagree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from tests.strategies.slow_recipes import materialize

import noshuffle.strategies as st
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import Epochs, Poisson, SinglePass
from noshuffle.plan import Plan, compare
from noshuffle.strategies import mechanisms, registry
from noshuffle.strategies.base import Strategy, ToeplitzStrategy, reciprocal
from noshuffle.strategies.custom import check_custom
from noshuffle.strategies.fit import best, fit
from noshuffle.strategies.identity import Identity
from noshuffle.strategies.recipe import FeedForward, Rows, rows, stream


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """What a test registers is forgotten afterwards."""
    tables = (mechanisms.MECHANISMS, registry._CLASSES)
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before):
        table.clear()
        table.update(content)


@dataclass(frozen=True)
class Halving(ToeplitzStrategy):
    """c_i = 2^{−i}, so the noise of a step is z_t − z_{t−1}/2; `factor` spoils the recipe."""

    factor: float = 1.0
    late: int = 0
    name: ClassVar[str] = "halving"

    def coefficients(self, n):
        return 0.5 ** np.arange(n)

    def noising_coefficients(self, n):
        return reciprocal(self.coefficients(n), n)

    def recipe(self, n):
        scale = np.full(n, self.factor)
        if self.late:  # right at first, too little noise from step `late` on
            scale[: self.late] = 1.0
        return FeedForward((1.0, -0.5), scale=tuple(scale.tolist()))

    def buffers(self, n):
        return 0

    def words(self):
        return "halving"


@dataclass(frozen=True)
class Wide(Strategy):
    """Two draws per step: a square lower-triangular encoder does not exist by itself."""

    shrink: float = 1.0
    name: ClassVar[str] = "wide"

    def noising(self, n):
        return np.hstack([np.eye(n), 0.5 * np.tril(np.ones((n, n)))])

    def encoder(self, n):
        N = self.noising(n)
        return np.linalg.pinv(N)

    def recipe(self, n):
        return Rows(self.shrink * np.linalg.cholesky(self.noising(n) @ self.noising(n).T))

    def buffers(self, n):
        return 0

    def words(self):
        return "wide"


@dataclass(frozen=True)
class Square(Strategy):
    """The law of Wide with as many draws as steps."""

    shrink: float = 1.0
    name: ClassVar[str] = "square"

    def noising(self, n):
        N = Wide().noising(n)
        return np.linalg.cholesky(N @ N.T)

    def encoder(self, n):
        return np.linalg.inv(self.noising(n))

    def recipe(self, n):
        return Rows(self.shrink * self.noising(n))

    def buffers(self, n):
        return 0

    def words(self):
        return "square"


@dataclass(frozen=True)
class Repeated(Square):
    """Step 3 has no draw of its own: it repeats the noise of step 2."""

    name: ClassVar[str] = "repeated"

    def noising(self, n):
        N = np.eye(n)
        N[3:4] = N[2:3]
        return N

    def encoder(self, n):
        return np.linalg.pinv(self.noising(n))


@dataclass(frozen=True)
class SilentIdentity(Identity):
    """Derived from a built-in strategy, with a tenth of its noise."""

    name: ClassVar[str] = "silent"

    def recipe(self, n):
        return FeedForward((0.1,))


def test_an_honest_mechanism_is_accounted_like_its_matrix():
    rule = Epochs(3, 4)
    plan = Plan.fit(rule, mechanism=Halving(), epsilon=2.0)
    twin = st.sensitivity(st.dense(Halving().encoder(12)), rule)
    assert plan.sensitivity.squared == pytest.approx(twin.squared, rel=1e-12)
    own = Plan(participation=rule, strategy=Square(), noise_multiplier=2.0)
    twin = st.sensitivity(st.dense(Square().encoder(12)), rule)
    assert own.sensitivity.squared == pytest.approx(twin.squared, rel=1e-9)
    part = st.prefix_sensitivity(st.dense(Square().encoder(12)), rule, 5)
    assert own.sensitivity_after(5).squared == pytest.approx(part.squared, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        (Halving(factor=0.1), 16),
        (Halving(factor=0.1), 5000),
        (Halving(factor=0.1, late=4990), 5000),
        (Square(shrink=0.1), 16),
        (Square(shrink=0.1), 400),
        (SilentIdentity(), 16),
        (Wide(), 16),  # its recipe has other draws than its noising matrix
    ],
    ids=str,
)
def test_a_recipe_that_contradicts_the_encoder_is_refused(strategy, steps):
    with pytest.raises(InvalidInput, match="contradicts itself") as caught:
        Plan(participation=SinglePass(steps), strategy=strategy, noise_multiplier=1.0)
    assert "\n" not in str(caught.value)


def test_every_step_needs_a_draw_of_its_own():
    for strategy in (Repeated(), Wide()):
        with pytest.raises(InvalidInput, match="every step has a draw of its own"):
            Plan(participation=SinglePass(16), strategy=strategy, noise_multiplier=1.0)


def test_long_runs_are_checked_to_the_end():
    check_custom(Halving(), 200_000)
    with pytest.raises(InvalidInput, match="step 199999"):
        check_custom(Halving(factor=0.5, late=199_999), 200_000)
    with pytest.raises(Unsupported, match="at most 2048 steps"):
        st.sensitivity(Square(), SinglePass(3000))


def test_a_registered_mechanism_is_read_back_fitted_and_compared():
    plan = Plan.fit(SinglePass(8), mechanism=Halving(factor=1.0), epsilon=1.0)
    with pytest.raises(Unsupported, match=r"halving.*import the module that registers it"):
        Plan.from_json(plan.to_json())
    assert st.register(Halving) is Halving
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.fit(SinglePass(8), mechanism="halving", epsilon=1.0) == plan
    assert fit("halving", SinglePass(8)).strategy == Halving()
    assert [row.name for row in compare(SinglePass(8), mechanism="halving", epsilon=1.0)] == [
        "halving"
    ]
    assert "halving" in {row.name for row in compare(SinglePass(4), epsilon=1.0)}
    with pytest.raises(Unsupported, match="independent noise only"):
        Plan.fit(Poisson(8, 0.1), mechanism="halving", epsilon=1.0)
    st.register(Halving)  # again, as after a reload
    assert best(SinglePass(8)).strategy != Halving()  # compared by name, chosen by nobody


def test_a_registered_mechanism_is_checked_when_it_is_read():
    st.register(Halving)
    good = json.loads(Plan.fit(SinglePass(8), mechanism="halving", epsilon=1.0).to_json())
    good["strategy"]["factor"] = 0.1
    with pytest.raises(InvalidInput, match="contradicts itself"):
        Plan.from_json(json.dumps(good))


def test_registration_may_bring_a_fit():
    st.register(Square, fit=lambda request: Square(shrink=1.0), words="as a test")
    assert mechanisms.MECHANISMS["square"].words == "as a test"
    assert Plan.fit(Epochs(2, 4), mechanism="square", epsilon=1.0).strategy == Square()


@pytest.mark.parametrize("cls", [object, 3, type("Nameless", (Strategy,), {}), st.Strategy])
def test_what_is_no_strategy_is_not_registered(cls):
    with pytest.raises(InvalidInput) as caught:
        st.register(cls)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_taken_is_refused():
    taken = dataclass(frozen=True)(type("Taken", (Halving,), {"name": "tree"}))
    with pytest.raises(InvalidInput, match="not taken"):
        st.register(taken)
    assert registry.from_dict({"name": "tree"}) == st.tree()
    shadow = dataclass(frozen=True)(type("Shadow", (Halving,), {"name": "bsr"}))
    with pytest.raises(InvalidInput, match="not taken"):
        st.register(shadow)
    assert "bsr" not in registry._CLASSES


@pytest.mark.parametrize(
    "strategy",
    [
        st.identity(),
        st.sqrt_toeplitz(3, normalized=9),
        st.banded([1.5, -0.6, 0.3]),
        st.banded_inverse(4),
        st.blt((0.95, 0.5), (0.2, 0.3), taps=(0.3, 0.2), lag=3),
        st.blt((0.9,), (0.4,), gains=(0.5,) * 9, draw_gains=tuple(range(1, 10))),
        st.dense(np.tril(np.ones((9, 9)))),
        st.tree(restart_every=5, completion=True),
        st.tree("plain"),
    ],
    ids=lambda s: s.name,
)
def test_streams_equal_the_unit_draws(strategy):
    recipe = strategy.recipe(9)
    draws = np.random.default_rng(0).normal(size=(rows(recipe, 9), 3))
    expected = materialize(recipe, 9) @ draws
    np.testing.assert_allclose(stream(recipe, draws, steps=9), expected, rtol=1e-10, atol=1e-12)


def test_the_registry_names_its_options():
    for entry in mechanisms.MECHANISMS.values():
        assert entry.words
        assert set(entry.options) <= set(mechanisms.OPTIONS)
    with pytest.raises(InvalidInput, match="options are"):
        fit("tree", SinglePass(8), colour="red")
    for bad in ({"taps": -1}, {"completion": "yes"}, {"variant": "oak"}, {"bands": 0}):
        with pytest.raises(InvalidInput):
            fit("tree", SinglePass(8), **bad)
