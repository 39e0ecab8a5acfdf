"""Checkpoints: the whole state of a run, written atomically, resumed bit for bit.

    checkpoints/step-00000120/model.safetensors   parameters and buffers
                              state.pt            optimizer, noise buffers, random state, counters
    checkpoints/key.json                          the secrets (mode 0600), once per run

A checkpoint is written into a hidden folder, flushed, and renamed: it is complete or absent. Only
plain tensors and values are stored, so it loads with `weights_only=True` and runs no code. What
lies after the last checkpoint is replayed from the same batches, which costs no privacy: the
ledger sees to it.
"""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from noshuffle.errors import InvalidInput, utf8
from noshuffle.release.files import file_digest, sync, write_bytes

_NAME = re.compile(r"^step-(\d{8}|[1-9]\d{8,})$")  # one name for a step
_LEFT = re.compile(r"^\.(model\.safetensors|state\.pt)\.\d+\.tmp$")  # of `files.write_bytes`
#: A random value in state.pt until the run is sealed. The ledger keeps the digest of state.pt for
#: good: without it, what a seal removes could be guessed, and a guess checked by that digest.
SALT = "salt"
#: Names of the files of a checkpoint, each with its SHA-256.
Digests = dict[str, str]


def save(
    state: dict[str, Any],
    folder: Path,
    *,
    keep: int = 2,
    note: Callable[[Digests], None] = lambda digests: None,
) -> Path:
    """Write a state (with its "step" and "model") and drop all but the last `keep`.

    `note` hears of the files before they are there: a checkpoint that nobody noted is not ours.
    """
    step = int(state["step"])
    target = folder / f"step-{step:08d}"
    temporary = folder / f".step-{step:08d}.{os.getpid()}.tmp"
    sweep(folder)
    temporary.mkdir(parents=True)
    model = {name: value.detach().cpu().clone() for name, value in state["model"].items()}
    try:
        save_file(model, temporary / "model.safetensors")
    except SafetensorError as error:  # such as a full disk, in words of its own
        raise OSError(f"{temporary / 'model.safetensors'}: {error}") from None
    sync(temporary / "model.safetensors")
    buffer = io.BytesIO()
    rest = {key: value for key, value in state.items() if key != "model"}
    torch.save({**rest, SALT: secrets.token_hex(32)}, buffer)
    write_bytes(temporary / "state.pt", buffer.getvalue(), mode=0o600)
    if target.exists():  # a replay came past here again; the old one is as good
        _remove(temporary)
    else:
        note(digests(temporary))
        os.replace(temporary, target)
        sync(folder)
    for old in saved(folder)[:-keep]:
        _remove(old)
    return target


def digests(path: Path) -> Digests:
    """Of the files of a checkpoint; what a crash left of an atomic write is none of them."""
    files = sorted(set(path.iterdir()) - set(leftovers(path)))
    return {file.name: file_digest(file) for file in files}


def leftovers(path: Path) -> list[Path]:
    return [file for file in path.glob(".*.tmp") if _LEFT.match(file.name)]


def changed(path: Path, noted: Digests) -> str:
    """The name of a file that is not what was noted, or "" where all are."""
    have = digests(path)
    names = sorted(have.keys() | noted.keys())
    return next((name for name in names if have.get(name) != noted.get(name)), "")


def foreign(paths: Iterable[Path], notes: Iterable[Mapping[str, Any]]) -> Iterator[Path]:
    """Files of these checkpoints that are not what a ledger's notes say."""
    noted = {note["step"]: note["files"] for note in notes}
    for path in paths:
        if name := changed(path, noted.get(step_of(path), {})):
            yield path / name


def step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def saved(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; leftovers of a crash are not among them."""
    if not folder.exists():
        return []
    found = [(int(m.group(1)), p) for p in folder.iterdir() if (m := _NAME.match(p.name))]
    return [path for _, path in sorted(found)]


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint back; one clear line where a file of it is missing or damaged."""
    utf8(**{"the path of a checkpoint": path})
    for name in ("state.pt", "model.safetensors"):
        if not (path / name).exists():
            raise InvalidInput(f"{path} is not a checkpoint: {path / name} is missing")
    try:
        state = read_state(path / "state.pt")
        state["model"] = load_file(path / "model.safetensors")
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


def sweep(folder: Path) -> None:
    """Remove what crashes left half-written or half-removed (a run has one writer at a time)."""
    for left in [*folder.glob(".step-*.tmp"), *folder.glob(".old-*")]:
        shutil.rmtree(left)
    for path in saved(folder):
        for left in leftovers(path):
            left.unlink()


def _remove(path: Path) -> None:
    """Remove one of our own checkpoint folders; hidden first, so nobody reads half of it."""
    hidden = path.with_name(f".old-{path.name.lstrip('.')}.{os.getpid()}")
    os.replace(path, hidden)
    shutil.rmtree(hidden)
