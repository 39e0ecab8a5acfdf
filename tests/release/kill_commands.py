"""Kills of whole commands: `noshuffle train` and the cells of `noshuffle reproduce`.

    start       the command as a person gives it, in a fork that is killed at a random call
    again       train: --resume; reproduce: the same command
    end         train: `verify` says PROVED, ε that of a run that nobody killed
                reproduce: the same cells, and in each the same result

A folder without a plan is one that had not begun, and is begun anew; one without keys was being
sealed, and is sealed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.kills import child

TRAIN = "train --model linear --epochs 1 --batch-size 250 --mechanism tree --no-baseline --json"
CELLS = "reproduce rates --quick --json --only noisy_max --only output_pert"


def call(words: list[str]) -> str:
    """What a command prints; raises unless it ends well."""
    from noshuffle.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    if code:
        raise RuntimeError(f"{' '.join(words)} ended with {code}: {out.getvalue()[-300:]}")
    return out.getvalue()


def train(path: Path) -> None:
    if (path / "plan.json").exists() and not (path / "checkpoints/key.json").exists():
        call(["seal", str(path)])
    elif (path / "config.json").exists() and (path / "plan.json").exists():
        call(["train", "--resume", str(path), "--json"])
    else:
        shutil.rmtree(path, ignore_errors=True)
        call([*TRAIN.split(), "--out", str(path)])


def trained(path: Path) -> Any:
    """Verdict and ε."""
    from noshuffle.release.verify import verify

    verdict = verify(path)
    return verdict.answer, verdict.epsilon, verdict.released


def cells(path: Path) -> None:
    call([*CELLS.split(), "--out", str(path)])


def computed(path: Path) -> Any:
    found = json.loads((path / "results.json").read_text())["cells"]
    return {key: cell["result"] for key, cell in found.items()}


COMMANDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "noshuffle train": (train, trained),
    "noshuffle reproduce": (cells, computed),
}


def killed(name: str, folder: Path, count: int, *, seed: int = 5) -> tuple[list[str], int, int]:
    """Where each kill fell, runs that ended as one that nobody killed, and all runs."""
    import_module("torch._dynamo")
    job, outcome = COMMANDS[name]
    calls = child(lambda: job(folder / "clean"), None)
    assert isinstance(calls, int), calls
    wanted, chance, places = outcome(folder / "clean"), random.Random(seed), list[str]()
    good = runs = 0
    while len(places) < count:
        path, lives, said = folder / f"run{runs}", 0, "killed"
        while said.startswith("killed"):
            instant = chance.randrange(1, calls) if lives < 2 and len(places) < count else None
            said = str(child(lambda: job(path), instant))  # noqa: B023
            lives += 1
            if said.startswith("killed "):
                places.append(said.removeprefix("killed "))
        runs += 1
        found = outcome(path)
        good += found == wanted and said.isdigit()
        if found != wanted or not said.isdigit():
            print(f"{path}: {said}, {str(found)[:300]}", flush=True)
    return places, good, runs
