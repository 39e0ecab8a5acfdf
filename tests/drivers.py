"""Every driver behind one function, for the contract suite: `drive(folder, plan)` releases.


    for step, increment in drive(folder, plan): …   goes on in the folder, saves every third step,
                                                    ends the run after the last one
    kill_at(drive, folder, plan, seconds)           the same in a child that is killed then

What a driver does is what its users would write. Steps bring four units each, in the same order in
both epochs (a stream has one).
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from noshuffle import Plan, PrivateSum, privatize
from noshuffle.convex.phases import PhaseBudget
from noshuffle.convex.saved import MODEL, STREAM, read_stream, write_stream
from noshuffle.convex.stream import LearningStream
from noshuffle.federated import Rounds, ServerOptimizer
from noshuffle.participation import Epochs

SIZE, UNITS, EPOCH, SAVE_EVERY = 32, 4, 6, 3
Release = tuple[int, np.ndarray]
Drive = Callable[[Path, Plan], Iterator[Release]]


def plan_of(mechanism: str = "blt", **options: Any) -> Plan:
    how = {"noise_multiplier": 1.0, "unit": "user", **options}
    return Plan.fit(Epochs(2, EPOCH), mechanism=mechanism, **how)


def units(step: int) -> list[int]:
    first = step % EPOCH * UNITS
    return [first + i for i in (2, 0, 3, 1)]


def drive_sum(folder: Path, plan: Plan) -> Iterator[Release]:
    sums = PrivateSum(plan, clip=1.0, shape=(SIZE,), run=folder)
    while sums.step < plan.steps:
        step = sums.step
        yield step, sums.add(np.zeros((UNITS, SIZE)), ids=units(step))
        if sums.step % SAVE_EVERY == 0:
            sums.save()
    sums.close()


class CallersOrder:
    """A batch sampler of the caller's: the units of every step of an epoch."""

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[list[int]]:
        return map(units, range(EPOCH))


def drive_loader(folder: Path, plan: Plan) -> Iterator[Release]:
    sums = PrivateSum(replace(plan, unit="example"), clip=1.0, shape=(SIZE,), run=folder)
    data = TensorDataset(torch.zeros(UNITS * EPOCH, SIZE))
    loader = DataLoader(data, batch_sampler=CallersOrder())
    while sums.step < plan.steps:
        for (x,) in sums.batches(loader):
            step = sums.step
            yield step, sums.add(x).numpy()
            if sums.step % SAVE_EVERY == 0:
                sums.save()
    sums.close()


def drive_training(folder: Path, plan: Plan, *, is_loop: bool = False) -> Iterator[Release]:
    torch.manual_seed(0)
    model = nn.Linear(SIZE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = privatize(
            model, optimizer, plan, clip_norm=1.0, batch_size=1, run=folder, save_every=1e9
        )
        private.resume()
        criterion: Any = private.criterion(nn.MSELoss()) if is_loop else None
        while private.steps_released < plan.steps:
            step = private.steps_released
            before = model.weight.detach().clone()
            x, y = torch.ones(UNITS, SIZE), torch.ones(UNITS, 1)
            if is_loop:
                criterion(model(x), y, ids=units(step)).backward()
                private.optimizer.step()
            else:
                private.step(nn.MSELoss(), x, y, ids=units(step))
            yield step, (before - model.weight.detach()).numpy()[0]
            if private.steps_released % SAVE_EVERY == 0:
                private.save()
        private.save()
        private.close()


def drive_rounds(folder: Path, plan: Plan) -> Iterator[Release]:
    server = ServerOptimizer(
        {"w": torch.zeros(SIZE)},
        plan,
        clip=1.0,
        cohort_size=UNITS,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        run=folder,
    )
    rounds = Rounds(server, save_every=SAVE_EVERY)
    rounds.resume()
    while server.round < plan.steps:
        step, before = server.round, server.parameters()["w"]
        asked = rounds.begin(units(step))
        assert asked is not None
        for user in asked.users:
            rounds.receive(user, {"w": torch.zeros(SIZE)})
        after = rounds.finish().parameters["w"]
        yield step, (after - before).numpy() * UNITS
    rounds.close()


class RowSum:
    """A rule of a learning stream that sums the rows themselves and keeps the last mean."""

    clip_norm, learning_rate, watch, size = 1.0, 1.0, None, SIZE

    def __init__(self) -> None:
        self.weights = np.zeros((1, SIZE))

    def start(self, phase: Any) -> None:
        pass

    def clipped_sum(self, x: np.ndarray, y: Any) -> np.ndarray:
        return np.asarray(x.sum(0))

    def update(self, mean: np.ndarray, *, step: int) -> None:
        self.weights = mean[None].copy()

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


def drive_stream(folder: Path, plan: Plan) -> Iterator[Release]:
    rule = RowSum()
    budget = PhaseBudget(
        epsilon=round(plan.epsilon(), 6), delta=plan.delta, mechanism=plan.strategy, unit=plan.unit
    )
    steps = plan.steps
    stream = LearningStream(rule, budget, horizon=UNITS * steps, batch_size=UNITS)
    if (folder / STREAM).exists():
        stream.load(read_stream(folder), folder)
    else:
        if folder.exists():  # killed in its first save: nothing was learned yet
            shutil.rmtree(folder)
        folder.mkdir()
        (folder / MODEL).touch()
        stream.move_into(folder)
        write_stream(folder, stream, SimpleNamespace())
    while stream.steps < steps:
        step = stream.steps
        stream.admit(UNITS, [unit + step // EPOCH * EPOCH * UNITS for unit in units(step)])
        stream.feed(np.zeros((UNITS, SIZE)), np.zeros(UNITS))
        yield step, rule.weights[0] * UNITS
        if stream.steps % SAVE_EVERY == 0:
            write_stream(folder, stream, SimpleNamespace())
    stream.end_run()


DRIVERS: dict[str, Drive] = {
    "sum": drive_sum,
    "loader": drive_loader,
    "training": drive_training,
    "loop": partial(drive_training, is_loop=True),
    "rounds": drive_rounds,
    "stream": drive_stream,
}


def evidence(name: str, folder: Path) -> Path:
    """Where the run folder of a driver is."""
    return folder / "phase-1" if name == "stream" else folder


class Child:
    """A driver in a process of its own, whose releases are told as they come."""

    def __init__(
        self, drive: Drive, folder: Path, plan: Plan, *, before: Callable[[], None] | None = None
    ) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._reading)
            code = 0
            try:
                if before is not None:
                    before()
                for release in drive(folder, plan):
                    data = pickle.dumps(release)
                    os.write(writing, len(data).to_bytes(4, "little") + data)
            except BaseException as error:
                data = pickle.dumps((-1, f"{type(error).__name__}: {error}"))
                with suppress(OSError):
                    os.write(writing, len(data).to_bytes(4, "little") + data)
                code = 3
            os._exit(code)
        os.close(writing)
        self._told = b""

    def wait_for_release(self) -> None:
        """Until the first release is told, or the child has ended."""
        self._told += os.read(self._reading, 1 << 16)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> tuple[list[Release], str, int]:
        """What was released, the error if there was one, and the exit status."""
        while more := os.read(self._reading, 1 << 16):
            self._told += more
        os.close(self._reading)
        _, status = os.waitpid(self.pid, 0)
        told, releases, error = self._told, [], ""
        while len(told) >= 4 and len(told) >= 4 + (size := int.from_bytes(told[:4], "little")):
            step, value = pickle.loads(told[4 : 4 + size])
            told = told[4 + size :]
            if step < 0:
                error = value
            else:
                releases.append((step, value))
        return releases, error, os.waitstatus_to_exitcode(status)


def kill_at(drive: Drive, folder: Path, plan: Plan, seconds: float) -> list[Release]:
    """Drive in a child that is killed so long after its first release."""
    child = Child(drive, folder, plan)
    child.wait_for_release()
    time.sleep(seconds)
    child.kill()
    releases, error, _ = child.ended()
    assert not error, error
    return releases
