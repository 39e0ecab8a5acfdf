"""A real deployment on loopback: SuperLink, two SuperNodes, the app of examples/federated.

Three rounds; one client is ended while it works on the second; then the server and everything else
is killed, started again, and the run goes on under new node ids. What comes out is, bit for bit,
the run that was never stopped. Every wait has a limit, every process is ended by its number.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from noshuffle.federated import observed_participation, simulate
from noshuffle.training import checkpoint
from noshuffle.training.verify import verify

pytest.importorskip("flwr", reason="needs the extra 'federated'")

APP = Path(__file__).parents[2] / "examples" / "federated"
BIN = Path(sys.executable).parent
LIMIT = 480.0  # seconds for everything; an idle machine needs about a fifth of it

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
    "timeout": 300.0,
    "wait": 3.0,
    "test-seed": 11,
}


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
        self.alive: list[subprocess.Popen[bytes]] = []
        self.started = 0
        home = folder / "home"
        home.mkdir()
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
        }

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return Path(str(process.args[-1])).read_text(errors="replace")  # type: ignore[index]

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        self.started += 1
        path = self.folder / f"{self.started}-{Path(command[0]).name}.log"
        with path.open("wb") as out:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env=self.env, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        process.args = [*command, str(path)]
        self.alive.append(process)
        return process

    def until(self, what: str, is_so: Callable[[], object]) -> None:
        while not is_so():
            if time.monotonic() > self.end_at:
                logs = "\n".join(f"== {p.args}\n{self.log(p)[-3000:]}" for p in self.alive)
                pytest.fail(f"no {what} after {LIMIT} s\n{logs}")
            time.sleep(0.2)

    def up(self) -> tuple[subprocess.Popen[bytes], ...]:
        """SuperLink first, then two SuperNodes that connect at once."""
        link = self.start(
            "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port),
            "--database", str(self.folder / "state.db"),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.until("SuperLink", lambda: "Uvicorn running" in self.log(link))
        nodes = [
            self.start(
                "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
                "--host", "127.0.0.1", "--port", str(free_port()),
                "--node-config", f"partition-id={i} num-partitions=2",
            )
            for i in range(2)
        ]  # fmt: skip
        for node in nodes:
            self.until("SuperNode", lambda node=node: "SuperNode ID" in self.log(node))  # type: ignore[misc]
        return link, *nodes

    def run(self, **settings: Any) -> subprocess.Popen[bytes]:
        words = [f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items()]
        return self.start(
            "flwr", "run", str(APP), "here", "--stream", "--run-config", " ".join(words)
        )

    def end(self, process: subprocess.Popen[bytes], *, how: signal.Signals) -> None:
        """This process and what it started, each by its number."""
        below = children_of(process.pid)
        process.send_signal(how)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=20)
        for pid in below:
            with suppress(OSError):
                if b"fl" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self.alive.remove(process)


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    net = Network(folder)
    try:
        yield net
    finally:
        for process in list(net.alive):
            net.end(process, how=signal.SIGKILL)


def charged(folder: Path) -> int:
    """Rounds whose intent is on the disk."""
    path = folder / "ledger.sqlite"
    if not path.exists():
        return 0
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT count(*) FROM steps").fetchone()[0])
    return 0


def test_killed_client_and_stopped_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    settings = {**SETTINGS, "run-folder": str(folder)}
    with network(tmp_path) as net:
        link, node_0, node_1 = net.up()
        first = net.run(**settings, **{"stop-after": 2})
        net.until("second round", lambda: charged(folder) == 2)
        net.end(node_1, how=signal.SIGTERM)
        net.until("end of the first run", lambda: first.poll() is not None)
        before = net.log(first)
        for process in (first, node_0, link):
            net.end(process, how=signal.SIGKILL)
        assert checkpoint.saved(folder / "checkpoints")[-1].name.endswith("2"), before

        link, node_0, node_1 = net.up()
        second = net.run(**settings)
        net.until("end of the second run", lambda: second.poll() is not None)
        after = net.log(second)

    assert "round 3: asked 2, answered 2" in after, after
    assert "round 4: too few users are free" in after, after  # both have taken part three times
    told = re.findall(r"round (\d+): silent (\[[\d, ]*\])", before + after)
    silent = {int(number) - 1: json.loads(users) for number, users in told}
    assert silent == {0: [], 1: [1], 2: []}, before + after
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
    cohorts = [ended.server.ledger.row(step).units.tolist() for step in range(3)]
    assert cohorts == [[0, 1]] * 3
    seen = observed_participation(cohorts)
    assert seen.max_participations <= config["max-participations"]
    assert verify(folder).failures == ()

    # The same three rounds, never stopped, in this process.
    context = type("Context", (), {"run_config": config})
    task, model, local, loss_fn = task_module.parts_of(context)
    straight = simulate(
        server_module.rounds_of(config, run=None), model, task, local=local, loss_fn=loss_fn,
        check_ins=lambda step: cohorts[step], until=3, vectorise=False,
        answers=lambda step, user: user not in silent[step],
    )  # fmt: skip
    for name, value in straight.parameters.items():
        assert torch.equal(ended.server.parameters()[name], value), name
