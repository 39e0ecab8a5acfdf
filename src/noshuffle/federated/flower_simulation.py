"""A task on Flower's own simulation (Ray), by the call of `simulate`.

Every user is a virtual node; actors train them one by one, with the arithmetic that each has among
others in `simulate` (of which the number of threads is a part: Ray gives an actor as many as
`cpus_per_client`), so that for the same check-ins and key the parameters are the same bits. The
in-process simulation is quicker by far.

State: a temporary file with task and model, which each actor reads once.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import nn

from noshuffle.errors import Unsupported, positive, whole
from noshuffle.federated.clients import LocalTraining, LossFn, cross_entropy
from noshuffle.federated.flower import PrivateStrategy
from noshuffle.federated.flower_client import Parts, task_client
from noshuffle.federated.flower_identity import Handshake
from noshuffle.federated.rounds import Rounds
from noshuffle.federated.simulate import CheckIns, Course, RoundProgress, Simulation
from noshuffle.federated.tasks import FederatedTask
from noshuffle.federated.telemetry import need_flower
from noshuffle.release.facts import SIMULATED

#: Longest folder for temporary files in which Ray's sockets have names that the system takes.
_LONGEST = 107 - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")


def run_flower_simulation(
    rounds: Rounds,
    model: nn.Module,
    task: FederatedTask,
    *,
    local: LocalTraining,
    check_ins: CheckIns,
    until: int | None = None,
    loss_fn: LossFn = cross_entropy,
    vectorise: bool | None = None,
    progress: Callable[[RoundProgress], None] | None = None,
    cpus_per_client: int = 1,
    timeout: float = 3600.0,
) -> Simulation:
    """`simulate` on Flower's engine: the same arguments, the same result.

    `cpus_per_client` is what Ray reserves for one actor; there are as many actors as fit. A client
    that has not answered after `timeout` seconds counts as silent. If fewer users are free than
    `rounds` insists on, the simulation ends early.
    """
    need_flower()
    whole(cpus_per_client=cpus_per_client)
    positive(timeout=timeout)
    course = Course(rounds, until=until, progress=progress)
    identities = Handshake(kind=type(task.users[0]), known=task.users, timeout=timeout)
    identities.user_identity = SIMULATED
    strategy = PrivateStrategy(
        rounds, identities=identities, check_ins=check_ins, wait=0.0, on_round=course.tell
    )
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        end = time.monotonic() + timeout
        while len(set(grid.get_node_ids())) < len(task) and time.monotonic() < end:
            time.sleep(0.1)  # Flower makes its nodes while this is already running
        strategy.start(grid, num_rounds=course.last, timeout=timeout)

    with tempfile.TemporaryDirectory(prefix="noshuffle-") as folder, _ray():
        parts = task, copy.deepcopy(model).cpu(), local, loss_fn
        client = task_client(_PartsFile(Path(folder) / "parts", parts), vectorise=vectorise)
        _simulate(server_app, client, nodes=len(task), cpus=cpus_per_client)
    return course.result()


def _simulate(server_app: ServerApp, app: ClientApp, *, nodes: int, cpus: int) -> None:
    """Flower's entry from Python."""
    run_simulation(
        server_app,
        app,
        num_supernodes=nodes,
        backend_config={"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}},
    )


@contextmanager
def _ray() -> Iterator[None]:
    """Ray, started before the first round is open, unless somebody has started it.

    If Flower started it, after its server, that would wait an hour for clients that never come
    where Ray does not start (flwr 1.41).
    """
    import ray

    if ray.is_initialized():
        yield
        return
    paths = os.pathsep.join([*sys.path, *filter(None, [os.environ.get("PYTHONPATH")])])
    with _short_folder() as folder:
        own: dict[str, Any] = {} if folder is None else {"_temp_dir": folder}
        try:
            ray.init(
                include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}}, **own
            )
        except Exception as error:
            ray.shutdown()
            words = " ".join(str(error).split())[:300]
            raise Unsupported(
                f"Ray, on which Flower simulates, did not start: {words}; try again, set "
                "RAY_TMPDIR to a short path that can be written, or take the engine process"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _short_folder() -> Iterator[str | None]:
    """Where Ray keeps its sockets: a folder in /tmp if its own would be no name of a socket.

    Ray 2.55 takes $TMPDIR, adds up to 68 characters, and does not start beyond 107; with a space in
    the path its processes do not find each other. None: its own will do.
    """
    own = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if len(os.fsencode(own)) <= _LONGEST and not re.search(r"\s", own):
        yield None
        return
    try:
        made = tempfile.TemporaryDirectory(prefix="ns-", dir="/tmp", ignore_cleanup_errors=True)
    except OSError as error:
        raise Unsupported(
            f"Ray, on which Flower simulates, needs a folder for temporary files of at most "
            f"{_LONGEST} characters without spaces, got {own!r} (and /tmp: {error.strerror}); set "
            "RAY_TMPDIR"
        ) from None
    with made as folder:
        yield folder


@lru_cache(maxsize=1)
def _unpacked(path: str) -> Parts:
    from ray import cloudpickle

    parts: Parts = cloudpickle.loads(Path(path).read_bytes())
    return parts


class _PartsFile:
    """The parts in a file: Ray sends the app along with every message, so it must be small."""

    def __init__(self, path: Path, parts: Parts) -> None:
        from ray import cloudpickle  # takes models and losses of a notebook too

        self._path = str(path)
        path.write_bytes(cloudpickle.dumps(parts))  # type: ignore[no-untyped-call]

    def __call__(self, context: Context) -> Parts:
        return _unpacked(self._path)
