"""One contract for every driver of the release core: drivers × promises.

The table is printed at the end of the run (`conftest`). A promise that a driver makes differently,
or cannot make, is not left out here but in the driver, with the reason.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.release import positions
from tests.release.contract import DRIVERS
from tests.release.driver import Driver, ids_of, rows_of

from noshuffle.convex.losses import hinge
from noshuffle.convex.solvers import ftrl
from noshuffle.errors import InvalidInput, ReplayRefused
from noshuffle.noise.grid import grid_step
from noshuffle.participation import BallsInBins, SinglePass
from noshuffle.plan import Plan
from noshuffle.release.private_sum import PrivateSum
from noshuffle.strategies import blt, identity, tree
from noshuffle.strategies.base import Strategy
from noshuffle.training import verify

STEPS, SCALE, WIDE = 6, 2.0, 4096
every_driver = pytest.mark.parametrize("name", DRIVERS)


def plan_of(strategy: Strategy | None = None, noise: float = SCALE) -> Plan:
    rule = SinglePass(steps=STEPS)
    return Plan(participation=rule, strategy=strategy or tree(), noise_multiplier=noise)


@pytest.fixture(autouse=True)
def only_what_the_driver_can_promise(request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    promise = request.node.originalname.removeprefix("test_")
    if name:
        absent = DRIVERS[name]().absent
        told = [list(DRIVERS).index(name), name, promise, dict(absent)]
        request.node.user_properties.append(("contract", told))  # for the table
        if why := absent.get(promise):
            pytest.skip(why)


def driver_of(name: str, folder: Path | None, plan: Plan | None = None, width: int = 16) -> Driver:
    driver = DRIVERS[name]()
    driver.build(folder, driver.fit(plan or plan_of()), None, width)
    return driver


def go(
    driver: Driver, steps: int, width: int = 16, rows: Callable[[int, int], np.ndarray] = rows_of
) -> list[np.ndarray]:
    at = driver.at
    return driver.releases([(rows(t, width), ids_of(t)) for t in range(at, at + steps)])


@every_driver
def test_replay(name: str, tmp_path: Path) -> None:
    """The same sum leaves again to the bit, and is noted; another one is refused."""
    driver = driver_of(name, tmp_path / "run")
    driver.save()
    released = go(driver, 3)
    driver.ledger.flush()
    driver.kill()
    again = driver_of(name, tmp_path / "run")
    if again.passes_over:
        assert (again.at, again.released) == (3, 3)
        assert [note["step"] for note in again.ledger.notes("skip")] == [0, 1, 2]
        again = restarted(again, name, tmp_path / "run")
        finish(again, tmp_path / "run", lives=3)
        return
    assert (again.at, again.released) == (0, 3)
    other = rows_of(0, 16)
    other[1] *= 0.5
    with pytest.raises(ReplayRefused):
        again.step(other, ids_of(0))
    again.kill()
    again = driver_of(name, tmp_path / "run")
    assert all(np.array_equal(a, b) for a, b in zip(released, go(again, 3)))
    assert [note["step"] for note in again.ledger.notes("replay")] == [0, 1, 2]
    finish(again, tmp_path / "run", lives=2 + driver.first_lives)


def restarted(driver: Driver, name: str, folder: Path) -> Driver:
    """Kill it and come back: what was passed over stays so, and nothing is passed over twice."""
    driver.kill()
    again = driver_of(name, folder)
    assert [note["step"] for note in again.ledger.notes("skip")] == [0, 1, 2]
    assert again.at == 3
    return again


def finish(driver: Driver, folder: Path, *, lives: int) -> None:
    go(driver, STEPS - 3)
    driver.close()
    verdict = verify(driver.evidence(folder))
    assert (verdict.answer, verdict.lives) == ("PROVED", lives), verdict.words()


@every_driver
def test_first_save(name: str, tmp_path: Path) -> None:
    """A run that was saved before its first step, and killed, begins where it was."""
    driver = driver_of(name, tmp_path / "run")
    driver.save()
    driver.kill()
    again = driver_of(name, tmp_path / "run")
    assert (again.at, again.released) == (0, 0)
    go(again, 3)
    again.save()
    finish(again, tmp_path / "run", lives=1 + driver.first_lives)


@every_driver
def test_copy(name: str, tmp_path: Path) -> None:
    """Two continuations of one folder: the noise between them is that of two draws."""
    driver = driver_of(name, tmp_path / "run", plan_of(identity()), WIDE)
    go(driver, 2, WIDE)
    driver.save()
    driver.kill()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    ends = []
    for path in ("run", "copy"):
        again = driver_of(name, tmp_path / path, plan_of(identity()), WIDE)
        assert again.at == 2
        ends.append(go(again, 1, WIDE)[0])
        again.kill()
    gap = (ends[0] - ends[1]).std() / (math.sqrt(2) * SCALE)
    assert abs(gap - 1) < 6 / math.sqrt(2 * WIDE)


@every_driver
def test_wrong_ids(name: str) -> None:
    """A unit that took part already is refused before any sum of its batch is made."""
    driver = driver_of(name, None)
    go(driver, 1)
    before = driver.sums()
    kind, words = driver.refusal
    with pytest.raises(kind, match=words):
        driver.wrong()
    assert driver.sums() == before
    assert (driver.at, driver.released) == (1, 1)
    go(driver, 1)
    assert driver.released == 2


@every_driver
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan(name: str, bad: float) -> None:
    """A unit that is not finite contributes zero (or is refused), and noise and steps go on."""
    driver, rows = driver_of(name, None, plan_of(noise=0.0)), rows_of(0, 16)
    rows[2, 3] = bad
    if driver.refuses_nan:
        with pytest.raises(InvalidInput, match=f"got {bad}"):
            driver.step(rows, ids_of(0))
        return
    expected = rows_of(0, 16)[[0, 1, 3]].sum(0)
    np.testing.assert_allclose(driver.step(rows, ids_of(0)), expected, rtol=1e-5, atol=1e-6)
    (value,) = go(driver, 1)
    np.testing.assert_allclose(value, rows_of(1, 16).sum(0), rtol=1e-5, atol=1e-6)
    assert driver.released == 2


@every_driver
def test_epsilon(name: str, tmp_path: Path) -> None:
    """ε of every prefix: the plan's, the run's, the statement's and the verdict's are one."""
    driver = driver_of(name, tmp_path / "run", plan_of(tree("full")))
    plan = driver.fit(plan_of(tree("full")))
    run = driver.evidence(tmp_path / "run")
    for steps in range(1, STEPS + 1):
        go(driver, 1)
        assert driver.epsilon() == plan.epsilon_after(steps)
        assert driver.statement().epsilon == plan.epsilon_after(steps)
        if driver.has_folder:
            driver.save()
            assert verify(run).epsilon == plan.epsilon_after(steps)
    if driver.has_folder:
        driver.close()
        told = json.loads((run / "statement.json").read_text())
        assert told["epsilon"] == plan.epsilon()


@every_driver
@pytest.mark.parametrize("kind", ["tree", "blt"])
def test_noise_law(name: str, kind: str) -> None:
    """Covariance over time against that of the plan; it would be noticed at 2/3 and 3/2."""
    strategy = tree() if kind == "tree" else blt(decays=(0.9, 0.5), scales=(0.1, 0.2))
    plan = DRIVERS[name]().fit(plan_of(strategy))
    if plan.strategy != strategy:
        pytest.skip(f"this driver takes {plan.strategy} only")
    driver = driver_of(name, None, plan, WIDE)
    sums = np.stack([rows_of(step, WIDE).sum(0) for step in range(STEPS)])
    noise = np.stack(go(driver, STEPS, WIDE)) - sums
    found, rows = noise @ noise.T / WIDE, strategy.noising(STEPS)

    def agrees(scale: float) -> bool:
        """Every entry within 7 of its deviations: a chance of 10⁻¹⁰ to fail if it is right."""
        expected = scale**2 * rows @ rows.T
        power = np.outer(np.diag(expected), np.diag(expected))
        return bool((np.abs(found - expected) < 7 * np.sqrt((power + expected**2) / WIDE)).all())

    assert agrees(SCALE)
    assert not agrees(SCALE * 2 / 3)
    assert not agrees(SCALE * 3 / 2)


@every_driver
def test_grid(name: str) -> None:
    """Released values lie on the public grid of the noise, whatever the sums are."""
    rng = np.random.default_rng(0)

    def rough(step: int, width: int) -> np.ndarray:
        return rng.uniform(-1, 1, (4, width)) / (2 * math.sqrt(width))  # not on any grid

    driver = driver_of(name, None, plan_of(identity()), WIDE)
    for value in go(driver, STEPS, WIDE, rough):
        in_steps = value / grid_step(SCALE)
        assert np.abs(in_steps - np.round(in_steps)).max() < 1e-3


@every_driver
def test_secret_positions(name: str, tmp_path: Path) -> None:
    """Who was drawn when is in the folder while the run lives, and in no file of it when sealed."""
    driver, folder = DRIVERS[name](), tmp_path / "run"
    given = driver.fit(plan_of(identity()))
    is_banded = given.strategy == identity()  # any strategy is accounted for under balls in bins
    rule = positions.FEW_OF_MANY if is_banded else BallsInBins(1, STEPS)
    accountant = "fourier" if is_banded else "bins"
    plan = replace(given, participation=rule, accountant=accountant)
    driver.build(folder, plan, None, 16)
    sampler = driver.sampler(positions.MANY if is_banded else 40)
    drawn = [sampler.draw(step) for step in range(STEPS)]
    for step, ids in enumerate(drawn):
        driver.step(rows_of(step, 16, len(ids)), ids.tolist())
        if step % 2:
            driver.save()
    driver.ledger.flush()
    before = verify(driver.evidence(folder))
    assert before.answer == "PROVED", before.words()
    assert positions.shown(folder, drawn)
    driver.close()
    assert positions.shown(folder, drawn) == []
    verdict = verify(driver.evidence(folder))
    assert (verdict.answer, verdict.epsilon) == ("PROVED", before.epsilon), verdict.words()
    assert f"before the keys were destroyed: the secret draws of {STEPS} steps" in verdict.checked


Kills = Callable[[str, Path, int], None]


@pytest.fixture(scope="module")
def killed() -> Iterator[Kills]:
    """A process that forks runs, kills them, brings them to their end and tells what it found."""
    with tempfile.TemporaryFile("w+") as errors:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.release.contract"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )

        def ask(name: str, folder: Path, count: int) -> None:
            assert server.stdin is not None
            assert server.stdout is not None
            with suppress(BrokenPipeError):
                print(json.dumps([name, str(folder), count]), file=server.stdin, flush=True)
            line = server.stdout.readline()
            if not line:
                errors.seek(0)
                pytest.fail(errors.read()[-3000:])
            results, epsilon = json.loads(line)
            assert sum(one["lives"] - 1 for one in results) >= count
            for one in results:
                assert isinstance(one["said"], int), one
                assert one["answer"] == "PROVED", one["words"]
                assert one["twice"] == [], one  # no step was ever released with two values
                assert one["steps"] == 8
                assert one["epsilon"] == epsilon

        try:
            yield ask
        finally:
            server.kill()
            server.communicate()


@every_driver
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill(name: str, tmp_path: Path, killed: Kills) -> None:
    """SIGKILL anywhere, also inside a transaction: it goes on, and is proved in the end.

    One kill here, thirty of them on request.
    """
    killed(name, tmp_path, 1)


@pytest.mark.slow
@every_driver
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_thirty_times(name: str, tmp_path: Path, killed: Kills) -> None:
    killed(name, tmp_path, 30)


def test_named_sums_are_matched_by_name() -> None:
    """A mapping that comes in another order used to be added to the wrong names."""
    sums = PrivateSum(plan_of(noise=0.0), clip=100.0)
    first = sums.add({"a": [[1.0, 2.0]], "b": [[3.0]]}, ids=[1])
    second = sums.add({"b": [[3.0]], "a": [[1.0, 2.0]]}, ids=[2])
    for name in ("a", "b"):
        assert first[name].tolist() == second[name].tolist()


@pytest.mark.parametrize("words", ["feature_bound = 1, got 3", "labels"])
def test_a_solver_refuses_rows_and_labels_outside_the_bounds_of_its_loss(words: str) -> None:
    x, y = np.ones((4, 1)), np.ones(4)
    if words == "labels":
        y[2] = 0.5
    else:
        x[2] = 3.0
    with pytest.raises(InvalidInput, match=words):
        ftrl(hinge(), x, y, epsilon=1.0, delta=1e-6)
