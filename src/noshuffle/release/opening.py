"""Open a run, or fork one: folder, ledger and keys, each checked against the others.

    new       keys on the disk → plan.json → ledger, life 0
    again     plan equal, ledger no older than what the folder knows → fresh keys for all draws that
              no released step has used (`keys`) → one more life in the ledger, then on the disk
    fork      the old run can release nothing more → a new folder that carries its spending: its
              statement covers both, μ² = μ_old² + μ_new²

The ledger hears of new keys before the key file holds them: keys that it does not know of mean that
its rows were lost. A ledger that knows of fewer steps than statement.json or a checkpoint was
rolled back, and is refused. A folder that was copied or restored goes on, under fresh keys.

State: none.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused, VerificationFailed
from noshuffle.noise import Source
from noshuffle.noise.step_plan import StepPlans, rows_used
from noshuffle.plan import Plan
from noshuffle.release import account, checkpoint
from noshuffle.release.facts import OTHER_RUNS, notes_of
from noshuffle.release.file_identity import identity
from noshuffle.release.files import file_digest, make_folder, read_json, sync, write_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder_lock import FolderLock, take
from noshuffle.release.keys import KeyRing
from noshuffle.release.ledger import Ledger
from noshuffle.release.spending import Ancestor
from noshuffle.release.unfinished import is_half_sealed
from noshuffle.strategies.recipe import Recipe
from noshuffle.version import __version__

Run = RunFolder | str | Path | None


@dataclass(frozen=True)
class Opened:
    """A run that is ready to go on."""

    folder: RunFolder | None
    ledger: Ledger
    ring: KeyRing
    recipe: Recipe
    ancestors: tuple[Ancestor, ...]
    lock: FolderLock | None
    charge: account.Charge | None = None
    #: Of a new run in a folder: the folders that were made for it.
    made: tuple[Path, ...] | None = None

    def give_up(self, plan: Plan, *, is_refused: bool) -> None:
        """Let go of the run, charged for what its ledger shows. Of a new one that is refused, and
        has released nothing, no folder and no key is left."""
        done = self.ledger.released
        try:
            account.leave(self.charge, plan, self.ledger, self.ancestors, released=done)
        finally:
            self.ledger.let_go()
        if is_refused and not done and self.folder is not None and self.made is not None:
            self.folder.withdraw(self.made)


def open_run(
    plan: Plan,
    *,
    run: Run,
    source: Source | None,
    device: torch.device,
    budget: account.Account | None = None,
) -> Opened:
    """Begin a run or come back to it.

    Guarantees: when this returns, all draws that no released step has used are under keys that no
    other process has (test sources excepted), and these keys are on the disk, readable by their
    owner only. Raises where plan, source or evidence contradict each other, and where the run
    would cost more than its `budget` has left; a new run that is refused leaves nothing behind.
    """
    if source is not None and not isinstance(source, Source):
        raise InvalidInput(
            f"source must be a noshuffle.noise.Source, got {type(source).__name__}; leave it out "
            "for a fresh key"
        )
    folder = None if run is None else RunFolder.of(run)
    recipe = plan.strategy.recipe(plan.steps)
    kind = (source or Source(bytes(32))).on(device).kind
    if folder is None:
        ring, ledger = KeyRing.new(source).on(kind), Ledger(plan.guarded, unit=plan.unit)
        _begin_life(ledger, ring, None)
        return _charged(Opened(None, ledger, ring, recipe, (), None), plan, budget)
    if not folder.is_started:
        folder.refuse_strangers()  # whose folder then stays as it is, without a lock
    made = folder.missing()
    make_folder(folder.path)
    lock = take(folder.path)  # before the first file: two that begin here would mix keys and plans
    is_new = not folder.is_started
    if is_new:
        ring = KeyRing.new(source).on(kind)
        folder.begin(plan, ring)
    else:
        if folder.plan() != plan:
            raise InvalidInput(
                f"{folder.path} holds a run with another plan; use a new folder, or that plan"
            )
        ring = folder.ring()
        if source is not None and source.fingerprint != ring.given:
            raise InvalidInput(f"{folder.path} holds a run with another key; use a new folder")
    with _damage_named(folder.ledger_file):
        ledger = Ledger(plan.guarded, path=_ledger_path(folder, plan), unit=plan.unit)
    try:
        with _damage_named(folder.ledger_file):
            _check_ledger(folder, ledger, ring)
            _check_ancestors(folder, ledger)
        if not is_new:
            row = rows_used(StepPlans.of(recipe), ledger.released)
            ring = ring.renewed(step=ledger.released, row=row)
        _begin_life(ledger, ring, folder.ledger_file)
        if not is_new:
            folder.write_ring(ring)
        opened = Opened(folder, ledger, ring, recipe, folder.ancestors(), lock)
        return _charged(replace(opened, made=tuple(made) if is_new else None), plan, budget)
    except BaseException as error:
        # One that never got its place in a budget leaves nothing in the way of the next try. One
        # that was interrupted may have got it: its keys name it there when it is opened again.
        is_refused = is_new and isinstance(error, NoshuffleError)
        try:
            is_refused = is_refused and ledger.meta("budget") is None
        finally:
            ledger.let_go()
        if is_refused:
            folder.withdraw(made)
        raise


def _begin_life(ledger: Ledger, ring: KeyRing, file: Path | None) -> None:
    """Let the ledger know that a process goes on under the newest keys of this ring."""
    ledger.begin_life(
        keys=ring.lives[-1].name,
        ring=ring.digest,
        version=__version__,
        torch=torch.__version__,
        **({} if file is None else identity(file)),
    )


def _charged(opened: Opened, plan: Plan, budget: account.Account | None) -> Opened:
    charge = account.enter(budget, plan, opened.ledger, opened.folder, opened.ancestors)
    return replace(opened, charge=charge)


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """A ledger that cannot be read is one clear line."""
    try:
        yield
    except NoshuffleError:
        raise
    except (sqlite3.DatabaseError, zlib.error, ValueError, TypeError, KeyError) as error:
        raise VerificationFailed(
            f"{file} is damaged ({error}), or the disk is full; bring it back, or begin a new run "
            "from the model"
        ) from None


def _ledger_path(folder: RunFolder, plan: Plan) -> Path:
    """The ledger's file; that of a sampled plan, which lists secret draws, is for its owner."""
    file = folder.ledger_file
    if not file.exists() and steps_in_files(folder):
        raise ReplayRefused(_behind(file))
    if plan.participation.is_sampled:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # its log gets the same mode
        file.chmod(0o600)
    return file


def _check_ledger(folder: RunFolder, ledger: Ledger, ring: KeyRing) -> None:
    """The ledger knows at least what the rest of the folder knows, and is open for more."""
    if is_half_sealed(ledger, folder):
        raise InvalidInput(
            f"{folder.path} was being sealed when its process ended: no step can be added; bring "
            "the seal to its end (noshuffle seal)"
        )
    if ledger.released < steps_in_files(folder):
        raise ReplayRefused(_behind(folder.ledger_file))
    lives = ledger.notes("life")
    told = {life["keys"] for life in lives}
    unknown = [life for life in ring.lives if life.name not in told]
    if unknown and (len(ring.lives) > 1 or ledger.released):
        raise ReplayRefused(
            f"{folder.ledger_file} does not know of keys that {folder.key_file} holds: it is "
            "older than they are, and steps that it lacks may have been released; bring the "
            "newer ledger back, or begin a new run from the model"
        )
    if ledger.released and not ring.is_newest(lives, used=ledger.newest_life):
        raise ReplayRefused(
            f"{folder.key_file} is older than the last steps of {folder.ledger_file}, or was "
            "edited: they would be repeated with other noise; bring the newer keys back, or begin "
            "a new run from the model"
        )


def _check_ancestors(folder: RunFolder, ledger: Ledger) -> None:
    """What a run was forked from is in its ledger before its first step, and stays the same.

    Without it a fork that was killed before it was saved would be known by its own steps alone.
    """
    file = folder.ancestors_file
    noted, there = ledger.digests_of(file.name), file.exists()
    if noted and (not there or noted != {file_digest(file)}):
        raise ReplayRefused(
            f"{file} is {'not what the ledger says' if there else 'gone'}: it has the runs that "
            "this one adds up with; bring it back"
        )
    if there and not noted:
        ledger.note("files", files={file.name: [file_digest(file), file.stat().st_size]})


def steps_in_files(folder: RunFolder) -> int:
    """How many steps the folder knows of, its ledger left aside."""
    saved = checkpoint.saved(folder.checkpoints)
    steps = checkpoint.step_of(saved[-1]) if saved else 0
    told = (_told(folder) or {}).get("released_steps", 0)
    return max(steps, told) if isinstance(told, int) else steps


def _told(folder: RunFolder) -> dict[str, Any] | None:
    """What statement.json says; None where it cannot be read."""
    try:
        record: Any = read_json(folder.statement_file)
    except (OSError, InvalidInput):
        return None
    return record if isinstance(record, dict) else None


def _behind(file: Path) -> str:
    return (
        f"{file} is missing or older than the checkpoints and statement.json beside it (was "
        f"{file.name}-wal left behind?); steps that it does not know of were released; bring it "
        "back, or begin a new run from the model"
    )


def fork(parent: RunFolder | str | Path, path: str | Path, *, moved: bool = False) -> RunFolder:
    """A new run folder that carries the spending of `parent`; give it to `privatize`.

    Guarantees: `parent` can release nothing after this (it refuses, also where it is open now), so
    the steps that the fork adds up are all there will ever be. A parent whose ledger was edited,
    or whose plan, settings or ancestors are not those of its ledger, is refused: the fork would
    state too little. Of a copy of a run folder it is the copy that ends: its original is another
    run, which may go on, and its later steps are not counted here. `moved` is no longer needed.
    """
    old, new = RunFolder.of(parent), RunFolder(path)
    plan = old.plan()
    if new.path.exists() and any(new.path.iterdir()):
        raise InvalidInput(f"{new.path} is not empty; fork into a new folder")
    ledger = Ledger(plan.guarded, path=old.ledger_file, unit=plan.unit)
    if ledger.released < steps_in_files(old):
        ledger.let_go()
        raise ReplayRefused(f"{old.ledger_file} lacks steps that were released; bring it back")
    try:
        _check_parent(old, plan, ledger)
    except NoshuffleError:
        ledger.let_go()
        raise
    released = ledger.end()
    is_adaptive = ledger.meta("adaptive_clip") == "yes"
    notes = tuple(note for note in notes_of(ledger.facts()) if note != OTHER_RUNS)
    budget = ledger.meta("budget") or ""
    parent_run = Ancestor(plan, released, is_adaptive, notes, budget)
    ancestors = [*old.ancestors(), parent_run]
    ledger.close()
    _appear(new, [a.to_dict() for a in ancestors])
    return new


def _appear(fork: RunFolder, ancestors: list[dict[str, Any]]) -> None:
    """Make the folder of a fork with its ancestors in it, as one step.

    A folder without them, as a kill in between would leave it, is that of a run of its own, which
    whoever finds it there would take for the fork.
    """
    place = fork.path.resolve()
    hidden = RunFolder(place.with_name(f".{place.name}.{os.getpid()}.tmp"))
    make_folder(hidden.path)
    try:
        write_json(hidden.ancestors_file, ancestors)
        if place.exists():  # and is empty
            place.rmdir()
        hidden.path.rename(place)
    except OSError:
        shutil.rmtree(hidden.path, ignore_errors=True)
        raise
    sync(place.parent)


def _check_parent(folder: RunFolder, plan: Plan, ledger: Ledger) -> None:
    """What a fork takes over is what the run wrote into its ledger, and what that says of files.

    `verify` asks the same of the run; of its forks it cannot, since they have no ledger of it.
    """
    with _damage_named(folder.ledger_file):
        ledger.refuse_edited(_told(folder))
    if ledger.meta("plan") not in (None, plan.hash):
        raise ReplayRefused(f"{folder.plan_file} is not what the ledger says; bring it back")
    _check_ancestors(folder, ledger)
    file = folder.config_file
    noted = ledger.digests_of(file.name)
    if noted and not (file.exists() and file_digest(file) in noted):
        raise ReplayRefused(f"{file} is not what the ledger says; bring it back")


def load_model(run: RunFolder | str | Path, model: nn.Module) -> int:
    """The parameters of a run's newest checkpoint; returns the number of steps behind them."""
    folder = RunFolder.of(run)
    found = checkpoint.saved(folder.checkpoints)
    if not found:
        raise InvalidInput(
            f"{folder.path} has no checkpoint to load a model from; private.save() writes one"
        )
    state = checkpoint.load(found[-1])
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:  # its lines say which names or shapes differ
        line = " ".join(str(error).split())[:300]
        raise InvalidInput(
            f"the model is not the one of {folder.path}; build the same modules ({line})"
        ) from None
    return int(state["step"])
