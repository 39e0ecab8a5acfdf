"""Threads that sleep between loops, imports without a collector, and an end at once."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterable
from unittest.mock import Mock

import pytest
import typer

from noshuffle import cli
from noshuffle.cli import start
from noshuffle.cli.application import application
from noshuffle.cli.commands import COMMANDS


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, start.SPINS),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_wait_as_the_user_says_else_shortly(
    given: dict[str, str], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever is set here
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    start.let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == wanted


def test_the_command_says_so_before_torch_is_loaded() -> None:
    program = (
        "import os, sys, noshuffle.cli as c\n"
        "said, tell = [], c.let_threads_sleep\n"
        "c.let_threads_sleep = lambda: (said.append('torch' in sys.modules), tell())\n"
        "sys.argv = ['noshuffle', '--version']\n"
        "try: c.run()\n"
        "except SystemExit: print(said, os.environ['GOMP_SPINCOUNT'])\n"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True
    ).stdout
    assert told.splitlines()[-1] == f"[False] {start.SPINS}"


def test_the_collector_is_off_for_imports_and_then_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was_on, frozen = gc.isenabled(), []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    try:
        gc.enable()
        with start.imports():
            assert not gc.isenabled()
        assert gc.isenabled()
        gc.disable()  # somebody else's choice
        with start.imports():
            pass
        assert not gc.isenabled()
    finally:
        (gc.enable if was_on else gc.disable)()
    assert frozen == [False]


@pytest.mark.parametrize("why_not", ["", "it failed", "no torch", "a thread", "a profiler", "pipe"])
def test_a_process_ends_at_once_where_nothing_is_left_to_do(
    why_not: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    threads = [threading.main_thread(), threading.Thread(daemon=True)]
    output = types.SimpleNamespace(flush=lambda: None)
    modules = {name: own for name, own in sys.modules.items() if name != "torch"}
    if why_not != "no torch":
        modules["torch"] = types.ModuleType("torch")
    if why_not == "a thread":
        threads.append(threading.Thread())
    if why_not == "pipe":
        output.flush = Mock(side_effect=BrokenPipeError)
    monkeypatch.setattr(sys, "modules", modules)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    monkeypatch.setattr(sys, "getprofile", lambda: print if why_not == "a profiler" else None)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: done.append("registered"))
    monkeypatch.setattr(os, "_exit", lambda status: done.append(f"left {status}"))
    status = 3 if why_not == "it failed" else 0
    with pytest.raises(SystemExit) as left:  # of a process that is still there
        start.leave(status)
    assert left.value.code == status
    wanted = {"": ["registered", "left 0"], "pipe": ["registered"]}
    assert done == wanted.get(why_not, [])


def test_what_a_process_wrote_and_registered_is_not_lost() -> None:
    program = (
        "import atexit, os, sys, types, noshuffle.cli.start as s\n"
        "class Late:\n"
        "    def __del__(self, write=os.write): write(1, b'taken apart')\n"
        "late, sys.modules['torch'] = Late(), types.ModuleType('torch')\n"
        "atexit.register(lambda: print('registered', end=' '))\n"
        "print('written', end=' ')\n"
        "s.leave(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "written registered "


@pytest.mark.parametrize(
    ("given", "wanted"), [(["epsilon", "--no-such"], ["epsilon"]), (["epsilom"], [])]
)
def test_only_the_command_that_is_asked_for_is_imported(
    given: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str | None] = []

    def spied(names: Iterable[str] = COMMANDS) -> typer.Typer:
        app = application(names)
        made.extend(command.name for command in app.registered_commands)
        return app

    monkeypatch.setattr("noshuffle.cli.application.application", spied)
    assert cli.main(given) == 2
    assert made == wanted


def test_the_trial_of_a_model_imports_no_computer_algebra() -> None:
    """torch brings sympy along where it can, half a second of every first step."""
    program = (
        "import sys, torch\n"
        "from noshuffle.clipping.factor import Flat\n"
        "from noshuffle.clipping.ghost import Ghost\n"
        "engine, x, y = Ghost(), torch.randn(4, 2), torch.tensor([0, 1, 0, 1])\n"
        "loss = torch.nn.CrossEntropyLoss()\n"
        "engine.clipped_sum(torch.nn.Linear(2, 2), loss, (x, y), clip=Flat(1.0))\n"
        "print(engine.fallbacks, 'sympy' in sys.modules)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert told == "[] False\n"
