"""What a run that was never closed has released, from the ledger in its folder.

A run is dead when its folder can be locked (the system lets go of a lock when its process ends).
What its ledger shows is believed only if the chain is whole, it knows every process that the budget
knows of, it is the file that the last of them wrote, and no checkpoint or statement knows of more
steps (nor the budget itself: `progress`); otherwise nothing is given back and the run stays charged
for all that it reserved. The lock is held until the charge is written, so nobody goes on with the
run in between.

State: none.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from noshuffle.errors import NoshuffleError
from noshuffle.plan import Plan
from noshuffle.release.account import is_in_one_piece, uncounted
from noshuffle.release.facts import void_notes
from noshuffle.release.file_identity import identity, is_same
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder_lock import take
from noshuffle.release.ledger_tables import Evidence, described, edits
from noshuffle.release.opening import steps_in_files
from noshuffle.release.spending import spent
from noshuffle.release.unit_ids import Ids
from noshuffle.statement import PrivacyStatement


@dataclass(frozen=True)
class DeadRun:
    """What a dead run is charged for; `lock` keeps others away from it."""

    statement: PrivacyStatement
    plan: Plan | None
    steps: int
    units: tuple[Ids, Ids] | None
    lock: AbstractContextManager[object]
    rows: int


def shown_by_ledger(path: Path, origin: str, lives: Sequence[str]) -> DeadRun | None:
    """What the run in this folder has released; None if it lives, or its ledger is in doubt."""
    run = RunFolder(path)
    try:
        lock = take(path) if run.is_started else None
        if lock is None:
            return None
        plan, evidence = run.plan(), Evidence(run.ledger_file)
        try:
            facts = evidence.bound()
            void = void_notes(described(facts, (), (), ends=(), units=None))
            rows = list(evidence.rows())
            told = {life.get("keys"): life for life in evidence.notes("life")}
            is_whole, now = next(edits(evidence), None) is None, identity(run.ledger_file)
        finally:
            evidence.close()
    except (NoshuffleError, OSError, sqlite3.DatabaseError, ValueError):
        return None
    is_newest = facts.get("budget") == origin and set(lives) <= told.keys()
    # A backup in its place, and whatever went on from there, lacks steps that were released.
    is_its_own = bool(lives) and is_newest and is_same(told[lives[-1]], now)
    if not is_whole or not is_its_own or steps_in_files(run) > len(rows):
        return None
    steps, units = len(rows), None
    if steps and is_in_one_piece(plan, facts):
        steps = plan.steps
    elif rows and facts.get("identified_by") == "ids":
        units = np.unique(np.concatenate([row.units for row in rows]), return_counts=True)
    before = uncounted(run.ancestors(), origin)
    said = spent(plan, steps, ancestors=before).with_assumptions(*void)
    return DeadRun(said, None if before else plan, steps, units, nullcontext(lock), len(rows))
