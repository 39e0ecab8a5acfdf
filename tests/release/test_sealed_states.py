"""What checkpoints of a sealed run, and their digests from before the seal, still tell."""

from __future__ import annotations

import hashlib
import io
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tests.release import folders

from noshuffle.participation import FixedSize
from noshuffle.release.checkpoint import saved
from noshuffle.release.ledger_tables import Evidence
from noshuffle.release.verify import verify
from noshuffle.strategies import identity


def states(path: Path) -> list[dict[str, Any]]:
    found = saved(path / "checkpoints")
    return [torch.load(one / "state.pt", weights_only=True) for one in found]


def test_a_guessed_state_cannot_be_checked(tmp_path: Path) -> None:
    """The ledger keeps digests of states with all that a seal removes; a guess must not fit."""
    path = tmp_path / "run"
    rule = FixedSize(1, 6, folders.ROWS)
    private = folders.open_run(path, rule=rule, strategy=identity())
    (ids,), (x, y) = private.sampler(folders.ROWS), folders.data()
    private.step(folders.LOSS, x[ids], y[ids], ids=ids)
    private.save()
    state = private.state_dict()
    guess = io.BytesIO()  # all of it right
    torch.save({name: value for name, value in state.items() if name != "model"}, guess)
    private.close()
    with closing(Evidence(path / "ledger.sqlite")) as evidence:
        noted = [note["files"]["state.pt"] for note in evidence.notes("checkpoint")]
    assert hashlib.sha256(guess.getvalue()).hexdigest() not in noted
    assert [state["salt"] for state in states(path)] == [None]
    assert verify(path).answer == "PROVED", verify(path).words()
