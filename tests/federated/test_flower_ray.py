"""Flower's own simulation gives the bits of ours, for the same check-ins."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.federated.blobs import a_model, a_task

from noshuffle import MinSeparation, Plan
from noshuffle.errors import Unsupported
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, simulate
from noshuffle.federated.simulate import RoundProgress, in_random_order
from noshuffle.noise import test_source as a_source

pytest.importorskip("flwr", reason="needs the extra 'federated'")
pytest.importorskip("ray", reason="needs the extra 'federated'")

from noshuffle.federated import flower_simulation
from noshuffle.federated.flower_simulation import run_flower_simulation

LOCAL = LocalTraining(learning_rate=0.5, steps=3, batch_size=4, epochs=2, proximal=0.1)


@pytest.fixture
def _ray() -> Iterator[None]:
    """Ray as Flower starts it, which it does not if there is one.

    With one actor: to start it is most of the work. Ray gives its processes half a minute, a fixed
    number: a machine that is busy enough needs more, which says nothing of what is tested here.
    """
    import ray

    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(5):
        try:
            ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": paths})
            break
        except Exception as error:
            ray.shutdown()
            if "timed out" not in (said := str(error)):
                raise
    else:
        pytest.skip(f"Ray did not start in time on this machine, five times: {said}")
    yield
    ray.shutdown()


def a_run(run: Path | None) -> Rounds:
    plan = Plan.fit(MinSeparation(4, 2, 2), mechanism="blt", noise_multiplier=0.3, unit="user")
    server = ServerOptimizer(
        a_model(),
        plan,
        clip=1.0,
        cohort_size=3,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
        source=a_source(seed=2),
        run=run,
    )
    return Rounds(server)


@pytest.mark.usefixtures("_ray")
def test_ray_and_in_process_are_the_same_run(tmp_path: Path) -> None:
    task, seen = a_task(6, held_out=20), list[RoundProgress]()
    order = in_random_order(task.users, seed=1)
    expected = simulate(a_run(None), a_model(), task, local=LOCAL, check_ins=order, vectorise=True)
    # One round here, the rest on Flower: the engine may change in the middle of a run.
    simulate(a_run(tmp_path), a_model(), task, local=LOCAL, check_ins=order, until=1, at_once=2)
    got = run_flower_simulation(
        a_run(tmp_path), a_model(), task, local=LOCAL, check_ins=order, progress=seen.append
    )
    assert got.is_complete
    assert [p.report.step for p in seen] == [1, 2, 3]
    assert all(p.report.silent == () and p.report.refused == () for p in seen)
    assert got.users == expected.users
    for name, value in expected.parameters.items():
        assert torch.equal(got.parameters[name], value), name


@pytest.mark.parametrize(
    ("own", "is_taken"),
    [("/tmp", True), ("/tmp/" + "x" * 34, True), ("/tmp/" + "x" * 35, False), ("/tmp/a b", False)],
)
def test_sockets_of_ray_get_names_that_the_system_takes(
    own: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", own)
    with flower_simulation._short_folder() as folder:
        if is_taken:
            assert folder is None
        else:
            assert folder is not None
            assert Path(folder).is_dir()
            assert len(folder) < 20
    assert folder is None or not Path(folder).exists()


def test_ray_that_does_not_start_is_one_line_before_the_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower's server would wait an hour for clients that never come."""
    import ray

    def fails(**_: object) -> None:
        raise OSError("AF_UNIX path length cannot exceed\n107 bytes")

    monkeypatch.setattr(ray, "init", fails)
    task, rounds = a_task(6, held_out=20), a_run(None)
    with pytest.raises(Unsupported, match=r"did not start: AF_UNIX path .* exceed 107 bytes; try"):
        run_flower_simulation(
            rounds, a_model(), task, local=LOCAL, check_ins=in_random_order(task.users, seed=1)
        )
    assert rounds.server.round == 0
