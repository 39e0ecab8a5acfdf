"""Where the ledger of a run lives: one key, one ledger, one place.

The ledger is what keeps a row of noise from being used for two different sums, so it must be the
one and only ledger of its key. A copy of the folder that went on by itself would put the same noise
on other sums, and so would a key whose ledger was lost or rolled back. A copy is told by the inode
of the ledger's file, which it does not share; a ledger that is behind its own checkpoints was
rolled back. Not told are older files written over all of ours in place, and a backup restored after
a deletion if the file system hands the same inode out again.

State: the facts "place 0", "place 1", … in the ledger, one for every promised move.
"""

from __future__ import annotations

import os
from pathlib import Path

from noshuffle.errors import ReplayRefused
from noshuffle.plan import Plan
from noshuffle.release import checkpoint
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Ledger


def open_ledger(run: RunFolder | None, plan: Plan, *, moved: bool) -> Ledger:
    """The ledger of a run: in its folder, or in memory without one.

    Guarantees: those of `ready` and `settle`, between which the ledger is opened.
    """
    ledger = Ledger(plan.participation, path=ready(run, plan), unit=plan.unit)
    settle(ledger, run, moved=moved)
    return ledger


def ready(run: RunFolder | None, plan: Plan) -> Path | None:
    """The file that the ledger of a run may be opened at (None: in memory).

    Guarantees: refuses a folder whose ledger is missing although a run lives there. The file of a
    sampled plan, which lists the secret draws, is readable by its owner only.
    """
    if run is None:
        return None
    file = run.ledger_file
    if not file.exists() and (_saved_steps(run) or run.statement_file.exists()):
        raise ReplayRefused(_behind(file))
    if plan.participation.is_sampled:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # its log gets the same mode
        file.chmod(0o600)
    return file


def settle(ledger: Ledger, run: RunFolder | None, *, moved: bool) -> None:
    """Check that this is the one ledger of its key, and write down where it lives.

    Guarantees: refuses a folder that was copied or restored (unless the caller promises that it
    was moved), and one whose ledger knows less than its checkpoints.
    """
    if run is None:
        return
    try:
        _settle(ledger, run, moved=moved)
    except BaseException:
        ledger.let_go()
        raise


def _settle(ledger: Ledger, run: RunFolder, *, moved: bool) -> None:
    file = run.ledger_file
    if ledger.released < _saved_steps(run):
        raise ReplayRefused(_behind(file))
    places: list[str] = []
    while (known := ledger.meta(f"place {len(places)}")) is not None:
        places.append(known)
    here = str(file.stat().st_ino)
    if places and places[-1] != here and not moved:
        raise ReplayRefused(
            f"{file.parent} is a copy or a restored backup; if both went on, the same noise would "
            "cover different sums. If it was moved and the original is gone, say so: moved=True, "
            "or --moved"
        )
    if not places or places[-1] != here:
        ledger.bind(f"place {len(places)}", here)


def _saved_steps(run: RunFolder) -> int:
    """Steps behind the newest checkpoint."""
    saved = checkpoint.saved(run.checkpoints)
    return int(saved[-1].name.rpartition("-")[2]) if saved else 0


def _behind(file: Path) -> str:
    return (
        f"{file} is missing or older than the checkpoints beside it; steps that it does not know "
        "of were released under this key; bring it back, or start a new run"
    )
