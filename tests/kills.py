"""Jobs in forks that are killed by a real SIGKILL, between any two calls of Python or C functions.

    said = child(job, None)         how many calls it makes, or its error
    said = child(job, said // 2)    "killed " and what it was at, or what it said if it ended before

Where nobody watches, a fork draws keys and looks by its name (`Entropy.go_on` of conftest):
the same calls in every run, so that a kill falls where it fell before. Everywhere else, and without
a name, they are the operating system's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.conftest import ENTROPY

#: What a process was at, by the innermost module of ours that was running.
PLACES = {
    "opening and keys": "release/opening release/folder release/keys release/run_ noise/source",
    "guard": "release/guard release/unit release/ledger.py",
    "clipped sum": "clipping/ training/step training/compiled federated/ convex/",
    "digest": "release/digest release/tags",
    "row of the ledger": "release/ledger_",
    "noise": "noise/",
    "files and checkpoints": "release/files release/checkpoint",
    "statement and seal": "release/seal release/spending release/facts statement plan release/ver",
}


def place_of(frame: Any) -> str:
    while frame is not None:
        _, ours, name = frame.f_code.co_filename.rpartition("/noshuffle/")
        for place, modules in PLACES.items():
            if ours and name.startswith(tuple(modules.split())):
                return place
        frame = frame.f_back
    return "elsewhere"


def child(
    job: Callable[[], None],
    kill_after: int | None,
    *,
    counts: Callable[[Any, str], bool] = lambda frame, event: True,
    name: str = "",
) -> int | str:
    """Run a job in a fork; the number of its calls, "killed" and where, or its error.

    `counts` says which events of the profiler are calls to count; all of them by default. `name`
    is that of what it draws, and differs between forks whose keys are to differ.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        if name:
            ENTROPY.go_on(name)
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += counts(frame, event)
            if calls == kill_after:
                os.write(write, place_of(frame).encode())
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            job()
            sys.setprofile(None)
            os.write(write, json.dumps(calls).encode())
        except BaseException as error:
            sys.setprofile(None)
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"killed {said.decode()}"
    found: int | str = json.loads(said)
    return found
