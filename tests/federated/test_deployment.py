"""A real deployment on loopback: SuperLink, two SuperNodes, the app of examples/federated.

    round 0   both users answer
    round 1   a SuperNode and its client are killed at work, then SuperLink and server: its outcome
              is unknown to whoever starts everything again, so its noise is skipped
    round 2   under new node ids; a SuperNode and its client are killed at work, and the round goes
              on without that user

Killed is SIGKILL throughout. What comes out is, bit for bit, a run that was never stopped and that
gives round 1 up. Clients wait at a gate (a file that says they have arrived, a file that lets them
go on), so nothing depends on how fast the machine is; what is awaited are files, lines of logs and
ends of processes, and a process that ends before its time fails the test at once. Every process is
ended by its number. Who was silent is read from the log: a machine that misses heartbeats may lose
more answers than the one that was killed.

All processes are forked from a warm one (`warm.py`). A client that comes a second time for the same
round finds the gate as it was.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.warm import Forked, Warm

from noshuffle.federated import observed_participation, read_log, simulate
from noshuffle.release.folder import RunFolder
from noshuffle.release.log import read
from noshuffle.release.verify import verify

pytest.importorskip("flwr", reason="needs the extra 'federated'")

APP = Path(__file__).parents[2] / "examples" / "federated"
BIN = Path(sys.executable).parent
LIMIT = 14_400.0  # seconds, lest a fault wait for ever; an idle machine needs some minutes

#: Put behind the app's client: user u in round n says that it has arrived, and waits.
GATE = """

def gate(context: Context) -> None:
    import time

    folder, user = Path({folder!r}), partition_of(context)
    number = Path("{run}/log.jsonl").read_text().count('"kind":"step"') - 1
    (folder / f"arrived-{{user}}-{{number}}").touch()
    while not (folder / f"go-{{user}}-{{number}}").exists():
        time.sleep(0.05)


app = task_client(parts_of, timer=gate)
"""

pytestmark = [
    pytest.mark.skipif(not (BIN / "flower-superlink").exists(), reason="no Flower commands here"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to end processes"),
]

SETTINGS: dict[str, Any] = {
    "task": "toy",
    "users": 2,
    "rounds": 4,
    "cohort-size": 2,
    "at-least": 2,
    "min-separation": 1,
    "max-participations": 3,
    "local-steps": 2,
    "wait": LIMIT,
    "test-seed": 11,
}


def free_port() -> int:
    """Below those that the system gives to connections, or one would take it before it is used.

    By the clock: where nobody watches, the system's chance is the same in every run (`Entropy`),
    and two runs on one machine would take the same port.
    """
    for port in random.Random(time.time_ns()).sample(range(10_000, 30_000), 1000):
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port on this machine")


def children_of(pid: int) -> list[int]:
    """All processes below this one, nearest first."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            after_name = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(after_name[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += (below := parents.get(todo.pop(0), []))
        found += below
    return found


class Network:
    """Flower's processes in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.end_at = time.monotonic() + LIMIT
        self.alive: list[Forked] = []
        self.started = 0
        home = folder / "home"
        home.mkdir()
        self.gate = folder / "gate"
        self.gate.mkdir()
        self.app = folder / "app"
        shutil.copytree(APP, self.app, ignore=shutil.ignore_patterns("__pycache__"))
        client = self.app / "noshuffle_app" / "client_app.py"
        gate = GATE.format(folder=str(self.gate), run=folder / "run")
        client.write_text(client.read_text() + gate)
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.env = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            # What is tested here, also where it is found by a relative path.
            "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        }
        self.warm = Warm(folder, self.env)

    def start(self, *command: str) -> Forked:
        """A command of Flower, with a log of its own."""
        self.started += 1
        process = self.warm.start(command, self.folder / f"{self.started}-{command[0]}.log")
        self.alive.append(process)
        return process

    def until(self, what: str, is_so: Callable[[], object], *, ending: object = None) -> None:
        """Wait for a fact; nothing but the process `ending` may end meanwhile."""
        while not is_so():
            dead = [p.command for p in self.alive if p is not ending and p.has_ended()]
            if dead or time.monotonic() > self.end_at:
                logs = "\n".join(f"== {p.command}\n{p.said()[-3000:]}" for p in self.alive)
                why = f"{dead} ended" if dead else f"{LIMIT:.0f} s are over"
                pytest.fail(f"no {what}: {why}\n{logs}")
            time.sleep(0.2)

    def let_go(self, user: int, *numbers: int) -> None:
        """Open the gate for a user in these rounds."""
        for number in numbers:
            (self.gate / f"go-{user}-{number}").touch()

    def up(self) -> tuple[Forked, ...]:
        """SuperLink first, then two SuperNodes that connect at once."""
        link = self.start(
            "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port),
            "--database", str(self.folder / "state.db"),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.until("SuperLink", lambda: "Uvicorn running" in link.said())
        nodes = [
            self.start(
                "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
                "--host", "127.0.0.1", "--port", str(free_port()),
                "--node-config", f"partition-id={i} num-partitions=2",
            )
            for i in range(2)
        ]  # fmt: skip
        for node in nodes:
            self.until("SuperNode", lambda node=node: "SuperNode ID" in node.said())  # type: ignore[misc]
        return link, *nodes

    def run(self, **settings: Any) -> Forked:
        words = [f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items()]
        return self.start(
            "flwr", "run", str(self.app), "here", "--stream", "--run-config", " ".join(words)
        )

    def kill(self, process: Forked) -> None:
        """This process and what it started, each by its number, without a last word."""
        below = children_of(process.pid)
        process.kill()
        for pid in below:
            with suppress(OSError):
                if b"warm.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        assert process.has_ended(timeout=LIMIT)
        self.alive.remove(process)

    def arrived(self, user: int, number: int) -> bool:
        """Whether a client has come to the gate in this round."""
        return (self.gate / f"arrived-{user}-{number}").exists()


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    net = Network(folder)
    try:
        yield net
    finally:
        for process in list(net.alive):
            net.kill(process)
        net.warm.close()


def charged(folder: Path) -> int:
    """Rounds whose row is in the log."""
    return sum(row["kind"] == "step" for row in read(folder / "log.jsonl"))


def test_killed_clients_and_killed_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    settings = {**SETTINGS, "run-folder": str(folder)}
    with network(tmp_path) as net:
        net.let_go(0, *range(3))
        net.let_go(1, 0)
        link, node_0, node_1 = net.up()
        first = net.run(**settings, timeout=LIMIT)
        net.until("user 1 in round 1", lambda: net.arrived(1, 1))
        # The round waits for an answer that never comes, so the server is in the middle of it.
        for process in (node_1, link, first, node_0):
            net.kill(process)
        before = first.said()
        assert charged(folder) == 2
        assert RunFolder(folder).saved()[-1].name.endswith("1"), before

        link, node_0, node_1 = net.up()
        second = net.run(**settings, **{"timeout": LIMIT, "stop-after": 3})
        # A machine that misses heartbeats may have given the user up before.
        is_over = lambda: net.arrived(1, 2) or second.has_ended()  # noqa: E731
        net.until("user 1 in round 2", is_over, ending=second)
        net.kill(node_1)
        # The SuperLink notices within a minute or so, and answers in place of the node.
        net.until("end", lambda: second.has_ended(), ending=second)
        after = second.said()

    assert "round 1: its outcome is unknown; its noise is skipped" in after, after
    assert "round 2: user 1 sent no update" in after, after  # by name, not as node 1
    told = re.findall(r"round (\d+): silent (\[[\d, ]*\])", before + after)
    silent = {int(number): json.loads(users) for number, users in told}
    assert {2} <= silent.keys() <= {0, 2}, before + after
    assert 1 in silent[2]
    nodes = re.findall(
        r"SuperNode ID: (\d+)", "".join(p.read_text() for p in tmp_path.glob("*.log"))
    )
    assert len(set(nodes)) == 4  # nobody kept its node id

    monkeypatch.syspath_prepend(str(APP))
    task_module = importlib.import_module("noshuffle_app.task")
    server_module = importlib.import_module("noshuffle_app.server_app")
    defaults = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config = {**defaults, **SETTINGS}
    ended = server_module.rounds_of(config, run=folder)
    assert ended.resume() == ()
    log = read_log(folder)
    assert [users.tolist() for users in log] == [[0, 1]] * 3  # the lost round is charged too
    assert observed_participation(log).max_participations == config["max-participations"]
    assert ended.begin([0, 1]) is None  # nobody is free for the last round
    assert verify(folder).refuted == ()

    # The same rounds in this process, all clients together, never stopped; round 1 is given up.
    context = type("Context", (), {"run_config": config})
    task, model, local, loss_fn = task_module.parts_of(context)

    def straight(silent: dict[int, list[int]]) -> dict[str, torch.Tensor]:
        rounds = server_module.rounds_of(config, run=None)
        for until in (1, 3):
            simulate(
                rounds, model, task, local=local, loss_fn=loss_fn, until=until,
                check_ins=lambda step: log[step],
                answers=lambda step, user: user not in silent[step],
            )  # fmt: skip
            if until == 1:
                assert rounds.begin(log[1]) is not None
                rounds.abandon()
        parameters: dict[str, torch.Tensor] = rounds.server.parameters()
        return parameters

    # The line on round 0 comes some seconds later, and may have died with the server.
    first_silent = [silent[0]] if 0 in silent else [[], [0], [1], [0, 1]]
    got = ended.server.parameters()
    twins = [straight({**silent, 0: users}) for users in first_silent]
    same = [all(torch.equal(got[name], twin[name]) for name in twin) for twin in twins]
    assert sum(same) == 1, (silent, before + after)
