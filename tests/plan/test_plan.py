from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.accounting import composition, gaussian
from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported
from noshuffle.participation import (
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
    TruncatedPoisson,
)
from noshuffle.plan import Plan
from noshuffle.strategies import banded, blt, identity, sqrt_toeplitz, tree
from noshuffle.strategies.tree import Tree

PLANS = [
    Plan(
        participation=SinglePass(1600),
        strategy=tree(),
        noise_multiplier=1.13,
        delta=1e-6,
        tree_accounting="nodes",
    ),
    Plan(participation=Epochs(4, 16), strategy=sqrt_toeplitz(bands=8), noise_multiplier=2.0),
    Plan(
        participation=MinSeparation(100, 20, 4),
        strategy=blt((0.9,), (0.3,)),
        noise_multiplier=3.0,
        unit="user",
    ),
    Plan(participation=Poisson(100, 0.01), strategy=identity(), noise_multiplier=1.0),
    Plan(participation=FixedSize(100, 10, 1000), strategy=identity(), noise_multiplier=2.0),
    Plan(
        participation=Restarted(Epochs(10, 8), 16),
        strategy=tree(restart_every=16, completion=True),
        noise_multiplier=5.0,
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.participation.kind)
def test_canonical_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.hash == plan.hash
    assert again.statement() == plan.statement()
    shuffled = json.dumps(dict(reversed(list(json.loads(plan.to_json()).items()))), indent=3)
    assert Plan.from_json(shuffled).hash == plan.hash


@pytest.mark.parametrize("text", ["[{}]", "{}", "3", '{"format": 1}', "null"])
def test_another_document_is_told_as_one(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"document; write one with Plan\.to_json$"):
        Plan.from_json(text)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.participation.kind)
def test_statement_says_everything(plan: Plan) -> None:
    statement = plan.statement()
    assert statement.epsilon > 0
    assert len(statement.assumptions) >= 6
    assert all(sentence.endswith(".") for sentence in statement.assumptions)
    record = json.loads(json.dumps(statement.to_dict()))
    for key in ("epsilon", "delta", "unit", "neighbours", "participation", "mechanism", "exact"):
        assert key in record
    assert statement.headline() in statement.words()


def test_published_settings() -> None:
    plan = PLANS[0]
    assert plan.epsilon() == pytest.approx(17.666751, abs=1e-5)
    rdp = replace(plan, accountant="rdp")
    assert rdp.epsilon() == pytest.approx(18.709610, abs=1e-5)
    assert not rdp.statement().exact
    cifar = Plan(
        participation=Restarted(Epochs(100, 100), 2000),
        strategy=tree(restart_every=2000, completion=True),
        noise_multiplier=46.3,
        tree_accounting="nodes",
    )
    assert cifar.statement().squared_sensitivity == pytest.approx(4129, rel=1e-12)
    assert cifar.epsilon() == pytest.approx(6.4275284, abs=1e-6)


def test_replace_one_doubles_the_sensitivity() -> None:
    plan = PLANS[0]
    doubled = replace(plan, neighbours="replace-one")
    assert doubled.statement().sensitivity == 2 * plan.statement().sensitivity
    mu = plan.mu()
    assert mu is not None
    assert doubled.epsilon() == pytest.approx(gaussian.epsilon(mu=2 * mu, delta=1e-6))


@settings(max_examples=30, deadline=None)
@given(
    epsilon=st.floats(0.01, 50),
    delta=st.floats(1e-12, 0.1),
    steps=st.integers(1, 300),
)
def test_calibration_ends_on_the_safe_side(epsilon: float, delta: float, steps: int) -> None:
    plan = Plan.fit(SinglePass(steps), mechanism=sqrt_toeplitz(), epsilon=epsilon, delta=delta)
    assert plan.epsilon() <= epsilon
    assert plan.epsilon() == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize("part", [Poisson(200, 0.02), FixedSize(200, 20, 1000)])
def test_sampled_calibration_ends_on_the_safe_side(part: Participation) -> None:
    plan = Plan.fit(part, mechanism="identity", epsilon=2.0, delta=1e-5)
    assert 1.98 < plan.epsilon() <= 2.0


def test_calibration_ends_where_digits_are_lost() -> None:
    """At ε = 1e300 no step of the last digit changes ε: the search did not end."""
    plan = Plan.fit(SinglePass(4), mechanism="identity", epsilon=1e300, delta=1e-5)
    assert plan.noise_multiplier > 0
    assert plan.epsilon() <= 1e300


def test_epsilon_grows_with_the_steps_done() -> None:
    plan = Plan(participation=Epochs(5, 20), strategy=tree(), noise_multiplier=5.0)
    values = [plan.epsilon_after(t) for t in range(101)]
    assert values[0] == 0
    assert values[-1] == plan.epsilon()
    assert all(a <= b for a, b in pairwise(values))


@pytest.mark.parametrize(
    ("participation", "strategy", "z", "steps", "fresh", "true"),
    [
        (Epochs(10, 10), tree(restart_every=10, completion=True), None, 10, 1.887, 1.933),
        (Epochs(4, 5), tree(restart_every=5, completion=True), None, 5, 3.123, 3.360),
        (SinglePass(1600), tree("full"), None, 1, 2.00, 2.652),
        (MinSeparation(14, 4, 3), tree(restart_every=5, completion=True), 3.0, 5, 2.753, 4.1805),
    ],
    ids=["completion 10", "completion 5", "least squares", "separation"],
)
def test_a_stopped_tree_is_charged_for_the_rows_in_use(
    participation: Participation,
    strategy: Tree,
    z: float | None,
    steps: int,
    fresh: float,
    true: float,
) -> None:
    """Noise for ε = 8 by node counts; a shorter tree of its own would cost `fresh`."""
    amount: dict[str, float] = {"epsilon": 8.0} if z is None else {"noise_multiplier": z}
    old = Plan.fit(participation, mechanism=strategy, tree_accounting="nodes", **amount)  # type: ignore[arg-type]
    again = replace(old, tree_accounting="tight")
    assert again.epsilon_after(steps) == pytest.approx(true, abs=6e-4)
    assert again.sensitivity_after(steps).exact
    assert old.epsilon_after(steps) >= again.epsilon_after(steps)
    short = {Epochs: Epochs(1, steps), MinSeparation: MinSeparation(steps, 4, 3)}
    rule = short.get(type(participation), SinglePass(steps))
    assert replace(old, participation=rule).epsilon() == pytest.approx(fresh, abs=6e-3)
    rows = strategy.noising(participation.steps)[:steps]
    X = np.linalg.inv(rows @ rows.T)
    pattern = [0, 4] if isinstance(participation, MinSeparation) else [int(np.argmax(X.diagonal()))]
    mu = math.sqrt(X[np.ix_(pattern, pattern)].sum()) / old.noise_multiplier
    assert again.epsilon_after(steps) == pytest.approx(gaussian.epsilon(mu=mu, delta=1e-5))


def test_a_text_of_a_tree_that_does_not_say_counts_nodes() -> None:
    """The larger value, and the same text and hash again."""
    text = (
        '{"accountant":"exact","delta":1e-06,"format":"noshuffle-plan/1","neighbours":"zero-out",'
        '"noise_multiplier":1.13,"participation":{"kind":"single-pass","steps":1600},'
        '"strategy":{"name":"tree"},"unit":"example"}'
    )
    plan = Plan.from_json(text)
    assert plan.to_json() == text
    assert plan == PLANS[0]
    assert plan.epsilon() == pytest.approx(17.666751, abs=1e-5)
    tight = replace(plan, tree_accounting="tight")
    assert json.loads(tight.to_json())["tree_accounting"] == "tight"
    assert tight == replace(plan, tree_accounting="")
    assert tight.epsilon() < plan.epsilon()
    assert tight.statement().exact
    assert not plan.statement().exact
    other = Plan(
        participation=SinglePass(4),
        strategy=identity(),
        noise_multiplier=1.0,
        tree_accounting="nodes",
    )
    assert other.tree_accounting == "tight"  # no tree, no choice
    assert "tree_accounting" not in json.loads(other.to_json())


def test_parts_for_fewer_patterns() -> None:
    plan = Plan(participation=Epochs(5, 20), strategy=tree(), noise_multiplier=5.0)
    narrow = MinSeparation(100, 20, 1)
    once = plan.sensitivity_after(60, participation=narrow)
    rows = tree().noising(100)[:60]
    assert once.squared == pytest.approx(np.linalg.inv(rows @ rows.T).diagonal().max())
    assert plan.epsilon_after(60, participation=narrow) < plan.epsilon_after(60)
    wide = plan.sensitivity_after(100, participation=MinSeparation(100, 1, 100))
    assert wide.value == plan.sensitivity.value, "what the run is covered by"
    assert not wide.exact
    with pytest.raises(InvalidInput, match="must have 100 steps"):
        plan.sensitivity_after(60, participation=SinglePass(60))


def test_no_noise_is_no_privacy() -> None:
    plan = Plan(participation=SinglePass(3), strategy=identity(), noise_multiplier=0.0)
    statement = plan.statement()
    assert math.isinf(statement.epsilon)
    assert statement.to_dict()["epsilon"] is None
    assert any("no privacy" in sentence for sentence in statement.assumptions)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: Plan.fit(SinglePass(5), mechanism="tree", delta=1e-5), InvalidInput),
        (
            lambda: Plan.fit(SinglePass(5), mechanism="tree", epsilon=1.0, noise_multiplier=1.0),
            InvalidInput,
        ),
        (lambda: Plan.fit(SinglePass(5), mechanism="tree", noise_multiplier=-1.0), InvalidInput),
        (lambda: Plan.fit(SinglePass(5), mechanism="tree", epsilon=math.nan), InvalidInput),
        (lambda: Plan.fit(SinglePass(5), mechanism="tree", epsilon=0.0), InvalidInput),
        (lambda: Plan.fit(SinglePass(5), mechanism="tree", epsilon=1.0, delta=1.0), InvalidInput),
        (lambda: Plan.fit(SinglePass(5), mechanism="wishes", epsilon=1.0), NoshuffleError),
        (lambda: Plan.fit(Poisson(5, 0.1), mechanism="tree", epsilon=1.0), Unsupported),
        (
            lambda: Plan(
                participation=Poisson(5, 0.1), strategy=banded((1.0, 0.5)), noise_multiplier=1.0
            ),
            Unsupported,
        ),
        (
            lambda: Plan(
                participation=SinglePass(5),
                strategy=identity(),
                noise_multiplier=1.0,
                accountant="fourier",
            ),
            Unsupported,
        ),
        (lambda: Plan.from_json("{}"), InvalidInput),
        (lambda: Plan.from_json("not json"), InvalidInput),
        (
            lambda: Plan.from_json(PLANS[0].to_json().replace('"delta"', '"dilta"')),
            InvalidInput,
        ),
    ],
)
def test_bad_input_is_one_line(make: object, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_fixed_size_batch_of_everybody_costs_at_least_the_gaussian_of_two_clip_norms() -> None:
    """Nothing is secret then, and one swap moves every sum by 2ζ: μ = 2√T/z exactly."""
    for noise in (1.0, 4.0, 20.0):
        for accountant in ("fourier", "rdp"):
            plan = Plan(
                participation=FixedSize(steps=9, batch=50, population=50),
                strategy=identity(),
                noise_multiplier=noise,
                accountant=accountant,
            )
            assert plan.epsilon() >= gaussian.epsilon(mu=2 * 3 / noise, delta=plan.delta)


def poisson_plan(steps: int, rate: float) -> Plan:
    return Plan(participation=Poisson(steps, rate), strategy=identity(), noise_multiplier=2.0)


def test_fixed_size_batches_for_each_kind_of_neighbours() -> None:
    """What is left out costs at most what is replaced, and more than a shift of one clip norm."""
    part = FixedSize(steps=480, batch=250, population=10_000)
    plans = {
        kind: Plan(participation=part, strategy=identity(), noise_multiplier=2.0, neighbours=kind)
        for kind in ("zero-out", "add-remove", "replace-one")
    }
    epsilon = {kind: plan.epsilon() for kind, plan in plans.items()}
    poisson = poisson_plan(480, 0.025).epsilon()
    assert poisson < 0.9 * epsilon["zero-out"] < 0.8 * epsilon["add-remove"]
    assert epsilon["add-remove"] < epsilon["replace-one"]
    half = replace(poisson_plan(480, 0.025), noise_multiplier=1.0)
    assert epsilon["add-remove"] == pytest.approx(half.epsilon(), rel=1e-9)
    assert replace(plans["add-remove"], accountant="rdp").epsilon() >= epsilon["add-remove"]
    assert replace(plans["zero-out"], accountant="rdp").epsilon() >= epsilon["zero-out"]
    said = plans["add-remove"].statement()
    assert said.sensitivity == 2.0
    assert "another takes its place" in said.words()
    assert "stay as they are" in plans["zero-out"].statement().words()
    again = Plan.from_json(plans["add-remove"].to_json())
    assert again.epsilon() == epsilon["add-remove"]
    fitted = Plan.fit(part, mechanism="identity", epsilon=1.0, neighbours="add-remove")
    assert 0.999 < fitted.epsilon() <= 1.0


def test_units_that_go_one_by_one_are_drawn_more_often() -> None:
    """The last of three leaves 38 of 40: its rate is that of 38 units."""
    plan = Plan(
        participation=FixedSize(steps=6, batch=10, population=40),
        strategy=identity(),
        noise_multiplier=4.0,
        neighbours="add-remove",
    )
    fewer = replace(plan, participation=FixedSize(steps=6, batch=10, population=38))
    found = plan.epsilon(group=3)
    curve, one = fewer.guarantee.curve(6), found / 3
    delta = float(curve(np.array([one]))[0])
    assert composition.group(epsilon=one, delta=delta, size=3).delta <= plan.delta
    careless = float(plan.guarantee.curve(6)(np.array([one]))[0])
    assert careless < 0.99 * delta
    with pytest.raises(Unsupported, match="where 31 are removed"):
        plan.epsilon(group=31)
    with pytest.raises(Unsupported, match="all 40 units"):
        replace(plan, participation=FixedSize(steps=6, batch=40, population=40))
    cut = Plan(
        participation=TruncatedPoisson(6, 0.2, 10, 40), strategy=identity(), noise_multiplier=4.0
    )
    more = replace(cut, participation=TruncatedPoisson(6, 0.2, 10, 42))
    one = cut.epsilon(group=3) / 3
    delta = float(more.guarantee.curve(6)(np.array([one]))[0])
    assert composition.group(epsilon=one, delta=delta, size=3).delta <= cut.delta


def test_gains_on_independent_noise_keep_their_order():
    """With gains the steps of one class cost less than one of every epoch, chosen freely."""
    gains = (1.0, 2.0, 2.0, 1.0)
    plan = Plan(participation=Epochs(2, 2), strategy=identity(gains=gains), noise_multiplier=1.0)
    assert plan.guarded == Epochs(2, 2)
    assert plan.sensitivity.squared == 5.0  # of a free order: 8
