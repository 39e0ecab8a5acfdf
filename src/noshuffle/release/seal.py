"""Seal a run: check what needs its keys, write the result down, destroy the keys; sign the result.

Who has the keys (or the noise state of a checkpoint) and the model can take the noise off again: a
finished run is safer without them. What only they can show is checked first and becomes a row of
the ledger, so that `verify` goes on to know it: that secret draws are those in the ledger, that the
rounds of a federated run were opened for the users that it lists, that every key is of a life on
record. After that no step can be added.

A hash chain shows that single rows were changed, not that all of it was made anew. For that there
is a signature by an ordinary Ed25519 key over the newest link, the plan and the digests of all
files (RFC 8032, from the `cryptography` package).

State: none.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from noshuffle.errors import InvalidInput, NoshuffleError, VerificationFailed
from noshuffle.plan import Plan
from noshuffle.release import checkpoint
from noshuffle.release.facts import ROUND_PRINTS, notes_of, round_print, statement_record
from noshuffle.release.files import read_json, write_bytes, write_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder_lock import take
from noshuffle.release.keys import KeyRing
from noshuffle.release.ledger import Ledger
from noshuffle.release.ledger_tables import Row
from noshuffle.release.opening import known_steps
from noshuffle.release.sampler import make_sampler
from noshuffle.release.spending import spent


def seal(run: RunFolder | str | Path, *, sign: str | Path | None = None) -> tuple[str, ...]:
    """Destroy the keys of a run for good; returns what was checked with them, in words.

    `sign`: a file with an Ed25519 private key (PEM) to sign the result with.

    Guarantees: raises, and destroys nothing, where the evidence contradicts the keys or where a
    checkpoint is not what the run saved. What was checked is in the ledger before the keys are
    gone.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    plan = folder.plan()
    signer = None if sign is None else private_key(Path(sign))
    lock = take(folder.path)
    ledger = Ledger(plan.participation, path=folder.ledger_file, unit=plan.unit)
    try:
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
        if not is_half_done and (wrong := next(_changed(folder, ledger), None)):
            raise VerificationFailed(wrong)
        if ledger.meta("sealed") is None:
            ledger.end("sealed")
            ledger.note("seal", checked=list(checked))
        _drop_noise_states(folder, ledger)
        folder.destroy_keys()
        ledger.note("files", files=folder.published())
        write_statement(folder, plan, ledger)
        if signer is not None:
            _sign(folder, plan, ledger, signer)
    finally:
        ledger.close()
        del lock
    return checked


def note_files(run: RunFolder | str | Path) -> None:
    """Note the digests of a folder's files in its ledger, after a report was drawn, say."""
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    plan = folder.plan()
    lock = take(folder.path)
    ledger = Ledger(plan.participation, path=folder.ledger_file, unit=plan.unit)
    try:
        ledger.note("files", files=folder.published())
        write_statement(folder, plan, ledger)
    finally:
        ledger.close()
        del lock


def _changed(folder: RunFolder, ledger: Ledger) -> Iterator[str]:
    """What a seal must not make good: files of checkpoints that the run did not write."""
    noted = {note["step"]: note["files"] for note in ledger.notes("checkpoint")}
    for path in checkpoint.saved(folder.checkpoints):
        if name := checkpoint.changed(path, noted.get(checkpoint.step_of(path), {})):
            yield f"{path / name} is not what was saved; bring it back, or remove the checkpoint"


def by_keys(
    ring: KeyRing,
    plan: Plan,
    rows: list[Row],
    facts: dict[str, str | None],
    lives: list[dict[str, Any]],
) -> tuple[list[str], tuple[str, ...]]:
    """What the keys contradict, and what they confirm, in words."""
    failures = [*_lives(ring, facts, lives), *_draws(ring, plan, rows, facts)]
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


def write_statement(folder: RunFolder, plan: Plan, ledger: Ledger) -> None:
    """statement.json from plan, ledger and ancestors alone."""
    notes = notes_of(ledger.facts())
    said = spent(plan, ledger.released, ancestors=folder.ancestors(), notes=notes)
    folder.write_statement(statement_record(plan, ledger, said))


def _drop_noise_states(folder: RunFolder, ledger: Ledger) -> None:
    """Checkpoints keep model and optimizer; what past noise can be worked out of goes."""
    for path in checkpoint.saved(folder.checkpoints):
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if state.get("noise") is not None:
            buffer = io.BytesIO()
            torch.save({**state, "noise": None}, buffer)
            write_bytes(path / "state.pt", buffer.getvalue(), mode=0o600)
        ledger.note("checkpoint", step=int(state["step"]), files=checkpoint.digests(path))


# -- signatures ------------------------------------------------------------------------------------


def signed_text(plan: Plan, rows: int, link: str, files: dict[str, Any]) -> bytes:
    """What a signature is of."""
    record = {"plan": plan.hash, "ledger_rows": rows, "ledger_link": link, "files": files}
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def _sign(folder: RunFolder, plan: Plan, ledger: Ledger, key: Any) -> None:
    from cryptography.hazmat.primitives import serialization as form

    rows, link = ledger.head
    files = folder.published()
    public = key.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
    signature = key.sign(signed_text(plan, rows, link.hex(), files))
    write_json(
        folder.signature_file,
        {
            "ledger_rows": rows,
            "ledger_link": link.hex(),
            "files": files,
            "public_key": public.hex(),
            "signature": signature.hex(),
        },
    )


def private_key(path: Path) -> Any:
    """The Ed25519 key that a PEM file holds; refused in one line where it holds none."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"sign must be a PEM file with an Ed25519 private key without a password, got {path} "
            f"({error}); make one with: openssl genpkey -algorithm ed25519 -out key.pem"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(f"{path} holds a key of another kind than Ed25519; make a new one")
    return key


def signature_failure(
    folder: RunFolder, plan: Plan, link_of: dict[int, str], *, public_key: str | Path | None
) -> str | None:
    """What is wrong with the signature in the folder; None if it holds. Raises if there is none.

    `public_key` is a PEM file, or the key in hex; without it the one in the file is taken.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    record = read_json(folder.signature_file)
    try:
        told = bytes.fromhex(record["public_key"])
        wanted = told if public_key is None else _public_bytes(public_key)
        if wanted != told:
            return "signature.json was made with another key than the one given"
        text = signed_text(plan, record["ledger_rows"], record["ledger_link"], record["files"])
        Ed25519PublicKey.from_public_bytes(told).verify(bytes.fromhex(record["signature"]), text)
    except (InvalidSignature, KeyError, ValueError, TypeError) as error:
        return f"the signature does not hold ({type(error).__name__})"
    if link_of.get(record["ledger_rows"]) != record["ledger_link"]:
        return "the ledger is not the one that was signed"
    if max(link_of) != record["ledger_rows"]:  # such as a note of another model
        return "rows were added to the ledger after it was signed"
    if folder.published() != record["files"]:
        return "the files are not those that were signed"
    return None


def _public_bytes(given: str | Path) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    if isinstance(given, str) and len(given) == 64 and not Path(given).exists():
        return bytes.fromhex(given)
    try:
        key: Any = form.load_pem_public_key(Path(given).read_bytes())
        found: bytes = key.public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
        return found
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"public_key must be a PEM file or 64 hex digits, got {given} ({error})"
        ) from None
