"""Threads that sleep between loops, and imports without a collector."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from noshuffle.cli import start


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
