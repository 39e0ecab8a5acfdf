"""Fork: go on from a run's model under a new key, and add both runs up.

When a released step would have to be repeated with other data (a lost batch, a changed setting),
the old noise must not be used again. A fork is a new run with a fresh key and a plan of its own;
the old run is closed for good, and the new statement covers both: μ² = μ_old² + μ_new².
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from noshuffle.errors import InvalidInput, ReplayRefused
from noshuffle.release import checkpoint
from noshuffle.release.facts import OTHER_RUNS, notes_of
from noshuffle.release.files import write_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Ledger
from noshuffle.release.opening import known_steps
from noshuffle.release.spending import Ancestor


def fork(parent: RunFolder | str | Path, path: str | Path, *, moved: bool = False) -> RunFolder:
    """A new run folder that carries the spending of `parent`; give it to `privatize`.

    Guarantees: `parent` can release nothing after this (it refuses, also where it is open now), so
    the steps that the fork adds up are all there will ever be. A copy of a run folder is refused
    (unless the caller promises that it was `moved`): its original could go on.
    """
    old = parent if isinstance(parent, RunFolder) else RunFolder(parent)
    new = RunFolder(path)
    plan = old.plan()
    if new.path.exists() and any(new.path.iterdir()):
        raise InvalidInput(f"{new.path} is not empty; fork into a new folder")
    ledger = Ledger(plan.participation, path=old.ledger_file, unit=plan.unit)
    if ledger.released < known_steps(old):
        ledger.let_go()
        raise ReplayRefused(f"{old.ledger_file} lacks steps that were released; bring it back")
    released = ledger.end()
    is_adaptive = ledger.meta("adaptive_clip") == "yes"
    notes = tuple(note for note in notes_of(ledger.facts()) if note != OTHER_RUNS)
    budget = ledger.meta("budget") or ""
    ancestors = [*old.ancestors(), Ancestor(plan, released, is_adaptive, notes, budget)]
    ledger.close()
    new.path.mkdir(parents=True, exist_ok=True)
    write_json(new.ancestors_file, [a.to_dict() for a in ancestors])
    return new


def load_model(run: RunFolder | str | Path, model: nn.Module) -> int:
    """The parameters of a run's newest checkpoint; returns the number of steps behind them."""
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    found = checkpoint.saved(folder.checkpoints)
    if not found:
        raise InvalidInput(f"{folder.path} has no checkpoint to load a model from")
    state = checkpoint.load(found[-1])
    model.load_state_dict(state["model"])
    return int(state["step"])
