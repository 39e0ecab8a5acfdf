"""A run while it lives: what is shown, what is never shown, and how wide."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import noshuffle as ns
from noshuffle.cli import main
from noshuffle.release.folder_lock import is_locked, take
from noshuffle.report.live import snapshot, sparkline, status_lines
from noshuffle.statement import meaning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of four planned steps, one evaluation, still open."""
    path = tmp_path_factory.mktemp("runs") / "half"
    plan = ns.Plan.fit(ns.SinglePass(steps=4), mechanism="tree", epsilon=2.0, delta=1e-5)
    model = torch.nn.Linear(2, 2)
    private = ns.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        clip_norm=1.0,
        batch_size=4,
        run=path,
    )
    for _ in range(3):
        private.step(torch.nn.CrossEntropyLoss(), torch.randn(4, 2), torch.randint(2, (4,)))
    assert private.run is not None
    private.run.append_metrics({"step": 3, "test_accuracy": 0.75})
    return path


def test_it_shows_where_the_run_stands(folder: Path) -> None:
    now = snapshot(folder)
    plan = ns.Plan.from_json((folder / "plan.json").read_text())
    assert (now.step, now.steps, now.is_done) == (3, 4, False)
    assert now.epsilon == plan.epsilon_after(3) < plan.epsilon() == now.planned_epsilon
    assert now.accuracy == ((3, 0.75),)


def test_a_run_whose_process_is_gone_stands_still(tmp_path: Path) -> None:
    """It was said to have so many seconds left, for ever."""
    plan = ns.Plan.fit(ns.SinglePass(steps=9), mechanism="tree", epsilon=2.0, delta=1e-5)
    sums = ns.PrivateSum(plan, clip=1.0, run=tmp_path / "run")
    for step in range(3):
        sums.add([1.0], ids=[step])
    sums.save()
    now = snapshot(tmp_path / "run")
    assert now.has_process is not False
    assert not now.stands_still
    assert now.seconds_left is not None
    assert sums.add([1.0], ids=[3]) is not None  # who looks does not end the lock
    sums.close()
    now = snapshot(tmp_path / "run")
    if sys.platform == "linux":
        assert now.has_process is False
    now = replace(now, has_process=False)
    told = "\n".join(status_lines(now, width=40))
    assert "stands still since 20" in told
    assert "its process has ended" in told
    assert " left" not in told
    record = now.to_dict()
    assert (record["stands_still"], record["seconds_left"]) == (True, None)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for a lock")
def test_another_process_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is None
    ready, told = os.pipe()
    other = os.fork()
    if other == 0:
        lock = take(tmp_path)
        os.write(told, b"held" if lock is not None else b"none")
        signal.pause()
    try:
        if os.read(ready, 4) == b"held":
            assert is_locked(tmp_path)
            assert is_locked(tmp_path)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert is_locked(tmp_path) is False


@pytest.mark.parametrize(
    ("speed", "since", "is_still"),
    [(10.0, 60.0, False), (10.0, 130.0, True), (0.1, 130.0, False), (0.1, 301.0, True),
     (None, 130.0, True), (None, None, False)],
)  # fmt: skip
def test_a_run_without_a_step_for_long_stands_still(
    folder: Path, speed: float | None, since: float | None, is_still: bool
) -> None:
    for has_process in (True, None):
        now = replace(
            snapshot(folder),
            steps_per_second=speed,
            seconds_since_step=since,
            has_process=has_process,
        )
        assert now.stands_still is is_still
        assert ("stands still" in "\n".join(status_lines(now, width=60))) is is_still
    done = replace(now, step=now.steps)
    assert not done.stands_still
    assert status_lines(done, width=60)[-1] == "finished"


@pytest.mark.parametrize("width", [40, 50, 60])
def test_lines_fit_a_narrow_terminal(folder: Path, width: int) -> None:
    assert all(len(line) <= width for line in status_lines(snapshot(folder), width=width)[1:])


def test_the_largest_value_of_a_line_has_the_tallest_block() -> None:
    for values in np.random.default_rng(0).uniform(size=(200, 3)):  # some round to above the top
        line = sparkline(values.tolist())
        assert (line[values.argmax()], line[values.argmin()]) == ("█", "▁")


def test_the_command_looks_once_and_leaves_the_folder_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {f: f.read_bytes() for f in folder.iterdir() if f.suffix in (".json", ".jsonl")}
    page = tmp_path / "live.html"
    assert main(["watch", str(folder), "--json", "--page", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert "http-equiv='refresh'" in page.read_text()
    assert before == {f: f.read_bytes() for f in before}
    assert main(["watch", str(folder), "--page", str(folder / "x.html")]) == 2
    assert not (folder / "x.html").exists()


def test_what_epsilon_means_is_what_the_tests_of_an_attacker_allow() -> None:
    """Of the Gaussian with μ, the sentence has the power of the best test, and not less."""
    power = 100 * float(torch.distributions.Normal(0, 1).cdf(torch.tensor(-2.3263479 + 1.0)))
    assert f"at most {power + 0.05:.1f} %" in meaning(4.4, 1e-5, 1.0)
    assert "at most a factor of 2.8 " in meaning(1.0, 1e-5)  # e is above 2.7
    assert "a factor of e^1000000 " in (huge := meaning(1e6, 1e-5))
    assert "possibly all" in huge
    assert "at most 33.4 %" in meaning(8.0, 1e-4, found=0.3333)  # better than ε alone tells
