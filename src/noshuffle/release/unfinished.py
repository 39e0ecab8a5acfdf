"""Folders that a killed process left without a guarantee to speak of: a line instead of a verdict.

    never begun   no statement, checkpoint or row of a step: nothing was released, and nothing is
                  refuted by files that are not there
    half sealed   the ledger says sealed, and the keys are there: a checkpoint may have lost its
                  noise, and the ledger not know of it yet (a matter of the verdict). Without the
                  keys, the rest of the seal is missing while statement.json is older than it

State: none.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress

from noshuffle.errors import InvalidInput
from noshuffle.release import checkpoint
from noshuffle.release.files import read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger_tables import Evidence, LedgerTables

#: The kind of note that a seal leaves in the ledger.
SEAL = "seal"


def refuse_unfinished(run: RunFolder) -> None:
    """Raise, in one line, where no run has begun in the folder."""
    if not run.path.is_dir():
        return
    try:
        with closing(Evidence(run.ledger_file)) as evidence:
            has_steps = evidence.is_made and next(evidence.rows(), None) is not None
    except FileNotFoundError:
        has_steps = False
    except (OSError, sqlite3.Error, ValueError, TypeError, KeyError):
        return  # what cannot be read is a matter of the verdict
    if not has_steps and not run.statement_file.exists() and not checkpoint.saved(run.checkpoints):
        again = "--resume begins it" if run.config_file.exists() else "begin one with --out"
        raise InvalidInput(
            f"no run has begun in {run.path}: it has no statement and no step on record, and "
            f"nothing was released; {again}"
        )


def is_half_sealed(ledger: LedgerTables, run: RunFolder) -> bool:
    """Whether a seal was begun and has not destroyed the keys: no step can be added any more."""
    return ledger.meta("sealed") is not None and run.key_file.exists()


def is_seal_missing(ledger: LedgerTables, run: RunFolder) -> bool:
    """Whether a seal was begun and has not come to its end: another one would bring it there."""
    events = list(ledger.log(SEAL))
    is_told = bool(events) and _told(run) >= events[-1].seq
    return is_half_sealed(ledger, run) or (ledger.meta("sealed") is not None and not is_told)


def _told(run: RunFolder) -> int:
    """How many rows of the ledger statement.json knows of; 0 without one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return int(read_json(run.statement_file)["ledger_rows"])
    return 0
