"""Seal a run: check what needs its keys, write the result down, destroy its secrets; sign it.

Who has the keys (or the noise state of a checkpoint) and the model can take the noise off again: a
finished run is safer without them. What only they can show is checked first and becomes a row of
the ledger, so that `verify` goes on to know it: that secret draws are those in the ledger, that the
rounds of a federated run were opened for the users that it lists, that every key is of a life on
record. After that no step can be added. Of a sampled run the lists of who was drawn go too
(`secret_units`), and the states of random generators, which tell how much was drawn from them.

    checks → sealed, seal → noise states → keys → positions: to be removed, removed → statement

A seal that was interrupted anywhere is brought to its end by the next one.

State: none.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from noshuffle.errors import NoshuffleError, VerificationFailed
from noshuffle.plan import Plan
from noshuffle.release import checkpoint
from noshuffle.release.facts import ROUND_PRINTS, round_print, write_statement
from noshuffle.release.files import file_digest, has_grown, write_bytes
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder_lock import take
from noshuffle.release.keys import KeyRing
from noshuffle.release.ledger import Ledger
from noshuffle.release.ledger_errors import explained
from noshuffle.release.ledger_tables import Evidence, Row, broken_link
from noshuffle.release.opening import steps_in_files
from noshuffle.release.sampler import DRAWS
from noshuffle.release.sampler_kinds import make_sampler
from noshuffle.release.signature import private_key, write_signature
from noshuffle.release.unfinished import SEAL, is_seal_missing

#: The kind of note in the ledger about secret positions, and what it says of them.
POSITIONS, TO_BE_REMOVED, REMOVED = "positions", "to be removed", "removed"


def seal(
    run: RunFolder | str | Path, *, sign: str | Path | None = None, keep_positions: bool = False
) -> tuple[str, ...]:
    """Destroy the keys of a run for good; returns what was checked with them, in words.

    `sign`: a file with an Ed25519 private key (PEM) to sign the result with. `keep_positions`: the
    ledger of a sampled run goes on to list who was drawn when.

    Guarantees: raises, and destroys nothing, where the evidence contradicts the keys or where a
    checkpoint is not what the run saved. What was checked is in the ledger before the keys are
    gone, and before the secret positions are. Where the run sampled, no file of the folder tells
    who took part in a step, or how many, when this returns; steps that versions before 0.2 wrote,
    and their raw counts (operator.jsonl), stay as they are.
    """
    folder = RunFolder.of(run)
    plan = folder.plan()
    signer = None if sign is None else private_key(Path(sign))
    with _opened(folder, plan) as ledger:
        if ledger.released < steps_in_files(folder):
            raise VerificationFailed(f"{folder.ledger_file} lacks steps that were released")
        removes = plan.participation.is_sampled and not keep_positions
        if removes and (broken := broken_link(ledger.db)):
            raise VerificationFailed(f"{folder.path}: {broken}")
        checked: tuple[str, ...] = ()
        if folder.key_file.exists():
            ring = folder.ring()
            lives = ledger.notes("life")
            rows = list(ledger.rows())
            failures, checked = by_keys(ring, plan, rows, ledger.facts(), lives)
            if failures:
                raise VerificationFailed(f"{folder.path}: {failures[0]}")
        is_half_done = ledger.meta("sealed") is not None and folder.key_file.exists()
        notes = [] if is_half_done else ledger.notes("checkpoint")
        saved = [] if is_half_done else checkpoint.saved(folder.checkpoints)
        for file in checkpoint.foreign(saved, notes):  # which a seal must not make good
            raise VerificationFailed(
                f"{file} is not what was saved; bring it back, or remove the checkpoint"
            )
        _refuse_edited(folder, ledger)
        if ledger.meta("sealed") is None:
            ledger.end("sealed")
        if checked or not ledger.notes(SEAL):  # once more where a kill came in between
            ledger.note(SEAL, checked=list(checked))
        _drop_noise_states(folder, plan, ledger)
        folder.destroy_keys()
        if removes:
            _remove_positions(ledger)
        known = {name for note in ledger.notes("files") for name in note["files"]}
        found = folder.published()  # of which strangers stay what they were: not known to anybody
        ledger.note("files", files={name: found[name] for name in found if name in known})
        write_statement(folder, plan, ledger)
        if signer is not None:
            write_signature(folder, plan, ledger, signer)
    return checked


def _refuse_edited(folder: RunFolder, ledger: Ledger) -> None:
    """Files that were edited since the ledger noted them, which a seal must not make good.

    It notes what it finds, and `verify` would prove the run with it. Lines that were added to
    those of a .jsonl are as a run adds them; without its settings a run is not what it was.
    """
    notes = ledger.notes("files")
    for name, (digest, size) in (notes[-1]["files"] if notes else {}).items():
        file = folder.path / name
        if file == folder.ancestors_file:
            continue  # of which every note counts
        is_there = file.exists()
        is_edited = is_there and file_digest(file) != digest and not has_grown(file, digest, size)
        if is_edited or (file == folder.config_file and not is_there):
            raise VerificationFailed(f"{file} is not what the ledger says; bring it back")


def finish_seal(folder: RunFolder) -> None:
    """Bring a seal to its end whose process was killed in between."""
    if folder.ledger_file.exists():
        with closing(Evidence(folder.ledger_file)) as evidence:
            is_missing = "meta" in evidence.names() and is_seal_missing(evidence, folder)
        if is_missing:
            seal(folder)


def note_files(run: RunFolder | str | Path) -> None:
    """Note the digests of a folder's files in its ledger, after a report was drawn, say."""
    folder = RunFolder.of(run)
    with _opened(folder, folder.plan()) as ledger:
        ledger.note("files", files=folder.published())
        write_statement(folder, folder.plan(), ledger)


def note_pages(folder: RunFolder, *names: str) -> None:
    """Let the ledger know of pages that were drawn; a run that is going on will do it itself.

    Every other file stays as it was noted. A signed run is signed as it was.
    """
    if not folder.ledger_file.is_file() or folder.signature_file.exists():
        return
    try:
        with _opened(folder, folder.plan()) as ledger:
            told, found = ledger.notes("files"), folder.published()
            files = dict(told[-1]["files"]) if told else {}
            new = {name: found[name] for name in names if name in found}
            if any(files.get(name) != own for name, own in new.items()):
                ledger.note("files", files={**files, **new})
    except NoshuffleError:  # somebody goes on with it
        return


@contextmanager
def _opened(folder: RunFolder, plan: Plan) -> Iterator[Ledger]:
    """The ledger of a folder that nobody else goes on with meanwhile."""
    lock = take(folder.path)
    with explained():
        ledger = Ledger(plan.guarded, path=folder.ledger_file, unit=plan.unit)
        try:
            yield ledger
        finally:
            ledger.close()
            del lock


def by_keys(
    ring: KeyRing,
    plan: Plan,
    rows: list[Row],
    facts: dict[str, str | None],
    lives: list[dict[str, Any]],
) -> tuple[list[str], tuple[str, ...]]:
    """What the keys contradict, and what they confirm, in words."""
    failures = [*_lives(ring, facts, lives), *_draws(ring, plan, rows, facts)]
    if rows and not ring.is_newest(lives, used=max(row.life for row in rows)):
        failures.append("key.json is older than the last steps of the ledger, or was edited")
    failures += _rounds(ring, rows, facts)
    checked = ["every key is of a process on record"]
    compared = sum(not row.is_removed for row in rows)
    if plan.participation.is_sampled and (compared or not rows):
        checked.append(draws_line(compared))
    if ROUND_PRINTS[0] in facts and (compared or not rows):
        checked.append(f"the users of {compared} rounds")
    return failures, tuple(checked)


def draws_line(steps: int) -> str:
    """What a seal notes once the draws of all its steps were compared with the keys."""
    return f"the secret draws of {steps} steps"


def _lives(
    ring: KeyRing, facts: dict[str, str | None], lives: list[dict[str, Any]]
) -> Iterator[str]:
    if ring.name != facts.get("key"):
        yield "the keys are not those that the ledger was written under"
    told = {life.get("keys") for life in lives}
    if any(life.name not in told for life in ring.lives):
        yield "key.json holds keys of a life that the ledger does not know of: it was rolled back"
    if ring.is_test != (facts.get("test_key") == "yes"):
        yield "ledger and key disagree on whether the noise comes from a test seed"


def _draws(
    ring: KeyRing, plan: Plan, rows: list[Row], facts: dict[str, str | None]
) -> Iterator[str]:
    if not plan.participation.is_sampled or not rows:
        return
    population = facts.get("population")
    if population is None:
        yield "the ledger does not name the population that was sampled from"
        return
    try:
        sampler = make_sampler(
            plan.participation,
            key=ring.sampling_key,
            population=int(population),
            by_count=facts.get(DRAWS[0]) == DRAWS[1],
        )
    except (NoshuffleError, ValueError) as error:
        yield f"the sampler cannot be rebuilt: {error}"
        return
    for row in (row for row in rows if not row.is_removed):
        if not np.array_equal(np.sort(row.units), sampler.draw(row.step)):
            yield f"step {row.step} holds other units than the secret sampler drew"
            return


def _rounds(ring: KeyRing, rows: list[Row], facts: dict[str, str | None]) -> Iterator[str]:
    name, value = ROUND_PRINTS
    if facts.get(name) != value:
        return
    for row in (row for row in rows if not row.is_removed):
        if row.batch != round_print(row.step, row.units, secret=ring.secret):
            yield f"round {row.step} lists other users than those it was opened for"
            return


def _remove_positions(ledger: Ledger) -> None:
    """Who was drawn when; what it is made of is noted before, that it is done afterwards."""
    states = [note["state"] for note in ledger.notes(POSITIONS)]
    is_begun = TO_BE_REMOVED in states
    if REMOVED in states or not (is_begun or ledger.hides_units):
        return
    if not is_begun:
        ledger.note(POSITIONS, state=TO_BE_REMOVED, steps=ledger.released)
    ledger.remove_units()
    ledger.note(POSITIONS, state=REMOVED, steps=ledger.released)


def _drop_noise_states(folder: RunFolder, plan: Plan, ledger: Ledger) -> None:
    """Checkpoints keep model and optimizer; what past noise can be worked out of goes."""
    is_sampled = plan.participation.is_sampled
    secret = ["noise", checkpoint.SALT]
    if is_sampled:
        secret += ["random", "epoch_random"]
    checkpoint.sweep(folder.checkpoints)
    for path in checkpoint.saved(folder.checkpoints):
        state = checkpoint.read_state(path / "state.pt")
        left = {name: None for name in secret if state.get(name) is not None}
        if left:
            buffer = io.BytesIO()
            torch.save({**state, **left}, buffer)
            write_bytes(path / "state.pt", buffer.getvalue(), mode=0o600)
        ledger.note("checkpoint", step=int(state["step"]), files=checkpoint.digests(path))
