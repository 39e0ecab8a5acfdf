"""A run in a folder saves itself, in a loop of one's own too, and goes on at its next step."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import noshuffle as ns
from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.noise import test_source as make_source
from noshuffle.release.folder import load, step_of

LOSS = nn.CrossEntropyLoss()
PLAN = ns.Plan.fit(ns.Epochs(epochs=2, steps_per_epoch=40), mechanism="blt", noise_multiplier=1.0)
X = torch.randn(160, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(160) % 3


def begun(run: Path | None, **options: Any) -> ns.Private:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: Any = {"clip_norm": 1.0, "batch_size": 4, "source": make_source(seed=1), **options}
    return ns.privatize(model, optimizer, PLAN, run=run, **settings)


def walk(private: ns.Private, until: int) -> None:
    while private.steps_released < until:
        at = 4 * (private.steps_released % 40)
        private.step(LOSS, X[at : at + 4], Y[at : at + 4], ids=range(at, at + 4))


def saved(run: Path) -> list[int]:
    return sorted(map(step_of, (run / "checkpoints").glob("step-*")))


def weights(private: ns.Private) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in private.model.parameters()])


#: A loop of one's own: prints when it has begun, then trains until it is stopped.
SCRIPT = """
import signal, sys, time
from pathlib import Path
from typing import Any
from tests.training.test_saving import begun, walk

def loop(path, how):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    private = begun(path)
    private.resume()
    walk(private, private.steps_released + 5)
    print("begun", flush=True)
    if how == "error":
        raise ArithmeticError("a bug behind a step")
    if how == "wait":
        while True:
            walk(private, private.steps_released + 1) if private.steps_released < 60 else None
            time.sleep(0.01)

loop(Path(sys.argv[1]), sys.argv[2])
"""


def child(run: Path, how: str, *, script: str = SCRIPT) -> subprocess.Popen[str]:
    here = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", script, str(run), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_end_goes_on_at_its_next_step(
    number: signal.Signals, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = child(run, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    try:
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == -number or "KeyboardInterrupt" in said, said
    private = begun(run)
    found = private.steps_released
    assert saved(run)[-1] == found >= 5
    assert private.resume() == found
    never = begun(None)
    walk(never, found + 3)
    walk(private, found + 3)
    assert torch.equal(weights(private), weights(never))  # no step was lost


@pytest.mark.parametrize("how", ["end", "error"])
def test_a_process_that_ends_in_order_or_by_an_exception_leaves_its_last_step(
    how: str, tmp_path: Path
) -> None:
    process = child(tmp_path / "run", how)
    process.communicate(timeout=300)
    assert process.returncode == (how == "error")
    assert saved(tmp_path / "run") == [5]


def test_a_run_that_nobody_holds_any_more_leaves_its_last_step(tmp_path: Path) -> None:
    private = begun(tmp_path / "run")
    walk(private, 3)
    del private
    gc.collect()
    assert saved(tmp_path / "run") == [3]


@pytest.mark.parametrize(("every", "found"), [(0.0, [3, 4]), (None, []), (3600.0, [])])
def test_it_is_saved_by_time(every: float | None, found: list[int], tmp_path: Path) -> None:
    private = begun(tmp_path / "run", save_every=every)
    walk(private, 4)
    assert saved(tmp_path / "run") == found


def test_a_minute_or_twenty_times_what_a_save_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, now = begun(tmp_path / "run"), [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for later, found in ((59.0, []), (2.0, [2]), (59.0, [2]), (2.0, [2, 4])):
        now[0] += later
        walk(private, private.steps_released + 1)
        assert saved(tmp_path / "run") == found
    with pytest.raises(InvalidInput, match="save_every"):
        begun(tmp_path / "other", save_every=-1.0)
    assert not (tmp_path / "other").exists()


def test_nothing_is_saved_of_a_step_that_failed_half_way(tmp_path: Path) -> None:
    def fails(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    private = begun(tmp_path / "run", save_every=0.0)
    walk(private, 2)
    with pytest.raises(ArithmeticError):
        private.step(fails, X[8:12], Y[8:12], ids=range(8, 12))
    del private
    gc.collect()
    assert saved(tmp_path / "run") == [1, 2]
    again = begun(tmp_path / "run")
    assert again.resume() == 3


def test_a_refused_batch_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    private = begun(tmp_path / "run", save_every=0.0)
    walk(private, 2)
    with pytest.raises(ParticipationViolation):
        private.step(LOSS, X[:4], Y[:4], ids=range(4))
    walk(private, 3)
    assert saved(tmp_path / "run") == [2, 3]


#: Signals are of a process, in which no run of another test may be alive.
ALONE = "import sys, pathlib, tests.training.test_saving as own\n"
ALONE += "getattr(own, sys.argv[2])(pathlib.Path(sys.argv[1]))"


@pytest.mark.parametrize(
    "name", ["handlers_of_others", "a_signal_within_a_step", "a_fork_of_the_process"]
)
def test_signals(name: str, tmp_path: Path) -> None:
    """Others' handlers have the signal and come back; a step ends first; a fork saves nothing."""
    process = child(tmp_path, name, script=ALONE)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said


def handlers_of_others(folder: Path) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGTERM)
    runs = [begun(folder / name) for name in ("one", "two")]
    for private in runs:
        walk(private, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    for private, name in zip(runs, ("one", "two")):
        assert saved(folder / name) == [2]
        walk(private, 3)
        private.close()
    assert signal.getsignal(signal.SIGTERM) is own
    walk(begun(None), 1)
    assert signal.getsignal(signal.SIGTERM) is own


def a_signal_within_a_step(folder: Path) -> None:
    heard: list[list[int]] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(saved(folder / "run")))
    private = begun(folder / "run")
    walk(private, 1)
    with private.accumulate() as step:
        step.add(LOSS, (X[4:6], Y[4:6]), ids=[4, 5])
        os.kill(os.getpid(), signal.SIGTERM)
        assert not heard
        step.add(LOSS, (X[6:8], Y[6:8]), ids=[6, 7])
    assert heard == [[2]]
    walk(private, 3)
    private.close()


def a_fork_of_the_process(folder: Path) -> None:
    private = begun(folder / "run")
    walk(private, 2)
    forked = os.fork()
    if not forked:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == -signal.SIGTERM
    assert saved(folder / "run") == []
    walk(private, 3)
    assert private.save().name == "step-00000003"


def test_what_only_the_owner_may_see_is_in_its_own_file(tmp_path: Path) -> None:
    """States of random generators are those that rows were drawn by."""
    private = begun(tmp_path / "run")
    walk(private, 1)
    path = private.save()
    state = load(path, with_secret=True)
    assert {"random", "epoch_random", "noise"} <= state["secret"].keys()
    assert not {"random", "noise"} & (state.keys() - {"secret"})
    assert (path / "secret.pt").stat().st_mode & 0o777 == 0o600


def test_the_random_states_of_loaders_come_back(tmp_path: Path) -> None:
    private = begun(tmp_path / "run")
    walk(private, 1)
    private.save()
    drawn = torch.rand(3)
    again = begun(tmp_path / "run")
    again.resume()
    assert torch.equal(torch.rand(3), drawn)


def test_a_run_with_a_last_batch_of_one_row_is_resumed(tmp_path: Path) -> None:
    def steps(private: ns.Private, until: int) -> None:
        for t in range(private.steps_released, until):
            rows = slice(8 * (t % 3), min(8 * (t % 3) + 8, 17))
            private.step(LOSS, X[rows], Y[rows], ids=range(rows.start, rows.stop))

    plan = ns.Plan.fit(ns.Epochs(epochs=4, steps_per_epoch=3), mechanism="tree", noise_multiplier=1)
    runs = []
    for stops in ((12,), (3, 4, 12)):
        for stop in stops:
            torch.manual_seed(0)
            model = nn.Linear(4, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options: Any = {"clip_norm": 1.0, "batch_size": 8, "source": make_source(seed=1)}
            private = ns.privatize(model, optimizer, plan, run=tmp_path / f"{stops}", **options)
            private.resume()
            steps(private, stop)
            private.save()
        runs.append(weights(private))
    assert torch.equal(*runs)


def test_a_fork_adds_up_with_the_run_that_it_ends(tmp_path: Path) -> None:
    private = begun(tmp_path / "old")
    walk(private, 5)
    own = private.epsilon
    private.close()
    fork = begun(tmp_path / "new", fork_of=tmp_path / "old")
    walk(fork, 5)
    assert fork.epsilon > own
    assert fork.statement().epsilon == pytest.approx(fork.epsilon)
    with pytest.raises(InvalidInput, match="has ended"):
        begun(tmp_path / "old")


def test_a_checkpoint_of_another_model_or_optimizer_is_one_line(tmp_path: Path) -> None:
    private = begun(tmp_path / "run")
    private.attach(rule=torch.optim.lr_scheduler.StepLR(private._parts.optimizer, 1))
    walk(private, 1)
    private.save()
    again = begun(tmp_path / "run")
    with pytest.raises(InvalidInput, match="attach the same ones"):
        again.resume()
    again = begun(tmp_path / "run")
    again.attach(rule=torch.optim.lr_scheduler.StepLR(again._parts.optimizer, 1))
    assert again.resume() == 1


def test_a_run_that_is_closed_keeps_its_last_step(tmp_path: Path) -> None:
    private = begun(tmp_path / "run")
    walk(private, 5)
    private.close()
    assert saved(tmp_path / "run") == [5]
    model = nn.Linear(4, 3)
    assert ns.load_model(tmp_path / "run", model) == 5
    assert torch.equal(
        torch.cat([p.detach().flatten() for p in model.parameters()]), weights(private)
    )
