"""Extend a run in its folder: the same evidence goes on under a longer plan.

    rows        the noise of all released steps is that of the new plan, row by row (`why_not`)
    facts       the old plan, clip norm, divisor and keys stay in the ledger's chain, beside the new
    keys        there: they go on, fresh ones for every draw that no released step has used.
                destroyed (a finished run is sealed): new ones, for a phase that needs no old draw
    checkpoint  the newest, which must be of the last released step, goes on under the new plan

μ of the new plan is that of all rows in use, so one statement covers old and new steps, whoever
takes part in both. Clip norm and divisor may change here under any mechanism: what is protected is
the sum over the clip norm, and both are public (docs/proofs.md, "A clip norm that moves"). Steps
from before a change of the clip norm are not repeated after it (the fact `rescaled`): their draws
times two numbers would cancel wherever nobody was clipped.

What was begun is brought to its end by whoever opens the folder next (`finish`). State: none.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from noshuffle.clipping import Flat
from noshuffle.errors import InvalidInput, Unsupported, positive, whole
from noshuffle.noise.grid import check_spread
from noshuffle.noise.step_plan import StepPlan, StepPlans, fingerprint
from noshuffle.participation import DrawnStages, Participation, Stages, stages_of
from noshuffle.plan import Plan
from noshuffle.release import checkpoint, guard
from noshuffle.release.facts import EARLIER, RELEASED_BY, released_by, write_statement
from noshuffle.release.file_identity import identity
from noshuffle.release.files import write_bytes
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder_lock import take
from noshuffle.release.keys import KeyRing
from noshuffle.release.ledger import Ledger
from noshuffle.release.ledger_tables import Evidence
from noshuffle.release.spending import COUNTS
from noshuffle.release.unfinished import EXTENDED, is_half_extended, is_half_sealed
from noshuffle.release.units import UnitTable
from noshuffle.version import __version__

#: The facts that an extension may give another value.
FACTS = ("plan", "key", "clip", "batch_size", "noise_scale", "sealed", "rescaled", EARLIER)


def extend(
    run: RunFolder | str | Path,
    plan: Plan,
    *,
    batch_size: int | None = None,
    clip_norm: float | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Let the run in a folder go on under `plan` (made by `Plan.extended`); then open it as ever.

    `batch_size` and `clip_norm` (a flat clip, whatever was before) are those of the coming steps,
    where they change; `config` takes the place of config.json.

    Guarantees: raises, and changes nothing, where the released rows are not the first of the new
    plan, where units could not be told apart any more, or where the state of the last released step
    is not saved. When it returns, statement and `verify` speak of the new plan.
    """
    folder = RunFolder.of(run)
    folder.plan()  # one line where there is none
    lock = take(folder.path)
    finish(folder)
    if (old := folder.plan()) == plan:
        return folder
    ledger = Ledger(old.guarded, path=folder.ledger_file, unit=old.unit)
    try:
        released, facts = ledger.released, ledger.bound()
        is_sealed = "sealed" in facts
        if is_half_sealed(ledger, folder):
            raise InvalidInput(
                f"a seal of {folder.path} was killed on its way: seal it once more, then extend it"
            )
        _refuse(folder, ledger, old, plan, is_sealed=is_sealed)
        ring = KeyRing.new() if is_sealed else folder.ring()
        new: dict[str, str | None] = {"plan": plan.hash, "key": ring.name, "sealed": None}
        if batch_size is not None:
            whole(batch_size=batch_size)
            new["batch_size"] = str(batch_size)
        if clip_norm is not None:
            positive(clip_norm=clip_norm)
            scale = plan.noise_multiplier * float(clip_norm)
            check_spread(scale)
            new |= {"clip": repr(Flat(float(clip_norm))), "noise_scale": repr(scale)}
            if new["clip"] != facts.get("clip"):  # the same draws times another number: no replays
                new["rescaled"] = str(released)
        new = {name: value for name, value in new.items() if facts.get(name) != value}
        if new.keys() & set(RELEASED_BY):  # what the statement says of clip norm and divisor
            told = f"{facts.get(EARLIER, '')}; before step {released} {released_by(facts)}"
            new[EARLIER] = told
        body = {
            "released": released,
            "before": {name: facts.get(name) for name in FACTS} | {"json": old.to_json()},
            "plan": plan.to_json(),
            "facts": len(new),
            "config": None if config is None else dict(config),
        }
        if is_sealed:  # key.json comes with the note: keys of no life on record refute a run
            folder.write_ring(ring, folder.coming_key_file)
            begin_life(ledger, ring, folder.ledger_file)
        ledger.rebind(EXTENDED, body, new)
        _apply(folder, ledger, plan)
    finally:
        ledger.close()
        del lock
    return folder


def begin_life(ledger: Ledger, ring: KeyRing, file: Path | None) -> None:
    """Let the ledger know that a process goes on under the newest keys of this ring."""
    ledger.begin_life(
        keys=ring.lives[-1].name,
        ring=ring.digest,
        version=__version__,
        torch=torch.__version__,
        **({} if file is None else identity(file)),
    )


def finish(folder: RunFolder) -> None:
    """Bring an extension to its end whose process was killed in between."""
    if not folder.is_started or not folder.ledger_file.exists():
        return
    with closing(Evidence(folder.ledger_file)) as evidence:
        notes = evidence.notes(EXTENDED) if evidence.is_made else []
        steps = sum(1 for _ in evidence.rows()) if evidence.is_made else 0
    if not notes:
        return
    old, new = folder.plan(), Plan.from_json(notes[-1]["plan"])
    if new != old or steps == int(notes[-1]["released"]):
        _lock = take(folder.path)  # nobody else is at it
        with closing(Ledger(old.guarded, path=folder.ledger_file, unit=old.unit)) as ledger:
            _apply(folder, ledger, new)


def _apply(folder: RunFolder, ledger: Ledger, plan: Plan) -> None:
    """Units, plan.json and the newest checkpoint as the ledger has them; does nothing twice."""
    folder.take_coming_ring(str(ledger.meta("key")))
    ledger.hold_to(plan.guarded)  # a stage that begins at a released step has first steps anew
    if folder.plan() != plan:
        write_bytes(folder.plan_file, plan.to_json().encode())
    note, found = ledger.notes(EXTENDED)[-1], checkpoint.saved(folder.checkpoints)
    if not found:
        raise InvalidInput(f"{folder.checkpoints} has no checkpoint any more; bring it back")
    path = found[-1]
    if note["config"] is not None:
        folder.write_config(note["config"])
    own = [one for one in ledger.notes("checkpoint") if one["step"] == checkpoint.step_of(path)]
    wrong = [checkpoint.changed(path, one["files"]) for one in own[-2:]]  # before or after a kill
    if not own or all(wrong):
        raise InvalidInput(
            f"{path / (wrong or ['.'])[-1]} is not what this run saved; bring it back"
        )
    state = checkpoint.read_state(path / "state.pt")
    if state["plan"] != plan.hash:
        if state["plan"] != note["before"]["plan"]:
            raise InvalidInput(f"{path} is of an earlier plan than this extension's; bring it back")
        _rewrite(path, state, ledger, plan)
    if is_half_extended(ledger, folder):
        folder.signature_file.unlink(missing_ok=True)  # it was about the run as it had ended
        ledger.note("files", files=folder.published())
        write_statement(folder, plan, ledger)


def _rewrite(path: Path, state: dict[str, Any], ledger: Ledger, plan: Plan) -> None:
    """The state of the last released step, to go on under the new plan."""
    facts, noise = ledger.bound(), state.get("noise")
    recipe = plan.strategy.recipe(plan.steps)
    if noise is not None and ledger.released in StepPlans.of(recipe).anew:
        noise = None  # a phase begins here, which needs nothing of the noise before
    if noise is not None:
        scale = float(facts["noise_scale"])
        noise = {**noise, "recipe": fingerprint(recipe), "horizon": plan.steps, "scale": scale}
        count = StepPlans.of(recipe).buffers  # a coming phase may have more of them, empty so far
        for name, shape in noise["shapes"].items() if count else ():
            own = noise["buffers"].get(name, torch.zeros(0, *shape, device="cpu"))
            more = torch.zeros(max(count - len(own), 0), *shape, device="cpu")
            noise["buffers"] = {**noise["buffers"], name: torch.cat([own, more])}
    size = state["batch_size"]
    if str(size) != facts["batch_size"]:
        size = json.loads(facts["batch_size"])
    identity = {"plan": plan.hash, "key": facts["key"], "batch_size": size}
    buffer = io.BytesIO()
    torch.save({**state, **identity, "noise": noise}, buffer)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    files = {**checkpoint.digests(path), "state.pt": digest}
    ledger.note("checkpoint", step=int(state["step"]), files=files)
    write_bytes(path / "state.pt", buffer.getvalue(), mode=0o600)


def _refuse(folder: RunFolder, ledger: Ledger, old: Plan, plan: Plan, *, is_sealed: bool) -> None:
    """One line for whatever cannot be extended."""
    released, facts = ledger.released, ledger.bound()
    if not released or plan.steps <= released:
        raise InvalidInput(
            f"{folder.path} has released {released} steps and the plan has {plan.steps}: there is "
            "nothing to extend"
        )
    if "forked" in facts:
        raise InvalidInput(f"{folder.path} was forked and may not go on itself; extend the fork")
    if reason := why_not(old, plan, released):
        raise InvalidInput(f"this plan does not extend the run in {folder.path}: {reason}")
    if not plan.participation.is_sampled:
        rows = ((row.step, row.units) for row in ledger.rows())
        own = ledger.identified_by == "fingerprints"
        for found in guard.violations(plan.guarded, UnitTable(), rows, by_content=own):
            raise InvalidInput(f"under this plan {found}; use a participation that has room for it")
    if facts.get("adaptive_clip") in COUNTS or any(name.startswith("table ") for name in facts):
        raise Unsupported(
            "a run with a sparse table, or that counts gradient norms, is not extended: "
            "its noise was shared out for the planned steps; fork it"
        )
    if is_sealed:
        _refuse_sealed(plan, released, facts)
    saved = checkpoint.saved(folder.checkpoints)[-1:]
    if not saved or checkpoint.step_of(saved[0]) != released:
        raise InvalidInput(
            f"the newest checkpoint in {folder.path} is not of step {released}, the last that was "
            "released; resume the run, save it, and extend it then"
        )
    for file in checkpoint.foreign(saved, ledger.notes("checkpoint")):
        raise InvalidInput(f"{file} is not what this run saved there; bring it back")


def _refuse_sealed(plan: Plan, released: int, facts: dict[str, str]) -> None:
    """Without its keys a run has no old draws, no secret samples, and no names of units."""
    if released not in StepPlans.of(plan.strategy.recipe(plan.steps)).anew:
        raise InvalidInput(
            "the keys of this run were destroyed when it was finished, so its noise cannot go on: "
            "give the new steps a phase of their own (a mechanism by name)"
        )
    starts_anew = isinstance(plan.participation, Stages) and released in dict(
        plan.participation.starts()
    )
    is_named = facts.get("identified_by") == "fingerprints" or facts.get("ids") == "names"
    # a stage of secret draws that begins here draws anew, and nothing of those before
    is_drawn = plan.participation.is_sampled and not (
        isinstance(plan.participation, DrawnStages)
        and released in dict(plan.participation.starts())
    )
    if is_drawn or "round_prints" in facts or facts.get("test_key") == "yes":
        raise Unsupported(
            "the keys of this run were destroyed when it was finished, and with them what its "
            "draws, rounds or test seed are known by; fork it, or keep_keys=True next time"
        )
    if is_named and not starts_anew:
        raise Unsupported(
            "the keys of this run were destroyed when it was finished, and units that were told "
            "apart by names or contents are not recognised without them; extend it with another "
            "number of steps per epoch (a stage in which everybody is new), or fork it"
        )


def why_not(old: Plan, new: Plan, released: int) -> str:
    """Why a plan does not go on where another one stands after so many steps; "" where it does.

    Guarantees: "" only where every decision but participation and strategy is the same, and the
    released rows of noise are equal. That the released steps keep the new participation is read off
    the ledger (`guard.violations`).
    """
    for name in ("noise_multiplier", "delta", "neighbours", "unit", "accountant"):
        if getattr(old, name) != getattr(new, name):
            return f"{name} was {getattr(old, name)} and is {getattr(new, name)} there"
    if new.steps < released:
        return f"it has {new.steps} steps, and {released} were released"
    if old.participation.is_sampled and not _keeps_draws(old.participation, new.participation):
        return f"what a unit may do was: {old.participation.words()}"
    before, after = (StepPlans.of(own.strategy.recipe(own.steps)) for own in (old, new))
    for t in range(released):
        if _form(before, t) != _form(after, t):
            return f"its noise differs from what was released in step {t}"
    return ""


def _keeps_draws(old: Participation, new: Participation) -> bool:
    """Whether draws go on: over more steps, or in further stages after whole ones."""
    if isinstance(new, DrawnStages):
        before = stages_of(old)
        return new.stages[: len(before)] == before
    return {**old.to_dict(), "steps": 0} == {**new.to_dict(), "steps": 0}


def _form(plans: StepPlans, t: int) -> tuple[Any, ...]:
    """What makes the noise of a step. Decays after an empty buffer, or of none, do not."""
    plan: StepPlan = plans.at(t)
    decays = [] if t in plans.anew else list(plan.decays)
    while decays and not decays[-1]:
        decays.pop()
    return plan.draws, plan.inner, plan.gain, plan.outer, plan.store, decays
