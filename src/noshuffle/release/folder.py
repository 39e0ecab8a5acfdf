"""The run folder: a model together with the evidence for its guarantee.

    plan.json         every privacy decision, canonical form
    statement.json    the guarantee, the number of released steps, the plan hash
    ledger.sqlite     released steps and who took part
    metrics.jsonl     what training saw, from released values only
    config.json       how the run was started (free form)
    ancestors.json    the runs it was forked from, if any
    checkpoints/      whole states, and `key.json` (mode 0600): who reads it can remove the noise

Every file is replaced atomically. A folder belongs to one plan and one ring of keys, and has one
live process (`folder_lock`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput, instance_of, utf8
from noshuffle.plan import Plan
from noshuffle.release import checkpoint
from noshuffle.release.files import (
    file_digest,
    finite,
    make_folder,
    read_json,
    sync,
    write_bytes,
    write_json,
)
from noshuffle.release.keys import KeyRing
from noshuffle.release.other_folders import not_a_run
from noshuffle.release.spending import Ancestor

#: The lock, and what a crash leaves of an atomic write or removal, by the process that it was of.
_PASSING = re.compile(r"\.(lock|.+\.\d+\.tmp|old-step-.+\.\d+)$")


class Inside:
    """A file of a run folder, by its name there."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, folder: RunFolder, kind: object = None) -> Path:
        return folder.path.joinpath(*self._names)


@dataclass(frozen=True)
class RunFolder:
    """Names and atomic access; nothing is written before `begin`."""

    path: Path

    plan_file = Inside("plan.json")
    statement_file = Inside("statement.json")
    ledger_file = Inside("ledger.sqlite")
    metrics_file = Inside("metrics.jsonl")
    config_file = Inside("config.json")
    ancestors_file = Inside("ancestors.json")
    signature_file = Inside("signature.json")
    checkpoints = Inside("checkpoints")
    key_file = Inside("checkpoints", "key.json")

    def __init__(self, path: str | Path) -> None:
        instance_of((str, os.PathLike), **{"a run folder": path})
        # A process may change its folder while a run goes on, whose files then stay together.
        object.__setattr__(self, "path", Path(path).absolute())

    @staticmethod
    def of(run: RunFolder | str | Path) -> RunFolder:
        """However it was given."""
        return run if isinstance(run, RunFolder) else RunFolder(run)

    @property
    def is_started(self) -> bool:
        """Whether a run lives here already."""
        return self.plan_file.exists()

    def plan(self) -> Plan:
        if not self.is_started:
            raise InvalidInput(not_a_run(self.path))
        try:
            return Plan.from_json(self.plan_file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{self.plan_file} is not text: {error}") from None

    def begin(self, plan: Plan, ring: KeyRing) -> None:
        """Start a run: keys first, then the plan, by which it is known as a run.

        Guarantees: the keys are on the disk, readable by their owner only, before this returns; a
        folder with another run or somebody else's files is refused.
        """
        self.refuse_strangers()
        make_folder(self.checkpoints)
        self.write_ring(ring)
        write_bytes(self.plan_file, plan.to_json().encode())

    def withdraw(self, made: Iterable[Path] = ()) -> None:
        """Take back what `begin` wrote, ledger and statement of a run that released nothing.

        The plan goes first: killed in between, what is left is known as no run. `made`: see
        `clear`.
        """
        self.plan_file.unlink(missing_ok=True)
        for end in ("", "-wal", "-shm", "-journal"):
            self.ledger_file.with_name(self.ledger_file.name + end).unlink(missing_ok=True)
        self.statement_file.unlink(missing_ok=True)
        self.clear(made)

    def clear(self, made: Iterable[Path] = ()) -> None:
        """Remove the keys, and the folders that were made for a run (innermost first) if nobody
        uses them."""
        self.destroy_keys()
        with suppress(OSError):  # somebody has put something into it
            if self.checkpoints.exists():
                self.checkpoints.rmdir()
            if made := tuple(made):
                (self.path / ".lock").unlink(missing_ok=True)
            for each in made:
                each.rmdir()

    def refuse_strangers(self) -> None:
        """Raise where a run cannot begin: there is one, or somebody else's files are."""
        utf8(**{"the name of a run folder": self.path})  # reports and safetensors need it
        found = sorted(p.name for p in self.path.iterdir()) if self.path.exists() else []
        ours = ("checkpoints", "config.json", "ancestors.json")
        strangers = [name for name in found if name not in ours and not name.startswith(".")]
        if self.is_started or strangers:
            what = "plan.json" if self.is_started else strangers[0]
            raise InvalidInput(f"{self.path} is not empty ({what}); use a new folder")

    def missing(self) -> list[Path]:
        """The folders that would be made for a run here, innermost first."""
        return [each for each in (self.path, *self.path.parents) if not each.exists()]

    def write_ring(self, ring: KeyRing) -> None:
        """Keep the keys; durable when this returns."""
        write_json(self.key_file, ring.to_dict(), mode=0o600)

    def ring(self) -> KeyRing:
        """The keys; one clear line where they are gone."""
        try:
            return KeyRing.from_dict(read_json(self.key_file))
        except FileNotFoundError:
            raise InvalidInput(
                f"{self.key_file} is missing (was the run sealed? a finished one is when it is "
                "closed); without its keys a run cannot go on, only be forked; another run needs "
                "a new folder"
            ) from None
        except (AttributeError, InvalidInput) as error:
            raise InvalidInput(f"{self.key_file} cannot be read: {error}") from None

    def destroy_keys(self) -> None:
        """Overwrite and remove the keys. What a file system or a backup keeps elsewhere stays.

        Also those that a process was writing when it was killed (`files.write_bytes`). key.json
        gets such a name first: killed in between, it would be a file of zeros that refutes the run.
        """
        if self.key_file.exists():
            self.key_file.replace(self.key_file.with_name(f".{self.key_file.name}.gone.tmp"))
            sync(self.checkpoints)
        found = list(self.checkpoints.glob(f".{self.key_file.name}.*.tmp"))
        for path in found:
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        if found:
            sync(self.checkpoints)

    def ancestors(self) -> tuple[Ancestor, ...]:
        """The runs this one was forked from, oldest first."""
        if not self.ancestors_file.exists():
            return ()
        return tuple(Ancestor.from_dict(record) for record in read_json(self.ancestors_file))

    def files(self) -> list[Path]:
        """The files beside ledger, statement and checkpoints."""
        ledger = self.ledger_file.name
        apart = {self.statement_file.name, self.signature_file.name}
        apart |= {ledger + end for end in ("", "-wal", "-shm", "-journal")}
        return [
            file
            for file in sorted(self.path.iterdir())
            if file.is_file() and not file.name.startswith(".") and file.name not in apart
        ]

    def published(self) -> dict[str, list[Any]]:
        """Digest and size of the files beside ledger, statement and checkpoints."""
        return {file.name: [file_digest(file), file.stat().st_size] for file in self.files()}

    def unknown(self) -> list[str]:
        """What lies in the folder and is not of its form: other folders, hidden files, strangers
        among the checkpoints. Nobody notes their digests."""
        found = [
            file.name
            for file in self.path.iterdir()
            if (file.name.startswith(".") and not _PASSING.match(file.name))
            or (file != self.checkpoints and not file.is_file())
        ]
        if self.checkpoints.is_dir():
            saved = checkpoint.saved(self.checkpoints)
            found += [
                f"checkpoints/{file.name}"
                for file in self.checkpoints.iterdir()
                if file not in (self.key_file, *saved) and not _PASSING.match(file.name)
            ]
        return sorted(found)

    def write_statement(self, record: Mapping[str, Any]) -> None:
        write_json(self.statement_file, dict(record))

    def write_config(self, record: Mapping[str, Any]) -> None:
        make_folder(self.path)
        write_json(self.config_file, dict(record))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line of metrics; `step` names the number of steps it was taken after.

        A number that is none (of a model that ran away) is null there: nothing stops for it.
        """
        line = json.dumps(finite(dict(record)), sort_keys=True, allow_nan=False) + "\n"
        handle = os.open(self.metrics_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(line.encode())

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Every complete line; one torn by a crash, or damaged, is skipped."""
        if not self.metrics_file.exists():
            return
        for line in self.metrics_file.read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(line), dict):
                    yield found

    def forget_metrics_after(self, step: int) -> None:
        """Drop lines from beyond `step`: those steps are about to be replayed."""
        if self.metrics_file.exists():
            kept = [m for m in self.metrics() if m.get("step", 0) <= step]
            text = "".join(json.dumps(m, sort_keys=True) + "\n" for m in kept)
            write_bytes(self.metrics_file, text.encode())
