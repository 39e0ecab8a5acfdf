"""Seal a run: check what needs its keys, write the result down, destroy the keys; sign it.

Who has the keys (or the noise state of a checkpoint) and the model can take the noise off again: a
finished run is safer without them. What only they can show is checked first and becomes a row of
the ledger, so that `verify` goes on to know it: that secret draws are those in the ledger, that the
rounds of a federated run were opened for the users that it lists, that every key is of a life on
record. After that no step can be added.

State: none.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from noshuffle.errors import NoshuffleError, VerificationFailed
from noshuffle.plan import Plan
from noshuffle.release import checkpoint
from noshuffle.release.facts import ROUND_PRINTS, round_print, write_statement
from noshuffle.release.files import write_bytes
from noshuffle.release.folder import RunFolder, take
from noshuffle.release.keys import KeyRing
from noshuffle.release.ledger import Ledger
from noshuffle.release.ledger_tables import Row
from noshuffle.release.opening import known_steps
from noshuffle.release.sampler import make_sampler
from noshuffle.release.signature import private_key, write_signature


def seal(run: RunFolder | str | Path, *, sign: str | Path | None = None) -> tuple[str, ...]:
    """Destroy the keys of a run for good; returns what was checked with them, in words.

    `sign`: a file with an Ed25519 private key (PEM) to sign the result with.

    Guarantees: raises, and destroys nothing, where the evidence contradicts the keys or where a
    checkpoint is not what the run saved. What was checked is in the ledger before the keys are
    gone.
    """
    folder = RunFolder.of(run)
    plan = folder.plan()
    signer = None if sign is None else private_key(Path(sign))
    with _opened(folder, plan) as ledger:
        if ledger.released < known_steps(folder):
            raise VerificationFailed(f"{folder.ledger_file} lacks steps that were released")
        checked: tuple[str, ...] = ()
        if folder.key_file.exists():
            ring = folder.ring()
            lives = ledger.notes("life")
            failures, checked = by_keys(ring, plan, list(ledger.rows()), ledger.facts(), lives)
            if failures:
                raise VerificationFailed(f"{folder.path}: {failures[0]}")
        is_half_done = ledger.meta("sealed") is not None and folder.key_file.exists()
        notes = [] if is_half_done else ledger.notes("checkpoint")
        saved = [] if is_half_done else checkpoint.saved(folder.checkpoints)
        for file in checkpoint.foreign(saved, notes):  # which a seal must not make good
            raise VerificationFailed(
                f"{file} is not what was saved; bring it back, or remove the checkpoint"
            )
        if ledger.meta("sealed") is None:
            ledger.end("sealed")
            ledger.note("seal", checked=list(checked))
        _drop_noise_states(folder, ledger)
        folder.destroy_keys()
        ledger.note("files", files=folder.published())
        write_statement(folder, plan, ledger)
        if signer is not None:
            write_signature(folder, plan, ledger, signer)
    return checked


def note_files(run: RunFolder | str | Path) -> None:
    """Note the digests of a folder's files in its ledger, after a report was drawn, say."""
    folder = RunFolder.of(run)
    with _opened(folder, folder.plan()) as ledger:
        ledger.note("files", files=folder.published())
        write_statement(folder, folder.plan(), ledger)


@contextmanager
def _opened(folder: RunFolder, plan: Plan) -> Iterator[Ledger]:
    """The ledger of a folder that nobody else goes on with meanwhile."""
    lock = take(folder.path)
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
    if plan.participation.is_sampled:
        checked.append(f"the secret draws of {len(rows)} steps")
    if ROUND_PRINTS[0] in facts:
        checked.append(f"the users of {len(rows)} rounds")
    return failures, tuple(checked)


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
            plan.participation, key=ring.sampling_key, population=int(population)
        )
    except (NoshuffleError, ValueError) as error:
        yield f"the sampler cannot be rebuilt: {error}"
        return
    for row in rows:
        if not np.array_equal(np.sort(row.units), sampler.draw(row.step)):
            yield f"step {row.step} holds other units than the secret sampler drew"
            return


def _rounds(ring: KeyRing, rows: list[Row], facts: dict[str, str | None]) -> Iterator[str]:
    name, value = ROUND_PRINTS
    if facts.get(name) != value:
        return
    for row in rows:
        if row.batch != round_print(row.step, row.units, secret=ring.secret):
            yield f"round {row.step} lists other users than those it was opened for"
            return


def _drop_noise_states(folder: RunFolder, ledger: Ledger) -> None:
    """Checkpoints keep model and optimizer; what past noise can be worked out of goes."""
    for path in checkpoint.saved(folder.checkpoints):
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if state.get("noise") is not None:
            buffer = io.BytesIO()
            torch.save({**state, "noise": None}, buffer)
            write_bytes(path / "state.pt", buffer.getvalue(), mode=0o600)
        ledger.note("checkpoint", step=int(state["step"]), files=checkpoint.digests(path))
