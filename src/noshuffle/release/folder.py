"""The run folder: a model together with the evidence for its guarantee.

    plan.json         every privacy decision, canonical form
    statement.json    the guarantee, the number of released steps, the plan hash
    ledger.sqlite     released steps and who took part
    metrics.jsonl     what training saw, from released values only
    config.json       how the run was started (free form)
    ancestors.json    the runs it was forked from, if any
    checkpoints/      whole states, and `key.json` (mode 0600): who reads it can remove the noise

Every file is replaced atomically. A folder belongs to one plan and one ring of keys; anything else
is refused rather than overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput, instance_of
from noshuffle.plan import Plan
from noshuffle.release.files import file_digest, read_json, sync_folder, write_bytes, write_json
from noshuffle.release.keys import KeyRing
from noshuffle.release.spending import Ancestor


@dataclass(frozen=True)
class RunFolder:
    """Names and atomic access; nothing is written before `begin`."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        instance_of((str, os.PathLike), **{"a run folder": path})
        object.__setattr__(self, "path", Path(path))

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def statement_file(self) -> Path:
        return self.path / "statement.json"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def ancestors_file(self) -> Path:
        return self.path / "ancestors.json"

    @property
    def signature_file(self) -> Path:
        return self.path / "signature.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def key_file(self) -> Path:
        return self.checkpoints / "key.json"

    @property
    def is_started(self) -> bool:
        """Whether a run lives here already."""
        return self.plan_file.exists()

    def plan(self) -> Plan:
        """The plan of this run."""
        if not self.is_started:
            raise InvalidInput(f"{self.path} is not a run folder: it has no plan.json")
        return Plan.from_json(self.plan_file.read_text(encoding="utf-8"))

    def begin(self, plan: Plan, ring: KeyRing) -> None:
        """Start a run: keys first, then the plan, by which it is known as a run.

        Guarantees: the keys are on the disk, readable by their owner only, before this returns; a
        folder with another run or somebody else's files is refused.
        """
        strangers = self._strangers()
        if self.is_started or strangers:
            what = "plan.json" if self.is_started else strangers[0]
            raise InvalidInput(f"{self.path} is not empty ({what}); use a new folder")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.write_ring(ring)
        write_bytes(self.plan_file, plan.to_json().encode())

    def _strangers(self) -> list[str]:
        if not self.path.exists():
            return []
        ours = {"checkpoints", "config.json", "ancestors.json"}
        names = sorted(p.name for p in self.path.iterdir())
        return [name for name in names if name not in ours and not name.startswith(".")]

    def write_ring(self, ring: KeyRing) -> None:
        """Keep the keys; durable when this returns."""
        write_json(self.key_file, ring.to_dict(), mode=0o600)

    def ring(self) -> KeyRing:
        """The keys; one clear line where they are gone."""
        try:
            return KeyRing.from_dict(read_json(self.key_file))
        except FileNotFoundError:
            raise InvalidInput(
                f"{self.key_file} is missing (was the run sealed?); without its keys a run cannot "
                "go on, only be forked"
            ) from None
        except (AttributeError, json.JSONDecodeError, InvalidInput) as error:
            raise InvalidInput(f"{self.key_file} cannot be read: {error}") from None

    def destroy_keys(self) -> None:
        """Overwrite and remove the keys. What a file system or a backup keeps elsewhere stays."""
        if not self.key_file.exists():
            return
        with self.key_file.open("r+b") as file:
            file.write(bytes(self.key_file.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        self.key_file.unlink()
        sync_folder(self.checkpoints)

    def ancestors(self) -> tuple[Ancestor, ...]:
        """The runs this one was forked from, oldest first."""
        if not self.ancestors_file.exists():
            return ()
        return tuple(Ancestor.from_dict(record) for record in read_json(self.ancestors_file))

    def published(self) -> dict[str, list[Any]]:
        """Digest and size of the files beside ledger, statement and checkpoints."""
        ledger = self.ledger_file.name
        apart = {self.statement_file.name, self.signature_file.name}
        apart |= {ledger + end for end in ("", "-wal", "-shm", "-journal")}
        return {
            file.name: [file_digest(file), file.stat().st_size]
            for file in sorted(self.path.iterdir())
            if file.is_file() and not file.name.startswith(".") and file.name not in apart
        }

    def unknown(self) -> list[str]:
        """What lies in the folder and is not of its form: other folders, hidden files, strangers
        among the checkpoints. Nobody notes their digests."""
        found = [
            file.name
            for file in self.path.iterdir()
            if (file.name.startswith(".") and not file.name.endswith((".lock", ".tmp", ".part")))
            or (file.is_dir() and file != self.checkpoints)
        ]
        if self.checkpoints.is_dir():
            found += [
                f"checkpoints/{file.name}"
                for file in self.checkpoints.iterdir()
                if file != self.key_file and not file.name.startswith(("step-", ".step-", ".old-"))
            ]
        return sorted(found)

    def write_statement(self, record: Mapping[str, Any]) -> None:
        """Replace statement.json."""
        write_json(self.statement_file, dict(record))

    def write_config(self, record: Mapping[str, Any]) -> None:
        """Replace config.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config_file, dict(record))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line of metrics; `step` names the number of steps it was taken after."""
        line = json.dumps(dict(record), sort_keys=True, allow_nan=False) + "\n"
        handle = os.open(self.metrics_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(line.encode())

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Every complete line; one torn by a crash is skipped."""
        if not self.metrics_file.exists():
            return
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    def forget_metrics_after(self, step: int) -> None:
        """Drop lines from beyond `step`: those steps are about to be replayed."""
        if self.metrics_file.exists():
            kept = [m for m in self.metrics() if m.get("step", 0) <= step]
            text = "".join(json.dumps(m, sort_keys=True) + "\n" for m in kept)
            write_bytes(self.metrics_file, text.encode())
