"""How users were told apart is a fact of the log and a sentence of the statement.

One id is not always one person: a device may claim another id at each check-in, and a SuperNode
that nobody registered has a new key after each restart. The ε counts ids, so the statement must say
whose word they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.federated.blobs import fact, saved

from noshuffle import MinSeparation, Plan
from noshuffle.errors import InvalidInput
from noshuffle.federated import Rounds, ServerOptimizer
from noshuffle.noise import test_source as a_source
from noshuffle.release.spending import (
    CLAIMED,
    GIVEN,
    REGISTERED,
    SIMULATED,
    UNREGISTERED,
    user_note,
)
from noshuffle.release.verify import verify

LIMITS = MinSeparation(4, 4, 1)
PLAN = Plan.fit(LIMITS, mechanism="identity", noise_multiplier=4.0, unit="user")


def a_run(run: Path | None) -> Rounds:
    server = ServerOptimizer(
        {"w": torch.zeros(2)}, PLAN, clip=1.0, cohort_size=2, source=a_source(seed=2), run=run,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
    return Rounds(server)


def test_ids_of_the_caller(tmp_path: Path) -> None:
    rounds = a_run(tmp_path)
    assert rounds.begin(["ada", "bob"]) is not None
    rounds.finish()
    rounds.close()
    assert fact(tmp_path) == GIVEN
    assert user_note(GIVEN) in saved(tmp_path)
    assert verify(tmp_path).refuted == ()


def test_another_way_in_the_same_run_is_refused(tmp_path: Path) -> None:
    rounds = a_run(tmp_path)
    assert rounds.begin(["ada"]) is not None
    rounds.finish()
    rounds.server.user_identity = CLAIMED
    with pytest.raises(InvalidInput, match="user_identity = given by the caller"):
        rounds.begin(["bob"])
    rounds.server.user_identity = GIVEN
    assert rounds.begin(["bob"]) is not None


def test_a_fact_that_was_changed_is_found(tmp_path: Path) -> None:
    rounds = a_run(tmp_path)
    rounds.server.user_identity = CLAIMED
    assert rounds.begin(["ada"]) is not None
    rounds.finish()
    rounds.close()
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text().replace(CLAIMED, REGISTERED))
    assert verify(tmp_path).refuted


def test_every_way_has_a_sentence_of_its_own() -> None:
    ways = (GIVEN, SIMULATED, CLAIMED, REGISTERED, UNREGISTERED, "badge numbers")
    assert len({user_note(way) for way in ways}) == len(ways)
