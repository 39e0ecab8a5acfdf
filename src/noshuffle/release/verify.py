"""verify: does a run folder support its own statement? Everything is computed again from its log.

    VERIFIED      plan, log and statement agree: every step fits the plan, ε is what follows
    NOT PRIVATE   they agree, and say so themselves (test seed, no noise)
    REFUTED       something contradicts the statement: the line or the file is named

What cannot be read (permissions, a bad disk, a mechanism that nobody has imported) is an error:
nothing is known then. What a folder cannot show stands below the answer. It reads and never writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported, VerificationFailed
from noshuffle.plan.statement import UNCHECKED
from noshuffle.release.files import as_json, read_json
from noshuffle.release.folder import RunFolder, digests, step_of
from noshuffle.release.history import History
from noshuffle.release.log import Damaged, read
from noshuffle.release.signature import public_bytes, signature_failure
from noshuffle.rounding import up

VERIFIED, NOT_PRIVATE, REFUTED = "VERIFIED", "NOT PRIVATE", "REFUTED"
EXIT_CODES = {VERIFIED: 0, REFUTED: 1, NOT_PRIVATE: 4}
OLD_COPY = (
    "that these are all steps: an older copy of a folder, or the one that a backup or a copy went "
    "on from, shows its own steps only"
)
UNSIGNED = "that log and files were not all made anew together: only a signature could show it"


@dataclass(frozen=True)
class Verdict:
    """What was found in a run folder."""

    path: str
    refuted: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    not_private: tuple[str, ...] = ()
    is_signed: bool = False
    participation_checked: bool = True
    released: int = 0
    planned: int = 0
    epsilon: float | None = None
    delta: float | None = None

    @property
    def answer(self) -> str:
        """VERIFIED, NOT PRIVATE or REFUTED."""
        if self.refuted:
            return REFUTED
        return NOT_PRIVATE if self.not_private else VERIFIED

    @property
    def exit_code(self) -> int:
        """0 verified, 1 refuted, 4 not private (2: nothing could be read)."""
        return EXIT_CODES[self.answer]

    @property
    def is_verified(self) -> bool:
        return self.answer == VERIFIED

    def words(self) -> str:
        lines = [f"{self.answer}: {self.path}"]
        if self.epsilon is not None and self.delta is not None and not self.refuted:
            lines[0] = (
                f"{self.answer}: {self.released} of {self.planned} planned steps, "
                f"ε = {up(self.epsilon)} at δ = {up(self.delta)}"
            )
            if not self.participation_checked:
                lines[0] += f". {UNCHECKED}"
        lines += [f"  - {line}" for line in (*self.refuted, *self.not_private)]
        lines += [f"  (not checked: {line})" for line in self.unchecked]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        finite = self.epsilon is not None and math.isfinite(self.epsilon)
        return {
            "answer": self.answer,
            "verified": self.is_verified,
            "path": self.path,
            "failures": list(self.refuted),
            "not_private": list(self.not_private),
            "unchecked": list(self.unchecked),
            "signed": self.is_signed,
            "participation_checked": self.participation_checked,
            "released_steps": self.released,
            "planned_steps": self.planned,
            "epsilon": self.epsilon if finite else None,
            "delta": self.delta,
        }

    def check(self) -> None:
        """Raise unless the stated guarantee is supported."""
        if not self.is_verified:
            raise VerificationFailed(f"{self.path}: {(*self.refuted, *self.not_private)[0]}")


def verify(path: str | Path, *, public_key: str | Path | None = None) -> Verdict:
    """Recompute the guarantee of a run folder from its log.

    Guarantees: no line of the log, no number of plan and statement and no file of the newest
    checkpoint can be changed without REFUTED, except by making all of them anew together, which a
    signature shows (`public_key`). It cannot know what was never recorded. Of a saved stream, every
    phase is verified.
    """
    run = RunFolder(path)
    if not run.path.is_dir():  # a slip in the name refutes nothing
        raise InvalidInput(f"{path} is not a folder; give a run folder")
    wanted = None if public_key is None else public_bytes(public_key)
    folders = [phase for phase in run.path.glob("phase-*") if phase.name[6:].isdecimal()]
    phases = sorted(folders, key=lambda phase: int(phase.name[6:]))
    if phases and not run.plan_file.exists():
        return _together(str(path), [verify(phase, public_key=public_key) for phase in phases])
    try:
        history = History(run.plan())
    except Unsupported:
        raise  # a mechanism that is not known here refutes nothing
    except NoshuffleError as error:
        if not run.plan_file.exists():
            raise
        return Verdict(str(path), (f"plan.json cannot be read: {error}",))
    refuted: list[str] = []
    unchecked = [OLD_COPY]
    plan = history.plan
    try:
        for contradiction in _contradictions(run, history, wanted, unchecked):
            refuted.append(contradiction)
        statement = history.statement()
    except Unsupported:
        raise  # nor does one of a run that this one was forked from
    except (NoshuffleError, ValueError, KeyError, TypeError) as error:
        return Verdict(str(path), (*refuted, str(error)), planned=plan.steps)
    void = statement.not_private
    if not plan.noise_multiplier:
        void = void or ("the plan has no noise",)
    return Verdict(
        str(path),
        tuple(refuted),
        tuple(unchecked),
        void,
        is_signed=run.signature_file.exists(),
        participation_checked=statement.participation_checked,
        released=history.steps,
        planned=plan.steps,
        epsilon=statement.epsilon,
        delta=statement.delta,
    )


def _contradictions(
    run: RunFolder, history: History, public_key: bytes | None, unchecked: list[str]
) -> Iterator[str]:
    """Walk the log from its first row on, and say what contradicts the statement.

    Raises where nothing behind a line can be read any more. What cannot be shown goes to
    `unchecked`.
    """
    if run.plan_file.read_bytes() != history.plan.to_json().encode():
        yield "plan.json is not in canonical form: it was edited"
    stated: dict[str, Any] = {}
    try:
        stated = {**read_json(run.statement_file)}
        if run.statement_file.read_bytes() != as_json(stated):  # two values of a name, say
            yield "statement.json is not as a run writes it: it was edited"
    except FileNotFoundError:
        yield "statement.json is missing"
    except (InvalidInput, TypeError) as error:
        yield f"statement.json cannot be read: {error}"
    if not run.log_file.exists():
        raise VerificationFailed("log.jsonl is missing")
    expected: dict[str, Any] | None = None
    link = ""
    try:
        for row in read(run.log_file):
            history.add(row)
            link = row["link"]
            if link == stated.get("log_link"):
                expected = history.statement_record(link=link)
    except Damaged as damage:
        if not damage.is_torn:
            raise
        unchecked.append("the last line of the log, which is torn: it is no step of the run")
    yield from _header(history)
    yield from _newest_checkpoint(run, history)
    if stated:
        yield from _disagreements(stated, expected)
        if stated.get("released_steps") != history.steps:
            unchecked.append(
                f"the last save: statement.json covers {stated.get('released_steps')} steps, and ε "
                f"above is that of all {history.steps} in the log"
            )
    is_signed = run.signature_file.exists()
    if public_key is not None and not is_signed:
        yield "there is no signature.json in the folder"
    elif is_signed:
        wrong = signature_failure(run, history.plan, link, public_key=public_key)
        if wrong is not None:
            yield wrong
    if public_key is None:
        unchecked.append("whose signature it is (give public_key=)" if is_signed else UNSIGNED)


def _header(history: History) -> Iterator[str]:
    """What the log says of plan and noise, against plan.json."""
    facts, plan = history.facts(), history.plan
    if facts["plan"] != plan.hash:
        yield "plan.json is not the plan of the log"
    if facts["adaptive_clip"] == "no" and (clip := _bound(facts["clip"])) is not None:
        scale = plan.noise_multiplier * clip
        if not math.isclose(float(facts["noise_scale"]), scale, rel_tol=1e-9):
            yield (
                f"the noise on record has deviation {facts['noise_scale']}, and noise multiplier × "
                f"clip norm is {scale!r}"
            )
    ends = [i for i, row in enumerate(history.rows) if row["kind"] == "end"]
    if ends and any(row["kind"] in ("start", "checkpoint") for row in history.rows[ends[0] :]):
        yield "the run went on after its end"


def _bound(clip: str) -> float | None:
    """The number in Flat(norm=…); other clips have bounds of their own."""
    head, _, tail = clip.partition("=")
    try:
        return float(tail.rstrip(")")) if head == "Flat(norm" else None
    except ValueError:
        return None


def _disagreements(stated: dict[str, Any], expected: dict[str, Any] | None) -> Iterator[str]:
    """statement.json against the one that followed from the log when it was written."""
    if expected is None:
        yield "the log lacks the row that statement.json was written after: it was cut or made anew"
        return
    expected = json.loads(json.dumps(expected))
    for name in sorted(expected.keys() | stated.keys()):
        if not _agree(stated.get(name), expected.get(name)):
            yield f"statement.json says {name} = {stated.get(name)}, the log {expected.get(name)}"


def _agree(stated: Any, expected: Any) -> bool:
    """Equal, and of one kind in JSON (1 is not true); for numbers with a point up to the last
    digits that another machine may round differently."""
    if isinstance(stated, float) and isinstance(expected, float):
        return math.isclose(stated, expected, rel_tol=1e-9, abs_tol=0.0)
    return type(stated) is type(expected) and bool(stated == expected)


def _newest_checkpoint(run: RunFolder, history: History) -> Iterator[str]:
    """The newest checkpoint is one that the run noted."""
    for path in run.saved()[-1:]:
        noted = [row for row in history.of("checkpoint") if row["step"] == step_of(path)]
        if not noted:
            yield f"the log knows of no checkpoint {path.name}"
        elif digests(path) not in [row["files"] for row in noted]:
            yield f"the files of {path.name} are not those that the run saved"


def _together(path: str, phases: list[Verdict]) -> Verdict:
    """The phases of a stream as one: ε is the largest, if no unit lies in two of them."""

    def lines(name: str) -> tuple[str, ...]:
        all_of = [(Path(one.path).name, line) for one in phases for line in getattr(one, name)]
        return tuple(f"{phase}: {line}" for phase, line in all_of)

    names = [Path(one.path).name for one in phases]
    before, numbers = _phases_before(phases[0].path), [int(name[6:]) for name in names]
    missing = sorted({*range(before + 1, numbers[-1])} - {*numbers})
    lost = tuple(f"phase-{number} is not in the folder any more" for number in missing)
    loose: tuple[str, ...] = (
        "that no unit lies in two phases",
        f"that no phase followed {names[-1]}",
    )
    loose += (f"the {before} phases before {names[0]}, of which no folder tells",) * bool(before)
    known = [one for one in phases if one.epsilon is not None]
    largest = max(known, key=lambda one: one.epsilon or 0.0, default=phases[0])
    return Verdict(
        path,
        (*lost, *lines("refuted")),
        (*lines("unchecked"), *loose),
        lines("not_private"),
        is_signed=all(one.is_signed for one in phases),
        participation_checked=all(one.participation_checked for one in phases),
        released=sum(one.released for one in phases),
        planned=sum(one.planned for one in phases),
        epsilon=largest.epsilon,
        delta=largest.delta,
    )


def _phases_before(first: str) -> int:
    """How many phases of a stream were over before it was saved for the first time."""
    with suppress(OSError, NoshuffleError, ValueError, KeyError):
        for row in read(RunFolder(first).log_file):
            if row["kind"] == "fact" and row["name"] == "phases_before":
                return int(row["value"])
    return 0
