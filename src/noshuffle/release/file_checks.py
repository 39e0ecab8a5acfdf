"""What the files of a run folder must show: each check yields the sentences that refute it.

    checkpoints     equal to their digests in the ledger; their noise state is of this plan
    other files     equal to their digests in the ledger (config, metrics, report, …); a file that
                    has only grown since is named as not checked
    ancestors.json  what every note of the ledger says of it, not the newest alone

Files that may not be read, and other files that are gone or that the ledger does not know of, are
noted in `Found` as not checked. The ledger itself: `evidence_checks`. State: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

from noshuffle.noise.step_plan import fingerprint as recipe_name
from noshuffle.release import checkpoint
from noshuffle.release.evidence_checks import Found
from noshuffle.release.files import file_digest, has_grown
from noshuffle.release.unfinished import is_half_sealed

Made = TypeVar("Made")
#: A file that is gone, or something else in its place, is evidence; one that may not be read, none.
NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


def _unless_unreadable(
    found: Found, path: Path, read: Callable[..., Made], *given: Any
) -> Made | None:
    """What `read` makes of a file; None, and noted as not checked, where it cannot be read."""
    try:
        return read(*given)
    except NOT_THERE:
        raise
    except OSError as error:
        where = path.relative_to(found.run.path)
        found.unchecked.append(f"{where}, which could not be read ({error.strerror or error})")
        return None


def checkpoint_files(found: Found) -> Iterator[str]:
    """Files of checkpoints against their digests in the ledger."""
    noted = {int(note["step"]): note["files"] for note in found.evidence.notes("checkpoint")}
    paths = {checkpoint.step_of(path): path for path in checkpoint.saved(found.run.checkpoints)}
    for step, path in paths.items():
        if step not in noted:
            yield f"the ledger does not know of the checkpoint {path.name}"
        elif name := _unless_unreadable(found, path, checkpoint.changed, path, noted[step]):
            line = f"checkpoints/{path.name}/{name}"
            if name == "state.pt" and is_half_sealed(found.evidence, found.run):
                found.unchecked.append(f"{line}, which a killed seal has left (seal it once more)")
            else:
                yield f"{line} is not what was saved"
    if noted and max(noted) not in paths:
        found.unchecked.append(f"the checkpoint of step {max(noted)}, which is not in the folder")


def other_files(found: Found) -> Iterator[str]:
    """The other files of the folder against their digests in the ledger; plan.json was compared."""
    run = found.run
    notes = found.evidence.notes("files")
    told = notes[-1]["files"] if notes else {}
    for name, (digest, size) in told.items():
        path = run.path / name
        if path == run.plan_file:
            continue
        if path == run.ancestors_file:
            continue  # by all notes (`ancestors`)
        if not path.exists():
            found.unchecked.append(f"{name}, which is not in the folder any more")
        elif _unless_unreadable(found, path, file_digest, path) not in (digest, None):
            if has_grown(path, digest, size):
                line = f"lines of {name} that came after the last row of the ledger"
                found.unchecked.append(line)
            else:
                yield f"{name} is not what the ledger says"
    for name in (*(file.name for file in run.files()), *run.unknown()):
        if name not in told and name != run.plan_file.name:
            found.unchecked.append(f"{name}, which the ledger does not know of")


def ancestors(found: Found) -> Iterator[str]:
    """What a run was forked from is written once: every note of files must know the same of it.

    By the newest alone, whoever removes the file and seals the run would have a smaller ε proved.
    """
    file = found.run.ancestors_file
    noted = found.evidence.digests_of(file.name)
    if noted and not file.exists():
        yield f"{file.name} is not in the folder any more: the runs that this one adds up with"
    elif noted and {_unless_unreadable(found, file, file_digest, file) or min(noted)} != noted:
        yield f"{file.name} is not what the ledger says"


def noise_state(found: Found) -> Iterator[str]:
    """The noise that a saved state goes on with must be that of the plan."""
    saved, plan = checkpoint.saved(found.run.checkpoints), found.plan
    if not saved:
        return
    where = saved[-1].name
    try:
        state = _unless_unreadable(found, saved[-1], checkpoint.read_state, saved[-1] / "state.pt")
        if state is None:
            return
        noise = state.get("noise")
        bound = ("plan", "key", "batch_size")
        told: dict[str, str] = {name: str(state[name]) for name in bound if name in state}
    except (*NOT_THERE, UnpicklingError) as error:
        yield f"{where}/state.pt cannot be read ({type(error).__name__})"
        return
    for name, said in told.items():
        if said != found.facts.get(name):
            yield f"{where} was saved with {name} = {said}, the ledger says {found.facts.get(name)}"
    own = {
        "recipe": recipe_name(plan.strategy.recipe(plan.steps)),
        "scale": found.facts.get("noise_scale"),
        "horizon": plan.steps,
    }
    for name, planned in own.items():
        held = noise.get(name) if isinstance(noise, dict) else noise
        if noise is not None and str(held) != str(planned):  # whatever the file holds
            yield f"{where} goes on with noise of another {name} than the plan's"


#: Those that read the ledger; `noise_state` needs its facts alone.
FILE_CHECKS = (checkpoint_files, other_files, ancestors)
