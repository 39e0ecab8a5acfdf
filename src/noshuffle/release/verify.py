"""verify: does a run folder support its own statement?

Everything is recomputed from the evidence, and every disagreement is one sentence:

    plan          canonical, and its hash is the one that ledger and statement were written under
    ledger        hash chain, facts, steps, units, keys (`evidence_checks`)
    files         equal to their digests in the ledger; noise state of this plan (`file_checks`)
    statement     equal, field by field, to the one that plan, ledger and ancestors give, and about
                  a row that the ledger has

It reads and never writes. Fingerprints of batches and digests of sums need the data: for a replay.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.release.evidence_checks import LEDGER_CHECKS, Found
from noshuffle.release.facts import TEST_SEED, notes_of
from noshuffle.release.file_checks import FILE_CHECKS, NOT_THERE, noise_state
from noshuffle.release.files import as_json, read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger_errors import is_unreadable
from noshuffle.release.ledger_tables import Evidence, missing_head
from noshuffle.release.other_folders import is_other, not_a_run
from noshuffle.release.signature import public_bytes, signature_failure
from noshuffle.release.spending import spent
from noshuffle.release.unfinished import refuse_unfinished
from noshuffle.release.verdict import Verdict
from noshuffle.statement import of_stops


def verify(path: str | Path, *, public_key: str | Path | None = None) -> Verdict:
    """Recompute the guarantee of a run folder from its evidence.

    Guarantees: nothing in the folder can be changed without an answer other than PROVED, except by
    making ledger, files and statement anew together, which a signature shows (`public_key`). (What
    says nothing is not compared: `.lock`, and bytes of ledger.sqlite outside its rows.) It
    cannot know what was never recorded. Of a saved stream, every phase is verified.

    Where plan, statement or ledger cannot be read (permissions, a bad disk), nothing is known of
    the guarantee: the error of the operating system is raised; so is a line where there is no
    folder, it is no run (`other_folders`), or none has begun (`unfinished`). Other files that
    cannot be read are named as not checked.
    """
    run, refuted = RunFolder(path), []
    if not run.path.is_dir():  # a slip in the name refutes nothing
        raise InvalidInput(f"{path} is not a folder; give a run folder")
    wanted = None if public_key is None else public_bytes(public_key)  # a slip refutes nothing
    phases = sorted(run.path.glob("phase-*"), key=lambda phase: (len(phase.name), phase.name))
    if phases and not run.plan_file.exists():
        return _together(str(path), [verify(phase, public_key=public_key) for phase in phases])
    if is_other(run.path):
        raise InvalidInput(not_a_run(run.path))
    refuse_unfinished(run)
    try:
        plan = run.plan()
    except (NoshuffleError, *NOT_THERE, UnicodeDecodeError) as error:
        return Verdict(str(path), (f"plan.json cannot be read: {error}",))
    if run.plan_file.read_bytes() != plan.to_json().encode():
        refuted.append("plan.json is not in canonical form: it was edited")
    try:
        told: dict[str, Any] | None = {**read_json(run.statement_file)}
        if run.statement_file.read_bytes() != as_json(told):  # two values of a name, say
            refuted.append("statement.json is not as a run writes it: it was edited")
    except (*NOT_THERE, ValueError, TypeError) as error:
        told = None
        refuted.append(f"statement.json cannot be read: {error}")
    try:
        evidence = Evidence(run.ledger_file)
    except (sqlite3.DatabaseError, *NOT_THERE) as error:
        if is_unreadable(error):
            raise
        return Verdict(str(path), (*refuted, f"ledger.sqlite cannot be read: {error}"))
    found = Found(run, plan, evidence, told, refuted=refuted)
    try:
        found.read_rows()
        for check in (*LEDGER_CHECKS, *FILE_CHECKS, _head):
            found.refuted += check(found)
        found.refuted += _signature(found, wanted)
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError, AttributeError) as error:
        if is_unreadable(error):
            raise
        found.refuted.append(f"ledger.sqlite is damaged: {error}")
        return Verdict(str(path), tuple(found.refuted))
    finally:
        evidence.close()
    found.refuted += noise_state(found)
    epsilon: float | None = None
    delta: float | None = None
    try:
        said = spent(plan, len(found.rows), ancestors=run.ancestors(), notes=notes_of(found.facts))
        found.refuted += _statement(found, json.loads(json.dumps(said.to_dict())))
        epsilon, delta = said.epsilon, said.delta
    except (NoshuffleError, *NOT_THERE, ValueError, KeyError, TypeError) as error:
        found.refuted.append(f"no statement follows from the evidence: {error}")
    return Verdict(
        str(path),
        tuple(dict.fromkeys(found.refuted)),
        tuple(dict.fromkeys(found.unchecked)),
        tuple(_not_private(found)),
        tuple(found.checked),
        found.is_signed,
        len(found.rows),
        plan.steps,
        len(found.lives),
        epsilon,
        delta,
        tuple(found.exposed),
    )


def _together(path: str, phases: list[Verdict]) -> Verdict:
    """The phases of a stream as one: ε is the largest, if no unit lies in two of them.

    What binds them together (model.pkl, stream.pt) is in no ledger, so this is never PROVED.
    """

    def lines(name: str) -> tuple[str, ...]:
        all_of = [(Path(one.path).name, line) for one in phases for line in getattr(one, name)]
        return tuple(f"{phase}: {line}" for phase, line in all_of)

    names = [Path(one.path).name for one in phases]
    missing = {f"phase-{i + 1}" for i in range(len(phases))} - set(names)
    lost = tuple(f"{name} is not in the folder any more" for name in sorted(missing))
    loose = (
        "that no unit lies in two phases",
        f"that no phase followed {names[-1]}",
        "the files beside the phases, which no ledger knows of",
    )
    known = [one for one in phases if one.epsilon is not None]
    largest = max(known, key=lambda one: one.epsilon or 0.0, default=phases[0])
    return Verdict(
        path,
        (*lost, *lines("refuted")),
        (*lines("unchecked"), *loose),
        lines("not_private"),
        lines("checked"),
        all(one.is_signed for one in phases),
        sum(one.released for one in phases),
        sum(one.planned for one in phases),
        sum(one.lives for one in phases),
        largest.epsilon,
        largest.delta,
        lines("exposed"),
    )


def _head(found: Found) -> Iterator[str]:
    """The row that statement.json is about must be there."""
    if found.told is not None:
        yield from missing_head(found.evidence, found.told)


def _signature(found: Found, public_key: bytes | None) -> Iterator[str]:
    if not found.run.signature_file.exists():
        if public_key is not None:
            yield "there is no signature.json in the folder"
        return
    links = found.evidence.links()
    try:
        wrong = signature_failure(found.run, found.plan, links, public_key=public_key)
    except (IsADirectoryError, ValueError) as error:
        wrong = f"signature.json cannot be read: {error}"
    found.is_signed = wrong is None
    if wrong is not None:
        yield wrong
    elif public_key is None:
        found.unchecked.append("whose signature it is (give public_key=)")


#: What statement.json holds beside the statement itself.
_BOOKKEEPING = {"plan_hash", "planned_steps", "released_steps", "ledger_rows", "ledger_link"}
#: What differs as a matter of course where it covers another number of steps.
_BY_STEPS = {"assumptions", "epsilon", "mu", "rho", "sensitivity", "squared_sensitivity", "exact"}


def _statement(found: Found, expected: dict[str, Any]) -> Iterator[str]:
    """statement.json against the statement that the evidence gives."""
    told, plan, released = found.told, found.plan, len(found.rows)
    if told is None:
        return  # said already
    if told.get("plan_hash") != plan.hash:
        yield "statement.json was written under another plan"
    if not _agree(told.get("planned_steps"), plan.steps):
        yield f"statement.json speaks of {told.get('planned_steps')} planned steps"
    names = (expected.keys() | told.keys()) - _BOOKKEEPING
    if not _agree(told.get("released_steps"), released):
        names -= _BY_STEPS
        yield (
            f"statement.json covers {told.get('released_steps')} steps, the ledger has "
            f"{released}; resume the run to bring it up to date"
        )
    for name in sorted(names):
        said, shown = told.get(name), expected.get(name)
        if name == "assumptions" and (stops := of_stops(expected[name])):
            before = [one for one in expected[name] if one not in stops]
            if said == before:  # as version 0.1 wrote it
                found.unchecked.append(
                    f"statement.json does not say what its ε rests on: {stops[0]}"
                )
                continue
        if name not in expected or name not in told or not _agree(said, shown):
            yield f"statement.json says {name} = {said}, the evidence says {shown}"


def _agree(told: Any, expected: Any) -> bool:
    """Equal, and of one kind in JSON (1 is not true); for numbers with a point up to the last
    digits that another machine may round differently."""
    if isinstance(told, float) and isinstance(expected, float):
        return math.isclose(told, expected, rel_tol=1e-9, abs_tol=0.0)
    return type(told) is type(expected) and bool(told == expected)


def _not_private(found: Found) -> Iterator[str]:
    try:
        ancestors = found.run.ancestors()
    except (NoshuffleError, OSError, ValueError, KeyError, TypeError):
        ancestors = ()  # said with the statement
    if found.facts.get("test_key") == "yes":
        yield "the noise comes from a named test seed, which anybody can use to remove it"
    elif any(TEST_SEED in ancestor.notes for ancestor in ancestors):
        yield "a run that it was forked from has the noise of a named test seed"
    if found.plan.noise_multiplier == 0:
        yield "the plan has no noise"
