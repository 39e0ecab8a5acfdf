"""The folder of a run as commands begin it and come back to it, and the settings that lie there.

    dated            a name of this second for a new one
    begun            it is this process's alone, holds its settings, and is taken away if refused
    kept_settings    what config.json holds, for the command that made it
    read_toml        what a person wrote down for a new one

State: files.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.cli.words import quoted
from noshuffle.errors import InvalidInput, utf8

if TYPE_CHECKING:
    from noshuffle.release.folder import RunFolder

#: In config.json: that the run was begun with a budget, or to add up with another one.
_DRAWS, _FORKS = "draws_on_budget", "is_fork"


def read_toml(path: Path, *, table: str) -> dict[str, Any]:
    """Settings from a TOML file: top-level keys, or a table of that name, [train]."""
    try:
        record = tomllib.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise InvalidInput(f"--config {path} could not be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"--config {path} is not TOML: {error}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"--config {path} is not TOML: it is not UTF-8 text") from None
    found = record.get(table, record)
    if not isinstance(found, dict):
        raise InvalidInput(f"--config {path}: {table} must be a table, [{table}]; got {found!r}")
    return dict(found)


def kept_settings(run: Path, *, kind: str, budget: Path | None) -> dict[str, Any]:
    """The settings that a run folder was started with, if `noshuffle KIND` made it.

    A run that was to draw on a budget goes on with one: a process may have been killed before its
    log said so.
    """
    file = run / "config.json"
    if not file.is_file():
        raise InvalidInput(f"{run} is not a run folder: it has no config.json")
    try:
        kept = json.loads(file.read_text(encoding="utf8"))
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise InvalidInput(f"{file} does not hold settings; the run folder is damaged")
    made_by = kept.pop("kind", "train")
    if made_by == "fit":
        raise InvalidInput(f"{run} was made by noshuffle fit, which is not resumed; start anew")
    if made_by != kind:
        again = f"noshuffle {made_by} --resume {quoted(run)}"
        raise InvalidInput(f"{run} is another kind of run; use: {again}")
    if "run_folder" in kept:  # a setting of the app in examples/federated
        raise InvalidInput(f"{run} was begun by an app on Flower; go on with the app's flwr run")
    if kept.pop(_DRAWS, False) and budget is None:
        raise InvalidInput(f"{run} was begun with a budget; give --budget FOLDER again")
    if kept.pop(_FORKS, False) and not (run / "log.jsonl").exists():
        raise InvalidInput(
            f"{run} was cut off before it knew of the run that it was to add up with; give --fork "
            "and another --out"
        )
    return kept


def dated(name: str) -> Path:
    """A folder of this second that is not there yet."""
    path = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    others = (path.with_name(f"{path.name}-{i}") for i in count(2))
    return next(one for one in chain([path], others) if not one.exists())


def check_new_folder(out: Path, *, resumes: bool = True) -> None:
    """Refuse to begin a run in a file or in a folder that holds something."""
    utf8(out=out)
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out must be a new folder, {out} is a file; use another --out")
    if out.exists() and any(out.iterdir()):
        is_run = resumes and (out / "config.json").exists()
        again = f"go on with --resume {quoted(out)}, or " if is_run else ""
        raise InvalidInput(f"{out} is not empty; {again}use another --out")


def check_fork(fork_of: Path | None, *, resume: Path | None) -> None:
    """Refuse a fork of no run, and one of a run that goes on."""
    if fork_of is not None and resume is not None:
        raise InvalidInput("--fork begins a new run, and --resume goes on with one; give one")
    if fork_of is not None and not (fork_of / "plan.json").is_file():
        raise InvalidInput(f"--fork: {fork_of} is not a run folder: it has no plan.json")


@contextmanager
def begun(
    home: RunFolder, settings: dict[str, Any], *, draws_on_budget: bool, is_fork: bool = False
) -> Iterator[None]:
    """Begin a run in here: its folder is this process's alone, and holds its settings.

    Those of a run that was refused are taken away again, its secret included, and so are folders
    that were made for it. Another process that began in the same folder meanwhile keeps its own.
    """
    from noshuffle.release.files import alone_in, make_folder, read_json

    flags = {_DRAWS: draws_on_budget, _FORKS: is_fork}
    config = {**settings, **{name: True for name, is_set in flags.items() if is_set}}
    made = home.missing()
    make_folder(home.path)
    meanwhile = f"{home.path} holds another run, begun meanwhile; use another --out"
    try:
        with alone_in(home.path):
            kept = read_json(home.config_file) if home.config_file.exists() else None
            if home.is_started or kept not in (None, json.loads(json.dumps(config))):
                raise InvalidInput(meanwhile)
            home.write_config(config)
            try:
                yield
            except BaseException:
                if not home.is_started:
                    home.config_file.unlink(missing_ok=True)
                    home.withdraw(made)
                raise
    except BlockingIOError:
        raise InvalidInput(meanwhile) from None
