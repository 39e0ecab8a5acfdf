"""Flower's commands in forks of one process that has imported what all of them need.

    warm = Warm(folder, env)                          imports Flower, torch and noshuffle, once
    process = warm.start(["flower-superlink", …], log)

A deployment of two rounds starts some twenty-five processes, and each would spend seconds on the
same imports. What runs is otherwise as Flower 1.41 starts it: one process per command, its output
in a log, SIGKILL at any time. The app is not among the imports: every process installs and imports
it for itself.

    this process ── warm ─┬─ flower-superlink ── helper ─┬─ flower-superexec
                          │                              └─ flwr-serverapp
                          └─ flower-supernode ── helper ─┬─ flower-superexec
                                                         └─ flwr-clientapp, once per message

A process that has threads is not forked: what a command starts is forked by its helper, which
the command made before its first thread. All that a command started is below it, so whoever kills
the processes below a command kills them all.

Flower 1.41 gives up a client that has not said a word 30 s after it was asked for, which may be
less than a machine that is ten times overloaded needs, and starts it again, for ever; there is no
option for it, so the constant is set here.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

COMMANDS = [
    "flower-superlink",
    "flower-supernode",
    "flower-superexec",
    "flwr",
    "flwr-serverapp",
    "flwr-clientapp",
]
#: What the commands and the app import later, when they need it.
LATER = [
    "noshuffle.federated.flower",
    "noshuffle.federated.flower_client",
    "noshuffle.federated.flower_identity",
    "noshuffle.federated.flower_wire",
    "noshuffle.federated.simulate",
    "noshuffle.federated.tasks",
    "noshuffle.training.models",
    "torch._dynamo",
]
#: Modules of Flower that start processes, and those that wait for a first word.
STARTING = [
    "flwr.superlink.cli.flower_superlink",
    "flwr.supernode.start_client_internal",
    "flwr.supercore.superexec.executor.subprocess_executor",
]
WAITING = [
    "flwr.supercore.corestate.in_memory_corestate",
    "flwr.supercore.corestate.sql_corestate",
]


class Forked:
    """A command that was started, known by its number until it has ended."""

    def __init__(self, pid: int, command: Sequence[str], log: Path) -> None:
        self.pid, self.command, self.log = pid, tuple(command), log
        try:
            self._fd = os.pidfd_open(pid)  # another process of this number is never taken for it
        except ProcessLookupError:
            self._fd = -1

    def has_ended(self, *, timeout: float = 0.0) -> bool:
        if self._fd >= 0 and select.select([self._fd], [], [], timeout)[0]:
            os.close(self._fd)
            self._fd = -1
        return self._fd < 0

    def said(self) -> str:
        """Its log; empty as long as it has none."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        if not self.has_ended():
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


class Warm:
    """The process that all commands are forked from."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], env=env, cwd=folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, command: Sequence[str], log: Path) -> Forked:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([*command, str(log)]), file=self._process.stdin, flush=True)
        return Forked(int(self._process.stdout.readline()), command, log)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def become(command: list[str]) -> None:
    """Run a command of Flower in this process; it never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    import_module("numpy").random.seed()  # Python's own generator has begun anew in the fork
    sys.argv = command
    (found,) = entry_points(group="console_scripts", name=command[0])
    sys.exit(found.load()())


def help_with_forks() -> None:
    """From now on, what Flower starts in this process and in its forks is forked by a helper."""
    ask, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()

    def start(command: list[str], *, stdout: int | None = None, **_: Any) -> None:
        ask.send(json.dumps([*command, stdout == subprocess.DEVNULL]).encode())

    stand_in = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    for name in STARTING:
        import_module(name).subprocess = stand_in  # type: ignore[attr-defined]
    if os.fork():
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended leave nothing behind
    while os.getppid() == parent:
        if select.select([asked], [], [], 0.5)[0]:
            *command, is_silent = json.loads(asked.recv(65_536))
            if not os.fork():
                if is_silent:
                    to_file(Path(os.devnull))
                become(command)
    os._exit(0)


def to_file(path: Path) -> None:
    """What this process says goes to a file; there is nothing to read."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, new in enumerate((nothing, out, out)):
        os.dup2(new, fd)
    os.close(out)
    os.close(nothing)


def main() -> None:
    """Fork a command for every line that comes in, and answer with its number."""
    for name in COMMANDS:
        (found,) = entry_points(group="console_scripts", name=name)
        found.load()
    for name in LATER:
        import_module(name)
    for name in WAITING:
        import_module(name).HEARTBEAT_DEFAULT_INTERVAL = 3600  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not forked"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        *command, log = json.loads(line)
        if not (pid := os.fork()):
            to_file(Path(log))
            help_with_forks()
            become(command)
        os.write(1, f"{pid}\n".encode())


if __name__ == "__main__":
    main()
