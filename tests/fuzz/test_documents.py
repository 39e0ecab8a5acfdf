"""Damaged documents: plans, keys, settings, tables. Typed errors, never a weaker guarantee."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fuzz.damage import EXAMPLES, ODD, check_one_line, damaged, spoiled

from noshuffle import Epochs, MinSeparation, Plan, SinglePass
from noshuffle.cli.table_file import read_table
from noshuffle.errors import NoshuffleError
from noshuffle.participation import Poisson, Restarted
from noshuffle.release.keys import Keys
from noshuffle.strategies import identity, tree


def plans() -> list[Plan]:
    short: dict[str, Any] = {"noise_multiplier": 3.0}
    return [
        Plan(participation=Epochs(epochs=3, steps_per_epoch=4), strategy=tree(), **short),
        Plan(participation=SinglePass(steps=9), strategy=tree("full"), **short),
        Plan(
            participation=Restarted(Epochs(epochs=2, steps_per_epoch=3), every=6),
            strategy=tree(restart_every=6),
            **short,
        ),
        Plan.fit(SinglePass(steps=12), mechanism="blt", epsilon=2.0),
        Plan(
            participation=MinSeparation(steps=12, separation=3, max_participations=2),
            strategy=identity(),
            **short,
        ),
        Plan(participation=Poisson(steps=20, rate=0.01), strategy=identity(), **short),
    ]


def assert_plan_or_refusal(text: str) -> bool:
    """Whether it was taken; then it is what it says, and says what it is."""
    try:
        plan = Plan.from_json(text)
    except NoshuffleError as error:
        check_one_line(error)
        return False
    assert Plan.from_json(plan.to_json()) == plan
    if plan.steps <= 10_000:
        try:
            spent = plan.epsilon()
        except NoshuffleError:
            return True
        assert spent >= 0
        # More noise never costs more, less never less: the number is of this plan.
        if math.isfinite(spent) and not plan.participation.is_sampled and plan.noise_multiplier:
            record = json.loads(plan.to_json())
            record["noise_multiplier"] = plan.noise_multiplier * 1.5
            assert Plan.from_json(json.dumps(record)).epsilon() <= spent * (1 + 1e-9)
    return True


@pytest.mark.parametrize("number", range(6))
def test_damaged_plans(number: int) -> None:
    chance, document = random.Random(number), json.loads(plans()[number].to_json())
    taken = [
        assert_plan_or_refusal(json.dumps(damaged(document, chance))) for _ in range(60 * EXAMPLES)
    ]
    assert not all(taken)


def test_spoiled_text_of_plans() -> None:
    chance, texts = random.Random(6), [plan.to_json().encode() for plan in plans()]
    for _ in range(200 * EXAMPLES):
        text = spoiled(chance.choice(texts), chance).decode("utf8", "replace")
        assert_plan_or_refusal(text)


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_what_is_no_plan(value: Any) -> None:
    with pytest.raises(NoshuffleError):
        Plan.from_json(json.dumps(value))


def test_damaged_keys() -> None:
    """A secret that is read is the whole one that was written: damage is seen, or was none."""
    chance, keys = random.Random(7), Keys.new()
    for _ in range(300 * EXAMPLES):
        try:
            found = Keys.from_dict(damaged(keys.to_dict(), chance))
        except NoshuffleError as error:
            check_one_line(error)
            continue
        assert found == keys


TABLE = "a,b,label\n" + "\n".join(f"{i % 7},{i / 3:.3f},{i % 2}" for i in range(30)) + "\n"


def test_damaged_tables(tmp_path: Path) -> None:
    chance, file = random.Random(8), tmp_path / "rows.csv"
    for _ in range(80 * EXAMPLES):
        data = TABLE.encode()
        for _ in range(chance.choice((1, 2, 4))):
            data = spoiled(data, chance)
        file.write_bytes(data)
        try:
            found = read_table(file, target="label")
        except NoshuffleError as error:
            check_one_line(error)
            continue
        assert len(found.x) == len(found.y)
        assert np.asarray(found.x).dtype.kind == "f"
