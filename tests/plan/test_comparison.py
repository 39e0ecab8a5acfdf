"""Mechanisms and kinds of sampling at equal (ε, δ)."""

from __future__ import annotations

import pytest

from noshuffle.errors import Unsupported
from noshuffle.participation import Epochs, FixedSize, Participation, SinglePass
from noshuffle.plan import compare, compare_sampling
from noshuffle.plan.comparison import KINDS, LEFT_OUT
from noshuffle.strategies import Strategy, identity
from noshuffle.strategies.mechanisms import MECHANISMS


def test_the_usual_table_of_a_long_run_is_short() -> None:
    asked: list[str] = []

    def noted(name: str, part: Participation, **options: object) -> Strategy:
        asked.append(name)
        return identity()

    for steps in (513, 64):
        compare(SinglePass(steps), mechanism="usual", epsilon=1.0, fit_fn=noted)
    assert asked[:6] == ["identity", "tree", "banded", "banded_inverse", "blt", "blt_two_sided"]
    assert set(LEFT_OUT) & set(asked[:7]) == set()
    assert set(asked[7:]) == set(MECHANISMS)


def test_the_kind_of_sampling_with_the_least_noise_comes_first() -> None:
    rows = compare_sampling(Epochs(3, 16), kinds=KINDS, epsilon=1.0, unsampled="banded")
    assert {row.sampling for row in rows} == set(KINDS)
    felt = {row.sampling: row.rms for row in rows}
    assert felt["cyclic"] <= felt["poisson"] * (1 + 1e-6), "one group is Poisson sampling"
    assert felt["bins"] <= felt["none"] * (1 + 1e-4), "secret positions cost nothing"
    assert rows[0].rms == min(felt.values())
    assert all(0.99 < row.plan.epsilon() <= 1.0 for row in rows)
    cyclic = next(row for row in rows if row.sampling == "cyclic")
    groups = cyclic.plan.participation.to_dict()["groups"]
    assert f"banded, {groups} group{'s' if groups > 1 else ''}, noise" in cyclic.words


def test_what_was_asked_for_holds_under_every_sampling() -> None:
    """Neighbours and buffers were dropped on the way: replace-one gave a plan for add-remove."""
    (row,) = compare_sampling(
        Epochs(2, 4), kinds=("cyclic",), epsilon=1.0, neighbours="replace-one"
    )
    assert row.plan.neighbours == "replace-one"
    assert 0.99 < row.epsilon <= 1.0
    with pytest.raises(Unsupported, match="not replace-one"):
        compare_sampling(Epochs(2, 8), kinds=("bins",), epsilon=1.0, neighbours="replace-one")
    rows = compare_sampling(Epochs(2, 4), kinds=KINDS, epsilon=4.0, max_buffers=1)
    assert all(row.buffers <= 1 for row in rows), "unlimited: 3"


def test_draws_of_a_fixed_size_beside_coin_flips() -> None:
    """Whoever leaves a batch of fixed size is replaced: almost twice the noise."""
    part = FixedSize(steps=16, batch=10, population=80)
    (row,) = compare(part, mechanism="identity", epsilon=4.0, neighbours="add-remove")
    (coins,) = compare_sampling(Epochs(2, 8), kinds=("poisson",), epsilon=4.0)
    assert 1.5 < row.noise_multiplier / coins.noise_multiplier <= 2
