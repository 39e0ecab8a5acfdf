"""Runs that are killed at random instants, brought to their end and compared with one that was not.

    python -m tests.training.crash FOLDER INSTANTS SEED        a line of JSON: a result a run

Everything is imported once and each life of a run is a fork of this process. The data of a step
behind the last checkpoint are changed once, in a copy of the folder: that must be refused.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from tests.kills import child
from torch import nn

from noshuffle import Epochs, Plan
from noshuffle.noise import test_source as seeded
from noshuffle.strategies import tree
from noshuffle.training import fit_model, in_order, privatize, verify
from noshuffle.training.batches import TensorBatches

_chance = torch.Generator().manual_seed(5)
X, Y = torch.randn(40, 6, generator=_chance), torch.randint(3, (40,), generator=_chance)
PLAN = Plan(
    participation=Epochs(epochs=3, steps_per_epoch=5),
    strategy=tree(variant="honaker"),
    noise_multiplier=2.0,
)


def train(path: Path, data: torch.Tensor = X) -> None:
    """Begin the run or go on with it, to its end; what it came to stands beside its folder."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    source = seeded(seed="crash")
    private = privatize(
        model, optimizer, PLAN, clip_norm=0.7, batch_size=8, run=path, source=source
    )
    fit_model(
        private,
        TensorBatches((data, Y), in_order(40, 8)),
        nn.CrossEntropyLoss(),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        evaluate=lambda m: {"accuracy": (m(X).argmax(1) == Y).double().mean()},
        evaluate_every=4,
        checkpoint_every=3,
    )
    hasher = hashlib.sha256()
    for parameter in model.state_dict().values():
        hasher.update(parameter.numpy().tobytes())
    came_to = {"digest": hasher.hexdigest(), "metrics": list(private.run.metrics())}
    private.close(keep_keys=True)
    path.with_suffix(".json").write_text(json.dumps(came_to))


def come_to(path: Path) -> Any:
    return json.loads(path.with_suffix(".json").read_text())


def released(path: Path) -> int:
    """Steps on record."""
    if not (path / "ledger.sqlite").exists():
        return 0
    with (
        closing(sqlite3.connect(path / "ledger.sqlite")) as ledger,
        suppress(sqlite3.OperationalError),  # killed before it had tables
    ):
        return int(ledger.execute("SELECT count(*) FROM steps").fetchone()[0])
    return 0


def with_other_data(path: Path, step: int) -> int | str:
    """What a copy of the run says to a step that is repeated with another row."""
    copy = shutil.copytree(path, path.with_name(f"{path.name}-copy"))
    other = X.clone()
    other[8 * (step % 5)] += 1e-3
    return child(lambda: train(copy, other), None, name=copy.name)


class Crashes:
    """Runs in a folder, each killed once or twice."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        train(folder / "warm")  # torch imports half of itself at the first step; once is enough
        calls = child(lambda: train(folder / "reference"), None, name="reference")
        assert isinstance(calls, int), calls
        self.calls, self.reference = calls, come_to(folder / "reference")

    def first_kill(self, path: Path, *, is_late: bool) -> None:
        """Kill it in its first life, wherever that is.

        Looks at the model are drawn at random and make a third more calls: a run that ended before
        its instant has fewer calls than those known so far, and another is begun in its place.
        """
        while True:
            instant = self.chance.randrange(4 * self.calls // 5 if is_late else 1, self.calls)
            said = child(lambda: train(path), instant, name=f"{path.name} first")
            if str(said).startswith("killed"):
                return
            assert isinstance(said, int), said
            self.calls = said
            shutil.rmtree(path)

    def run(self, number: int) -> dict[str, Any]:
        path, kills = self.folder / f"run{number}", 1
        # Most calls are those of the first look at the model: every third kill falls late.
        self.first_kill(path, is_late=number % 3 == 2)
        changed = None
        if released(path) % 3:  # a step behind the last checkpoint
            changed = with_other_data(path, released(path) - 1)
        instant = self.chance.randrange(1, self.calls) if number % 2 else None
        said = child(lambda: train(path), instant, name=f"{path.name} second")
        if str(said).startswith("killed"):
            kills += 1
            said = child(lambda: train(path), None, name=f"{path.name} third")
        verdict = verify(path)
        return {
            "same": isinstance(said, int) and come_to(path) == self.reference,
            "said": said,
            "kills": kills,
            "changed": changed,
            "answer": verdict.answer,
            "failures": [*verdict.refuted, *verdict.unchecked],
            "mode": oct((path / "checkpoints/key.json").stat().st_mode & 0o777),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    crashes = Crashes(Path(sys.argv[1]), int(sys.argv[3]))
    print(json.dumps([crashes.run(number) for number in range(int(sys.argv[2]))]))
