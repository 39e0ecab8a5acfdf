"""What a statement says beside its number."""

from __future__ import annotations

import json

from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.plan.statement import UNCHECKED

PLAN = Plan.fit(SinglePass(8), mechanism="tree", epsilon=2.0)


def test_participation_that_nobody_checked_stands_beside_epsilon() -> None:
    """A plan of one pass, a shuffled loader of two without names: ε = 2 was stated as exact."""
    said = PLAN.statement(steps=5, notes=("A note.",), participation_checked=False)
    first, *others = said.words().splitlines()
    assert first == said.headline()
    assert first.startswith("(ε = ")
    assert first.endswith(f"exact. {UNCHECKED}")
    assert not any(UNCHECKED in line for line in others)
    assert json.loads(json.dumps(said.to_dict()))["participation_checked"] is False
    checked = PLAN.statement(steps=5, notes=("A note.",))
    assert checked.to_dict()["participation_checked"] is True
    assert UNCHECKED not in checked.words()
    assert said.epsilon == checked.epsilon
    assert said.assumptions == checked.assumptions
    assert not said.with_assumptions("Another note.").participation_checked


def test_a_void_statement_says_so_first() -> None:
    said = PLAN.statement(notes=("NOT PRIVATE: the noise is known.",))
    assert said.headline().startswith("NOT PRIVATE: (ε = ")
    assert said.not_private == ("the noise is known.",)
