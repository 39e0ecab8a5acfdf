"""The run folder: a model together with the evidence for its guarantee.

    log.jsonl         header, starts, steps with their units, checkpoints, end (`log`)
    plan.json         every privacy decision, canonical form
    statement.json    the guarantee, the number of steps, the newest link of the log
    secret.json       the secret (mode 0600); whoever reads it can remove the noise
    metrics.jsonl     what training saw, from released values only
    config.json       how the run was started (free form)
    checkpoints/step-00000120/model.safetensors   parameters and buffers
                              state.pt            optimizer, counters
                              secret.pt           noise buffers, random states (mode 0600)

Every file is replaced atomically. A checkpoint is written into a hidden folder, flushed, and
renamed: it is complete or absent. Only plain tensors and values are stored, so that loading runs no
code. When the run ends, secret.json and every secret.pt are removed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from noshuffle.errors import InvalidInput, instance_of, utf8
from noshuffle.plan import Plan
from noshuffle.release.files import file_digest, finite, make_folder, sync, write_bytes, write_json

_NAME = re.compile(r"^step-(\d{8}|[1-9]\d{8,})$")  # one name for a step
#: What may lie in a folder before a run begins there.
_BEFORE = ("config.json", "checkpoints", "log.jsonl", "plan.json", "secret.json")
#: What lies in a folder only after the header of its log was written.
_AFTER = ("statement.json", "metrics.jsonl")
#: How many runs one line names, and how many checkpoints are kept.
_NAMED, _KEPT = 5, 2
#: Names of the files of a checkpoint, each with its SHA-256.
Digests = dict[str, str]


@dataclass(frozen=True)
class RunFolder:
    """Names and atomic access; nothing is written before a run begins."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        instance_of((str, os.PathLike), **{"a run folder": path})
        # A process may change its folder while a run goes on, whose files then stay together.
        object.__setattr__(self, "path", Path(path).absolute())

    @staticmethod
    def of(run: RunFolder | str | Path) -> RunFolder:
        """However it was given."""
        return run if isinstance(run, RunFolder) else RunFolder(run)

    plan_file = property(lambda self: self.path / "plan.json")
    log_file = property(lambda self: self.path / "log.jsonl")
    statement_file = property(lambda self: self.path / "statement.json")
    secret_file = property(lambda self: self.path / "secret.json")
    metrics_file = property(lambda self: self.path / "metrics.jsonl")
    config_file = property(lambda self: self.path / "config.json")
    signature_file = property(lambda self: self.path / "signature.json")
    checkpoints = property(lambda self: self.path / "checkpoints")

    # -- beginning and end ---------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether a run lives here: its log has a header."""
        return bool(self.log_file.exists() and self.log_file.stat().st_size)

    def plan(self) -> Plan:
        if not self.plan_file.exists():
            raise InvalidInput(self._not_a_run())
        try:
            return Plan.from_json(self.plan_file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{self.plan_file} is not text: {error}") from None

    def refuse_strangers(self) -> None:
        """Raise where a run cannot begin: the log of one is gone, or others' files are here.

        A process that was killed while it began a run leaves at most secret, plan and a log without
        a header: nothing was released, so the next one begins there.
        """
        utf8(**{"the name of a run folder": self.path})  # reports and safetensors need it
        names = sorted(p.name for p in self.path.iterdir()) if self.path.exists() else []
        if any(name in names for name in _AFTER) or self.saved():
            raise InvalidInput(
                f"{self.log_file} is missing or empty, and the files beside it are of a run that "
                "had one; bring the log back, or begin a new run from the model in a new folder"
            )
        strangers = [name for name in names if name not in _BEFORE and not name.startswith(".")]
        if strangers:
            raise InvalidInput(f"{self.path} is not empty ({strangers[0]}); use a new folder")

    def remove_secrets(self) -> None:
        """Overwrite and remove whatever can take noise off, half-written copies too."""
        secrets = [*self.path.glob("secret.json"), *self.path.glob(".secret.json.*")]
        secrets += [*self.checkpoints.glob("*/secret.pt"), *self.checkpoints.glob(".*/secret.pt")]
        secrets += self.checkpoints.glob("*/.secret.pt.*")
        secrets += self.checkpoints.glob(".*/.secret.*")
        for file in sorted(set(secrets)):
            with file.open("r+b") as handle:
                handle.write(bytes(file.stat().st_size))
                handle.flush()
                os.fsync(handle.fileno())
            file.unlink()
            sync(file.parent)

    def missing(self) -> list[Path]:
        """The folders that would be made for a run here, innermost first."""
        return [folder for folder in (self.path, *self.path.parents) if not folder.exists()]

    def withdraw(self, made: list[Path]) -> None:
        """Take back what a run that released nothing has written; `made`: see `missing`."""
        self.remove_secrets()
        for file in (self.plan_file, self.statement_file, self.log_file):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # somebody has put something into it
            for folder in made:
                folder.rmdir()

    def _not_a_run(self) -> str:
        message = f"{self.path} is not a run folder: it has no plan.json"
        with suppress(OSError):
            runs = sorted(p.parent for p in [*self.path.glob("*/plan.json")])
            if runs:
                listed = ", ".join(map(str, runs[:_NAMED]))
                return f"{message}, but holds runs: name one of {listed}"
        return message

    # -- checkpoints ---------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        *,
        secret: Mapping[str, Any],
        note: Callable[[Digests], None],
    ) -> Path:
        """Write a state (with its "step" and "model") and drop all but the last two.

        `note` hears of the digests of what is not secret before the checkpoint is there: one that
        nobody noted is not ours. Digests of secrets would let guesses of them be checked.
        """
        step = int(state["step"])
        target: Path = self.checkpoints / f"step-{step:08d}"
        temporary = self.checkpoints / f".step-{step:08d}.{os.getpid()}.tmp"
        for pattern in (".step-*.tmp", ".old-*"):  # what a crash left; a run has one writer
            for unfinished in self.checkpoints.glob(pattern):
                shutil.rmtree(unfinished)
        temporary.mkdir(parents=True)
        model = {name: value.detach().cpu().clone() for name, value in state["model"].items()}
        try:
            save_file(model, temporary / "model.safetensors")
        except SafetensorError as error:  # such as a full disk, in words of its own
            raise OSError(f"{temporary / 'model.safetensors'}: {error}") from None
        sync(temporary / "model.safetensors")
        rest = {name: value for name, value in state.items() if name != "model"}
        write_bytes(temporary / "state.pt", _bytes_of(rest))
        note({file.name: file_digest(file) for file in sorted(temporary.iterdir())})
        write_bytes(temporary / "secret.pt", _bytes_of(secret), mode=0o600)
        if target.exists():
            _remove(target)
        os.replace(temporary, target)
        sync(self.checkpoints)
        for old in self.saved()[:-_KEPT]:
            _remove(old)
        return target

    def saved(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.checkpoints.exists():
            return []
        return sorted((p for p in self.checkpoints.iterdir() if _NAME.match(p.name)), key=step_of)

    # -- statement, metrics, configuration -----------------------------------------------------

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
                if isinstance(record := json.loads(line), dict):
                    yield record

    def forget_metrics_after(self, step: int) -> None:
        """Drop lines from beyond `step`: what they were measured on was lost."""
        if self.metrics_file.exists():
            metrics = [m for m in self.metrics() if m.get("step", 0) <= step]
            text = "".join(json.dumps(m, sort_keys=True) + "\n" for m in metrics)
            write_bytes(self.metrics_file, text.encode())


def digests(path: Path) -> Digests:
    """Of the files of a checkpoint, but for the secret one."""
    return {
        file.name: file_digest(file)
        for file in sorted(path.iterdir())
        if file.name != "secret.pt" and not file.name.startswith(".")
    }


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def load(path: Path, *, with_secret: bool = False) -> dict[str, Any]:
    """Read a checkpoint back; one clear line where a file of it is missing or damaged."""
    utf8(**{"the path of a checkpoint": path})
    names = ["state.pt", "model.safetensors", *(["secret.pt"] if with_secret else [])]
    for name in names:
        if not (path / name).exists():
            raise InvalidInput(f"{path} is not a checkpoint: {path / name} is missing")
    try:
        state = read_state(path / "state.pt")
        state["model"] = load_file(path / "model.safetensors")
        if with_secret:
            state["secret"] = read_state(path / "secret.pt")
    except OSError as error:
        raise InvalidInput(
            f"the checkpoint {path} could not be read ({error.strerror or error}); look after the "
            "permissions of its files and the disk, then go on"
        ) from None
    except (UnpicklingError, SafetensorError) as error:
        raise InvalidInput(
            f"the checkpoint {path} is damaged ({error}); bring its files back, or "
            "remove it to go on from the one before"
        ) from None
    return state


def read_state(file: Path) -> dict[str, Any]:
    """A saved state; UnpicklingError where the file holds none, whatever torch makes of it.

    Tensors and plain values only: reading runs no code.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # one bit can raise KeyError, UnicodeDecodeError, AssertionError, …
        raise UnpicklingError(type(error).__name__) from error
    if not isinstance(state, dict):
        raise UnpicklingError(f"it holds a {type(state).__name__}")
    return state


def load_model(run: RunFolder | str | Path, model: nn.Module) -> int:
    """The parameters of a run's newest checkpoint; returns the number of steps behind them."""
    folder = RunFolder.of(run)
    checkpoints = folder.saved()
    if not checkpoints:
        raise InvalidInput(
            f"{folder.path} has no checkpoint to load a model from; private.save() writes one"
        )
    state = load(checkpoints[-1])
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:  # its lines say which names or shapes differ
        line = " ".join(str(error).split())[:300]
        raise InvalidInput(
            f"the model is not the one of {folder.path}; build the same modules ({line})"
        ) from None
    return int(state["step"])


def _bytes_of(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def _remove(path: Path) -> None:
    """Remove one of our own checkpoint folders; hidden first, so nobody reads half of it."""
    hidden = path.with_name(f".old-{path.name.lstrip('.')}.{os.getpid()}")
    os.replace(path, hidden)
    shutil.rmtree(hidden)
