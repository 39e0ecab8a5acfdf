"""Drivers of the release core for one contract suite, and kills of them by a process of its own.

Here are those of central training and `PrivateSum`; the others are in `other_drivers`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.kills import child
from tests.release.driver import DIVISOR, Driver, Spy, first_output, ids_of, rows_of
from tests.release.other_drivers import Federated, Learning, SolverRun
from torch import nn

from noshuffle.clipping import Ghost, PerExample
from noshuffle.errors import InvalidInput, ReplayRefused
from noshuffle.noise import Source
from noshuffle.plan import Plan
from noshuffle.release.private_sum import PrivateSum
from noshuffle.release.seal import seal
from noshuffle.training import privatize
from noshuffle.training.compiled import Compiled


class Central(Driver):
    """privatize and private.step."""

    def __init__(self, engine: Callable[[], Any] = Ghost) -> None:
        self.make_engine = engine

    def build(self, folder: Path | None, plan: Plan, source: Source | None, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, 1, bias=False)
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.engine = Spy(self.make_engine())
        settings: dict[str, Any] = {"clip_norm": 1.0, "batch_size": DIVISOR, "engine": self.engine}
        self.run = self.bind(self.model, sgd, plan, run=folder, source=source, **settings)
        self.ledger = self.run.ledger
        if folder is not None:
            self.run.resume()

    def bind(self, *args: Any, **settings: Any) -> Any:
        return privatize(*args, **settings)

    def step(self, rows: np.ndarray, ids: Any) -> np.ndarray:
        x = torch.from_numpy(rows).float()
        self.advance(x, torch.zeros(len(x)), ids)
        return self.given()

    def advance(self, x: torch.Tensor, y: torch.Tensor, ids: Any) -> None:
        self.run.step(first_output, x, y, ids=ids)

    def given(self) -> np.ndarray:
        grad = self.model.weight.grad
        assert grad is not None
        return grad.detach().double().numpy().ravel() * DIVISOR


class Captured(Central):
    """The compiled step, its programs called instead of captured."""

    def bind(self, *args: Any, **settings: Any) -> Any:
        run = privatize(*args, **settings)
        run.compiled = Compiled(run._parts, capacity=DIVISOR, captures=False)
        return run

    def sums(self) -> int:
        programs = self.run.compiled._programs.values()
        return sum(program._summed._expected for program in programs)


class Unchanged(Central):
    """loss.backward() and private.optimizer.step()."""

    def advance(self, x: torch.Tensor, y: torch.Tensor, ids: Any) -> None:
        optimizer = self.run.optimizer
        optimizer.zero_grad()
        first_output(self.model(x), y).backward()
        optimizer.step(ids=ids)


class Sums(Driver):
    """PrivateSum."""

    def build(self, folder: Path | None, plan: Plan, source: Source | None, width: int) -> None:
        self.run = PrivateSum(plan, clip=1.0, shape=(width,), run=folder, source=source)
        self.ledger = self.run.ledger
        self.engine = Spy(None)
        clipped = self.run._clipped

        def counted(*given: Any) -> Any:
            self.engine.calls += 1
            return clipped(*given)

        self.run._clipped = counted

    @property
    def at(self) -> int:
        return int(self.run.step)

    def step(self, rows: np.ndarray, ids: Any) -> np.ndarray:
        found: np.ndarray = self.run.add(rows, ids=ids)
        return found


DRIVERS: dict[str, Callable[[], Driver]] = {
    "central, ghost": Central,
    "central, per example": lambda: Central(PerExample),
    "central, compiled": Captured,
    "unchanged loop": Unchanged,
    "PrivateSum": Sums,
    "federated server": Federated,
    "learning stream": Learning,
    "convex solver": SolverRun,
}


# -- kills -----------------------------------------------------------------------------------------


def work(name: str, folder: Path, plan: Plan, log: Path) -> None:
    """Release all steps, saving every third one, and write down what was released."""
    driver = DRIVERS[name]()
    run = driver.evidence(folder)
    try:
        driver.build(folder, plan, None, 16)
    except InvalidInput as error:
        if "sealed" not in str(error):
            raise
        seal(run)  # killed while it was being sealed: to the end
        return
    with log.open("a") as file:
        for note in driver.ledger.notes("skip"):  # a federated round of unknown outcome
            file.write(f"{note['step']} -\n")
        while driver.at < plan.steps:
            step = driver.at
            try:
                value = driver.step(rows_of(step, 16), ids_of(step))
                file.write(f"{step} {hashlib.sha256(value.tobytes()).hexdigest()}\n")
            except ReplayRefused as error:
                if "did not reach the disk" not in str(error):
                    raise
                driver.run.skip()  # the digest of the last step before a kill
                file.write(f"{step} -\n")
            file.flush()
            if driver.at % 3 == 0:
                driver.save()
    driver.close()


def kills(name: str, folder: Path, plan: Plan, *, count: int, seed: int) -> list[dict[str, Any]]:
    """Runs that are killed at random instants and brought to their end; what became of each."""
    # An optimizer imports it in its first step; kills are not to fall into an import.
    import_module("torch._dynamo")

    from noshuffle.training import verify

    def warm() -> None:
        work(name, folder / "warm", plan, folder / "warm.log")

    calls = child(warm, None, name=f"{name} warm")
    assert isinstance(calls, int), calls
    chance, results, done = random.Random(seed), [], 0
    while done < count:
        path, log, lives = folder / f"run{len(results)}", folder / f"log{len(results)}", 0
        said: int | str = "killed"
        places: list[str] = []
        while str(said).startswith("killed"):
            instant = chance.randrange(1, calls) if lives < 2 and done < count else None
            life = f"{name} {path.name} {lives}"
            said = child(lambda: work(name, path, plan, log), instant, name=life)  # noqa: B023
            lives += 1
            if str(said).startswith("killed "):
                done += 1
                places.append(str(said).removeprefix("killed "))
        seen: dict[int, set[str]] = {}
        for line in log.read_text().splitlines():
            step, digest = line.split()
            seen.setdefault(int(step), set()).update({digest} - {"-"})
        verdict = verify(DRIVERS[name]().evidence(path))
        results.append(
            {
                "said": said,
                "lives": lives,
                "places": places,
                "answer": verdict.answer,
                "words": verdict.words(),
                "steps": len(seen),
                "twice": [step for step, values in seen.items() if len(values) > 1],
                "epsilon": verdict.epsilon,
            }
        )
    return results


def serve() -> None:
    """Kill one driver for each line [name, folder, count] that comes in; answer with one line.

    One process for all of them, since most of its time is the import of torch.
    """
    from noshuffle.participation import SinglePass
    from noshuffle.strategies import tree

    torch.set_num_threads(1)
    for line in sys.stdin:
        name, folder, count = json.loads(line)
        own = Plan(participation=SinglePass(steps=8), strategy=tree(), noise_multiplier=2.0)
        own = DRIVERS[name]().fit(own)
        given = kills(name, Path(folder), own, count=count, seed=5)
        print(json.dumps([given, own.epsilon()]), flush=True)


if __name__ == "__main__":
    serve()
